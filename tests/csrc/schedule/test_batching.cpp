// When batches start, and which requests are accepted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "schedule/batching.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr BatchPolicy kPolicies[] = {BatchPolicy::kDeadline, BatchPolicy::kEager, BatchPolicy::kDelay,
                                     BatchPolicy::kAimd};

// Sizes 1, 2, 4 and 8 take 4, 5, 6 and 10 ms; requests have come at 0, and others are expected
// each 5 ms.
class BatchingTest : public ::testing::Test {
 protected:
  BatchView view(const std::vector<std::int64_t>& deadlines_ms) {
    deadlines_.clear();
    for (const std::int64_t deadline : deadlines_ms) {
      deadlines_.push_back(deadline == kNeverNs ? kNeverNs : deadline * kMillisecond);
    }
    arrivals_.assign(deadlines_.size(), 0);
    BatchView seen;
    seen.deadlines_ns = deadlines_;
    seen.arrivals_ns = arrivals_;
    seen.sizes = sizes_;
    seen.bounds_ns = bounds_;
    seen.most = 8;
    seen.gap_ns = 5 * kMillisecond;
    return seen;
  }

  std::vector<std::int64_t> sizes_{1, 2, 4, 8};
  std::vector<std::int64_t> bounds_{4 * kMillisecond, 5 * kMillisecond, 6 * kMillisecond, 10 * kMillisecond};
  std::vector<std::int64_t> deadlines_;
  std::vector<std::int64_t> arrivals_;
};

TEST_F(BatchingTest, NothingIsDecidedForNobody) {
  for (const BatchPolicy policy : kPolicies) {
    BatchView seen = view({});
    seen.policy = policy;
    const BatchDecision decision = next_batch(seen);
    EXPECT_EQ(decision.take, 0U);
    EXPECT_EQ(decision.look_ns, kNeverNs);
  }
}

TEST_F(BatchingTest, GrowsNoFurtherThanTheSlackOfOtherPrograms) {
  BatchView seen = view({100, 100, 100, 100});
  seen.most = 4;
  for (const auto& [slack_ms, taken] : {std::pair{10, 4U}, {6, 4U}, {5, 2U}, {4, 1U}}) {
    seen.slack_ns = slack_ms * kMillisecond;
    EXPECT_EQ(next_batch(seen).take, taken) << slack_ms;
  }
  for (const std::int64_t late_ns : {4 * kMillisecond - 1, -kMillisecond, std::numeric_limits<std::int64_t>::min()}) {
    seen.slack_ns = late_ns;
    EXPECT_EQ(next_batch(seen).take, 4U) << "one that is late, or not known, limits nothing";
  }
  seen = view({20});
  EXPECT_EQ(next_batch(seen).take, 0U);
  seen.slack_ns = 4 * kMillisecond;
  EXPECT_EQ(next_batch(seen).take, 1U) << "none is waited for that would make the batch too long";
}

TEST_F(BatchingTest, WaitsForALargerBatchThatCanStartInTime) {
  BatchView seen = view({20});
  seen.margin_ns = kMillisecond;
  EXPECT_EQ(next_batch(seen).take, 0U);
  EXPECT_EQ(next_batch(seen).look_ns, (20 - 1 - 5) * kMillisecond - 5 * kMillisecond * 3 / 2);
  seen.now_ns = 13 * kMillisecond / 2 - 1;
  EXPECT_EQ(next_batch(seen).take, 0U);
  seen.now_ns += 1;
  EXPECT_EQ(next_batch(seen).take, 1U);
}

TEST_F(BatchingTest, TheEarliestDeadlineDecidesWhereverItStands) {
  bounds_ = {9 * kMillisecond, 10 * kMillisecond, 11 * kMillisecond, 12 * kMillisecond};
  EXPECT_EQ(next_batch(view({50, 30, 40})).look_ns, (30 - 5) * kMillisecond - 11 * kMillisecond * 3 / 2);
}

TEST_F(BatchingTest, AFullBatchStarts) { EXPECT_EQ(next_batch(view(std::vector<std::int64_t>(9, 99))).take, 8U); }

TEST_F(BatchingTest, TakesWhatIsInTime) {
  EXPECT_EQ(next_batch(view({9, 9, 9, 9, 9})).take, 4U);    // 8 would take 10 ms
  EXPECT_EQ(next_batch(view({9, 9, 99, 5, 99})).take, 3U);  // with the fourth, 4 would be late
  BatchView seen = view({5, 5, 5, 5});
  EXPECT_EQ(next_batch(seen).take, 2U);
  seen.gap_ns = 5 * kMillisecond / 2 - 1;  // two each 5 ms fall behind
  EXPECT_EQ(next_batch(seen).take, 3U);
  seen.gap_ns = 2 * kMillisecond - 1;  // and so do three each 6 ms
  EXPECT_EQ(next_batch(seen).take, 4U);
}

TEST_F(BatchingTest, TakesTheSizeThatServesMostPerSecond) {
  bounds_ = {4 * kMillisecond, 5 * kMillisecond, 6 * kMillisecond, 30 * kMillisecond};
  EXPECT_EQ(next_batch(view(std::vector<std::int64_t>(7, 99))).take, 4U);
}

