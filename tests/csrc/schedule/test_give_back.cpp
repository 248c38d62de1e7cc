#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "schedule/give_back.hpp"

namespace cudasched::schedule {
namespace {

TEST(GiveBack, ARequestIsOpenForItsTime) {
  EXPECT_FALSE(is_open({}, 5));
  EXPECT_TRUE(is_open({1, 10}, 9));
  EXPECT_FALSE(is_open({1, 10}, 10));
  EXPECT_FALSE(is_open({1, 10 + 2 * kLongestRequestNs}, 5)) << "of a damaged table";
}

TEST(GiveBack, OwingEndsWithAnAnswerADeathOrNothingToGive) {
  const MemoryRequest request{7, 100};
  EXPECT_TRUE(owes_answer(request, {.alive = true, .gives = true, .answered = 6}));
  EXPECT_FALSE(owes_answer(request, {.alive = true, .gives = true, .answered = 7}));
  EXPECT_FALSE(owes_answer(request, {.alive = true, .gives = true, .answered = 9})) << "a later one, which covers it";
  EXPECT_FALSE(owes_answer(request, {.alive = false, .gives = true, .answered = 0}));
  EXPECT_FALSE(owes_answer(request, {.alive = true, .gives = false, .answered = 0}));
}

TEST(GiveBack, AClientYieldsOnlyOnceItHasAnswered) {
  const MemoryRequest request{7, 100};
  EXPECT_FALSE(yields(request, {.alive = true, .gives = true, .answered = 6}, 50))
      << "it may hold the lock that emptying its cache takes";
  EXPECT_TRUE(yields(request, {.alive = true, .gives = true, .answered = 7}, 50));
  EXPECT_TRUE(yields(request, {.alive = true, .gives = false, .answered = 0}, 50)) << "it has no cache to empty";
  EXPECT_FALSE(yields(request, {.alive = true, .gives = true, .answered = 7}, 100)) << "the request is over";
}

// Several clients ask and several give, at random, are killed at random, or never answer. A giver's cache takes a lock,
// which its own allocations hold while they yield, as those of PyTorch's allocator do.
class Model {
 public:
  explicit Model(unsigned seed) : random_(seed) {}

  struct Asker {
    MemoryRequest request;
    bool alive = true;
    std::array<bool, 4> waits_for{};
  };
  struct Giver {
    MemoryGiver client{.alive = true, .gives = true};
    bool allocates = false;  // a thread of it is at the door, and holds the allocator's lock
    bool answers = true;
  };

  void step() {
    now_ += 1 + static_cast<std::int64_t>(random_() % 3);
    Asker& asker = askers_[random_() % askers_.size()];
    Giver& giver = givers_[random_() % givers_.size()];
    switch (random_() % 8) {
      case 0:
        if (asker.alive && asker.request.number == 0) ask(asker);
        break;
      case 1:
      case 2:
        answer(giver);
        break;
      case 3:
        giver.allocates = giver.client.alive;
        break;
      case 4:
        if (random_() % 40 == 0) asker = {.request = asker.request, .alive = false, .waits_for = {}};
        break;
      case 5:
        if (random_() % 40 == 0) giver.client.alive = giver.allocates = false;
        break;
      case 6:
        if (random_() % 40 == 0) giver.answers = false;
        break;
      default:
        if (random_() % 40 == 0) giver.client.gives = !giver.client.gives;
    }
    for (Asker& each : askers_) look(each);
    for (Giver& each : givers_) {
      if (each.allocates && !yields_to_any(each)) each.allocates = false;  // it gets its memory, or an error
    }
  }

  // Nobody waits for longer than a request's own time; a request is over as soon as nobody owes it an answer.
  void check() const {
    for (const Asker& each : askers_) {
      if (!each.alive || each.request.number == 0) continue;
      ASSERT_LT(now_, each.request.until_ns);
      bool owed = false;
      for (const Giver& giver : givers_) owed = owed || owes_answer(each.request, giver.client);
      ASSERT_TRUE(owed);
    }
    for (const Giver& giver : givers_) {
      if (!giver.allocates) continue;
      // Who waits holds no lock that another's request waits for, unless that one is answered, or over soon.
      bool by_open = false;
      for (const Asker& each : askers_) by_open = by_open || yields(each.request, giver.client, now_);
      ASSERT_TRUE(by_open);
    }
  }

  // With nothing new, all is over when the last request's time is.
  void run_out() {
    now_ += kRequestNs + 1;
    for (Asker& each : askers_) look(each);
    for (Giver& each : givers_) {
      ASSERT_FALSE(yields_to_any(each));
      each.allocates = false;
    }
    for (const Asker& each : askers_) ASSERT_TRUE(!each.alive || each.request.number == 0);
  }

 private:
  static constexpr std::int64_t kRequestNs = 200;

  void ask(Asker& asker) { asker.request = {++made_, now_ + kRequestNs}; }
  // Killed askers leave their words, which their slot's reaper clears at some time.
  void look(Asker& asker) {
    if (!asker.alive) {
      if (random_() % 50 == 0) asker = {};
      return;
    }
    if (asker.request.number == 0) return;
    bool owed = false;
    for (const Giver& giver : givers_) owed = owed || owes_answer(asker.request, giver.client);
    if (!owed || now_ >= asker.request.until_ns) asker.request = {};
  }
  void answer(Giver& giver) {
    if (!giver.client.alive || !giver.answers || giver.allocates) return;  // the cache's lock is taken
    std::uint64_t number = 0;
    for (const Asker& each : askers_) number = std::max(number, answer_for(each.request, giver.client, now_));
    ASSERT_TRUE(number == 0 || number > giver.client.answered);
    if (number != 0) giver.client.answered = number;
  }
  bool yields_to_any(const Giver& giver) const {
    bool found = false;
    for (const Asker& each : askers_) found = found || yields(each.request, giver.client, now_);
    return found;
  }

  std::mt19937 random_;
  std::int64_t now_ = 1;
  std::uint64_t made_ = 0;
  std::array<Asker, 3> askers_{};
  std::array<Giver, 4> givers_{};
};

TEST(GiveBack, NobodyWaitsForEverWhoeverIsKilledOrSilent) {
  for (unsigned seed = 0; seed < 2'000; ++seed) {
    Model model(seed);
    for (int i = 0; i < 300; ++i) {
      model.step();
      model.check();
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", step " << i;
    }
    model.run_out();
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace cudasched::schedule
