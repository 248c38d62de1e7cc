// Which GPUs a job is on, who wakes its members, and that its gates never deadlock: real tables, on a clock of the
// test's own where time matters.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "arbiter/processes.hpp"
#include "runtime/job_peers.hpp"
#include "schedule/policy.hpp"

namespace cudasched::runtime {
namespace {

using arbiter::ClientInfo;
using arbiter::Table;
using arbiter::testing::bit;
using arbiter::testing::eventually;
using arbiter::testing::Link;
using arbiter::testing::Process;
using schedule::Answer;
using schedule::Neighbours;
using schedule::Snapshot;
using Verdict = schedule::Rendezvous::Verdict;

constexpr std::uint64_t kJob = 77;

class JobPeersTest : public arbiter::testing::TableTest {
 protected:
  std::unique_ptr<Table> open(int gpu) const {
    return Table::open(directory_, "GPU-" + std::to_string(gpu), arbiter::testing::kDevice);
  }
  static int claim(Table& table, Class client_class, std::uint64_t job = 0) {
    ClientInfo info;
    info.client_class = client_class;
    info.job = job;
    return table.claim(info);
  }
  // How many other GPUs it sees.
  static int count(const JobPeers& peers) {
    int found = 0;
    peers.for_each([&](const Table&) { ++found; });
    return found;
  }
  void refresh(JobPeers& peers) {
    now_ += kNsPerSecond;
    peers.refresh(now_);
  }
  // A member on a GPU, in a process of its own, until it is killed.
  std::unique_ptr<Process> member(int gpu, Class client_class = Class::kBestEffort, bool active = false) const {
    auto process = std::make_unique<Process>([this, gpu, client_class, active](const Link& link) {
      const auto table = open(gpu);
      const int slot = claim(*table, client_class, kJob);
      if (active) table->set_active(slot, now_ns());
      link.send(slot);
      link.receive();
      table->clear_active(slot);
      link.send(slot);
      link.receive();
    });
    process->receive();
    return process;
  }

  std::int64_t now_ = now_ns();
};

TEST(JobId, IsTheSameForThoseThatAreTold) {
  unsetenv("MASTER_ADDR");
  unsetenv("MASTER_PORT");
  EXPECT_EQ(job_id("off", 8), 0u);
  EXPECT_EQ(job_id("auto", 1), 0u);
  EXPECT_NE(job_id("auto", 2), 0u);
  EXPECT_NE(job_id("auto", 2), job_id("auto", 2));  // each process is one of its own
  EXPECT_EQ(job_id("resnet", 1), job_id("resnet", 8));
  EXPECT_NE(job_id("resnet", 1), job_id("bert", 1));
  setenv("MASTER_ADDR", "node", 1);
  EXPECT_EQ(job_id("auto", 1), 0u);
  setenv("MASTER_PORT", "29500", 1);
  const std::uint64_t job = job_id("auto", 1);
  EXPECT_NE(job, 0u);
  EXPECT_EQ(job_id("auto", 8), job);
  EXPECT_EQ(job_id("resnet", 1), job_id("resnet", 1));
  EXPECT_EQ(job_id("off", 1), 0u);
  setenv("MASTER_PORT", "29501", 1);
  EXPECT_NE(job_id("auto", 1), job);
  unsetenv("MASTER_ADDR");
  unsetenv("MASTER_PORT");
}

TEST_F(JobPeersTest, AJobIsOnTheGpusThatHaveABestEffortClientOfIt) {
  const auto own = open(0);
  claim(*own, Class::kBestEffort, kJob);
  JobPeers peers;
  peers.join(kJob, *own);
  refresh(peers);
  EXPECT_FALSE(peers.any());
  const auto first = member(1);
  const auto second = member(2);
  const auto strange = open(3);
  claim(*strange, Class::kBestEffort, kJob + 1);
  claim(*strange, Class::kLatency, kJob);
  refresh(peers);
  EXPECT_EQ(count(peers), 2);
  first->kill();
  peers.reap();
  EXPECT_EQ(count(peers), 1);
  second->kill();
  refresh(peers);
  EXPECT_FALSE(peers.any());
  const auto third = member(1);
  refresh(peers);
  EXPECT_EQ(count(peers), 1);
}

// The tables of MIG instances that are gone stay in the run directory.
TEST_F(JobPeersTest, TablesThatNobodyUsesTakeNoPlaceOfAMembers) {
  constexpr int kTables = 45;
  constexpr int kMembers = 14;
  const auto own = open(0);
  std::vector<std::unique_ptr<Table>> others;
  for (int gpu = 1; gpu <= kTables; ++gpu) {
    others.push_back(open(gpu));
    if (gpu <= kMembers) claim(*others.back(), Class::kBestEffort, kJob);
  }
  JobPeers peers;
  peers.join(kJob, *own);
  refresh(peers);
  EXPECT_EQ(count(peers), kMembers);
}

TEST_F(JobPeersTest, WithoutAJobThereAreNoPeers) {
  const auto own = open(0);
  const auto other = member(1);
  JobPeers peers;
  peers.join(0, *own);
  refresh(peers);
  EXPECT_FALSE(peers.any());
}

// A thread of a job's member on one GPU sleeps for a latency client of another, which is active.
class JobSleepTest : public JobPeersTest {
 protected:
  void SetUp() override {
    claim(*own_, Class::kBestEffort, kJob);
    peers_.join(kJob, *own_);
    refresh(peers_);
    ASSERT_TRUE(peers_.latency_clients());
    ASSERT_NE(&holder(), own_.get());
  }
  Table& holder() { return peers_.holder(*own_); }
  // Hangs where `what` does not wake it.
  template <typename Wake>
  void is_woken_by(Wake&& what) {
    Table& held_by = holder();
    const std::uint32_t seen = held_by.layout().wake_sequence;
    JobPeers::announce(held_by);
    std::thread sleeper([&] { held_by.sleep(seen, 3600 * kNsPerSecond); });
    what();
    sleeper.join();
  }

