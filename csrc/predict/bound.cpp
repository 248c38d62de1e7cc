#include "predict/bound.hpp"

#include <algorithm>
#include <cmath>

namespace cudasched::predict {
namespace {

constexpr float kMostShift = 0.2F;
constexpr float kMostBoundLog = 5.0F;  // of a bound over its prediction: 150 times
constexpr std::array<float, Bound::kKnowledges> kFirst{0.9F, 0.4F,
                                                       1.8F};  // before there are scores, for kDefaultCoverage
constexpr std::size_t kFew = 10;                               // scores that say more than a guess
constexpr float kWiderWeight = 40;  // scores of a window that weigh as much as all of the next wider one

}  // namespace

void ScoreWindow::add(float score, bool over, float coverage) noexcept {
  shift_ = std::clamp(shift_ + kLevelStep * (over ? coverage : coverage - 1), -kMostShift, kMostShift);
  auto* end = sorted_.begin() + size_;
  if (size_ == kWindow) {
    auto* const old = std::lower_bound(sorted_.begin(), end, ring_[next_]);
    std::copy(old + 1, end, old);
    --end;
  } else {
    ++size_;
  }
  auto* const place = std::lower_bound(sorted_.begin(), end, score);
  std::copy_backward(place, end, end + 1);
  *place = score;
  ring_[next_] = score;
  next_ = static_cast<std::uint16_t>((next_ + 1) % kWindow);
}

float ScoreWindow::quantile(float coverage) const noexcept {
  const float level = std::clamp(coverage + shift_, 0.0F, 1.0F);
  // The next launch is one more than the window has. Between two scores a straight line: the upper one would cover half
  // a score too many, which is a percent of a small window.
  const float rank = std::clamp(level * static_cast<float>(size_ + 1) - 1, 0.0F, static_cast<float>(size_ - 1));
  const auto below = static_cast<std::size_t>(rank);
  const auto above = std::min<std::size_t>(below + 1, size_ - 1U);
  return sorted_[below] + (rank - static_cast<float>(below)) * (sorted_[above] - sorted_[below]);
}

// The tails of durations are about exponential.
Bound::Bound(float coverage) noexcept
    : coverage_(coverage), first_(std::log(1 - coverage) / std::log(1 - kDefaultCoverage)) {}

std::uint8_t Bound::bin_of(float log_ns) noexcept {
  // Half octaves from 0.7 us on.
  const float halves = 2.0F * (log_ns * 1.442695F - 9.0F);
  return static_cast<std::uint8_t>(std::clamp(halves, 0.0F, static_cast<float>(kBins - 1)));
}

float Bound::margin(Knowledge knowledge, bool busy, std::uint8_t bin, float scale) const noexcept {
  const ScoreWindow* const windows = &groups_[first_group(knowledge, busy)];
  const ScoreWindow& all = windows[kWindows - 1];
  float quantile = first_ * kFirst[static_cast<std::size_t>(knowledge)];
  if (all.size() >= kFew) {
    quantile = all.quantile(coverage_);
    const auto [narrow, wide] = windows_of(bin);
    for (const std::size_t window : {wide, narrow}) {
      if (windows[window].size() == 0) continue;
      const auto scores = static_cast<float>(windows[window].size());
      quantile += scores / (scores + kWiderWeight) * (windows[window].quantile(coverage_) - quantile);
    }
  }
  return std::clamp(quantile * scale, 0.0F, kMostBoundLog);
}

void Bound::add(Knowledge knowledge, bool busy, std::uint8_t bin, float scale, float log_ratio, bool over) noexcept {
  const float score = std::clamp(log_ratio, -kMostBoundLog, kMostBoundLog) / scale;
  const auto [narrow, wide] = windows_of(bin);
  for (const std::size_t window : {narrow, wide, std::size_t{kWindows - 1}})
    groups_[first_group(knowledge, busy) + window].add(score, over, coverage_);
}

void Bound::save(StateWriter& out) const {
  for (const ScoreWindow& window : groups_) {
    out.put(window.shift());
    out.put(static_cast<std::uint32_t>(window.size()));
    for (std::size_t age = window.size(); age-- > 0;) out.put(window.score(age));
  }
}

void Bound::restore(StateReader& in, bool same_base) {
  constexpr std::size_t kOfNew = 2 * kWindows;  // groups, the first
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    ScoreWindow& window = groups_[group];
    const bool is_kept = same_base || group >= kOfNew;
    const float shift = in.take_real("level of a bound", -1, 1);
    const auto scores = in.take<std::uint32_t>("number of scores", ScoreWindow::kWindow);
    for (std::uint32_t i = 0; i < scores; ++i) {
      const float score = in.take_real("score", -kMostScore, kMostScore);
      if (is_kept) window.add(score, false, coverage_);
    }
    if (is_kept) window.set_shift(shift);
  }
}

}  // namespace cudasched::predict
