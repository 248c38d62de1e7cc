#include "schedule/turn.hpp"

namespace cudasched::schedule {
namespace {

constexpr int kSlots = 64;
constexpr int kExpiryBits = 56;

constexpr std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

// The first slot of `slots` after `from` in ring order, or -1.
int next_after(std::uint64_t slots, int from) noexcept {
  for (int step = 1; step <= kSlots; ++step) {
    const int slot = (from + step) % kSlots;
    if ((slots & bit(slot)) != 0) return slot;
  }
  return -1;
}

// Who of `slots` is next: the one with the least virtual time, or by ring order where there are none or they are equal.
int next_of(const TurnView& view, std::uint64_t slots, int from) noexcept {
  if (view.virtual_ns == nullptr) return next_after(slots, from);
  std::uint64_t least = 0;
  std::int64_t least_ns = 0;
  for (std::uint64_t rest = slots; rest != 0; rest &= rest - 1) {
    const int slot = __builtin_ctzll(rest);
    const std::int64_t virtual_ns = view.virtual_ns[slot];
    if (least == 0 || virtual_ns < least_ns) {
      least = 0;
      least_ns = virtual_ns;
    }
    if (virtual_ns == least_ns) least |= bit(slot);
  }
  return next_after(least, from);
}

}  // namespace

Turn Turn::unpack(std::uint64_t word) noexcept {
  const int owner = static_cast<int>(word >> kExpiryBits) - 1;
  return {owner < kSlots ? owner : -1, static_cast<std::int64_t>(word & ((std::uint64_t{1} << kExpiryBits) - 1))};
}

std::uint64_t Turn::pack() const noexcept {
  return static_cast<std::uint64_t>(owner + 1) << kExpiryBits |
         (static_cast<std::uint64_t>(expiry_us) & ((std::uint64_t{1} << kExpiryBits) - 1));
}

TurnDecision take_turn(const TurnView& view) noexcept {
  if ((view.best_effort & ~bit(view.self)) == 0) return {true, false, 0};

  const Turn turn = Turn::unpack(view.word);
  const TurnDecision take{true, true, Turn{view.self, view.now_us + view.turn_us}.pack()};
  if (turn.owner < 0) return take;
  // An expiry further away than a turn was not written by a client of this table.
  const bool valid = view.now_us < turn.expiry_us && turn.expiry_us <= view.now_us + view.turn_us;

  const std::uint64_t others_waiting = view.waiting & view.best_effort & ~bit(turn.owner);
  if (turn.owner == view.self) {
    if (valid) return {true, false, 0};
    const int next = next_of(view, others_waiting, view.self);
    if (next < 0) return take;
    const bool behind = view.virtual_ns != nullptr && view.virtual_ns[view.self] < view.virtual_ns[next];
    if (behind && view.turn_used) return take;
    return {false, true, Turn{next, view.now_us + view.turn_us}.pack()};
  }

  const bool owner_gone = (view.best_effort & bit(turn.owner)) == 0;
  if (valid && !view.owner_idle && !owner_gone) return {};
  const bool long_expired = !valid && view.now_us - turn.expiry_us > view.turn_us / 2;
  if (long_expired || owner_gone || next_of(view, others_waiting | bit(view.self), turn.owner) == view.self)
    return take;
  return {};
}

}  // namespace cudasched::schedule
