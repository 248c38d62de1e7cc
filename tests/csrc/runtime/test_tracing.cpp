#include <gtest/gtest.h>

#include "runtime/tracing.hpp"
#include "schedule/admission.hpp"

namespace cudasched::runtime {
namespace {

using schedule::Answer;
using schedule::Decision;
using schedule::Snapshot;
using telemetry::WaitReason;

// A launch that no policy holds; each test adds what holds it.
Snapshot free_gpu() {
  Snapshot snapshot;
  snapshot.latency_clients = true;
  snapshot.predicted_ns = 10'000;
  snapshot.lead_ns = 20'000;
  snapshot.linger_ns = 100'000;
  return snapshot;
}

struct Case {
  const char* what;
  void (*holds)(Snapshot&);
  WaitReason why;
};

const Case kCases[] = {
    {"latency", [](Snapshot& s) { s.latency_active = true; }, WaitReason::kLatency},
    {"hint", [](Snapshot& s) { s.hint_ns = 5; }, WaitReason::kHint},
    {"linger", [](Snapshot& s) { s.since_latency_ns = 5; }, WaitReason::kLinger},
    {"turn", [](Snapshot& s) { s.my_turn = false; }, WaitReason::kTurn},
    {"in flight", [](Snapshot& s) { s.in_flight_ns = 50'000; }, WaitReason::kInFlight},
    {"foreseen",
     [](Snapshot& s) {
       s.predicted_ns = 1'000'000;
       s.free_ns = 100'000;
       s.foreseen_over_ns = 200'000;
     },
     WaitReason::kForeseen},
};

// What is said is what the policy went by.
TEST(WhyItWaits, IsWhatTheStrictPolicyGoesBy) {
  EXPECT_EQ(schedule::strict(free_gpu()).answer, Answer::kSubmit);
  for (const Case& each : kCases) {
    Snapshot snapshot = free_gpu();
    each.holds(snapshot);
    const Decision decision = schedule::strict(snapshot);
    EXPECT_NE(decision.answer, Answer::kSubmit) << each.what;
    EXPECT_EQ(why_it_waits(decision, snapshot), each.why) << each.what;
  }
}

// The first that the policy is asked about.
TEST(WhyItWaits, IsTheFirstOfSeveral) {
  for (std::size_t first = 0; first < std::size(kCases); ++first) {
    Snapshot snapshot = free_gpu();
    for (std::size_t i = first; i < std::size(kCases); ++i) kCases[i].holds(snapshot);
    EXPECT_EQ(why_it_waits(schedule::strict(snapshot), snapshot), kCases[first].why) << kCases[first].what;
  }
}

TEST(WhyItWaits, OfAnotherPolicyIsNotGuessed) {
  EXPECT_EQ(why_it_waits({Answer::kWaitForTime, 1000}, free_gpu()), WaitReason::kUnknown);
}

TEST(WhyItWaits, BetweenThePartsOfHarvestIsWhatIsInFlight) {
  Snapshot snapshot = free_gpu();
  snapshot.latency_active = true;
  snapshot.host_bound.known = true;
  snapshot.host_bound.gpu_ns = 90'000;
  EXPECT_EQ(why_it_waits({Answer::kWaitForTime, 1000}, snapshot), WaitReason::kInFlight);
}

}  // namespace
}  // namespace cudasched::runtime
