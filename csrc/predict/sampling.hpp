// Which launches are worth timing: the first three of a key, then one in kPeriod of all others. One in kEarlyPeriod
// until the bound knows launches of their length; all of a shared key in doubt. They are drawn at random, so that the
// bound holds for all launches, however often their keys come.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation.
#pragma once

#include <cstdint>

#include "predict/bound.hpp"
#include "predict/cache.hpp"

namespace cudasched::predict {

class Sampling {
 public:
  static constexpr std::uint32_t kFirst = 3;
  static constexpr std::uint32_t kPeriod = 16;
  static constexpr std::uint32_t kEarlyPeriod = 4;
  static constexpr std::uint32_t kMostEarlyDraws = 2'000;
  static constexpr std::uint32_t kMostUnanswered = 64;

  // Of the key's next launch.
  bool wants(const CacheEntry& entry, const Bound& bound, bool busy) noexcept {
    return entry.launches < kFirst || settles(entry) || draw(entry, bound, busy);
  }

  // A launch of a shared key was timed.
  void answered() noexcept { unanswered_ = 0; }

 private:
  // Whether the launch is timed to settle a doubt; not where such requests stay without an answer.
  bool settles(const CacheEntry& entry) noexcept {
    if (entry.doubts == 0 || entry.is_split || unanswered_ == kMostUnanswered) return false;
    ++unanswered_;
    return true;
  }

  // The chance is the same for all keys within a group of the bound, so that the samples represent the group.
  bool draw(const CacheEntry& entry, const Bound& bound, bool busy) noexcept {
    constexpr std::uint64_t kAll = std::uint64_t{1} << 32;
    draw_ = draw_ * 1'664'525 + 1'013'904'223;
    if (draw_ >= kAll / kEarlyPeriod) return false;
    if (draw_ < kAll / kPeriod) return true;
    // Where nothing can be measured the bound does not change, and more samples would be in vain.
    if (early_draws_ == kMostEarlyDraws) return false;
    if (!bound.is_young(Knowledge::kKnown, busy, Bound::bin_of(entry.estimate_log))) return false;
    ++early_draws_;
    return true;
  }

  std::uint32_t unanswered_ = 0;  // requests that would settle a doubt, since the last sample of a shared key
  std::uint32_t early_draws_ = 0;
  std::uint32_t draw_ = 0;  // a linear congruence: the same in every run
};

}  // namespace cudasched::predict
