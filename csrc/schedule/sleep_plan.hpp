// How long a thread that waits at the gate may sleep before it looks again. A sleeper wakes late, by how much is
// measured: the last of a wait is spent awake, but no more of it than needed.
//
//   - The launch that waits may go a little late: the lead is there for that. The thread sleeps until a wake-up's usual
//     lateness, less half the lead, before that moment.
//   - The thread looks soon after the predicted ends of the work in flight: an end that was seen in time sets the clock
//     of the segment behind it, and prediction errors do not add up. The thread skips some ends shortly before the end
//     of the wait: little adds up between them, and each costs a wake-up.
//   - An end that is due and does not come is polled, at first awake, then in short sleeps.
//
// Pure: no clock. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cudasched::schedule {

class SleepPlan {
 public:
  static constexpr std::int64_t kAwakeNs = 3'000;     // before the end of a wait, beside the usual lateness
  static constexpr std::int64_t kShortestNs = 8'000;  // a sleep that is shorter is not worth a system call
  static constexpr std::int64_t kLongestNs = 1'000'000;
  static constexpr std::int64_t kPolledNs = 12'000;    // between two looks at an end that is overdue
  static constexpr int kAwakePolls = 5;                // looks at such an end before the thread sleeps between them
  static constexpr std::int64_t kShortlyNs = 200'000;  // an end so soon before that of the wait may be skipped,
  static constexpr int kMostSkipped = 4;               // so many in a row
  static constexpr std::int64_t kFirstLatenessNs = 30'000;
  static constexpr std::int64_t kMostLatenessNs = 200'000;

  // `spins`: it never sleeps.
  explicit SleepPlan(bool spins = false) noexcept : spins_(spins) {}

  bool spins() const noexcept { return spins_; }

  // The thread is told to wait for `wait_ns`, and may be late by `slack_ns`; the next predicted end is in `next_end_ns`
  // (0: due; a very large one: there is none). 0: it stays awake until the next look.
  std::int64_t sleep_ns(std::int64_t wait_ns, std::int64_t next_end_ns, std::int64_t slack_ns) noexcept {
    if (spins_) return 0;
    polls_ = next_end_ns == 0 ? std::min(polls_ + 1, kAwakePolls + 1) : 0;
    const std::int64_t ahead_ns = std::max<std::int64_t>(lateness_ns_ + kAwakeNs - slack_ns, 0);
    const bool skips = next_end_ns < wait_ns && wait_ns - next_end_ns <= kShortlyNs && skipped_ < kMostSkipped;
    std::int64_t until_look_ns = kLongestNs;
    if (!skips && next_end_ns > 0) until_look_ns = std::max(next_end_ns, kShortestNs);
    if (!skips && next_end_ns == 0) until_look_ns = polls_ > kAwakePolls ? kPolledNs : 0;
    const std::int64_t asleep_ns = std::min({until_look_ns, wait_ns - ahead_ns, kLongestNs});
    if (asleep_ns < kShortestNs) return 0;
    skipped_ = skips ? skipped_ + 1 : 0;
    return asleep_ns;
  }

  // The thread woke so much later than planned. The 90th percentile of these is followed.
  void woke(std::int64_t late_ns) noexcept {
    constexpr std::int64_t kStepNs = 500;
    lateness_ns_ += late_ns > lateness_ns_ ? 9 * kStepNs : -kStepNs;
    lateness_ns_ = std::clamp<std::int64_t>(lateness_ns_, 0, kMostLatenessNs);
  }

  std::int64_t lateness_ns() const noexcept { return lateness_ns_; }

 private:
  bool spins_;
  std::int64_t lateness_ns_ = kFirstLatenessNs;
  int polls_ = 0;    // looks in a row at an end that was due
  int skipped_ = 0;  // ends in a row
};

}  // namespace cudasched::schedule
