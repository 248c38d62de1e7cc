// Changes of a running client by other processes: the word that carries them, and who may die on the way.
#include <gmock/gmock.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "arbiter/control.hpp"
#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

using control::State;
using control::Word;

constexpr std::int64_t kForEverNs = std::int64_t{kHangMs} * kNsPerMs;
constexpr std::uint64_t kNumber = 0x1234'5678'9abc'def0;  // of the client's process
constexpr auto kReady = [] { return true; };

TEST(ControlWord, IsWhatItWasPackedFrom) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 10'000; ++i) {
    Word word;
    word.number = static_cast<std::uint16_t>(random());
    word.state = static_cast<State>(random() % 4);
    word.outcome = static_cast<Outcome>(random() % 10);
    word.change = {static_cast<Setting>(random() % 256), static_cast<std::int32_t>(random())};
    const Word read = Word::unpack(word.pack());
    EXPECT_EQ(read.number, word.number);
    EXPECT_EQ(read.state, word.state);
    EXPECT_EQ(read.outcome, word.outcome);
    EXPECT_EQ(read.change.setting, word.change.setting);
    EXPECT_EQ(read.change.value, word.change.value);
  }
}

TEST(ControlWord, CarriesAChangeThereAndItsOutcomeBack) {
  std::atomic<std::uint64_t> word{0};
  const auto number = control::ask(word, 0, {Setting::kPriority, -3});
  ASSERT_TRUE(number.has_value());
  EXPECT_FALSE(control::answer(word, *number).has_value());
  EXPECT_FALSE(control::ask(word, word.load(), {Setting::kPriority, 5}).has_value());  // one at a time
  int asked = 0;
  control::serve(word, [] { return false; }, [&](const Change&) { return ++asked, Outcome::kApplied; });
  EXPECT_EQ(asked, 0);
  control::serve(word, kReady, [&](const Change& change) {
    ++asked;
    EXPECT_EQ(change.setting, Setting::kPriority);
    EXPECT_EQ(change.value, -3);
    return Outcome::kApplied;
  });
  control::serve(word, kReady, [&](const Change&) { return ++asked, Outcome::kApplied; });
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(control::answer(word, *number), Outcome::kApplied);
  EXPECT_FALSE(control::withdraw(word, *number));
  EXPECT_TRUE(control::ask(word, word.load(), {Setting::kPriority, 5}).has_value());
  EXPECT_EQ(control::answer(word, *number), Outcome::kEnded);  // it speaks of another change by now
}

TEST(ControlWord, WhatWasWithdrawnIsNotMade) {
  std::atomic<std::uint64_t> word{0};
  const auto number = control::ask(word, 0, {Setting::kWeight, 2'000});
  ASSERT_TRUE(control::withdraw(word, *number));
  control::serve(word, kReady, [](const Change&) {
    ADD_FAILURE();
    return Outcome::kApplied;
  });
  EXPECT_EQ(control::answer(word, *number), Outcome::kWithdrawn);
}

TEST(ControlWord, ANewOwnerOfTheSlotHearsNothingThatTheLastOneWasAsked) {
  std::atomic<std::uint64_t> word{0};
  const std::uint64_t before = word.load();
  const auto number = control::ask(word, before, {Setting::kClass, 1});
  control::renew(word);
  control::serve(word, kReady, [](const Change&) {
    ADD_FAILURE();
    return Outcome::kApplied;
  });
  EXPECT_EQ(control::answer(word, *number), Outcome::kEnded);
  EXPECT_FALSE(control::ask(word, before, {Setting::kClass, 1}).has_value());
}

// Whatever a damaged file says, the client answers or is asked what it can refuse, and the word is free again.
TEST(ControlWord, IsFreeAgainWhateverItSays) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 10'000; ++i) {
    std::atomic<std::uint64_t> word{random()};
    control::serve(word, kReady, [](const Change&) { return Outcome::kUnknown; });
    EXPECT_TRUE(control::ask(word, word.load(), {Setting::kClass, 0}).has_value());
  }
}

