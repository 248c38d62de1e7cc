// Weighted fair between best-effort clients, by predicted GPU time. A client's virtual time grows with the client's GPU
// time, more slowly the higher its priority. The client with the least virtual time is next. Each client keeps its own
// virtual time in its slot of the arbiter, so a killed one leaves nothing to mend.
//
// Without MPS one client feeds at a time, and virtual times say which client has the next turn (turn.hpp). Under MPS
// all feed, and may_feed() holds those back that are ahead.
//
// Pure: no clock, no driver, no allocation, no state.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

inline constexpr int kLargestPriority = 8;        // and its negative; priorities beyond count as these
inline constexpr std::int64_t kIdleNs = 300'000;  // without work in flight: a client is idle, if it does not wait

// Is nothing in flight, and has been so for a while? Work in flight is predicted to last until `in_flight_until_ns`.
constexpr bool is_idle(std::int64_t in_flight_until_ns, std::int64_t now_ns) noexcept {
  return in_flight_until_ns < now_ns - kIdleNs;
}

// Weights of shares, in thousandths; those beyond count as these.
inline constexpr std::uint32_t kEvenWeightMilli = 1'000;
inline constexpr std::uint32_t kLeastWeightMilli = 10;
inline constexpr std::uint32_t kMostWeightMilli = 100'000;

// The virtual time that `gpu_ns` of GPU time add for a client with this priority and weight. One step of priority
// doubles a client's share, and its weight multiplies it. Never 0, so that a client that launches moves on.
std::int64_t charge_ns(std::int64_t gpu_ns, std::int32_t priority,
                       std::uint32_t weight_milli = kEvenWeightMilli) noexcept;

struct JoinView {
  int self = 0;
  std::uint64_t others = 0;                  // bitmap: the other best-effort clients of the device
  std::uint64_t at_work = 0;                 // of these, those that wait or are not idle
  const std::int64_t* virtual_ns = nullptr;  // of 64 slots; those of `others` and self are read
};

// The virtual time of a client that joins, or rejoins after it was idle. Idle time is not owed to it, so it starts at
// the least virtual time of the clients at work. Where none is at work, a joining client starts at the largest virtual
// time. So a client that joins next is not far ahead for the time that the first one received while alone.
std::int64_t joined_ns(const JoinView& view) noexcept;

struct FairView {
  static constexpr std::int64_t kQuantumNs = 3'000'000;
  static constexpr std::int64_t kMaxWaitNs = 20'000'000;

  int self = 0;
  std::uint64_t waiting = 0;                 // bitmap: best-effort clients that wait at the gate, heartbeat fresh
  const std::int64_t* virtual_ns = nullptr;  // of 64 slots; those of `waiting` and self are read
  std::int64_t quantum_ns = kQuantumNs;      // how far self may be ahead of the last
  std::int64_t waited_ns = 0;                // for its turn, this launch
  std::int64_t max_wait_ns = kMaxWaitNs;     // then it feeds: one that waits and never goes must not hold the others
};

// Snapshot::my_turn under MPS.
bool may_feed(const FairView& view) noexcept;

}  // namespace cudasched::schedule
