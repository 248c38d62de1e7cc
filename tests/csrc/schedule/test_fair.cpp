#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
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

TEST(Fair, AWeightMultipliesTheShareAndNothingOverflows) {
  EXPECT_EQ(charge_ns(1'000, 0, 2'000), 500);
  EXPECT_EQ(charge_ns(1'000, 0, 250), 4'000);
  EXPECT_EQ(charge_ns(1'000, 1, 500), 1'000);
  EXPECT_EQ(charge_ns(1'000'003, 0, 3'000), 333'334);
  EXPECT_EQ(charge_ns(1, 8, kMostWeightMilli), 1);
  // Of a damaged slot.
  EXPECT_EQ(charge_ns(1'000, 0, 0), charge_ns(1'000, 0, kLeastWeightMilli));
  EXPECT_EQ(charge_ns(1'000'000, 0, ~0U), charge_ns(1'000'000, 0, kMostWeightMilli));
  for (const std::uint32_t weight : {0U, 1U, 999U, 1'000U, 1'001U, 100'000U, ~0U}) {
    EXPECT_GT(charge_ns(std::numeric_limits<std::int64_t>::max(), -8, weight), 0);
  }
}

TEST(Fair, AClientIsIdleAWhileAfterItsWorkIsDone) {
  EXPECT_FALSE(is_idle(1'000'000, 900'000));
  EXPECT_FALSE(is_idle(1'000'000, 1'000'000 + kIdleNs));
  EXPECT_TRUE(is_idle(1'000'000, 1'000'001 + kIdleNs));
}

TEST(Fair, WhoComesBackIsOwedNothingForItsIdleTime) {
  std::array<std::int64_t, kSlots> virtual_ns{};
  virtual_ns[3] = 500;
  virtual_ns[7] = 900;
  const auto joined = [&](std::int64_t own_ns, std::uint64_t others, std::uint64_t at_work) {
    virtual_ns[5] = own_ns;
    return joined_ns({5, others, at_work, virtual_ns.data()});
  };
  EXPECT_EQ(joined(100, bit(3) | bit(7), bit(3) | bit(7)), 500);
  EXPECT_EQ(joined(700, bit(3) | bit(7), bit(3) | bit(7)), 700);
  EXPECT_EQ(joined(100, bit(3) | bit(7), bit(7)), 900);
  EXPECT_EQ(joined(100, 0, 0), 100);
  // Nobody is at work: what the others had while they were alone is not held against them.
  EXPECT_EQ(joined(100, bit(3) | bit(7), 0), 900);
  EXPECT_EQ(joined(2'000, bit(3) | bit(7), 0), 2'000);
}

// Clients of random priorities begin, work for a while and pause, by the rule alone: of those at work, the one that is
// furthest behind goes next. None loses time, none joins ahead of all who are at work but for what it had before, and
// over any time that two are at work together their virtual times grow alike, whatever each had had alone.
TEST(Fair, WhatAClientHadBeforeItCameBackIsNeitherOwedNorHeldAgainstIt) {
  constexpr std::int64_t kLongestNs = 500'000;
  std::mt19937_64 random(7);
  std::array<std::int64_t, kSlots> virtual_ns{};
  std::uint64_t begun = 0;
  std::uint64_t at_work = 0;
  std::array<std::int64_t, kClients> waited{};  // launches of others since its last one
  for (int step = 0; step < 200'000; ++step) {
    const int self = static_cast<int>(random() % kClients);
    const auto index = static_cast<std::size_t>(self);
    if ((at_work & bit(self)) != 0) {
      if (random() % 200 == 0) at_work &= ~bit(self);
    } else if (random() % 100 == 0) {
      const std::int64_t before_ns = virtual_ns[index];
      const JoinView view{self, begun & ~bit(self), at_work, virtual_ns.data()};
      virtual_ns[index] = joined_ns(view);
      ASSERT_GE(virtual_ns[index], before_ns);
      // Its own, or one of the others': no time comes from nowhere.
      const bool known = virtual_ns[index] == before_ns ||
                         std::count(virtual_ns.begin(), virtual_ns.begin() + kClients, virtual_ns[index]) > 1;
      ASSERT_TRUE(known);
      begun |= bit(self);
      at_work |= bit(self);
      waited[index] = 0;
    }
    int next = -1;
    for (int client = 0; client < kClients; ++client) {
      if ((at_work & bit(client)) == 0) continue;
      const auto ns = [&](int one) { return virtual_ns[static_cast<std::size_t>(one)]; };
      if (next < 0 || ns(client) < ns(next)) next = client;
    }
    if (next < 0) continue;
    const auto launch_ns = static_cast<std::int64_t>(random() % kLongestNs) + kLongestNs / 2;
    virtual_ns[static_cast<std::size_t>(next)] += charge_ns(launch_ns, 0);
    for (int client = 0; client < kClients; ++client) {
      const auto other = static_cast<std::size_t>(client);
      waited[other] = client == next || (at_work & bit(client)) == 0 ? 0 : waited[other] + 1;
      // Each of the others catches up by no more than it was behind when this one joined: a few launches.
      ASSERT_LE(waited[other], 8 * kClients) << "client " << client << " is held back, step " << step;
    }
  }
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

// Without MPS: clients that always want to launch and take turns by the word, as the gate does, whoever looks first.
// Virtual times stay within one turn and a launch: nobody begins a turn while another one is further behind.
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
    std::array<std::uint64_t, kClients> turn_word{};
    std::array<int, kClients> order{};
    std::iota(order.begin(), order.end(), 0);
    int fed = -1;  // last: it does not wait
    std::int64_t now_ns = 1'000'000'000;
    for (int step = 0; step < 40'000; ++step) {
      int feeds = -1;
      std::shuffle(order.begin(), order.end(), random);
      for (const int self : order) {
        TurnView view;
        view.word = word;
        view.self = self;
        view.best_effort = bit(kClients) - 1;
        view.waiting = fed < 0 ? view.best_effort : view.best_effort & ~bit(fed);
        view.owner_until_us = view.now_us = now_ns / 1'000;
        view.turn_us = kTurnUs;
        view.offered = word != turn_word[static_cast<std::size_t>(self)];
        view.virtual_ns = virtual_ns.data();
        const TurnDecision decision = take_turn(view);
        if (decision.swap) word = decision.new_word;
        if (!decision.mine) continue;
        ASSERT_EQ(feeds, -1);
        feeds = self;
        turn_word[static_cast<std::size_t>(self)] = word;
        // The owner passes a turn on only after it has asked once more, so the word is its own.
        ASSERT_EQ(Turn::unpack(word).owner, self);
      }
      if (feeds < 0) {
        now_ns += 1'000;
        continue;
      }
      fed = feeds;
      const auto index = static_cast<std::size_t>(feeds);
      const auto launch_ns = static_cast<std::int64_t>(random() % kLongestNs) + 1'000;
      gpu_ns[index] += launch_ns;
      now_ns += launch_ns;
      virtual_ns[index] += charge_ns(launch_ns, priority[index]);
      const auto [least, most] = std::minmax_element(virtual_ns.begin(), virtual_ns.begin() + kClients);
      ASSERT_LE(*most - *least, kTurnUs * 1'000 + kLongestNs + 1'000);
    }
    for (std::size_t i = 1; i < kClients; ++i) {
      const double expected = std::exp2(priority[i] - priority[0]);
      ASSERT_NEAR(static_cast<double>(gpu_ns[i]) / static_cast<double>(gpu_ns[0]) / expected, 1.0, 0.06);
    }
  }
}

}  // namespace
}  // namespace cudasched::schedule
