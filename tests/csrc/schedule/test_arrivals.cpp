#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "schedule/arrivals.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(Arrivals, AHintHoldsForItsLengthOrUntilTheWorkComes) {
  Arrivals arrivals;
  EXPECT_EQ(arrivals.hint_ns(5 * kMs), 0);
  arrivals.expect(2 * kMs, 10 * kMs);
  EXPECT_EQ(arrivals.hint_ns(10 * kMs), 2 * kMs);
  EXPECT_EQ(arrivals.hint_ns(11 * kMs), 1 * kMs);
  EXPECT_EQ(arrivals.hint_ns(12 * kMs), 0);
  arrivals.expect(2 * kMs, 20 * kMs);
  arrivals.arrived(21 * kMs);
  EXPECT_EQ(arrivals.hint_ns(21 * kMs), 0);
  arrivals.expect(INT64_MAX, 30 * kMs);
  EXPECT_EQ(arrivals.hint_ns(30 * kMs), Arrivals::kLongestHintNs);
  EXPECT_EQ(arrivals.hint_ns(30 * kMs + Arrivals::kLongestHintNs), 0);
  Arrivals other;
  other.expect(-5, 0);
  EXPECT_EQ(other.hint_ns(0), 0);
}

TEST(Arrivals, WithoutArrivalsNothingIsForeseen) {
  EXPECT_EQ(Arrivals().look(kMs).free_ns, Snapshot::kLongAgoNs);
  EXPECT_EQ(Arrivals(0.1).look(kMs).free_ns, Snapshot::kLongAgoNs);
}

// A server that pauses for a second and goes on at another phase: from its first arrival on, the next is foretold.
TEST(Arrivals, ARhythmThatPausesIsTakenUpAgain) {
  Arrivals arrivals;
  std::int64_t now = 0;
  for (int i = 0; i < 30; ++i) arrivals.arrived(now += 33 * kMs);
  ASSERT_GT(arrivals.confidence(), 0);
  now += 1'000 * kMs;
  EXPECT_EQ(arrivals.look(now).free_ns, Snapshot::kLongAgoNs);
  now += 7 * kMs;
  for (int i = 0; i < 20; ++i) {
    arrivals.arrived(now);
    const Arrivals::Foresight next = arrivals.look(now);
    EXPECT_TRUE(next.free_ns <= 33 * kMs && 33 * kMs <= next.over_ns && next.over_ns - next.free_ns < 2 * kMs) << i;
    now += 33 * kMs;
  }
  // With another period it is forgotten soon.
  now += 2'000 * kMs;
  for (int i = 0; i < 4; ++i) arrivals.arrived(now += 20 * kMs);
  EXPECT_EQ(arrivals.confidence(), 0);
}

