// What a gate makes of the other clients' words, on a clock of the test's own: all clients are slots of this process.
#include <random>
#include <utility>
#include <vector>

#include "arbiter/processes.hpp"
#include "schedule/fair.hpp"
#include "schedule/neighbours.hpp"
#include "schedule/policy.hpp"
#include "schedule/requests.hpp"
#include "schedule/turn.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kHour = 3600 * kNsPerSecond;
constexpr std::int64_t kStart = 1000 * kHour;
constexpr std::int64_t kUnknown = Snapshot::kUnknownNs;

class NeighboursTest : public arbiter::testing::TableTest {
 protected:
  void SetUp() override {
    table_ = open();
    self_ = claim(Class::kBestEffort);
  }

  int claim(Class client_class, std::int32_t priority = 0) {
    arbiter::ClientInfo client;
    client.client_class = client_class;
    client.priority = priority;
    const int slot = table_->claim(client);
    clients_ |= std::uint64_t{1} << slot;
    go_on(0);
    return slot;
  }

  // Time passes; every client but `stopped` lives.
  void go_on(std::int64_t ns, int stopped = -1) {
    now_ += ns;
    for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
      if ((clients_ >> slot & 1) != 0 && slot != stopped) table_->slot(slot).heartbeat_ns = now_;
    }
  }

  Neighbours neighbours(int slot, bool mps = false) {
    Neighbours result;
    result.join(&table_->layout(), slot, mps, settings_);
    return result;
  }

  Snapshot look(Neighbours& neighbours, std::int64_t turn_waited_ns = 0) {
    Snapshot snapshot;
    neighbours.look(snapshot, now_, turn_waited_ns);
    return snapshot;
  }
  Snapshot look() {
    Neighbours own = neighbours(self_);
    return look(own);
  }

  // A request that is to take so long, and has a deadline after `slo_ns`.
  void begin(int slot, std::int64_t expected_ns, std::int64_t slo_ns) {
    arbiter::Slot& client = table_->slot(slot);
    client.entered_ns = now_;
    client.expected_ns = expected_ns;
    client.deadline_ns = now_ + slo_ns;
    client.admitted_at_entry_ns = table_->layout().admitted_ns.load();
    table_->set_active(slot, now_);
  }

  void wait_at_gate(int slot) { table_->layout().waiting |= std::uint64_t{1} << slot; }

  GateSettings settings_;
  std::unique_ptr<arbiter::Table> table_;
  std::uint64_t clients_ = 0;
  int self_ = -1;
  std::int64_t now_ = kStart;
};

TEST_F(NeighboursTest, TheSlackOfOtherRequestsIsKnownToALatencyClient) {
  const int self = claim(Class::kLatency);
  const int other = claim(Class::kLatency);
  const auto slack_ns = [&] {
    return other_requests_slack_ns(table_->layout(), self, settings_.stale_heartbeat_ns, now_);
  };
  EXPECT_EQ(slack_ns(), kUnknown);
  begin(self, kNsPerMs, 5 * kNsPerMs);
  EXPECT_EQ(slack_ns(), kUnknown) << "its own request";
  begin(other, 2 * kNsPerMs, 10 * kNsPerMs);
  EXPECT_EQ(slack_ns(), 8 * kNsPerMs);
  go_on(kNsPerMs);
  EXPECT_EQ(slack_ns(), 8 * kNsPerMs) << "it runs meanwhile";
  go_on(settings_.stale_heartbeat_ns + 1, other);
  EXPECT_EQ(slack_ns(), kUnknown) << "one that is stopped";
}

TEST_F(NeighboursTest, AloneNothingHolds) {
  const Snapshot seen = look();
  EXPECT_FALSE(seen.latency_clients || seen.latency_active);
  EXPECT_TRUE(seen.my_turn);
  EXPECT_EQ(std::pair(seen.hint_ns, seen.in_flight_ns), std::pair(std::int64_t{0}, std::int64_t{0}));
  EXPECT_EQ(seen.free_ns, Snapshot::kLongAgoNs);
}

TEST_F(NeighboursTest, LatencyWorkIsActiveWhileItsHeartbeatIsFresh) {
  const int latency = claim(Class::kLatency);
  EXPECT_TRUE(look().latency_clients);
  EXPECT_FALSE(look().latency_active);
  table_->set_active(latency, now_);
  EXPECT_TRUE(look().latency_active && neighbours(self_).latency_active(now_));
  go_on(settings_.stale_heartbeat_ns + 1, latency);
  EXPECT_FALSE(look().latency_active || neighbours(self_).latency_active(now_));
  EXPECT_TRUE(look().latency_clients);
  go_on(0);
  EXPECT_TRUE(look().latency_active);
}

