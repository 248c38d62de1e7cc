// What the process counts. On the launch path: sharded by thread, relaxed, a few nanoseconds each, read elsewhere by
// summing the shards. What comes once a wait, a request or a timed launch is not sharded. read() makes one record of it
// all, which the ticker publishes (arbiter/counters.hpp).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/class.hpp"
#include "base/histogram.hpp"
#include "telemetry/prediction_counts.hpp"
#include "telemetry/region_counts.hpp"

namespace cudasched::telemetry {

struct alignas(64) Shard {
  std::array<std::atomic<std::uint64_t>, kClassCount> launches{};  // that the driver accepted, not offloaded, by class
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
  std::atomic<std::uint64_t> graphs{0};  // of best effort, launched
  std::atomic<std::uint64_t> sliced_launches{0};
  std::atomic<std::uint64_t> slice_launches{0};
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
  std::uint64_t graphs = 0;
  std::uint64_t sliced_launches = 0;
  std::uint64_t slice_launches = 0;

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
      const std::uint64_t offloaded = shard.offloaded.load(std::memory_order_relaxed);
      sum.offloaded += offloaded;
      sum.launches[static_cast<std::size_t>(Class::kBestEffort)] += offloaded;
      sum.backed_off += shard.backed_off.load(std::memory_order_relaxed);
      sum.prioritised_graphs += shard.prioritised_graphs.load(std::memory_order_relaxed);
      sum.unprioritised_graphs += shard.unprioritised_graphs.load(std::memory_order_relaxed);
      sum.normal_beside_best_effort += shard.normal_beside_best_effort.load(std::memory_order_relaxed);
      sum.contested_streams += shard.contested_streams.load(std::memory_order_relaxed);
      sum.unmet_collectives += shard.unmet_collectives.load(std::memory_order_relaxed);
      sum.graphs += shard.graphs.load(std::memory_order_relaxed);
      sum.sliced_launches += shard.sliced_launches.load(std::memory_order_relaxed);
      sum.slice_launches += shard.slice_launches.load(std::memory_order_relaxed);
    }
    return sum;
  }

  // What is counted here; the rest of `to` is left alone.
  void read(cudasched_counts& to) const noexcept {
    const Totals sum = totals();
    to.normal_launches = sum.launches[static_cast<std::size_t>(Class::kNormal)];
    to.latency_launches = sum.launches[static_cast<std::size_t>(Class::kLatency)];
    to.best_effort_launches = sum.launches[static_cast<std::size_t>(Class::kBestEffort)];
    to.gated_launches = sum.gated;
    to.offloaded_launches = sum.offloaded;
    to.untracked_launches = sum.untracked;
    to.gate_exceptions = sum.exceptions;
    to.backed_off = sum.backed_off;
    to.graph_launches = sum.graphs;
    to.prioritised_graphs = sum.prioritised_graphs;
    to.unprioritised_graphs = sum.unprioritised_graphs;
    to.normal_beside_best_effort = sum.normal_beside_best_effort;
    to.contested_streams = sum.contested_streams;
    to.unmet_collectives = sum.unmet_collectives;
    to.sliced_launches = sum.sliced_launches;
    to.slice_launches = sum.slice_launches;
    to.latency_active_ns = latency_active_ns.load(std::memory_order_relaxed);
    gate_waits.read(to.gate_waits);
    preemptions.read(to.preemptions);
    predictions.read(to);
    regions.read(to);
  }

  Histogram gate_waits;   // of launches that waited
  Histogram preemptions;  // best-effort work in flight when a request began
  PredictionCounts predictions;
  RegionCounts regions;
  std::atomic<std::uint64_t> latency_active_ns{0};
  // Under `harvest` (runtime/latency/segments.hpp):
  std::atomic<std::uint64_t> clean_requests{0};     // kept without best effort, to see what they take by themselves
  std::atomic<std::uint64_t> halved_budgets{0};     // times that what requests may lose was halved
  std::atomic<std::uint64_t> profile_fallbacks{0};  // times that a profile misled, and was forgotten

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
      shard.graphs.store(0, std::memory_order_relaxed);
      shard.sliced_launches.store(0, std::memory_order_relaxed);
      shard.slice_launches.store(0, std::memory_order_relaxed);
    }
    gate_waits.reset();
    preemptions.reset();
    predictions.reset();
    regions.reset();
    latency_active_ns.store(0, std::memory_order_relaxed);
    clean_requests.store(0, std::memory_order_relaxed);
    halved_budgets.store(0, std::memory_order_relaxed);
    profile_fallbacks.store(0, std::memory_order_relaxed);
  }

 private:
  std::array<Shard, kShards> shards_;
};

}  // namespace cudasched::telemetry
