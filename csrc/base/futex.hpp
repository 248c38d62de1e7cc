// Sleeping on a word of this process, or of memory that several share. A sleeper may wake for no reason, and looks
// again.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "base/clock.hpp"

namespace cudasched {

enum class Sharing : std::uint8_t { kPrivate, kShared };

// Sleeps while `word` is `seen`, at most for `longest_ns`.
inline void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t longest_ns,
                        Sharing sharing = Sharing::kPrivate) noexcept {
  const timespec time{longest_ns / kNsPerSecond, static_cast<long>(longest_ns % kNsPerSecond)};
  const int operation = sharing == Sharing::kPrivate ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  syscall(SYS_futex, &word, operation, seen, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word, Sharing sharing = Sharing::kPrivate) noexcept {
  const int operation = sharing == Sharing::kPrivate ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
  syscall(SYS_futex, &word, operation, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cudasched
