// How long time slices are to be, and when the gate is needed beside them.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "schedule/slice_length.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

class SliceLengthTest : public ::testing::Test {
 protected:
  // `seconds` go by, in looks of 10 ms; something of ours is complete at each, unless the test says otherwise.
  SliceLength::Choice pass(double seconds) {
    SliceLength::Choice choice;
    for (int i = 0; i < static_cast<int>(100 * seconds); ++i) {
      now_ += kSecond / 100;
      if (progresses_) ++completions_;
      for (Server& server : servers_) {
        requests_ += rate_ / 100;
        server.requests = static_cast<std::uint64_t>(requests_);
        server.launches = static_cast<std::uint64_t>(requests_ * launches_);
      }
      choice = length_.look({now_, others_, completions_, in_flight_, latency_active_, servers_});
    }
    return choice;
  }

  SliceLength length_;
  std::int64_t now_ = kSecond;
  int others_ = 0;
  std::uint64_t completions_ = 0;
  bool progresses_ = true;
  bool in_flight_ = true;
  bool latency_active_ = false;
  std::vector<Server> servers_;
  double requests_ = 0;
  double rate_ = 60;
  double launches_ = 1;
};

TEST_F(SliceLengthTest, IsTheShortestAloneAndBesideRequestsThatKeepTheGpuBusy) {
  EXPECT_EQ(pass(0.01).us, SliceLength::kShortestUs);
  EXPECT_EQ(pass(30).us, SliceLength::kShortestUs);
  servers_ = {{.slot = 3, .launches = 0, .requests = 0, .request_ns = 5'000'000, .hints = false}};
  const SliceLength::Choice beside = pass(30);
  EXPECT_EQ(beside.us, SliceLength::kShortestUs);
  EXPECT_FALSE(beside.gate);
}

TEST_F(SliceLengthTest, HostBoundRequestsThatTakeMuchOfTheTimeNeedTheGateAndLongerSlices) {
  servers_ = {{.slot = 3, .launches = 0, .requests = 0, .request_ns = 5'000'000, .hints = false}};
  launches_ = 160;
  const SliceLength::Choice beside = pass(10);
  EXPECT_EQ(beside.us, SliceLength::kHostBoundUs);
  EXPECT_TRUE(beside.gate);
  rate_ = 5;  // 2.5% of the time
  const SliceLength::Choice rarely = pass(20);
  EXPECT_EQ(rarely.us, SliceLength::kShortestUs);
  EXPECT_FALSE(rarely.gate);
}

TEST_F(SliceLengthTest, AServerThatLeavesIsForgotten) {
  servers_ = {{.slot = 3, .launches = 0, .requests = 0, .request_ns = 5'000'000, .hints = false}};
  launches_ = 160;
  EXPECT_TRUE(pass(10).gate);
  servers_.clear();
  EXPECT_FALSE(pass(3).gate);
}

TEST_F(SliceLengthTest, HintsNeedTheGate) {
  servers_ = {{.slot = 3, .launches = 0, .requests = 0, .request_ns = 500'000, .hints = true}};
  const SliceLength::Choice hinted = pass(3);
  EXPECT_EQ(hinted.us, SliceLength::kShortestUs);
  EXPECT_TRUE(hinted.gate);
}

TEST_F(SliceLengthTest, SeveralBestEffortProcessesDoNotChangeAllTheTime) {
  pass(3);
  others_ = 1;
  EXPECT_EQ(pass(2).us, SliceLength::kSharedUs);
  others_ = 0;
  EXPECT_EQ(pass(2).us, SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, BestEffortThatGetsNothingDoneHasLongerSlicesForAWhileAndThenForLonger) {
  pass(1);
  progresses_ = false;
  EXPECT_EQ(pass(0.45).us, SliceLength::kShortestUs);
  EXPECT_EQ(pass(0.6).us, SliceLength::kStarvingUs);
  progresses_ = true;
  EXPECT_EQ(pass(9).us, SliceLength::kStarvingUs);
  EXPECT_EQ(pass(2).us, SliceLength::kShortestUs);  // tried again
  progresses_ = false;
  EXPECT_EQ(pass(1).us, SliceLength::kStarvingUs);
  progresses_ = true;
  EXPECT_EQ(pass(18).us, SliceLength::kStarvingUs);
  EXPECT_EQ(pass(3).us, SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, WhatWaitsForLatencyWorkDoesNotStarve) {
  progresses_ = false;
  latency_active_ = true;
  EXPECT_EQ(pass(10).us, SliceLength::kShortestUs);
}

TEST_F(SliceLengthTest, WhatHasNothingOnTheGpuDoesNotStarve) {
  progresses_ = false;
  in_flight_ = false;
  EXPECT_EQ(pass(10).us, SliceLength::kShortestUs);
}

// Whatever it sees: one of the known lengths, and no two changes within a second.
TEST_F(SliceLengthTest, ChangesAreASecondApart) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    SliceLength length;
    std::int64_t now = kSecond;
    std::int64_t changed = 0;
    SliceLength::Choice last;
    for (int step = 0; step < 2'000; ++step) {
      now += static_cast<std::int64_t>(random() % 40'000'000) - (random() % 50 == 0 ? 10'000'000 : 0);
      std::vector<Server> servers;
      for (std::size_t i = 0; i < random() % 4; ++i) {
        servers.push_back({random() % 80, random(), random(), static_cast<std::int64_t>(random()), random() % 9 == 0});
      }
      const SliceLength::Choice choice = length.look(
          {now, static_cast<int>(random() % 3), random() % 4, random() % 2 == 0, random() % 2 == 0, servers});
      ASSERT_TRUE(choice.us == SliceLength::kShortestUs || choice.us == SliceLength::kHostBoundUs ||
                  choice.us == SliceLength::kSharedUs || choice.us == SliceLength::kStarvingUs);
      if (step > 0 && (choice.us != last.us || choice.gate != last.gate)) {
        if (changed != 0) {
          ASSERT_GE(now - changed, SliceLength::kLeastChangeNs);
        }
        changed = now;
      }
      last = choice;
    }
  }
}

}  // namespace
}  // namespace cudasched::schedule
