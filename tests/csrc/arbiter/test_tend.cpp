// What becomes of a table that the user's programs damage, cut short, delete or replace while clients are in it.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kLater = kNsPerSecond;  // after the next look at what the name stands for, and its delays

class TendTest : public TableTest {
 protected:
  // Of a table whose name was looked at in the past.
  static Condition tend_now(Table& table) {
    static std::int64_t now = now_ns();
    now += 2 * kLater;
    const Condition found = table.tend(now);
    return found == Condition::kSound ? table.tend(now + kLater / 10) : found;
  }
  void cut(off_t bytes) const { require(truncate(path_.c_str(), bytes) == 0, "truncate"); }
  off_t size() const {
    struct stat status {};
    return stat(path_.c_str(), &status) == 0 ? status.st_size : -1;
  }
  void remove_run_directory() const { std::filesystem::remove_all(directory_); }
  // Writes into the file, whose size stays.
  void damage(std::size_t offset, const std::vector<char>& bytes) const {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(offset));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  static void expect_client(Table& table, int slot, Class client_class, const std::string& name) {
    const Layout& layout = table.layout();
    const Slot& entry = table.slot(slot);
    EXPECT_EQ(entry.occupied, 1u);
    EXPECT_EQ(entry.client_class, static_cast<std::uint32_t>(client_class));
    EXPECT_EQ(text(entry.name), name);
    EXPECT_EQ(entry.pid, getpid());
    EXPECT_EQ((layout.latency & bit(slot)) != 0, client_class == Class::kLatency);
    EXPECT_EQ((layout.best_effort & bit(slot)) != 0, client_class == Class::kBestEffort);
  }

  // A client of another process that tends its table when asked, and says which slot it has then; 0x100: it has moved.
  std::unique_ptr<Process> start_client(Class client_class, bool active = false) const {
    return std::make_unique<Process>([this, client_class, active](const Link& link) {
      const auto table = open();
      int slot = table->claim(client(client_class));
      if (active) table->set_active(slot, now_ns());
      link.send(slot);
      while (true) {
        link.receive();
        const Condition found = tend_now(*table);
        if (found == Condition::kMoved) slot = table->slot_now(slot);
        link.send(slot | (found == Condition::kMoved ? 0x100 : 0));
      }
    });
  }
};

TEST_F(TendTest, ASoundTableIsLeftAlone) {
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  const auto before = read_file();
  EXPECT_EQ(tend_now(*table), Condition::kSound);
  EXPECT_EQ(tend_now(*table), Condition::kSound);
  EXPECT_EQ(read_file(), before);
  EXPECT_EQ(table->slot_now(slot), slot);
}

