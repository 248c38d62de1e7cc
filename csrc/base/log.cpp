#include "base/log.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace cudasched::log {
namespace {

constexpr std::string_view kNames[] = {"error", "warning", "info", "debug"};

Level least_level() noexcept {
  const char* wanted = std::getenv("CUDASCHED_LOG");
  if (wanted != nullptr) {
    for (int level = 0; level < 4; ++level) {
      if (kNames[level] == wanted) return static_cast<Level>(level);
    }
  }
  return Level::kWarning;
}

}  // namespace

void write(Level level, std::string_view message) noexcept {
  if (level > least_level()) return;
  char line[1024];
  const int length = std::snprintf(line, sizeof line, "cudasched: %s: %.*s\n", kNames[static_cast<int>(level)].data(),
                                   static_cast<int>(message.size()), message.data());
  if (length <= 0) return;
  const std::size_t bytes =
      static_cast<std::size_t>(length) < sizeof line ? static_cast<std::size_t>(length) : sizeof line - 1;
  if (bytes == sizeof line - 1) line[bytes - 1] = '\n';
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, bytes);
}

}  // namespace cudasched::log
