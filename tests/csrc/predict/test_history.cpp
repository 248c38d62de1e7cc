#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>

#include "predict/history.hpp"

namespace cudasched::predict {
namespace {

std::int64_t estimate(const History& history, std::uint64_t key) {
  const History::Entry* entry = history.find(key);
  return entry == nullptr || entry->samples == 0 ? 0 : std::llround(std::exp(entry->log_ns));
}

class HistoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<History> history_ = std::make_unique<History>();
};

TEST_F(HistoryTest, KnowsNothingAtFirst) { EXPECT_EQ(history_->find(7), nullptr); }

TEST_F(HistoryTest, FirstSampleIsTheEstimate) {
  history_->observe(7, 50'000);
  EXPECT_NEAR(static_cast<double>(estimate(*history_, 7)), 50'000, 50);
}

TEST_F(HistoryTest, MedianOfThreeShrugsOffOneInterruption) {
  history_->observe(7, 50'000);
  history_->observe(7, 2'000'000);
  EXPECT_LT(estimate(*history_, 7), 60'000);
  history_->observe(7, 51'000);
  EXPECT_NEAR(static_cast<double>(estimate(*history_, 7)), 51'000, 100);
}

TEST_F(HistoryTest, OneLateOutlierMovesTheEstimateByATenthAtMost) {
  for (int i = 0; i < 20; ++i) history_->observe(7, 50'000);
  history_->observe(7, 50'000'000);
  EXPECT_LT(estimate(*history_, 7), 56'000);
  EXPECT_GT(estimate(*history_, 7), 50'000);
}

TEST_F(HistoryTest, ThreeOutliersOnOneSideAreAChangeOfWork) {
  for (int i = 0; i < 20; ++i) history_->observe(7, 50'000);
  for (int i = 0; i < 3; ++i) history_->observe(7, 400'000);
  EXPECT_NEAR(static_cast<double>(estimate(*history_, 7)), 400'000, 400);
}

TEST_F(HistoryTest, OutliersOnBothSidesAreNoise) {
  for (int i = 0; i < 20; ++i) history_->observe(7, 50'000);
  for (int i = 0; i < 12; ++i) history_->observe(7, i % 2 == 0 ? 500'000 : 5'000);
  EXPECT_NEAR(static_cast<double>(estimate(*history_, 7)), 50'000, 10'000);
}

TEST_F(HistoryTest, IgnoresDurationsThatCannotBe) {
  history_->observe(7, 0);
  history_->observe(7, -5);
  EXPECT_EQ(history_->find(7), nullptr);
}

TEST_F(HistoryTest, TracksASlowDrift) {
  double actual = 50'000;
  for (int i = 0; i < 200; ++i) {
    actual *= 1.005;
    history_->observe(7, std::llround(actual));
  }
  EXPECT_NEAR(static_cast<double>(estimate(*history_, 7)) / actual, 1.0, 0.05);
}

// Far more keys than places: the table never fails, and the keys in use now are the ones it knows.
TEST_F(HistoryTest, CrowdingDropsTheLeastRecentlyUsed) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10 * History::kCapacity; ++i) history_->observe(random() | 1, 1'000);
  std::vector<std::uint64_t> working(100);
  for (auto& key : working) key = random() | 1;
  for (int round = 0; round < 3; ++round) {
    for (const std::uint64_t key : working) history_->observe(key, 70'000);
  }
  int known = 0;
  for (const std::uint64_t key : working) known += estimate(*history_, key) > 60'000 ? 1 : 0;
  EXPECT_GE(known, 99);
}

}  // namespace
}  // namespace cudasched::predict
