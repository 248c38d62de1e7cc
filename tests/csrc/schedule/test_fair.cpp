#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "schedule/fair.hpp"
#include "schedule/turn.hpp"

namespace cudasched::schedule {
namespace {

constexpr int kSlots = 64;
constexpr int kClients = 5;

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

TEST(Fair, APriorityStepDoublesTheShareAndNothingOverflows) {
  EXPECT_EQ(charge_ns(1'000, 0), 1'000);
  EXPECT_EQ(charge_ns(1'000, 1), 500);
  EXPECT_EQ(charge_ns(1'000, -1), 2'000);
  EXPECT_EQ(charge_ns(1'000, 100), charge_ns(1'000, kLargestPriority));
  EXPECT_EQ(charge_ns(0, 3), 1);
  EXPECT_EQ(charge_ns(-7, 0), 1);
  for (const std::int32_t priority : {-100, -8, 0, 8, std::numeric_limits<std::int32_t>::min()}) {
    EXPECT_GT(charge_ns(std::numeric_limits<std::int64_t>::max(), priority), 0);
  }
}

TEST(Fair, WhoComesBackIsOwedNothingForItsIdleTime) {
  std::array<std::int64_t, kSlots> virtual_ns{};
  virtual_ns[3] = 500;
  virtual_ns[7] = 900;
  EXPECT_EQ(joined_ns(100, bit(3) | bit(7), virtual_ns.data()), 500);
  EXPECT_EQ(joined_ns(700, bit(3) | bit(7), virtual_ns.data()), 700);
  EXPECT_EQ(joined_ns(100, 0, virtual_ns.data()), 100);
}

TEST(Fair, OneThatWaitsAndNeverGoesHoldsTheOthersForABoundedTime) {
  std::array<std::int64_t, kSlots> virtual_ns{};
  virtual_ns[1] = 1'000'000'000;
  FairView view;
  view.self = 1;
  view.waiting = bit(0) | bit(1);
  view.virtual_ns = virtual_ns.data();
  EXPECT_FALSE(may_feed(view));
  view.waited_ns = view.max_wait_ns;
  EXPECT_TRUE(may_feed(view));
}

// Under MPS: clients that always wait, whose launches of random length go as may_feed allows. Someone may always go,
// and no client is ever ahead of another by more than the quantum and one launch.
TEST(Fair, SharesUnderMpsFollowPriorities) {
  constexpr std::int64_t kLongestNs = 1'500'000;
  std::mt19937_64 random(5);
  for (int round = 0; round < 40; ++round) {
    std::array<std::int64_t, kSlots> virtual_ns{};
    std::array<std::int64_t, kClients> gpu_ns{};
    std::array<std::int32_t, kClients> priority{};
    for (auto& value : priority) value = static_cast<std::int32_t>(random() % 4);
    for (int step = 0; step < 20'000; ++step) {
      const int first = static_cast<int>(random() % kClients);
      int chosen = -1;
      for (int i = 0; i < kClients && chosen < 0; ++i) {
        FairView view;
        view.self = (first + i) % kClients;
        view.waiting = bit(kClients) - 1;
        view.virtual_ns = virtual_ns.data();
        if (may_feed(view)) chosen = view.self;
      }
      ASSERT_GE(chosen, 0);
      const auto index = static_cast<std::size_t>(chosen);
      const auto launch_ns = static_cast<std::int64_t>(random() % kLongestNs);
      gpu_ns[index] += launch_ns;
      virtual_ns[index] += charge_ns(launch_ns, priority[index]);
      const auto [least, most] = std::minmax_element(virtual_ns.begin(), virtual_ns.begin() + kClients);
      ASSERT_LE(*most - *least, FairView::kQuantumNs + kLongestNs);
    }
    // Shares as 2^priority.
    for (std::size_t i = 1; i < kClients; ++i) {
      const double expected = std::exp2(priority[i] - priority[0]);
      ASSERT_NEAR(static_cast<double>(gpu_ns[i]) / static_cast<double>(gpu_ns[0]) / expected, 1.0, 0.06);
    }
  }
}

// Without MPS: clients that always wait and take turns by the word, as the gate does. Virtual times stay within a turn
// and a launch of the slowest, and nobody waits longer than it takes the others to catch up.
TEST(Fair, TurnsFollowPriorities) {
  constexpr std::int64_t kTurnUs = 3'000;
  constexpr std::int64_t kLongestNs = 600'000;
  std::mt19937_64 random(6);
  for (int round = 0; round < 40; ++round) {
    std::array<std::int64_t, kSlots> virtual_ns{};
    std::array<std::int64_t, kClients> gpu_ns{};
    std::array<std::int32_t, kClients> priority{};
    for (auto& value : priority) value = static_cast<std::int32_t>(random() % 3);
    std::uint64_t word = 0;
    std::int64_t now_ns = 1'000'000'000;
    for (int step = 0; step < 40'000; ++step) {
      int feeds = -1;
      for (int self = 0; self < kClients; ++self) {
        TurnView view;
        view.word = word;
        view.self = self;
        view.best_effort = view.waiting = bit(kClients) - 1;
        view.now_us = now_ns / 1'000;
        view.turn_us = kTurnUs;
        view.virtual_ns = virtual_ns.data();
        const TurnDecision decision = take_turn(view);
        if (decision.swap) word = decision.new_word;
        if (!decision.mine) continue;
        ASSERT_EQ(feeds, -1);
        feeds = self;
        // The owner passes a turn on only after it has asked once more, so the word is its own.
        ASSERT_EQ(Turn::unpack(word).owner, self);
      }
      if (feeds < 0) {
        now_ns += 1'000;
        continue;
      }
      const auto index = static_cast<std::size_t>(feeds);
      const auto launch_ns = static_cast<std::int64_t>(random() % kLongestNs) + 1'000;
      gpu_ns[index] += launch_ns;
      now_ns += launch_ns;
      virtual_ns[index] += charge_ns(launch_ns, priority[index]);
      const auto [least, most] = std::minmax_element(virtual_ns.begin(), virtual_ns.begin() + kClients);
      ASSERT_LE(*most - *least, 2 * (kTurnUs * 1'000 + kLongestNs));
    }
    for (std::size_t i = 1; i < kClients; ++i) {
      const double expected = std::exp2(priority[i] - priority[0]);
      ASSERT_NEAR(static_cast<double>(gpu_ns[i]) / static_cast<double>(gpu_ns[0]) / expected, 1.0, 0.06);
    }
  }
}

// An owner that hardly feeds is always behind; it passes its turn on all the same.
TEST(Fair, AnOwnerThatDoesNotUseItsTurnDoesNotKeepIt) {
  std::array<std::int64_t, kSlots> virtual_ns{};
  virtual_ns[4] = 1'000'000;
  TurnView view;
  view.self = 2;
  view.best_effort = view.waiting = bit(2) | bit(4);
  view.virtual_ns = virtual_ns.data();
  view.now_us = 10'000;
  view.word = Turn{2, 10'000}.pack();
  EXPECT_TRUE(take_turn(view).mine);
  view.turn_used = false;
  const TurnDecision decision = take_turn(view);
  EXPECT_FALSE(decision.mine);
  EXPECT_EQ(Turn::unpack(decision.new_word).owner, 4);
}

}  // namespace
}  // namespace cudasched::schedule
