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
