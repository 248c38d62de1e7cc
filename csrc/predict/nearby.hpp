// The measured times of one kernel's first launches against the trees' estimates, by estimate.
//
// The trees' error for a kernel differs with the size: by the kernel's tile at one end, by the memory at the other. So
// a first launch is corrected by those of the same kernel with about the same predicted time. Mean distances are kept
// in bins of an eighth of a logarithm, and bins up to two away count, the farther the less. The kernel's mean over all
// sizes stands in where no launch is near.
//
// A fixed table of rows, each of kBins neighbouring bins of one kernel; a row that finds no free place takes one.
// Nothing is kept between runs. Not thread-safe: the predictor's caller holds a lock. No allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace cudasched::predict {

class Nearby {
 public:
  static constexpr float kBinLog = 0.125F;
  static constexpr float kMostCount = 16;  // that a bin's mean remembers

  // A first launch of the kernel with this index: log(measured / base), where the base was exp(base_log) ns. The launch
  // counts as `weight` launches that were measured without noise.
  void add(std::uint32_t function, float base_log, float log_ratio, float weight) noexcept {
    const std::uint32_t bin = bin_of(base_log);
    const std::uint32_t tag = tag_of(function, bin);
    Row* row = find(tag);
    if (row == nullptr) {
      // The second place, so that of two rows that meet in one place both may stay.
      Row& first = rows_[place(tag)];
      row = first.tag == 0 ? &first : &rows_[other(place(tag))];
      *row = Row{};
      row->tag = tag;
    }
    Row& mine = *row;
    float& count = mine.count[bin % kBins];
    count = std::min(count + weight, kMostCount);
    mine.mean[bin % kBins] += weight * (log_ratio - mine.mean[bin % kBins]) / count;
  }

  // The correction of a first launch, where the kernel's mean over all sizes is `mean`.
  float about(std::uint32_t function, float base_log, float mean) const noexcept {
    const std::uint32_t middle = bin_of(base_log);
    float sum = mean;
    float weight = 1;
    const Row* row = nullptr;
    std::uint32_t tag = 0;
    for (std::uint32_t away = 0; away < kWeights.size(); ++away) {
      const std::uint32_t bin = middle + away - kWeights.size() / 2;
      if (const std::uint32_t wanted = tag_of(function, bin); wanted != tag) {
        tag = wanted;
        row = find(tag);
      }
      if (row == nullptr) continue;
      const float counts = kWeights[away] * row->count[bin % kBins];
      sum += counts * row->mean[bin % kBins];
      weight += counts;
    }
    return sum / weight;
  }

  // Nothing is known any more.
  void clear() noexcept { rows_.fill({}); }

 private:
  static constexpr std::uint32_t kBins = 8;
  static constexpr std::size_t kRows = 4096;
  // One over the square of 1 + (distance / 0.2)^2.
  static constexpr std::array<float, 5> kWeights{0.1524F, 0.5171F, 1, 0.5171F, 0.1524F};

  struct alignas(64) Row {
    std::uint32_t tag = 0;  // 0: free
    std::array<float, kBins> mean{};
    std::array<float, kBins> count{};
  };

  // Two above 0, so that the bins below the first are bins, too.
  static std::uint32_t bin_of(float base_log) noexcept {
    return static_cast<std::uint32_t>(std::max(base_log, 0.0F) * (1 / kBinLog)) + 2;
  }
  static std::uint32_t tag_of(std::uint32_t function, std::uint32_t bin) noexcept {
    return (function + 1) << 8 | bin / kBins;
  }
  // Rows of one kernel lie side by side, so that two that are needed together are fetched together.
  static std::size_t place(std::uint32_t tag) noexcept {
    return (((tag >> 8) * 0x9E37'79B1U >> 20) + (tag & 0xff)) % kRows;
  }
  static std::size_t other(std::size_t place) noexcept { return place ^ kRows / 2; }
  const Row* find(std::uint32_t tag) const noexcept {
    const std::size_t first = place(tag);
    if (rows_[first].tag == tag) return &rows_[first];
    return rows_[other(first)].tag == tag ? &rows_[other(first)] : nullptr;
  }
  Row* find(std::uint32_t tag) noexcept { return const_cast<Row*>(std::as_const(*this).find(tag)); }

  std::array<Row, kRows> rows_{};
};

}  // namespace cudasched::predict
