// What a latency client says of its requests, on a clock of the test's own; and where it waits to enter a region.
#include "arbiter/processes.hpp"
#include "runtime/gate.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "runtime/python.hpp"
#include "schedule/requests.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kStart = 1000 * kNsPerSecond;
constexpr std::int64_t kSlo = 10 * kNsPerMs;
constexpr bool kInRegion = true;

class RequestsTest : public arbiter::testing::TableTest {
 protected:
  void SetUp() override {
    table_ = open();
    slot_ = claim(Class::kLatency);
    requests_.join(&table_->layout(), slot_, /*miss_probability=*/0);
  }

  int claim(Class client_class) {
    arbiter::ClientInfo client;
    client.client_class = client_class;
    return table_->claim(client);
  }
  arbiter::Slot& slot() { return table_->slot(slot_); }

  // A region with its work, alone.
  void region(std::int64_t slo_ns, std::int64_t takes_ns, std::int64_t admitted_ns = 0) {
    requests_.enter(slo_ns, /*alone=*/true);
    requests_.begin(now_, kInRegion);
    expected_ = slot().expected_ns;
    table_->layout().admitted_ns += admitted_ns;
    now_ += takes_ns;
    requests_.end(now_, !kInRegion);
    now_ += kNsPerMs;
  }
  void learn(std::int64_t slo_ns, std::int64_t takes_ns) {
    for (std::size_t i = 0; i < schedule::RegionHistory::kFewest; ++i) region(slo_ns, takes_ns);
  }

  Settings settings_;
  std::unique_ptr<arbiter::Table> table_;
  int slot_ = -1;
  schedule::Requests requests_;
  std::int64_t now_ = kStart;
  std::int64_t expected_ = 0;  // as the last region() published it
};

TEST_F(RequestsTest, WhatOneTakesIsKnownAfterAFewOfItsTarget) {
  learn(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 0);
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 2 * kNsPerMs);
  EXPECT_EQ(slot().expected_ns, 0);  // between requests
  EXPECT_EQ(slot().requests, schedule::RegionHistory::kFewest + 1);
  EXPECT_EQ(slot().request_ns, 2 * kNsPerMs);
  region(2 * kSlo, 3 * kNsPerMs);  // another target, another kind of request
  EXPECT_EQ(expected_, 0);
  region(0, 3 * kNsPerMs);
  EXPECT_EQ(expected_, 0);
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 2 * kNsPerMs);
}

TEST_F(RequestsTest, TheGpuIsMadeReadyForTheNextOneOfARhythm) {
  const auto request = [&] {
    requests_.begin(now_, !kInRegion);
    requests_.end(now_ + kNsPerMs, !kInRegion);
  };
  request();
  EXPECT_EQ(requests_.ready_ns(), 0) << "no rhythm yet";
  for (int i = 0; i < 20; ++i) {
    now_ += 33 * kNsPerMs;
    request();
  }
  now_ += 33 * kNsPerMs;
  for (int i = 0; i < 5; ++i, now_ += 33 * kNsPerMs) {
    const std::int64_t ready = requests_.ready_ns();
    ASSERT_GT(ready, now_ - kNsPerMs);
    ASSERT_LT(ready, now_ - 100 * kNsPerUs);
    EXPECT_FALSE(requests_.get_ready(ready - 1));
    EXPECT_EQ(slot().hint_until_ns, 0);
    EXPECT_TRUE(requests_.get_ready(ready));
    EXPECT_EQ(slot().hint_until_ns, slot().foreseen_over_ns);
    requests_.look_ahead(ready + 1);
    EXPECT_FALSE(requests_.get_ready(ready + 1)) << "once";
    request();
    EXPECT_EQ(slot().hint_until_ns, 0);
  }
  // Looked at too late: what is over is not waited for.
  EXPECT_FALSE(requests_.get_ready(slot().foreseen_over_ns + 1));
  EXPECT_EQ(slot().hint_until_ns, 0);
}