// All words of a damaged table are taken for what its living clients wrote.
TEST_F(NeighboursTest, BitsOfASlotOfAnotherClassHoldNobody) {
  const int latency = claim(Class::kLatency);
  const int other = claim(Class::kBestEffort);
  const int plain = claim(Class::kNormal);
  auto& layout = table_->layout();
  for (const int slot : {self_, other, plain, 40}) {
    layout.active.fetch_or(std::uint64_t{1} << slot);
    layout.latency.fetch_or(std::uint64_t{1} << slot);
    table_->slot(slot).hint_until_ns = now_ + kNsPerSecond / 2;  // longer than a pause
    table_->slot(slot).heartbeat_ns = now_;
  }
  table_->slot(40).client_class = static_cast<std::uint32_t>(Class::kLatency);  // but nobody is there
  EXPECT_FALSE(look().latency_active || neighbours(self_).latency_active(now_));
  EXPECT_EQ(look().hint_ns, 0);
  table_->set_active(latency, now_);
  EXPECT_TRUE(look().latency_active && neighbours(self_).latency_active(now_));
  table_->clear_active(latency);

  layout.best_effort = ~std::uint64_t{0};
  layout.waiting = ~std::uint64_t{0};
  table_->slot(other).in_flight_until_ns = now_ + kNsPerMs;
  table_->slot(plain).in_flight_until_ns = now_ + 5 * kNsPerMs;
  Neighbours own = neighbours(self_, /*mps=*/true);
  EXPECT_EQ(look(own).in_flight_ns, kNsPerMs);
}

