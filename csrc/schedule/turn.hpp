// Which best-effort client feeds the GPU. Without MPS, contexts take turns on the GPU anyway; one feeding at a time
// keeps each one's clock of what is in flight true and saves context switches. The turn is one word of the arbiter, so
// a killed owner cannot keep it: it expires.
//
// Pure: a function from what is seen to what to write. The caller does the compare-and-swap.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

// The turn word: the owner's slot + 1 in the upper 8 bits (0: nobody), expiry in CLOCK_MONOTONIC us in the lower 56.
struct Turn {
  int owner = -1;
  std::int64_t expiry_us = 0;

  static Turn unpack(std::uint64_t word) noexcept;
  std::uint64_t pack() const noexcept;
};

struct TurnView {
  std::uint64_t word = 0;
  int self = 0;
  std::uint64_t best_effort = 0;  // bitmap: best-effort clients on the device, self included
  std::uint64_t waiting = 0;      // bitmap: those that wait at the gate
  bool owner_idle = false;        // the owner has had nothing in flight for a while and does not wait
  std::int64_t now_us = 0;
  std::int64_t turn_us = 3'000;
  const std::int64_t* virtual_ns = nullptr;  // of 64 slots (fair.hpp): the least is next; null: ring order
  bool turn_used = true;                     // with virtual times: the owner fed for half of its turn or more
};

struct TurnDecision {
  bool mine = false;  // after the swap, if there is one
  bool swap = false;  // compare-and-swap `word` to `new_word`; look again if it fails
  std::uint64_t new_word = 0;
};

// Alone: always mine, the word untouched. The owner keeps an unexpired turn, and takes another if nobody waits; else
// the next waiting slot in ring order has it. A turn that is expired or whose owner is idle goes to the next waiting
// slot after the owner; if that one does not take it within half a turn (killed, stopped), to whoever asks.
//
// With virtual times, "next" is the one with the least, and an owner that is behind all who wait takes another turn, if
// it used the last one: one that holds the GPU and hardly feeds it would not advance, and starve the others.
TurnDecision take_turn(const TurnView& view) noexcept;

}  // namespace cudasched::schedule