TEST_F(TendTest, ATableCutShortIsExtendedAndItsClientsAreWrittenAnew) {
  const auto table = open();
  const int serve = table->claim(client(Class::kLatency, "serve"));
  const int train = table->claim(client(Class::kBestEffort, "train"));
  table->set_priority(train, 3);
  table->set_slo(serve, 5'000);
  for (const off_t bytes : {off_t{0}, off_t{100}, off_t{8192}, static_cast<off_t>(sizeof(Layout) + 5000)}) {
    cut(bytes);
    EXPECT_EQ(tend_now(*table), Condition::kRepaired) << bytes;
    EXPECT_THAT(table->why(), AllOf(HasSubstr(path_), HasSubstr("size")));
    EXPECT_EQ(tend_now(*table), Condition::kSound) << bytes;  // said once
    EXPECT_EQ(size(), static_cast<off_t>(sizeof(Layout)));
    expect_client(*table, serve, Class::kLatency, "serve");
    expect_client(*table, train, Class::kBestEffort, "train");
    EXPECT_EQ(table->slot(train).priority, 3);
    EXPECT_EQ(table->slot(serve).slo_ns, 5'000);
    EXPECT_FALSE(table->lost());
  }
  Process late([&](const Link& link) { link.send(open()->claim(client(Class::kNormal))); });
  EXPECT_EQ(late.receive(), 2);
}

TEST_F(TendTest, ASleeperExtendsATableThatWasCutShortMeanwhile) {
  const auto table = open();
  table->claim(client(Class::kBestEffort));
  const std::uint32_t seen = table->layout().wake_sequence;
  std::thread cutter([&] {
    usleep(20'000);
    cut(0);
  });
  table->sleep(seen, 100 * kNsPerMs);
  EXPECT_EQ(size(), static_cast<off_t>(sizeof(Layout)));
  cutter.join();
}

TEST_F(TendTest, WhereItCannotBeExtendedTheTableIsLostAndNothingFaults) {
  Process process([&](const Link& link) {
    const auto table = open();
    const int slot = table->claim(client(Class::kLatency));
    table->set_active(slot, now_ns());
    signal(SIGXFSZ, SIG_IGN);
    const rlimit least{4096, 4096};
    require(setrlimit(RLIMIT_FSIZE, &least) == 0, "setrlimit");
    cut(0);
    require(tend_now(*table) == Condition::kLost && table->lost(), "it is not lost");
    require(table->why_lost().find("cannot be extended") != std::string::npos, table->why_lost());
    require(table->active() == 0 && table->latency_clients() == 0, "something is in it");
    table->clear_active(slot);
    table->wake_all();
    require(!table->alive(slot) && table->reap() == 0, "it is used");
    require(arbiter_error([&] { table->claim(client(Class::kNormal)); }) == table->why_lost(), "claim");
    link.send(1);
  });
  EXPECT_EQ(process.receive(), 1);
  EXPECT_TRUE(process.finish());
}

TEST_F(TendTest, ADamagedHeaderIsWrittenAnew) {
  const auto table = open();
  table->claim(client(Class::kLatency));
  const auto whole = read_file();
  for (const std::size_t offset : {std::size_t{0}, std::size_t{8}, std::size_t{12}, std::size_t{20}}) {
    damage(offset, std::vector<char>(4, '\xff'));
    EXPECT_EQ(tend_now(*table), Condition::kRepaired) << offset;
    EXPECT_THAT(table->why(), HasSubstr("damaged"));
    EXPECT_EQ(read_file(), whole);
  }
}

TEST_F(TendTest, WhatAClientIsIsWrittenAnewAndBitsOfOtherClassesGo) {
  const auto table = open();
  const int serve = table->claim(client(Class::kLatency, "serve"));
  const int train = table->claim(client(Class::kBestEffort, "train"));
  const int plain = table->claim(client(Class::kNormal, "plain"));
  for (const char fill : {'\xff', '\0'}) {
    damage(offsetof(Layout, active), std::vector<char>(sizeof(Layout) - offsetof(Layout, active), fill));
    EXPECT_EQ(tend_now(*table), Condition::kSound);
    expect_client(*table, serve, Class::kLatency, "serve");
    expect_client(*table, train, Class::kBestEffort, "train");
    expect_client(*table, plain, Class::kNormal, "plain");
    const Layout& layout = table->layout();
    EXPECT_EQ(layout.active & (bit(train) | bit(plain)), 0u);
    EXPECT_EQ(layout.waiting & (bit(serve) | bit(plain)), 0u);
    table->reap();
    EXPECT_EQ(layout.active & ~bit(serve), 0u);
    EXPECT_EQ(layout.waiting & ~bit(train), 0u);
    EXPECT_EQ(layout.latency, bit(serve));
    EXPECT_EQ(layout.best_effort, bit(train));
    damage(offsetof(Layout, active), std::vector<char>(8, '\0'));
  }
}

TEST_F(TendTest, BitsThatALivingClientsClassDoesNotHaveAreCleared) {
  const auto table = open();
  const auto serve = start_client(Class::kLatency);
  const auto train = start_client(Class::kBestEffort);
  const std::int64_t latency = serve->receive();
  const std::int64_t best_effort = train->receive();
  Layout& layout = table->layout();
  for (auto* const word : {&layout.active, &layout.latency, &layout.best_effort, &layout.waiting}) {
    word->fetch_or(bit(latency) | bit(best_effort));
  }
  EXPECT_EQ(table->reap(), 0);
  EXPECT_EQ(layout.active, bit(latency));
  EXPECT_EQ(layout.latency, bit(latency));
  EXPECT_EQ(layout.best_effort, bit(best_effort));
  EXPECT_EQ(layout.waiting, bit(best_effort));
}

TEST_F(TendTest, TheFirstRequestOfALatencyClientThatTheTableForgotIsSeen) {
  const auto table = open();
  const int serve = table->claim(client(Class::kLatency));
  table->layout().latency = 0;
  table->set_active(serve, now_ns());
  EXPECT_EQ(table->active() & table->latency_clients(), bit(serve));
}

// ---- deleted and replaced ------------------------------------------------------------------------------------------

TEST_F(TendTest, ClientsOfADeletedDirectoryMeetInTheNewOne) {
  const auto table = open();
  const int own = table->claim(client(Class::kBestEffort, "train"));
  table->slot(own).launches = 17;
  const auto serve = start_client(Class::kLatency, /*active=*/true);
  const std::int64_t latency = serve->receive();
  const ino_t before = inode();
  remove_run_directory();
  EXPECT_EQ(serve->ask(0), latency | 0x100);
  EXPECT_EQ(table->active(), bit(latency));  // to those that are still in the old one
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  EXPECT_EQ(tend_now(*table), Condition::kSound);
  EXPECT_NE(inode(), before);
  EXPECT_EQ(table->slot_now(own), own);
  EXPECT_EQ(table->active(), bit(latency));
  EXPECT_TRUE(table->alive(static_cast<int>(latency)));
  EXPECT_EQ(table->slot(own).launches, 17u);
  expect_client(*table, own, Class::kBestEffort, "train");
  const auto late = start_client(Class::kNormal);
  EXPECT_EQ(late->receive(), 2);
  EXPECT_TRUE(table->alive(2));
  serve->kill();
  EXPECT_EQ(table->reap(), 1);
  EXPECT_EQ(table->active(), 0u);
  table->release(own);
  EXPECT_EQ(table->layout().best_effort, 0u);
}

TEST_F(TendTest, BestEffortFollowsWhenLatencyClientsHave) {
  const auto train = open();
  train->claim(client(Class::kBestEffort));
  const std::int64_t now = now_ns();
  remove_run_directory();
  EXPECT_EQ(train->tend(now), Condition::kSound);
  EXPECT_EQ(train->tend(now + 40 * kNsPerMs), Condition::kSound);
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_EQ(train->tend(now + 60 * kNsPerMs), Condition::kMoved);
  remove_run_directory();
  EXPECT_EQ(train->tend(now + 70 * kNsPerMs, /*at_once=*/true), Condition::kMoved);
  train->claim(client(Class::kLatency));
  remove_run_directory();
  EXPECT_EQ(train->tend(now + 80 * kNsPerMs), Condition::kMoved);
}

TEST_F(TendTest, AClientWhoseNumberIsTakenGetsAnotherSlot) {
  const auto table = open();
  const auto second = open();
  const int train = table->claim(client(Class::kBestEffort, "train"));
  const int serve = table->claim(client(Class::kLatency, "serve"));
  const int plain = second->claim(client(Class::kNormal, "plain"));
  table->set_active(serve, now_ns());
  remove_run_directory();
  const auto first_of_new = start_client(Class::kNormal);
  ASSERT_EQ(first_of_new->receive(), train);
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  EXPECT_EQ(tend_now(*second), Condition::kMoved);  // told, too
  EXPECT_EQ(tend_now(*second), Condition::kSound);
  EXPECT_EQ(table->slot_now(serve), serve);
  EXPECT_EQ(second->slot_now(plain), plain);
  const int now_train = table->slot_now(train);
  EXPECT_EQ(now_train, 3);
  expect_client(*table, now_train, Class::kBestEffort, "train");
  expect_client(*table, serve, Class::kLatency, "serve");
  EXPECT_EQ(table->active(), bit(serve));
  table->release(train);  // not its own any more
  EXPECT_TRUE(table->alive(train));
  EXPECT_EQ(table->slot(train).occupied, 1u);
  table->release(now_train);
  EXPECT_EQ(table->slot(now_train).occupied, 0u);
}

TEST_F(TendTest, AnotherFileUnderItsNameIsFollowedAndAMissingNameIsNot) {
  const auto table = open();
  table->claim(client(Class::kLatency));
  const std::string aside = base_ + "/aside";
  std::filesystem::rename(directory_, aside);  // all of its clients are still in it
  EXPECT_EQ(tend_now(*table), Condition::kSound);
  EXPECT_FALSE(std::filesystem::exists(directory_));
  const auto late = start_client(Class::kBestEffort);
  EXPECT_EQ(late->receive(), 0);
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  EXPECT_EQ(table->slot_now(0), 1);
  EXPECT_EQ(table->layout().best_effort, bit(0));
}

TEST_F(TendTest, ADirectoryOfSomeoneElseIsNotUsedAndThatIsSaidOnce) {
  if (geteuid() != 0) GTEST_SKIP() << "needs the right to give a directory away";
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  remove_run_directory();
  ASSERT_EQ(mkdir(directory_.c_str(), 0700), 0);
  ASSERT_EQ(chown(directory_.c_str(), 12345, 12345), 0);
  EXPECT_EQ(tend_now(*table), Condition::kStranded);
  EXPECT_THAT(table->why(), HasSubstr("belongs to user 12345"));
  EXPECT_EQ(tend_now(*table), Condition::kSound);
  table->set_active(slot, now_ns());  // what shares the old file is still protected
  EXPECT_EQ(table->active(), bit(slot));
  EXPECT_FALSE(std::filesystem::exists(path_));
  ASSERT_EQ(rmdir(directory_.c_str()), 0);
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  EXPECT_EQ(table->active(), bit(slot));
}

TEST_F(TendTest, ATableIsFollowedEightTimes) {
  const auto table = open();
  table->claim(client(Class::kLatency));
  for (int i = 0; i < Table::kMostMoves; ++i) {
    remove_run_directory();
    ASSERT_EQ(tend_now(*table), Condition::kMoved) << i;
  }
  remove_run_directory();
  EXPECT_EQ(tend_now(*table), Condition::kStranded);
  EXPECT_THAT(table->why(), HasSubstr("deleted 9 times"));
  EXPECT_EQ(tend_now(*table), Condition::kSound);
}

TEST_F(TendTest, AMoveWakesThoseWhoSleepInTheOldTable) {
  const auto table = open();
  const int slot = table->claim(client(Class::kBestEffort));
  table->layout().waiting.fetch_or(bit(slot));
  std::atomic<bool> sleeps{false};
  std::thread sleeper([&] {
    const std::uint32_t seen = table->layout().wake_sequence;
    sleeps = true;
    table->sleep(seen, 3600 * kNsPerSecond);
  });
  while (!sleeps) std::this_thread::yield();
  usleep(20'000);
  remove_run_directory();
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  sleeper.join();
  EXPECT_EQ(table->layout().waiting, bit(slot));
}

TEST_F(TendTest, AForkedChildTendsNothing) {
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  remove_run_directory();
  Process child([&](const Link&) { require(tend_now(*table) == Condition::kSound, "it did something"); });
  EXPECT_TRUE(child.finish());
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_EQ(tend_now(*table), Condition::kMoved);
  EXPECT_EQ(table->slot_now(slot), slot);
}

TEST_F(TendTest, AClientThatWasMovedIsAliveToOthersAndItsDeathIsSeen) {
  const auto watcher = open();
  watcher->claim(client(Class::kNormal));
  const auto serve = start_client(Class::kLatency, /*active=*/true);
  const auto slot = static_cast<int>(serve->receive());
  std::mt19937 random(5);
  for (int round = 0; round < Table::kMostMoves; ++round) {
    remove_run_directory();
    if (random() % 2 == 0) {
      serve->ask(0);
      ASSERT_EQ(tend_now(*watcher), Condition::kMoved);
    } else {
      ASSERT_EQ(tend_now(*watcher), Condition::kMoved);
      serve->ask(0);
    }
    ASSERT_TRUE(watcher->alive(slot));
    ASSERT_EQ(watcher->reap(), 0);
    ASSERT_EQ(watcher->active(), bit(slot));
  }
  serve->kill();
  EXPECT_EQ(watcher->reap(), 1);
  EXPECT_EQ(watcher->active(), 0u);
}

}  // namespace
}  // namespace cudasched::arbiter::testing