// Each change that a controller is told was applied is applied once, in its order; none that was withdrawn is.
TEST(ControlWord, ManyControllersAndOneClientAgreeOnWhatWasApplied) {
  constexpr int kControllers = 4;
  constexpr int kChanges = 400;
  std::atomic<std::uint64_t> word{0};
  std::atomic<int> controllers{kControllers};
  std::vector<std::int32_t> applied;
  std::thread client([&] {
    while (controllers.load() > 0) {
      control::serve(word, kReady, [&](const Change& change) {
        applied.push_back(change.value);
        return Outcome::kApplied;
      });
      std::this_thread::yield();
    }
  });
  std::vector<std::vector<std::int32_t>> told(kControllers);
  std::vector<std::thread> threads;
  for (int controller = 0; controller < kControllers; ++controller) {
    threads.emplace_back([&, controller] {
      std::mt19937 random(static_cast<unsigned>(controller));
      for (std::int32_t i = 0; i < kChanges;) {
        const std::int32_t value = controller * kChanges + i;
        const auto number = control::ask(word, word.load(), {Setting::kWeight, value});
        if (!number) {
          std::this_thread::yield();
          continue;
        }
        ++i;
        for (unsigned looks = random() % 4; looks > 0; --looks) std::this_thread::yield();
        std::optional<Outcome> outcome = control::answer(word, *number);
        if (!outcome && random() % 2 == 0 && control::withdraw(word, *number)) continue;
        while (!outcome) {
          std::this_thread::yield();
          outcome = control::answer(word, *number);
        }
        // Another controller may have asked before this one looked; its own change is over by then, too.
        if (*outcome == Outcome::kApplied) told[static_cast<std::size_t>(controller)].push_back(value);
      }
      controllers.fetch_sub(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  client.join();
  for (const auto& values : told) {
    auto from = applied.begin();
    for (const std::int32_t value : values) {
      from = std::find(from, applied.end(), value);
      ASSERT_NE(from, applied.end()) << value;
      ++from;
    }
  }
  std::sort(applied.begin(), applied.end());
  EXPECT_EQ(std::adjacent_find(applied.begin(), applied.end()), applied.end());
}

class ControlTest : public TableTest {
 protected:
  // What a client does until the test ends it: serves changes of its weight, as the ticker does. It says its slot.
  std::unique_ptr<Process> start_client(Outcome outcome = Outcome::kApplied) const {
    return std::make_unique<Process>([this, outcome](const Link& link) {
      const auto table = open();
      const int slot = table->claim(client(Class::kBestEffort));
      table->counts(slot).set_process(kNumber);
      link.send(slot);
      while (true) {
        control::serve(table->slot(slot).control, kReady, [&](const Change& change) {
          if (outcome == Outcome::kApplied) table->set_weight(slot, static_cast<std::uint32_t>(change.value));
          return outcome;
        });
        usleep(200);
      }
    });
  }
  static Outcome set_weight(Table& table, std::int32_t value, std::int64_t timeout_ns = kForEverNs) {
    return change(table, kNumber, {Setting::kWeight, value}, timeout_ns);
  }
};

// The client has said its slot.
class RunningClient : public ControlTest {
 protected:
  const std::unique_ptr<Table> table_ = open();
  const std::unique_ptr<Process> client_ = start_client();
  const int slot_ = static_cast<int>(client_->receive());
};

TEST_F(RunningClient, AnotherProcessChangesAClient) {
  EXPECT_EQ(table_->slot(slot_).weight_milli.load(), kEvenWeightMilli);
  EXPECT_EQ(set_weight(*table_, 2'500), Outcome::kApplied);
  EXPECT_EQ(table_->slot(slot_).weight_milli.load(), 2'500U);
  Process controller([&](const Link& link) {
    const auto own = Table::open_existing(path_);
    link.send(static_cast<int>(set_weight(*own, 700)));
  });
  EXPECT_EQ(controller.receive(), static_cast<int>(Outcome::kApplied));
  EXPECT_EQ(table_->slot(slot_).weight_milli.load(), 700U);
}

// None finds its outcome overwritten by the next one's change.
TEST_F(RunningClient, EveryControllerOfManyGetsItsOwnAnswer) {
  constexpr int kControllers = 4;
  std::vector<std::unique_ptr<Process>> controllers;
  for (int i = 0; i < kControllers; ++i) {
    controllers.push_back(std::make_unique<Process>([this, i](const Link& link) {
      const auto own = Table::open_existing(path_);
      int applied = 0;
      for (std::int32_t change = 0; change < 25; ++change) {
        applied += set_weight(*own, 100 + 25 * i + change) == Outcome::kApplied ? 1 : 0;
      }
      link.send(applied);
    }));
  }
  for (const auto& controller : controllers) EXPECT_EQ(controller->receive(), 25);
}

TEST_F(ControlTest, ARefusalComesBack) {
  const auto table = open();
  const auto client = start_client(Outcome::kRegions);
  client->receive();
  EXPECT_EQ(set_weight(*table, 2'500), Outcome::kRegions);
}

TEST_F(ControlTest, WhereThereIsNoSuchClientNothingIsWritten) {
  const auto table = open();
  EXPECT_EQ(set_weight(*table, 1), Outcome::kNoClient);
  const int slot = table->claim(client(Class::kLatency));
  EXPECT_EQ(change(*table, 0, {Setting::kWeight, 1}, kForEverNs), Outcome::kNoClient);  // it has said no number yet
  table->counts(slot).set_process(kNumber + 1);
  const std::uint64_t before = table->slot(slot).control.load();
  EXPECT_EQ(set_weight(*table, 1), Outcome::kNoClient);
  EXPECT_EQ(table->slot(slot).control.load(), before);
}

TEST_F(RunningClient, AStoppedClientChangesNothingAndIsFreeAgainLater) {
  client_->stop();
  EXPECT_EQ(set_weight(*table_, 3'000, 20 * kNsPerMs), Outcome::kWithdrawn);
  client_->resume();
  EXPECT_EQ(set_weight(*table_, 4'000), Outcome::kApplied);
  EXPECT_EQ(table_->slot(slot_).weight_milli.load(), 4'000U);
}

TEST_F(RunningClient, AClientThatIsKilledMeanwhileHasEnded) {
  client_->stop();
  std::thread controller([&] { EXPECT_EQ(set_weight(*table_, 3'000), Outcome::kEnded); });
  ASSERT_TRUE(eventually([&] { return Word::unpack(table_->slot(slot_).control.load()).state == State::kAsked; }));
  client_->kill();
  controller.join();
  EXPECT_EQ(set_weight(*table_, 3'000), Outcome::kNoClient);
}

// The slot's next owner, even with the same number, is not changed by what was asked of the dead one.
TEST_F(ControlTest, WhatADeadClientWasAskedGoesWithIt) {
  const auto table = open();
  auto first = start_client();
  const auto slot = static_cast<int>(first->receive());
  first->stop();
  ASSERT_TRUE(control::ask(table->slot(slot).control, table->slot(slot).control.load(), {Setting::kWeight, 9'000}));
  first->kill();
  const auto second = start_client();
  ASSERT_EQ(second->receive(), slot);
  EXPECT_EQ(set_weight(*table, 4'000), Outcome::kApplied);
  EXPECT_EQ(table->slot(slot).weight_milli.load(), 4'000U);
}

TEST_F(RunningClient, AControllerThatIsKilledIsInNobodysWay) {
  client_->stop();
  Process controller([&](const Link&) { set_weight(*Table::open_existing(path_), 5'000); });
  ASSERT_TRUE(eventually([&] { return Word::unpack(table_->slot(slot_).control.load()).state == State::kAsked; }));
  controller.kill();
  EXPECT_EQ(set_weight(*table_, 6'000, 10 * kNsPerMs), Outcome::kBusy);
  client_->resume();
  EXPECT_EQ(set_weight(*table_, 6'000), Outcome::kApplied);
  EXPECT_EQ(table_->slot(slot_).weight_milli.load(), 6'000U);
}

// Controllers that are killed anywhere on the way leave a client that can be changed.
TEST_F(RunningClient, ControllersKilledAtAnyMomentLeaveAClientThatAnswers) {
  std::mt19937 random(3);
  for (int i = 0; i < 30; ++i) {
    Process controller([&](const Link&) {
      const auto own = Table::open_existing(path_);
      for (std::int32_t value = 100;; ++value) set_weight(*own, value % 1'000 + 100);
    });
    usleep(random() % 20'000);
    controller.kill();
    ASSERT_EQ(set_weight(*table_, 7'000), Outcome::kApplied);
  }
}

// A forked child of the client answers for nobody, though it has its memory.
TEST_F(ControlTest, AForkedChildIsNotItsParent) {
  const auto table = open();
  Process client_process([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kBestEffort));
    own->counts(slot).set_process(kNumber);
    Process child([&](const Link& up) {
      own->set_weight(slot, 9'000);
      up.send(0);
      up.receive();
    });
    child.receive();
    link.send(slot);
    link.receive();
  });
  const auto slot = static_cast<int>(client_process.receive());
  EXPECT_EQ(table->slot(slot).weight_milli.load(), kEvenWeightMilli);
  EXPECT_EQ(set_weight(*table, 5'000, 10 * kNsPerMs), Outcome::kWithdrawn);
}

// A table that was damaged, or moved, has the weight again that its client says.
TEST_F(ControlTest, AWeightIsWrittenAnewAfterDamage) {
  const auto table = open();
  const int slot = table->claim(client(Class::kBestEffort));
  table->set_weight(slot, 1'700);
  table->slot(slot).weight_milli = 0;
  table->tend(now_ns());
  EXPECT_EQ(table->slot(slot).weight_milli.load(), 1'700U);
}

}  // namespace
}  // namespace cudasched::arbiter::testing
