#include "telemetry/trace_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::telemetry {
namespace {

constexpr BlockFile::Format kTraceFormat{.magic = {'C', 'S', 'D', 'T', 'R', 'A', 'C', 'E'},
                                         .version = TraceFile::kVersion,
                                         .item_bytes = sizeof(TraceRecord),
                                         .block_magic = 0x4B4C'4254};  // "TBLK"
static_assert(sizeof(TraceRecord) == TraceFile::kRecordBytes);

constexpr std::uint64_t kLeastFileBytes = 64 << 10;

}  // namespace

TraceFile::TraceFile(std::string directory, std::uint64_t limit_bytes)
    : directory_(std::move(directory)), file_bytes_(std::max(limit_bytes / kFiles, kLeastFileBytes)) {
  // A process that becomes another program (exec) keeps its pid, and begins another trace. Of an earlier one the first
  // files may have gone.
  for (std::int64_t turn = now_ns(); !file_.is_open(); ++turn) {
    base_ = directory_ + "/trace-" + std::to_string(getpid()) + "-" + std::to_string(turn);
    path_ = path_of(0);
    if (!file_.create(path_, kTraceFormat) && errno != EEXIST) {
      throw Error("launches cannot be traced: " + path_ + " cannot be written: " + std::strerror(errno));
    }
  }
}

std::string TraceFile::path_of(std::uint64_t number) const {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "-%06llu.records", static_cast<unsigned long long>(number));
  return base_ + text.data();
}

void TraceFile::fail(const char* why) noexcept {
  failed_ = true;
  std::array<char, 512> message{};
  std::snprintf(message.data(), message.size(), "the trace cannot be written (%s); it ends here", why);
  log::warning(message.data());
}

bool TraceFile::append(Block kind, std::uint32_t records,
                       std::initializer_list<std::span<const std::byte>> parts) noexcept {
  if (failed_) return false;
  if (const char* const why = file_.append(static_cast<std::uint32_t>(kind), records, parts)) {
    fail(why);
    return false;
  }
  if (kind == Block::kRecords) records_ += records;
  return true;
}

bool TraceFile::rotate() noexcept {
  if (failed_) return false;
  try {
    const std::string next = path_of(number_ + 1);
    past_.push_back({path_, records_});
    if (!file_.create(next, kTraceFormat)) {
      fail(std::strerror(errno));
      return false;
    }
    records_ = 0;
    path_ = next;
    ++number_;
    while (past_.size() >= kFiles) {
      unlink(past_.front().path.c_str());
      rotated_away_ += past_.front().records;
      past_.pop_front();
    }
    return true;
  } catch (const std::exception&) {
    fail("out of memory");
    return false;
  }
}

}  // namespace cudasched::telemetry
