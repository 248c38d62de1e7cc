#include "schedule/memory_turns.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace cudasched::schedule {
namespace {

constexpr int kSlots = 64;

const MemoryClient& client_of(const MemoryView& view, int slot) noexcept {
  return view.clients[static_cast<std::size_t>(slot)];
}

bool waits(const MemoryClient& client) noexcept { return client.takes_turns && client.lacks != 0; }

bool takes(const MemoryClient& client) noexcept { return client.since_ns == kTakesNs; }

bool in_turn(const MemoryClient& client, std::int64_t now_ns) noexcept {
  return now_ns < client.turn_until_ns && client.turn_until_ns - now_ns <= kLongestTurnNs;
}

int slots(const MemoryView& view) noexcept {
  return static_cast<int>(std::min<std::size_t>(view.clients.size(), kSlots));
}

// Of clients that wait, the next ones first.
auto place_of(const MemoryView& view, int slot) noexcept {
  const MemoryClient& client = client_of(view, slot);
  return std::tuple(!in_turn(client, view.now_ns), client.since_ns, slot);
}

// Is the memory of others that `may_give` enough?
template <typename MayGive>
bool suffices(const MemoryView& view, int self, MayGive&& may_give) noexcept {
  const std::uint64_t lacks = client_of(view, self).lacks;
  std::uint64_t bytes = view.free;
  for (int slot = 0; slot < slots(view) && bytes < lacks; ++slot) {
    const MemoryClient& other = client_of(view, slot);
    if (slot != self && other.takes_turns && may_give(other)) bytes += std::min(other.movable, lacks - bytes);
  }
  return bytes >= lacks;
}

}  // namespace

bool may_have_memory(const MemoryView& view, int self) noexcept {
  return suffices(view, self, [](const MemoryClient&) { return true; });
}

bool waits_for_turn(const MemoryView& view, int self) noexcept {
  if (!may_have_memory(view, self)) return false;
  const int next = next_for_memory(view);
  return next < 0 || takes(client_of(view, next)) || !suffices(view, next, [&](const MemoryClient& other) {
           return !in_turn(other, view.now_ns) && other.since_ns != kPinsNs;
         });
}

int next_for_memory(const MemoryView& view) noexcept {
  int next = -1;
  for (int slot = 0; slot < slots(view) && !view.asked; ++slot) {
    if (waits(client_of(view, slot)) && (takes(client_of(view, slot)) || may_have_memory(view, slot)) &&
        (next < 0 || place_of(view, slot) < place_of(view, next))) {
      next = slot;
    }
  }
  return next;
}

bool has_memory(const MemoryView& view, int self) noexcept {
  return next_for_memory(view) == self && view.free >= client_of(view, self).lacks;
}

std::uint64_t gives_memory(const MemoryView& view, int self) noexcept {
  const int next = next_for_memory(view);
  if (next < 0 || next == self || takes(client_of(view, next)) || client_of(view, next).lacks <= view.free) return 0;
  const std::uint64_t missing = client_of(view, next).lacks - view.free;

  std::array<int, kSlots> givers{};
  int count = 0;
  for (int slot = 0; slot < slots(view); ++slot) {
    const MemoryClient& client = client_of(view, slot);
    const bool gives =
        client.takes_turns && (!in_turn(client, view.now_ns) || (client.lacks != 0 && may_have_memory(view, slot)));
    if (slot != next && gives && client.movable != 0) givers[static_cast<std::size_t>(count++)] = slot;
  }
  const std::span all(givers.data(), static_cast<std::size_t>(count));
  std::ranges::sort(all, [&](int one, int other) {
    const MemoryClient& first = client_of(view, one);
    const MemoryClient& second = client_of(view, other);
    if (waits(first) != waits(second)) return waits(first);
    if (waits(first)) return place_of(view, other) < place_of(view, one);
    return std::tuple(first.turn_until_ns, one) < std::tuple(second.turn_until_ns, other);
  });
  std::uint64_t bytes = 0;
  std::size_t enough = 0;
  while (enough < all.size() && bytes < missing) {
    bytes += std::min(client_of(view, all[enough++]).movable, UINT64_MAX - bytes);
  }
  if (bytes < missing) return 0;
  // One that runs, and without which it is enough, runs on.
  std::uint64_t gives = missing + std::min(kSpareBytes, UINT64_MAX - missing);
  for (std::size_t i = enough; i-- > 0;) {
    const MemoryClient& client = client_of(view, all[i]);
    if (!waits(client) && bytes - client.movable >= missing) {
      bytes -= client.movable;
      all[i] = -1;
    }
  }
  for (const int slot : all.first(enough)) {
    if (slot < 0) continue;
    const std::uint64_t part = std::min(client_of(view, slot).movable, gives);
    if (slot == self) return part;
    gives -= part;
  }
  return 0;
}

}  // namespace cudasched::schedule