  const std::unique_ptr<Table> own_ = open(0);
  const std::unique_ptr<Process> rank_ = member(1);
  const std::unique_ptr<Process> serve_ = member(1, Class::kLatency, /*active=*/true);
  JobPeers peers_;
};

TEST_F(JobSleepTest, TheEndOfTheRequestWakesIt) {
  const int own_latency = claim(*own_, Class::kLatency);
  Table& held_by = holder();
  is_woken_by([&] { serve_->ask(0); });
  EXPECT_EQ(held_by.layout().distant_waiters, 0u);
  own_->set_active(own_latency, now_ns());
  EXPECT_EQ(&holder(), own_.get());
}

TEST_F(JobSleepTest, TheReaperOfTheLatencyClientWakesIt) {
  Table& held_by = holder();
  is_woken_by([&] {
    serve_->kill();
    peers_.reap();
  });
  EXPECT_EQ(held_by.active(), 0u);
}

TEST_F(JobSleepTest, ADrainThatOpensTheGateWakesIt) {
  is_woken_by([&] { peers_.wake_all(); });
}

// ---- what a gate makes of them -------------------------------------------------------------------------------------

class JobGateTest : public JobPeersTest {
 protected:
  static constexpr std::int64_t kHour = 3600 * kNsPerSecond;

  void SetUp() override {
    own_ = open(0);
    other_ = open(1);
    self_ = claim(*own_, Class::kBestEffort, kJob);
    rank_ = claim(*other_, Class::kBestEffort, kJob);
    serve_ = claim(*other_, Class::kLatency);
    peers_.join(kJob, *own_);
    refresh(peers_);
    neighbours_.use_peers(&peers_.tables());
    neighbours_.join(&own_->layout(), self_, /*mps=*/true, settings_);
    now_ = 1000 * kHour;
    beat();
  }
  void beat() {
    for (Table* const table : {own_.get(), other_.get()}) {
      for (int slot = 0; slot < 4; ++slot) table->slot(slot).heartbeat_ns = now_;
    }
  }
  Snapshot look() {
    Snapshot snapshot;
    neighbours_.look(snapshot, now_, 0);
    return snapshot;
  }

