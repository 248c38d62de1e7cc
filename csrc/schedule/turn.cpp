#include "schedule/turn.hpp"

#include <algorithm>

#include "schedule/fair.hpp"

namespace cudasched::schedule {
namespace {

constexpr int kSlots = 64;
constexpr int kExpiryBits = 56;
constexpr std::int64_t kIdleUs = kIdleNs / 1'000;

constexpr std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

// The client of `slots`, which are not none, with the least virtual time: of equals the first.
int furthest_behind(std::uint64_t slots, const std::int64_t* virtual_ns) noexcept {
  int found = __builtin_ctzll(slots);
  for (; slots != 0; slots &= slots - 1) {
    const int slot = __builtin_ctzll(slots);
    if (virtual_ns[slot] < virtual_ns[found]) found = slot;
  }
  return found;
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
  const auto offer = [&](int next) { return TurnDecision{false, true, Turn{next, view.now_us}.pack()}; };
  const std::uint64_t others = view.waiting & view.best_effort & ~bit(view.self);
  const bool expired = turn.expiry_us <= view.now_us;
  // An expiry further away was not written by a client of this table. The word may be younger than `now_us`, though.
  const bool runs = !expired && turn.expiry_us <= view.now_us + 2 * view.turn_us;

  if (turn.owner == view.self) {
    if (runs) return {true, false, 0};
    if (others == 0 || view.offered) return take;
    const int next = furthest_behind(others | bit(view.self), view.virtual_ns);
    if (next == view.self && view.turn_used) return take;
    return offer(furthest_behind(others, view.virtual_ns));
  }

  const std::uint64_t owner = turn.owner >= 0 ? bit(turn.owner) & view.best_effort : 0;
  const bool owner_waits = (owner & view.waiting) != 0;
  const bool owner_at_work = owner_waits || (owner != 0 && view.owner_until_us >= view.now_us - kIdleUs);
  if (runs && owner_at_work) return {};
  const auto take_after_grace = [&](std::int64_t since_us) {
    return view.now_us - since_us > TurnView::kGraceUs ? take : TurnDecision{};
  };
  // Offered. That stands, even for a client that is behind: it may have passed the turn on because it hardly feeds.
  if (expired && owner_waits) return take_after_grace(turn.expiry_us);
  const int next = furthest_behind(others | bit(view.self) | (owner_at_work ? owner : 0), view.virtual_ns);
  if (next == view.self) return take;
  if (expired && next == turn.owner) {
    // A prediction that is far too long, or a damaged word, holds no client up for more than a turn.
    const std::int64_t busy_until_us = std::min(view.owner_until_us, turn.expiry_us + view.turn_us);
    return take_after_grace(std::max(turn.expiry_us, busy_until_us));
  }
  return offer(next);
}

}  // namespace cudasched::schedule
