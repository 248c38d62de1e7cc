// Each key's history: its launches, its first estimate, and a robust running mean of the measured times, in a fixed
// table without allocation.
//
// The first three samples give their median (one of them may have been interrupted by another process). Later ones move
// the mean by a fifth of their distance. A distance counts at most kOutlierLog, so that one bad sample moves the mean
// by a tenth. Three such samples in a row on the same side mean that the work has changed, and the key starts anew with
// the last. Where noise (sample.hpp) is loud beside the duration, the lower quarter of the samples counts, corrected by
// that quarter's distance from the median. Noise has a floor, and the part above the floor differs from program to
// program. When the table is crowded, the least recently used key nearby gives way.
//
// Launches may share a key although their words differ (keys.hpp). Samples with other words than the first are compared
// with the first one's duration. Where one in three and more do not agree, the key is split.
//
// Not thread-safe: the predictor's caller holds a lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "predict/sample.hpp"
#include "predict/state.hpp"

namespace cudasched::predict {

// One cache line.
struct alignas(64) CacheEntry {
  static constexpr float kLeastLog = 0;  // 1 ns
  static constexpr float kMostLog = 32;  // 22 hours
  static constexpr float kStep = 0.2F;
  static constexpr float kOutlierLog = 0.5F;
  static constexpr float kLoudStep = 0.03F;  // of the noise
  static constexpr float kOutlierNoise = 4;  // a sample is no outlier within so many standard deviations of its noise
  // The differences allowed between launches of one key: those of repeats, and those too short to matter.
  static constexpr float kAlikeLog = 0.2F;
  static constexpr float kAlikeNs = 500;

  std::uint64_t key = 0;  // 0: free
  std::uint32_t launches = 0;
  std::uint32_t last_use = 0;
  std::uint32_t samples = 0;
  std::uint16_t function = 0;  // index of its correction
  std::uint16_t words = 0;     // of a shared key: a hash of the first sample's words; 0: not known
  float base_log = 0;          // log of the estimate by trees, critical path or guess, in ns
  float measured_log = 0;      // of the samples
  float estimate_log = 0;      // the present prediction, where there is a sample
  float estimate_ns = 0;       // the same
  float bound_ns = 0;          // the last, beside no other work; 0: the estimate has changed since
  float spread = 0;            // mean distance of the samples from the estimate, as a logarithm
  std::array<float, 3> first_logs{};
  std::int8_t outlier_run = 0;   // consecutive outliers: positive above, negative below
  bool persistent : 1 = false;   // the key means the same in the next run
  bool is_restored : 1 = false;  // from an earlier run, and not met in this one
  std::uint8_t doubts = 0;       // of a shared key: up with samples that do not agree, down with others
  bool is_split = false;         // of a shared key: not in use any more, the words tell its launches apart

  void add(const Sample& sample) noexcept;

  // Continues another key's history.
  void take_over(const CacheEntry& other) noexcept;

  // Whether a launch of a shared key with these words took as long as the key's launches. Splits the key after the
  // third that did not, unless enough others did.
  bool agrees(std::uint16_t sample_words, const Sample& sample) noexcept;
};
static_assert(sizeof(CacheEntry) == 64);

class Cache {
 public:
  static constexpr std::size_t kCapacity = 8192;
  static constexpr std::size_t kProbes = 8;

  // Null if the key is not there; counts as a use.
  CacheEntry* find(std::uint64_t key) noexcept {
    const CacheEntry* const entry = peek(key);
    return entry != nullptr ? &use(*entry) : nullptr;
  }

  // An entry of this cache, which counts as used.
  CacheEntry& use(const CacheEntry& known) noexcept {
    CacheEntry& entry = entries_[static_cast<std::size_t>(&known - entries_.data())];
    entry.last_use = ++clock_;
    return entry;
  }

  const CacheEntry* peek(std::uint64_t key) const noexcept {
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      const CacheEntry& entry = entries_[place(key, probe)];
      if (entry.key == key) return &entry;
    }
    return nullptr;
  }

  // An entry for a key that is not there and is not 0.
  CacheEntry& make(std::uint64_t key) noexcept;

  // Saves the keys that stay valid in the next run, with the parts of their history worth keeping.
  void save(StateWriter& out) const;
  // For a cache without keys. `launches` and `function` are every key's. Throws StateError.
  void restore(StateReader& in, std::uint32_t launches, std::uint16_t function);

 private:
  static std::size_t place(std::uint64_t key, std::size_t probe) noexcept { return ((key >> 17) + probe) % kCapacity; }

  std::array<CacheEntry, kCapacity> entries_{};
  std::uint32_t clock_ = 0;
};

}  // namespace cudasched::predict
