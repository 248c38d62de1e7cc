// What the process counts. On the launch path: sharded by thread, relaxed, a few nanoseconds each, read elsewhere by
// summing the shards. What comes once a wait, a request or a timed launch is not sharded. read() makes one record of it
// all, which the ticker publishes (arbiter/counters.hpp).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/class.hpp"
#include "base/histogram.hpp"
#include "telemetry/prediction_counts.hpp"
#include "telemetry/region_counts.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::telemetry {

struct Shard {
  using Count = std::atomic<std::uint64_t>;

  std::array<Count, kClassCount> launches{};  // that the driver accepted, not offloaded, by class
  Count gated{0};
  Count untracked{0};
  Count exceptions{0};
  Count offloaded{0};
  Count backed_off{0};
  Count prioritised_graphs{0};
  Count unprioritised_graphs{0};
  Count normal_beside_best_effort{0};
  Count contested_streams{0};
  Count unmet_collectives{0};
  Count graphs{0};  // of best effort, launched
  Count sliced_launches{0};
  Count slice_launches{0};
};

// Each count of a shard but its launches, and where the record has their sum.
struct Summed {
  Shard::Count Shard::*count;
  std::uint64_t cudasched_counts::*sum;
};
inline constexpr std::array kSummed{
    Summed{&Shard::gated, &cudasched_counts::gated_launches},
    Summed{&Shard::untracked, &cudasched_counts::untracked_launches},
    Summed{&Shard::exceptions, &cudasched_counts::gate_exceptions},
    Summed{&Shard::offloaded, &cudasched_counts::offloaded_launches},
    Summed{&Shard::backed_off, &cudasched_counts::backed_off},
    Summed{&Shard::prioritised_graphs, &cudasched_counts::prioritised_graphs},
    Summed{&Shard::unprioritised_graphs, &cudasched_counts::unprioritised_graphs},
    Summed{&Shard::normal_beside_best_effort, &cudasched_counts::normal_beside_best_effort},
    Summed{&Shard::contested_streams, &cudasched_counts::contested_streams},
    Summed{&Shard::unmet_collectives, &cudasched_counts::unmet_collectives},
    Summed{&Shard::graphs, &cudasched_counts::graph_launches},
    Summed{&Shard::sliced_launches, &cudasched_counts::sliced_launches},
    Summed{&Shard::slice_launches, &cudasched_counts::slice_launches},
};
static_assert(sizeof(Shard) == (kClassCount + kSummed.size()) * sizeof(Shard::Count), "a count has no line in kSummed");

class Counters {
 public:
  static constexpr unsigned kShards = 16;

  Shard& shard(unsigned thread_index) noexcept { return shards_[thread_index % kShards].counts; }

  std::uint64_t total(Shard::Count Shard::*count) const noexcept {
    std::uint64_t sum = 0;
    for (const Line& line : shards_) sum += (line.counts.*count).load(std::memory_order_relaxed);
    return sum;
  }

  // Offloaded ones included.
  std::uint64_t launches(Class launch_class) const noexcept {
    std::uint64_t sum = launch_class == Class::kBestEffort ? total(&Shard::offloaded) : 0;
    for (const Line& line : shards_) {
      sum += line.counts.launches[static_cast<std::size_t>(launch_class)].load(std::memory_order_relaxed);
    }
    return sum;
  }
  std::uint64_t launches() const noexcept {
    return launches(Class::kNormal) + launches(Class::kLatency) + launches(Class::kBestEffort);
  }

  // What is counted here; the rest of `to` is left alone.
  void read(cudasched_counts& to) const noexcept {
    for (const Summed& summed : kSummed) to.*summed.sum = total(summed.count);
    to.normal_launches = launches(Class::kNormal);  // the whole after its parts, so that it is no less than they are
    to.latency_launches = launches(Class::kLatency);
    to.best_effort_launches = launches(Class::kBestEffort);
    to.latency_active_ns = latency_active_ns.load(std::memory_order_relaxed);
    to.clean_segments = clean_segments.load(std::memory_order_relaxed);
    to.halved_budgets = halved_budgets.load(std::memory_order_relaxed);
    to.profile_fallbacks = profile_fallbacks.load(std::memory_order_relaxed);
    gate_waits.read(to.gate_waits);
    preemptions.read(to.preemptions);
    predictions.read(to);
    regions.read(to);
  }

  Histogram gate_waits;  // of launches that waited
  // Those and launches that a backlog held, by what did so last (WaitReason).
  std::array<std::atomic<std::uint64_t>, kWaitReasons> held{};
  Histogram preemptions;  // best-effort work in flight when a request began
  PredictionCounts predictions;
  RegionCounts regions;
  std::atomic<std::uint64_t> latency_active_ns{0};
  std::atomic<std::uint64_t> clean_segments{0};  // of requests (runtime/latency/segments.hpp), as the next two
  std::atomic<std::uint64_t> halved_budgets{0};
  std::atomic<std::uint64_t> profile_fallbacks{0};

  void was_held(WaitReason why) noexcept {
    held[static_cast<std::size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }

  // In a forked child, which starts from nothing.
  void reset() noexcept {
    for (Line& line : shards_) {
      for (auto& count : line.counts.launches) count.store(0, std::memory_order_relaxed);
      for (const Summed& summed : kSummed) (line.counts.*summed.count).store(0, std::memory_order_relaxed);
    }
    gate_waits.reset();
    for (auto& count : held) count.store(0, std::memory_order_relaxed);
    preemptions.reset();
    predictions.reset();
    regions.reset();
    for (auto* const count : {&latency_active_ns, &clean_segments, &halved_budgets, &profile_fallbacks}) {
      count->store(0, std::memory_order_relaxed);
    }
  }

 private:
  struct alignas(64) Line {
    Shard counts;
  };
  std::array<Line, kShards> shards_;
};

}  // namespace cudasched::telemetry
