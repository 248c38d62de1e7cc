// This process's memory on each GPU, by class: every allocation that the hook saw succeed, until its free. Pure
// bookkeeping: no call of the driver, no clock.
//
// Four kinds. Plain ones, by address (cuMemAlloc, pitched, managed, arrays by handle). Physical memory, by handle,
// which is held until it is released and mapped nowhere. Pools, whose size is told as the driver says it. Memory that
// goes with a context is forgotten with the context.
//
// The limit is a device's: reserve() is asked before the driver, so that threads that allocate at once cannot pass it
// together. Bytes that are reserved count as held for the limit alone, until they are there.
//
// Threads: any. Totals are atomics; the records are behind a spin lock, for some tens of nanoseconds and at times an
// allocation of the host's. Nothing here is on the launch path.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/class.hpp"
#include "base/spin_lock.hpp"

namespace cudasched::runtime {

class Holdings {
 public:
  static constexpr int kDevices = 32;
  static constexpr int kOnHost = -2;  // of a pool: none of its memory is a device's

  // One allocation, with the data to take it out again.
  struct Held {
    std::uint64_t bytes = 0;
    int device = -1;  // -1: unknown memory
    Class client_class = Class::kNormal;
    const void* context = nullptr;  // null: the memory outlives contexts
  };

  // 0: none. Of each device.
  void set_limit(std::uint64_t bytes) noexcept { limit_.store(bytes, std::memory_order_relaxed); }
  std::uint64_t limit() const noexcept { return limit_.load(std::memory_order_relaxed); }

  // Counts an allocation that is about to be made. False: that would pass the limit, or the room that there is for a
  // program with a limit, and nothing is counted.
  bool reserve(int device, std::uint64_t bytes, std::uint64_t room = UINT64_MAX) noexcept;
  // The driver refused the allocation.
  void give_up(int device, std::uint64_t bytes) noexcept;

  // The reserved memory is there, by address or handle.
  void hold(std::uint64_t address, const Held& held) noexcept;
  // Before the driver frees the memory, because another thread may get the address at once; put back where the driver
  // refuses. The bytes count until is_gone().
  Held forget(std::uint64_t address) noexcept;
  void put_back(std::uint64_t address, const Held& held) noexcept;
  void is_gone(const Held& held) noexcept;

  void hold_physical(std::uint64_t handle, const Held& held) noexcept;
  void retain_physical(std::uint64_t handle) noexcept;  // another reference of the program's
  void map_physical(std::uint64_t address, std::uint64_t bytes, std::uint64_t handle) noexcept;
  // Before the driver's call, because another thread may get the handle or the address at once: a reference or mappings
  // are taken out, and the bytes count until the driver has answered. put_back(): the driver refused. is_gone(): the
  // driver released the memory; returns the device, -1 for unknown memory.
  struct Released {
    std::uint64_t handle = 0;
    Held held;          // the memory that was referred to; device -1: unknown
    bool last = false;  // no other reference or mapping
  };
  struct Mapping {
    std::uint64_t bytes = 0;
    std::uint64_t handle = 0;
  };
  using Unmapped = std::map<std::uint64_t, Mapping>;
  Released release_physical(std::uint64_t handle) noexcept;
  void put_back(const Released& released) noexcept;
  void is_gone(const Released& released) noexcept;
  Unmapped unmap_physical(std::uint64_t address, std::uint64_t bytes) noexcept;
  void put_back(const Unmapped& unmapped) noexcept;
  int is_gone(const Unmapped& unmapped) noexcept;

  // A pool has so many bytes of the device now.
  void hold_pool(std::uint64_t pool, int device, Class client_class, std::uint64_t bytes) noexcept;
  void forget_pool(std::uint64_t pool) noexcept;
  struct Pool {
    std::uint64_t pool = 0;
    int device = -1;
    Class client_class = Class::kNormal;
    std::uint64_t bytes = 0;
  };
  // -1 where it is not known.
  int device_of_pool(std::uint64_t pool) const noexcept;
  // Appends the pools of a device; allocates.
  void list_pools(int device, std::vector<Pool>& pools) const;

  // The memory of this context, or, null, of this device's contexts, is gone.
  void context_ended(int device, const void* context) noexcept;

  std::uint64_t held(int device) const noexcept;  // with the reserved bytes
  std::uint64_t there(int device) const noexcept;
  std::uint64_t there(int device, Class client_class) const noexcept;
  std::uint64_t peak(int device) const noexcept;
  std::uint64_t refused() const noexcept { return refused_.load(std::memory_order_relaxed); }  // by the limit
  // The bytes held on the device that has the most.
  std::uint64_t most_held() const noexcept;

  // In a forked child, which has none of it.
  void reset_in_child() noexcept;

 private:
  struct Totals {
    std::atomic<std::uint64_t> all{0};
    std::atomic<std::uint64_t> there{0};
    std::atomic<std::uint64_t> peak{0};
    std::array<std::atomic<std::uint64_t>, kClassCount> by_class{};
  };
  struct Physical {
    Held held;
    int references = 1;
    int mappings = 0;
  };
  struct Records {
    std::unordered_map<std::uint64_t, Held> by_address;
    std::unordered_map<std::uint64_t, Physical> physical;
    std::map<std::uint64_t, Mapping> mappings;
    std::vector<Pool> pools;
  };

  static bool known(int device) noexcept { return device >= 0 && device < kDevices; }
  Totals& totals(int device) noexcept { return totals_[static_cast<std::size_t>(device)]; }
  const Totals& totals(int device) const noexcept { return totals_[static_cast<std::size_t>(device)]; }
  void is_there(const Held& held) noexcept;
  // Nothing, for want of host memory: the allocation's free is not seen.
  template <typename Change>
  void record(Change&& change) noexcept;

  std::atomic<std::uint64_t> limit_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::array<Totals, kDevices> totals_;
  mutable SpinLock lock_;
  Records* records_ = new Records;  // never destroyed: other threads may still free while the process exits
};

}  // namespace cudasched::runtime
