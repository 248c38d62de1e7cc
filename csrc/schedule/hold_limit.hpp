// How long a launch may be held because of work in flight. The work in flight may wait for the very launch that is
// held: a collective waits for kernels of other streams, other devices and other processes. So such a hold ends in
// exceptions, one launch at a time:
//
//   kWaitedFor  the first segment of the launch's own stream is late, work of other streams is queued behind the launch
//               (the late segment may wait for that), and nothing was complete for kWaitedForNs: one launch goes, and
//               one more for each further kWaitedForNs. A late segment does not hold launches of other streams in the
//               first place (Ledger::remaining_ns).
//   kBackstop   nothing at all was complete for kBackstopNs, and something is late: one launch goes for each
//               kBetweenNs. After kLongestNs also where nothing is late: a prediction may be far too long.
//
// Time is observed own time (Ledger::observed_ns) since the launch was first held. So neither latency work nor another
// client's turn brings an exception nearer.
//
// Pure: no clock, no driver. Not thread-safe: the caller holds a lock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cudasched::schedule {

enum class Exception : std::uint8_t { kNone, kWaitedFor, kBackstop };

class HoldLimit {
 public:
  static constexpr std::int64_t kWaitedForNs = 10'000'000;
  static constexpr std::int64_t kBackstopNs = 100'000'000;
  static constexpr std::int64_t kBetweenNs = 10'000'000;
  static constexpr std::int64_t kLongestNs = 1'000'000'000;

  struct View {
    std::int64_t observed_ns = 0;     // Ledger::observed_ns()
    std::uint64_t completions = 0;    // Ledger::completions()
    bool any_is_late = false;         // a segment in flight
    bool own_stream_is_late = false;  // the first segment of the held launch's stream
    bool others_queued = false;       // operations of other streams are queued behind it, or that is not known
  };

  // A launch is held for the first time. Another one may have been held until a moment ago, so held time since the last
  // completion still counts.
  void begin(std::int64_t observed_ns) noexcept {
    if (observed_ns - held_ns_ <= kBetweenNs) return;
    completed_ns_ = passed_ns_ = observed_ns;
  }

  // At each look of a launch that is held for the lead alone.
  Exception look(const View& view) noexcept {
    held_ns_ = view.observed_ns;
    if (view.completions != completions_) {
      completions_ = view.completions;
      completed_ns_ = passed_ns_ = view.observed_ns;
    }
    Exception exception = Exception::kNone;
    if (view.own_stream_is_late && view.others_queued && view.observed_ns - passed_ns_ >= kWaitedForNs) {
      exception = Exception::kWaitedFor;
    } else if (view.observed_ns - completed_ns_ >= (view.any_is_late ? kBackstopNs : kLongestNs) &&
               view.observed_ns - passed_ns_ >= kBetweenNs) {
      exception = Exception::kBackstop;
    }
    if (exception != Exception::kNone) passed_ns_ = view.observed_ns;
    return exception;
  }

 private:
  std::int64_t held_ns_ = -kBackstopNs;  // the last look at a held launch
  std::int64_t completed_ns_ = 0;        // since when nothing was complete, and launches were held
  std::int64_t passed_ns_ = 0;           // the last completion or exception
  std::uint64_t completions_ = 0;
};

}  // namespace cudasched::schedule
