// A lock for a few hundred nanoseconds of work. Yields to the scheduler when the lock does not come free at once, so
// that two threads on one core do not starve each other. Never sleeps. The lock knows its holder, so that a signal
// handler does not wait for ever for the thread that it interrupted.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "base/processor.hpp"

namespace cudasched {

class SpinLock {
 public:
  void lock() noexcept {
    for (int tries = 1; !try_lock(); ++tries) {
      if (tries % 32 == 0) {
        sched_yield();
      } else {
        spin_pause();
      }
    }
  }
  bool try_lock() noexcept {
    std::uintptr_t free = 0;
    return holder_.compare_exchange_strong(free, self(), std::memory_order_acquire, std::memory_order_relaxed);
  }
  void unlock() noexcept { holder_.store(0, std::memory_order_release); }

  // The calling thread holds the lock: a signal handler runs inside the guarded section.
  bool held_by_this_thread() const noexcept { return holder_.load(std::memory_order_relaxed) == self(); }

 private:
  static std::uintptr_t self() noexcept { return thread_pointer(); }

  std::atomic<std::uintptr_t> holder_{0};
};

// Holds the lock for the length of a scope, unless this thread holds it already. Then owns() is false, and the guarded
// data must not be touched.
class SpinGuard {
 public:
  explicit SpinGuard(SpinLock& lock) noexcept : lock_(lock), owns_(!lock.held_by_this_thread()) {
    if (owns_) lock_.lock();
  }
  ~SpinGuard() {
    if (owns_) lock_.unlock();
  }
  SpinGuard(const SpinGuard&) = delete;
  SpinGuard& operator=(const SpinGuard&) = delete;
  bool owns() const noexcept { return owns_; }

 private:
  SpinLock& lock_;
  const bool owns_;
};

}  // namespace cudasched
