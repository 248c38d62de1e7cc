#include "runtime/memory/pools.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace cudasched::runtime {

void Pools::add(const cudasched_pool& pool) {
  if (pool.device < 0 || pool.device >= Holdings::kDevices) {
    throw ConfigError("a pool's device is 0 to " + std::to_string(Holdings::kDevices - 1) + ", not " +
                      std::to_string(pool.device));
  }
  const std::lock_guard held(mutex_);
  pools_.push_back(pool);
  count_[static_cast<std::size_t>(pool.device)].fetch_add(1);
}

void Pools::remove(const void* pool) noexcept {
  const std::lock_guard held(mutex_);
  const auto found = std::ranges::find(pools_, pool, &cudasched_pool::pool);
  if (found == pools_.end()) return;
  count_[static_cast<std::size_t>(found->device)].fetch_sub(1);
  pools_.erase(found);
}

bool Pools::any(int device) const noexcept {
  return device >= 0 && device < Holdings::kDevices && count_[static_cast<std::size_t>(device)].load() != 0;
}

void Pools::trim(int device) noexcept {
  if (!any(device)) return;
  const std::lock_guard held(mutex_);
  for (const cudasched_pool& each : pools_) {
    if (each.device == device) each.trim(each.pool);
  }
}

std::optional<cudasched_pool_sizes> Pools::read(int device) noexcept {
  cudasched_pool_sizes all{};
  if (!any(device)) return all;
  const std::unique_lock held(mutex_, std::try_to_lock);
  if (!held.owns_lock()) return std::nullopt;
  for (const cudasched_pool& each : pools_) {
    if (each.device != device) continue;
    cudasched_pool_sizes sizes{};
    if (each.read(each.pool, &sizes) == 0) return std::nullopt;
    all.reserved += sizes.reserved;
    all.allocated += sizes.allocated;
    all.largest_free = std::max(all.largest_free, sizes.largest_free);
  }
  return all;
}

}  // namespace cudasched::runtime
