// Tells the gates of best-effort clients the rest of this client's requests, so that best effort may run in the gaps
// that the host leaves on the GPU. Publishes the segments that schedule/segments.hpp learns, through the client's slot.
// Only under the policies `harvest` and, for requests with a target, `slack`; else nothing here costs more than a load.
//
// before_launch and after_launch are on the launch path: two atomic additions, two stores and the profile's words. In
// one segment of 17 they look at the clock, and in a few clean segments they record two timing events around one launch
// of eight. Where best effort may run, one launch of 16 queries an event and records it anew: a mark of the GPU's
// progress. A segment on several streams has none. begin() is on the launch path, too, and gives up rather than wait
// for a lock. waits() and waited() stand around the calls by which a program waits for the GPU. Timings are read at the
// end of a segment.
//
// Locks: lock_, for the segments' bookkeeping; taken by begin() only where it is free. Events belong to the context in
// which they were made; launches of others are not timed.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "arbiter/table.hpp"
#include "base/clock.hpp"
#include "base/spin_lock.hpp"
#include "runtime/settings.hpp"
#include "schedule/host_bound.hpp"
#include "schedule/segments.hpp"

namespace cudasched::runtime {

class LatencySegments {
 public:
  // A launch between before_launch() and after_launch().
  struct Timing {
    int timer = -1;
    std::int64_t called_ns = 0;
    bool marks = false;            // a mark is to follow the launch,
    std::int64_t position_ns = 0;  // at this place in all that was submitted (schedule::Progress)
  };

  // Once, before anything else. Allocates where the policy asks for it.
  void join(arbiter::Table* table, int slot, const Settings& settings);
  void moved(int slot) noexcept { slot_.store(slot, std::memory_order_relaxed); }
  bool on() const noexcept { return on_.load(std::memory_order_acquire); }

  // A request begins. `key`: common to like requests, of one latency target. `sliced`: best effort of another context
  // takes turns with the request on the GPU. `target`: for `slack`; the margin is filled in.
  void begin(std::uint64_t key, std::int64_t now_ns, bool sliced, schedule::Segments::Target target = {}) noexcept;

  // Where contexts take turns: is best effort to have the GPU at the beginning of the segment under way?
  bool lets_in() noexcept {
    return on() && slot().segment_late_ns.load(std::memory_order_relaxed) > 0 &&
           schedule::SegmentGate::opens_for(slot().segment_left.load(std::memory_order_relaxed));
  }

  // `may_time`: events may stand before and behind the launch.
  Timing before_launch(CUstream stream, bool may_time) noexcept {
    if (!on()) [[likely]]
      return {};
    return tell_launch(stream, may_time);
  }
  void after_launch(const Timing& timing, CUstream stream) noexcept {
    if (timing.timer >= 0) end_timer(timing, stream);
    if (timing.marks) mark(timing, stream);
  }

  // The program waits for the GPU from now on; it has. `context`: the calling thread's, null where it has none.
  void waits(std::int64_t now_ns) noexcept {
    if (on()) segments_->waits(now_ns);
  }
  void waited(std::int64_t now_ns, CUcontext context) noexcept;

  // The request is over.
  void end(std::int64_t now_ns, CUcontext context) noexcept;
  // The request was not the only one: its own time is not known.
  void lose() noexcept;

  // Before a context is destroyed, or may be: destroys the events. The next segment that wants events makes new ones.
  void forget_events() noexcept;

 private:
  static constexpr int kTimers = schedule::SegmentProfile::kLaunches / schedule::Segments::kTimedPeriod;

  struct Timer {
    CUevent start = nullptr;
    CUevent end = nullptr;
    std::atomic<std::uint64_t> segment{0};  // in which it was used last; 0: in none, or not to its end
    std::size_t number = 0;
    std::int64_t call_ns = 0;  // of the launch call, where the GPU waited for it
  };

  Timing tell_launch(CUstream stream, bool may_time) noexcept;
  void end_timer(const Timing& timing, CUstream stream) noexcept;
  void mark(const Timing& timing, CUstream stream) noexcept;
  void read_timers() noexcept;
  void make_timers(CUcontext context) noexcept;
  void destroy_timers() noexcept;
  void publish(const schedule::Segments::SegmentNews& told) noexcept;
  void count() noexcept;
  arbiter::Slot& slot() noexcept { return table_->slot(slot_.load(std::memory_order_relaxed)); }

  arbiter::Table* table_ = nullptr;
  std::atomic<int> slot_{-1};
  std::atomic<bool> on_{false};
  bool by_target_ = false;  // the policy is `slack`
  std::int64_t margin_ns_ = 0;
  std::unique_ptr<schedule::Segments> segments_;
  SpinLock lock_;
  schedule::Segments::Counts counted_;
  std::atomic<std::uint64_t> segment_{0};  // the one under way
  std::atomic<CUcontext> context_{nullptr};
  std::atomic<std::int64_t> segment_position_ns_{0};  // where it began
  std::atomic<CUstream> stream_{nullptr};             // of its first launch,
  std::atomic<bool> several_streams_{false};          // and others have other ones
  std::atomic<bool> marking_{false};                  // a thread does; it owns the next three
  schedule::SegmentProgress marks_;
  std::uint64_t marks_segment_ = 0;
  CUevent mark_ = nullptr;
  std::atomic<int> timers_used_{0};
  std::array<Timer, kTimers> timers_{};
};

}  // namespace cudasched::runtime
