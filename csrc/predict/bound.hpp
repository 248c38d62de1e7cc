// How much longer than predicted may a launch take? An upper bound that a set share of launches stay within (90% by
// default), learned on line by adaptive conformal prediction (Gibbs and Candes, 2021). The bound is the share's
// quantile over the last kWindow scores of a group. The quantile's level moves up after each launch over the bound and
// down after each within. So the share holds in the long run for any durations.
//
// A score is log(measured / predicted). Groups: the launch's *predicted* time (half octaves), whether other work ran
// beside the launch, and how well its key was known. Where a key has its own spread, scores are in units of that
// spread. So a steady kernel and a noisy one of the same length do not pay for each other. A bin's quantile is shrunk
// to that of its stretch of bins, and that to the quantile of all bins, by the number of scores. With a hundred scores,
// a bin's own 90% would be off by 3%. Before the first score, the bound is a guess.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "predict/state.hpp"

namespace cudasched::predict {

inline constexpr float kDefaultCoverage = 0.9F;

// The evidence behind a prediction.
enum class Knowledge : std::uint8_t { kNew, kYoung, kKnown };  // no sample, one or two, three and more

// The last scores and the level of one group.
class ScoreWindow {
 public:
  static constexpr std::size_t kWindow = 256;
  static constexpr float kLevelStep = 0.04F;

  void add(float score, bool over, float coverage) noexcept;

  // The score that a share of `coverage`, as the level has moved it, stays within; for windows that are not empty.
  float quantile(float coverage) const noexcept;

  std::size_t size() const noexcept { return size_; }
  float shift() const noexcept { return shift_; }
  float score(std::size_t age) const noexcept { return ring_[(next_ + kWindow - 1 - age) % kWindow]; }  // 0: the last
  void set_shift(float shift) noexcept { shift_ = shift; }

 private:
  std::array<float, kWindow> ring_{};
  std::array<float, kWindow> sorted_{};
  std::uint16_t next_ = 0;
  std::uint16_t size_ = 0;
  float shift_ = 0;
};

class Bound {
 public:
  static constexpr int kBins = 28;
  static constexpr int kStretch = 4;                             // bins
  static constexpr int kWindows = kBins + kBins / kStretch + 1;  // of the bins, of the stretches, of all together
  static constexpr int kKnowledges = 3;
  static constexpr int kGroups = 2 * kKnowledges * kWindows;
  static constexpr std::size_t kEnough = 128;  // scores of a bin that is not young

  explicit Bound(float coverage = kDefaultCoverage) noexcept;

  static std::uint8_t bin_of(float log_ns) noexcept;

  // The logarithm of bound over prediction; never negative. `scale` is 1 or the key's spread.
  float margin(Knowledge knowledge, bool busy, std::uint8_t bin, float scale) const noexcept;

  // `log_ratio` is log(measured / predicted) of a launch, `over` whether the launch exceeded margin() of the same
  // arguments.
  void add(Knowledge knowledge, bool busy, std::uint8_t bin, float scale, float log_ratio, bool over) noexcept;

  // Whether the bin has so few scores that more of its launches are worth timing.
  bool is_young(Knowledge knowledge, bool busy, std::uint8_t bin) const noexcept {
    return groups_[first_group(knowledge, busy) + bin].size() < kEnough;
  }

  float coverage() const noexcept { return coverage_; }

  void save(StateWriter& out) const;
  // For a bound without scores. Throws StateError. Scores of launches without a sample, and their level, depend on the
  // base that estimates them: those of another base are left out.
  void restore(StateReader& in, bool same_base);

 private:
  static constexpr float kMostScore = 10'000;

  static std::size_t first_group(Knowledge knowledge, bool busy) noexcept {
    return (static_cast<std::size_t>(knowledge) * 2 + (busy ? 1 : 0)) * kWindows;
  }

  // The windows of the bin and of its stretch: places after first_group(). The window of all bins is the last.
  static std::array<std::size_t, 2> windows_of(std::uint8_t bin) noexcept {
    return {bin, std::size_t{kBins} + bin / kStretch};
  }

  std::array<ScoreWindow, kGroups> groups_{};
  float coverage_;
  float first_;  // of the coverage's quantile over the default's, before there are scores
};

}  // namespace cudasched::predict
