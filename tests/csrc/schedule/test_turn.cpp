#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

#include "schedule/turn.hpp"

namespace cudasched::schedule {
namespace {

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

TEST(Turn, PacksAndUnpacks) {
  for (const int owner : {-1, 0, 1, 31, 63}) {
    for (const std::int64_t expiry : {std::int64_t{0}, std::int64_t{12'345'678'901}}) {
      const Turn turn = Turn::unpack(Turn{owner, expiry}.pack());
      EXPECT_EQ(turn.owner, owner);
      EXPECT_EQ(turn.expiry_us, expiry);
    }
  }
  EXPECT_EQ(Turn::unpack(~std::uint64_t{0}).owner, -1);  // no such slot: nobody's
}

TEST(Turn, AloneItIsAlwaysMineAndTheWordIsNotTouched) {
  TurnView view;
  view.self = 5;
  view.best_effort = bit(5);
  view.word = Turn{9, 1'000'000}.pack();
  const TurnDecision decision = take_turn(view);
  EXPECT_TRUE(decision.mine);
  EXPECT_FALSE(decision.swap);
}

TEST(Turn, OwnerKeepsItUntilItExpiresThenPassesItOn) {
  TurnView view;
  view.self = 2;
  view.best_effort = bit(2) | bit(7) | bit(1);
  view.waiting = bit(7) | bit(1);
  view.now_us = 10'000;
  view.word = Turn{2, 11'000}.pack();
  EXPECT_TRUE(take_turn(view).mine);
  view.now_us = 11'000;
  const TurnDecision decision = take_turn(view);
  EXPECT_FALSE(decision.mine);
  EXPECT_TRUE(decision.swap);
  EXPECT_EQ(Turn::unpack(decision.new_word).owner, 7);  // the next after 2 in ring order
  view.waiting = 0;
  EXPECT_TRUE(take_turn(view).mine);
}

TEST(Turn, AnotherMayTakeItOnlyWhenExpiredOrIdle) {
  TurnView view;
  view.self = 7;
  view.best_effort = bit(2) | bit(7);
  view.waiting = bit(7);
  view.now_us = 10'000;
  view.word = Turn{2, 11'000}.pack();
  EXPECT_FALSE(take_turn(view).mine);
  view.owner_idle = true;
  EXPECT_TRUE(take_turn(view).mine);
  view.owner_idle = false;
  view.now_us = 11'001;
  EXPECT_TRUE(take_turn(view).mine);
}

TEST(Turn, AGarbledWordIsTaken) {
  TurnView view;
  view.self = 7;
  view.best_effort = bit(2) | bit(7);
  view.waiting = bit(7);
  view.now_us = 10'000;
  view.word = Turn{2, 999'999'999}.pack();  // an expiry further off than any turn
  EXPECT_TRUE(take_turn(view).mine);
}

// Random clients that come, go, die, wait and feed, with the word swapped atomically as the gate does: at most one
// client ever believes that an unexpired turn is its own, and whoever waits gets its turn within a bounded time.
TEST(Turn, AtMostOneFeedsAndNobodyStarves) {
  constexpr int kClients = 6;
  constexpr std::int64_t kTurnUs = 3'000;
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    std::uint64_t word = 0;
    std::uint64_t best_effort = 0;
    std::uint64_t waiting = 0;
    std::array<std::int64_t, kClients> waiting_since{};
    std::array<bool, kClients> stopped{};
    std::int64_t now = 1'000'000;
    for (int step = 0; step < 20'000; ++step) {
      now += static_cast<std::int64_t>(random() % 40);
      const int self = static_cast<int>(random() % kClients);
      const auto index = static_cast<std::size_t>(self);
      if (random() % 2'000 == 0) stopped[index] = !stopped[index];  // dies or comes back; its bits stay until reaped
      if (stopped[index]) {
        if (random() % 50 == 0) {
          best_effort &= ~bit(self);
          waiting &= ~bit(self);
        }
        continue;
      }
      if ((best_effort & bit(self)) == 0 || (waiting & bit(self)) == 0) waiting_since[index] = now;
      best_effort |= bit(self);
      TurnView view{word, self, best_effort, waiting, false, now, kTurnUs};
      const TurnDecision decision = take_turn(view);
      if (decision.swap) word = decision.new_word;
      if (decision.mine) {
        if (best_effort != bit(self)) {
          const Turn turn = Turn::unpack(word);
          ASSERT_EQ(turn.owner, self);
          ASSERT_LT(now, turn.expiry_us);
        }
        waiting &= ~bit(self);
        waiting_since[index] = now;
      } else {
        waiting |= bit(self);
        // A full round of the others, each with a turn and the grace for one that does not take it.
        ASSERT_LT(now - waiting_since[index], 3 * kClients * kTurnUs) << "client " << self << " starves";
      }
    }
  }
}

}  // namespace
}  // namespace cudasched::schedule
