// How long best-effort work may still hold up the latency requests that are active, without one missing its deadline.
//
// What a request still needs is the P90 of its region's past times, less the time it has received. What best-effort
// work admitted into it costs does not count as had: a request brings a slack with it (deadline - entry - P90), and
// every best-effort launch admitted meanwhile takes its cost out of it.
//
// How long a request takes by itself shows only where nothing was admitted into it. So once in a while one is kept
// clean.
//
// Inside a host-bound request most of what is admitted costs nothing: segments.hpp.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "schedule/admission.hpp"

namespace cudasched::schedule {

// The times of a region's last clean requests, and what they say about the next one. Fixed memory.
class RegionHistory {
 public:
  static constexpr std::size_t kTimes = 32;
  static constexpr std::size_t kFewest = 9;  // with fewer times nothing is known; Segments knows a request by then
  static constexpr int kCleanPeriod = 16;    // of so many requests in a row, one is clean

  // A request is complete, `time_ns` after its entry; best-effort launches of `admitted_ns` went meanwhile.
  void observe(std::int64_t time_ns, std::int64_t admitted_ns) noexcept;

  // The P90 of the times kept; Snapshot::kUnknownNs while there are too few.
  std::int64_t p90_ns() const noexcept { return p90_ns_; }

  // What a request that enters now needs in all: the P90, or Snapshot::kUnknownNs where it is to be a clean one. Asked
  // once a request, and published with it.
  std::int64_t expected_ns() const noexcept { return since_clean_ < kCleanPeriod - 1 ? p90_ns_ : Snapshot::kUnknownNs; }

 private:
  std::array<std::int64_t, kTimes> times_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;
  int since_clean_ = 0;
  std::int64_t p90_ns_ = Snapshot::kUnknownNs;
};

// What a request that needs `expected_ns` in all still needs when it has received `passed_ns`: the time since its
// entry, less admission_cost_ns of what was admitted since. A negative one is a debt: what was admitted has not run
// yet. Beyond what was expected nothing is known: Snapshot::kUnknownNs.
std::int64_t remaining_ns(std::int64_t expected_ns, std::int64_t passed_ns) noexcept;

// An active latency request, as the gate sees it.
struct Request {
  std::int64_t deadline_ns = 0;  // on the clock of now_ns; 0: it has none
  std::int64_t remaining_ns = Snapshot::kUnknownNs;
  std::int64_t expected_ns = 0;  // in all
};

// The least slack of the requests, for Snapshot::slack_ns. The GPU serves them one after another, the most urgent
// first, so that a request also waits for what is due before it, and the time that has passed was had by the most
// urgent alone: the others are taken to need all that they need. kUnknownNs if there is none, or one of them has no
// deadline or no known remainder.
std::int64_t least_slack_ns(std::span<const Request> requests, std::int64_t now_ns) noexcept;

// What a launch that is admitted into a request takes from it: its bound, and the two context switches (`switch_ns`
// each, 0 in one process) that a launch brings with it which finds no best-effort work in flight. A request's passed
// time is the time since its entry less the sum of these; Snapshot::margin_ns must hold two switches.
std::int64_t admission_cost_ns(std::int64_t longest_ns, std::int64_t in_flight_ns, std::int64_t switch_ns) noexcept;

}  // namespace cudasched::schedule
