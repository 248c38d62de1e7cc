// What every caller of the gate's machine may rely on, a program's gate and a replay alike: on a clock of the test's
// own, with a device that runs one kernel after another, in the ways in which clients share a GPU.
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "arbiter/table.hpp"
#include "base/class.hpp"
#include "schedule/fair.hpp"
#include "schedule/gate_machine.hpp"
#include "schedule/requests.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kUs = 1'000;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::uint64_t kStream = 7;
constexpr int kSelf = 0;
constexpr int kOther = 1;
constexpr int kServer = 2;

// `mps`: clients of several processes run at once.
class GateContract : public ::testing::TestWithParam<bool> {
 protected:
  using Verdict = GateMachine::Verdict;

  GateContract() {
    claim(kSelf, Class::kBestEffort);
    claim(kServer, Class::kLatency);
    settings_.adaptive_lead = true;
    join();
  }

  void claim(int slot, Class client_class) {
    arbiter::Slot& client = layout_->slots[static_cast<std::size_t>(slot)];
    client.occupied = 1;
    client.client_class = static_cast<std::uint32_t>(client_class);
    client.weight_milli = kEvenWeightMilli;
    (client_class == Class::kLatency ? layout_->latency : layout_->best_effort) |= std::uint64_t{1} << slot;
    beat();
  }
  arbiter::Slot& words(int slot) { return layout_->slots[static_cast<std::size_t>(slot)]; }
  void beat() {
    for (const int slot : {kSelf, kOther, kServer}) words(slot).heartbeat_ns = now_;
  }
  void join(const char* policy = "strict") {
    gate_ = std::make_unique<GateMachine>();
    gate_->join(layout_.get(), kSelf, GetParam(), settings_);
    gate_->use_policy(Decider(*find_policy(policy)));
    go_on(0);
  }
  void serve(bool active) { layout_->active = active ? std::uint64_t{1} << kServer : 0; }

  // Time passes; what the device has runs.
  void go_on(std::int64_t ns) {
    now_ += ns;
    beat();
    while (!device_.empty() && device_.front().end_ns <= now_) {
      done_.at(static_cast<std::size_t>(device_.front().segment)) = true;
      device_.pop_front();
    }
    gate_->look(
        now_, [&](int segment) { return done_.at(static_cast<std::size_t>(segment)); },
        [](int, const Ledger::Completed&, bool) {});
  }

  static GateMachine::Launch launch(std::int64_t predicted_ns) {
    return {.stream = kStream, .predicted_ns = predicted_ns, .by_launcher = true};
  }
  Verdict step(GateMachine::Launch& launch, const JobProgress* members = nullptr) {
    ticket_ = {};
    return gate_->step(launch, ticket_, -1, members, now_, [] { return false; }, [&] { return others_queued_; });
  }
  // An admitted one reaches the device, where it takes `takes_ns`.
  void submit(const GateMachine::Launch& launch, const Verdict& verdict, std::int64_t takes_ns) {
    ASSERT_FALSE(verdict.waits() || verdict.again);
    const int segment = gate_->submit(launch, ticket_, now_).segment;
    run(segment, takes_ns);
    ASSERT_TRUE(gate_->submitted(ticket_, /*accepted=*/true, /*recorded=*/true, now_));
    if (ticket_.admitted_ns != 0) gate_->learn_lead(ticket_, now_);
  }
  void run(int segment, std::int64_t takes_ns) {
    ASSERT_GE(segment, 0);
    done_.at(static_cast<std::size_t>(segment)) = false;
    device_.push_back({segment, std::max(now_, device_.empty() ? 0 : device_.back().end_ns) + takes_ns});
  }
  // One that takes what is predicted, held as long as the gate says. How long that was.
  std::int64_t feed(std::int64_t predicted_ns, std::int64_t takes_ns = 0) {
    GateMachine::Launch asking = launch(predicted_ns);
    for (std::int64_t waited_ns = 0; waited_ns < 10'000 * kMs; waited_ns += 2 * kUs) {
      const Verdict verdict = step(asking);
      if (!verdict.waits()) {
        submit(asking, verdict, takes_ns > 0 ? takes_ns : predicted_ns);
        return waited_ns;
      }
      EXPECT_GT(verdict.look_in_ns, 0);
      go_on(2 * kUs);
    }
    ADD_FAILURE() << "held for ten seconds";
    return -1;
  }

  struct Running {
    int segment;
    std::int64_t end_ns;
  };
  std::unique_ptr<arbiter::Layout> layout_ = std::make_unique<arbiter::Layout>();
  GateSettings settings_;
  std::unique_ptr<GateMachine> gate_;
  GateMachine::Ticket ticket_;  // of the last look
  std::deque<Running> device_;
  std::array<bool, Ledger::kMarkers> done_{};
  bool others_queued_ = false;
  std::int64_t now_ = 1'000'000 * kMs;
};

