// May the next best-effort launch be submitted now? A policy is a pure function from a snapshot to a decision: no
// clock, no driver, no state. Called by the gate, under its lock, at each look; never allocates.
//
// Every field of a snapshot has a neutral default. A caller that knows nothing of slack, hints or arrivals leaves the
// fields alone, and their rules hold nothing back.
#pragma once

#include <cstdint>
#include <limits>

namespace cudasched::schedule {

// The GPU changes from one process's context to another's, without MPS.
inline constexpr std::int64_t kContextSwitchNs = 130'000;

// The known state of the host-driven latency requests under way (segments.hpp); harvest() and slack() read it.
struct HostBound {
  bool known = false;             // of each request
  bool sliced = false;            // one runs in another process, and contexts take turns on the GPU
  bool closed = false;            // where sliced: the gate stays closed for the rest of the segment (SegmentGate)
  std::int64_t gpu_ns = 0;        // predicted, of latency work submitted and not complete,
  std::int64_t gpu_most_ns = 0;   // and at most
  std::int64_t left_gpu_ns = 0;   // and still to be launched in the segments under way
  std::int64_t left_host_ns = 0;  // the least host time left in one of them until it waits for the GPU
  std::int64_t late_ns = 0;       // by how much that one may end later,
  double late_share = 0;          // and as a share of such segments' time
};

// Everything that a decision may depend on. Times in nanoseconds.
struct Snapshot {
  static constexpr std::int64_t kLongAgoNs = std::int64_t{1} << 60;
  static constexpr std::int64_t kUnknownNs = std::numeric_limits<std::int64_t>::min();
  static constexpr std::int64_t kLongLinger = 2;  // a long launch lingers for so many lingers

  bool latency_clients = false;                // a latency client is on the device, or a best-effort one that measures
  bool latency_active = false;                 // one holds the gate closed
  std::int64_t since_latency_ns = kLongAgoNs;  // since a latency client was last seen active
  std::int64_t linger_ns = 0;                  // how long the gate stays closed after that
  bool my_turn = true;                         // this client's turn among best-effort clients (turn.hpp, fair.hpp)
  std::int64_t in_flight_ns = 0;               // predicted GPU time still to run of submitted launches
  std::uint64_t launches_in_flight = 0;        // submitted and not complete; only bounded() asks
  std::int64_t predicted_ns = 0;               // of the launch that asks
  std::int64_t lead_ns = 0;                    // how much may be in flight when the next launch is submitted
  std::int64_t bound_ns = 0;                   // upper bound of the launch that asks; 0: predicted_ns stands for it
  std::int64_t slack_ns = kUnknownNs;          // least of the active latency requests (slack.hpp)
  std::int64_t margin_ns = 200'000;            // the part of the slack left alone: context switches, wrong bounds
  std::int64_t hint_ns = 0;                    // hold for so long still: latency work is announced, or another measures
  std::int64_t free_ns = kLongAgoNs;           // no latency work is foreseen for so long (arrivals.hpp)
  std::int64_t foreseen_over_ns = 0;           // after so long, the foreseen work has come or stayed away
  std::int64_t long_ns = 300'000;              // a launch with a longer bound is long: it looks out for latency work
  std::int64_t waited_ns = 0;                  // how long this launch has waited while no latency client was active
  std::int64_t max_hold_ns = 20'000'000;       // how long latency work to come may hold one long launch at most

  HostBound host_bound;

  std::int64_t longest_ns() const noexcept { return bound_ns > predicted_ns ? bound_ns : predicted_ns; }
  bool looks_out() const noexcept { return longest_ns() > long_ns && waited_ns < max_hold_ns; }
};

enum class Answer {
  kSubmit,
  kWaitForTime,     // look again after wait_ns, or when something completes
  kWaitForLatency,  // a latency client is active: look again when the arbiter wakes us
  kWaitForTurn,     // another best-effort client feeds the GPU
};

struct Decision {
  Answer answer = Answer::kSubmit;
  std::int64_t wait_ns = 0;  // > 0 exactly for kWaitForTime
  std::int64_t took_ns = 0;  // how long a user's policy took over it, where that was its own doing; 0: not timed
};

// Another process's time in flight, from its word: work in flight is predicted to last until `until_ns`. More than a
// second is a foreign or damaged word, and counts for nothing.
std::int64_t foreign_in_flight_ns(std::int64_t until_ns, std::int64_t now_ns) noexcept;

// Is a heartbeat no older than `stale_ns`? One from the future (another clock, a damaged word) is not fresh either.
bool is_fresh(std::int64_t beat_ns, std::int64_t now_ns, std::int64_t stale_ns) noexcept;

// While no latency client is on the device: a launch goes where at most kMostUngatedNs are in flight with it, so that a
// client that joins meets no long backlog. But two launches always may be in flight, however long.
inline constexpr std::int64_t kMostUngatedNs = 30'000'000;
inline constexpr std::uint64_t kFewestUngated = 2;
Decision bounded(const Snapshot& snapshot) noexcept;

// Submits everything at once: no gate. The baseline for the other policies.
Decision open(const Snapshot& snapshot) noexcept;

// Just-in-time submission with strict admission (docs/policies.md). Nothing goes while a latency client is active or
// has given a hint, nor for the linger after: a waiting request arrives right behind the last one. Else the next launch
// goes when at most the lead is in flight. So the GPU never runs dry, and holds one best-effort kernel and a few
// microseconds. A long launch costs a request more, so it waits twice the linger. The launch also waits until no
// foreseen latency work falls into its bound, max_hold_ns at most.
Decision strict(const Snapshot& snapshot) noexcept;

// As strict, but while latency work is active, a launch goes whose bound, with the work in flight, fits the request's
// slack less the margin. An unknown slack is none. Where the gaps of the requests under way are known, as harvest:
// launches in a gap take no slack. The slack left then bounds how much later a request may end (Segments).
Decision slack(const Snapshot& snapshot) noexcept;

// As strict, but while the requests under way keep the host busy and the GPU idle, launches are submitted in the gaps.
// A launch in a gap delays the next latency kernels. These kernels queue up behind the launch, and the GPU, which is
// faster than the host, catches up. A request ends later only by the backlog left when the program waits. So a launch
// goes where the GPU finishes in the host time left, or late_ns later at most. The work to finish is both classes' work
// on the GPU and the segment's launches to come. Where contexts take turns, a segment has the GPU alone once it needs
// all the time left.
Decision harvest(const Snapshot& snapshot) noexcept;

}  // namespace cudasched::schedule
