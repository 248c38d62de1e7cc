// The last queued operations of streams and events, and the position that a call must wait for: the rules of
// docs/order.md as bookkeeping. Knows no driver, no clock and no thread. Handles are words.
//
// Everything here is called under the queue's lock. Only handles with queued operations need a place. The tables are of
// fixed size; where one is full, the answer is a later position than needed, never an earlier one.
#pragma once

#include <cstdint>

#include "queue/fixed_map.hpp"

namespace cudasched::queue {

// Number of an operation in the ring, from 1; 0: none. An operation is passed when its driver call has returned.
using Position = std::uint64_t;

// How a stream relates to the legacy default stream.
enum class StreamKind : std::uint8_t {
  kBlocking,     // ordered with the legacy stream, both ways
  kNonBlocking,  // not
  kLegacy,       // the legacy default stream itself
  kPerThread,    // a thread's own default stream: blocking, and never queued
};

// The operations that a call depends on.
enum class Scope : std::uint8_t {
  kNothing,
  kStream,          // the stream's last operation; for the legacy stream that of all blocking streams
  kEvent,           // the event's last operation
  kStreamAndEvent,  // both
  kTwoEvents,       // both events'
  kGraph,           // the executable graph's last launch
  kEnd,             // everything
};

class Order {
 public:
  // ---- pushed operations
  void stream_used(std::uint64_t stream, StreamKind kind, Position position) noexcept;
  void event_recorded(std::uint64_t event, Position position) noexcept;
  void event_awaited(std::uint64_t event, Position position) noexcept;
  void event_destroyed(std::uint64_t event, Position position) noexcept;
  void graph_launched(std::uint64_t exec, Position position) noexcept { event_awaited(exec, position); }
  // Everything up to here has been passed; entries of that part are forgotten where room is needed.
  void passed(Position position) noexcept { passed_ = position; }

  // ---- the position that a call waits for; at most `passed`: nothing
  Position of_stream(std::uint64_t stream, StreamKind kind) const noexcept;
  Position of_event(std::uint64_t event) const noexcept;
  Position of_graph(std::uint64_t exec) const noexcept { return of_event(exec); }
  Position end() const noexcept { return end_; }

  // The last queued record: until it is passed, the event is not ready. Waits alone do not change a query's answer.
  Position record_of(std::uint64_t event) const noexcept;

  // The handle is destroyed and may come back for something else. The handle's operations have been passed.
  void forget_stream(std::uint64_t stream) noexcept { streams_.remove(stream); }
  void forget_event(std::uint64_t event) noexcept { events_.remove(event); }
  void forget_streams_and_events() noexcept;  // a context ends

 private:
  struct Event {
    Position last = 0;
    Position record = 0;
  };

  Event* event_at(std::uint64_t event, Position position) noexcept;

  // As many as a ring of Ring::kSlots launches can speak of, each on a stream of its own and recording two events.
  FixedMap<Position, 8192> streams_;  // the last operation
  FixedMap<Event, 16384> events_;     // and executable graphs, which have other handles
  Position passed_ = 0;
  Position end_ = 0;
  Position last_blocking_ = 0;     // on any blocking stream or the legacy one
  Position last_legacy_ = 0;       // on the legacy stream
  Position streams_left_out_ = 0;  // the last operation whose stream found no place
  Position events_left_out_ = 0;
};

// A thread that is about to wait for the ring.
struct Waiter {
  enum class For : std::uint8_t {
    kSynchronise,  // a stream, event or context synchronise, a copy that waits for the device (pageable memory), or a
                   // query that will be repeated
    kLaunch,       // a launch, for room in the ring or for operations before it: the gate may hold it anyway
    kOther,  // anything else: locks may be held meanwhile; PyTorch's allocator frees and records under its own lock
  };
  For what = For::kOther;
  bool latency = false;    // the call is latency or normal work, or the thread is in a latency region
  bool holds_gil = false;  // matters only where the process has latency regions
};

inline constexpr std::size_t kDrainKinds = 3;  // of Waiter::For

// May this wait stand behind a closed gate? If not, the waiter opens the gate up to its position.
constexpr bool may_wait_behind_the_gate(const Waiter& waiter, bool process_has_latency) noexcept {
  if (waiter.latency) return false;
  if (!process_has_latency) return true;
  return waiter.what != Waiter::For::kOther && !waiter.holds_gil;
}

}  // namespace cudasched::queue
