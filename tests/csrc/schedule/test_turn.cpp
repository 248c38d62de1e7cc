#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "schedule/fair.hpp"
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

constexpr std::int64_t kTurnUs = 3'000;
constexpr std::int64_t kGraceUs = TurnView::kGraceUs;

// Clients 1, 2 and 7, of which 2 owns the word, 7 is the furthest behind and both others wait.
class TurnTest : public ::testing::Test {
 protected:
  TurnView view(int self, Turn turn, std::int64_t now_us) {
    TurnView result;
    result.word = turn.pack();
    result.self = self;
    result.best_effort = bit(1) | bit(2) | bit(7);
    result.waiting = bit(1) | bit(7);
    result.owner_until_us = now_us;
    result.now_us = now_us;
    result.turn_us = kTurnUs;
    result.virtual_ns = virtual_ns_.data();
    return result;
  }

  static void expect_waits(const TurnView& view) {
    const TurnDecision decision = take_turn(view);
    EXPECT_FALSE(decision.mine || decision.swap);
  }
  static void expect_takes(const TurnView& view) {
    const TurnDecision decision = take_turn(view);
    ASSERT_TRUE(decision.mine && decision.swap);
    const Turn turn = Turn::unpack(decision.new_word);
    EXPECT_EQ(turn.owner, view.self);
    EXPECT_EQ(turn.expiry_us, view.now_us + kTurnUs);
  }
  static void expect_offers(const TurnView& view, int next) {
    const TurnDecision decision = take_turn(view);
    ASSERT_TRUE(!decision.mine && decision.swap);
    const Turn turn = Turn::unpack(decision.new_word);
    EXPECT_EQ(turn.owner, next);
    EXPECT_EQ(turn.expiry_us, view.now_us);
  }

  std::array<std::int64_t, 64> virtual_ns_ = [] {
    std::array<std::int64_t, 64> result{};
    result[1] = 900;
    result[2] = 700;
    result[7] = 500;
    return result;
  }();
};

