// Several processes on one table: kills, stops, forks, namespaces, users, layout versions, full filesystems.
#include <gmock/gmock.h>
#include <sys/mount.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "arbiter/processes.hpp"

namespace cudasched::arbiter::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kDone = -100;
constexpr int kSkip = 77;  // exit code of a child that the kernel refused something

class ProcessTest : public TableTest {
 protected:
  // A process with one slot; it says which, and then sits there.
  std::unique_ptr<Process> start_client(Class client_class, const std::function<void(Table&, int)>& then = {}) const {
    return std::make_unique<Process>([this, client_class, &then](const Link& link) {
      const auto table = open();
      const int slot = table->claim(client(client_class));
      if (then) then(*table, slot);
      link.send(slot);
      link.receive();
    });
  }

  // Runs a child that may find itself not permitted, and skips then.
  static void run_permitted(const std::function<void(const Link&)>& body) {
    Process process(body);
    int status = 0;
    waitpid(process.pid(), &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == kSkip) GTEST_SKIP() << "this kernel does not let us unshare or mount";
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }

  static void set_active(Table& table, int slot) { table.set_active(slot, now_ns()); }
};

// A file of another layout version, as a later cudasched may write it.
std::vector<char> other_version(std::uint32_t version) {
  std::vector<char> bytes(30'000, 'x');
  const std::uint64_t magic = Layout::kMagic;
  const std::uint32_t size = 30'000;
  std::memcpy(bytes.data(), &magic, sizeof magic);
  std::memcpy(bytes.data() + 8, &version, sizeof version);
  std::memcpy(bytes.data() + 12, &size, sizeof size);
  return bytes;
}

// Locks one byte of a file as a client of any version does. The descriptor stays open.
void lock_byte(const std::string& path, off_t byte) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  require(fcntl(file, F_SETLK, &range) == 0, "cannot lock " + path);
}

TEST_F(ProcessTest, KillOfAnActiveLatencyClientOpensTheGate) {
  const auto table = open();
  const auto latency = start_client(Class::kLatency, set_active);
  const std::int64_t slot = latency->receive();
  EXPECT_EQ(table->active(), bit(slot));
  EXPECT_TRUE(table->alive(static_cast<int>(slot)));
  EXPECT_EQ(table->reap(), 0);
  latency->kill();
  EXPECT_EQ(table->active(), bit(slot));  // nobody could clear it
  EXPECT_FALSE(table->alive(static_cast<int>(slot)));

  Process gate([&](const Link& link) {  // a third process
    const auto own = open();
    link.send(own->reap(own->active()));
  });
  EXPECT_EQ(gate.receive(), 1);
  EXPECT_TRUE(is_empty(table->layout()));
  EXPECT_EQ(table->claim(client(Class::kBestEffort)), slot);
}

TEST_F(ProcessTest, KillOfAWaitingBestEffortClientGivesBackItsTurn) {
  const auto table = open();
  const auto waiter = start_client(Class::kBestEffort, [](Table& own, int slot) {
    own.layout().waiting.fetch_or(bit(slot));
    own.layout().turn = turn_of(slot);
  });
  const std::int64_t slot = waiter->receive();
  EXPECT_EQ(table->layout().waiting, bit(slot));
  EXPECT_EQ(table->layout().best_effort, bit(slot));
  waiter->kill();
  EXPECT_EQ(table->reap(bit(slot)), 1);
  EXPECT_TRUE(is_empty(table->layout()));
  EXPECT_EQ(table->layout().turn, 0u);
}

TEST_F(ProcessTest, AKilledSleeperIsReapedAndTheOthersWake) {
  const auto table = open();
  const auto latency = start_client(Class::kLatency, set_active);
  const std::int64_t slot = latency->receive();
  Process gate([&](const Link& link) {
    const auto own = open();
    const int mine = own->claim(client(Class::kBestEffort));
    own->layout().waiting.fetch_or(bit(mine));
    link.send(mine);
    while (true) {
      const std::uint32_t seen = own->layout().wake_sequence;
      if (own->active() == 0) break;
      own->sleep(seen, std::int64_t{3600} * kNsPerSecond);
    }
    link.send(kDone);
  });
  gate.receive();
  latency->kill();
  EXPECT_EQ(table->reap(bit(slot)), 1);
  EXPECT_EQ(gate.receive(), kDone);
}

