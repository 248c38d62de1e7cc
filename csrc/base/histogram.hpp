// A histogram of times that many threads add to and others read. An octave has four buckets, so a quantile is wrong by
// an eighth at most (cudasched/counts.h has the bounds). The number of times is the sum of the buckets, so the two
// cannot contradict each other.
//
// add() is for the launch path: two relaxed additions, no lock, no allocation.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cudasched/counts.h"

namespace cudasched {

class Histogram {
 public:
  static constexpr int kBuckets = CUDASCHED_TIME_BUCKETS;
  static constexpr int kFirstOctave = 10;  // 2^10 ns
  static constexpr int kQuarters = 4;      // buckets an octave

  static constexpr std::size_t bucket_of(std::int64_t ns) noexcept {
    if (ns < (std::int64_t{1} << kFirstOctave)) return 0;
    const auto value = static_cast<std::uint64_t>(ns);
    const int octave = std::bit_width(value) - 1;
    const int quarter = static_cast<int>((value >> (octave - 2)) & 3);
    const int bucket = 1 + (octave - kFirstOctave) * kQuarters + quarter;
    return static_cast<std::size_t>(bucket < kBuckets ? bucket : kBuckets - 1);
  }

  // Where a bucket begins.
  static constexpr std::int64_t begin_ns(int bucket) noexcept {
    if (bucket <= 0) return 0;
    const int octave = (bucket - 1) / kQuarters;
    const int quarter = (bucket - 1) % kQuarters;
    return std::int64_t{kQuarters + quarter} << (kFirstOctave - 2 + octave);
  }

  void add(std::int64_t ns) noexcept {
    buckets_[bucket_of(ns)].fetch_add(1, std::memory_order_relaxed);
    if (ns > 0) sum_ns_.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
  }

  std::uint64_t count() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& bucket : buckets_) sum += bucket.load(std::memory_order_relaxed);
    return sum;
  }
  std::uint64_t sum_ns() const noexcept { return sum_ns_.load(std::memory_order_relaxed); }

  // Adds the contents to `to`.
  void read(cudasched_times& to) const noexcept {
    for (std::size_t i = 0; i < buckets_.size(); ++i) to.buckets[i] += buckets_[i].load(std::memory_order_relaxed);
    to.sum_ns += sum_ns_.load(std::memory_order_relaxed);
  }

  void reset() noexcept {
    for (auto& bucket : buckets_) bucket.store(0, std::memory_order_relaxed);
    sum_ns_.store(0, std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<std::uint64_t>, kBuckets> buckets_{};
  std::atomic<std::uint64_t> sum_ns_{0};
};

}  // namespace cudasched