TEST_F(TurnTest, AloneItIsAlwaysMineAndTheWordIsNotTouched) {
  TurnView alone = view(5, {9, 1'000'000}, 10'000);
  alone.best_effort = bit(5);
  const TurnDecision decision = take_turn(alone);
  EXPECT_TRUE(decision.mine);
  EXPECT_FALSE(decision.swap);
}

TEST_F(TurnTest, TheOwnerKeepsItUntilItExpiresThenOffersItToTheFurthestBehind) {
  EXPECT_TRUE(take_turn(view(2, {2, 11'000}, 10'999)).mine);
  expect_offers(view(2, {2, 11'000}, 11'000), 7);
  TurnView nobody_waits = view(2, {2, 11'000}, 11'000);
  nobody_waits.waiting = 0;
  expect_takes(nobody_waits);
  virtual_ns_[7] = 900;
  expect_takes(view(2, {2, 11'000}, 11'000));  // it is behind itself
  TurnView lazy = view(2, {2, 11'000}, 11'000);
  lazy.turn_used = false;
  expect_offers(lazy, 1);  // of equals the first slot
}

TEST_F(TurnTest, AnOfferStandsForTheGraceAndIsThenAnybodys) {
  const Turn offered{1, 11'000};
  for (const int self : {2, 7}) {
    expect_waits(view(self, offered, 11'000));
    expect_waits(view(self, offered, 11'000 + kGraceUs));
    expect_takes(view(self, offered, 11'001 + kGraceUs));
  }
  // Who was offered it takes it when it comes, though another one is further behind.
  TurnView named = view(1, offered, 11'100);
  named.offered = true;
  named.turn_used = false;
  expect_takes(named);
  named.now_us = 20'000;
  expect_takes(named);
  // It waits no more, or its heartbeat is old: there is nobody to be waited for.
  TurnView gone = view(7, offered, 11'000);
  gone.waiting = bit(7);
  gone.owner_until_us = 0;
  expect_takes(gone);
}

TEST_F(TurnTest, WhoFindsItExpiredTakesItOnlyIfItIsTheFurthestBehind) {
  const Turn expired{2, 11'000};
  expect_takes(view(7, expired, 11'001));
  expect_offers(view(1, expired, 11'001), 7);
  expect_offers(view(1, expired, 99'000), 7);  // nobody has looked before
}

TEST_F(TurnTest, AnOwnerThatIsTheFurthestBehindHasTheGraceToRenewIt) {
  virtual_ns_[2] = 100;
  const Turn expired{2, 11'000};
  expect_waits(view(7, expired, 11'001));
  TurnView late = view(7, expired, 11'001 + kGraceUs);
  late.owner_until_us = 10'900;
  expect_takes(late);
  // What it has in flight keeps the GPU busy, and it may sleep meanwhile;
  late.owner_until_us = 11'500;
  expect_waits(late);
  late.now_us = 11'501 + kGraceUs;
  expect_takes(late);
  // for a turn at most, whatever its word says.
  for (const std::int64_t until_us : {std::int64_t{1} << 60, INT64_MAX}) {
    late.owner_until_us = until_us;
    late.now_us = 11'000 + kTurnUs + kGraceUs;
    expect_waits(late);
    late.now_us += 1;
    expect_takes(late);
  }
}

TEST_F(TurnTest, AnIdleOwnersTurnIsOpenBeforeItExpires) {
  const Turn running{2, 12'000};
  TurnView seen = view(7, running, 10'000);
  expect_waits(seen);
  seen.owner_until_us = 10'000 - kIdleNs / 1'000 - 1;
  expect_takes(seen);
  seen.self = 1;
  expect_offers(seen, 7);
  seen.waiting |= bit(2);  // it waits for its own sake: it is not idle
  expect_waits(seen);
}

TEST_F(TurnTest, ATurnOfNobodyOrOfOneThatIsGoneIsOpen) {
  for (const Turn turn : {Turn{-1, 0}, Turn{-1, 11'000}, Turn{9, 11'000}, Turn{9, 9'000}}) {
    expect_takes(view(7, turn, 10'000));
    expect_offers(view(1, turn, 10'000), 7);
  }
}

// A turn may begin between a look at the clock and the look at the word.
TEST_F(TurnTest, ATurnThatIsYoungerThanTheLookRuns) {
  const Turn younger{2, 10'000 + kTurnUs + 500};
  expect_waits(view(7, younger, 10'000));
  EXPECT_TRUE(take_turn(view(2, younger, 10'000)).mine);
}

TEST_F(TurnTest, AGarbledWordIsOpen) {
  const Turn garbled{2, 999'999'999};  // an expiry further off than any turn
  expect_takes(view(7, garbled, 10'000));
  expect_offers(view(1, garbled, 10'000), 7);
  expect_offers(view(2, garbled, 10'000), 7);
  virtual_ns_[2] = 100;
  expect_offers(view(1, garbled, 10'000), 2);
}

// Clients that feed kernels of random length, look when their kernel is done or, while they wait, after a random time
// (half of them slowly, as sleepers do), pause, and vanish at the gate without a word, with the word swapped as the
// gate swaps it.
//  - At most one believes that an unexpired turn is its own.
//  - Who begins a turn is the furthest behind of all that are at work, or was offered it, or the one whose turn it was
//    did not come within the grace.
//  - While a living client waits, the GPU is idle no longer than until one looks, the grace, and another look.
TEST(Turn, TheFurthestBehindFeedsAndNobodyKeepsTheGpuIdle) {
  constexpr int kClients = 6;
  constexpr std::int64_t kLongestLookUs = 500;
  struct Client {
    std::int64_t look_us = 0;
    std::int64_t until_us = 0;  // its kernel is done
    std::uint64_t turn_word = 0;
    std::int64_t used_us = 0;
    std::int32_t priority = 0;
    bool slow = false;
    bool vanished = false;
    bool pauses = false;
  };
  std::mt19937_64 random(3);
  int began = 0;
  int late = 0;
  for (int round = 0; round < 60; ++round) {
    std::array<Client, kClients> clients;
    std::array<std::int64_t, 64> virtual_ns{};
    for (Client& client : clients) {
      client.priority = static_cast<std::int32_t>(random() % 3);
      client.slow = random() % 2 == 0;
    }
    std::uint64_t word = 0;
    std::uint64_t waiting = 0;
    std::int64_t open_us = 1'000'000;  // since when the GPU is idle, or nobody alive waits
    for (int step = 0; step < 10'000; ++step) {
      const auto next = std::min_element(clients.begin(), clients.end(), [](const Client& one, const Client& other) {
        return one.look_us < other.look_us;
      });
      Client& client = *next;
      const int self = static_cast<int>(next - clients.begin());
      const std::int64_t now = std::max<std::int64_t>(client.look_us, 1'000'000);
      if (client.vanished || client.pauses) {  // it is back
        client.vanished = client.pauses = false;
        const std::uint64_t at_work = waiting & ~bit(self);
        if (at_work != 0)
          virtual_ns[static_cast<std::size_t>(self)] = joined_ns({self, at_work, at_work, virtual_ns.data()});
      }
      TurnView view;
      view.word = word;
      view.self = self;
      view.best_effort = bit(kClients) - 1;
      view.waiting = waiting;
      view.now_us = now;
      view.turn_us = kTurnUs;
      view.virtual_ns = virtual_ns.data();
      const Turn turn = Turn::unpack(word);
      if (turn.owner >= 0) view.owner_until_us = clients[static_cast<std::size_t>(turn.owner)].until_us;
      view.offered = word != client.turn_word;
      view.turn_used = 2 * client.used_us >= kTurnUs;
      const TurnDecision decision = take_turn(view);
      if (decision.swap) word = decision.new_word;
      if (decision.swap && !decision.mine) {  // those that sleep wake up
        for (Client& other : clients) {
          if (&other != &client && !other.vanished && !other.pauses && other.until_us <= now) {
            other.look_us = std::min(other.look_us, now + static_cast<std::int64_t>(random() % 60));
          }
        }
      }
      if (!decision.mine) {
        ASSERT_LE(now - open_us, 2 * kLongestLookUs + kGraceUs) << "idle, round " << round << ", step " << step;
        waiting |= bit(self);
        client.look_us = now + 1 + static_cast<std::int64_t>(random() % (client.slow ? kLongestLookUs : 10));
        if (random() % 100 == 0) {
          client.vanished = true;
          client.look_us = now + static_cast<std::int64_t>(random() % 100'000);
        }
      } else {
        ASSERT_EQ(Turn::unpack(word).owner, self);
        ASSERT_LT(now, Turn::unpack(word).expiry_us);
        if (decision.swap) {
          ++began;
          client.turn_word = word;
          client.used_us = 0;
          const bool was_offered = turn.owner == self && view.offered;
          const bool after_grace = now - turn.expiry_us > kGraceUs;
          if (!was_offered && !after_grace) {
            for (int other = 0; other < kClients; ++other) {
              const bool behind =
                  virtual_ns[static_cast<std::size_t>(other)] < virtual_ns[static_cast<std::size_t>(self)];
              const bool wants = (waiting & bit(other)) != 0 || (other == turn.owner && view.owner_until_us >= now);
              ASSERT_FALSE(wants && behind) << "round " << round << ", step " << step;
            }
          }
          if (after_grace && !was_offered) ++late;
        }
        waiting &= ~bit(self);
        const auto kernel_us = static_cast<std::int64_t>(random() % 1'000) + 1;
        client.used_us += kernel_us;
        virtual_ns[static_cast<std::size_t>(self)] += charge_ns(kernel_us * 1'000, client.priority);
        open_us = client.until_us = client.look_us = now + kernel_us;
        if (random() % 40 == 0) {
          client.pauses = true;
          client.look_us += static_cast<std::int64_t>(random() % 20'000);
          // Its turn is its own until it is seen to be idle.
          open_us += kIdleNs / 1'000;
        }
      }
      // Nobody is there whom an idle GPU could serve.
      const bool alive = std::any_of(clients.begin(), clients.end(), [&](const Client& one) {
        return (waiting & bit(static_cast<int>(&one - clients.data()))) != 0 && !one.vanished;
      });
      if (!alive) {
        const auto coming =
            std::min_element(clients.begin(), clients.end(),
                             [](const Client& one, const Client& other) { return one.look_us < other.look_us; });
        open_us = std::max(open_us, coming->look_us);
      }
    }
  }
  EXPECT_GT(began, 10'000);
  EXPECT_GT(late, 100);  // or vanished clients were never offered a turn
}

}  // namespace
}  // namespace cudasched::schedule
