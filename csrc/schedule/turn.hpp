// Which best-effort client feeds the GPU. Without MPS, contexts take turns on the GPU anyway; one feeding at a time
// keeps each one's clock of the work in flight true and saves context switches. The turn is one word of the arbiter and
// expires, so a killed owner cannot keep the turn.
//
// Pure: a function from a view of the table to the word to write. The caller does the compare-and-swap.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

// The turn word: the owner's slot + 1 in the upper 8 bits (0: none), expiry in CLOCK_MONOTONIC us in the lower 56.
// A turn is offered by naming its next owner with an expiry that has come.
struct Turn {
  int owner = -1;
  std::int64_t expiry_us = 0;

  static Turn unpack(std::uint64_t word) noexcept;
  std::uint64_t pack() const noexcept;
};

struct TurnView {
  static constexpr std::int64_t kGraceUs = 200;  // how long an open turn is left to the client that is next

  std::uint64_t word = 0;
  int self = 0;
  std::uint64_t best_effort = 0;    // bitmap: best-effort clients on the device, self included
  std::uint64_t waiting = 0;        // bitmap: those that wait at the gate, heartbeat fresh
  std::int64_t owner_until_us = 0;  // the owner's work in flight is predicted to last until then
  std::int64_t now_us = 0;
  std::int64_t turn_us = 3'000;
  const std::int64_t* virtual_ns = nullptr;  // of 64 slots (fair.hpp); those of `waiting`, self and the owner are read
  // Of an owner that asks:
  bool offered = false;   // another one named it, and it has not begun its turn
  bool turn_used = true;  // it fed for half of its turn or more
};

struct TurnDecision {
  bool mine = false;  // after the swap, if there is one
  bool swap = false;  // compare-and-swap `word` to `new_word`; look again if it fails
  std::uint64_t new_word = 0;
};

// A client that is alone always has the turn, and the word stays as it is. Else the owner has the turn until it
// expires, or until the owner leaves or is idle (fair.hpp). Then it is open, and the client with the least virtual time
// is next (of equals the first slot): of those that wait, the one that asks, and the owner, if it is at work. The next
// client takes the turn when it asks. Another client that finds the turn open offers the turn to the next one, and
// takes it only where that one has not come within the grace. So one that does not come (killed, stopped, slow) cannot
// keep the GPU idle for longer.
//
// An owner that is next takes another turn, but only if it used the last one. An owner that holds the GPU and hardly
// feeds it would not advance, and starve the others. The owner's grace begins when the owner's work in flight is done:
// the owner may sleep until then.
//
// A swap without `mine` is an offer: the caller wakes those that wait.
TurnDecision take_turn(const TurnView& view) noexcept;

}  // namespace cudasched::schedule
