// The work in flight: the launches submitted to a GPU and not complete, as predicted GPU time. One question: how long
// until the GPU has nothing of this client.
//
// Each stream is a queue of segments. A segment is a run of launches with one marker behind the last launch. A marker
// is an event that the caller records. The event's completion completes the segment and all before it on the stream.
// There are kMarkers markers. When all are in use, the ledger merges neighbouring segments (the earlier marker is given
// up), so that any depth on any number of streams stays counted, more coarsely. The kStreams - 1 streams that came
// first have queues of their own. Further streams share the last queue, where a marker speaks for its own segment only.
// Segments of different streams are merged there only where there are more streams than markers.
//
// A segment's first launch runs since it was submitted, or since the segment before it was complete. The time in flight
// shrinks with that clock, and each completion corrects it. The clock counts own time. The clock stands still while the
// GPU is another's (latency work that lets nothing in, another client's turn), and starts anew after latency work that
// let launches in.
//
// Late: a stream's first segment has run for longer than predicted by more than tolerance_ns(). Late time is observed
// own time: time in which latency work is active does not count, nor time in which other streams completed work (the
// GPU ran that work). The time between two looks far apart counts as kMostGapNs (the caller may have lost its core). A
// late segment is taken to run for as long again as it has run, and the segments behind it on the stream stay counted.
// To launches of other streams a late stream counts for nothing: the late segment may be a collective, or another wait
// for such a launch.
//
// Beside latency work that lets launches in, a segment over its time by kSharedLateNs counts for nothing either:
// between time slices it does not run, more work in the same slice costs no further context switch, and the slack of
// the request bounds all of it. In the gaps of latency work such a segment counts: nothing else bounds the work that
// piles up behind it.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock.
#pragma once

#include <array>
#include <cstdint>

namespace cudasched::schedule {

class Ledger {
 public:
  static constexpr int kMarkers = 128;
  static constexpr int kStreams = 64;
  static constexpr int kNone = -1;
  static constexpr std::uint64_t kNoStream = ~std::uint64_t{0};
  static constexpr std::int64_t kMostGapNs = 2'000'000;      // of observed time, between two looks
  static constexpr std::int64_t kToleranceNs = 200'000;      // a segment may be late by this,
  static constexpr std::int64_t kToleranceShare = 4;         // or by one part in so many of its time
  static constexpr std::int64_t kSharedLateNs = 1'000'000;   // beside latency work
  static constexpr std::uint32_t kSeldom = 16;               // launches to a marker, where one is not wanted for each,
  static constexpr std::int64_t kLongSegmentNs = 2'000'000;  // or this much predicted time
  static constexpr std::int64_t kOpenNs = 200'000;    // predicted, of launches that may stay without a marker for now,
  static constexpr std::uint32_t kOpenLaunches = 64;  // or so many launches
  static constexpr std::int64_t kNothingNs = INT64_MAX;

  Ledger() noexcept;

  // Of a segment.
  enum class State : std::uint8_t {
    kFree,
    kOpen,     // no marker is recorded: the next launch joins it, else its predicted time ends it
    kPending,  // a launch of it is on its way to the driver
    kMarked,   // its marker is recorded behind its last launch
  };

  // The segment that a launch joined. `marks`: the segment's marker is to be recorded behind this launch, and
  // submitted() or withdraw() must follow; else the launch counts from now on.
  struct Entry {
    int segment = kNone;
    bool marks = false;
  };

  // The segments that a completion completed: together they took between `least_ns` and `most_ns`.
  struct Completed {
    std::uint32_t launches = 0;
    std::int64_t predicted_ns = 0;
    std::int64_t least_ns = 0;
    std::int64_t most_ns = 0;
  };

  // The owner of the GPU: this client alone, this client beside active latency work whose slack bounds all that goes
  // in, this client in the gaps of latency work, or another.
  enum class Gpu : std::uint8_t { kOwn, kShared, kInGaps, kAnothers };

  // The time is `now_ns`, and completions are looked for. `gpu`: since the last look.
  void look(std::int64_t now_ns, Gpu gpu) noexcept;
  void look(std::int64_t now_ns, bool own) noexcept { look(now_ns, own ? Gpu::kOwn : Gpu::kAnothers); }

  // The next launch of a stream. `mark`: a marker behind this launch; else one where kSeldom launches or kLongSegmentNs
  // have none. Never fails while fewer than half of the segments are pinned or pending; else kNone.
  Entry submit(std::uint64_t stream, std::int64_t predicted_ns, bool mark) noexcept;

  // The last launches of the stream have no marker: the segment whose marker is to be recorded, as if the last of them
  // marked. kNone: they have one.
  int mark(std::uint64_t stream) noexcept;

  // A launch that marks has reached the driver; `recorded`: its marker is behind it. If it is not, the next launch of
  // the stream joins it.
  void submitted(int segment, bool recorded) noexcept;

  // The marker of this segment's last launch may be left out, where it would cost the program something: the next one
  // is not far. Without any marker, predictions alone would give the work in flight.
  bool may_stay_open(int segment) const noexcept {
    const Segment& of = at(segment);
    return of.predicted_ns < kOpenNs && of.launches < kOpenLaunches;
  }

  // A launch that marks was refused by the driver.
  void withdraw(int segment, std::int64_t predicted_ns) noexcept;

  // The segment is not merged with others: it is being timed.
  void pin(int segment, bool pinned) noexcept { segments_[static_cast<std::size_t>(segment)].pinned = pinned; }

  // The marker is complete: so is the segment, with all segments before it on the stream.
  Completed complete(int segment) noexcept;

  // Its predicted time has passed: for open segments, which have no marker.
  bool has_run_out(int segment) const noexcept;

