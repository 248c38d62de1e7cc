#include <gtest/gtest.h>

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

TEST(Strict, RulesHoldForAnySnapshot) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 2'000'000; ++i) {
    const Snapshot snapshot = random_snapshot(random);
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
      ASSERT_GE(snapshot.since_latency_ns, snapshot.linger_ns);
      ASSERT_TRUE(snapshot.my_turn);
      ASSERT_LE(snapshot.in_flight_ns, snapshot.lead_ns);
    }
    // Nothing but the stated reasons ever holds a launch.
    if (!snapshot.latency_active && snapshot.since_latency_ns >= snapshot.linger_ns && snapshot.my_turn &&
        snapshot.in_flight_ns <= snapshot.lead_ns) {
      ASSERT_TRUE(submits);
    }
    // After the wait it asks for, and nothing else happening, the launch goes.
    if (decision.answer == Answer::kWaitForTime) {
      Snapshot later = snapshot;
      const bool lingers = snapshot.since_latency_ns < snapshot.linger_ns;
      (lingers ? later.since_latency_ns : later.in_flight_ns) += lingers ? decision.wait_ns : -decision.wait_ns;
      if (lingers) {
        ASSERT_GE(later.since_latency_ns, later.linger_ns);
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
