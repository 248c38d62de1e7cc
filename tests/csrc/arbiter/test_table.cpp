// One process: opening, refusing, claiming, waking; and threads of one process.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(TableTest, CreatesAPrivateDirectoryAndFile) {
  const auto table = open();
  struct stat status {};
  ASSERT_EQ(stat(directory_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  EXPECT_EQ(status.st_size, static_cast<off_t>(sizeof(Layout)));
  EXPECT_EQ(table->path(), path_);
  EXPECT_EQ(table->layout().magic, Layout::kMagic);
  EXPECT_EQ(table->layout().layout_version, kLayoutVersion);
  EXPECT_EQ(text(table->layout().device_name), kDevice);
  EXPECT_TRUE(is_empty(table->layout()));
}

TEST_F(TableTest, TheMagicReadsAsAName) {
  const std::uint64_t magic = Layout::kMagic;
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(&magic), sizeof magic), "CUSCHED1");
}

TEST_F(TableTest, ADraftOfAKilledCreatorIsInNobodysWay) {
  write_file({});
  std::ofstream(path_ + ".new") << "half a table";
  const auto table = open();
  EXPECT_EQ(table->claim(client(Class::kLatency)), 0);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

TEST_F(TableTest, WhereDescriptorsRunOutTheLimitIsNamed) {
  Process process([&](const Link& link) {
    rlimit limit{};
    require(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
    const int lowest = dup(0);  // the lowest number that is free
    require(lowest >= 0 && ::close(lowest) == 0, "dup");
    const rlimit none{static_cast<rlim_t>(lowest), limit.rlim_max};
    require(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    const std::string said = arbiter_error([&] {
      try {
        open();
      } catch (...) {
        setrlimit(RLIMIT_NOFILE, &limit);  // a sanitizer needs descriptors to look at what was thrown
        throw;
      }
    });
    link.send(said.find("ulimit -n") != std::string::npos && said.find("CUDASCHED_RUN_DIR") == std::string::npos);
  });
  EXPECT_EQ(process.receive(), 1);
}

TEST_F(TableTest, DeviceNamesAreCutToTheField) {
  const auto table = Table::open(directory_, kUuid, std::string(200, 'x'));
  EXPECT_EQ(text(table->layout().device_name), std::string(63, 'x'));
}

TEST_F(TableTest, RefusesUuidsThatAreNoFileName) {
  for (const std::string& uuid :
       {std::string(), std::string("../GPU"), std::string("a/b"), std::string(300, 'x'), std::string("a\0b", 3)}) {
    EXPECT_THAT(arbiter_error([&] { Table::open(directory_, uuid, kDevice); }), HasSubstr("UUID")) << uuid;
  }
}

TEST_F(TableTest, RefusesADirectoryThatOthersMayWrite) {
  std::filesystem::create_directory(directory_);
  for (const mode_t mode : {0720, 0702, 01777}) {
    ASSERT_EQ(chmod(directory_.c_str(), mode), 0);
    EXPECT_THAT(arbiter_error([&] { open(); }),
                AllOf(HasSubstr(directory_), HasSubstr("other users"), HasSubstr("CUDASCHED_RUN_DIR")));
  }
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  EXPECT_EQ(arbiter_error([&] { open(); }), "");
}

TEST_F(TableTest, RefusesALinkForADirectoryOrAFile) {
  std::filesystem::create_directory(base_ + "/elsewhere");
  std::filesystem::create_directory_symlink(base_ + "/elsewhere", directory_);
  EXPECT_THAT(arbiter_error([&] { open(); }), AllOf(HasSubstr(directory_), HasSubstr("link")));
  EXPECT_THAT(arbiter_error([&] { Table::open(directory_ + "/", kUuid, kDevice); }), HasSubstr("link"));
  std::filesystem::remove(directory_);

  std::filesystem::create_directory(directory_);
  std::filesystem::create_symlink(base_ + "/victim", path_);
  EXPECT_THAT(arbiter_error([&] { open(); }), HasSubstr(path_));
  EXPECT_FALSE(std::filesystem::exists(base_ + "/victim"));
}

TEST_F(TableTest, RefusesWhatIsNoRegularFileOfThisUserAlone) {
  std::filesystem::create_directory(directory_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(arbiter_error([&] { open(); }), HasSubstr("not a regular file"));
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  EXPECT_THAT(arbiter_error([&] { open(); }), HasSubstr(path_));
  std::filesystem::remove(path_);
  write_file({});
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  EXPECT_THAT(arbiter_error([&] { open(); }), HasSubstr("only this user may write"));
}

TEST_F(TableTest, AMissingParentIsNamed) {
  EXPECT_THAT(arbiter_error([&] { Table::open(base_ + "/no/such", kUuid, kDevice); }),
              AllOf(HasSubstr(base_ + "/no/such"), HasSubstr("No such file"), HasSubstr("CUDASCHED_RUN_DIR")));
  EXPECT_THAT(arbiter_error([&] { Table::open("", kUuid, kDevice); }), HasSubstr("empty name"));
}

TEST_F(TableTest, OpenExistingCreatesAndReplacesNothing) {
  EXPECT_THAT(arbiter_error([&] { Table::open_existing(path_); }), HasSubstr(directory_));
  EXPECT_FALSE(std::filesystem::exists(directory_));
  std::filesystem::create_directory(directory_);
  EXPECT_THAT(arbiter_error([&] { Table::open_existing(path_); }), HasSubstr("No such file"));
  EXPECT_FALSE(std::filesystem::exists(path_));
  const std::vector<char> garbage(100, 'g');
  write_file(garbage);
  EXPECT_THAT(arbiter_error([&] { Table::open_existing(path_); }), HasSubstr("not a client table"));
  EXPECT_EQ(read_file(), garbage);
  open();
  EXPECT_TRUE(is_empty(Table::open_existing(path_)->layout()));
}

TEST_F(TableTest, ClaimFillsASlotAndReleaseEmptiesIt) {
  const auto table = open();
  ClientInfo info = client(Class::kLatency, "serve.py");
  info.priority = -3;
  info.slo_ns = 5 * kNsPerMs;
  info.hook_attached = false;
  const std::int64_t before_ns = now_ns();
  const int slot = table->claim(info);
  const Slot& entry = table->slot(slot);
  EXPECT_EQ(entry.occupied, 1u);
  EXPECT_EQ(entry.client_class, static_cast<std::uint32_t>(Class::kLatency));
  EXPECT_EQ(entry.priority, -3);
  EXPECT_EQ(entry.pid, getpid());
  EXPECT_EQ(entry.slo_ns, 5 * kNsPerMs);
  EXPECT_EQ(entry.hook_attached, 0u);
  EXPECT_GE(entry.claimed_ns, before_ns);
  EXPECT_EQ(entry.heartbeat_ns, entry.claimed_ns);
  EXPECT_EQ(text(entry.name), "serve.py");
  EXPECT_NE(text(entry.version), "");
  EXPECT_EQ(table->latency_clients(), bit(slot));
  EXPECT_EQ(table->layout().best_effort, 0u);
  EXPECT_EQ(table->active(), 0u);
  EXPECT_TRUE(table->alive(slot));
  table->release(slot);
  EXPECT_TRUE(is_empty(table->layout()));
  EXPECT_FALSE(table->alive(slot));
}

TEST_F(TableTest, AReusedSlotKeepsNothingOfItsLastClient) {
  const auto table = open();
  const int slot = table->claim(client(Class::kBestEffort, std::string(300, 'n')));
  EXPECT_EQ(text(table->slot(slot).name), std::string(63, 'n'));
  Slot& entry = table->slot(slot);
  entry.regions = 7;
  const auto times = {
      &entry.active_since_ns,  &entry.deadline_ns,          &entry.in_flight_until_ns, &entry.last_launch_ns,
      &entry.entered_ns,       &entry.expected_ns,          &entry.hint_until_ns,      &entry.foreseen_ns,
      &entry.foreseen_over_ns, &entry.rate_free_ns,         &entry.request_ns,         &entry.request_waited_ns,
      &entry.virtual_ns,       &entry.admitted_at_entry_ns, &entry.overdue_since_ns,   &entry.segment_since_ns,
      &entry.segment_late_ns,  &entry.segment_median_ns,    &entry.latency_gpu_ns};
  const auto counts = {&entry.launches, &entry.device_launches, &entry.gate_waits,   &entry.gate_wait_ns,
                       &entry.requests, &entry.segment,         &entry.segment_left, &entry.collectives};
  for (auto* field : times) *field = 99;
  for (auto* field : counts) *field = 99;
  table->release(slot);
  ASSERT_EQ(table->claim(client(Class::kNormal, "b")), slot);
  EXPECT_EQ(entry.regions, 0u);
  for (const auto* field : times) EXPECT_EQ(*field, 0);
  for (const auto* field : counts) EXPECT_EQ(*field, 0u);
  EXPECT_EQ(text(entry.name), "b");
  EXPECT_EQ(table->latency_clients() | table->layout().best_effort, 0u);
}

TEST_F(TableTest, ActivityIsABitmapOfSlots) {
  const auto table = open();
  const int first = table->claim(client(Class::kLatency));
  const int second = table->claim(client(Class::kLatency));
  table->set_active(first, 1000);
  table->set_active(second, 2000);
  EXPECT_EQ(table->active(), bit(first) | bit(second));
  EXPECT_EQ(table->slot(second).active_since_ns, 2000);
  EXPECT_EQ(table->slot(second).heartbeat_ns, 2000);
  table->clear_active(first);
  table->clear_active(first);
  EXPECT_EQ(table->active(), bit(second));
  table->set_active(63, 1);  // not ours
  table->set_active(-1, 1);
  table->set_active(64, 1);
  EXPECT_EQ(table->active(), bit(second));
  table->release(second);
  EXPECT_EQ(table->active(), 0u);
}

TEST_F(TableTest, OnlyTheLastClearWakesAndOnlyIfSomebodyWaits) {
  const auto table = open();
  const int first = table->claim(client(Class::kLatency));
  const int second = table->claim(client(Class::kLatency));
  const std::uint32_t start = table->layout().wake_sequence;
  table->set_active(first, 1);
  table->clear_active(first);
  EXPECT_EQ(table->layout().wake_sequence, start);  // nobody waits
  table->layout().waiting.fetch_or(bit(second));
  table->set_active(first, 1);
  table->set_active(second, 1);
  table->clear_active(first);
  EXPECT_EQ(table->layout().wake_sequence, start);  // second is active still
  table->clear_active(first);
  EXPECT_EQ(table->layout().wake_sequence, start);
  table->clear_active(second);
  EXPECT_EQ(table->layout().wake_sequence, start + 1);
}

TEST_F(TableTest, SleepReturnsAtOnceIfTheSequenceHasMovedOn) {
  const auto table = open();
  const std::uint32_t seen = table->layout().wake_sequence;
  table->wake_all();
  table->sleep(seen, std::int64_t{3600} * kNsPerSecond);  // a hang if it slept
  table->sleep(seen + 1, 1000);                           // a time-out ends it
  table->sleep(seen + 1, 0);
  table->sleep(seen + 1, -5);
}

TEST_F(TableTest, ReapLeavesItsOwnSlotsAlone) {
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  table->set_active(slot, 1);
  EXPECT_EQ(table->reap(), 0);
  EXPECT_EQ(open()->reap(), 0);  // through a second table of the process
  EXPECT_EQ(table->active(), bit(slot));
  EXPECT_EQ(table->slot(slot).occupied, 1u);
}

// A process may be killed between any two stores: every mixture of traces must go, and only where it is asked for.
TEST_F(TableTest, ReapClearsEveryPartialState) {
  const auto table = open();
  Layout& layout = table->layout();
  for (unsigned traces = 1; traces < 64; ++traces) {
    for (const int slot : {0, 31, 63}) {
      if ((traces & 1) != 0) layout.active = bit(slot);
      if ((traces & 2) != 0) layout.latency = bit(slot);
      if ((traces & 4) != 0) layout.best_effort = bit(slot);
      if ((traces & 8) != 0) layout.waiting = bit(slot);
      if ((traces & 16) != 0) layout.turn = turn_of(slot);
      if ((traces & 32) != 0) table->slot(slot).occupied = 1;
      ASSERT_EQ(table->reap(~bit(slot)), 0);
      ASSERT_FALSE(is_empty(layout));
      ASSERT_EQ(table->reap(bit(slot)), 1);
      ASSERT_TRUE(is_empty(layout)) << traces << " " << slot;
      ASSERT_EQ(layout.turn, 0u);
    }
  }
}

TEST_F(TableTest, ReapWakesGatesAndRefusesATurnOfNoSlot) {
  const auto table = open();
  const int mine = table->claim(client(Class::kBestEffort));
  table->layout().waiting = bit(mine);
  table->layout().active = bit(9);
  const std::uint32_t seen = table->layout().wake_sequence;
  EXPECT_EQ(table->reap(bit(9)), 1);
  EXPECT_NE(table->layout().wake_sequence, seen);
  table->layout().turn = ~std::uint64_t{0};
  table->reap();
  EXPECT_EQ(table->layout().turn, 0u);
  table->layout().turn = turn_of(mine);
  table->reap();
  EXPECT_EQ(table->layout().turn, turn_of(mine));
  table->release(mine);
  EXPECT_EQ(table->layout().turn, 0u);
}

TEST_F(TableTest, ATableThatWasReplacedTakesNoNewClients) {
  const auto table = open();
  const int slot = table->claim(client(Class::kLatency));
  std::filesystem::remove(path_);
  EXPECT_THAT(arbiter_error([&] { table->claim(client(Class::kLatency)); }),
              AllOf(HasSubstr(path_), HasSubstr("restart")));
  const auto fresh = open();  // another file now
  EXPECT_EQ(fresh->claim(client(Class::kLatency)), 0);
  EXPECT_NE(&fresh->layout(), &table->layout());
  EXPECT_TRUE(table->alive(slot));
}

TEST_F(TableTest, OpeningLeaksNoDescriptors) {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto fresh = descriptors();
  auto kept = open();
  const auto before = descriptors();
  for (int round = 0; round < 50; ++round) {
    const auto first = open();
    const auto second = Table::open_existing(path_);
    EXPECT_EQ(&first->layout(), &second->layout());
    first->claim(client(Class::kNormal));
  }
  EXPECT_EQ(descriptors(), before);
  EXPECT_TRUE(is_empty(kept->layout()));
  kept.reset();
  EXPECT_EQ(descriptors(), fresh);
}

TEST_F(TableTest, ThreadsOfOneProcessGetDistinctSlots) {
  const auto table = open();
  std::array<std::atomic<int>, kSlotCount> holders{};
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&, index] {
      const auto own = index % 2 == 0 ? nullptr : open();
      Table& used = own ? *own : *table;
      for (int round = 0; round < 200; ++round) {
        const bool latency = round % 2 == 0;
        const int slot = used.claim(client(latency ? Class::kLatency : Class::kBestEffort));
        if (holders[static_cast<std::size_t>(slot)].fetch_add(1) != 0) ++errors;
        if (latency) used.set_active(slot, now_ns());
        used.reap();
        open();  // and closed again
        if (((used.active() & bit(slot)) != 0) != latency || used.slot(slot).occupied != 1 || !used.alive(slot))
          ++errors;
        used.clear_active(slot);
        holders[static_cast<std::size_t>(slot)].fetch_sub(1);
        used.release(slot);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  EXPECT_TRUE(is_empty(table->layout()));
}

TEST(DefaultDirectory, IsTheEnvironmentsElseOneOfTheUser) {
  setenv("CUDASCHED_RUN_DIR", "/some/where", 1);
  EXPECT_EQ(default_directory(), "/some/where");
  setenv("CUDASCHED_RUN_DIR", "", 1);
  EXPECT_EQ(default_directory(), "/dev/shm/cudasched-" + std::to_string(geteuid()));
  unsetenv("CUDASCHED_RUN_DIR");
  EXPECT_EQ(default_directory(), "/dev/shm/cudasched-" + std::to_string(geteuid()));
}

}  // namespace
}  // namespace cudasched::arbiter::testing
