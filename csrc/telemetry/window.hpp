// Launches between their submission and their row in the journal: joined with the device's records, told whether they
// overlapped, and given out in launch order.
//
// A launch is final when it is timed and every launch that was submitted before its end is timed too. Only such
// launches can have run beside it. A launch may never get a time (CUPTI lost the record). Such a launch is given up
// when a later launch of the same stream has been timed and kPatienceNs have passed, or when kMostPending launches
// wait.
//
// One thread uses it, the collector's. Times are CLOCK_MONOTONIC, in ns.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "telemetry/cupti.hpp"
#include "telemetry/journal.hpp"

namespace cudasched::telemetry {

struct Pending {
  enum class State : std::uint8_t { kAwaited, kLaunched, kTimed, kUntimed, kGone };

  Row row;
  State state = State::kAwaited;
  std::uint64_t name_hash = 0;
  std::uint64_t function = 0;      // handle of the kernel or the graph
  std::uint64_t stream = 0;        // handle
  std::uint64_t device_graph = 0;  // CUPTI's number of it, where it is known
  std::int64_t end_ns = 0;
  void* events = nullptr;  // the timing events, where events time the launch
  std::vector<std::uint32_t> words;

  bool open() const noexcept { return state == State::kAwaited || state == State::kLaunched; }
};

class Window {
 public:
  static constexpr std::size_t kMostPending = 65'536;
  static constexpr std::int64_t kPatienceNs = 10'000'000'000;
  static constexpr std::int64_t kClockSlackNs = 1'000'000;
  static constexpr std::uint32_t kOrderAge = 3;  // flushes that a record waits before order alone joins it

  struct Counts {
    std::uint64_t exact = 0;       // joined by correlation
    std::uint64_t by_order = 0;    // joined by stream, shape and order, since CUPTI gave no correlations
    std::uint64_t untimed = 0;     // given up
    std::uint64_t mismatched = 0;  // joined with a record of another shape, and so not timed
    std::uint64_t foreign = 0;     // records of launches that are not ours
  };

  // A launch that the driver accepted, or (failed) refused. Each number from 0 comes once, in any order. False: it was
  // given up before.
  bool add(Pending&& launch);
  void failed(std::uint64_t number);

  void correlate(const cupti::Correlation& correlation);
  // `offset_ns`: CLOCK_MONOTONIC minus the record's clock.
  void observe(const cupti::DeviceRecord& record, std::int64_t offset_ns);
  // All that CUPTI had complete has been handed over once more; `all`: nothing is still to come.
  void flushed(bool all);

  // For launches that events time. `duration_ns` < 0: it cannot be had.
  void timed(std::uint64_t number, std::int64_t start_ns, std::int64_t duration_ns);

  // Calls visit(Pending&) for each launch with events that is not timed yet, in order, until it returns false.
  template <typename Visit>
  void for_each_open(Visit&& visit) {
    for (Pending& launch : pending_) {
      if (launch.state == Pending::State::kLaunched && !visit(launch)) return;
    }
  }

  // Takes the final launches out, in launch order; `all`: every one.
  std::vector<Pending> take(std::int64_t now_ns, bool all);

  const Counts& counts() const noexcept { return counts_; }
  std::size_t size() const noexcept { return pending_.size() + early_.size(); }

 private:
  struct Waiting {
    cupti::DeviceRecord record;
    std::int64_t offset_ns = 0;
    std::uint32_t age = 0;
  };

  struct Span {
    std::uint8_t device = 0;
    std::int64_t start_ns = 0;
    std::int64_t end_ns = 0;
    Pending* launch = nullptr;  // null: it was taken
  };

  Pending* find(std::uint64_t number) noexcept;
  Pending& slot(std::uint64_t number);
  void join(Pending& launch, const Waiting& waiting);
  void join_by_order(std::vector<Waiting> records);
  void mark_overlaps();
  bool hopeless(const Pending& launch, std::int64_t now_ns) const noexcept;

  std::deque<Pending> pending_;
  std::uint64_t base_ = 0;  // number of the first pending launch
  std::unordered_map<std::uint32_t, std::uint64_t> correlations_;
  std::unordered_map<std::uint32_t, Waiting> waiting_;             // by correlation
  std::unordered_map<std::uint64_t, Waiting> early_;               // by launch: timed before it was added
  std::unordered_map<std::uint64_t, std::uint64_t> stream_of_;     // CUPTI's stream, to its handle
  std::unordered_map<std::uint64_t, std::uint64_t> newest_timed_;  // by stream's handle
  std::vector<Span> taken_;                                        // that may still overlap pending launches
  Counts counts_;
};

}  // namespace cudasched::telemetry
