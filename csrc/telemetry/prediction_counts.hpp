// How good predictions were: of launches that were predicted, timed, and ran with nothing of ours beside them. add() is
// called for each of those, one launch in 16 and fewer, by a thread that looks for completions.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cudasched/counts.h"

namespace cudasched::telemetry {

class PredictionCounts {
 public:
  static constexpr std::array<std::int64_t, CUDASCHED_ERROR_BUCKETS - 1> kPercents{1, 2, 5, 10, 20, 30, 50, 100, 200};

  static constexpr std::size_t bucket_of(std::int64_t predicted_ns, std::int64_t off_ns) noexcept {
    std::size_t bucket = 0;
    while (bucket < kPercents.size() &&
           off_ns > predicted_ns / 100 * kPercents[bucket] + predicted_ns % 100 * kPercents[bucket] / 100) {
      ++bucket;
    }
    return bucket;
  }

  void add(std::int64_t predicted_ns, std::int64_t bound_ns, std::int64_t measured_ns) noexcept {
    if (predicted_ns <= 0 || measured_ns <= 0) return;  // events that tick coarsely make a short kernel's time 0
    const std::int64_t off_ns = measured_ns > predicted_ns ? measured_ns - predicted_ns : predicted_ns - measured_ns;
    within_.fetch_add(measured_ns <= bound_ns ? 1 : 0, std::memory_order_relaxed);
    predicted_ns_.fetch_add(static_cast<std::uint64_t>(predicted_ns), std::memory_order_relaxed);
    measured_ns_.fetch_add(static_cast<std::uint64_t>(measured_ns), std::memory_order_relaxed);
    off_ns_.fetch_add(static_cast<std::uint64_t>(off_ns), std::memory_order_relaxed);
    errors_[bucket_of(predicted_ns, off_ns)].fetch_add(1, std::memory_order_release);
  }

  void read(cudasched_counts& to) const noexcept {
    // The number is the buckets' sum, read first: none of the other sums lacks one of these.
    to.predictions = 0;
    for (std::size_t i = 0; i < errors_.size(); ++i) {
      to.prediction_errors[i] = errors_[i].load(std::memory_order_acquire);
      to.predictions += to.prediction_errors[i];
    }
    to.within_bound = within_.load(std::memory_order_relaxed);
    if (to.within_bound > to.predictions) to.within_bound = to.predictions;  // of some that are being added
    to.predicted_ns = predicted_ns_.load(std::memory_order_relaxed);
    to.measured_ns = measured_ns_.load(std::memory_order_relaxed);
    to.prediction_off_ns = off_ns_.load(std::memory_order_relaxed);
  }

  void reset() noexcept {
    for (auto* word : {&within_, &predicted_ns_, &measured_ns_, &off_ns_}) word->store(0, std::memory_order_relaxed);
    for (auto& bucket : errors_) bucket.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> within_{0};
  std::atomic<std::uint64_t> predicted_ns_{0};
  std::atomic<std::uint64_t> measured_ns_{0};
  std::atomic<std::uint64_t> off_ns_{0};
  std::array<std::atomic<std::uint64_t>, CUDASCHED_ERROR_BUCKETS> errors_{};
};

}  // namespace cudasched::telemetry
