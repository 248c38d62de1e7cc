#include "arbiter/words.hpp"

#include <unistd.h>

#include <bit>

#include "base/futex.hpp"

namespace cudasched::arbiter {
namespace {

int turn_owner(std::uint64_t turn) noexcept { return static_cast<int>(turn >> kTurnSlotShift) - 1; }

// Slots that anything in the table speaks of.
std::uint64_t slots_in_use(const Layout& layout) noexcept {
  std::uint64_t used = layout.active.load() | layout.latency.load() | layout.best_effort.load() |
                       layout.waiting.load() | layout.memory.requests.load();
  for (int slot = 0; slot < kSlotCount; ++slot) {
    if (layout.slots[static_cast<std::size_t>(slot)].occupied.load() != 0) used |= bit_of(slot);
  }
  const int owner = turn_owner(layout.turn.load());
  return is_slot(owner) ? used | bit_of(owner) : used;
}

void set_bit(std::atomic<std::uint64_t>& word, int slot, bool set) noexcept {
  if (((word.load() & bit_of(slot)) != 0) == set) return;
  if (set) {
    word.fetch_or(bit_of(slot));
  } else {
    word.fetch_and(~bit_of(slot));
  }
}

template <typename T>
void set_word(std::atomic<T>& word, T value) noexcept {
  if (word.load(std::memory_order_relaxed) != value) word.store(value);
}

template <std::size_t N>
void set_text(std::array<char, N>& field, const std::array<char, N>& value) noexcept {
  if (field != value) field = value;
}

}  // namespace

void wake(Layout& layout) noexcept {
  layout.wake_sequence.fetch_add(1);
  futex_wake_all(layout.wake_sequence, Sharing::kShared);
}

// A request for memory began, was answered, or is over.
void wake_memory(Layout& layout) noexcept {
  layout.memory.sequence.fetch_add(1);
  futex_wake_all(layout.memory.sequence, Sharing::kShared);
}

// The gate may have opened. distant_waiters says only that clients of other GPUs wait. The client that wakes them
// clears the word, so that one killed in its sleep costs one wake-up.
void wake_waiters(Layout& layout) noexcept {
  const bool distant = layout.distant_waiters.load() != 0 && layout.distant_waiters.exchange(0) != 0;
  if (distant || layout.waiting.load() != 0) wake(layout);
}

// `occupied` goes last: the next reaper sees the remains of one killed on the way.
void clear_slot(Layout& layout, int slot) noexcept {
  const std::uint64_t others = ~bit_of(slot);
  std::uint64_t turn = layout.turn.load();
  if (turn_owner(turn) == slot) layout.turn.compare_exchange_strong(turn, 0);
  layout.active.fetch_and(others);
  layout.latency.fetch_and(others);
  layout.best_effort.fetch_and(others);
  layout.waiting.fetch_and(others);
  const bool asked = (layout.memory.requests.fetch_and(others) & bit_of(slot)) != 0;
  layout.slots[static_cast<std::size_t>(slot)].occupied.store(0, std::memory_order_release);
  wake_waiters(layout);
  if (asked) wake_memory(layout);
}

namespace {

// Bits that no client of this class has: damage, or left by a client that had just lost its table.
void clear_bits_of_other_classes(Layout& layout, int slot, Class client_class) noexcept {
  const bool holds = client_class != Class::kLatency && (layout.active.load() & bit_of(slot)) != 0;
  if (client_class != Class::kLatency) {
    set_bit(layout.active, slot, false);
    set_bit(layout.latency, slot, false);
  }
  if (client_class != Class::kBestEffort) {
    set_bit(layout.best_effort, slot, false);
    set_bit(layout.waiting, slot, false);
  }
  if (holds) wake_waiters(layout);
}

}  // namespace

void write_client(File& file, int slot) noexcept {
  Layout& layout = *file.layout;
  const Record& record = file.records[static_cast<std::size_t>(slot)];
  Slot& entry = layout.slots[static_cast<std::size_t>(slot)];
  std::array<char, 32> version{};
  copy_text(version, CUDASCHED_VERSION);
  set_word(entry.client_class, static_cast<std::uint32_t>(record.client_class));
  set_word(entry.priority, record.priority.load());
  set_word(entry.pid, static_cast<std::int32_t>(getpid()));
  set_word(entry.hook_attached, record.hook_attached ? 1U : 0U);
  set_word(entry.claimed_ns, record.claimed_ns);
  set_word(entry.slo_ns, record.slo_ns.load());
  set_word(entry.weight_milli, record.weight_milli.load());
  set_word(entry.job, record.job);
  set_text(entry.name, record.name);
  set_text(entry.version, version);
  set_word(entry.occupied, 1U);
  clear_bits_of_other_classes(layout, slot, record.client_class);
  if (record.client_class == Class::kLatency) set_bit(layout.latency, slot, true);
  if (record.client_class == Class::kBestEffort) set_bit(layout.best_effort, slot, true);
}

int reap_dead(File& file, std::uint64_t candidates) noexcept {
  Layout& layout = *file.layout;
  std::uint64_t turn = layout.turn.load();
  if (turn_owner(turn) >= kSlotCount) layout.turn.compare_exchange_strong(turn, 0);  // a damaged file

  for (std::uint64_t rest = slots_in_use(layout) & candidates & ~file.own_slots(); rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const Slot& entry = layout.slots[static_cast<std::size_t>(slot)];
    const std::uint32_t client_class = entry.client_class.load();
    if (entry.occupied.load() == 0 || client_class >= static_cast<std::uint32_t>(kClassCount)) continue;
    clear_bits_of_other_classes(layout, slot, static_cast<Class>(client_class));
  }
  for (std::uint64_t rest = file.own_slots() & candidates; rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    clear_bits_of_other_classes(layout, slot, file.records[static_cast<std::size_t>(slot)].client_class);
  }

  int reaped = 0;
  std::uint64_t left = slots_in_use(layout) & candidates & ~file.own_slots();
  for (; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    if (!try_lock(file.descriptor(), slot_byte(slot))) continue;
    if ((slots_in_use(layout) & bit_of(slot)) != 0) {  // else its owner has just released it
      clear_slot(layout, slot);
      ++reaped;
    }
    unlock(file.descriptor(), slot_byte(slot));
  }
  return reaped;
}

}  // namespace cudasched::arbiter