TEST_F(ProcessTest, KillAtAnyInstantLeavesNothingBehind) {
  const auto table = open();
  std::mt19937 random(20240607);
  int killed_with_a_slot = 0;
  for (int round = 0; round < 300; ++round) {
    Process victim([&](const Link& link) {
      const auto own = open();
      link.send(0);
      for (int turn = 0;; ++turn) {
        const Class client_class = turn % 2 == 0 ? Class::kLatency : Class::kBestEffort;
        const int slot = own->claim(client(client_class));
        own->set_active(slot, now_ns());
        own->layout().waiting.fetch_or(bit(slot));
        own->layout().turn = turn_of(slot);
        own->layout().waiting.fetch_and(~bit(slot));
        own->clear_active(slot);
        own->release(slot);
      }
    });
    victim.receive();
    usleep(random() % 500);
    victim.kill();
    killed_with_a_slot += table->reap();
    ASSERT_TRUE(is_empty(table->layout())) << "round " << round;
    const int slot = table->claim(client(Class::kLatency));
    ASSERT_EQ(slot, 0);
    table->release(slot);
    ASSERT_TRUE(is_empty(table->layout())) << "round " << round;
  }
  EXPECT_GT(killed_with_a_slot, 0);
}

TEST_F(ProcessTest, KillWhileCreatingOrReplacingLeavesAUsableTable) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::filesystem::remove_all(directory_);
    if (round % 2 == 0) write_file(other_version(9));
    Process victim([&](const Link& link) {
      link.send(0);
      const auto own = open();
      own->claim(client(Class::kLatency));
      link.receive();
    });
    victim.receive();
    usleep(random() % 1000);
    victim.kill();
    const auto table = open();
    table->reap();
    ASSERT_TRUE(is_empty(table->layout())) << "round " << round;
    ASSERT_EQ(table->claim(client(Class::kNormal)), 0);
  }
}

TEST_F(ProcessTest, AStoppedClientLivesAndItsHeartbeatStands) {
  const auto table = open();
  Process latency([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kLatency));
    own->set_active(slot, now_ns());
    link.send(slot);
    while (true) {
      own->slot(slot).heartbeat_ns = now_ns();
      usleep(500);
    }
  });
  const auto slot = static_cast<int>(latency.receive());
  const auto moves = [&, last = std::int64_t{0}]() mutable {
    const std::int64_t now = table->slot(slot).heartbeat_ns;
    return std::exchange(last, now) != now && last != 0;
  };
  ASSERT_TRUE(eventually(moves));
  latency.stop();
  const std::int64_t stopped_ns = table->slot(slot).heartbeat_ns;
  usleep(20'000);
  EXPECT_EQ(table->slot(slot).heartbeat_ns, stopped_ns);
  EXPECT_TRUE(table->alive(slot));
  EXPECT_EQ(table->reap(), 0);
  EXPECT_EQ(table->active(), bit(slot));
  latency.resume();
  EXPECT_TRUE(eventually([&] { return table->slot(slot).heartbeat_ns != stopped_ns; }));
  latency.kill();
  EXPECT_EQ(table->reap(), 1);
}

TEST_F(ProcessTest, AForkedChildFreesNothing) {
  Process parent([&](const Link& link) {
    auto table = open();
    const int slot = table->claim(client(Class::kLatency));
    table->set_active(slot, now_ns());
    link.send(slot);
    for (const bool abandon : {false, true}) {
      Process child([&](const Link&) {
        if (abandon) table->abandon();
        table->set_active(slot, 1);
        table->clear_active(slot);
        table->release(slot);
        require(table->alive(slot), "the parent is alive");
        require(table->reap() == 0, "nothing to reap");
        require(!arbiter_error([&] { table->claim(client(Class::kLatency)); }).empty(), "claimed in a child");
        table.reset();
      });
      require(child.finish(), "child");
    }
    link.send(kDone);
    link.receive();
    require(table->active() == bit(slot) && table->alive(slot), "a child took the parent's slot");
    table->clear_active(slot);
    table->release(slot);
  });
  const auto table = open();
  const auto slot = static_cast<int>(parent.receive());
  EXPECT_EQ(parent.receive(), kDone);
  EXPECT_TRUE(table->alive(slot));
  EXPECT_EQ(table->reap(), 0);
  EXPECT_EQ(table->active(), bit(slot));
  EXPECT_GT(table->slot(slot).active_since_ns, 1);
  parent.send(0);
  EXPECT_TRUE(parent.finish());
  EXPECT_TRUE(is_empty(table->layout()));
}