TEST_F(RequestsTest, OneInSixteenIsKeptClean) {
  learn(kSlo, 2 * kNsPerMs);
  int clean = 0;
  for (int i = 0; i < 160; ++i) {
    // Best-effort work goes into those that say what they take, and none into the others.
    requests_.enter(kSlo, true);
    requests_.begin(now_, kInRegion);
    const bool known = slot().expected_ns != 0;
    if (known) table_->layout().admitted_ns += kNsPerMs;
    clean += known ? 0 : 1;
    requests_.end(now_ += 2 * kNsPerMs, !kInRegion);
    now_ += kNsPerMs;
  }
  EXPECT_EQ(clean, 10);
}

TEST_F(RequestsTest, TimesWithBestEffortWorkInThemTeachNothing) {
  learn(kSlo, 2 * kNsPerMs);
  for (int i = 0; i < 14; ++i) region(kSlo, 6 * kNsPerMs, /*admitted_ns=*/4 * kNsPerMs);
  EXPECT_EQ(expected_, 2 * kNsPerMs);
}

TEST_F(RequestsTest, NothingIsSaidOfRegionsThatOverlap) {
  learn(kSlo, 2 * kNsPerMs);
  const std::uint64_t completed = slot().requests;
  requests_.enter(kSlo, true);
  requests_.begin(now_, kInRegion);
  EXPECT_EQ(slot().expected_ns, 2 * kNsPerMs);
  requests_.enter(kSlo, /*alone=*/false);
  EXPECT_EQ(slot().expected_ns, 0);
  requests_.end(now_ += 30 * kNsPerMs, !kInRegion);
  // The second one comes before the first one's request has begun.
  requests_.enter(kSlo, true);
  requests_.enter(kSlo, false);
  requests_.begin(now_, kInRegion);
  EXPECT_EQ(slot().expected_ns, 0);
  requests_.end(now_ += 30 * kNsPerMs, !kInRegion);
  EXPECT_EQ(slot().requests, completed);
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 2 * kNsPerMs);
}

TEST_F(RequestsTest, NothingIsLearnedOfOneThatLapsedInItsRegion) {
  learn(kSlo, 2 * kNsPerMs);
  const std::uint64_t completed = slot().requests;
  requests_.enter(kSlo, true);
  requests_.begin(now_, kInRegion);
  slot().deadline_ns = now_ + kSlo;  // as the region's entry has it
  requests_.end(now_ += 5 * kNsPerMs, kInRegion);
  EXPECT_EQ(slot().deadline_ns, now_ + 5 * kNsPerMs);  // the region is still open
  requests_.begin(now_ += kNsPerMs, kInRegion);
  EXPECT_EQ(slot().expected_ns, 0);
  requests_.end(now_ += kNsPerMs, !kInRegion);
  EXPECT_EQ(slot().requests, completed);
  EXPECT_EQ(slot().deadline_ns, 0);
}

TEST_F(RequestsTest, ATargetOfTheClientHoldsWithoutRegions) {
  slot().slo_ns = kSlo;
  for (std::size_t i = 0; i <= schedule::RegionHistory::kFewest; ++i) {
    requests_.begin(now_, !kInRegion);
    EXPECT_EQ(slot().deadline_ns, now_ + kSlo);
    EXPECT_EQ(slot().expected_ns, 0);
    requests_.end(now_ += 2 * kNsPerMs, !kInRegion);
    EXPECT_EQ(slot().deadline_ns, 0);
    now_ += kNsPerMs;
  }
  requests_.begin(now_, !kInRegion);
  EXPECT_EQ(slot().expected_ns, 2 * kNsPerMs);
}

TEST_F(RequestsTest, TheTargetSeenLongestAgoMakesRoomForANewOne) {
  learn(kSlo, 2 * kNsPerMs);
  for (int other = 2; other <= 8; ++other) region(other * kSlo, kNsPerMs);
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 2 * kNsPerMs);
  region(9 * kSlo, kNsPerMs);
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(expected_, 0);
}

