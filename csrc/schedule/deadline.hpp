// Earliest deadline first between latency clients: on request, and at a region's entry only, never at a launch. The
// most urgent client always enters at once; the others wait until no more urgent one is left, for a bounded time.
//
// Pure: no clock, no driver, no allocation, no state.
#pragma once

#include <cstdint>
#include <span>

#include "schedule/admission.hpp"

namespace cudasched::schedule {

// A latency client that is in a region or waits to enter one.
struct Entrant {
  int slot = 0;                  // of the arbiter: unique
  std::int32_t priority = 0;     // higher first, whatever the deadlines
  std::int64_t deadline_ns = 0;  // 0: none, after all that have one
};

// A strict total order of entrants: by priority, then deadline, then slot.
bool more_urgent(const Entrant& one, const Entrant& other) noexcept;

struct EntryView {
  static constexpr std::int64_t kMaxWaitNs = 100'000'000;

  Entrant self;
  std::span<const Entrant> others;        // without those whose heartbeat is not fresh (is_fresh)
  std::int64_t waited_ns = 0;             // since self asked first
  std::int64_t max_wait_ns = kMaxWaitNs;  // then it enters, whichever clients are there
};

// kSubmit: enter. kWaitForLatency: a more urgent client is there; look again when a region ends or one leaves, at the
// latest after max_wait_ns - waited_ns.
Decision earliest_deadline_first(const EntryView& view) noexcept;

}  // namespace cudasched::schedule