TEST_F(ProcessTest, AForkedChildIsAClientOfItsOwn) {
  auto table = open();
  const int parents = table->claim(client(Class::kLatency));
  Process child([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kBestEffort));
    table.reset();  // closes nothing that our lock hangs on
    link.send(slot);
    link.receive();
    own->release(slot);
  });
  const auto childs = static_cast<int>(child.receive());
  EXPECT_NE(parents, childs);
  EXPECT_TRUE(table->alive(childs));
  EXPECT_TRUE(table->alive(parents));
  EXPECT_EQ(table->reap(), 0);
  child.send(0);
  EXPECT_TRUE(child.finish());
  EXPECT_EQ(table->layout().best_effort, 0u);
  EXPECT_EQ(table->latency_clients(), bit(parents));
}

TEST_F(ProcessTest, ExecGivesTheSlotBack) {
  const auto table = open();
  Process program([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kLatency));
    own->set_active(slot, now_ns());
    link.send(slot);
    execl("/bin/sleep", "sleep", "600", nullptr);
    require(false, "exec");
  });
  const auto slot = static_cast<int>(program.receive());
  EXPECT_TRUE(eventually([&] { return !table->alive(slot); }));
  EXPECT_EQ(table->reap(), 1);
  EXPECT_TRUE(is_empty(table->layout()));
  EXPECT_EQ(::kill(program.pid(), 0), 0);
}

TEST_F(ProcessTest, ASecondTableOfAProcessDropsNoLocks) {
  const auto observer = open();
  Process owner([&](const Link& link) {
    const auto table = open();
    const int slot = table->claim(client(Class::kLatency));
    {
      const auto second = open();
      require(second->claim(client(Class::kNormal)) != slot, "the same slot twice");
      const auto third = Table::open_existing(path_);
      const auto fourth = Table::open(directory_ + "/", kUuid, kDevice);
    }
    link.send(slot);
    link.receive();
  });
  const std::int64_t slot = owner.receive();
  EXPECT_TRUE(observer->alive(static_cast<int>(slot)));
  EXPECT_EQ(observer->reap(), 0);
  EXPECT_EQ(observer->latency_clients(), bit(slot));
  int occupied = 0;
  for (const Slot& entry : observer->layout().slots) occupied += entry.occupied != 0 ? 1 : 0;
  EXPECT_EQ(occupied, 1);  // the second table released its own
}

TEST_F(ProcessTest, ThreadsThatOpenAndCloseDropNoLocks) {
  const auto observer = [&](const Link& link) {
    const auto table = open();
    while (true) {
      const std::int64_t slot = link.receive();
      link.send(table->alive(static_cast<int>(slot)) ? table->reap() : -1);
    }
  };
  Process first(observer);
  Process second(observer);
  std::atomic<int> errors{0};
  const auto client_thread = [&](const Process& watch) {
    for (int round = 0; round < 500; ++round) {
      const auto table = open();
      if (watch.ask(table->claim(client(Class::kLatency))) != 0) ++errors;
    }
  };
  std::thread other(client_thread, std::cref(first));
  client_thread(second);
  other.join();
  EXPECT_EQ(errors, 0);
}

TEST_F(ProcessTest, SixtyFourClientsThenNoMore) {
  const auto table = open();
  std::vector<std::unique_ptr<Process>> processes;
  std::set<std::int64_t> slots;
  for (int index = 0; index < 16; ++index) {
    processes.push_back(std::make_unique<Process>([&](const Link& link) {
      const auto own = open();
      for (int round = 0; round < 4; ++round) link.send(own->claim(client(Class::kLatency)));
      link.receive();
    }));
  }
  for (const auto& process : processes) {
    for (int round = 0; round < 4; ++round) slots.insert(process->receive());
  }
  EXPECT_EQ(slots.size(), 64u);
  EXPECT_EQ(table->latency_clients(), ~std::uint64_t{0});
  EXPECT_THAT(arbiter_error([&] { table->claim(client(Class::kLatency)); }),
              AllOf(HasSubstr("all 64 slots"), HasSubstr(path_), HasSubstr("end one")));
  processes[5]->kill();
  const int slot = table->claim(client(Class::kBestEffort));
  EXPECT_GE(slot, 0);
  EXPECT_EQ(table->layout().best_effort, bit(slot));
}

