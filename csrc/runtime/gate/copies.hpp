// Best-effort copies between pinned host memory and the device that the GPU does not interrupt, in pieces: how long a
// piece is, and how many are outstanding in each direction. A request's own copy waits for these alone, and not for the
// rest of a long copy.
//
// Pieces are thinned out while a request is under way, and never held: nothing waits for a copy at a closed gate, and a
// server that is always busy does not stop copies. On an H100 a request that copies 1 MB in took 0.57 ms alone, 1.09
// beside one copy of 2 GiB, 0.63 beside pieces of 4 MiB one at a time, 0.78 beside 16 MiB. One piece of 4 MiB at a time
// reaches 0.73 to 0.87 of the rate of a whole copy, two outstanding ones 0.97.
//
// Events belong to one context: copies of a second context of the device go whole.
//
// Not thread-safe: the gate's lock is held.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "queue/operation.hpp"
#include "schedule/hold_limit.hpp"

namespace cudasched::runtime {

class Copies {
 public:
  using Direction = queue::Operation::Direction;

  static constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
  static constexpr int kOutstanding = 2;
  static constexpr int kBesideRequest = 1;
  // A piece may wait on its stream for work that the program submits only once the whole copy is. After so long without
  // the end of a piece the rest goes at once.
  static constexpr std::int64_t kLongestNs = schedule::HoldLimit::kBackstopNs;

  // kAny: the copy is no longer than a piece, or not between the device and pinned host memory.
  static Direction direction_of(const queue::Operation::Copy& copy) noexcept;

  // Makes the context's events, once. False: the events are another context's.
  bool ready(CUcontext context) noexcept;

  // Of `bytes`; 0: none yet.
  std::size_t next(Direction direction, std::size_t bytes, bool beside_request, std::int64_t now_ns) noexcept;
  // The driver has taken a piece.
  void submitted(Direction direction, CUstream stream, std::int64_t now_ns) noexcept;

  // The context is about to go; null: whichever has events.
  void forget(CUcontext context) noexcept;

 private:
  // The outstanding pieces: the oldest one's event first.
  struct Way {
    std::array<CUevent, kOutstanding> events{};
    int oldest = 0;
    int outstanding = 0;
    std::int64_t since_ns = 0;  // when the last piece ended, or the first was submitted
  };

  Way& way(Direction direction) noexcept { return ways_[queue::Operation::place_of(direction)]; }

  CUcontext context_ = nullptr;
  std::array<Way, 2> ways_;
};

}  // namespace cudasched::runtime
