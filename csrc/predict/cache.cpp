#include "predict/cache.hpp"

#include <algorithm>
#include <cmath>

namespace cudasched::predict {

void CacheEntry::add(float sample_log) noexcept {
  if (samples < 3) {
    first_logs[samples++] = sample_log;
    std::array<float, 3> sorted = first_logs;
    std::sort(sorted.begin(), sorted.begin() + samples);
    // Of two, the lower: interruptions only ever add time.
    measured_log = sorted[(samples - 1) / 2];
    spread = 0;
    for (std::uint32_t i = 0; i < samples; ++i) {
      spread += std::min(std::abs(first_logs[i] - measured_log), kOutlierLog) / static_cast<float>(samples);
    }
    return;
  }
  const float distance = sample_log - measured_log;
  if (std::abs(distance) <= kOutlierLog) {
    outlier_run = 0;
  } else {
    const int side = distance > 0 ? 1 : -1;
    const int run = outlier_run * side > 0 ? outlier_run + side : side;
    outlier_run = static_cast<std::int8_t>(run);
    if (std::abs(run) == 3) {
      samples = 1;
      first_logs[0] = sample_log;
      measured_log = sample_log;
      outlier_run = 0;
      spread = 0;
      return;
    }
  }
  ++samples;
  measured_log += kStep * std::clamp(distance, -kOutlierLog, kOutlierLog);
  // The three first samples weigh as three.
  const float step = std::max(1.0F / static_cast<float>(samples), 0.05F);
  spread += step * (std::min(std::abs(distance), kOutlierLog) - spread);
}

bool CacheEntry::agrees(std::uint16_t sample_words, float sample_log) noexcept {
  constexpr std::uint8_t kMostDoubts = 4;
  constexpr std::uint8_t kDoubt = 2;
  if (words == 0 || samples == 0) words = sample_words;
  if (words == sample_words) return true;
  const bool is_alike = std::abs(sample_log - measured_log) <= kAlikeLog ||
                        std::abs(std::exp(sample_log) - std::exp(measured_log)) <= kAlikeNs;
  if (is_alike) {
    doubts = static_cast<std::uint8_t>(std::max(doubts - 1, 0));
  } else if ((doubts = static_cast<std::uint8_t>(doubts + kDoubt)) > kMostDoubts) {
    is_split = true;
  }
  return is_alike;
}

void CacheEntry::take_over(const CacheEntry& other) noexcept {
  const std::uint64_t own_key = key;
  const std::uint32_t used = last_use;
  *this = other;
  key = own_key;
  last_use = used;
  words = 0;
  doubts = 0;
  is_split = false;
}

CacheEntry& Cache::make(std::uint64_t key) noexcept {
  CacheEntry* victim = &entries_[place(key, 0)];
  for (std::size_t probe = 1; probe < kProbes; ++probe) {
    CacheEntry& entry = entries_[place(key, probe)];
    // By age, so that the clock may wrap.
    if (entry.key == 0 ? victim->key != 0 : victim->key != 0 && clock_ - entry.last_use > clock_ - victim->last_use) {
      victim = &entry;
    }
  }
  *victim = CacheEntry{};
  victim->key = key;
  victim->last_use = ++clock_;
  return *victim;
}

}  // namespace cudasched::predict
