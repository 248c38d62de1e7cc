// Parts of a GPU's SMs for best-effort work: green contexts of cudasched's own, each with one stream that has class
// best effort. They are never current to a thread.
//
// A partition is made once for a device and a number of SMs, and lives as long as the process. For PyTorch's allocator
// goes on using a stream that it has allocated on. All partitions of a device begin at the same SM, so that the others
// are free of every one of them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace cudasched::runtime {

// How many of `total` SMs stand for `fraction` of them: a multiple of `step`, not more than the fraction except that
// there are at least `least`. 0 where that would be all of them.
unsigned partition_sms(double fraction, unsigned total, unsigned least, unsigned step) noexcept;

class Partitions {
 public:
  // The stream of that part of the current context's device, 0 < fraction < 1. Throws ConfigError, HookError and
  // DriverError; nothing is kept then.
  CUstream stream(double fraction);

  // The device's streams are gone, and are bound no more.
  void primary_context_ended(CUdevice device) noexcept;

  void reset_in_child() noexcept;

 private:
  struct Partition {
    CUdevice device;
    unsigned sms;
    CUstream stream;
  };

  std::mutex mutex_;
  std::vector<Partition> made_;
};

// The process's one set.
Partitions& partitions() noexcept;

}  // namespace cudasched::runtime
