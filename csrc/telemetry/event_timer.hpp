// Times launches with a pair of CUDA events around each: the way without CUPTI, and coarser. Between its events a
// launch spends the gap before a kernel too. So the timer subtracts the time of a pair around an empty kernel, of which
// kEmptyKernelNs is the kernel's own, or, where that kernel cannot be loaded, the time of an empty pair. The events
// themselves cost the device about 2 us a launch.
//
// One is made in a process, and never destroyed: launches may still hold pairs when nothing is timed any more. begin
// and end are called around the driver's launch call, by any thread; they lock, and make events when none is free. The
// first launch in a context calibrates, for some milliseconds. The rest is the collector's thread's.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace cudasched::telemetry {

class EventTimer {
 public:
  static constexpr std::int64_t kEmptyKernelNs = 1'000;
  static constexpr std::size_t kMostPairs = 65'536;  // in a context; launches beyond them are not timed
  static constexpr std::int64_t kLeastNs = 500;      // the least time, for a kernel that took less than the calibration

  struct Place;
  struct Pair {
    Place* place = nullptr;
    CUevent start = nullptr;
    CUevent end = nullptr;
    bool ended = false;
  };
  enum class Answer { kNotYet, kTimed, kFailed };
  struct Overhead {
    std::int64_t subtracted_ns = 0;
    bool of_empty_kernel = false;    // else of an empty pair
    std::int64_t empty_pair_ns = 0;  // the mean of two events around nothing
  };

  EventTimer();
  ~EventTimer() = delete;

  // Null if the launch cannot be timed.
  Pair* begin(CUstream stream) noexcept;
  void end(Pair* pair, CUstream stream) noexcept;

  // Unless the answer is kNotYet, the pair is given back. start_ns is on CLOCK_MONOTONIC.
  Answer read(Pair* pair, std::int64_t& start_ns, std::int64_t& duration_ns) noexcept;

  // The unadjusted time between the two events. Gives the pair back alike.
  Answer read_elapsed(Pair* pair, std::int64_t& elapsed_ns) noexcept;

  // The pair's launch needs no time. The driver allows a record of an event whose last record is still pending.
  void give_back(Pair* pair) noexcept;

  // Ties the device's clock to ours anew; every few seconds keeps start_ns good to a microsecond.
  void refresh() noexcept;

  // The context goes, and its events with it. Null: every context.
  void forget(CUcontext context) noexcept;

  // Of the context first seen of those that are there; zeros before the first.
  Overhead overhead() noexcept;

 private:
  Place* place_of_current() noexcept;
  template <typename Read>
  Answer when_complete(Pair* pair, Read read) noexcept;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Place>> places_;
};

}  // namespace cudasched::telemetry