  schedule::GateSettings settings_;
  std::unique_ptr<Table> own_;
  std::unique_ptr<Table> other_;
  int self_ = -1;
  int rank_ = -1;
  int serve_ = -1;
  JobPeers peers_;
  Neighbours neighbours_;
};

TEST_F(JobGateTest, LatencyWorkOnAnotherGpuClosesIt) {
  EXPECT_TRUE(look().latency_clients);
  EXPECT_FALSE(look().latency_active);
  other_->set_active(serve_, now_);
  EXPECT_TRUE(look().latency_active && neighbours_.latency_active(now_));
  EXPECT_EQ(look().slack_ns, Snapshot::kUnknownNs);
  now_ += settings_.stale_heartbeat_ns + 1;  // stopped
  EXPECT_FALSE(look().latency_active || neighbours_.latency_active(now_));
  beat();
  EXPECT_TRUE(look().latency_active);
  other_->release(rank_);
  peers_.reap();
  EXPECT_FALSE(look().latency_active || look().latency_clients);  // no member is there any more
}

TEST_F(JobGateTest, AHintOnAnotherGpuHolds) {
  other_->slot(serve_).hint_until_ns = now_ + kNsPerMs;
  EXPECT_EQ(look().hint_ns, kNsPerMs);
  EXPECT_EQ(schedule::strict(look()).answer, Answer::kWaitForTime);
}

TEST_F(JobGateTest, TheLeastSlackOfAllGpusHolds) {
  const int serve = claim(*own_, Class::kLatency);
  beat();
  const auto begin = [&](Table& table, int slot, std::int64_t slo_ns) {
    arbiter::Slot& client = table.slot(slot);
    client.entered_ns = now_;
    client.expected_ns = 3 * kNsPerMs;
    client.deadline_ns = now_ + slo_ns;
    table.set_active(slot, now_);
  };
  begin(*own_, serve, 20 * kNsPerMs);
  EXPECT_EQ(look().slack_ns, 17 * kNsPerMs);
  begin(*other_, serve_, 10 * kNsPerMs);
  Snapshot seen = look();
  EXPECT_EQ(seen.slack_ns, 7 * kNsPerMs);
  // What runs here is taken from the request that is here.
  seen.predicted_ns = kNsPerMs;
  EXPECT_TRUE(neighbours_.admitted(seen, -1));
  EXPECT_EQ(own_->layout().admitted_ns, kNsPerMs);
  EXPECT_EQ(other_->layout().admitted_ns, 0);
  own_->clear_active(serve);
  seen = look();
  EXPECT_EQ(seen.slack_ns, 7 * kNsPerMs);
  seen.predicted_ns = kNsPerMs;
  EXPECT_TRUE(neighbours_.admitted(seen, -1));
  EXPECT_EQ(own_->layout().admitted_ns, kNsPerMs);
  other_->slot(serve_).expected_ns = 0;
  EXPECT_EQ(look().slack_ns, Snapshot::kUnknownNs);
}

// ---- no deadlock ---------------------------------------------------------------------------------------------------

// Random jobs with collectives on two to four GPUs, beside latency clients and one another, by the rules of the gates:
// each launch asks the policy with what Neighbours saw. A collective runs until all members have it running; each
// member has two streams, and two collectives of different streams come in another order on each, as with two
// communicators. So a collective may wait for a launch that its peer's lead holds, which passes after 10 ms
// (schedule/hold_limit.hpp). Collectives meet (schedule/rendezvous.hpp). A member may die at any moment; its
// collectives then end, as a watchdog would end them.
class JobDeadlockTest : public JobPeersTest, public ::testing::WithParamInterface<unsigned> {
 protected:
  static constexpr std::int64_t kStepNs = 20'000;
  static constexpr int kLaunches = 60;

  struct Kernel {
    std::int64_t left_ns = 0;
    int collective = -1;
    std::size_t stream = 0;
  };
  struct Member {
    int gpu = 0;
    int job = 0;
    int slot = -1;
    std::unique_ptr<JobPeers> peers;
    std::unique_ptr<Neighbours> neighbours;
    std::vector<Kernel> program;
    std::size_t next = 0;                      // the launch that asks
    std::array<std::deque<Kernel>, 2> queued;  // submitted, by stream; the first one of each runs
    std::int64_t moved_ns = 0;                 // when something was submitted or completed last
    std::int64_t latency_seen_ns = 0;
    std::int64_t turn_waited_ns = 0;
    bool at_gate = false;  // with a collective
    bool dead = false;