TEST_F(ProcessTest, ManyProcessesStartAtOnce) {
  for (const bool stale : {false, true}) {
    std::filesystem::remove_all(directory_);
    if (stale) write_file(other_version(3));
    std::vector<std::unique_ptr<Process>> processes;
    for (int index = 0; index < 20; ++index) {
      processes.push_back(std::make_unique<Process>([&](const Link& link) {
        link.send(0);
        link.receive();
        const auto table = open();
        link.send(table->claim(client(Class::kBestEffort)));
        link.send(static_cast<std::int64_t>(inode()));
        link.receive();
      }));
    }
    for (const auto& process : processes) process->receive();
    for (const auto& process : processes) process->send(0);
    std::set<std::int64_t> slots;
    std::set<std::int64_t> files;
    for (const auto& process : processes) {
      slots.insert(process->receive());
      files.insert(process->receive());
    }
    EXPECT_EQ(slots.size(), 20u);
    EXPECT_EQ(files.size(), 1u);
    EXPECT_EQ(open()->reap(), 0);
  }
}

TEST_F(ProcessTest, ReapersNeverHarmAClaimer) {
  const auto table = open();
  const auto reaper = [&](const Link& link) {
    const auto own = open();
    link.send(0);
    while (true) own->reap();
  };
  Process first(reaper);
  Process second(reaper);
  first.receive();
  second.receive();
  const auto claimer = [&](const Link&) {
    const auto own = open();
    for (int round = 0; round < 1000; ++round) {
      const std::string name = std::to_string(getpid()) + "." + std::to_string(round);
      const int slot = own->claim(client(Class::kLatency, name));
      own->set_active(slot, now_ns());
      if (round % 8 == 0) sched_yield();
      const Layout& layout = own->layout();
      require((layout.active & layout.latency & bit(slot)) != 0, "a reaper took a living client's bit");
      require(own->slot(slot).occupied == 1 && text(own->slot(slot).name) == name, "two clients in one slot");
      own->release(slot);
    }
  };
  Process third(claimer);
  Process fourth(claimer);
  EXPECT_TRUE(third.finish());
  EXPECT_TRUE(fourth.finish());
  first.kill();
  second.kill();
  table->reap();
  EXPECT_TRUE(is_empty(table->layout()));
}

TEST_F(ProcessTest, SleepersWakeEveryTime) {
  const auto table = open();
  const int latency = table->claim(client(Class::kLatency));
  table->set_active(latency, now_ns());
  constexpr int kRounds = 300;
  Process gate([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kBestEffort));
    for (int round = 0; round < kRounds; ++round) {
      link.receive();
      own->layout().waiting.fetch_or(bit(slot));
      link.send(round);
      while (true) {
        const std::uint32_t seen = own->layout().wake_sequence;
        if (own->active() == 0) break;
        own->sleep(seen, std::int64_t{3600} * kNsPerSecond);
      }
      own->layout().waiting.fetch_and(~bit(slot));
      link.send(round);
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    gate.send(round);
    gate.receive();
    if (round % 3 == 0) usleep(300);  // asleep by now, as a rule
    table->clear_active(latency);
    ASSERT_EQ(gate.receive(), round);
    table->set_active(latency, now_ns());
  }
  EXPECT_TRUE(gate.finish());
}

TEST_F(ProcessTest, AStoppedRegistrarHangsNobody) {
  const auto table = open();
  const auto victim = start_client(Class::kLatency, set_active);
  victim->receive();
  Process stopped([&](const Link& link) {
    lock_byte(path_, 0);
    link.send(0);
    link.receive();
  });
  stopped.receive();
  stopped.stop();
  victim->kill();
  EXPECT_EQ(table->reap(), 1);  // needs no registration
  EXPECT_THAT(arbiter_error([&] { table->claim(client(Class::kLatency)); }),
              AllOf(HasSubstr("process " + std::to_string(stopped.pid())), HasSubstr(path_)));
  stopped.kill();
  EXPECT_EQ(table->claim(client(Class::kLatency)), 0);
}

