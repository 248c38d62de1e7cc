#include "telemetry/journal.hpp"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"

namespace cudasched::telemetry {
namespace {

constexpr BlockFile::Format kJournalFormat{.magic = {'C', 'S', 'D', 'J', 'R', 'N', 'L', '\0'},
                                           .version = Journal::kVersion,
                                           .item_bytes = sizeof(Row),
                                           .block_magic = 0x4B4C'4243};  // "CBLK"

}  // namespace

Journal::Journal(const std::string& directory) {
  // A process that becomes another program (exec) keeps its pid, and begins another journal.
  const std::string base = directory + "/launches-" + std::to_string(getpid());
  for (int turn = 0; !file_.is_open(); ++turn) {
    path_ = base + "-" + std::to_string(turn) + ".journal";
    if (!file_.create(path_, kJournalFormat) && errno != EEXIST) {
      throw Error("launches cannot be collected: " + path_ + " cannot be written: " + std::strerror(errno));
    }
  }
}

bool Journal::append(Block type, std::uint32_t rows, std::initializer_list<std::span<const std::byte>> parts) noexcept {
  if (failed_) return false;
  const char* const why = file_.append(static_cast<std::uint32_t>(type), rows, parts);
  if (why == nullptr) return true;
  failed_ = true;
  std::array<char, 512> message{};
  std::snprintf(message.data(), message.size(), "collected launches cannot be written (%s); no more are collected",
                why);
  log::warning(message.data());
  return false;
}

}  // namespace cudasched::telemetry
