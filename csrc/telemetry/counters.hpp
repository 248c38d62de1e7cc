// The process's counters. On the launch path: sharded by thread, relaxed, a few nanoseconds each, read elsewhere by
// summing the shards. Counters of waits, requests and timed launches are not sharded. read() makes one record of all
// counters, which the ticker publishes (arbiter/counters.hpp).
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
#define CUDASCHED_SHARDED(name, metric, text) Count name{0};
#include "cudasched/counts.inc"
};

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
    std::uint64_t sum = launch_class == Class::kBestEffort ? total(&Shard::offloaded_launches) : 0;
    for (const Line& line : shards_) {
      sum += line.counts.launches[static_cast<std::size_t>(launch_class)].load(std::memory_order_relaxed);
    }
    return sum;
  }
  std::uint64_t launches() const noexcept {
    return launches(Class::kNormal) + launches(Class::kLatency) + launches(Class::kBestEffort);
  }

  // Reads these counters; the rest of `to` is left alone.
  void read(cudasched_counts& to) const noexcept {
#define CUDASCHED_SHARDED(name, metric, text) to.name = total(&Shard::name);
#define CUDASCHED_ONCE(name, metric, text) to.name = (name).load(std::memory_order_relaxed);
#include "cudasched/counts.inc"
    to.normal_launches = launches(Class::kNormal);  // the whole after its parts, so that it is no less than they are
    to.latency_launches = launches(Class::kLatency);
    to.best_effort_launches = launches(Class::kBestEffort);
    gate_waits.read(to.gate_waits);
    preemptions.read(to.preemptions);
    predictions.read(to);
    regions.read(to);
  }

  Histogram gate_waits;  // of launches that waited
  // Launches that waited or that a backlog held, by their last reason (WaitReason).
  std::array<std::atomic<std::uint64_t>, kWaitReasons> held{};
  Histogram preemptions;  // best-effort work in flight when a request began
  PredictionCounts predictions;
  RegionCounts regions;
#define CUDASCHED_ONCE(name, metric, text) Shard::Count name{0};
#include "cudasched/counts.inc"

  void was_held(WaitReason why) noexcept {
    held[static_cast<std::size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }

  // In a forked child, which starts from nothing.
  void reset() noexcept {
    for (Line& line : shards_) {
      for (auto& count : line.counts.launches) count.store(0, std::memory_order_relaxed);
#define CUDASCHED_SHARDED(name, metric, text) line.counts.name.store(0, std::memory_order_relaxed);
#include "cudasched/counts.inc"
    }
#define CUDASCHED_ONCE(name, metric, text) (name).store(0, std::memory_order_relaxed);
#include "cudasched/counts.inc"
    gate_waits.reset();
    for (auto& count : held) count.store(0, std::memory_order_relaxed);
    preemptions.reset();
    predictions.reset();
    regions.reset();
  }

 private:
  struct alignas(64) Line {
    Shard counts;
  };
  std::array<Line, kShards> shards_;
};

}  // namespace cudasched::telemetry