TEST_F(ProcessTest, TwoLayoutVersionsAtOnce) {
  constexpr std::uint32_t kLater = kLayoutVersion + 1;
  const std::string later = "layout version " + std::to_string(kLater);
  const std::string ours = "has " + std::to_string(kLayoutVersion);
  write_file(other_version(kLater));
  const ino_t others = inode();
  for (const off_t slot : {0, 5, 63, 200}) {  // a later version may have more slots
    Process other([&](const Link& link) {
      lock_byte(path_, 1 + slot);
      link.send(0);
      link.receive();
    });
    other.receive();
    const std::string message = arbiter_error([&] { open(); });
    EXPECT_THAT(message, AllOf(HasSubstr(later), HasSubstr(ours), HasSubstr("restart"), HasSubstr(path_)));
    EXPECT_EQ(arbiter_error([&] { Table::open_existing(path_); }), message);
    EXPECT_EQ(inode(), others);
    EXPECT_EQ(read_file(), other_version(kLater));
  }
  EXPECT_THAT(arbiter_error([&] { Table::open_existing(path_); }), HasSubstr(later));
  EXPECT_EQ(inode(), others);
  const auto table = open();  // nobody lives there
  EXPECT_NE(inode(), others);
  EXPECT_EQ(table->claim(client(Class::kLatency)), 0);
}

TEST_F(ProcessTest, TwoPidNamespaces) {
  const auto table = open();
  // A container: a process in a pid namespace of its own, where it is process 1. First comes its pid in ours.
  const auto contain = [&](const std::function<void(const Link&)>& body) {
    return [&, body](const Link& outer) {
      if (!enter_namespaces(CLONE_NEWPID)) _exit(kSkip);
      Process inner([&](const Link& link) {
        require(getpid() == 1, "not in a pid namespace");
        body(link);
      });
      outer.send(inner.pid());
      while (true) outer.send(inner.receive());
    };
  };
  const auto latency = contain([&](const Link& link) {
    const auto own = open();
    const int slot = own->claim(client(Class::kLatency));
    own->set_active(slot, now_ns());
    // A child in yet another namespace has its parent's pid, 1. It owns nothing all the same.
    Process middle([&](const Link& answer) {
      if (!enter_namespaces(CLONE_NEWPID)) return answer.send(1);
      Process twin([&](const Link& to_middle) {
        own->clear_active(slot);
        own->release(slot);
        to_middle.send(getpid());
      });
      answer.send(twin.receive());
    });
    require(middle.receive() == 1, "the twin is not process 1");
    link.send(slot);
    link.receive();
  });
  Process probe([](const Link&) {
    if (!enter_namespaces(CLONE_NEWPID)) _exit(kSkip);
  });
  int status = 0;
  waitpid(probe.pid(), &status, 0);
  if (WEXITSTATUS(status) == kSkip) GTEST_SKIP() << "this kernel gives us no pid namespace";

  const auto first = std::make_unique<Process>(latency);
  const auto second = std::make_unique<Process>(latency);
  const auto first_pid = static_cast<pid_t>(first->receive());
  const auto first_slot = static_cast<int>(first->receive());
  second->receive();
  const auto second_slot = static_cast<int>(second->receive());
  EXPECT_NE(first_slot, second_slot);
  EXPECT_EQ(table->slot(first_slot).pid, 1);
  EXPECT_EQ(table->slot(second_slot).pid, 1);
  EXPECT_TRUE(table->alive(first_slot));
  EXPECT_TRUE(table->alive(second_slot));
  EXPECT_EQ(table->active(), bit(first_slot) | bit(second_slot));
  ::kill(first_pid, SIGKILL);
  ASSERT_TRUE(eventually([&] { return !table->alive(first_slot); }));
  Process third(contain([&](const Link& link) {
    const auto own = open();
    link.send(own->alive(first_slot) ? 1 : 0);
    link.send(own->alive(second_slot) ? 1 : 0);
    link.send(own->reap());
    link.receive();
  }));
  third.receive();
  EXPECT_EQ(third.receive(), 0);
  EXPECT_EQ(third.receive(), 1);
  EXPECT_EQ(third.receive(), 1);
  EXPECT_EQ(table->active(), bit(second_slot));
}

