// Best effort beside host-bound requests, by a gate's looks now and then. The gate sees the rest of each segment and
// the latency work on the GPU. Where contexts take turns, the gate also decides when to close. admission.hpp has the
// rule.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "schedule/admission.hpp"
#include "schedule/segments.hpp"

namespace cudasched::schedule {

// By how much the GPU is done later than the program comes to its wait, if it still has so much on it now.
constexpr std::int64_t late_by_ns(const HostBound& requests, std::int64_t on_gpu_ns) noexcept {
  return on_gpu_ns + requests.left_gpu_ns - requests.left_host_ns;
}

// The segments of all active latency clients, put together for one decision. One that says nothing, or whose segment
// has gone on for far longer than such segments do, makes the whole unknown. Of several, the GPU time adds up; the
// least host time, and the least that any may lose, hold for all.
//
// After each launch a client tells the host time left, without the time of the launch. The host time counts from a
// gate's first look at it. So a program that waits, or is slow, is taken to be later and later.
class SegmentReader {
 public:
  static constexpr std::size_t kClients = 64;

  // A new decision.
  void begin(std::int64_t now_ns) noexcept;
  void add(int client, const Segments::SegmentNews& told) noexcept;
  // Of HostBound: `known` and the times left.
  const HostBound& requests() const noexcept { return requests_; }

 private:
  struct Last {
    std::uint64_t segment = 0;
    std::uint64_t left = kNothingKnown;
    std::int64_t since_ns = 0;
  };

  std::int64_t now_ns_ = 0;
  HostBound requests_;
  std::array<Last, kClients> last_{};
};

// Does the segment that begins leave enough for gates that sleep to be woken?
inline bool worth_waking(std::uint64_t left) noexcept { return leaves(left, kWorthWakingNs); }

// How far the GPU is with the launches of latency clients, in GPU time as expected: positions in all that was ever
// submitted. Each client marks one launch in SegmentProgress::kPeriod.
struct Progress {
  std::int64_t submitted_ns = 0;
  std::int64_t done_ns = 0;      // work before this position is complete
  std::int64_t not_done_ns = 0;  // at the last query of a mark, work from this position on was not complete
};

// A latency client's own view of it: launch by launch, with one mark on its way at a time.
class SegmentProgress {
 public:
  static constexpr std::size_t kPeriod = 16;

  // A segment begins: the program has waited for all that it had submitted.
  void begin(std::int64_t submitted_ns) noexcept {
    done_ns_ = not_done_ns_ = submitted_ns;
    marked_ = false;
  }
  static bool asks(std::size_t number) noexcept { return number % kPeriod == kPeriod - 1; }
  // So much was submitted, the launch that asks included. `complete()`: of the mark under way. True: a mark is to be
  // recorded behind the launch.
  template <typename Complete>
  bool ask(std::int64_t submitted_ns, Complete&& complete) noexcept {
    const bool done = marked_ && complete();
    if (done) done_ns_ = mark_ns_;
    not_done_ns_ = marked_ && !done ? mark_ns_ : submitted_ns;
    return !marked_ || done;
  }
  void marked(std::int64_t submitted_ns) noexcept {
    mark_ns_ = submitted_ns;
    marked_ = true;
  }
  std::int64_t done_ns() const noexcept { return done_ns_; }
  std::int64_t not_done_ns() const noexcept { return not_done_ns_; }

 private:
  std::int64_t done_ns_ = 0;
  std::int64_t not_done_ns_ = 0;
  std::int64_t mark_ns_ = 0;
  bool marked_ = false;
};

// The predicted GPU time of latency work that is submitted and not complete, as a gate finds it that looks now and
// then.
//
//   most_ns    nothing is taken to be done that is not known to be: by a mark of the client, or because the GPU had no
//              best effort meanwhile. Wrong predictions of best effort do not make it less.
//   likely_ns  between two looks, launches are taken to have come evenly, and the GPU to have worked on them in the
//              time in which it did not work on best effort, by prediction; within the marks
class LatencyClock {
 public:
  struct View {
    std::int64_t now_ns = 0;
    Progress latency;                           // of all clients
    std::int64_t best_effort_ns = 0;            // predicted, in flight now
    std::int64_t best_effort_submitted_ns = 0;  // predicted, ever
    std::uint64_t best_effort_launches = 0;     // ever,
    std::uint64_t best_effort_in_flight = 0;    // and not complete
  };

