// Our sleeps, by the system call: on a program's thread that is cancelled (pthread_cancel), nanosleep() would unwind
// functions that may not throw, and end the process.
#pragma once

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

#include "base/clock.hpp"

namespace cudasched {

inline void sleep_ns(std::int64_t duration_ns) noexcept {
  const timespec time{duration_ns / kNsPerSecond, static_cast<long>(duration_ns % kNsPerSecond)};
  syscall(SYS_nanosleep, &time, nullptr);
}

}  // namespace cudasched
