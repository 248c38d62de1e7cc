// The predicted GPU time still to run of the launches submitted and not complete. Each stream is a queue with its own
// clock: its first launch runs since it was submitted or since the one before it completed, the others wait. What is
// in flight shrinks with that clock, and is corrected by every completion.
//
// A stream whose first launch is late by straggler_ns, and by a quarter of its time, counts for nothing until it
// completes: it may be a collective or a wait for a value that needs our next launch, which must not be held for its
// sake. Being late because the GPU did other work is not that: after such a time, restart() starts the clocks anew. But
// not for ever: where requests are so dense that the GPU is never free for straggler_ns, a launch that has seen
// kMostRestarts is taken for one.
//
// Pure: no clock, no driver. Not thread-safe: the gate holds a lock.
#pragma once

#include <array>
#include <cstdint>

namespace cudasched::schedule {

class InFlight {
 public:
  static constexpr int kEntries = 64;
  static constexpr int kStreams = 16;
  static constexpr std::int64_t kStragglerNs = 1'000'000;
  static constexpr int kMostRestarts = 8;
  static constexpr std::int64_t kWrongBy = 4;  // a prediction may be by one in so many
  static constexpr int kNone = -1;

  explicit InFlight(std::int64_t straggler_ns = kStragglerNs) noexcept : straggler_ns_(straggler_ns) {}

  // The next launch of a stream; kNone when there is no room (the caller then submits it uncounted).
  int submit(std::uint64_t stream, std::int64_t predicted_ns, std::int64_t now_ns) noexcept;

  // The entry is complete, and with it everything before it on its stream. When it ended was not seen, only that it had
  // not at `running_ns`, at the last look: between the two, what was predicted is believed. A look that comes late
  // would else give the launch behind it its whole time anew.
  void complete(int entry, std::int64_t running_ns, std::int64_t now_ns) noexcept;

  // The launch never reached the device (the driver refused it). Later ones of its stream stay.
  void withdraw(int entry, std::int64_t now_ns) noexcept;

  // The GPU was someone else's until now: what was running has its predicted time before it again.
  void restart(std::int64_t now_ns) noexcept;

  std::int64_t remaining_ns(std::int64_t now_ns) const noexcept;

  // Until the next end that is predicted, of whatever stream: 0 where one is due, kNothingNs where nothing is in
  // flight.
  static constexpr std::int64_t kNothingNs = INT64_MAX;
  std::int64_t next_end_ns(std::int64_t now_ns) const noexcept;

  int count() const noexcept { return count_; }

  // Calls visit(entry) for each entry, stream by stream in order of submission; stops a stream's walk when visit
  // returns false. visit may complete the entry that it is shown.
  template <typename Visit>
  void for_each(Visit&& visit) {
    for (Stream& stream : streams_) {
      int entry = stream.first;
      while (entry != kNone) {
        const int next = entries_[static_cast<std::size_t>(entry)].next;
        if (!visit(entry)) break;
        entry = next;
      }
    }
  }

  void clear() noexcept { *this = InFlight{straggler_ns_}; }

 private:
  struct Entry {
    std::int64_t predicted_ns = 0;
    int stream = kNone;  // kNone: free
    int next = kNone;
  };
  struct Stream {
    std::uint64_t id = 0;
    std::int64_t queued_ns = 0;         // predicted time of all its entries
    std::int64_t first_started_ns = 0;  // since when the first is taken to run
    int restarts = 0;                   // since then
    int first = kNone;                  // kNone: the stream has none
    int last = kNone;
  };

  bool straggles(const Stream& stream, std::int64_t now_ns) const noexcept;
  std::int64_t end_ns(const Stream& stream, std::int64_t running_ns, std::int64_t now_ns) const noexcept;
  void unlink_first(Stream& stream) noexcept;

  std::int64_t straggler_ns_;
  std::array<Entry, kEntries> entries_{};
  std::array<Stream, kStreams> streams_{};
  int count_ = 0;
};

// How long whoever is told to wait for `wait_ns` may sleep over it; 0: not at all. A sleeper wakes late, so the last of
// the wait is spent awake. So is the next end of a launch in flight: a gate that slept through them all would know each
// by its prediction alone, and what predictions are wrong by would add up.
constexpr std::int64_t sleep_ns(std::int64_t wait_ns, std::int64_t next_end_ns) noexcept {
  constexpr std::int64_t kAwakeNs = 200'000;
  constexpr std::int64_t kLongestNs = 1'000'000;
  const std::int64_t asleep_ns = (wait_ns < next_end_ns ? wait_ns : next_end_ns) - kAwakeNs;
  if (asleep_ns < kAwakeNs) return 0;
  return asleep_ns < kLongestNs ? asleep_ns : kLongestNs;
}

}  // namespace cudasched::schedule
