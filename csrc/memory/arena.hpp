// Pinned host memory that grows in segments of one range of addresses, and stays until the process ends. For moved
// chunks (parking.hpp). In huge pages: the driver pins 37 GiB of these in a second, 13 to 24 GiB of small ones (H100).
//
// Threads: one at a time, with a context current.
#pragma once

#include <cstddef>

#include "memory/layout.hpp"

namespace cudasched::memory {

class Arena {
 public:
  static constexpr Bytes kSegmentBytes = Bytes{64} << 20;

  // In whole segments.
  static constexpr Bytes rounded(Bytes bytes) noexcept { return Layout::rounded(bytes, kSegmentBytes); }

  explicit Arena(Bytes most) noexcept : most_(rounded(most)) {}

  Bytes bytes() const noexcept { return bytes_; }
  // False: no host memory, or the driver does not pin it; nothing that was there is lost.
  bool grow(Bytes bytes) noexcept;
  std::byte* at(Bytes place) const noexcept { return begin_ + place; }
  // A copy must end there: segments are pinned one by one.
  static Bytes segment_end(Bytes place) noexcept { return (place / kSegmentBytes + 1) * kSegmentBytes; }

 private:
  Bytes most_;
  Bytes bytes_ = 0;
  std::byte* begin_ = nullptr;
};

}  // namespace cudasched::memory