INSTANTIATE_TEST_SUITE_P(WithAndWithoutMps, GateContract, ::testing::Bool());

TEST_P(GateContract, HoldsWhileLatencyWorkIsActiveAndLingersBehindIt) {
  serve(true);
  GateMachine::Launch asking = launch(50 * kUs);
  Verdict verdict = step(asking);
  EXPECT_EQ(verdict.decision.answer, Answer::kWaitForLatency);
  EXPECT_TRUE(verdict.announce);
  EXPECT_EQ(verdict.look_in_ns, GateMachine::kLatencyLookNs);
  go_on(kMs);
  serve(false);
  verdict = step(asking);
  EXPECT_EQ(verdict.decision.answer, Answer::kWaitForTime);
  EXPECT_EQ(verdict.look_in_ns, settings_.linger_ns);
  go_on(settings_.linger_ns);
  EXPECT_FALSE(step(asking).waits());
  EXPECT_EQ(asking.calm_ns, settings_.linger_ns);
}

TEST_P(GateContract, OneThatMayNotWaitGoes) {
  serve(true);
  GateMachine::Launch asking = launch(50 * kUs);
  EXPECT_FALSE(gate_->step(asking, ticket_, -1, nullptr, now_, [] { return true; }, [] { return false; }).waits());
}

TEST_P(GateContract, AtMostTheLeadIsInFlightAtAnAdmission) {
  feed(300 * kUs);
  GateMachine::Launch asking = launch(50 * kUs);
  const Verdict verdict = step(asking);
  EXPECT_EQ(verdict.look_in_ns, 300 * kUs - gate_->lead().ns());
  EXPECT_EQ(verdict.announce, GetParam());  // under MPS it is behind as much as one that waits for its share
  EXPECT_EQ(verdict.may_be_late_ns, gate_->lead().ns() / 2);
  go_on(verdict.look_in_ns);
  EXPECT_FALSE(step(asking).waits());
}

TEST_P(GateContract, WhatItsOwnLateStreamMayWaitForGoes) {
  others_queued_ = true;
  feed(50 * kUs, 500 * kMs);
  feed(50 * kUs);  // before the first one is late
  EXPECT_NEAR(static_cast<double>(feed(50 * kUs)), 10.0 * kMs, kMs);
  others_queued_ = false;
  EXPECT_NEAR(static_cast<double>(feed(50 * kUs)), 90.0 * kMs, 2 * kMs);
}

TEST_P(GateContract, AWeightMultipliesTheShare) {
  words(kSelf).weight_milli = 4 * kEvenWeightMilli;
  words(kSelf).priority = 1;
  feed(800 * kUs);
  EXPECT_EQ(words(kSelf).virtual_ns, 100 * kUs);
}

TEST_P(GateContract, TheLeadRisesOnlyWhereTheLeadIsTheReason) {
  const std::int64_t lead_ns = gate_->lead().ns();
  feed(200 * kUs, 100 * kUs);
  feed(100 * kUs);  // held until the GPU had been dry
  EXPECT_GT(gate_->lead().ns(), lead_ns);
  const std::int64_t risen_ns = gate_->lead().ns();
  go_on(kMs);  // the program has nothing
  feed(200 * kUs, 100 * kUs);
  EXPECT_LE(gate_->lead().ns(), risen_ns);
  settings_.adaptive_lead = false;
  settings_.lead_ns = 70 * kUs;
  gate_->configure(settings_);
  feed(200 * kUs, 100 * kUs);
  feed(100 * kUs);
  EXPECT_EQ(gate_->lead().ns(), 70 * kUs);
}

TEST_P(GateContract, ASlackThatAnotherGateTookIsLookedForAnew) {
  join("slack");
  Requests requests;
  requests.join(layout_.get(), kServer, 0);
  words(kServer).slo_ns = 20 * kMs;
  for (int i = 0; i < 12; ++i) {
    requests.begin(now_, /*in_region=*/false);
    go_on(kMs);
    requests.end(now_, /*in_region=*/false);
    go_on(kMs);
  }
  requests.begin(now_, /*in_region=*/false);
  serve(true);
  GateMachine::Launch asking = launch(200 * kUs);
  submit(asking, step(asking), 200 * kUs);
  const std::int64_t cost_ns = layout_->admitted_ns;
  EXPECT_EQ(cost_ns, 200 * kUs + (GetParam() ? 0 : 2 * kContextSwitchNs));
  // It looks, and another gate takes the slack before it admits: the machine asks between the two.
  GateMachine::Launch late = launch(200 * kUs);
  const auto take = [&] {
    layout_->admitted_ns += kMs;
    return true;
  };
  const Verdict verdict = gate_->step(late, ticket_, -1, nullptr, now_, take, [] { return false; });
  EXPECT_TRUE(verdict.again);
  EXPECT_EQ(layout_->admitted_ns, cost_ns + kMs);
}

