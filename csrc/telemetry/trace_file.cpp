#include "telemetry/trace_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "telemetry/journal.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::telemetry {
namespace {

struct FileHeader {
  char magic[8] = {'C', 'S', 'D', 'T', 'R', 'A', 'C', 'E'};
  std::uint32_t version = TraceFile::kVersion;
  std::uint32_t record_bytes = sizeof(TraceRecord);
};
static_assert(sizeof(FileHeader) == 16);

struct BlockHeader {
  std::uint32_t magic = 0x4B4C'4254;  // "TBLK"
  std::uint32_t kind = 0;
  std::uint64_t bytes = 0;
  std::uint32_t records = 0;
  std::uint32_t crc = 0;  // of the payload
};
static_assert(sizeof(BlockHeader) == 24);
static_assert(sizeof(TraceRecord) == TraceFile::kRecordBytes);

constexpr std::uint64_t kLeastFileBytes = 64 << 10;

}  // namespace

TraceFile::TraceFile(std::string directory, std::uint64_t limit_bytes)
    : directory_(std::move(directory)), file_bytes_(std::max(limit_bytes / kFiles, kLeastFileBytes)) {
  // A process that becomes another program (exec) keeps its pid, and begins another trace.
  for (int turn = 0; file_ < 0; ++turn) {
    base_ = directory_ + "/trace-" + std::to_string(getpid()) + "-" + std::to_string(turn);
    path_ = path_of(0);
    file_ = create(path_);
    if (file_ < 0 && errno != EEXIST) {
      throw Error("launches cannot be traced: " + path_ + " cannot be written: " + std::strerror(errno));
    }
  }
}

TraceFile::~TraceFile() {
  if (file_ >= 0 && mine()) close(file_);
}

std::string TraceFile::path_of(std::uint64_t number) const {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "-%06llu.records", static_cast<unsigned long long>(number));
  return base_ + text.data();
}

// A new file with its header in it; -1, with errno, if there cannot be one.
int TraceFile::create(const std::string& path) noexcept {
  const int made = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) return -1;
  struct stat state {};
  const FileHeader header;
  if (fstat(made, &state) != 0 || !write_all(made, &header, sizeof header)) {
    const int why = errno;
    close(made);
    unlink(path.c_str());
    errno = why;
    return -1;
  }
  device_ = state.st_dev;
  inode_ = state.st_ino;
  bytes_ = sizeof header;
  records_ = 0;
  return made;
}

bool TraceFile::mine() const noexcept {
  struct stat state {};
  return fstat(file_, &state) == 0 && state.st_dev == device_ && state.st_ino == inode_;
}

bool TraceFile::write_all(int file, const void* data, std::size_t bytes) noexcept {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(file, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return true;
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
  if (!mine()) {
    fail("the program has closed its file");
    return false;
  }
  BlockHeader header;
  header.kind = static_cast<std::uint32_t>(kind);
  header.records = records;
  for (const auto& part : parts) {
    header.bytes += part.size();
    header.crc = crc32(header.crc, part);
  }
  bool written = write_all(file_, &header, sizeof header);
  for (const auto& part : parts) written = written && write_all(file_, part.data(), part.size());
  if (!written) {
    const int why = errno;
    // Readers would refuse the written part of the block by its checksum; without that part the file ends whole.
    (void)!ftruncate(file_, static_cast<off_t>(bytes_));
    fail(std::strerror(why));
    return false;
  }
  bytes_ += sizeof header + header.bytes;
  if (kind == Block::kRecords) records_ += records;
  return true;
}

bool TraceFile::rotate() noexcept {
  if (failed_) return false;
  try {
    const std::string next = path_of(number_ + 1);
    past_.push_back({path_, records_});
    const int old = file_;
    const bool old_is_mine = mine();
    const int made = create(next);
    if (made < 0) {
      fail(std::strerror(errno));
      return false;
    }
    if (old_is_mine) close(old);
    file_ = made;
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
