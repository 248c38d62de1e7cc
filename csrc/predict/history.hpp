// What each key's launches lasted: a robust running estimate in log time, in a fixed table without allocation.
//
// The first three samples of a key give their median (one of them may have been interrupted by another process). Later
// ones move the estimate by a fifth of their distance, a distance that counts at most kOutlierLog, so that one bad
// sample moves it by a tenth; three such samples in a row on the same side mean that the work has changed, and the key
// starts anew with the last. When the table is crowded, the key that was used least recently nearby gives way.
//
// Not thread-safe: the caller (the gate) holds a lock.
#pragma once

#include <array>
#include <cstdint>

namespace cudasched::predict {

class History {
 public:
  static constexpr int kCapacity = 8192;
  static constexpr int kProbes = 8;
  static constexpr float kStep = 0.2F;
  static constexpr float kOutlierLog = 0.5F;

  struct Entry {
    std::uint64_t key = 0;  // 0: free
    std::uint64_t launches = 0;
    std::uint64_t last_use = 0;
    float log_ns = 0;
    std::uint32_t samples = 0;
    std::array<float, 3> first_logs{};
    std::int8_t outlier_run = 0;  // consecutive outliers: positive above, negative below
  };

  // The key's entry, made if it is new. `key` must not be 0.
  Entry& use(std::uint64_t key) noexcept;

  // The key's entry or null; does not count as a use.
  const Entry* find(std::uint64_t key) const noexcept;

  // A measured duration; values that are not positive are ignored.
  void observe(std::uint64_t key, std::int64_t duration_ns) noexcept;

 private:
  std::array<Entry, kCapacity> entries_{};
  std::uint64_t clock_ = 0;
};

}  // namespace cudasched::predict