  // Until the GPU has nothing of this client, as a launch of `stream` sees it: late segments of other streams count
  // for nothing. kNoStream: as a launch of none of them.
  std::int64_t remaining_ns(std::uint64_t stream = kNoStream) const noexcept;

  // Work of another stream than this is in flight.
  bool holds_others(std::uint64_t stream) const noexcept;

  // A segment is late.
  bool any_late() const noexcept;

  // Upper limit of remaining_ns(), without a look at the clock.
  std::int64_t submitted_ns() const noexcept { return total_ns_; }

  // Until the next predicted end: 0 where one is due, kNothingNs where nothing is in flight. A late segment is looked
  // at again after an eighth of the time that it has run.
  std::int64_t next_end_ns() const noexcept;

  // How long the first segment of the stream has run beyond its predicted time, as observed, if that is late, else 0.
  std::int64_t late_ns(std::uint64_t stream) const noexcept;
  // The same for a segment: 0 where another one is before it.
  std::int64_t segment_late_ns(int segment) const noexcept;
  // How long the first segment of a stream has been seen to run; 0 where another one is before it.
  std::int64_t segment_ran_ns(int segment) const noexcept;

  std::uint64_t launches() const noexcept { return launches_; }
  std::uint64_t completions() const noexcept { return completions_; }  // segments ever seen complete
  std::int64_t observed_ns() const noexcept { return observed_ns_; }   // observed own time, ever
  int segments() const noexcept { return kMarkers - free_count_; }

  State state(int segment) const noexcept;
  std::uint64_t stream(int segment) const noexcept;
  std::int64_t predicted_ns(int segment) const noexcept {
    return segments_[static_cast<std::size_t>(segment)].predicted_ns;
  }
  std::uint32_t segment_launches(int segment) const noexcept {
    return segments_[static_cast<std::size_t>(segment)].launches;
  }

  // Calls visit(segment) for each segment, stream by stream in order of submission; stops a stream's walk when visit
  // returns false. visit may complete the segment that it is shown.
  template <typename Visit>
  void for_each(Visit&& visit) {
    for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
      const int place = __builtin_ctzll(streams);
      int segment = streams_[static_cast<std::size_t>(place)].first;
      while (segment != kNone) {
        const int next = segments_[static_cast<std::size_t>(segment)].next;
        if (!visit(segment) && place != kShared) break;
        segment = next;
      }
    }
  }

  void clear() noexcept { *this = Ledger{}; }

 private:
  static constexpr int kShared = kStreams - 1;  // the queue of the streams that have none of their own

  struct Segment {
    std::int64_t predicted_ns = 0;
    std::uint32_t launches = 0;  // 0: free
    std::uint16_t pending = 0;
    bool recorded = false;
    bool pinned = false;
    std::int16_t stream = kNone;
    std::int16_t next = kNone;
    std::uint64_t stream_id = 0;
  };
  struct Stream {
    std::uint64_t id = 0;
    std::int64_t queued_ns = 0;  // predicted time of all its segments
    // Since when the first segment is taken to run: on the clock of own time, between these two, and as observed.
    std::int64_t started_ns = 0;
    std::int64_t started_after_ns = 0;
    std::int64_t started_before_ns = 0;
    std::int64_t started_observed_ns = 0;
    std::int64_t done_before_ns = 0;  // done_ns_ at that moment
    std::int16_t first = kNone;
    std::int16_t last = kNone;
    std::uint16_t segments = 0;
  };

  static std::int64_t tolerance_ns(std::int64_t predicted_ns) noexcept;
  Segment& at(int segment) noexcept { return segments_[static_cast<std::size_t>(segment)]; }
  const Segment& at(int segment) const noexcept { return segments_[static_cast<std::size_t>(segment)]; }
  const Stream* find(std::uint64_t stream) const noexcept;
  int place_of(std::uint64_t stream) noexcept;
  int take_segment() noexcept;
  void release(int segment) noexcept;
  void unlink(Stream& stream, int place, int segment) noexcept;
  bool merge_some() noexcept;
  int merge(Stream& stream, bool first_too) noexcept;
  int merge_shared() noexcept;
  bool join(Stream& stream, int before, int segment, int into) noexcept;
  int last_shared(std::uint64_t stream) const noexcept;
  void begin_first(Stream& stream, std::int64_t from_ns, std::int64_t after_ns, std::int64_t before_ns) noexcept;
  std::int64_t ran_ns(const Stream& stream) const noexcept;  // observed, less other streams' work meanwhile
  std::int64_t late_ns(const Stream& stream) const noexcept;
  bool waits_for_latency_work(const Stream& stream) const noexcept;
  std::int64_t first_left_ns(const Stream& stream) const noexcept;
  Completed complete_shared(int segment) noexcept;

  Gpu gpu_ = Gpu::kOwn;             // until the last look
  std::int64_t now_ns_ = 0;         // of the last look; 0: there was none
  std::int64_t own_ns_ = 0;         // own time by then
  std::int64_t own_before_ns_ = 0;  // and by the look before it
  std::int64_t observed_ns_ = 0;
  std::int64_t done_ns_ = 0;  // GPU time of all that was seen complete
  std::int64_t total_ns_ = 0;
  std::uint64_t launches_ = 0;
  std::uint64_t completions_ = 0;
  std::uint64_t busy_ = 0;  // streams with a segment
  int recent_ = 0;          // the stream that was asked for last
  int free_count_ = kMarkers;
  std::array<std::int16_t, kMarkers> free_{};
  std::array<Segment, kMarkers> segments_{};
  std::array<Stream, kStreams> streams_{};
};

}  // namespace cudasched::schedule