// Those that wait beyond it were accepted for a GPU that does not idle.
TEST_F(BatchingTest, DoesNotWaitWhileMoreWaitThanItTakes) {
  EXPECT_EQ(next_batch(view(std::vector<std::int64_t>(5, 99))).take, 4U);  // eight would serve more per second
}

TEST_F(BatchingTest, ALateRequestRunsRatherThanNever) { EXPECT_EQ(next_batch(view({1})).take, 1U); }

TEST_F(BatchingTest, StartsWhereWaitingGainsNothing) {
  EXPECT_EQ(next_batch(view({kNeverNs, kNeverNs})).take, 2U);  // nothing says how long
  BatchView seen = view({20});
  seen.gap_ns = 8 * kMillisecond - 1;
  EXPECT_EQ(next_batch(seen).take, 0U);
  seen.gap_ns += 1;  // batches of one serve the arrivals in half of the time
  EXPECT_EQ(next_batch(seen).take, 1U);
  bounds_[0] = 7 * kMillisecond;
  seen.gap_ns = 25 * kMillisecond / 2 - 1;  // the latest start of two is at 12.5 ms
  EXPECT_EQ(next_batch(seen).take, 0U);
  seen.gap_ns += 1;  // none is expected before that
  EXPECT_EQ(next_batch(seen).take, 1U);
  seen.gap_ns = kNeverNs;
  EXPECT_EQ(next_batch(seen).take, 1U);
  bounds_ = {4 * kMillisecond, 8 * kMillisecond, 16 * kMillisecond, 32 * kMillisecond};  // no size serves more a second
  EXPECT_EQ(next_batch(view({99, 99})).take, 2U);
  bounds_ = {0, 0, 0, 0};  // not known
  EXPECT_EQ(next_batch(view({99, 99, 99})).take, 3U);
}

TEST_F(BatchingTest, StartsWhereNoneHasComeForAWhile) {
  BatchView seen = view({99});
  EXPECT_EQ(next_batch(seen).look_ns, kQuietGaps * 5 * kMillisecond);
  seen.now_ns = kQuietGaps * 5 * kMillisecond;
  EXPECT_EQ(next_batch(seen).take, 1U);
}

TEST_F(BatchingTest, ALargerSizeThatGainsIsWaitedForThroughOneThatDoesNot) {
  bounds_ = {4 * kMillisecond, 8 * kMillisecond, 9 * kMillisecond, 10 * kMillisecond};
  EXPECT_EQ(next_batch(view({30})).look_ns, (30 - 2 * 5) * kMillisecond - 9 * kMillisecond * 3 / 2);
}

TEST_F(BatchingTest, EagerAndAimdTakeWhatWaitsUpToTheLimit) {
  for (const BatchPolicy policy : {BatchPolicy::kEager, BatchPolicy::kAimd}) {
    BatchView seen = view({99, 99, 99});
    seen.policy = policy;
    EXPECT_EQ(next_batch(seen).take, 3U);
    seen.most = 2;
    EXPECT_EQ(next_batch(seen).take, 2U);
  }
}

TEST_F(BatchingTest, DelayWaitsForTheFirstOfThemOrTheLatestStart) {
  BatchView seen = view({99, 99});
  seen.policy = BatchPolicy::kDelay;
  seen.delay_ns = 7 * kMillisecond;
  arrivals_ = {3 * kMillisecond, 2 * kMillisecond};
  EXPECT_EQ(next_batch(seen).look_ns, 9 * kMillisecond);
  seen.now_ns = 9 * kMillisecond;
  EXPECT_EQ(next_batch(seen).take, 2U);
  seen = view({10, 99});
  seen.policy = BatchPolicy::kDelay;
  seen.delay_ns = 7 * kMillisecond;
  EXPECT_EQ(next_batch(seen).look_ns, 5 * kMillisecond);
  seen = view(std::vector<std::int64_t>(8, 99));
  seen.policy = BatchPolicy::kDelay;
  seen.delay_ns = 7 * kMillisecond;
  EXPECT_EQ(next_batch(seen).take, 8U);
}

TEST_F(BatchingTest, ARequestIsPredictedToEndWithItsBatch) {
  EXPECT_EQ(admit_request(view({}), 0, 99 * kMillisecond, 0).end_ns, 4 * kMillisecond);
  EXPECT_EQ(admit_request(view({99, 99}), 2, 99 * kMillisecond, 2).end_ns, 6 * kMillisecond);
  // Eight others are served first.
  EXPECT_EQ(admit_request(view(std::vector<std::int64_t>(8, 99)), 8, 99 * kMillisecond, 8).end_ns,
            (10 + 4) * kMillisecond);
  BatchView busy = view({});
  busy.now_ns = 30 * kMillisecond;
  EXPECT_EQ(admit_request(busy, 0, 99 * kMillisecond, 0).end_ns, 34 * kMillisecond);
}