TEST_F(RequestsTest, AnEndThatMeetsTheNextBeginningTeachesNothing) {
  learn(kSlo, 2 * kNsPerMs);
  const std::uint64_t completed = slot().requests;
  requests_.enter(kSlo, true);
  requests_.begin(now_, kInRegion);
  requests_.end(now_, !kInRegion);
  requests_.begin(now_, !kInRegion);
  requests_.end(now_ - kNsPerUs, !kInRegion);
  EXPECT_EQ(slot().requests, completed);
}

TEST_F(RequestsTest, TheLeadLearnsWhatARequestFoundInFlight) {
  const int train = claim(Class::kBestEffort);
  table_->slot(train).in_flight_until_ns = now_ + 300'000;
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(slot().request_waited_ns, 300'000);
  table_->slot(train).in_flight_until_ns = now_ + 60 * kNsPerSecond;  // a damaged word
  region(kSlo, 2 * kNsPerMs);
  EXPECT_EQ(slot().request_waited_ns, 0);
}

// ---- hints and arrivals --------------------------------------------------------------------------------------------

TEST_F(RequestsTest, AHintLastsUntilTheWorkComes) {
  requests_.expect(5 * kNsPerMs, now_);
  EXPECT_EQ(slot().hint_until_ns, now_ + 5 * kNsPerMs);
  requests_.expect(2 * kNsPerMs, now_);
  EXPECT_EQ(slot().hint_until_ns, now_ + 5 * kNsPerMs);
  requests_.expect(60 * kNsPerSecond, now_);
  EXPECT_EQ(slot().hint_until_ns, now_ + kNsPerSecond);
  requests_.begin(now_ += kNsPerMs, !kInRegion);
  EXPECT_EQ(slot().hint_until_ns, 0);
  // Of the next one, said while this one is under way: the hint that is over does not come back with it.
  requests_.expect(2 * kNsPerMs, now_);
  EXPECT_EQ(slot().hint_until_ns, now_ + 2 * kNsPerMs);
  const std::int64_t until = slot().hint_until_ns;
  requests_.end(now_ += kNsPerMs, !kInRegion);
  EXPECT_EQ(slot().hint_until_ns, until);
}

TEST_F(RequestsTest, PeriodicOnesAreForeseenUntilTheyStayAway) {
  for (int i = 0; i < 20; ++i) {
    region(kSlo, 2 * kNsPerMs);
    now_ += 27 * kNsPerMs;
  }
  const std::int64_t next = now_;
  EXPECT_LT(slot().foreseen_ns, next);
  EXPECT_GT(slot().foreseen_over_ns, next);
  EXPECT_GT(slot().foreseen_ns, next - kNsPerMs);
  requests_.look_ahead(now_ += 10 * kNsPerMs);  // one was left out
  EXPECT_GT(slot().foreseen_ns, now_);
  requests_.look_ahead(now_ += kNsPerSecond);
  EXPECT_EQ(slot().foreseen_ns, 0);
  EXPECT_EQ(slot().foreseen_over_ns, 0);
}

TEST_F(RequestsTest, RatesAreSaidWhereAMissProbabilityWasStated) {
  std::int64_t gap = kNsPerMs;
  const auto irregular = [&](int count) {
    for (int i = 0; i < count; ++i) {
      region(kSlo, kNsPerMs);
      now_ += gap = gap * 7 % (61 * kNsPerMs);
    }
  };
  irregular(12);
  EXPECT_EQ(slot().rate_free_ns, 0);
  requests_.join(&table_->layout(), slot_, /*miss_probability=*/0.1);
  irregular(12);
  EXPECT_GT(slot().rate_free_ns, 0);
  EXPECT_EQ(slot().foreseen_over_ns, 0);
}

// ---- entering by deadline ------------------------------------------------------------------------------------------

class Entry : public RequestsTest {
 protected:
  void SetUp() override {
    RequestsTest::SetUp();
    find_gil_check();
    settings_.earliest_deadline_first = true;
    settings_.stale_heartbeat_ns = 3600 * kNsPerSecond;  // on a busy machine nothing is stale
    activity_.register_client(table_.get(), slot_, settings_, /*mps=*/true);
  }

  // Another client, in a region with a deadline so far from now.
  int other(std::int64_t deadline_ns, std::int32_t priority = 0) {
    const int slot = claim(Class::kLatency);
    table_->slot(slot).regions = 1;
    table_->slot(slot).deadline_ns = deadline_ns == 0 ? 0 : now_ns() + deadline_ns;
    table_->slot(slot).priority = priority;
    return slot;
  }

  static Region region(std::int64_t deadline_ns, std::int32_t priority = 0) {
    Region region;
    region.region_class = Class::kLatency;
    region.slo_ns = deadline_ns;
    region.deadline_ns = deadline_ns == 0 ? 0 : now_ns() + deadline_ns;
    region.priority = priority;
    return region;
  }

  // Enters and leaves. Did it wait? A thread that waits lets go of the GIL once.
  bool waits(const Region& region) {
    const int before = test::gil_releases.load();
    test::gil_held() = true;
    activity_.enter_region(region);
    EXPECT_TRUE(test::gil_held());
    test::gil_held() = false;
    EXPECT_NE(table_->active() >> slot_ & 1, 0U);
    activity_.exit_region(region, true);
    return test::gil_releases.load() != before;
  }

  LatencyActivity activity_;
};

TEST_F(Entry, TheMostUrgentClientNeverWaits) {
  EXPECT_FALSE(waits(region(kSlo)));
  other(1000 * kNsPerSecond);
  other(0);
  EXPECT_FALSE(waits(region(kSlo)));
  EXPECT_FALSE(waits(region(2000 * kNsPerSecond, /*priority=*/1)));
}

TEST_F(Entry, OthersWaitForItButNotForEver) {
  const int urgent = other(kSlo);
  EXPECT_TRUE(waits(region(1000 * kNsPerSecond)));
  EXPECT_TRUE(waits(region(0)));
  table_->slot(urgent).regions = 0;
  EXPECT_FALSE(waits(region(1000 * kNsPerSecond)));
  other(0, /*priority=*/1);
  EXPECT_TRUE(waits(region(kSlo)));
}

TEST_F(Entry, OneWhoseProgramStoppedIsNotWaitedFor) {
  table_->slot(other(kSlo)).heartbeat_ns = now_ns() - settings_.stale_heartbeat_ns - 1;
  EXPECT_FALSE(waits(region(1000 * kNsPerSecond)));
}

TEST_F(Entry, InARegionOfItsOwnAThreadDoesNotWait) {
  Region outer = region(kSlo);
  activity_.enter_region(outer);
  other(2 * kSlo);  // waits for us; were we to wait for it, both would
  EXPECT_FALSE(waits(region(1000 * kNsPerSecond)));
  activity_.exit_region(outer, true);
}

TEST_F(Entry, AKilledOneIsGivenBackByWhoWaitsForIt) {
  arbiter::testing::Process urgent([&](const arbiter::testing::Link& link) {
    const auto table = open();
    arbiter::ClientInfo client;
    client.client_class = Class::kLatency;
    const int slot = table->claim(client);
    table->slot(slot).regions = 1;
    table->slot(slot).deadline_ns = 1;
    link.send(slot);
    link.receive();
  });
  const std::int64_t slot = urgent.receive();
  urgent.kill();
  EXPECT_NE(table_->latency_clients() >> slot & 1, 0U);
  EXPECT_TRUE(waits(region(kSlo)));
  EXPECT_EQ(table_->latency_clients() >> slot & 1, 0U);
}

}  // namespace
}  // namespace cudasched::runtime