TEST_F(NeighboursTest, WhatItSaidOfItselfIsWrittenAnew) {
  claim(Class::kBestEffort);
  Neighbours own = neighbours(self_);
  Snapshot seen = look(own);
  seen.predicted_ns = 500'000;
  own.admitted(seen, -1);
  own.publish(now_ + 700'000);
  for (const std::int64_t damage : {std::int64_t{-1}, std::int64_t{0}, kHour}) {
    table_->slot(self_).virtual_ns = damage;
    table_->slot(self_).in_flight_until_ns = damage;
    own.write_again();
    EXPECT_EQ(table_->slot(self_).virtual_ns, 500'000);
    EXPECT_EQ(table_->slot(self_).in_flight_until_ns, now_ + 700'000);
  }
}

// ---- slack ---------------------------------------------------------------------------------------------------------

TEST_F(NeighboursTest, ARequestBringsItsSlackAndEachAdmittedLaunchTakesItsCostOutOfIt) {
  const int latency = claim(Class::kLatency);
  begin(latency, 3 * kNsPerMs, 10 * kNsPerMs);
  Neighbours own = neighbours(self_);
  Snapshot seen = look(own);
  EXPECT_EQ(seen.slack_ns, 7 * kNsPerMs);
  go_on(kNsPerMs);  // which the request has had
  EXPECT_EQ(look(own).slack_ns, 7 * kNsPerMs);

  seen.predicted_ns = 400'000;
  seen.bound_ns = 500'000;
  own.admitted(seen, -1);  // nothing was in flight: two switches between the processes' contexts
  EXPECT_EQ(look(own).slack_ns, 7 * kNsPerMs - 500'000 - 2 * 130'000);
  seen.in_flight_ns = 100'000;
  own.admitted(seen, -1);
  EXPECT_EQ(look(own).slack_ns, 7 * kNsPerMs - 2 * 500'000 - 2 * 130'000);
  // Another best-effort client sees the same.
  const int other = claim(Class::kBestEffort);
  Neighbours others = neighbours(other);
  EXPECT_EQ(look(others).slack_ns, 7 * kNsPerMs - 2 * 500'000 - 2 * 130'000);
  // The next request owes nothing of it.
  begin(latency, 3 * kNsPerMs, 10 * kNsPerMs);
  EXPECT_EQ(look(own).slack_ns, 7 * kNsPerMs);
}

TEST_F(NeighboursTest, ContextsDoNotSwitchInOneProcessNorUnderMps) {
  const int latency = claim(Class::kLatency);
  begin(latency, 3 * kNsPerMs, 10 * kNsPerMs);
  const auto cost = [&](bool mps, int own_latency_slot) {
    Neighbours own = neighbours(self_, mps);
    Snapshot seen = look(own);
    seen.predicted_ns = 500'000;
    own.admitted(seen, own_latency_slot);
    return seen.slack_ns - look(own).slack_ns;
  };
  EXPECT_EQ(cost(/*mps=*/false, latency), 500'000);
  EXPECT_EQ(cost(/*mps=*/true, -1), 500'000);
  table_->clear_active(latency);
  const int foreign = claim(Class::kLatency);
  begin(foreign, 3 * kNsPerMs, 10 * kNsPerMs);
  EXPECT_EQ(cost(/*mps=*/false, latency), 500'000 + 2 * 130'000);
}

// Two gates that feed at once, under MPS, look at the same moment and both find that their launch fits.
TEST_F(NeighboursTest, OneSlackIsNotGivenAwayTwice) {
  const int latency = claim(Class::kLatency);
  begin(latency, 3 * kNsPerMs, 10 * kNsPerMs);
  Neighbours one = neighbours(self_, /*mps=*/true);
  const int other = claim(Class::kBestEffort);
  Neighbours two = neighbours(other, /*mps=*/true);
  Snapshot seen_by_one = look(one);
  Snapshot seen_by_two = look(two);
  seen_by_one.predicted_ns = seen_by_two.predicted_ns = 4 * kNsPerMs;
  ASSERT_EQ(slack(seen_by_one).answer, Answer::kSubmit);
  ASSERT_EQ(slack(seen_by_two).answer, Answer::kSubmit);
  EXPECT_TRUE(one.admitted(seen_by_one, -1));
  EXPECT_FALSE(two.admitted(seen_by_two, -1));
  EXPECT_EQ(table_->slot(other).virtual_ns.load(), 0);  // refused: nothing is noted
  EXPECT_EQ(table_->layout().admitted_ns.load(), 4 * kNsPerMs);
  seen_by_two = look(two);
  EXPECT_EQ(seen_by_two.slack_ns, 3 * kNsPerMs);
  seen_by_two.predicted_ns = 4 * kNsPerMs;
  EXPECT_EQ(slack(seen_by_two).answer, Answer::kWaitForLatency);
  seen_by_two.predicted_ns = 2 * kNsPerMs;
  EXPECT_TRUE(two.admitted(seen_by_two, -1));
}

// Several gates under MPS, of which one looks while another one is between its look and its admission, in any order:
// all that they admit into a request fits what it brought along.
TEST_F(NeighboursTest, HoweverTheirLooksInterleaveGatesAdmitNoMoreThanTheSlack) {
  const int latency = claim(Class::kLatency);
  struct Asking {
    Neighbours neighbours;
    Snapshot seen;
    bool decided = false;
  };
  std::vector<Asking> gates;
  for (int i = 0; i < 4; ++i) gates.push_back({neighbours(claim(Class::kBestEffort), /*mps=*/true), {}, false});
  std::mt19937_64 random(17);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    begin(latency, 3 * kNsPerMs, 10 * kNsPerMs);
    const std::int64_t before_ns = table_->layout().admitted_ns.load();
    for (Asking& gate : gates) gate.decided = false;
    for (int step = 0; step < 100; ++step) {
      Asking& gate = gates[random() % gates.size()];
      if (gate.decided) {
        gate.decided = false;
        if (!gate.neighbours.admitted(gate.seen, -1)) ++refused;
        continue;
      }
      gate.seen = look(gate.neighbours);
      gate.seen.predicted_ns = static_cast<std::int64_t>(random() % (2 * kNsPerMs));
      gate.decided = slack(gate.seen).answer == Answer::kSubmit;
    }
    const std::int64_t admitted_ns = table_->layout().admitted_ns.load() - before_ns;
    ASSERT_LE(admitted_ns, 7 * kNsPerMs - Snapshot{}.margin_ns);
    ASSERT_GT(admitted_ns, 4 * kNsPerMs);
  }
  EXPECT_GT(refused, 300);
}

TEST_F(NeighboursTest, WithoutAKnownSlackWhatIsAdmittedIsAlwaysNoted) {
  const int latency = claim(Class::kLatency);
  table_->set_active(latency, now_);
  Neighbours one = neighbours(self_, /*mps=*/true);
  Neighbours two = neighbours(claim(Class::kBestEffort), /*mps=*/true);
  Snapshot seen_by_one = look(one);
  Snapshot seen_by_two = look(two);
  ASSERT_EQ(seen_by_two.slack_ns, kUnknown);
  seen_by_one.predicted_ns = seen_by_two.predicted_ns = 100'000;
  EXPECT_TRUE(one.admitted(seen_by_one, -1) && two.admitted(seen_by_two, -1));
  EXPECT_EQ(table_->layout().admitted_ns.load(), 200'000);
}

TEST_F(NeighboursTest, WhatOneOfTheRequestsDoesNotSayIsNoSlack) {
  const int one = claim(Class::kLatency);
  const int two = claim(Class::kLatency);
  begin(one, 3 * kNsPerMs, 10 * kNsPerMs);
  begin(two, 4 * kNsPerMs, 12 * kNsPerMs);
  EXPECT_EQ(look().slack_ns, 5 * kNsPerMs);  // the second one waits for the first
  table_->slot(two).expected_ns = 0;
  EXPECT_EQ(look().slack_ns, kUnknown);
  begin(two, 4 * kNsPerMs, 12 * kNsPerMs);
  table_->slot(one).deadline_ns = 0;
  EXPECT_EQ(look().slack_ns, kUnknown);
  begin(one, 3 * kNsPerMs, 10 * kNsPerMs);
  go_on(3 * kNsPerMs + 1);  // longer than expected
  EXPECT_EQ(look().slack_ns, kUnknown);
}

TEST_F(NeighboursTest, WhatIsAdmittedWithoutLatencyWorkCostsNobodySlack) {
  claim(Class::kLatency);
  Neighbours own = neighbours(self_);
  Snapshot seen = look(own);
  seen.predicted_ns = 500'000;
  own.admitted(seen, -1);
  EXPECT_EQ(table_->layout().admitted_ns.load(), 0);
  EXPECT_EQ(table_->slot(self_).virtual_ns.load(), 500'000);
}

// ---- what is announced and foreseen --------------------------------------------------------------------------------

TEST_F(NeighboursTest, AHintHoldsForItsTimeAndNoLongerThanItsClientLives) {
  const int latency = claim(Class::kLatency);
  table_->slot(latency).hint_until_ns = now_ + 300 * kNsPerMs;
  EXPECT_EQ(look().hint_ns, 300 * kNsPerMs);
  EXPECT_EQ(strict(look()).wait_ns, 300 * kNsPerMs);
  go_on(settings_.stale_heartbeat_ns + 1, latency);
  EXPECT_EQ(look().hint_ns, 0);
  go_on(0);
  EXPECT_EQ(look().hint_ns, 300 * kNsPerMs - settings_.stale_heartbeat_ns - 1);
  go_on(kNsPerSecond);
  EXPECT_EQ(look().hint_ns, 0);
  table_->slot(latency).hint_until_ns = now_ + 5 * kNsPerSecond;  // longer than one may say
  EXPECT_EQ(look().hint_ns, kNsPerSecond);
}

TEST_F(NeighboursTest, APauseHoldsOtherBestEffortAndNotItsOwn) {
  const int tuner = claim(Class::kBestEffort);
  EXPECT_FALSE(look().latency_clients);
  table_->slot(tuner).hint_until_ns = now_ + 5 * kNsPerMs;
  EXPECT_EQ(look().hint_ns, 5 * kNsPerMs);
  EXPECT_EQ(strict(look()).answer, Answer::kWaitForTime);
  Neighbours own = neighbours(tuner);
  EXPECT_EQ(look(own).hint_ns, 0);
  EXPECT_FALSE(look(own).latency_clients);
  go_on(5 * kNsPerMs);  // over, and another one may come soon: little is in flight until then
  EXPECT_EQ(look().hint_ns, 0);
  EXPECT_TRUE(look().latency_clients);
  go_on(kNsPerSecond);
  EXPECT_FALSE(look().latency_clients);
}

TEST_F(NeighboursTest, AHintHoldsBackWhatWouldFitAnotherRequestsSlack) {
  const int one = claim(Class::kLatency);
  const int two = claim(Class::kLatency);
  begin(one, 3 * kNsPerMs, 10 * kNsPerMs);
  Snapshot seen = look();
  seen.predicted_ns = 100'000;
  EXPECT_EQ(slack(seen).answer, Answer::kSubmit);
  table_->slot(two).hint_until_ns = now_ + kNsPerMs;
  seen = look();
  seen.predicted_ns = 100'000;
  EXPECT_EQ(slack(seen).answer, Answer::kWaitForTime);
}

TEST_F(NeighboursTest, TheNextForeseenWorkOfAllClientsHoldsLongLaunches) {
  const int one = claim(Class::kLatency);
  const int two = claim(Class::kLatency);
  table_->slot(one).foreseen_ns = now_ + 4 * kNsPerMs;
  table_->slot(one).foreseen_over_ns = now_ + 5 * kNsPerMs;
  table_->slot(two).foreseen_ns = now_ + 2 * kNsPerMs;
  table_->slot(two).foreseen_over_ns = now_ + 6 * kNsPerMs;
  Snapshot seen = look();
  EXPECT_EQ(seen.free_ns, 2 * kNsPerMs);
  EXPECT_EQ(seen.foreseen_over_ns, 6 * kNsPerMs);
  seen.predicted_ns = kNsPerMs;
  EXPECT_EQ(strict(seen).answer, Answer::kSubmit);
  seen.predicted_ns = 3 * kNsPerMs;
  EXPECT_EQ(strict(seen).answer, Answer::kWaitForTime);
  go_on(5 * kNsPerMs);  // the first one's is over; the second one's may come at any moment
  EXPECT_EQ(look().free_ns, 0);
  EXPECT_EQ(look().foreseen_over_ns, kNsPerMs);
  go_on(kNsPerMs);
  EXPECT_EQ(look().free_ns, Snapshot::kLongAgoNs);
  table_->slot(one).rate_free_ns = 700'000;
  EXPECT_EQ(look().free_ns, 700'000);
  EXPECT_EQ(look().foreseen_over_ns, kNsPerMs);
  // A stopped one says nothing.
  go_on(settings_.stale_heartbeat_ns + 1, one);
  EXPECT_EQ(look().free_ns, Snapshot::kLongAgoNs);
}

TEST_F(NeighboursTest, PeriodicRequestsAreForeseenByTheGate) {
  const int latency = claim(Class::kLatency);
  Requests requests;
  requests.join(&table_->layout(), latency, /*miss_probability=*/0);
  constexpr std::int64_t kPeriod = 30 * kNsPerMs;
  for (int i = 0; i < 20; ++i) {
    requests.begin(now_, /*in_region=*/false);
    go_on(kNsPerMs);
    requests.end(now_, /*in_region=*/false);
    go_on(kPeriod - kNsPerMs);
  }
  go_on(kNsPerMs - kPeriod);  // right after the last one ended
  requests.look_ahead(now_);
  Snapshot seen = look();
  EXPECT_NEAR(static_cast<double>(seen.free_ns), static_cast<double>(kPeriod - kNsPerMs), 200'000);
  seen.predicted_ns = kPeriod / 2;
  EXPECT_EQ(strict(seen).answer, Answer::kSubmit);
  seen.predicted_ns = 2 * kPeriod;
  EXPECT_EQ(strict(seen).answer, Answer::kWaitForTime);
}

// ---- several best-effort clients -----------------------------------------------------------------------------------

TEST_F(NeighboursTest, UnderMpsTheTimesInFlightAddUp) {
  const int other = claim(Class::kBestEffort);
  const int third = claim(Class::kBestEffort);
  table_->slot(other).in_flight_until_ns = now_ + 30'000;
  table_->slot(third).in_flight_until_ns = now_ + 70'000;
  Neighbours own = neighbours(self_, /*mps=*/true);
  Snapshot seen;
  seen.in_flight_ns = 5'000;
  own.look(seen, now_, 0);
  EXPECT_EQ(seen.in_flight_ns, 105'000);
  EXPECT_EQ(look().in_flight_ns, 0);  // without it they are not on the GPU together
  table_->slot(other).in_flight_until_ns = now_ + kHour;
  EXPECT_EQ(look(own).in_flight_ns, 70'000);
}

TEST_F(NeighboursTest, UnderMpsAClientFarAheadWaitsForWhoWaitsAndLives) {
  const int other = claim(Class::kBestEffort);
  table_->slot(self_).virtual_ns = 10 * kNsPerMs;
  Neighbours own = neighbours(self_, /*mps=*/true);
  EXPECT_TRUE(look(own).my_turn);
  wait_at_gate(other);
  EXPECT_FALSE(look(own).my_turn);
  EXPECT_TRUE(look(own, 20 * kNsPerMs).my_turn);
  go_on(settings_.stale_heartbeat_ns + 1, other);
  EXPECT_TRUE(look(own).my_turn);
}

// Clients that always want to launch, on a virtual clock, one launch at a time. Returns what each launched.
class Contest {
 public:
  struct Client {
    Neighbours neighbours;
    int slot = -1;
    std::int64_t in_flight_until_ns = 0;
    int launched = 0;
    bool stopped = false;
  };

  Contest(arbiter::Table& table, bool mps) : table_(table), mps_(mps) {}

  Client& enter(int slot, const GateSettings& settings) {
    Client client;
    client.slot = slot;
    client.neighbours.join(&table_.layout(), slot, mps_, settings);
    clients_.push_back(client);
    return clients_.back();
  }

  // Until `end_ns`, in steps of 20 us. Who waits comes first in each, so it is the first to see that a turn expired.
  void run(std::int64_t& now, std::int64_t end_ns, std::int64_t launch_ns) {
    for (; now < end_ns; now += 20'000) {
      for (Client& client : clients_) {
        if (!client.stopped) table_.slot(client.slot).heartbeat_ns = now;
      }
      for (const bool waits : {true, false}) {
        for (Client& client : clients_) {
          if (!client.stopped && waiting(client) == waits && client.in_flight_until_ns <= now) {
            ask(client, now, launch_ns);
          }
        }
      }
    }
  }

  Client& operator[](std::size_t index) { return clients_[index]; }

 private:
  static std::uint64_t bit(const Client& client) { return std::uint64_t{1} << client.slot; }
  bool waiting(const Client& client) const { return (table_.layout().waiting & bit(client)) != 0; }

  void ask(Client& client, std::int64_t now, std::int64_t launch_ns) {
    if (!waiting(client)) client.neighbours.rejoined(now);  // a launch that has just come
    Snapshot seen;
    seen.predicted_ns = launch_ns;
    client.neighbours.look(seen, now, 0);
    if (!seen.my_turn || (mps_ && seen.in_flight_ns > 0)) {
      table_.layout().waiting |= bit(client);
      return;
    }
    table_.layout().waiting &= ~bit(client);
    client.neighbours.admitted(seen, -1);
    client.in_flight_until_ns = now + launch_ns;
    client.neighbours.publish(client.in_flight_until_ns);
    ++client.launched;
  }

  arbiter::Table& table_;
  bool mps_;
  std::vector<Client> clients_;
};

class Shares : public NeighboursTest, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(WithAndWithoutMps, Shares, ::testing::Bool());

TEST_P(Shares, AStepOfPriorityDoublesIt) {
  Contest contest(*table_, GetParam());
  contest.enter(self_, settings_);
  contest.enter(claim(Class::kBestEffort, 1), settings_);
  contest.enter(claim(Class::kBestEffort), settings_);
  contest.run(now_, now_ + 4 * kNsPerSecond, 400'000);
  const double plain = contest[0].launched;
  EXPECT_GT(plain, 1000);
  EXPECT_NEAR(contest[1].launched / plain, 2, 0.2);
  EXPECT_NEAR(contest[2].launched / plain, 1, 0.1);
}

TEST_P(Shares, WhatOneHadWhileItWasAloneIsNotHeldAgainstIt) {
  Contest contest(*table_, GetParam());
  contest.enter(self_, settings_);
  contest.run(now_, now_ + 2 * kNsPerSecond, 400'000);
  // It pauses for a moment, in which another one starts; then both want all.
  now_ += 2 * kNsPerMs;
  contest.enter(claim(Class::kBestEffort), settings_);
  contest[0].stopped = true;
  contest.run(now_, now_ + 2 * kNsPerMs, 400'000);
  contest[0].stopped = false;
  const int before = contest[0].launched;
  contest[1].launched = 0;
  contest.run(now_, now_ + kNsPerSecond, 400'000);
  EXPECT_NEAR((contest[0].launched - before) / static_cast<double>(contest[1].launched), 1, 0.1);
}

TEST_P(Shares, OneThatIsStoppedAtTheGateHoldsNobodyUpAndIsOwedNothing) {
  Contest contest(*table_, GetParam());
  contest.enter(self_, settings_);
  contest.enter(claim(Class::kBestEffort), settings_);
  const std::uint64_t bit = std::uint64_t{1} << contest[1].slot;
  do {
    contest.run(now_, now_ + 20'000, 400'000);
  } while ((table_->layout().waiting & bit) == 0);
  contest[1].stopped = true;
  contest.run(now_, now_ + kNsPerSecond, 400'000);
  int before = contest[0].launched;
  contest.run(now_, now_ + kNsPerSecond, 400'000);
  EXPECT_GT(contest[0].launched - before, 2400);  // as if it were alone
  contest[1].stopped = false;
  before = contest[0].launched;
  contest[1].launched = 0;
  contest.run(now_, now_ + kNsPerSecond, 400'000);
  EXPECT_NEAR((contest[0].launched - before) / static_cast<double>(contest[1].launched), 1, 0.1);
}

// Without MPS: a kernel of the owner, which is furthest behind, runs on when its turn expires.
TEST_F(NeighboursTest, AnExpiredTurnIsLeftToAnOwnerThatIsFurthestBehind) {
  const int waiter = claim(Class::kBestEffort);
  const int third = claim(Class::kBestEffort);
  table_->slot(waiter).virtual_ns = 20 * kNsPerMs;
  table_->slot(third).virtual_ns = 30 * kNsPerMs;
  Neighbours owner = neighbours(self_);
  Neighbours other = neighbours(waiter);
  Snapshot seen = look(owner);
  ASSERT_TRUE(seen.my_turn);
  go_on(settings_.turn_ns - kNsPerMs / 2);
  wait_at_gate(waiter);
  wait_at_gate(third);
  seen.predicted_ns = 2 * kNsPerMs;
  owner.admitted(seen, -1);
  owner.publish(now_ + seen.predicted_ns);
  go_on(kNsPerMs);
  EXPECT_FALSE(look(other).my_turn);
  go_on(kNsPerMs);
  EXPECT_TRUE(look(owner).my_turn);  // it renews it in time
  owner.publish(now_);
  go_on(kIdleNs);
  EXPECT_FALSE(look(other).my_turn);
  go_on(kNsPerUs);  // it has nothing to do
  EXPECT_TRUE(look(other).my_turn);
}

TEST_F(NeighboursTest, ATurnOfferedToOneThatDoesNotComeIsTakenAfterTheGrace) {
  const int stopped = claim(Class::kBestEffort);
  const int waiter = claim(Class::kBestEffort);
  table_->slot(self_).virtual_ns = 30 * kNsPerMs;
  table_->slot(waiter).virtual_ns = 20 * kNsPerMs;
  Neighbours owner = neighbours(self_);
  Neighbours other = neighbours(waiter);
  ASSERT_TRUE(look(owner).my_turn);
  wait_at_gate(stopped);
  wait_at_gate(waiter);
  go_on(settings_.turn_ns);
  Snapshot seen;
  EXPECT_TRUE(owner.look(seen, now_, 0));  // the other one may sleep
  EXPECT_FALSE(seen.my_turn);
  EXPECT_EQ(Turn::unpack(table_->layout().turn).owner, stopped);
  go_on(TurnView::kGraceUs * kNsPerUs);
  EXPECT_FALSE(look(other).my_turn);
  go_on(kNsPerUs);
  EXPECT_TRUE(look(other).my_turn);
  // Had it come, it would have had it, though it has not fed yet.
  table_->layout().turn = Turn{stopped, now_ / kNsPerUs}.pack();
  EXPECT_FALSE(look(other).my_turn);
  Neighbours back = neighbours(stopped);
  EXPECT_TRUE(look(back).my_turn);
}

// One that holds the turn and hardly feeds does not starve the others, however far behind it stays.
TEST_F(NeighboursTest, AClientThatHardlyFeedsTakesOneTurnInTwoAtMost) {
  Contest contest(*table_, /*mps=*/false);
  contest.enter(self_, settings_);
  contest.run(now_, now_ + 20 * kNsPerMs, 400'000);
  const int slow = claim(Class::kBestEffort);
  Neighbours lazy = neighbours(slow);
  const int before = contest[0].launched;
  int turns = 0;
  for (std::int64_t end = now_ + kNsPerSecond; now_ < end; now_ += 20'000) {
    table_->slot(slow).heartbeat_ns = now_;
    wait_at_gate(slow);  // always there, and submits next to nothing
    Snapshot seen = look(lazy);
    if (seen.my_turn) {
      ++turns;
      seen.predicted_ns = 1;
      lazy.admitted(seen, -1);
    }
    contest.run(now_, now_ + 20'000, 400'000);
    now_ -= 20'000;
  }
  EXPECT_GT(turns, 0);
  EXPECT_GT(contest[0].launched - before, 1000);
}

// ---- requests that were completed ----------------------------------------------------------------------------------

TEST_F(NeighboursTest, TheLeadIsToldOfEachCompletedRequest) {
  const int latency = claim(Class::kLatency);
  Neighbours own = neighbours(self_);
  Lead::Bounds bounds;
  bounds.first_ns = bounds.most_ns;
  bounds.max_inflation = 1.2;
  Lead lead(bounds);
  arbiter::Slot& client = table_->slot(latency);
  client.request_ns = 2 * kNsPerMs;
  client.request_waited_ns = kNsPerMs;
  own.report_requests(lead);
  EXPECT_EQ(lead.ns(), bounds.most_ns);
  client.requests = 1;
  own.report_requests(lead);
  const std::int64_t after_one = lead.ns();
  EXPECT_LT(after_one, bounds.most_ns);
  own.report_requests(lead);
  EXPECT_EQ(lead.ns(), after_one);
  client.requests = 2;
  own.report_requests(lead);
  EXPECT_LT(lead.ns(), after_one);
}

// ---- damage --------------------------------------------------------------------------------------------------------

// Whatever stands in the words of others, what is made of it is in range, and strict admits nothing beside latency work
// that lives.
TEST_F(NeighboursTest, RandomWordsNeverLeadAstray) {
  std::mt19937_64 random(11);
  const std::vector<std::int64_t> edges = {0,      1,          -1,         INT64_MIN,     INT64_MAX,
                                           kStart, kStart + 1, kStart - 1, kStart + kHour};
  const auto word = [&]() -> std::int64_t {
    switch (random() % 4) {
      case 0:
        return edges[random() % edges.size()];
      case 1:
        return static_cast<std::int64_t>(random());
      default:
        return kStart + static_cast<std::int64_t>(random() % (4 * kNsPerSecond)) - 2 * kNsPerSecond;
    }
  };
  std::vector<int> others;
  for (int i = 0; i < 6; ++i) others.push_back(claim(i % 2 == 0 ? Class::kLatency : Class::kBestEffort));
  Neighbours plain = neighbours(self_);
  Neighbours mps = neighbours(self_, /*mps=*/true);
  Lead lead(Lead::Bounds{.max_inflation = 1.1});
  auto& layout = table_->layout();
  int admitted_beside = 0;
  for (int round = 0; round < 20'000; ++round) {
    for (const int slot : others) {
      arbiter::Slot& client = table_->slot(slot);
      for (auto* const time :
           {&client.heartbeat_ns, &client.active_since_ns, &client.deadline_ns, &client.in_flight_until_ns,
            &client.entered_ns, &client.expected_ns, &client.admitted_at_entry_ns, &client.hint_until_ns,
            &client.foreseen_ns, &client.foreseen_over_ns, &client.rate_free_ns, &client.request_ns,
            &client.request_waited_ns, &client.virtual_ns}) {
        time->store(word());
      }
      client.requests = random();
      client.priority = static_cast<std::int32_t>(random());
      if (random() % 2 == 0) client.heartbeat_ns = now_;
      if (random() % 2 == 0) client.expected_ns = static_cast<std::int64_t>(random() % kNsPerSecond);
    }
    layout.admitted_ns = word();
    layout.turn = random() % 2 == 0 ? random() : static_cast<std::uint64_t>(random() % 70) << 56 | kStart / 1000;
    layout.waiting = random();
    layout.active = random() % 4 == 0 ? 0 : random();
    bool lives = false;
    for (const int slot : others) {
      const bool active = (layout.active >> slot & 1) != 0 && (layout.latency >> slot & 1) != 0;
      lives = lives || (active && table_->slot(slot).heartbeat_ns == now_);
    }
    for (Neighbours* const own : {&plain, &mps}) {
      Snapshot seen = look(*own, random() % 2 == 0 ? 0 : kNsPerSecond);
      ASSERT_TRUE(seen.latency_active || !lives);
      ASSERT_TRUE(seen.hint_ns >= 0 && seen.hint_ns <= kNsPerSecond);
      ASSERT_TRUE(seen.free_ns >= 0 && seen.foreseen_over_ns >= 0 && seen.foreseen_over_ns <= 60 * kNsPerSecond);
      ASSERT_TRUE(seen.in_flight_ns >= 0 && seen.in_flight_ns <= 6 * kNsPerSecond);
      ASSERT_TRUE(seen.slack_ns == kUnknown || (seen.slack_ns >= -300 * kHour && seen.slack_ns <= 300 * kHour));
      seen.predicted_ns = 50'000;
      if (lives) {
        ASSERT_EQ(strict(seen).answer, Answer::kWaitForLatency);
      }
      for (const Policy& policy : policies()) {
        const Decision decision = policy.decide(seen);
        ASSERT_EQ(decision.wait_ns > 0, decision.answer == Answer::kWaitForTime);
      }
      if (seen.latency_active && slack(seen).answer == Answer::kSubmit) ++admitted_beside;
      own->rejoined(now_);
      own->admitted(seen, -1);
      own->report_requests(lead);
      ASSERT_TRUE(lead.ns() >= 10'000 && lead.ns() <= 40'000);
    }
  }
  EXPECT_GT(admitted_beside, 0);  // or this test has seen little
}

}  // namespace
}  // namespace cudasched::schedule
