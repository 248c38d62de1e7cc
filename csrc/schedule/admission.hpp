// May the next best-effort launch be submitted now? A policy is a pure function from a snapshot to a decision: no
// clock, no driver, no state. Called by the gate, under its lock, at each look.
#pragma once

#include <cstdint>
#include <string_view>

namespace cudasched::schedule {

// Everything that a decision may depend on. Times in nanoseconds.
struct Snapshot {
  static constexpr std::int64_t kLongAgoNs = std::int64_t{1} << 60;

  bool latency_clients = false;                // a latency client is on the device, active or not
  bool latency_active = false;                 // one holds the gate closed
  std::int64_t since_latency_ns = kLongAgoNs;  // since a latency client was last seen active
  std::int64_t linger_ns = 0;                  // how long the gate stays closed after that
  bool my_turn = true;                         // this client's turn among best-effort clients (schedule/turn.hpp)
  std::int64_t in_flight_ns = 0;               // predicted GPU time still to run of what was submitted
  std::int64_t predicted_ns = 0;               // of the launch that asks
  std::int64_t lead_ns = 0;                    // how much may be in flight when the next launch is submitted
};

enum class Answer {
  kSubmit,
  kWaitForTime,     // too much in flight: look again after wait_ns, or when something completes
  kWaitForLatency,  // a latency client is active: look again when the arbiter wakes us
  kWaitForTurn,     // another best-effort client feeds the GPU
};

struct Decision {
  Answer answer = Answer::kSubmit;
  std::int64_t wait_ns = 0;  // > 0 exactly for kWaitForTime
};

// What another process says of its time in flight: predicted to last until `until_ns`. More than a second is no
// best-effort launch's doing but a foreign or damaged word, and counts for nothing.
std::int64_t foreign_in_flight_ns(std::int64_t until_ns, std::int64_t now_ns) noexcept;

// Is a heartbeat no older than `stale_ns`? One from the future (another clock, a damaged word) is not fresh either.
bool is_fresh(std::int64_t beat_ns, std::int64_t now_ns, std::int64_t stale_ns) noexcept;

// Just-in-time submission with strict admission (docs/design.md, Admission): nothing while a latency client is active;
// nor for a moment after, because a request that has been waiting comes right behind the one that is done; else the
// next launch goes in when at most the lead is still in flight, so that the GPU never runs dry and holds one
// best-effort kernel and a few microseconds.
Decision strict(const Snapshot& snapshot) noexcept;

}  // namespace cudasched::schedule