  void look(const View& view) noexcept;
  std::int64_t likely_ns() const noexcept { return likely_ns_; }
  std::int64_t most_ns() const noexcept { return most_ns_; }

 private:
  View before_{};
  bool looked_ = false;
  std::int64_t least_ns_ = 0;
  std::int64_t likely_ns_ = 0;
  std::int64_t most_ns_ = 0;
  std::int64_t done_ns_ = 0;  // of submitted work, surely
};

// Where contexts take turns: best effort has the GPU from the beginning of a segment until the rest of the segment
// needs all the time left. Then the latency client has the GPU to the segment's end: one change of contexts there and
// one back. The gate opens where at least kWorthNs are left. The less a segment may lose, since segments took too long,
// the earlier the gate closes.
class SegmentGate {
 public:
  static constexpr std::int64_t kWorthNs = kWorthSwitchingNs;

  // `inflation`: how much longer a segment may take, 1.03 for 3%.
  explicit SegmentGate(double inflation) noexcept : most_share_(Segments::kMostShare * (inflation - 1)) {}

  // Is a segment worth beginning with, of which so much is left?
  static bool opens_for(std::uint64_t left) noexcept { return leaves(left, kWorthNs); }

  // Asked at each look: is the gate closed in this segment? `segments`: begun, ever. `on_gpu_ns`: of both classes, with
  // the bound of the launch that asks.
  bool closed(std::uint64_t segments, const HostBound& requests, std::int64_t on_gpu_ns) noexcept {
    const std::int64_t late_ns = late_by_ns(requests, on_gpu_ns + guard_ns(requests));
    if (segments != segments_) {
      segments_ = segments;
      closed_ = requests.left_host_ns - requests.left_gpu_ns < kWorthNs;
    }
    closed_ = closed_ ? late_ns > -kWorthNs : late_ns > 0;
    return closed_;
  }

 private:
  std::int64_t guard_ns(const HostBound& requests) const noexcept {
    constexpr double kMost = 1 / Segments::kLeastShare;
    const double times = requests.late_share > 0 ? most_share_ / requests.late_share : kMost;
    return static_cast<std::int64_t>(static_cast<double>(kContextSwitchNs) * std::clamp(times, 1.0, kMost));
  }

  double most_share_;
  std::uint64_t segments_ = ~std::uint64_t{0};
  bool closed_ = false;
};

// One best-effort client's view of the latency clients' gaps, look after look: begin(), add() for each latency client,
// look(). At every look, whether a request is under way or not, or the clock would lose count.
class GapView {
 public:
  // The gate's own client.
  struct Own {
    std::int64_t in_flight_ns = 0;  // predicted GPU time of the work in flight,
    std::int64_t longest_ns = 0;    // at most, of the launch that asks,
    std::int64_t submitted_ns = 0;  // and of all work ever submitted
    std::uint64_t submitted = 0;    // launches, ever,
    std::uint64_t in_flight = 0;    // and not complete
  };

  // `inflation`: see SegmentGate.
  explicit GapView(double inflation = 1) noexcept : gate_(inflation) {}

  void begin(std::int64_t now_ns) noexcept {
    reader_.begin(now_ns);
    clock_view_ = {};
    clock_view_.now_ns = now_ns;
    segments_ = 0;
    active_ = false;
  }
  // `active`: a request of it is under way; else nothing of it is on the GPU.
  void add(int client, const Segments::SegmentNews& told, const Progress& progress, bool active) noexcept {
    const std::int64_t submitted_ns = progress.submitted_ns;
    Progress& all = clock_view_.latency;
    all.submitted_ns += submitted_ns;
    all.done_ns += active ? std::clamp<std::int64_t>(progress.done_ns, 0, submitted_ns) : submitted_ns;
    all.not_done_ns += active ? std::clamp<std::int64_t>(progress.not_done_ns, 0, submitted_ns) : submitted_ns;
    segments_ += told.segment;
    if (active) reader_.add(client, told);
    active_ = active_ || active;
  }
  // Of each request under way.
  bool known() const noexcept { return active_ && reader_.requests().known; }
  // `sliced`: a request is under way in another context, and contexts take turns.
  HostBound look(const Own& own, bool sliced) noexcept;

 private:
  SegmentReader reader_;
  LatencyClock clock_;
  SegmentGate gate_;
  LatencyClock::View clock_view_;
  std::uint64_t segments_ = 0;  // begun, ever
  bool active_ = false;
};

}  // namespace cudasched::schedule
