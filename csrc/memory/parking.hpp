// Chunks of a pool that are away: their bytes in an arena of the host's, their addresses unmapped, their memory given
// back to the GPU. Mechanism only. The caller has shown that no work uses the pool's memory, and that no call will
// before all chunks are back (runtime/memory/pager.hpp).
//
// Copies go in pieces, two outstanding: a request's own copy waits for these alone. Beside a server on an H200, pieces
// of 4 MiB had 0.88 of the rate of one copy, of 16 MiB 0.95.
//
// Threads: one at a time. The pool's lock is held in a move.
#pragma once

#include <cuda.h>

#include <array>
#include <vector>

#include "memory/arena.hpp"
#include "memory/pool.hpp"

namespace cudasched::memory {

class Parking {
 public:
  static constexpr Bytes kPieceBytes = Bytes{4} << 20;
  static constexpr Bytes kLargePieceBytes = Bytes{16} << 20;  // where the GPU interrupts copies

  // To at most so many bytes of the host.
  Parking(Pool& pool, Bytes most) noexcept : pool_(pool), arena_(most) {}

  // Of chunks that are away.
  Bytes bytes() const noexcept { return bytes_; }
  Bytes pinned() const noexcept { return arena_.bytes(); }
  // Host memory that has to be pinned before `more` bytes can go.
  Bytes lacks(Bytes more) const noexcept;
  // False: it cannot be had.
  bool make_room(Bytes more) noexcept;

  // Moves whole chunks away, in pieces of `most` bytes, until these are `least` bytes, or no more are there or fit into
  // the arena; by address. Returns their bytes. Where the driver refuses a copy or an unmapping, that chunk and those
  // behind it stay.
  Bytes move_out(Bytes least, Bytes most) noexcept;
  // False: the GPU has no room, and all stays away.
  bool move_in(Bytes most) noexcept;
  // The context is about to be reset: the chunks that are away are lost with it, the others are given back. The pool is
  // used no more.
  void drop() noexcept;

 private:
  struct Away {
    Bytes at = 0;  // in the pool's range
    Bytes bytes = 0;
    Bytes place = 0;  // in the arena
  };
  enum class Way : std::uint8_t { kOut, kIn };

  bool prepare() noexcept;
  bool is_away(Bytes at) const noexcept;
  template <typename Begin, typename Done>
  bool copy(const std::vector<Away>& chunks, Way way, Bytes most, Begin&& begin, Done&& done) noexcept;
  bool map(const Away& chunk, Chunk handle) noexcept;

  Pool& pool_;
  Arena arena_;
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> ends_{};
  Bytes bytes_ = 0;
  std::vector<Away> away_;  // by address
};

}  // namespace cudasched::memory
