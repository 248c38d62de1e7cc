// How long time slices are to be.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "schedule/slice_length.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

class SliceLengthTest : public ::testing::Test {
 protected:
  // `seconds` go by, in looks of 10 ms; something of ours is complete at each, unless the test says otherwise.
  std::uint32_t pass(double seconds) {
    std::uint32_t us = 0;
    for (int i = 0; i < static_cast<int>(100 * seconds); ++i) {
      now_ += kSecond / 100;
      if (progresses_) ++completions_;
      us = length_.look({now_, others_, completions_, in_flight_, latency_active_});
    }
    return us;
  }

  SliceLength length_;
  std::int64_t now_ = kSecond;
  int others_ = 0;
  std::uint64_t completions_ = 0;
  bool progresses_ = true;
  bool in_flight_ = true;
  bool latency_active_ = false;
};

TEST_F(SliceLengthTest, IsTheShortestFromTheFirstLookOn) {
  EXPECT_EQ(pass(0.01), SliceLength::kShortestUs);
  EXPECT_EQ(pass(30), SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, SeveralBestEffortProcessesDoNotChangeAllTheTime) {
  pass(3);
  others_ = 1;
  EXPECT_EQ(pass(2), SliceLength::kSharedUs);
  others_ = 0;
  EXPECT_EQ(pass(2), SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, TheFirstChangeComesAtOnceAndTheNextASecondLater) {
  pass(0.1);
  others_ = 1;
  EXPECT_EQ(pass(0.01), SliceLength::kSharedUs);
  others_ = 0;
  EXPECT_EQ(pass(0.9), SliceLength::kSharedUs);
  EXPECT_EQ(pass(0.2), SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, BestEffortThatGetsNothingDoneHasLongerSlicesForAWhileAndThenForLonger) {
  pass(1);
  progresses_ = false;
  EXPECT_EQ(pass(0.45), SliceLength::kShortestUs);
  EXPECT_EQ(pass(0.6), SliceLength::kStarvingUs);
  progresses_ = true;
  EXPECT_EQ(pass(9), SliceLength::kStarvingUs);
  EXPECT_EQ(pass(2), SliceLength::kShortestUs);  // tried again
  progresses_ = false;
  EXPECT_EQ(pass(1), SliceLength::kStarvingUs);
  progresses_ = true;
  EXPECT_EQ(pass(18), SliceLength::kStarvingUs);
  EXPECT_EQ(pass(3), SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, ALengthThatIsSetHoldsButBesideOtherBestEffortOrWhileItStarves) {
  for (const std::uint32_t set_us : {1U, 300U, 5'000U}) {
    length_ = SliceLength(set_us);
    const std::uint32_t relieved_us = std::max(set_us, SliceLength::kStarvingUs);
    EXPECT_EQ(pass(3), set_us);
    others_ = 1;
    EXPECT_EQ(pass(2), relieved_us);
    others_ = 0;
    EXPECT_EQ(pass(2), set_us);
    progresses_ = false;
    EXPECT_EQ(pass(2), relieved_us);
    progresses_ = true;
    EXPECT_EQ(pass(12), set_us);
  }
}

TEST_F(SliceLengthTest, WhatWaitsForLatencyWorkDoesNotStarve) {
  progresses_ = false;
  latency_active_ = true;
  EXPECT_EQ(pass(10), SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, WhatHasNothingOnTheGpuDoesNotStarve) {
  progresses_ = false;
  in_flight_ = false;
  EXPECT_EQ(pass(10), SliceLength::kShortestUs);
}

// Whatever it sees: one of the known lengths, and no two changes within a second. The first choice is none.
TEST_F(SliceLengthTest, ChangesAreASecondApart) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    SliceLength length;
    std::int64_t now = kSecond;
    std::int64_t changed = 0;
    std::uint32_t last = 0;
    for (int step = 0; step < 2'000; ++step) {
      now += static_cast<std::int64_t>(random() % 40'000'000) - (random() % 50 == 0 ? 10'000'000 : 0);
      const std::uint32_t us =
          length.look({now, static_cast<int>(random() % 3), random() % 4, random() % 2 == 0, random() % 2 == 0});
      ASSERT_TRUE(us == SliceLength::kShortestUs || us == SliceLength::kSharedUs || us == SliceLength::kStarvingUs);
      if (us == last) continue;
      if (changed != 0) {
        ASSERT_GE(now - changed, SliceLength::kLeastChangeNs);
      }
      if (last != 0) changed = now;
      last = us;
    }
  }
}

}  // namespace
}  // namespace cudasched::schedule
