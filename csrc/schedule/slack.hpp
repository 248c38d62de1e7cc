// How long best-effort work may still hold up the latency requests that are active, without one missing its deadline.
//
// A request still needs the P90 of its region's past times, less the time that the request has received. The cost of
// best-effort work admitted meanwhile does not count as received. A request brings a slack (deadline - entry - P90),
// and every best-effort launch admitted meanwhile takes its cost out of that slack.
//
// Only a request without admitted work shows the request's time by itself. So once in a while one is kept clean.
//
// Inside a host-bound request most admitted launches cost nothing: segments.hpp.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "schedule/admission.hpp"

namespace cudasched::schedule {

// The times of a region's last clean requests, and the expected time of the next one. Fixed memory.
class RegionHistory {
 public:
  static constexpr std::size_t kTimes = 32;
  static constexpr std::size_t kFewest = 9;  // with fewer times nothing is known; Segments knows a request by then
  static constexpr int kCleanPeriod = 16;    // of so many requests in a row, one is clean

  // A request is complete, `time_ns` after its entry; best-effort launches of `admitted_ns` went meanwhile.
  void observe(std::int64_t time_ns, std::int64_t admitted_ns) noexcept;

  // The P90 of the times kept; Snapshot::kUnknownNs while there are too few.
  std::int64_t p90_ns() const noexcept { return p90_ns_; }

  // The whole time of a request that enters now: the P90, or Snapshot::kUnknownNs where the request is to be clean.
  // Called once a request, whose words publish the result.
  std::int64_t expected_ns() const noexcept { return since_clean_ < kCleanPeriod - 1 ? p90_ns_ : Snapshot::kUnknownNs; }

 private:
  std::array<std::int64_t, kTimes> times_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;
  int since_clean_ = 0;
  std::int64_t p90_ns_ = Snapshot::kUnknownNs;
};

// The time that a request of `expected_ns` in all still needs after it received `passed_ns`: the time since its entry,
// less admission_cost_ns of the launches admitted since. A negative one is a debt: admitted launches have not run yet.
// Beyond the expected time nothing is known: Snapshot::kUnknownNs.
std::int64_t remaining_ns(std::int64_t expected_ns, std::int64_t passed_ns) noexcept;

// An active latency request, as the gate sees it.
struct Request {
  std::int64_t deadline_ns = 0;  // on the clock of now_ns; 0: it has none
  std::int64_t remaining_ns = Snapshot::kUnknownNs;
  std::int64_t expected_ns = 0;  // in all
};

// The least slack of the requests, for Snapshot::slack_ns. The GPU serves requests one after another, the most urgent
// first. So a request also waits for the requests due before it, and the most urgent alone had the time that has
// passed: each other request still needs all of its expected time. kUnknownNs if there is none, or one of them has no
// deadline or no known remainder.
std::int64_t least_slack_ns(std::span<const Request> requests, std::int64_t now_ns) noexcept;

// The cost to a request of a launch admitted into it: the launch's bound, and two context switches (`switch_ns` each, 0
// in one process) where the launch finds no best-effort work in flight. A request's passed time is the time since its
// entry less the sum of these; Snapshot::margin_ns must hold two switches.
std::int64_t admission_cost_ns(std::int64_t longest_ns, std::int64_t in_flight_ns, std::int64_t switch_ns) noexcept;

}  // namespace cudasched::schedule
