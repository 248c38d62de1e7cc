// Sleeping on a word of this process. A sleeper may wake for no reason and looks again.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "base/clock.hpp"

namespace cudasched::queue {

// Sleeps while `word` is `seen`, at most for `longest_ns`.
inline void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t longest_ns) noexcept {
  const timespec time{longest_ns / kNsPerSecond, longest_ns % kNsPerSecond};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cudasched::queue
