// A file of blocks, as journals and traces are: a header of 16 bytes, then blocks, each behind a header with its length
// and checksum. The file ends whole, whatever becomes of a block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace cudasched::telemetry {

class BlockFile {
 public:
  struct Format {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t item_bytes;
    std::uint32_t block_magic;
  };

  BlockFile() = default;
  ~BlockFile() { close(); }
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  // Makes the file, in place of the open one. False, with errno: there is one of that path, or there can be none. The
  // open one stays.
  bool create(const std::string& path, const Format& format) noexcept;
  bool is_open() const noexcept { return file_ >= 0; }

  // Appends one block, made of the parts. Null: it is in the file; else the reason why not.
  const char* append(std::uint32_t kind, std::uint32_t items,
                     std::initializer_list<std::span<const std::byte>> parts) noexcept;
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  bool mine() const noexcept;
  void close() noexcept;

  int file_ = -1;
  std::uint32_t block_magic_ = 0;
  std::uint64_t device_ = 0;  // of the file: a program may close descriptors that are not its own, and reuse them
  std::uint64_t inode_ = 0;
  std::uint64_t bytes_ = 0;
};

// As zlib computes it.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes) noexcept;

inline std::span<const std::byte> bytes_of(std::string_view text) noexcept {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace cudasched::telemetry
