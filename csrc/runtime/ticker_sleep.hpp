// How the ticker thread sleeps between two ticks. A process that has been idle for a while lets the ticker sleep for a
// second at a time. A thread that begins something that needs heartbeats wakes the ticker.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

#include "base/futex.hpp"

namespace cudasched::runtime {

class TickerSleep {
 public:
  // By the ticker. `still_idle()` is asked once more when wake() would be noticed.
  template <typename StillIdle>
  void sleep_deeply(std::int64_t longest_ns, StillIdle&& still_idle) noexcept {
    asleep_.store(1, std::memory_order_seq_cst);
    if (still_idle()) futex_sleep(asleep_, 1, longest_ns);
    asleep_.store(0, std::memory_order_relaxed);
  }

  // Something has begun, and a caller of still_idle() is to see it. A load where the ticker is awake.
  void wake() noexcept {
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    if (asleep_.exchange(0, std::memory_order_seq_cst) != 0) futex_wake_all(asleep_);
  }

 private:
  std::atomic<std::uint32_t> asleep_{0};
};

}  // namespace cudasched::runtime
