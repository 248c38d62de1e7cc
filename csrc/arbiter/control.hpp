// How another process changes a running client. One word in the client's slot carries one change of one setting at a
// time from a controller to the client's ticker. The same word carries the outcome back.
//
//   free or over --(a controller)--> asked --(the client)--> taken --(the client)--> over, with the outcome
//                                    asked --(the controller, which has waited enough)--> over, withdrawn
//                                                           over --(the controller, which has read it)--> free
//
// Each step replaces the whole word by compare-and-swap, so that a process killed at any instruction leaves a valid
// word. A controller is never told that a change was withdrawn when the client made it. Two controllers do not disturb
// each other. The second waits until the first one's change is over and its outcome was read, or stayed unread so long
// that the controller is gone. The number in the word differs for each change and each owner of the slot, so that no
// change reaches the wrong client.
//
// Permission is that of the table's file. Nothing here is on the launch path. The functions on words are lock-free and
// make no system call; change() sleeps and asks for locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace cudasched::arbiter {

class Table;

// The settings that can be changed. Values are 32 bits: a Class, a priority, thousandths, a place in
// schedule::policies(), MiB (0: no limit), a trace's length in ms (0: end), 1 or 0 for parked. New settings are added
// at the end.
enum class Setting : std::uint8_t {
  kClass = 0,
  kPriority = 1,
  kWeight = 2,
  kPolicy = 3,
  kMemoryLimit = 4,
  kTrace = 5,
  kParked = 6,
};

enum class Outcome : std::uint8_t {
  kNone = 0,
  kApplied = 1,
  kUnknown = 2,      // the client knows no such setting or value
  kRegions = 3,      // its regions decide its class
  kPolicyHangs = 4,  // its own policy does not answer, and cannot be replaced
  kWithdrawn = 5,    // the client did not take the change up in time; nothing was changed
  // Said by change() alone:
  kNoClient = 6,  // there is none of that number
  kEnded = 7,     // it ended before it answered
  kBusy = 8,      // another controller's change was not over in time
  kUnclear = 9,   // the client took the change up and was stopped before it answered
  // And again by the client:
  kHoldsMore = 10,  // of memory, than the limit would be
  kTraced = 11,     // the client is being traced already
  kNoTrace = 12,    // there is no room for a trace, or its directory cannot be written to
};

struct Change {
  Setting setting = Setting::kClass;
  std::int32_t value = 0;
};

namespace control {

enum class State : std::uint8_t { kFree = 0, kAsked = 1, kTaken = 2, kOver = 3 };

struct Word {
  std::uint16_t number = 0;
  State state = State::kFree;
  Outcome outcome = Outcome::kNone;
  Change change;

  static Word unpack(std::uint64_t word) noexcept;
  std::uint64_t pack() const noexcept;
};

// The slot has a new owner: requests to the last one are void. Called after all writes that name the new owner.
void renew(std::atomic<std::uint64_t>& word) noexcept;

// By a controller. `seen`: the word from before the controller verified the slot's owner. The number of the request;
// none: another change is under way, or the word is not as seen.
std::optional<std::uint16_t> ask(std::atomic<std::uint64_t>& word, std::uint64_t seen, const Change& change) noexcept;

// By the controller that asked. None: not over yet. kEnded: the word speaks of something else by now.
std::optional<Outcome> answer(const std::atomic<std::uint64_t>& word, std::uint16_t number) noexcept;

// By the controller that asked. False: the client has taken the change up.
bool withdraw(std::atomic<std::uint64_t>& word, std::uint16_t number) noexcept;

// By the client, one thread at a time. `apply(change)` returns the outcome, or none where the client cannot tell yet:
// the next call asks again. A word that says taken is damaged, because no word is in that state between two calls.
template <typename Ready, typename Apply>
void serve(std::atomic<std::uint64_t>& word, Ready&& ready, Apply&& apply) noexcept {
  std::uint64_t seen = word.load(std::memory_order_acquire);
  Word said = Word::unpack(seen);
  if (said.state == State::kFree || said.state == State::kOver) [[likely]]
    return;
  if (said.state == State::kAsked) {
    if (!ready()) return;
    said.state = State::kTaken;
    if (!word.compare_exchange_strong(seen, said.pack(), std::memory_order_acq_rel)) return;  // withdrawn
    said.outcome = apply(said.change);
  } else {
    said.outcome = Outcome::kUnknown;
  }
  said.state = State::kOver;
  word.store(said.pack(), std::memory_order_release);
}

}  // namespace control

// Changes one setting of the client whose process has this number (SharedCounts::process), and waits for the client's
// answer. Makes system calls, allocates nothing. Where the table is lost: kNoClient.
Outcome change(Table& table, std::uint64_t process, const Change& change, std::int64_t timeout_ns) noexcept;

}  // namespace cudasched::arbiter
