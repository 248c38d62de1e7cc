// The pools of GPU memory that the program keeps (csrc/memory, or its own): what give-back trims, and others see.
//
// Threads: any. A function of a pool is called under the lock, so a pool that is removed is in no call.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include "cudasched/engine.h"
#include "runtime/memory/holdings.hpp"

namespace cudasched::runtime {

class Pools {
 public:
  // Throws ConfigError: there is no such device.
  void add(const cudasched_pool& pool);
  void remove(const void* pool) noexcept;

  bool any(int device) const noexcept;
  // May wait for work of the GPU that uses the pools.
  void trim(int device) noexcept;
  // Of all pools of the device; nothing where one cannot tell at once.
  std::optional<cudasched_pool_sizes> read(int device) noexcept;

 private:
  std::mutex mutex_;
  std::vector<cudasched_pool> pools_;
  std::array<std::atomic<int>, Holdings::kDevices> count_{};
};

}  // namespace cudasched::runtime
