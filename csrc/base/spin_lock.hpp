// A lock for a few hundred nanoseconds of work. Yields to the scheduler when it does not come free at once, so that two
// threads on one core do not starve each other; never sleeps.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>

namespace cudasched {

class SpinLock {
 public:
  void lock() noexcept {
    for (int tries = 1; locked_.exchange(true, std::memory_order_acquire); ++tries) {
      if (tries % 32 == 0) {
        sched_yield();
      } else {
        _mm_pause();
      }
    }
  }
  bool try_lock() noexcept { return !locked_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> locked_{false};
};

}  // namespace cudasched