    bool idle() const { return queued[0].empty() && queued[1].empty(); }
    bool done() const { return dead || (next == program.size() && idle()); }
    std::int64_t in_flight_ns() const {
      std::int64_t sum = 0;
      for (const auto& stream : queued) {
        for (const Kernel& kernel : stream) sum += kernel.left_ns;
      }
      return sum;
    }
  };
  struct Server {
    int gpu = 0;
    int slot = -1;
    std::int64_t until_ns = 0;
    bool active = false;
  };
};

TEST_P(JobDeadlockTest, RandomJobsWithCollectivesComeToTheirEnd) {
  std::mt19937 random(GetParam());
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  const int gpus = 2 + below(3);
  const bool mps = below(2) == 0;
  const schedule::GateSettings settings;
  std::vector<std::unique_ptr<Table>> tables;
  for (int gpu = 0; gpu < gpus; ++gpu) tables.push_back(open(gpu));
  std::vector<Member> members;
  std::vector<Server> servers;
  const int jobs = 1 + below(2);
  for (int job = 0; job < jobs; ++job) {
    const auto id = kJob + static_cast<unsigned>(job);
    std::vector<Kernel> common;
    for (int i = 0; i < kLaunches; ++i) {
      common.push_back({(1 + below(30)) * std::int64_t{20'000}, below(3) == 0 ? job * 1000 + i : -1,
                        static_cast<std::size_t>(below(2))});
    }
    for (int gpu = 0; gpu < gpus; ++gpu) {
      Member member;
      member.gpu = gpu;
      member.job = job;
      Table& table = *tables[static_cast<std::size_t>(gpu)];
      member.slot = claim(table, Class::kBestEffort, id);
      member.peers = std::make_unique<JobPeers>();
      member.peers->join(id, table);
      member.neighbours = std::make_unique<Neighbours>();
      member.neighbours->use_peers(&member.peers->tables());
      member.neighbours->join(&table.layout(), member.slot, mps, settings);
      for (Kernel kernel : common) {
        if (kernel.collective < 0) kernel.left_ns = (1 + below(30)) * std::int64_t{20'000};
        member.program.push_back(kernel);
      }
      for (std::size_t i = 1; i < member.program.size(); i += 2) {
        if (member.program[i - 1].stream != member.program[i].stream && below(2) == 0) {
          std::swap(member.program[i - 1], member.program[i]);
        }
      }
      member.moved_ns = 1000 * 3600 * kNsPerSecond;
      members.push_back(std::move(member));
    }
  }
  for (int i = 1 + below(gpus); i > 0; --i) {
    Server server;
    server.gpu = below(gpus);
    server.slot = claim(*tables[static_cast<std::size_t>(server.gpu)], Class::kLatency);
    servers.push_back(server);
  }
  now_ = 1000 * 3600 * kNsPerSecond;
  const bool kills = below(3) == 0;

  const auto is_of = [](int collective) {
    return [collective](const Kernel& each) { return each.collective == collective; };
  };
  // Have all members that still have it before them begun it?
  const auto is_running = [&](int collective) {
    for (const Member& member : members) {
      if (member.dead) continue;
      const auto begun = [&](const auto& stream) { return !stream.empty() && stream.front().collective == collective; };
      if (std::any_of(member.queued.begin(), member.queued.end(), begun)) continue;
      const auto next = member.program.begin() + static_cast<std::ptrdiff_t>(member.next);
      const bool to_come = std::any_of(next, member.program.end(), is_of(collective)) ||
                           std::any_of(member.queued.begin(), member.queued.end(), [&](const auto& stream) {
                             return std::any_of(stream.begin(), stream.end(), is_of(collective));
                           });
      if (to_come) return false;
    }
    return true;
  };
  const auto job_is_held = [&](int job) {
    for (const Server& server : servers) {
      for (const Member& member : members) {
        if (server.active && !member.dead && member.job == job && member.gpu == server.gpu) return true;
      }
    }
    return false;
  };

  std::int64_t calm_since_ns = now_;
  for (int step = 0; step < 60'000; ++step) {
    now_ += kStepNs;
    bool all = true;
    for (const Member& member : members) all = all && member.done();
    if (all) break;
    // All live but the dead.
    for (int gpu = 0; gpu < gpus; ++gpu) {
      for (int slot = 0; slot < 8; ++slot) tables[static_cast<std::size_t>(gpu)]->slot(slot).heartbeat_ns = now_;
    }
    for (Member& member : members) member.peers->refresh(now_);
    bool any_active = false;
    for (Server& server : servers) {
      Table& table = *tables[static_cast<std::size_t>(server.gpu)];
      if (now_ >= server.until_ns) {
        server.active = !server.active;
        server.until_ns = now_ + (server.active ? 1 + below(40) : 20 + below(200)) * kStepNs;
        if (server.active) {
          table.set_active(server.slot, now_);
        } else {
          table.clear_active(server.slot);
        }
      }
      any_active = any_active || server.active;
    }
    if (any_active) calm_since_ns = now_;
    if (kills && below(20'000) == 0) {
      Member& victim = members[static_cast<std::size_t>(below(static_cast<int>(members.size())))];
      if (!victim.dead) {
        victim.dead = true;
        victim.queued = {};
        tables[static_cast<std::size_t>(victim.gpu)]->release(victim.slot);
      }
    }
    // Launches, several a step at most.
    for (Member& member : members) {
      for (int tries = 0; tries < 3 && !member.dead && member.next < member.program.size(); ++tries) {
        const Kernel& kernel = member.program[member.next];
        Snapshot seen;
        seen.predicted_ns = kernel.left_ns;
        seen.linger_ns = settings.linger_ns;
        seen.lead_ns = 20'000;
        const std::int64_t in_flight = member.in_flight_ns();
        seen.in_flight_ns = now_ - member.moved_ns > 10 * kNsPerMs ? 0 : in_flight;
        member.neighbours->look(seen, now_, member.turn_waited_ns);
        if (seen.latency_active) member.latency_seen_ns = now_;
        if (member.latency_seen_ns != 0) seen.since_latency_ns = now_ - member.latency_seen_ns;
        schedule::Decision decision = schedule::strict(seen);
        ASSERT_FALSE(job_is_held(member.job) && decision.answer == Answer::kSubmit)
            << "the gates do not close together";
        if (kernel.collective >= 0) {
          if (!std::exchange(member.at_gate, true)) member.neighbours->collective_arrived(now_);
          const Verdict verdict = member.neighbours->look_for_members(member.peers->progress(), now_);
          if (verdict == Verdict::kNow) decision = {};
          if (verdict == Verdict::kWait && decision.answer == Answer::kSubmit) decision = {Answer::kWaitForTime, 1};
        }
        Table& table = *tables[static_cast<std::size_t>(member.gpu)];
        const bool for_turn = decision.answer == Answer::kWaitForTurn;
        member.turn_waited_ns = for_turn ? member.turn_waited_ns + kStepNs : 0;
        if (decision.answer != Answer::kSubmit) {
          if (decision.answer == Answer::kWaitForTime) {
            table.layout().waiting.fetch_and(~bit(member.slot));
          } else {
            table.layout().waiting.fetch_or(bit(member.slot));
          }
          break;
        }
        table.layout().waiting.fetch_and(~bit(member.slot));
        if (!member.neighbours->admitted(seen, -1)) break;
        if (kernel.collective >= 0) {
          member.neighbours->collective_submitted(now_);
          member.at_gate = false;
        }
        member.queued[kernel.stream].push_back(kernel);
        member.moved_ns = now_;
        member.neighbours->publish(now_ + in_flight + kernel.left_ns);
        ++member.next;
      }
    }
    // The devices: what runs is found first, or a collective would end on one before it has on the others.
    std::vector<Kernel*> running;
    for (Member& member : members) {
      for (auto& stream : member.queued) {
        if (stream.empty() || (stream.front().collective >= 0 && !is_running(stream.front().collective))) continue;
        running.push_back(&stream.front());
      }
    }
    for (Kernel* const kernel : running) kernel->left_ns -= kStepNs;
    for (Member& member : members) {
      for (auto& stream : member.queued) {
        if (stream.empty() || stream.front().left_ns > 0) continue;
        stream.pop_front();
        member.moved_ns = now_;
      }
      if (member.idle()) member.neighbours->publish(now_);
    }
  }
  for (const Member& member : members) {
    EXPECT_TRUE(member.done()) << "GPU " << member.gpu << " of " << gpus << ": " << member.next << " launched, "
                               << member.queued[0].size() + member.queued[1].size() << " queued, mps " << mps
                               << ", calm for " << (now_ - calm_since_ns) / kNsPerMs << " ms";
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, JobDeadlockTest, ::testing::Range(1u, 25u));

}  // namespace
}  // namespace cudasched::runtime