TEST_F(ProcessTest, AFullFilesystemIsAnErrorNotASignal) {
  run_permitted([&](const Link&) {
    if (!enter_namespaces(CLONE_NEWNS) || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", base_.c_str(), "tmpfs", 0, "size=8192,mode=0700") != 0) {
      _exit(kSkip);
    }
    const std::string fresh = arbiter_error([&] { open(); });
    require(fresh.find("No space left") != std::string::npos && fresh.find(path_) != std::string::npos &&
                fresh.find("CUDASCHED_RUN_DIR") != std::string::npos,
            "a full filesystem: " + fresh);
    require(!std::filesystem::exists(path_ + ".new"), "a draft is left");

    // A whole header, but holes behind it: touching them would be a SIGBUS.
    std::vector<char> header = other_version(kLayoutVersion);
    const std::uint32_t size = sizeof(Layout);
    std::memcpy(header.data() + 12, &size, sizeof size);
    header.resize(80);
    write_file(header);
    require(truncate(path_.c_str(), sizeof(Layout)) == 0, "truncate");
    const std::string sparse = arbiter_error([&] { open()->claim(client(Class::kLatency)); });
    require(sparse.find("No space left") != std::string::npos, "a sparse file: " + sparse);

    require(mount("none", base_.c_str(), nullptr, MS_REMOUNT, "size=8m") == 0, "remount");
    require(open()->claim(client(Class::kLatency)) == 0, "with space again");
  });
}

TEST_F(ProcessTest, AReadOnlyFilesystemIsAnError) {
  run_permitted([&](const Link&) {
    if (!enter_namespaces(CLONE_NEWNS) || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", base_.c_str(), "tmpfs", 0, "size=8m,mode=0700") != 0) {
      _exit(kSkip);
    }
    const auto read_only = [&](bool on) {
      require(mount("none", base_.c_str(), nullptr, MS_REMOUNT | (on ? MS_RDONLY : 0), nullptr) == 0, "remount");
    };
    const auto refused = [&](const std::string& state) {
      read_only(true);
      const std::string message = arbiter_error([&] { open(); });
      require(message.find("Read-only") != std::string::npos && message.find(directory_) != std::string::npos &&
                  message.find("CUDASCHED_RUN_DIR") != std::string::npos,
              state + ": " + message);
      read_only(false);
    };
    refused("no directory");
    std::filesystem::create_directory(directory_);
    refused("no file");
    open();
    refused("a file");
    require(open()->claim(client(Class::kLatency)) == 0, "writable again");
  });
}

TEST_F(ProcessTest, TwoUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_EQ(chmod(base_.c_str(), 01777), 0);
  const auto table = open();
  table->claim(client(Class::kLatency));
  constexpr uid_t kOther = 54'321;
  Process other([&](const Link& link) {
    require(setgid(kOther) == 0 && setuid(kOther) == 0, "setuid");
    unsetenv("CUDASCHED_RUN_DIR");
    require(default_directory().ends_with("-54321"), "a directory for each user");
    const std::string refused = arbiter_error([&] { open(); });
    require(refused.find("belongs to user 0, not to user 54321") != std::string::npos, refused);
    require(!arbiter_error([&] { Table::open_existing(path_); }).empty(), "looked into another user's table");
    const auto own = Table::open(base_ + "/other", kUuid, kDevice);
    require(own->claim(client(Class::kLatency)) == 0, "a table of its own");
    require(mkdir((base_ + "/trap").c_str(), 0777) == 0, "mkdir");
    link.send(0);
    link.receive();
  });
  other.receive();
  EXPECT_EQ(table->reap(), 0);
  EXPECT_THAT(arbiter_error([&] { Table::open(base_ + "/trap", kUuid, kDevice); }),
              AllOf(HasSubstr("belongs to user 54321"), HasSubstr("CUDASCHED_RUN_DIR")));
  EXPECT_TRUE(std::filesystem::is_empty(base_ + "/trap"));

  // A file of someone else in a directory of ours.
  std::filesystem::create_directory(base_ + "/mixed");
  const std::string file = base_ + "/mixed/" + kUuid + ".arbiter";
  std::ofstream(file).put('x');
  ASSERT_EQ(chown(file.c_str(), kOther, kOther), 0);
  EXPECT_THAT(arbiter_error([&] { Table::open(base_ + "/mixed", kUuid, kDevice); }), HasSubstr("only this user"));
}

}  // namespace
}  // namespace cudasched::arbiter::testing
