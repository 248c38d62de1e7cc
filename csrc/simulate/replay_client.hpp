// A client of a replay (replay.hpp): its trace, its launches from the program to the end of their work, its gate or its
// requests. The replay's own; single-threaded, like the replay.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "arbiter/table.hpp"
#include "schedule/gate_machine.hpp"
#include "schedule/requests.hpp"
#include "schedule/segments.hpp"
#include "simulate/replay.hpp"

namespace cudasched::simulate {

inline constexpr std::int64_t kForeverNs = INT64_MAX;

constexpr std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

struct Job {
  std::int64_t remaining_ns = 0;
  std::int64_t duration_ns = 0;
  std::int64_t kernel_ns = 0;            // of one of its kernels
  std::int64_t kernel_left_ns = 0;       // of the one that runs
  std::int64_t ready_ns = 0;             // since when it could run on
  std::uint64_t number = 0;              // of its client, from 0
  schedule::GateMachine::Ticket ticket;  // of a best-effort launch
  std::size_t record = 0;
  bool begun = false;
  std::size_t in_segment = 0;  // a latency launch's number there,
  bool is_timed = false;       // and whether it is measured
};

struct Client {
  Client(const ReplayClient& spec, int place, const ReplaySettings& settings, arbiter::Layout& layout)
      : trace(&spec),
        slot(place),
        best_effort(spec.client_class == Class::kBestEffort),
        words(layout.slots[static_cast<std::size_t>(place)]) {
    result.name = spec.name;
    result.client_class = spec.client_class;
    words.occupied = 1;
    words.client_class = static_cast<std::uint32_t>(spec.client_class);
    words.priority = spec.priority;
    words.weight_milli = spec.weight_milli;
    if (best_effort) {
      layout.best_effort |= bit(slot);
      schedule::GateSettings figures = settings;
      figures.stale_heartbeat_ns = kForeverNs / 4;  // all live
      gate.join(&layout, slot, /*mps=*/settings.sharing != Sharing::kTimeSlice, figures);
      return;
    }
    requests.join(&layout, slot, settings.miss_probability);
    const bool looks_into = schedule::looks_into_requests(settings.policy) && !settings.user_policy;
    if (looks_into && (settings.policy != "slack" || spec.slo_ns > 0)) {
      segments = std::make_unique<schedule::Segments>(settings.host_bound_inflation);
    }
  }

  const TraceLaunch& launch(std::uint64_t number) const { return trace->launches[number % trace->launches.size()]; }
  bool ready() const { return ready_jobs > 0 && !runs; }
  bool in_region(const arbiter::Layout& layout) const { return (layout.active & bit(slot)) != 0; }
  std::uint64_t request_launches() const {
    const auto& ends = trace->request_ends;
    if (ends.empty()) return trace->launches.size();
    const std::size_t request = served % ends.size();
    return ends[request] - (request == 0 ? 0 : ends[request - 1]);
  }
  // Of the next request to be served; 0: none.
  std::int64_t deadline_ns() const { return trace->slo_ns > 0 ? trace->arrivals_ns[served] + trace->slo_ns : 0; }
  // Its gate looks which launches are complete.
  void see_completions(std::int64_t now_ns) {
    gate.look(
        now_ns, [&](int segment) { return completed > marked[static_cast<std::size_t>(segment)]; },
        [](int, const schedule::Ledger::Completed&, bool) {});
  }

  const ReplayClient* trace;
  int slot;
  bool best_effort;
  arbiter::Slot& words;
  ClientResult result;

  // Launches in their order: pushed by the program, submitted to the driver, complete.
  std::uint64_t pushed = 0;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::deque<std::int64_t> handed_ns;  // of those pushed and not submitted
  std::deque<Job> jobs;                // of those submitted and not complete
  std::size_t ready_jobs = 0;          // of these, on the GPU
  bool runs = false;                   // the first of these
  bool waits_for_gpu = false;          // the program, until all is complete
  bool waits_for_room = false;         // the program, in the ring

  // The gate, of best-effort clients.
  schedule::GateMachine gate;
  schedule::GateMachine::Launch asking;                            // the head
  bool was_held = false;                                           // while no latency client was there
  std::array<std::uint64_t, schedule::Ledger::kMarkers> marked{};  // the launch that each marker is behind
  std::int64_t launcher_free_ns = 0;
  std::uint64_t look_generation = 0;
  std::int64_t look_ns = kForeverNs;  // when the next look is due
  std::int64_t asked_ns = -1;         // since when the head waits; -1: it has not asked
  double lead_sum_ns = 0;

  // Requests, of latency clients.
  schedule::Requests requests;
  std::size_t arrived = 0;  // requests
  std::size_t served = 0;
  bool entering = false;  // one waits for a more urgent client
  bool cold = false;      // its request has not run yet: best-effort work may have filled the caches
  std::int64_t asked_entry_ns = 0;
  std::uint64_t request_end = 0;  // launch at which the request ends
  std::unique_ptr<schedule::Segments> segments;
  schedule::SegmentProgress marks;
  std::uint64_t marked_launch = 0;  // behind which the mark is, counted from 1
};

}  // namespace cudasched::simulate
