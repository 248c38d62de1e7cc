// Pauses for measurements: a best-effort client that times kernels asks other best-effort clients of its GPU to pause.
// Its slot's hint_until_ns says until when. Others believe the word for 50 ms ahead at most, so a client that is killed
// or stopped holds nobody back for longer.
//
// Pure: no clock, no driver. Any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "arbiter/table.hpp"
#include "base/clock.hpp"

namespace cudasched::schedule {

inline constexpr std::int64_t kLongestPauseNs = 50 * kNsPerMs;
// For so long after a pause others keep little work in flight, so that the next pause begins soon.
inline constexpr std::int64_t kMeasuresNs = kNsPerSecond;

// Further ahead no word says: a damaged one. Twice a pause, as a reader's time is of before the word.
inline constexpr std::int64_t kPlausiblePauseNs = 2 * kLongestPauseNs;

// The rest of the pause that a best-effort client asks for; 0: none.
inline std::int64_t pause_ns(const arbiter::Slot& client, std::int64_t now_ns) noexcept {
  const std::int64_t until = client.hint_until_ns.load(std::memory_order_relaxed);
  return until > now_ns && until <= now_ns + kPlausiblePauseNs ? std::min(until - now_ns, kLongestPauseNs) : 0;
}

// A best-effort client asks for pauses, or did lately.
inline bool measures(const arbiter::Slot& client, std::int64_t now_ns) noexcept {
  const std::int64_t until = client.hint_until_ns.load(std::memory_order_relaxed);
  return until > now_ns - kMeasuresNs && until <= now_ns + kPlausiblePauseNs;
}

// How long another client's pause may not begin after the pause of this one, so that the others run in between.
inline std::int64_t next_pause_ns(const arbiter::Slot& client, std::int64_t now_ns) noexcept {
  const std::int64_t until = client.hint_until_ns.load();
  return until > now_ns - kLongestPauseNs && until <= now_ns + kPlausiblePauseNs ? until + kLongestPauseNs - now_ns : 0;
}

// The pauses that one client asks for. After each, others run for as long as it lasted.
class Pauses {
 public:
  // 0: a pause begins, for at most `for_ns`. Else the time until the next one may.
  std::int64_t begin(std::int64_t for_ns, std::int64_t now_ns) noexcept {
    if (const std::int64_t next = next_ns_.load(); now_ns < next) return next - now_ns;
    const std::int64_t lasts_ns = std::clamp<std::int64_t>(for_ns, 0, kLongestPauseNs);
    begun_ns_.store(now_ns);
    until_ns_.store(now_ns + lasts_ns);
    next_ns_.store(now_ns + 2 * lasts_ns);
    return 0;
  }
  void end(std::int64_t now_ns) noexcept {
    if (now_ns >= until_ns_.load()) return;
    until_ns_.store(now_ns);
    next_ns_.store(now_ns + (now_ns - begun_ns_.load()));
  }
  std::int64_t until_ns() const noexcept { return until_ns_.load(); }

 private:
  std::atomic<std::int64_t> begun_ns_{0};
  std::atomic<std::int64_t> until_ns_{0};
  std::atomic<std::int64_t> next_ns_{0};
};

}  // namespace cudasched::schedule
