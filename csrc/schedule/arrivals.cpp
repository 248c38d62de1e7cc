#include "schedule/arrivals.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kShortestWindowNs = 50'000;
constexpr double kWindow = 1.5;             // times the largest residual
constexpr double kLargestResidual = 0.125;  // of a period, for a line to be one
constexpr double kNoDoubt = 0.03;           // of a period: random arrivals do so once in ten million
constexpr double kMostPeriods = 24;         // under the arrivals of a fit
constexpr std::size_t kFewestGaps = 4;      // for a rate
constexpr std::int64_t kRateLookNs = 1'000'000;

}  // namespace

Arrivals::Arrivals(double miss_probability) noexcept {
  if (!(miss_probability > 0 && miss_probability < 1)) return;
  // With n gaps, and T their sum and the silence since, the next arrival stays away for w with probability
  // (T / (T + w))^n (exponential gaps, Jeffreys' prior of their rate).
  for (std::size_t gaps = kFewestGaps; gaps < kTimes; ++gaps) {
    rate_factor_[gaps] = std::pow(1 - miss_probability, -1.0 / static_cast<double>(gaps)) - 1;
  }
}

void Arrivals::arrived(std::int64_t now_ns) noexcept {
  hint_until_ns_ = 0;
  if (count_ > 0 && now_ns <= time(0)) return;
  // A silence is taken to keep the rhythm; only the phase is new.
  const bool silent = count_ > 0 && fitted() && static_cast<double>(now_ns - time(0)) > kSilentPeriods * period_ns_;
  const bool goes_on = silent && periodic() && count_ > 1;
  if (silent && !goes_on) period_ns_ = 0;
  bool came_true = false;
  if (goes_on) {
    count_ = 0;
  } else if (fitted()) {
    const double since_ns = static_cast<double>(now_ns - time(0)) - phase_ns_;
    came_true = std::abs(since_ns - std::round(since_ns / period_ns_) * period_ns_) <= static_cast<double>(window_ns_);
  }
  const bool is_new = !fitted();
  if (!goes_on) came_true_ = static_cast<std::uint8_t>(came_true_ << 1 | (came_true ? 1 : 0));
  times_[next_] = now_ns;
  next_ = (next_ + 1) % kTimes;
  count_ = std::min(count_ + 1, kTimes);
  const bool beyond_doubt = fit();
  if (is_new && beyond_doubt) came_true_ = 0xff;
}

bool Arrivals::fit() noexcept {
  if (count_ < kTimes) {
    phase_ns_ = 0;  // the period from before a silence goes on from the last arrival
    return false;
  }
  period_ns_ = 0;
  std::array<double, kTimes> at_ns{};  // the oldest first, from the oldest
  for (std::size_t i = 0; i < kTimes; ++i) at_ns[i] = static_cast<double>(time(kTimes - 1 - i) - time(kTimes - 1));
  std::array<double, kTimes - 1> gaps_ns{};
  for (std::size_t i = 1; i < kTimes; ++i) gaps_ns[i - 1] = at_ns[i] - at_ns[i - 1];
  const auto middle = gaps_ns.begin() + (kTimes - 1) / 2;
  std::nth_element(gaps_ns.begin(), middle, gaps_ns.end());

  // The number of each arrival, counting those left out; then the line of least squares through (number, time).
  std::array<double, kTimes> number{};
  for (std::size_t i = 1; i < kTimes; ++i) {
    const double periods = std::round((at_ns[i] - at_ns[i - 1]) / *middle);
    if (periods < 1) return false;
    number[i] = number[i - 1] + periods;
  }
  if (number.back() > kMostPeriods) return false;
  double mean_number = 0;
  double mean_ns = 0;
  for (std::size_t i = 0; i < kTimes; ++i) {
    mean_number += number[i] / kTimes;
    mean_ns += at_ns[i] / kTimes;
  }
  double above = 0;
  double below = 0;
  for (std::size_t i = 0; i < kTimes; ++i) {
    above += (number[i] - mean_number) * (at_ns[i] - mean_ns);
    below += (number[i] - mean_number) * (number[i] - mean_number);
  }
  const double slope_ns = above / below;
  double largest_ns = 0;
  for (std::size_t i = 0; i < kTimes; ++i) {
    largest_ns = std::max(largest_ns, std::abs(at_ns[i] - mean_ns - slope_ns * (number[i] - mean_number)));
  }
  if (!(slope_ns > 0) || largest_ns > kLargestResidual * slope_ns) return false;
  period_ns_ = slope_ns;
  phase_ns_ = mean_ns + slope_ns * (number.back() - mean_number) - at_ns.back();
  window_ns_ = static_cast<std::int64_t>(kWindow * largest_ns) + kShortestWindowNs;
  return largest_ns <= kNoDoubt * slope_ns;
}

bool Arrivals::periodic() const noexcept { return fitted() && std::popcount(came_true_) >= kTrue; }

double Arrivals::confidence() const noexcept {
  return periodic() ? static_cast<double>(std::popcount(came_true_)) / kPredictions : 0;
}

void Arrivals::expect(std::int64_t within_ns, std::int64_t now_ns) noexcept {
  if (within_ns <= 0) return;
  hint_until_ns_ = std::max(hint_until_ns_, now_ns + std::min(within_ns, kLongestHintNs));
}

std::int64_t Arrivals::hint_ns(std::int64_t now_ns) const noexcept {
  return std::clamp<std::int64_t>(hint_until_ns_ - now_ns, 0, kLongestHintNs);
}

Arrivals::Foresight Arrivals::look(std::int64_t now_ns) const noexcept {
  if (count_ == 0) return {};
  const std::int64_t silent_ns = std::max<std::int64_t>(now_ns - time(0), 0);
  if (periodic()) {
    const auto silent = static_cast<double>(silent_ns);
    const auto share_ns = static_cast<std::int64_t>(period_ns_) / kShare;
    const std::int64_t late_ns = std::max(window_ns_, std::min(kLateNs, share_ns));
    if (silent > kSilentPeriods * period_ns_) return {};
    // The first predicted one, after the last that came, that may still come.
    const double past = std::floor((silent - static_cast<double>(late_ns) - phase_ns_) / period_ns_) + 1;
    const auto in_ns = static_cast<std::int64_t>(phase_ns_ + std::max(past, 1.0) * period_ns_ - silent);
    const std::int64_t ahead_ns = window_ns_ + kReadyAheadNs;
    return {std::max<std::int64_t>(in_ns - window_ns_, 0), std::max<std::int64_t>(in_ns + late_ns, 1),
            ahead_ns <= share_ns ? std::max<std::int64_t>(in_ns - ahead_ns, 0) : 0};
  }
  const std::size_t gaps = count_ - 1;
  if (rate_factor_[gaps] == 0) return {};
  const auto known_ns = static_cast<double>(now_ns - time(gaps));
  return {static_cast<std::int64_t>(known_ns * rate_factor_[gaps]), kRateLookNs};
}

}  // namespace cudasched::schedule