TEST_F(BatchingTest, ARequestDisplacesNoneOfThoseThatAreProtected) {
  const auto displaces = [&](std::int64_t end_ms, std::size_t protected_count) {
    return admit_request(view({end_ms}), 0, 4 * kMillisecond, protected_count).displaces;
  };
  EXPECT_TRUE(displaces(7, 1));   // alone it would end at 4, behind the other at 8
  EXPECT_FALSE(displaces(7, 0));  // of a lower level
  EXPECT_FALSE(displaces(8, 1));
  EXPECT_FALSE(displaces(3, 1));  // late without it, too
}

TEST(Aimd, GrowsByOneAndShrinksByATenth) {
  EXPECT_EQ(aimd_limit(4, true, true, 16), 5);
  EXPECT_EQ(aimd_limit(4, false, true, 16), 4);
  EXPECT_DOUBLE_EQ(aimd_limit(10, true, false, 16), 9);
  EXPECT_EQ(aimd_limit(16, true, true, 16), 16);
  EXPECT_EQ(aimd_limit(1, true, false, 16), 1);
}

// A GPU whose batches take their bounds, and requests of one level, served by deadline. Whatever comes: each request
// that was accepted is served once and in time, and a batch that starts where the GPU was free starts by its latest
// start.
TEST(Batching, AcceptedRequestsAreInTime) {
  std::mt19937_64 random(43);
  const auto up_to = [&](std::int64_t most) { return static_cast<std::int64_t>(random() % (most + 1)); };
  std::size_t accepted = 0;
  std::size_t refused = 0;
  for (int round = 0; round < 3'000; ++round) {
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> bounds;
    for (std::int64_t size = 1 + up_to(1), bound = 10 + up_to(90); size <= 16; size += 1 + up_to(size)) {
      sizes.push_back(size);
      bounds.push_back(bound);
      bound += up_to(100);
    }
    BatchView seen;
    seen.policy = kPolicies[random() % std::size(kPolicies)];
    seen.sizes = sizes;
    seen.bounds_ns = bounds;
    seen.most = static_cast<std::size_t>(sizes.back());
    seen.margin_ns = up_to(20);
    seen.delay_ns = up_to(200);
    seen.gap_ns = up_to(100);
    const std::int64_t load = 1 + up_to(100);
    std::vector<std::int64_t> deadlines;
    std::vector<std::int64_t> arrivals;
    std::int64_t free_ns = 0;
    std::int64_t ready_ns = 0;  // since when the GPU is free and the last of them waits
    std::int64_t arrival_ns = 0;
    for (int left = 60; left > 0 || !deadlines.empty();) {
      // The next decision: an arrival, or a look.
      std::int64_t look_ns = kNeverNs;
      if (!deadlines.empty()) {
        seen.now_ns = std::max(free_ns, ready_ns);
        seen.deadlines_ns = deadlines;
        seen.arrivals_ns = arrivals;
        BatchDecision decision = next_batch(seen);
        if (decision.take == 0) {
          ASSERT_GT(decision.look_ns, seen.now_ns);
          ASSERT_NE(decision.look_ns, kNeverNs);
          seen.now_ns = decision.look_ns;
          decision = next_batch(seen);
          ASSERT_GT(decision.take, 0U);
        }
        look_ns = seen.now_ns;
        if (left == 0 || look_ns <= arrival_ns) {
          const std::size_t take = decision.take;
          ASSERT_LE(take, std::min(deadlines.size(), seen.most));
          const auto size = std::lower_bound(sizes.begin(), sizes.end(), static_cast<std::int64_t>(take));
          const std::int64_t bound = bounds[static_cast<std::size_t>(size - sizes.begin())];
          ASSERT_LE(look_ns + bound, deadlines.front());
          if (look_ns > std::max(free_ns, ready_ns)) {
            ASSERT_LE(look_ns + bound + seen.margin_ns, deadlines.front());
          }
          free_ns = look_ns + bound;
          accepted += take;
          deadlines.erase(deadlines.begin(), deadlines.begin() + static_cast<std::ptrdiff_t>(take));
          arrivals.erase(arrivals.begin(), arrivals.begin() + static_cast<std::ptrdiff_t>(take));
          continue;
        }
      }
      const std::int64_t deadline = arrival_ns + 10 + up_to(400);
      const auto place = std::upper_bound(deadlines.begin(), deadlines.end(), deadline) - deadlines.begin();
      seen.now_ns = std::max(free_ns, arrival_ns);
      seen.deadlines_ns = deadlines;
      const RequestAdmission admission =
          admit_request(seen, static_cast<std::size_t>(place), deadline, deadlines.size());
      if (admission.end_ns <= deadline && !admission.displaces) {
        deadlines.insert(deadlines.begin() + place, deadline);
        arrivals.insert(arrivals.begin() + place, arrival_ns);
        ready_ns = arrival_ns;
      } else {
        ++refused;
      }
      arrival_ns += up_to(load);
      --left;
    }
  }
  EXPECT_GT(accepted, 50'000U);
  EXPECT_GT(refused, 20'000U);
}

}  // namespace
}  // namespace cudasched::schedule
