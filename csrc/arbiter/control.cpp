#include "arbiter/control.hpp"

#include <algorithm>

#include "arbiter/table.hpp"
#include "arbiter/table_file.hpp"
#include "base/clock.hpp"
#include "base/sleep.hpp"

namespace cudasched::arbiter {
namespace control {
namespace {

constexpr int kSettingShift = 32;
constexpr int kStateShift = 40;
constexpr int kOutcomeShift = 44;
constexpr int kNumberShift = 48;

}  // namespace

Word Word::unpack(std::uint64_t word) noexcept {
  Word said;
  said.number = static_cast<std::uint16_t>(word >> kNumberShift);
  said.state = static_cast<State>(word >> kStateShift & 3);
  said.outcome = static_cast<Outcome>(word >> kOutcomeShift & 15);
  said.change.setting = static_cast<Setting>(word >> kSettingShift & 255);
  said.change.value = static_cast<std::int32_t>(static_cast<std::uint32_t>(word));
  return said;
}

std::uint64_t Word::pack() const noexcept {
  return std::uint64_t{number} << kNumberShift | static_cast<std::uint64_t>(outcome) << kOutcomeShift |
         static_cast<std::uint64_t>(state) << kStateShift |
         static_cast<std::uint64_t>(change.setting) << kSettingShift | static_cast<std::uint32_t>(change.value);
}

void renew(std::atomic<std::uint64_t>& word) noexcept {
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  Word fresh;
  do {
    fresh.number = static_cast<std::uint16_t>(Word::unpack(seen).number + 1);
  } while (!word.compare_exchange_weak(seen, fresh.pack(), std::memory_order_acq_rel));
}

std::optional<std::uint16_t> ask(std::atomic<std::uint64_t>& word, std::uint64_t seen, const Change& change) noexcept {
  Word said = Word::unpack(seen);
  if (said.state == State::kAsked || said.state == State::kTaken) return std::nullopt;
  said = {static_cast<std::uint16_t>(said.number + 1), State::kAsked, Outcome::kNone, change};
  if (!word.compare_exchange_strong(seen, said.pack(), std::memory_order_acq_rel)) return std::nullopt;
  return said.number;
}

std::optional<Outcome> answer(const std::atomic<std::uint64_t>& word, std::uint16_t number) noexcept {
  const Word said = Word::unpack(word.load(std::memory_order_acquire));
  if (said.number != number) return Outcome::kEnded;
  if (said.state == State::kOver) return said.outcome;
  return said.state == State::kFree ? std::optional(Outcome::kEnded) : std::nullopt;
}

bool withdraw(std::atomic<std::uint64_t>& word, std::uint16_t number) noexcept {
  std::uint64_t seen = word.load(std::memory_order_acquire);
  Word said = Word::unpack(seen);
  if (said.number != number || said.state != State::kAsked) return false;
  said.state = State::kOver;
  said.outcome = Outcome::kWithdrawn;
  return word.compare_exchange_strong(seen, said.pack(), std::memory_order_acq_rel);
}

}  // namespace control

namespace {

constexpr std::int64_t kLookNs = 2 * kNsPerMs;
constexpr std::int64_t kUnclearNs = kNsPerSecond;  // for an answer to a change that was taken up
// How long an outcome waits for its controller, which may have been killed.
constexpr std::int64_t kUnreadNs = 250 * kNsPerMs;

// A slot of a living process with that number.
int find_slot(Table& table, std::uint64_t process) noexcept {
  for (int slot = 0; slot < kSlotCount; ++slot) {
    if (table.slot(slot).occupied.load() == 0 || table.counts(slot).process() != process) continue;
    if (table.alive(slot)) return slot;
  }
  return -1;
}

// The controller knows the outcome: the next one need not wait. Does nothing where the word has another change.
void note_read(std::atomic<std::uint64_t>& word, std::uint16_t number) noexcept {
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  control::Word said = control::Word::unpack(seen);
  if (said.number != number || said.state != control::State::kOver) return;
  said.state = control::State::kFree;
  word.compare_exchange_strong(seen, said.pack(), std::memory_order_relaxed);
}

// Of a change that was not answered.
Outcome give_up(Table& table, int slot, std::uint16_t number) noexcept {
  auto& word = table.slot(slot).control;
  if (control::withdraw(word, number)) return Outcome::kWithdrawn;
  for (const std::int64_t until_ns = now_ns() + kUnclearNs; now_ns() < until_ns; sleep_ns(kLookNs)) {
    if (const auto outcome = control::answer(word, number)) return *outcome;
    if (!table.alive(slot)) return Outcome::kEnded;
  }
  return control::answer(word, number).value_or(Outcome::kUnclear);
}

}  // namespace

Outcome change(Table& table, std::uint64_t process, const Change& change, std::int64_t timeout_ns) noexcept {
  const std::int64_t until_ns = now_ns() + timeout_ns;
  std::optional<std::uint16_t> number;
  int slot = -1;
  std::uint64_t unread = 0;  // another controller's unread outcome, and since when
  std::int64_t unread_since_ns = 0;
  while (!number) {
    slot = table.check() && process != 0 ? find_slot(table, process) : -1;
    if (slot < 0) return Outcome::kNoClient;
    const std::uint64_t seen = table.slot(slot).control.load(std::memory_order_acquire);
    if (table.counts(slot).process() != process) continue;  // the process has just ended
    const std::int64_t now = now_ns();
    if (seen != unread) unread_since_ns = now;
    unread = seen;
    const bool left_to_another =
        control::Word::unpack(seen).state == control::State::kOver && now - unread_since_ns < kUnreadNs;
    if (!left_to_another) number = control::ask(table.slot(slot).control, seen, change);
    if (number) break;
    if (now >= until_ns + (left_to_another ? kUnreadNs : 0)) return Outcome::kBusy;
    sleep_ns(kLookNs);
  }
  while (true) {
    if (const auto outcome = control::answer(table.slot(slot).control, *number)) {
      note_read(table.slot(slot).control, *number);
      return *outcome;
    }
    if (!table.check() || !table.alive(slot)) return Outcome::kEnded;
    if (now_ns() >= until_ns) {
      const Outcome outcome = give_up(table, slot, *number);
      note_read(table.slot(slot).control, *number);
      return outcome;
    }
    sleep_ns(kLookNs);
  }
}

}  // namespace cudasched::arbiter
