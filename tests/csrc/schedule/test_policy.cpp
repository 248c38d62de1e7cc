#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "schedule/policy.hpp"

namespace cudasched::schedule {
namespace {

TEST(Policy, EachIsFoundByItsNameAndTheFirstIsTheDefault) {
  std::set<std::string_view> names;
  for (const Policy& policy : policies()) {
    EXPECT_EQ(find_policy(policy.name), &policy);
    EXPECT_TRUE(names.insert(policy.name).second);
    EXPECT_FALSE(policy.summary.empty());
  }
  EXPECT_EQ(Decider().name(), "strict");
  EXPECT_EQ(find_policy("fifo"), nullptr);
  EXPECT_EQ(find_policy(""), nullptr);
}

// What the built-in policies say is never nonsense.
TEST(Policy, NoBuiltInPolicyIsEverRefused) {
  std::mt19937_64 random(18);
  for (int i = 0; i < 500'000; ++i) {
    const auto up_to = [&](std::int64_t most) { return static_cast<std::int64_t>(random() % most); };
    Snapshot snapshot;
    snapshot.latency_clients = random() % 4 != 0;
    snapshot.latency_active = random() % 2 == 0;
    snapshot.my_turn = random() % 2 == 0;
    snapshot.since_latency_ns = up_to(100'000);
    snapshot.linger_ns = up_to(60'000);
    snapshot.in_flight_ns = up_to(100'000);
    snapshot.lead_ns = up_to(60'000);
    snapshot.bound_ns = up_to(2'000'000);
    snapshot.slack_ns = random() % 2 == 0 ? Snapshot::kUnknownNs : up_to(5'000'000);
    snapshot.hint_ns = random() % 4 == 0 ? up_to(kLongestWaitNs) : 0;
    snapshot.free_ns = random() % 2 == 0 ? Snapshot::kLongAgoNs : up_to(2'000'000);
    snapshot.foreseen_over_ns = up_to(3'000'000);
    snapshot.waited_ns = up_to(kLongestWaitNs);
    for (const Policy& policy : policies()) {
      ASSERT_EQ(why_refused(snapshot, policy.decide(snapshot)), "") << policy.name;
    }
  }
}

Decision as_told(const Snapshot&, void* context) noexcept { return *static_cast<const Decision*>(context); }

TEST(Policy, AUsersOwnDecides) {
  Decision told{Answer::kWaitForTime, 500};
  Decider decider(UserPolicy{&as_told, &told});
  EXPECT_EQ(decider.name(), "user");
  EXPECT_EQ(decider({}).answer, Answer::kWaitForTime);
  EXPECT_EQ(decider({}).wait_ns, 500);
  told = {Answer::kSubmit, 0};
  EXPECT_EQ(decider({}).answer, Answer::kSubmit);
  EXPECT_EQ(decider.refused(), "");
}

TEST(Policy, NonsenseIsRefusedAndFallsOpenForGood) {
  Snapshot active;
  active.latency_clients = active.latency_active = true;
  Snapshot waited;
  waited.waited_ns = kLongestWaitNs + 1;
  struct Case {
    Decision decision;
    Snapshot snapshot;
    std::string says;
  };
  const Case cases[] = {
      {{static_cast<Answer>(17), 0}, {}, "does not exist"},
      {{Answer::kSubmit, 5}, {}, "submits with a time"},
      {{Answer::kWaitForTime, 0}, {}, "not above 0"},
      {{Answer::kWaitForTime, -9}, {}, "not above 0"},
      {{Answer::kWaitForTime, kLongestWaitNs + 1}, {}, "more than a second"},
      {{Answer::kWaitForLatency, 0}, {}, "none is active"},
      {{Answer::kWaitForLatency, 3}, active, "with a time"},
      {{Answer::kWaitForTurn, 0}, {}, "a turn that it has"},
      {{Answer::kWaitForTime, 1}, waited, "over a second"},
  };
  for (const Case& one : cases) {
    Decision told = one.decision;
    Decider decider(UserPolicy{&as_told, &told});
    EXPECT_EQ(decider(one.snapshot).answer, Answer::kSubmit);
    EXPECT_NE(decider.refused().find(one.says), std::string_view::npos) << decider.refused();
    told = {Answer::kWaitForTime, 5};  // sense comes too late
    EXPECT_EQ(decider({}).answer, Answer::kSubmit);
  }
  Decider none(UserPolicy{});
  EXPECT_EQ(none(active).answer, Answer::kSubmit);
  EXPECT_EQ(none.refused(), "it has no function");
}

}  // namespace
}  // namespace cudasched::schedule
