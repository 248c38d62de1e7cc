// The rest of a segment. A segment is a part of a latency request: from the request's begin, or the return of a call
// that waited for the GPU, to the next such call. After each launch: how much GPU time is still to be launched, and how
// much host time is left until the program waits, without blocked time. The request ends later by the GPU time still
// owed at that wait.
//
// Learned on line from segments of the same kind, by launch number. GPU times are measured a few launches at a time
// (Segments::launch), with the gap before the kernel. Hosts are faster and slower by turns, for some requests or for
// seconds. So the profile keeps the host time left as a share of the segment's host time (the median), and expects the
// next segment to be as quick as the quickest of the last few. A program whose segments turn out otherwise than
// predicted makes the profile forget all, and learn for longer before it is believed again.
//
// known(), left() and gpu_ns() may be called by any thread at any time; the rest by one thread at a time. Pure: no
// clock, no driver, no allocation. 20 KiB.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace cudasched::schedule {

struct TimeLeft {
  std::int64_t gpu_ns = 0;   // still to be launched
  std::int64_t host_ns = 0;  // until the program waits
  bool operator==(const TimeLeft&) const = default;
};

// As one word, so that both are of the same launch. GPU time is rounded up, host time down, to 64 ns.
inline constexpr std::uint64_t kNothingKnown = ~std::uint64_t{0};

constexpr std::uint64_t pack(const TimeLeft& left) noexcept {
  constexpr std::int64_t kMost = 0xffff'fffe;
  const auto gpu = static_cast<std::uint64_t>(std::clamp<std::int64_t>((left.gpu_ns + 63) / 64, 0, kMost));
  const auto host = static_cast<std::uint64_t>(std::clamp<std::int64_t>(left.host_ns / 64, 0, kMost));
  return gpu << 32 | host;
}

constexpr std::optional<TimeLeft> unpack(std::uint64_t word) noexcept {
  if (word == kNothingKnown) return std::nullopt;
  return TimeLeft{static_cast<std::int64_t>(word >> 32) * 64, static_cast<std::int64_t>(word & 0xffff'ffff) * 64};
}

// Is it known that the rest of a segment leaves the GPU idle for so long?
inline bool leaves(std::uint64_t left, std::int64_t idle_ns) noexcept {
  const std::optional<TimeLeft> known = unpack(left);
  return known && known->host_ns - known->gpu_ns >= idle_ns;
}

// So much is worth it that gates that sleep are woken, and where contexts take turns, that the GPU changes them.
inline constexpr std::int64_t kWorthWakingNs = 200'000;
inline constexpr std::int64_t kWorthSwitchingNs = 1'100'000;

// The median of the last few times; 0 while there are none. Fixed memory.
class RecentMedian {
 public:
  static constexpr std::size_t kTimes = 16;

  void add(std::int64_t time_ns) noexcept;
  std::int64_t ns() const noexcept { return median_ns_; }
  std::size_t count() const noexcept { return count_; }

 private:
  std::array<std::int64_t, kTimes> times_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;
  std::int64_t median_ns_ = 0;
};

// The least of the last few times; 0 while there are none. Fixed memory.
class RecentLeast {
 public:
  static constexpr std::size_t kTimes = 8;

  void add(std::int64_t time_ns) noexcept {
    times_[next_] = std::max<std::int64_t>(time_ns, 0);
    next_ = (next_ + 1) % kTimes;
    count_ = std::min(count_ + 1, kTimes);
  }
  std::int64_t ns() const noexcept {
    return count_ == 0 ? 0 : *std::min_element(times_.begin(), times_.begin() + static_cast<std::ptrdiff_t>(count_));
  }

 private:
  std::array<std::int64_t, kTimes> times_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;
};

class SegmentProfile {
 public:
  static constexpr std::size_t kLaunches = 1024;  // a segment with more is not known
  static constexpr int kFewest = 8;               // segments seen before it is believed
  static constexpr int kMost = 1024;              // the same, for one that has misled again and again
  static constexpr int kMostSurprises = 3;        // of the last 8 segments

  // A segment that is over.
  struct PastSegment {
    std::int64_t began_ns = 0;
    std::int64_t waited_ns = 0;  // when the program began to wait
    std::int64_t ended_ns = 0;
    std::size_t launches = 0;
    std::span<const std::int64_t> launched_ns;  // when each was; empty: not noted
    bool clean = true;                          // best effort was kept out
    std::int64_t late_ns = 0;                   // else by how much it was allowed to end later
  };

  bool known() const noexcept { return known_.load(std::memory_order_acquire); }

  // After so many launches; kNothingKnown beyond this kind's usual number of launches.
  std::uint64_t left(std::size_t launched) const noexcept {
    return launched <= kLaunches ? left_[launched].load(std::memory_order_relaxed) : kNothingKnown;
  }

  // The GPU time of the launch of this number.
  std::int64_t gpu_ns(std::size_t number) const noexcept {
    return number < kLaunches ? gpu_ns_[number].load(std::memory_order_relaxed) : 0;
  }

  // The launch of this number was measured, the gap before its kernel included.
  void took(std::size_t number, std::int64_t gpu_ns) noexcept;

  // True: the segment was the last surprise of too many, and all is forgotten.
  bool observe(const PastSegment& seen) noexcept;

  // A clean segment's time; 0: not known.
  std::int64_t median_ns() const noexcept { return clean_.count() >= kFewest ? clean_.ns() : 0; }

  // Of another kind of segment from now on.
  void clear() noexcept;

 private:
  bool surprising(const PastSegment& seen) const noexcept;
  bool usual(std::size_t launches) const noexcept;
  void forget() noexcept;
  void count_launches(std::size_t launches) noexcept;
  void learn_host(const PastSegment& seen) noexcept;
  void publish() noexcept;

  std::atomic<bool> known_{false};
  std::array<std::atomic<std::uint64_t>, kLaunches + 1> left_{};
  std::array<std::atomic<std::uint32_t>, kLaunches> gpu_ns_{};
  std::array<std::uint32_t, kLaunches> measured_ns_{};  // 0: not yet
  std::array<std::uint32_t, kLaunches> host_share_{};   // of a segment's host time, left at this launch: median
  std::array<bool, kLaunches> noted_{};
  std::size_t launches_ = 0;
  std::size_t most_of_shorter_ = 0;  // of the last segments in a row that were shorter,
  int shorter_ = 0;                  // and their number
  int seen_ = 0;
  int needed_ = kFewest;
  std::uint8_t surprises_ = 0;     // of the last 8 segments, a bit each
  RecentLeast host_;               // whole segments, until the program waits
  std::int64_t told_host_ns_ = 0;  // host_'s value at the last publish()
  RecentMedian clean_;
  RecentMedian blocked_;  // how long clean ones waited for the GPU
};

}  // namespace cudasched::schedule
