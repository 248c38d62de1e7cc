#include <gtest/gtest.h>

#include <memory>

#include "predict/sampling.hpp"

namespace cudasched::predict {
namespace {

class SamplingTest : public ::testing::Test {
 protected:
  int wanted(int launches) {
    int count = 0;
    for (int i = 0; i < launches; ++i) count += sampling_.wants(entry_, *bound_, false) ? 1 : 0;
    return count;
  }

  std::unique_ptr<Bound> bound_ = std::make_unique<Bound>();
  CacheEntry entry_;
  Sampling sampling_;
};

TEST_F(SamplingTest, TheFirstLaunchesOfAKeyAreAllWanted) {
  for (; entry_.launches < Sampling::kFirst; ++entry_.launches) EXPECT_EQ(wanted(100), 100);
}

TEST_F(SamplingTest, LaterOnesAreDrawnMoreOftenWhileTheBoundIsYoung) {
  entry_.launches = Sampling::kFirst;
  const int early = wanted(2'000);
  EXPECT_NEAR(early, 2'000 / static_cast<int>(Sampling::kEarlyPeriod), 60);
  const std::uint8_t bin = Bound::bin_of(entry_.estimate_log);
  for (std::size_t i = 0; i < Bound::kEnough; ++i) bound_->add(Knowledge::kKnown, false, bin, 1, 0, false);
  EXPECT_NEAR(wanted(16'000), 16'000 / static_cast<int>(Sampling::kPeriod), 100);
}

// Where nothing can be measured.
TEST_F(SamplingTest, WhatIsNeverAnsweredIsNotAskedForEver) {
  entry_.launches = Sampling::kFirst;
  wanted(100'000);
  EXPECT_NEAR(wanted(16'000), 16'000 / static_cast<int>(Sampling::kPeriod), 100);
}

TEST_F(SamplingTest, ASharedKeyInDoubtIsTimedUntilThatIsSettled) {
  entry_.launches = Sampling::kFirst;
  wanted(100'000);  // of the young bound no more is to be had
  entry_.doubts = 2;
  EXPECT_EQ(wanted(Sampling::kMostUnanswered), static_cast<int>(Sampling::kMostUnanswered));
  EXPECT_LT(wanted(64), 32) << "no answer came";
  sampling_.answered();
  EXPECT_TRUE(sampling_.wants(entry_, *bound_, false));
  entry_.is_split = true;
  EXPECT_LT(wanted(64), 32);
}

}  // namespace
}  // namespace cudasched::predict
