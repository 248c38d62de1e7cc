// Counts on the launch path: sharded by thread, relaxed, a few nanoseconds each. Read elsewhere by summing the shards.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/class.hpp"

namespace cudasched::telemetry {

struct alignas(64) Shard {
  std::array<std::atomic<std::uint64_t>, kClassCount> launches{};  // that the driver accepted, by class
  std::atomic<std::uint64_t> gated{0};
  std::atomic<std::uint64_t> waits{0};
  std::atomic<std::uint64_t> wait_ns{0};
  std::atomic<std::uint64_t> untracked{0};
  std::atomic<std::uint64_t> exceptions{0};
  std::atomic<std::uint64_t> offloaded{0};
  std::atomic<std::uint64_t> backed_off{0};
  std::atomic<std::uint64_t> prioritised_graphs{0};
  std::atomic<std::uint64_t> unprioritised_graphs{0};
  std::atomic<std::uint64_t> normal_beside_best_effort{0};
  std::atomic<std::uint64_t> contested_streams{0};
  std::atomic<std::uint64_t> unmet_collectives{0};
};

struct Totals {
  std::array<std::uint64_t, kClassCount> launches{};
  std::uint64_t gated = 0;
  std::uint64_t waits = 0;
  std::uint64_t wait_ns = 0;
  std::uint64_t untracked = 0;
  std::uint64_t exceptions = 0;
  std::uint64_t offloaded = 0;
  std::uint64_t backed_off = 0;
  std::uint64_t prioritised_graphs = 0;
  std::uint64_t unprioritised_graphs = 0;
  std::uint64_t normal_beside_best_effort = 0;
  std::uint64_t contested_streams = 0;
  std::uint64_t unmet_collectives = 0;

  std::uint64_t all_launches() const noexcept { return launches[0] + launches[1] + launches[2]; }
};

class Counters {
 public:
  static constexpr unsigned kShards = 16;

  Shard& shard(unsigned thread_index) noexcept { return shards_[thread_index % kShards]; }

  Totals totals() const noexcept {
    Totals sum;
    for (const Shard& shard : shards_) {
      for (std::size_t i = 0; i < shard.launches.size(); ++i) {
        sum.launches[i] += shard.launches[i].load(std::memory_order_relaxed);
      }
      sum.gated += shard.gated.load(std::memory_order_relaxed);
      sum.waits += shard.waits.load(std::memory_order_relaxed);
      sum.wait_ns += shard.wait_ns.load(std::memory_order_relaxed);
      sum.untracked += shard.untracked.load(std::memory_order_relaxed);
      sum.exceptions += shard.exceptions.load(std::memory_order_relaxed);
      sum.offloaded += shard.offloaded.load(std::memory_order_relaxed);
      sum.backed_off += shard.backed_off.load(std::memory_order_relaxed);
      sum.prioritised_graphs += shard.prioritised_graphs.load(std::memory_order_relaxed);
      sum.unprioritised_graphs += shard.unprioritised_graphs.load(std::memory_order_relaxed);
      sum.normal_beside_best_effort += shard.normal_beside_best_effort.load(std::memory_order_relaxed);
      sum.contested_streams += shard.contested_streams.load(std::memory_order_relaxed);
      sum.unmet_collectives += shard.unmet_collectives.load(std::memory_order_relaxed);
    }
    return sum;
  }

  // In a forked child, which starts from nothing.
  void reset() noexcept {
    for (Shard& shard : shards_) {
      for (auto& count : shard.launches) count.store(0, std::memory_order_relaxed);
      shard.gated.store(0, std::memory_order_relaxed);
      shard.waits.store(0, std::memory_order_relaxed);
      shard.wait_ns.store(0, std::memory_order_relaxed);
      shard.untracked.store(0, std::memory_order_relaxed);
      shard.exceptions.store(0, std::memory_order_relaxed);
      shard.offloaded.store(0, std::memory_order_relaxed);
      shard.backed_off.store(0, std::memory_order_relaxed);
      shard.prioritised_graphs.store(0, std::memory_order_relaxed);
      shard.unprioritised_graphs.store(0, std::memory_order_relaxed);
      shard.normal_beside_best_effort.store(0, std::memory_order_relaxed);
      shard.contested_streams.store(0, std::memory_order_relaxed);
      shard.unmet_collectives.store(0, std::memory_order_relaxed);
    }
  }

 private:
  std::array<Shard, kShards> shards_;
};

}  // namespace cudasched::telemetry
