#include "predict/history.hpp"

#include <algorithm>
#include <cmath>

namespace cudasched::predict {
namespace {

std::size_t place(std::uint64_t key, int probe) noexcept {
  return (static_cast<std::size_t>(key >> 17) + static_cast<std::size_t>(probe)) % History::kCapacity;
}

}  // namespace

History::Entry& History::use(std::uint64_t key) noexcept {
  Entry* victim = nullptr;
  for (int probe = 0; probe < kProbes; ++probe) {
    Entry& entry = entries_[place(key, probe)];
    if (entry.key == key) {
      entry.last_use = ++clock_;
      return entry;
    }
    if (victim == nullptr || entry.last_use < victim->last_use) victim = &entry;
  }
  *victim = Entry{};
  victim->key = key;
  victim->last_use = ++clock_;
  return *victim;
}

const History::Entry* History::find(std::uint64_t key) const noexcept {
  for (int probe = 0; probe < kProbes; ++probe) {
    const Entry& entry = entries_[place(key, probe)];
    if (entry.key == key) return &entry;
  }
  return nullptr;
}

void History::observe(std::uint64_t key, std::int64_t duration_ns) noexcept {
  if (duration_ns <= 0) return;
  const float sample = std::log(static_cast<float>(duration_ns));
  Entry& entry = use(key);
  if (entry.samples < 3) {
    entry.first_logs[entry.samples++] = sample;
    std::array<float, 3> sorted = entry.first_logs;
    std::sort(sorted.begin(), sorted.begin() + entry.samples);
    // Of two, the lower: interruptions only ever add time.
    entry.log_ns = sorted[(entry.samples - 1) / 2];
    return;
  }
  const float distance = sample - entry.log_ns;
  if (std::abs(distance) <= kOutlierLog) {
    entry.outlier_run = 0;
  } else {
    const int side = distance > 0 ? 1 : -1;
    const int run = entry.outlier_run * side > 0 ? entry.outlier_run + side : side;
    entry.outlier_run = static_cast<std::int8_t>(run);
    if (std::abs(run) == 3) {
      entry.samples = 1;
      entry.first_logs[0] = sample;
      entry.log_ns = sample;
      entry.outlier_run = 0;
      return;
    }
  }
  ++entry.samples;
  entry.log_ns += kStep * std::clamp(distance, -kOutlierLog, kOutlierLog);
}

}  // namespace cudasched::predict
