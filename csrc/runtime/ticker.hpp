// The ticker thread: the work that must go on while the program makes no call. In the shared tables: heartbeats,
// counters, repairs, and changes that other processes ask for. In this process: the end of latency work that the
// program never waits for, marks of streams whose regions have been left, overdue launches, a launcher thread that
// died, the predictor's state on disk. And the messages about events that other threads only counted.
//
// The ticker looks every millisecond while latency work is active, every 5 ms while the program launches, every 20 ms
// else. An idle process lets the ticker sleep for a second at a time (ticker_sleep.hpp). The ticker may log. Except for
// the copy of the predictor's state, the ticker holds no lock of the launch path for longer than a few reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>

#include "arbiter/counters.hpp"
#include "base/clock.hpp"
#include "runtime/decisions.hpp"

namespace cudasched::runtime {

class Device;

class Ticker {
 public:
  // Starts the thread, once. Throws Error where there is none to be had.
  void start();
  // In a forked child, which has no such thread.
  void reset_in_child() noexcept {
    running_.store(false);
    finish_.store(kRuns);
    new (&publishing_) std::mutex;  // the parent's thread may hold it
  }
  // Publishes the process's counts, for others to read. Also at exit.
  void publish_counts() noexcept;
  // A policy is in use that has not been refused.
  void policy_changed() noexcept { said_policy_refused_ = false; }
  // The process is about to end without exit handlers: has the thread do their work, and waits for it. Takes no lock.
  void finish(std::int64_t patience_ns) noexcept;

 private:
  void run() noexcept;
  // Is latency work active or imminent?
  bool tick(std::int64_t now_ns) noexcept;
  bool tend(Device& device, std::int64_t now_ns) noexcept;
  void watch_policy(Device& device, std::int64_t now_ns) noexcept;
  bool needs_ticks() noexcept;
  void save_predictors(std::int64_t now_ns) noexcept;

  // A process that a signal ends, as services are, has no end at which it could write: so now and then, seldom later.
  static constexpr std::int64_t kFirstSaveNs = 2 * kNsPerSecond;
  static constexpr std::int64_t kMostSaveNs = 64 * kNsPerSecond;

  enum Finish : std::uint32_t { kRuns, kAsked, kEnded };

  std::atomic<bool> running_{false};
  std::atomic<std::uint32_t> finish_{kRuns};
  // Messages that were logged already.
  std::atomic<bool> said_policy_refused_{false};
  bool said_contested_ = false;
  bool said_repaired_ = false;
  bool said_moved_ = false;
  bool said_stranded_ = false;
  bool said_policy_hangs_ = false;
  std::int64_t reaped_all_ns_ = 0;
  std::int64_t published_ns_ = 0;
  std::int64_t traced_ns_ = 0;
  std::int64_t save_ns_ = 0;  // when the predictors' state is written next,
  std::int64_t save_after_ns_ = kFirstSaveNs;
  std::uint64_t saved_launches_ = 0;  // launches at the last save
  std::mutex publishing_;
  arbiter::Counts counts_{};  // under publishing_
  Decisions decisions_;
};

}  // namespace cudasched::runtime