// A program that wakes up late finds the GPU kept free, for as long as costs best effort little.
TEST(Arrivals, ALateOneIsWaitedForAWhile) {
  for (const std::int64_t period_ns : {4 * kMs, 33 * kMs, 500 * kMs}) {
    Arrivals arrivals;
    std::int64_t now = 0;
    for (int i = 0; i < 30; ++i) arrivals.arrived(now += period_ns);
    const std::int64_t due = now + period_ns;
    const std::int64_t waits = std::min(kMs, period_ns / 32);
    EXPECT_EQ(arrivals.look(due).free_ns, 0);
    const Arrivals::Foresight late = arrivals.look(due + waits - 2'000);
    EXPECT_EQ(late.free_ns, 0) << period_ns;
    EXPECT_LE(late.over_ns, 3'000) << period_ns;
    EXPECT_GT(arrivals.look(due + waits + 2'000).free_ns, period_ns / 2) << period_ns;
  }
}

// Being ready costs best effort the time from then on, so it is told only of arrivals far enough apart.
TEST(Arrivals, BeingReadyCostsBestEffortASmallShareAtMost) {
  for (const std::int64_t period_ns : {5 * kMs, 9 * kMs, 10 * kMs, 33 * kMs, 500 * kMs}) {
    Arrivals arrivals;
    std::int64_t now = 0;
    for (int i = 0; i < 30; ++i) arrivals.arrived(now += period_ns);
    now += period_ns / 2;
    const Arrivals::Foresight next = arrivals.look(now);
    ASSERT_GT(next.over_ns, 0);
    if (period_ns < 10 * kMs) {
      EXPECT_EQ(next.ready_ns, 0) << period_ns;
      continue;
    }
    EXPECT_EQ(next.ready_ns, next.free_ns - Arrivals::kReadyAheadNs) << period_ns;
    // At that moment, and while the work is due, there is nothing more to come.
    EXPECT_EQ(arrivals.look(now + next.ready_ns).ready_ns, 0);
    EXPECT_EQ(arrivals.look(now + next.over_ns - 1'000).ready_ns, 0);
    EXPECT_GT(arrivals.look(now + next.over_ns + 1'000).ready_ns, 0) << "it stayed away: the one after it";
  }
  // So loose a rhythm that it would wait for long.
  Arrivals loose;
  for (int i = 0; i < 30; ++i) loose.arrived(33 * kMs * (i + 1) + (i % 2) * 2 * kMs);
  EXPECT_GT(loose.confidence(), 0);
  EXPECT_EQ(loose.look(33 * kMs * 31 + kMs).ready_ns, 0);
}

// A burst, as of a warm-up, has a rhythm too; the slower one that follows is found all the same.
TEST(Arrivals, ASlowerRhythmAfterABurstIsFound) {
  Arrivals arrivals;
  std::int64_t now = 0;
  for (int i = 0; i < 30; ++i) arrivals.arrived(now += kMs);
  ASSERT_GT(arrivals.confidence(), 0);
  for (int i = 0; i < 20; ++i) arrivals.arrived(now += 33 * kMs);
  EXPECT_GT(arrivals.confidence(), 0);
  EXPECT_NEAR(static_cast<double>(arrivals.period_ns()), 33e6, 1e5);
}

// Periods of 1 ms to 100 ms, with jitter, and requests left out: the period is found within a per cent, and of the
// arrivals that follow nine in ten fall into the window foretold just before.
TEST(Arrivals, PeriodicOnesAreFoundAndForetold) {
  std::mt19937_64 random(9);
  int foretold = 0;
  int came = 0;
  for (int round = 0; round < 300; ++round) {
    const double period_ns = std::exp(std::uniform_real_distribution(std::log(1e6), std::log(1e8))(random));
    std::uniform_real_distribution jitter(0.0, 0.04 * period_ns);
    const double start_ns = std::uniform_real_distribution(1e9, 2e9)(random);
    Arrivals arrivals;
    for (int i = 0; i < 120; ++i) {
      if (random() % 20 == 0) continue;
      const auto at_ns = static_cast<std::int64_t>(start_ns + i * period_ns + jitter(random));
      // Half a period before it: late enough for the request before, early enough to be of use.
      const Arrivals::Foresight seen = arrivals.look(at_ns - static_cast<std::int64_t>(period_ns / 2));
      if (i >= 60 && arrivals.period_ns() != 0) {
        ASSERT_NEAR(static_cast<double>(arrivals.period_ns()) / period_ns, 1, 0.02);
        ++foretold;
        const auto half_ns = static_cast<std::int64_t>(period_ns / 2);
        if (seen.free_ns <= half_ns && half_ns <= seen.over_ns) ++came;
      }
      arrivals.arrived(at_ns);
    }
  }
  EXPECT_GT(foretold, 300 * 60 * 7 / 10);
  EXPECT_GT(came, foretold * 9 / 10);
}

// A line that chance does not draw is believed at once; a rough one must foretell first.
TEST(Arrivals, ExactOnesAreForetoldFromTheEighthOn) {
  for (const std::int64_t jitter_ns : std::vector<std::int64_t>{0, 300'000, 4'000'000}) {
    std::mt19937_64 random(5);
    Arrivals arrivals;
    for (std::size_t i = 0; i < Arrivals::kTimes; ++i) {
      EXPECT_EQ(arrivals.confidence(), 0) << i;
      const std::int64_t off_ns =
          jitter_ns == 0 ? 0 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(jitter_ns));
      arrivals.arrived(kMs + static_cast<std::int64_t>(i) * 20 * kMs + off_ns);
    }
    EXPECT_EQ(arrivals.confidence() > 0, jitter_ns < kMs) << jitter_ns;
  }
}

// None of these lines is drawn by chance more often than once in a hundred thousand arrivals.
TEST(Arrivals, RandomOnesAreNotBelievedAtOnce) {
  std::mt19937_64 random(13);
  std::exponential_distribution gap(1 / 16e6);
  int believed = 0;
  for (int round = 0; round < 300'000; ++round) {
    Arrivals arrivals;
    double now_ns = 1e6;
    for (std::size_t i = 0; i < Arrivals::kTimes; ++i) {
      arrivals.arrived(static_cast<std::int64_t>(now_ns += gap(random) + 1));
    }
    believed += arrivals.confidence() > 0 ? 1 : 0;
  }
  EXPECT_LT(believed, 3);
}

TEST(Arrivals, WhenTheyStopOrBecomeIrregularNothingIsForeseenAnyMore) {
  std::mt19937_64 random(10);
  Arrivals arrivals;
  std::int64_t now = kMs;
  for (int i = 0; i < 40; ++i) arrivals.arrived(now += 10 * kMs);
  EXPECT_EQ(arrivals.period_ns(), 10 * kMs);
  EXPECT_EQ(arrivals.confidence(), 1);
  EXPECT_LT(arrivals.look(now + 5 * kMs).free_ns, 5 * kMs + 1);
  EXPECT_EQ(arrivals.look(now + 41 * kMs).free_ns, Snapshot::kLongAgoNs);
  for (int i = 0; i < 12; ++i) arrivals.arrived(now += static_cast<std::int64_t>(random() % (20 * kMs)) + 1);
  EXPECT_EQ(arrivals.period_ns(), 0);
  EXPECT_EQ(arrivals.confidence(), 0);
  EXPECT_EQ(arrivals.look(now).free_ns, Snapshot::kLongAgoNs);
}

TEST(Arrivals, PoissonOnesAreHardlyEverTakenForPeriodic) {
  std::mt19937_64 random(11);
  std::exponential_distribution gap(1 / 16e6);
  Arrivals arrivals;
  double now_ns = 1e6;
  int periodic = 0;
  constexpr int kArrivals = 200'000;
  for (int i = 0; i < kArrivals; ++i) {
    arrivals.arrived(static_cast<std::int64_t>(now_ns += gap(random) + 1));
    periodic += arrivals.period_ns() != 0 ? 1 : 0;
  }
  EXPECT_LT(periodic, kArrivals / 1'000);
}

// Whatever the past, what is foreseen lies ahead and ends: an untrue prediction holds nobody for ever.
TEST(Arrivals, WhatIsForeseenEnds) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 2'000; ++round) {
    Arrivals arrivals(random() % 2 == 0 ? 0.05 : 0);
    std::int64_t now = 0;
    const auto period = static_cast<std::int64_t>(random() % (50 * kMs)) + 1;
    for (int i = 0; i < 30; ++i) {
      now += period + static_cast<std::int64_t>(random() % (period / 16 + 1));
      arrivals.arrived(now);
      if (random() % 10 == 0) arrivals.arrived(now - 5);  // a clock that went back is ignored
      const Arrivals::Foresight seen = arrivals.look(now);
      ASSERT_GE(seen.free_ns, 0);
      if (seen.free_ns != Snapshot::kLongAgoNs) {
        ASSERT_GT(seen.over_ns, 0);
      }
    }
    // Silence: within a second and a few periods, ten milliseconds are free.
    now += 30 * (period + kMs) * 10;
    ASSERT_GT(arrivals.look(now).free_ns, 10 * kMs / 10);
  }
}

// The stated miss probability: of Poisson arrivals at changing rates, no more than that share comes within what was
// called free (and not much fewer: free time is not given away).
TEST(Arrivals, ALearnedRateKeepsTheStatedMissProbability) {
  for (const double miss : {0.02, 0.1, 0.3}) {
    std::mt19937_64 random(13);
    Arrivals arrivals(miss);
    std::int64_t now = kMs;
    int looks = 0;
    int missed = 0;
    double mean_ns = 16e6;
    for (int i = 0; i < 60'000; ++i) {
      if (i % 2'000 == 0) mean_ns = std::exp(std::uniform_real_distribution(std::log(1e6), std::log(3e7))(random));
      const auto gap = static_cast<std::int64_t>(std::exponential_distribution(1 / mean_ns)(random)) + 1;
      const std::int64_t next = now + gap;
      // One look just after the last arrival.
      const Arrivals::Foresight seen = arrivals.look(now);
      if (seen.free_ns != Snapshot::kLongAgoNs && arrivals.period_ns() == 0) {
        ++looks;
        missed += now + seen.free_ns > next ? 1 : 0;
      }
      arrivals.arrived(now = next);
    }
    ASSERT_GT(looks, 50'000);
    EXPECT_LT(static_cast<double>(missed) / looks, 1.1 * miss);
    EXPECT_GT(static_cast<double>(missed) / looks, 0.8 * miss);
  }
}

TEST(Arrivals, NonsenseProbabilitiesSwitchRatesOff) {
  for (const double miss : {-1.0, 0.0, 1.0, 7.0, std::nan("")}) {
    std::mt19937_64 random(14);
    Arrivals arrivals(miss);
    std::int64_t now = 0;
    for (int i = 0; i < 30; ++i) arrivals.arrived(now += static_cast<std::int64_t>(random() % (30 * kMs)) + 1);
    EXPECT_EQ(arrivals.look(now).free_ns, Snapshot::kLongAgoNs);
  }
}

}  // namespace
}  // namespace cudasched::schedule
