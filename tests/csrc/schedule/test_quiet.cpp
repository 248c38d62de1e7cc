// Pauses for measurements: what a client may ask for, and what others believe.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "schedule/quiet.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kStart = 1000 * kNsPerSecond;

TEST(Quiet, OthersBelieveAWordThatAPauseCanHave) {
  const auto slot = std::make_unique<arbiter::Slot>();
  const auto said = [&](std::int64_t until) {
    slot->hint_until_ns = until;
    return std::pair(pause_ns(*slot, kStart), measures(*slot, kStart));
  };
  EXPECT_EQ(said(0), std::pair(std::int64_t{0}, false));
  EXPECT_EQ(said(kStart + 1), std::pair(std::int64_t{1}, true));
  EXPECT_EQ(said(kStart + kLongestPauseNs), std::pair(kLongestPauseNs, true));
  EXPECT_EQ(said(kStart + kLongestPauseNs + 1), std::pair(kLongestPauseNs, true));  // said since the reader's `now`
  EXPECT_EQ(said(kStart + kPlausiblePauseNs), std::pair(kLongestPauseNs, true));
  EXPECT_EQ(said(kStart + kPlausiblePauseNs + 1), std::pair(std::int64_t{0}, false));  // a damaged word
  EXPECT_EQ(said(INT64_MAX), std::pair(std::int64_t{0}, false));
  EXPECT_EQ(said(INT64_MIN), std::pair(std::int64_t{0}, false));
  EXPECT_EQ(said(kStart), std::pair(std::int64_t{0}, true));
  EXPECT_EQ(said(kStart - kMeasuresNs + 1), std::pair(std::int64_t{0}, true));
  EXPECT_EQ(said(kStart - kMeasuresNs), std::pair(std::int64_t{0}, false));
}

TEST(Quiet, TwoThatMeasureLeaveTimeToOthersInBetween) {
  const auto slot = std::make_unique<arbiter::Slot>();
  const auto next = [&](std::int64_t until) {
    slot->hint_until_ns = until;
    return next_pause_ns(*slot, kStart);
  };
  EXPECT_EQ(next(0), 0);
  EXPECT_EQ(next(kStart + 1), kLongestPauseNs + 1);
  EXPECT_EQ(next(kStart + kLongestPauseNs), 2 * kLongestPauseNs);
  EXPECT_EQ(next(kStart), kLongestPauseNs);
  EXPECT_EQ(next(kStart - kLongestPauseNs + 1), 1);
  EXPECT_EQ(next(kStart - kLongestPauseNs), 0);
  EXPECT_EQ(next(kStart + kPlausiblePauseNs + 1), 0);  // a damaged word
  EXPECT_EQ(next(INT64_MAX), 0);
  EXPECT_EQ(next(INT64_MIN), 0);
}

TEST(Quiet, OthersRunForAsLongAsAPauseTook) {
  Pauses pauses;
  EXPECT_EQ(pauses.begin(10 * kNsPerMs, kStart), 0);
  EXPECT_EQ(pauses.until_ns(), kStart + 10 * kNsPerMs);
  EXPECT_EQ(pauses.begin(10 * kNsPerMs, kStart + 10 * kNsPerMs), 10 * kNsPerMs);
  EXPECT_EQ(pauses.until_ns(), kStart + 10 * kNsPerMs);
  EXPECT_EQ(pauses.begin(kNsPerSecond, kStart + 20 * kNsPerMs), 0);
  EXPECT_EQ(pauses.until_ns(), kStart + 20 * kNsPerMs + kLongestPauseNs);
  pauses.end(kStart + 24 * kNsPerMs);  // after 4
  EXPECT_EQ(pauses.until_ns(), kStart + 24 * kNsPerMs);
  EXPECT_EQ(pauses.begin(kNsPerMs, kStart + 25 * kNsPerMs), 3 * kNsPerMs);
  EXPECT_EQ(pauses.begin(kNsPerMs, kStart + 28 * kNsPerMs), 0);
  pauses.end(kStart + 40 * kNsPerMs);  // long over
  EXPECT_EQ(pauses.until_ns(), kStart + 29 * kNsPerMs);
}

// However a client asks, others have half of the time and never wait for more than the longest pause.
TEST(Quiet, NoClientTakesMoreThanHalf) {
  std::mt19937 random(7);
  for (int history = 0; history < 200; ++history) {
    Pauses pauses;
    std::int64_t paused_ns = 0;
    std::int64_t longest_ns = 0;
    std::int64_t run_ns = 0;
    for (std::int64_t now = kStart; now < kStart + kNsPerSecond; now += 100'000) {
      if (random() % 4 == 0) pauses.begin(static_cast<std::int64_t>(random() % 100) * kNsPerMs, now);
      if (random() % 64 == 0) pauses.end(now);
      run_ns = now < pauses.until_ns() ? run_ns + 100'000 : 0;
      paused_ns += now < pauses.until_ns() ? 100'000 : 0;
      longest_ns = std::max(longest_ns, run_ns);
    }
    EXPECT_LE(paused_ns, kNsPerSecond / 2 + kLongestPauseNs);
    EXPECT_LE(longest_ns, kLongestPauseNs);
  }
}

}  // namespace
}  // namespace cudasched::schedule
