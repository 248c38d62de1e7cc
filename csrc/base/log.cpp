#include "base/log.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace cudasched::log {
namespace {

constexpr std::string_view kNames[] = {"error", "warning", "info", "debug"};

constexpr int kFromEnvironment = -1;
constinit std::atomic<int> chosen_level{kFromEnvironment};

std::optional<Level> find_level(std::string_view name) noexcept {
  for (int level = 0; level < 4; ++level) {
    if (kNames[level] == name) return static_cast<Level>(level);
  }
  return std::nullopt;
}

Level least_level() noexcept {
  if (const int chosen = chosen_level.load(std::memory_order_relaxed); chosen >= 0) return static_cast<Level>(chosen);
  const char* wanted = std::getenv("CUDASCHED_LOG");
  return find_level(wanted == nullptr ? "" : wanted).value_or(Level::kWarning);
}

// A name or a path may be another program's choice: nothing in it is an order to the terminal.
void make_harmless(char* text, std::size_t bytes) noexcept {
  constexpr unsigned char kFirstOfC1 = 0xc2;
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < bytes ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if (byte < 0x20 || byte == 0x7f) text[i] = byte == '\n' || byte == '\t' ? ' ' : '?';
    if (byte == kFirstOfC1 && next >= 0x80 && next < 0xa0) text[i] = text[i + 1] = '?';
  }
}

}  // namespace

void set_level(std::string_view name) {
  const std::optional<Level> level = find_level(name);
  if (!level) throw ConfigError("log=" + std::string(name) + " has no meaning: it takes error, warning, info or debug");
  chosen_level.store(static_cast<int>(*level), std::memory_order_relaxed);
}

void write(Level level, std::string_view message) noexcept {
  if (level > least_level()) return;
  char line[1024];
  const int length = std::snprintf(line, sizeof line, "cudasched: %s: %.*s\n", kNames[static_cast<int>(level)].data(),
                                   static_cast<int>(message.size()), message.data());
  if (length <= 0) return;
  const std::size_t bytes =
      static_cast<std::size_t>(length) < sizeof line ? static_cast<std::size_t>(length) : sizeof line - 1;
  if (bytes == sizeof line - 1) line[bytes - 1] = '\n';
  make_harmless(line, bytes - 1);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, bytes);
}

}  // namespace cudasched::log
