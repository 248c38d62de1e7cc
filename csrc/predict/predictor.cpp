#include "predict/predictor.hpp"

#include <algorithm>
#include <cmath>

namespace cudasched::predict {

void Predictor::observe(std::uint64_t key, const Prediction& prediction, std::int64_t duration_ns) noexcept {
  if (duration_ns <= 0) return;
  if (prediction.raw_guess_ns > 0) {
    const float log_ratio =
        std::log(static_cast<float>(duration_ns)) - std::log(static_cast<float>(prediction.raw_guess_ns));
    guess_log_ratio_ += 0.1F * (std::clamp(log_ratio, -3.0F, 3.0F) - guess_log_ratio_);
  }
  history_.observe(key, duration_ns);
}

std::int64_t Predictor::guess_ns(const Launch& launch, const Residency& residency) noexcept {
  const std::uint64_t resident =
      std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::max(residency.blocks_per_sm, 1)) *
                                     static_cast<std::uint64_t>(std::max(residency.sm_count, 1)));
  const std::uint64_t waves = std::max<std::uint64_t>(1, (launch.blocks() + resident - 1) / resident);
  // Beyond a million waves a guess is as good as any other; the bound keeps the product in range.
  return kShortestNs + static_cast<std::int64_t>(std::min<std::uint64_t>(waves, 1'000'000)) * kWaveNs;
}

std::int64_t Predictor::known_ns(const History::Entry& entry) noexcept {
  return static_cast<std::int64_t>(std::exp(entry.log_ns));
}

std::int64_t Predictor::corrected_ns(std::int64_t raw_ns) const noexcept {
  return static_cast<std::int64_t>(static_cast<float>(raw_ns) * std::exp(guess_log_ratio_));
}

}  // namespace cudasched::predict
