// Monotonic time in nanoseconds, the only time this project keeps. CLOCK_MONOTONIC counts from the same zero in every
// process of a machine, so a time may stand in shared memory. Reading it is a vDSO call (about 20 ns), never a system
// call.
#pragma once

#include <time.h>

#include <cstdint>

namespace cudasched {

inline constexpr std::int64_t kNsPerUs = 1'000;
inline constexpr std::int64_t kNsPerMs = 1'000'000;
inline constexpr std::int64_t kNsPerSecond = 1'000'000'000;

inline std::int64_t now_ns() noexcept {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kNsPerSecond + time.tv_nsec;
}

}  // namespace cudasched
