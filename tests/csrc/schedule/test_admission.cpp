#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>

#include "schedule/admission.hpp"

namespace cudasched::schedule {
namespace {

Snapshot random_snapshot(std::mt19937_64& random) {
  Snapshot snapshot;
  snapshot.latency_clients = random() % 4 != 0;
  snapshot.latency_active = random() % 2 == 0;
  if (random() % 2 == 0) snapshot.since_latency_ns = static_cast<std::int64_t>(random() % 100'000);
  snapshot.linger_ns = static_cast<std::int64_t>(random() % 60'000);
  snapshot.my_turn = random() % 3 != 0;
  snapshot.in_flight_ns = static_cast<std::int64_t>(random() % 100'000);
  snapshot.predicted_ns = static_cast<std::int64_t>(random() % 1'000'000);
  snapshot.lead_ns = static_cast<std::int64_t>(random() % 50'000);
  return snapshot;
}

// With all that a caller may know: bounds, slack, hints, foreseen arrivals.
Snapshot informed_snapshot(std::mt19937_64& random) {
  Snapshot snapshot = random_snapshot(random);
  const auto up_to = [&](std::int64_t most) { return static_cast<std::int64_t>(random() % most); };
  snapshot.bound_ns = up_to(1'500'000);
  if (random() % 4 != 0) snapshot.slack_ns = up_to(4'000'000) - 1'000'000;
  snapshot.margin_ns = up_to(300'000);
  if (random() % 4 == 0) snapshot.hint_ns = 1 + up_to(2'000'000);
  if (random() % 2 == 0) {
    snapshot.free_ns = up_to(2'000'000);
    snapshot.foreseen_over_ns = snapshot.free_ns + 50'000 + up_to(300'000);
  }
  snapshot.waited_ns = random() % 8 == 0 ? snapshot.max_hold_ns + up_to(10) : up_to(snapshot.max_hold_ns);
  return snapshot;
}

TEST(Strict, RulesHoldForAnySnapshot) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 2'000'000; ++i) {
    const Snapshot snapshot = random_snapshot(random);
    const std::int64_t linger_ns = snapshot.linger_ns * (snapshot.predicted_ns > snapshot.long_ns ? 2 : 1);
    const Decision decision = strict(snapshot);
    const bool submits = decision.answer == Answer::kSubmit;
    ASSERT_EQ(decision.wait_ns > 0, decision.answer == Answer::kWaitForTime);
    if (!snapshot.latency_clients) {
      ASSERT_TRUE(submits);
      continue;
    }
    if (snapshot.latency_active) {
      ASSERT_EQ(decision.answer, Answer::kWaitForLatency);
    }
    if (submits) {
      ASSERT_FALSE(snapshot.latency_active);
      ASSERT_GE(snapshot.since_latency_ns, linger_ns);
      ASSERT_TRUE(snapshot.my_turn);
      ASSERT_LE(snapshot.in_flight_ns, snapshot.lead_ns);
    }
    // Nothing but the stated reasons ever holds a launch.
    if (!snapshot.latency_active && snapshot.since_latency_ns >= linger_ns && snapshot.my_turn &&
        snapshot.in_flight_ns <= snapshot.lead_ns) {
      ASSERT_TRUE(submits);
    }
    // After the wait it asks for, and nothing else happening, the launch goes.
    if (decision.answer == Answer::kWaitForTime) {
      Snapshot later = snapshot;
      const bool lingers = snapshot.since_latency_ns < linger_ns;
      (lingers ? later.since_latency_ns : later.in_flight_ns) += lingers ? decision.wait_ns : -decision.wait_ns;
      if (lingers) {
        ASSERT_EQ(later.since_latency_ns, linger_ns);
      } else {
        ASSERT_EQ(strict(later).answer, Answer::kSubmit);
      }
    }
  }
}

TEST(Strict, LessInFlightNeverTurnsASubmitIntoAWait) {
  std::mt19937_64 random(21);
  for (int i = 0; i < 200'000; ++i) {
    Snapshot snapshot = random_snapshot(random);
    if (strict(snapshot).answer != Answer::kSubmit) continue;
    snapshot.in_flight_ns /= 2;
    ASSERT_EQ(strict(snapshot).answer, Answer::kSubmit);
  }
}

TEST(Strict, AdmitsNothingWhileLatencyWorkIsActiveOrAnnounced) {
  std::mt19937_64 random(22);
  int held = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    const Snapshot snapshot = informed_snapshot(random);
    if (!snapshot.latency_clients || !(snapshot.latency_active || snapshot.hint_ns > 0)) continue;
    ++held;
    const Decision decision = strict(snapshot);
    ASSERT_EQ(decision.answer, snapshot.latency_active ? Answer::kWaitForLatency : Answer::kWaitForTime);
    ASSERT_EQ(decision.wait_ns, snapshot.latency_active ? 0 : snapshot.hint_ns);
  }
  EXPECT_GT(held, 100'000);
}

TEST(Strict, ALongLaunchGoesOnlyWhereNoneIsForeseenWithinItsBoundAndIsHeldForABoundedTime) {
  std::mt19937_64 random(23);
  int collisions = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    Snapshot snapshot = informed_snapshot(random);
    snapshot.latency_clients = true;
    snapshot.latency_active = false;
    snapshot.hint_ns = 0;
    snapshot.since_latency_ns = Snapshot::kLongAgoNs;
    snapshot.my_turn = true;
    snapshot.in_flight_ns = std::min(snapshot.in_flight_ns, snapshot.lead_ns);
    const bool collides =
        snapshot.longest_ns() > snapshot.long_ns && snapshot.in_flight_ns + snapshot.longest_ns() > snapshot.free_ns;
    const bool held_out = snapshot.waited_ns >= snapshot.max_hold_ns;
    const Decision decision = strict(snapshot);
    ASSERT_EQ(decision.answer == Answer::kSubmit, !collides || held_out);
    if (decision.answer == Answer::kSubmit) continue;
    ++collisions;
    ASSERT_EQ(decision.answer, Answer::kWaitForTime);
    ASSERT_LE(snapshot.waited_ns + decision.wait_ns, snapshot.max_hold_ns);
  }
  EXPECT_GT(collisions, 100'000);
}

// A program that comes right behind its last request, again and again, holds a long launch for max_hold_ns at most, and
// then as long as any other.
TEST(Strict, ALongLaunchLingersTwiceAsLongUntilItHasBeenHeldOut) {
  Snapshot snapshot;
  snapshot.latency_clients = true;
  snapshot.linger_ns = 100'000;
  snapshot.since_latency_ns = 99'999;
  snapshot.bound_ns = snapshot.long_ns;
  EXPECT_EQ(strict(snapshot).wait_ns, 1);
  snapshot.bound_ns += 1;
  EXPECT_EQ(strict(snapshot).wait_ns, 100'001);
  snapshot.since_latency_ns = 199'999;
  EXPECT_EQ(strict(snapshot).wait_ns, 1);
  snapshot.since_latency_ns = 100'000;
  snapshot.waited_ns = snapshot.max_hold_ns;
  EXPECT_EQ(strict(snapshot).answer, Answer::kSubmit);
  snapshot.since_latency_ns = 99'999;
  EXPECT_EQ(strict(snapshot).wait_ns, 1);
}

// A graph in slices: the gate asks for each of them, with what is in flight of those before it.
TEST(AdmissionTest, SlicesAreNoLongLaunchesAndFitASlackThatTheirGraphDoesNot) {
  std::mt19937_64 random(14);
  for (int i = 0; i < 100'000; ++i) {
    Snapshot whole = informed_snapshot(random);
    whole.latency_clients = whole.my_turn = true;
    whole.in_flight_ns = 0;
    whole.hint_ns = 0;
    whole.since_latency_ns = Snapshot::kLongAgoNs;
    whole.waited_ns = 0;
    const auto slices = 2 + static_cast<std::int64_t>(random() % 30);
    const std::int64_t slice_ns = 1 + static_cast<std::int64_t>(random() % whole.long_ns);
    whole.predicted_ns = whole.bound_ns = slices * slice_ns;
    Snapshot slice = whole;
    slice.predicted_ns = slice.bound_ns = slice_ns;
    if (whole.latency_active) {
      // Fits it where the rest of the slack holds one slice.
      whole.slack_ns = slice.slack_ns = whole.margin_ns + slice_ns + static_cast<std::int64_t>(random() % slice_ns);
      whole.free_ns = slice.free_ns = Snapshot::kLongAgoNs;
      ASSERT_EQ(slack(slice).answer, Answer::kSubmit);
      ASSERT_EQ(slack(whole).answer, Answer::kWaitForLatency);
      continue;
    }
    for (const auto decide : {&strict, &slack}) {
      ASSERT_EQ(decide(slice).answer, Answer::kSubmit) << "whatever is foreseen";
      const bool waits = whole.predicted_ns > whole.long_ns && whole.predicted_ns > whole.free_ns;
      ASSERT_EQ(decide(whole).answer, waits ? Answer::kWaitForTime : Answer::kSubmit);
    }
  }
}

TEST(Slack, NeverAdmitsWhatDoesNotFitAndIsStrictWhereNothingIsKnown) {
  std::mt19937_64 random(24);
  int admitted = 0;
  for (int i = 0; i < 2'000'000; ++i) {
    const Snapshot snapshot = informed_snapshot(random);
    const Decision decision = slack(snapshot);
    if (!snapshot.latency_clients || !snapshot.latency_active || snapshot.slack_ns == Snapshot::kUnknownNs) {
      ASSERT_EQ(decision.answer, strict(snapshot).answer);
      ASSERT_EQ(decision.wait_ns, strict(snapshot).wait_ns);
      continue;
    }
    const std::int64_t end_ns = snapshot.in_flight_ns + snapshot.longest_ns();
    const bool fits = end_ns + snapshot.margin_ns <= snapshot.slack_ns;
    if (!fits) {
      ASSERT_EQ(decision.answer, Answer::kWaitForLatency);
    }
    if (decision.answer != Answer::kSubmit) continue;
    ++admitted;
    ASSERT_TRUE(fits);
    ASSERT_EQ(snapshot.hint_ns, 0);
    ASSERT_TRUE(snapshot.my_turn);
    ASSERT_LE(snapshot.in_flight_ns, snapshot.lead_ns);
  }
  EXPECT_GT(admitted, 10'000);
}

// What is known of the gaps of requests decides alone: one rule for both policies.
TEST(Slack, IsHarvestWhereTheRequestsUnderWayAreKnown) {
  std::mt19937_64 random(28);
  const auto up_to = [&](std::int64_t most) { return static_cast<std::int64_t>(random() % most); };
  int admitted = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    Snapshot snapshot = informed_snapshot(random);
    HostBound& requests = snapshot.host_bound;
    requests.known = true;
    requests.sliced = random() % 4 == 0;
    requests.closed = random() % 2 == 0;
    requests.gpu_ns = up_to(50'000);
    requests.gpu_most_ns = requests.gpu_ns + up_to(200'000);
    requests.left_gpu_ns = up_to(1'000'000);
    requests.left_host_ns = up_to(5'000'000);
    requests.late_ns = 1 + up_to(100'000);
    const Decision decision = slack(snapshot);
    const Decision expected = harvest(snapshot);
    ASSERT_EQ(decision.answer, expected.answer);
    ASSERT_EQ(decision.wait_ns, expected.wait_ns);
    const bool in_gap = snapshot.latency_clients && snapshot.latency_active && decision.answer == Answer::kSubmit;
    admitted += in_gap ? 1 : 0;
    // Without the profile it is what it was, whatever the other words say.
    requests.known = false;
    Snapshot without = snapshot;
    without.host_bound = {};
    ASSERT_EQ(slack(snapshot).answer, slack(without).answer);
    ASSERT_EQ(slack(snapshot).wait_ns, slack(without).wait_ns);
  }
  EXPECT_GT(admitted, 10'000);
}

// Every wait ends: once latency work, other clients and the work in flight are gone, and the times that were asked for
// have passed, the launch goes.
TEST(AdmissionTest, EveryPolicyMakesProgress) {
  std::mt19937_64 random(25);
  for (const auto decide : {&strict, &slack, &open}) {
    for (int i = 0; i < 300'000; ++i) {
      Snapshot snapshot = informed_snapshot(random);
      int looks = 0;
      // As if the foreseen work never came and never stopped being foreseen: that hold ends by itself.
      for (Decision decision = decide(snapshot); decision.answer != Answer::kSubmit; decision = decide(snapshot)) {
        ASSERT_LT(++looks, 1'000);
        if (looks == 10) snapshot.latency_active = false;  // latency work ends by itself
        if (decision.answer == Answer::kWaitForLatency) {
          ASSERT_TRUE(snapshot.latency_active);
          snapshot.latency_active = false;
          snapshot.since_latency_ns = 0;
        } else if (decision.answer == Answer::kWaitForTurn) {
          ASSERT_FALSE(snapshot.my_turn);
          snapshot.my_turn = true;
        } else {
          ASSERT_GT(decision.wait_ns, 0);
          const auto pass = [&](std::int64_t& time) { time = std::max<std::int64_t>(time - decision.wait_ns, 0); };
          pass(snapshot.hint_ns);
          pass(snapshot.in_flight_ns);
          snapshot.since_latency_ns += decision.wait_ns;
          if (!snapshot.latency_active) snapshot.waited_ns += decision.wait_ns;
        }
      }
    }
  }
}

// Words of other processes may hold anything; none may hold a launch back for ever.
TEST(AdmissionTest, ForeignTimeInFlightCountsOnlyWithinASecond) {
  constexpr std::int64_t kNow = 5'000'000'000;
  EXPECT_EQ(foreign_in_flight_ns(kNow + 70'000, kNow), 70'000);
  EXPECT_EQ(foreign_in_flight_ns(kNow - 1, kNow), 0);
  EXPECT_EQ(foreign_in_flight_ns(kNow + 1'000'000'001, kNow), 0);
  EXPECT_EQ(foreign_in_flight_ns(std::numeric_limits<std::int64_t>::max(), kNow), 0);
  EXPECT_EQ(foreign_in_flight_ns(std::numeric_limits<std::int64_t>::min(), kNow), 0);
}

TEST(AdmissionTest, AHeartbeatIsFreshIfItIsNeitherOldNorFromTheFuture) {
  constexpr std::int64_t kNow = 5'000'000'000;
  constexpr std::int64_t kStale = 100'000'000;
  EXPECT_TRUE(is_fresh(kNow - kStale, kNow, kStale));
  EXPECT_TRUE(is_fresh(kNow + 1'000, kNow, kStale));
  EXPECT_FALSE(is_fresh(kNow - kStale - 1, kNow, kStale));
  EXPECT_FALSE(is_fresh(kNow + kStale + 1, kNow, kStale));
  EXPECT_FALSE(is_fresh(std::numeric_limits<std::int64_t>::max(), kNow, kStale));
  EXPECT_FALSE(is_fresh(std::numeric_limits<std::int64_t>::min(), kNow, kStale));
}

}  // namespace
}  // namespace cudasched::schedule
