// How a thread waits at the gate: the thread announces the wait in the arbiter where others are to know, and sleeps.
// For latency work or a turn the thread sleeps on the arbiter's futex; for a time, until shortly before the end
// (schedule/sleep_plan.hpp).
#pragma once

#include <atomic>
#include <cstdint>

#include "arbiter/table.hpp"
#include "base/spin_lock.hpp"
#include "runtime/job_peers.hpp"
#include "schedule/gate_machine.hpp"
#include "schedule/sleep_plan.hpp"

namespace cudasched::runtime {

class Waiter {
 public:
  // Of one launch.
  struct Wait {
    bool started = false;
    bool announced = false;  // our bit in the arbiter's `waiting` is set
    std::int64_t since_ns = 0;
    std::int64_t reaped_ns = 0;
  };

  void join(arbiter::Table* table, int slot) noexcept {
    table_ = table;
    slot_.store(slot, std::memory_order_relaxed);
  }
  // The other GPUs of its job; null: none. Before the first wait.
  void use_peers(JobPeers* peers) noexcept { peers_ = peers; }

  // The client has another slot now; its bit in the table is written anew by write_again().
  void moved(int slot) noexcept { slot_.store(slot, std::memory_order_relaxed); }

  // Restores the arbiter's `waiting` bit in a damaged table. The ticker's.
  void write_again() noexcept;

  // True while a thread waits that others are to know of; they then check that this process is alive.
  bool waits() const noexcept { return announced_.load() > 0; }

  // The number of wake-ups of waiting threads so far. To be read before the look that a wait follows.
  std::uint32_t wakes() const noexcept { return table_->layout().wake_sequence.load(std::memory_order_acquire); }

  // Waits as the verdict says, or less; the caller looks again. `wakes`: before it was given. `next_end_ns`: as
  // Ledger::next_end_ns(). `plan`: of this kind of thread. `open()`: asked before a sleep that a wake-up ends: is the
  // wait over already?
  template <typename Open>
  void wait(const schedule::GateMachine::Verdict& verdict, std::uint32_t wakes, std::int64_t next_end_ns,
            schedule::SleepPlan& plan, Wait& wait, Open&& open) noexcept {
    begin(verdict.announce, wait);
    if (verdict.decision.answer == schedule::Answer::kWaitForTime) {
      return wait_for_time(verdict.decision.wait_ns, next_end_ns, verdict.may_be_late_ns, plan);
    }
    reap(wait);
    const bool for_latency = verdict.decision.answer == schedule::Answer::kWaitForLatency;
    arbiter::Table& holder = for_latency && peers_ != nullptr ? peers_->holder(*table_) : *table_;
    std::uint32_t seen = wakes;
    if (&holder != table_) {
      seen = holder.layout().wake_sequence.load(std::memory_order_acquire);
      JobPeers::announce(holder);
    }
    if (open()) return;  // an opening between the last look and this one has woken no thread
    if (plan.spins()) return spin(kPollNs);
    holder.sleep(seen, verdict.look_in_ns);
  }

  // The launch waits no more.
  void end(Wait& wait) noexcept {
    if (wait.announced) leave();
    wait.announced = false;
  }

  // The waiting thread may share its core with the one it waits for: that one may run afterwards.
  static void spin(std::int64_t duration_ns) noexcept;

  static constexpr std::int64_t kReapNs = schedule::GateMachine::kLatencyLookNs;  // between two looks for dead clients

 private:
  static constexpr std::int64_t kPollNs = 4'000;  // between two looks at completion events, awake

  void begin(bool announce, Wait& wait) noexcept;
  void reap(Wait& wait) noexcept;
  void announce() noexcept;
  void leave() noexcept;
  static void wait_for_time(std::int64_t wait_ns, std::int64_t next_end_ns, std::int64_t slack_ns,
                            schedule::SleepPlan& plan) noexcept;

  arbiter::Table* table_ = nullptr;
  JobPeers* peers_ = nullptr;
  std::atomic<int> slot_{-1};
  std::atomic<int> announced_{0};  // threads that the arbiter's `waiting` bit stands for
  SpinLock lock_;                  // the bit and the count change together
};

}  // namespace cudasched::runtime