TEST_P(GateContract, CollectivesOfAJobGoTogether) {
  JobProgress members;
  members.add(0);  // another member has come to none
  GateMachine::Launch collective = launch(50 * kUs);
  collective.is_collective = true;
  Verdict verdict = step(collective, &members);
  EXPECT_TRUE(verdict.for_members);
  EXPECT_EQ(verdict.look_in_ns, GateMachine::kMeetLookNs);
  serve(true);
  members = {};
  members.add(2);  // it has submitted its own: at once, through a closed gate
  EXPECT_FALSE(step(collective, &members).waits());
  EXPECT_EQ(words(kSelf).collectives, 2U);
}

TEST_P(GateContract, WithoutALatencyClientTheTimeInFlightIsBounded) {
  bool held = false;
  const auto may_go = [&](std::int64_t predicted_ns) {
    Estimates::Found found = gate_->estimate(1);
    if (!found.known) found = gate_->note(1, predicted_ns);
    if (gate_->is_much(found)) {
      const Verdict verdict = gate_->step_ungated(kStream, found, held, [] { return false; }, [] { return false; });
      EXPECT_EQ(verdict.look_in_ns, found.proven ? GateMachine::kUngatedLookNs : GateMachine::kUnprovenLookNs);
      if (verdict.waits()) return false;
    }
    GateMachine::Ticket ticket;
    const Ledger::Entry entry = gate_->submit_ungated(kStream, 1, found, ticket);
    EXPECT_EQ(entry.marks, ticket.entry >= 0);
    if (ticket.entry >= 0) gate_->submitted(ticket, true, true, now_);
    run(entry.segment, 2 * kMs);
    return true;
  };
  int count = 0;
  while (may_go(2 * kMs)) ++count;
  EXPECT_EQ(count, 15);
  EXPECT_TRUE(held);
  go_on(2 * kMs + kUs);
  EXPECT_TRUE(may_go(2 * kMs));
  EXPECT_FALSE(may_go(2 * kMs));
}

TEST_P(GateContract, ALaunchOfAContextThatWentIsNotReported) {
  GateMachine::Launch asking = launch(50 * kUs);
  ASSERT_FALSE(step(asking).waits());
  gate_->submit(asking, ticket_, now_);
  gate_->forget();
  EXPECT_FALSE(gate_->submitted(ticket_, true, true, now_));
  EXPECT_EQ(gate_->ledger().launches(), 0U);
}

// Whatever comes: nothing is admitted beside latency work, nor with more than the lead in flight, and all is at last.
TEST_P(GateContract, RandomLaunchesKeepStrictAdmission) {
  std::mt19937_64 random(GetParam() ? 3 : 5);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  claim(kOther, Class::kBestEffort);
  std::optional<GateMachine::Launch> asking;
  int admitted = 0;
  int exceptions = 0;
  std::int64_t changes_ns = 0;
  for (int i = 0; i < 100'000; ++i) {
    go_on(below(20 * kUs));
    if (now_ >= changes_ns) {
      serve(layout_->active == 0 && below(3) == 0);
      changes_ns = now_ + below(3 * kMs);
    }
    layout_->waiting = below(2) == 0 ? std::uint64_t{1} << kOther : 0;
    if (!asking && below(3) != 0) asking = launch(1 + below(200 * kUs));
    if (!asking) continue;
    const Verdict verdict = step(*asking);
    if (verdict.waits()) continue;
    ASSERT_EQ(layout_->active, 0U);
    exceptions += verdict.exception != Exception::kNone ? 1 : 0;
    ASSERT_TRUE(gate_->seen().in_flight_ns <= gate_->seen().lead_ns || verdict.exception != Exception::kNone);
    submit(*asking, verdict, 1 + asking->predicted_ns * (5 + below(10)) / 10);
    asking.reset();
    ++admitted;
  }
  EXPECT_GT(admitted, 1'000);
  EXPECT_EQ(exceptions, 0);
  serve(false);
  go_on(10 * kMs);
  go_on(10 * kMs);
  EXPECT_EQ(gate_->ledger().launches(), 0U);
  EXPECT_EQ(gate_->ledger().remaining_ns(), 0);
}

}  // namespace
}  // namespace cudasched::schedule
