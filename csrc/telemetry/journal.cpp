#include "telemetry/journal.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"

namespace cudasched::telemetry {
namespace {

struct FileHeader {
  char magic[8] = {'C', 'S', 'D', 'J', 'R', 'N', 'L', '\0'};
  std::uint32_t version = Journal::kVersion;
  std::uint32_t row_bytes = sizeof(Row);
};
static_assert(sizeof(FileHeader) == 16);

struct BlockHeader {
  std::uint32_t magic = 0x4B4C'4243;  // "CBLK"
  std::uint32_t type = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rows = 0;
  std::uint32_t crc = 0;  // of the payload
};
static_assert(sizeof(BlockHeader) == 24);

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1) != 0 ? 0xEDB8'8320U ^ (value >> 1) : value >> 1;
    table[i] = value;
  }
  return table;
}

constexpr auto kCrcTable = make_crc_table();

}  // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc = kCrcTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xFF] ^ (crc >> 8);
  }
  return ~crc;
}

Journal::Journal(const std::string& directory) {
  // A process that becomes another program (exec) keeps its pid, and begins another journal.
  const std::string base = directory + "/launches-" + std::to_string(getpid());
  for (int turn = 0; file_ < 0; ++turn) {
    path_ = base + "-" + std::to_string(turn) + ".journal";
    file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file_ < 0 && errno != EEXIST) {
      throw Error("launches cannot be collected: " + path_ + " cannot be created: " + std::strerror(errno));
    }
  }
  struct stat state {};
  const FileHeader header;
  if (fstat(file_, &state) != 0 || !write_all(&header, sizeof header)) {
    const std::string why = std::strerror(errno);
    close(file_);
    unlink(path_.c_str());
    throw Error("launches cannot be collected: " + path_ + " cannot be written: " + why);
  }
  device_ = state.st_dev;
  inode_ = state.st_ino;
  whole_bytes_ = sizeof header;
}

Journal::~Journal() {
  if (mine()) close(file_);
}

bool Journal::mine() const noexcept {
  struct stat state {};
  return fstat(file_, &state) == 0 && state.st_dev == device_ && state.st_ino == inode_;
}

bool Journal::write_all(const void* data, std::size_t bytes) noexcept {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(file_, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return true;
}

bool Journal::append(Block type, std::uint32_t rows, std::initializer_list<std::span<const std::byte>> parts) noexcept {
  if (failed_) return false;
  if (!mine()) {
    failed_ = true;
    log::warning("the program has closed the journal of collected launches; no more are collected");
    return false;
  }
  BlockHeader header;
  header.type = static_cast<std::uint32_t>(type);
  header.rows = rows;
  for (const auto& part : parts) {
    header.bytes += part.size();
    header.crc = crc32(header.crc, part);
  }
  bool written = write_all(&header, sizeof header);
  for (const auto& part : parts) written = written && write_all(part.data(), part.size());
  if (!written) {
    const int why = errno;
    failed_ = true;
    // Readers would refuse the written part of the block by its checksum; without that part the file ends whole.
    (void)!ftruncate(file_, whole_bytes_);
    std::array<char, 512> message{};
    std::snprintf(message.data(), message.size(), "collected launches cannot be written (%s); no more are collected",
                  std::strerror(why));
    log::warning(message.data());
    return false;
  }
  whole_bytes_ += static_cast<off_t>(sizeof header + header.bytes);
  return true;
}

}  // namespace cudasched::telemetry
