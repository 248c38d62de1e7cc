// When does a latency client's next work come? One of these a latency client. Three sources, the surest first: the
// client's hint (expect); periodic arrivals, found on line; or, where a miss probability was stated, the arrivals' rate
// of late.
//
// Periodic: a line is fitted through the last arrivals (a left-out one is allowed for), and each arrival tests the
// line's prediction. Only predictions that have come true of late are told, or those of a line so good that chance does
// not draw it. Best effort waits for a due arrival a while longer than the line is wide. A long kernel that starts just
// before a late arrival costs the request far more than best effort loses by waiting.
// Rate: arrivals as of a Poisson
// process whose rate is known from the last gaps and the silence since. Within `free_ns` the next one comes with the
// miss probability at most. Off by default: where arrivals are memoryless, waiting for a better moment brings none.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock. Times in nanoseconds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "schedule/admission.hpp"

namespace cudasched::schedule {

class Arrivals {
 public:
  static constexpr std::size_t kTimes = 8;                // arrivals that an estimate stands on
  static constexpr int kPredictions = 8;                  // of the last so many predictions,
  static constexpr int kTrue = 6;                         // so many must have come true
  static constexpr int kSilentPeriods = 4;                // after so many without arrival, nothing is foreseen
  static constexpr std::int64_t kReadyAheadNs = 250'000;  // a timer that ends late, and a change of contexts
  static constexpr std::int64_t kShare = 32;  // the part of best effort's time that readiness and late arrivals cost
  static constexpr std::int64_t kLateNs = 1'000'000;  // a late program is waited for so long, if kShare allows
  static constexpr std::int64_t kLongestHintNs = 1'000'000'000;  // a hint further ahead counts as this

  // For Snapshot::free_ns and foreseen_over_ns. `ready_ns`: in how long the client should make the GPU its own for the
  // next arrival. 0: not at all, because the forecast is so loose that best effort would lose much.
  struct Foresight {
    std::int64_t free_ns = Snapshot::kLongAgoNs;
    std::int64_t over_ns = 0;
    std::int64_t ready_ns = 0;
  };

  // `miss_probability`: for the rate, how probable an arrival within free_ns may be; 0: rates are not used. Values
  // outside [0, 1) count as 0.
  explicit Arrivals(double miss_probability = 0) noexcept;

  // Latency work began (a region's entry, or the first launch after idle). Ends the hint.
  void arrived(std::int64_t now_ns) noexcept;

  // The client says that work comes within that time. Best effort is held from now on, until it comes, at most so long.
  void expect(std::int64_t within_ns, std::int64_t now_ns) noexcept;

  // For Snapshot::hint_ns: how long the hint still holds; 0: there is none.
  std::int64_t hint_ns(std::int64_t now_ns) const noexcept;

  Foresight look(std::int64_t now_ns) const noexcept;

  // 0 where the arrivals are not periodic; else the share of the last predictions that came true.
  double confidence() const noexcept;
  std::int64_t period_ns() const noexcept { return periodic() ? static_cast<std::int64_t>(period_ns_) : 0; }

 private:
  bool fitted() const noexcept { return period_ns_ > 0; }
  bool periodic() const noexcept;
  std::int64_t time(std::size_t age) const noexcept { return times_[(next_ + kTimes - 1 - age) % kTimes]; }
  bool fit() noexcept;  // says whether the line is beyond doubt

  std::array<std::int64_t, kTimes> times_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;
  std::int64_t hint_until_ns_ = 0;

  double period_ns_ = 0;        // 0: no line fits
  double phase_ns_ = 0;         // of the line at the last arrival, after it
  std::int64_t window_ns_ = 0;  // how far from the line an arrival may be
  std::uint8_t came_true_ = 0;  // bitmap of the last predictions

  std::array<double, kTimes> rate_factor_{};  // by number of gaps: free_ns / (their sum and the silence since)
};

}  // namespace cudasched::schedule
