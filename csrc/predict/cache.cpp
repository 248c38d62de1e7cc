#include "predict/cache.hpp"

#include <algorithm>
#include <cmath>

namespace cudasched::predict {

void CacheEntry::add(const Sample& sample) noexcept {
  if (samples < 3) {
    first_logs[samples++] = sample.log();
    std::array<float, 3> sorted = first_logs;
    std::sort(sorted.begin(), sorted.begin() + samples);
    // Of two, the lower: interruptions only ever add time.
    measured_log = sorted[(samples - 1) / 2];
    const float least_ns = std::exp(sorted[0]);
    if (samples > 1 && sample.noise_of(least_ns) > Sample::kLoud) measured_log = std::log(least_ns + sample.low_ns);
    spread = 0;
    for (std::uint32_t i = 0; i < samples; ++i) {
      spread += std::min(std::abs(first_logs[i] - measured_log), kOutlierLog) / static_cast<float>(samples);
    }
    return;
  }
  const float distance = sample.log_over(measured_log);
  const float measured_ns = std::exp(measured_log);
  if (std::abs(distance) <= kOutlierLog || std::abs(sample.ns - measured_ns) <= kOutlierNoise * sample.noise_ns) {
    outlier_run = 0;
  } else {
    const int side = distance > 0 ? 1 : -1;
    const int run = outlier_run * side > 0 ? outlier_run + side : side;
    outlier_run = static_cast<std::int8_t>(run);
    if (std::abs(run) == 3) {
      samples = 1;
      first_logs[0] = measured_log = sample.log();
      outlier_run = 0;
      spread = 0;
      return;
    }
  }
  samples = std::max(samples, samples + 1);  // the greatest stays
  if (sample.noise_of(measured_ns) > Sample::kLoud) {
    // Towards the lower quarter of the samples, which other sources of time move least.
    const float step = sample.noise_ns * std::max(2 / static_cast<float>(samples), kLoudStep);
    const bool is_below = sample.ns + sample.low_ns < measured_ns;
    measured_log = std::log(std::max(measured_ns + step * (is_below ? -0.75F : 0.25F), Sample::kLeastNs));
  } else {
    measured_log += std::max(1 / static_cast<float>(samples), kStep) * std::clamp(distance, -kOutlierLog, kOutlierLog);
  }
  // The three first samples weigh as three.
  const float step = std::max(1.0F / static_cast<float>(samples), 0.05F);
  spread += step * (std::min(std::abs(distance), kOutlierLog) - spread);
}

bool CacheEntry::agrees(std::uint16_t sample_words, const Sample& sample) noexcept {
  constexpr std::uint8_t kMostDoubts = 4;
  constexpr std::uint8_t kDoubt = 2;
  if (words == 0 || samples == 0) words = sample_words;
  if (words == sample_words) return true;
  const bool is_alike = std::abs(sample.log() - measured_log) <= kAlikeLog ||
                        std::abs(sample.ns - std::exp(measured_log)) <= kAlikeNs + 3 * sample.noise_ns;
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
  is_restored = false;
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

void Cache::save(StateWriter& out) const {
  const auto is_kept = [](const CacheEntry& entry) {
    return entry.persistent && (entry.samples > 0 || entry.is_split);
  };
  out.put(static_cast<std::uint32_t>(std::count_if(entries_.begin(), entries_.end(), is_kept)));
  for (const CacheEntry& entry : entries_) {
    if (!is_kept(entry)) continue;
    out.put(entry.key);
    out.put(entry.is_split ? 0U : entry.samples);
    out.put(entry.measured_log);
    out.put(entry.base_log);
    out.put(entry.spread);
  }
}

void Cache::restore(StateReader& in, std::uint32_t launches, std::uint16_t function) {
  for (auto left = in.take<std::uint32_t>("number of keys", kCapacity); left > 0; --left) {
    const auto key = in.take<std::uint64_t>("key");
    CacheEntry* const known = key != 0 ? find(key) : nullptr;
    CacheEntry& entry = known != nullptr ? *known : make(key);
    entry.samples = in.take<std::uint32_t>("number of samples", ~std::uint32_t{0});
    entry.measured_log = in.take_real("duration", CacheEntry::kLeastLog, CacheEntry::kMostLog);
    entry.base_log = in.take_real("estimate", CacheEntry::kLeastLog, CacheEntry::kMostLog);
    entry.spread = in.take_real("spread", 0, CacheEntry::kOutlierLog);
    entry.first_logs.fill(entry.measured_log);
    entry.launches = launches;
    entry.function = function;
    entry.persistent = true;
    entry.is_restored = true;
    entry.is_split = entry.samples == 0;
    entry.estimate_log = entry.measured_log;
    entry.estimate_ns = std::exp(entry.measured_log);
  }
}

}  // namespace cudasched::predict
