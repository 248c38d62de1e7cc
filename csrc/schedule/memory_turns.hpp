// Turns of best-effort clients whose memory does not fit together. A client that lacks memory waits until those that
// have had theirs for a turn move some away. Then these lack memory, and wait in their turn.
//
// The client that has waited longest is next, and only that one takes memory. A client that needs more within its turn
// goes before all whose turns are over. Clients that wait give first; then those that run and whose turns are over, the
// oldest turn first. Nobody gives before that is enough. A client that lacks more than the others could give is passed
// over, and keeps what it has for its turn.
//
// Pure: functions over the shared table's words. All clients evaluate these, each for itself.
#pragma once

#include <cstdint>
#include <span>

namespace cudasched::schedule {

struct MemoryClient {
  bool takes_turns = false;        // it lives, and has the setting
  std::uint64_t lacks = 0;         // bytes of the GPU that it waits for; 0: it runs
  std::int64_t since_ns = 0;       // since when it waits
  std::int64_t turn_until_ns = 0;  // when its last turn ends
  std::uint64_t movable = 0;       // bytes on the GPU that it can move away
};

struct MemoryView {
  std::span<const MemoryClient> clients;  // by slot, 64 at most
  std::uint64_t free = 0;                 // of the GPU
  std::int64_t now_ns = 0;
  bool asked = false;  // latency work asks for memory, and goes first: no turn begins, and nothing moves for one
};

// Moved beside the missing bytes, for the driver's own use.
inline constexpr std::uint64_t kSpareBytes = std::uint64_t{256} << 20;
// No turn is believed to last longer, whatever a damaged table says.
inline constexpr std::int64_t kLongestTurnNs = 3'600'000'000'000;
// In place of `since_ns`, of a client that tries to give: others do not give for it.
inline constexpr std::int64_t kStopsNs = INT64_MAX - 1;
inline constexpr std::int64_t kPinsNs = INT64_MAX;  // it pins memory of the host first
// The same, of a client that is taking what it lacks, in its turn: others neither give for it nor take before it.
inline constexpr std::int64_t kTakesNs = 1;

// Could the others' memory be enough for this client?
bool may_have_memory(const MemoryView& view, int self) noexcept;

// Is it for a reason that passes by itself that this client, or the one that is next, waits: latency work that asks,
// turns that are not over, another's pinning? Not: for a client that is to give and cannot be stopped.
bool waits_for_turn(const MemoryView& view, int self) noexcept;

// The slot of the client that is next; -1: none waits.
int next_for_memory(const MemoryView& view) noexcept;

// This client is next, and the memory that it lacks is free.
bool has_memory(const MemoryView& view, int self) noexcept;

// The bytes that this client is to move away now.
std::uint64_t gives_memory(const MemoryView& view, int self) noexcept;

}  // namespace cudasched::schedule
