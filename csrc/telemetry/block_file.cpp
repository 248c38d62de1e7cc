#include "telemetry/block_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace cudasched::telemetry {
namespace {

struct FileHeader {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t item_bytes;
};
static_assert(sizeof(FileHeader) == 16);

struct BlockHeader {
  std::uint32_t magic = 0;
  std::uint32_t kind = 0;
  std::uint64_t bytes = 0;
  std::uint32_t items = 0;
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

bool write_all(int file, const void* data, std::size_t bytes) noexcept {
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

}  // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc = kCrcTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xFF] ^ (crc >> 8);
  }
  return ~crc;
}

bool BlockFile::create(const std::string& path, const Format& format) noexcept {
  const int made = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) return false;
  struct stat state {};
  const FileHeader header{format.magic, format.version, format.item_bytes};
  if (fstat(made, &state) != 0 || !write_all(made, &header, sizeof header)) {
    const int why = errno;
    ::close(made);
    unlink(path.c_str());
    errno = why;
    return false;
  }
  close();
  file_ = made;
  block_magic_ = format.block_magic;
  device_ = state.st_dev;
  inode_ = state.st_ino;
  bytes_ = sizeof header;
  return true;
}

bool BlockFile::mine() const noexcept {
  struct stat state {};
  return fstat(file_, &state) == 0 && state.st_dev == device_ && state.st_ino == inode_;
}

void BlockFile::close() noexcept {
  if (is_open() && mine()) ::close(file_);
}

const char* BlockFile::append(std::uint32_t kind, std::uint32_t items,
                              std::initializer_list<std::span<const std::byte>> parts) noexcept {
  if (!mine()) return "the program has closed its file";
  BlockHeader header{.magic = block_magic_, .kind = kind, .items = items};
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
    return std::strerror(why);
  }
  bytes_ += sizeof header + header.bytes;
  return nullptr;
}

}  // namespace cudasched::telemetry
