#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "schedule/slack.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kUnknown = Snapshot::kUnknownNs;

TEST(RegionHistory, KnowsNothingOfTooFewRequests) {
  RegionHistory history;
  for (std::size_t i = 0; i + 1 < RegionHistory::kFewest; ++i) {
    history.observe(1'000, 0);
    EXPECT_EQ(history.p90_ns(), kUnknown);
    EXPECT_EQ(history.expected_ns(), kUnknown);
  }
  history.observe(1'000, 0);
  EXPECT_EQ(history.p90_ns(), 1'000);
  EXPECT_EQ(history.expected_ns(), 1'000);
}

TEST(Remaining, IsUnknownBeyondWhatWasExpected) {
  EXPECT_EQ(remaining_ns(1'000, 400), 600);
  EXPECT_EQ(remaining_ns(1'000, 1'000), 0);
  EXPECT_EQ(remaining_ns(1'000, 1'001), kUnknown);
  EXPECT_EQ(remaining_ns(1'000, -5), 1'005);  // work that was admitted and has not run yet
  EXPECT_EQ(remaining_ns(kUnknown, 0), kUnknown);
}

TEST(RegionHistory, IsTheNinthDecileOfTheLastTimes) {
  std::mt19937_64 random(1);
  RegionHistory history;
  std::vector<std::int64_t> all;
  for (int i = 0; i < 2'000; ++i) {
    all.push_back(static_cast<std::int64_t>(random() % 1'000'000));
    history.observe(all.back(), 0);
    if (random() % 2 == 0) history.observe(77'000'000, 5);  // not clean: says nothing
    if (all.size() < RegionHistory::kFewest) continue;
    const std::size_t kept = std::min(all.size(), RegionHistory::kTimes);
    const auto from = all.end() - static_cast<std::ptrdiff_t>(kept);
    const auto within = static_cast<std::size_t>(
        std::count_if(from, all.end(), [&](std::int64_t time) { return time <= history.p90_ns(); }));
    ASSERT_GE(10 * within, 9 * kept);
    ASSERT_LT(10 * (within - 1), 9 * kept);
    ASSERT_NE(std::find(from, all.end(), history.p90_ns()), all.end());
  }
}

TEST(RegionHistory, OneRequestInAPeriodIsKeptClean) {
  RegionHistory history;
  for (std::size_t i = 0; i < RegionHistory::kFewest; ++i) history.observe(1'000, 0);
  int clean = 0;
  for (int i = 0; i < 10 * RegionHistory::kCleanPeriod; ++i) {
    const bool known = history.expected_ns() != kUnknown;
    clean += known ? 0 : 1;
    history.observe(1'000, known ? 500 : 0);
  }
  EXPECT_EQ(clean, 10);
}

TEST(LeastSlack, IsDeadlineLessNowLessRemaining) {
  const std::vector<Request> one{{10'000, 3'000}};
  EXPECT_EQ(least_slack_ns(one, 2'000), 5'000);
  EXPECT_EQ(least_slack_ns({}, 0), kUnknown);
  const std::vector<Request> no_deadline{{10'000, 3'000}, {0, 5}};
  EXPECT_EQ(least_slack_ns(no_deadline, 0), kUnknown);
  const std::vector<Request> unknown{{10'000, 3'000}, {20'000, kUnknown}};
  EXPECT_EQ(least_slack_ns(unknown, 0), kUnknown);
}

TEST(AdmissionCost, AFirstLaunchBringsTwoSwitches) {
  EXPECT_EQ(admission_cost_ns(70'000, 0, 130'000), 330'000);
  EXPECT_EQ(admission_cost_ns(70'000, 1, 130'000), 70'000);
}

// Two requests that began together: the GPU has worked for the first one only.
TEST(LeastSlack, TimeThatHasPassedWasHadByTheMostUrgentAlone) {
  const Request first{20'000, 1'000, 5'000};
  const Request second{21'000, 2'000, 6'000};
  EXPECT_EQ(least_slack_ns(std::array{second, first}, 10'000), 21'000 - 10'000 - 1'000 - 6'000);
}

// If best-effort work takes at most the least slack, and then the requests run one after another in the order of their
// deadlines, all meet them (where the slack is not negative); with any more, one does not.
TEST(LeastSlack, IsExactlyWhatTheRequestsCanSpare) {
  std::mt19937_64 random(2);
  int feasible = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::vector<Request> requests(random() % 6 + 1);
    for (Request& request : requests) {
      request.deadline_ns = static_cast<std::int64_t>(random() % 100'000) + 1'000;
      request.remaining_ns = static_cast<std::int64_t>(random() % 15'000);
    }
    const auto now = static_cast<std::int64_t>(random() % 1'000);
    const std::int64_t slack_ns = least_slack_ns(requests, now);
    std::sort(requests.begin(), requests.end(),
              [](const Request& a, const Request& b) { return a.deadline_ns < b.deadline_ns; });
    const auto all_meet = [&](std::int64_t spent_ns) {
      std::int64_t clock = now + spent_ns;
      for (const Request& request : requests) {
        clock += request.remaining_ns;
        if (clock > request.deadline_ns) return false;
      }
      return true;
    };
    ASSERT_TRUE(slack_ns < 0 || all_meet(slack_ns));
    ASSERT_FALSE(all_meet(slack_ns + 1));
    feasible += slack_ns >= 0 ? 1 : 0;
  }
  EXPECT_GT(feasible, 10'000);
}

}  // namespace
}  // namespace cudasched::schedule
