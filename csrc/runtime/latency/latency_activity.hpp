// When is this process's latency client active on a device? From region entry, or from the first launch after idle, to
// the completion of its work (docs/design.md). While it is, best-effort work on the device waits.
//
// before_launch, after_launch and launch_refused are on the launch path: increments and a few comparisons. The first
// launch after idle also sets a bit in the arbiter. The end is noticed where the program notices it: after a call by
// which it synchronised, the streams that it launched on are queried (stream_probe.hpp). The ticker finds the end of
// work that the program never waits for, within a tick. schedule/activity.hpp has the rules.
//
// Three counters make the end safe without a lock on the launch path: launches begun, accepted and refused. A thread
// that finds the streams idle ends the activity only if no launch was accepted since its look began and none is under
// way. A launch that was accepted meanwhile makes the client active again.
//
// Locks: probe_, one for the process, guards the queries against streams being destroyed and captures beginning; never
// taken on the launch path.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "arbiter/table.hpp"
#include "base/clock.hpp"
#include "runtime/classify.hpp"
#include "runtime/hot.hpp"
#include "runtime/latency/context_prewarmer.hpp"
#include "runtime/latency/segments.hpp"
#include "runtime/latency/stream_probe.hpp"
#include "runtime/settings.hpp"
#include "schedule/requests.hpp"

namespace cudasched::runtime {

class LatencyActivity {
 public:
  // The client's place in the arbiter. Once, before the first launch is reported.
  // `mps`: the contexts of several processes are on the GPU at once.
  void register_client(arbiter::Table* table, int slot, const Settings& settings, bool mps) noexcept;
  // The client has another slot now.
  void moved(int slot) noexcept;
  // The client's own, which regions go back to.
  void set_priority(std::int32_t priority) noexcept;
  // This process has a best-effort client too, in the same context.
  void note_own_best_effort(int slot) noexcept { own_best_effort_.store(std::uint64_t{1} << slot); }
  bool registered() const noexcept { return slot_.load(std::memory_order_acquire) >= 0; }
  int slot() const noexcept { return slot_.load(std::memory_order_relaxed); }

  // Of the other clients' requests under way (schedule/neighbours.hpp).
  std::int64_t others_slack_ns() const noexcept;

  // Has this process a latency client, on any device?
  static bool any_registered() noexcept { return any_registered_.load(std::memory_order_relaxed); }
  static void reset_in_child() noexcept { any_registered_.store(false); }

  // Best-effort work is held from here on. `may_time`: events may stand beside the launch.
  LatencySegments::Timing before_launch(CUstream stream = nullptr, bool may_time = false) noexcept {
    begun_.fetch_add(1);
    if (!active_.load()) activate();
    if (prewarmer_.awaits_launch()) prewarmer_.first_launch(now_ns());
    return segments_.before_launch(stream, may_time);
  }

  // The driver has accepted the launch.
  void after_launch(CUstream stream, ThreadState& thread, const LatencySegments::Timing& timing = {}) noexcept {
    segments_.after_launch(timing, stream);
    streams_.note(stream, thread);
    launches_.fetch_add(1);
    if (!streams_.is_noted(thread)) streams_.note_anew(stream, thread);
    if (!active_.load()) activate();
    // A system call for the first launch after a long silence, which has reached the device by now.
    hot().ticker.wake();
  }

  // The driver has refused the launch.
  void launch_refused() noexcept { refused_.fetch_add(1); }

  // Where latency clients enter by deadline, waits for the more urgent ones, for 100 ms at most and without the GIL.
  // Does not wait in a region that is within another one of the thread.
  void enter_region(const Region& region) noexcept;
  // `counts`: the region is to be counted here, on the first of its devices.
  void exit_region(const Region& region, bool counts) noexcept;

  // Latency work is imminent, within that time: best effort is held from now on.
  void expect(std::int64_t within_ns) noexcept;

  // The calling thread has just waited for work of some stream, event or context.
  void on_synchronised() noexcept {
    if (active_.load(std::memory_order_relaxed)) settle(/*by_ticker=*/false, 0);
  }

  // A thread that serves requests waits for work of some stream, event or context from now on; it has.
  void waits() noexcept {
    if (segments_.on() && active_.load(std::memory_order_relaxed)) segments_.waits(now_ns());
  }
  void on_waited() noexcept;

  // By the ticker thread, about every millisecond while active, and at ready_ns().
  void tick(std::int64_t now_ns) noexcept;

  // When the context is to be prewarmed for foreseen work; 0: not at all.
  std::int64_t ready_ns() const noexcept { return gpu_is_anothers() ? requests_.ready_ns() : 0; }

  // Is the client active, or does the arbiter foresee its work?
  bool expected(std::int64_t now_ns) const noexcept;

  // Is the client active, or will it be at any moment?
  bool imminent(std::int64_t now_ns) const noexcept {
    return active() || table_->slot(slot()).hint_until_ns.load(std::memory_order_relaxed) > now_ns;
  }

  bool active() const noexcept { return active_.load(std::memory_order_relaxed); }

  void forget_stream(CUstream stream) noexcept;
  void forget_all_streams() noexcept;
  // A context is about to be destroyed, or was; null: any of the device.
  void forget_context(CUcontext context) noexcept;

  // Of any stream of the process.
  static void capture_begins() noexcept;
  static void capture_ends() noexcept;

  // Around fork, so that the child does not inherit it locked.
  static std::mutex& probe_mutex() noexcept { return probe_; }

 private:
  void activate() noexcept;
  void publish() noexcept;
  void deactivate(std::uint64_t launches_seen, bool forget_streams, bool hangs) noexcept;  // probe_ is held
  void settle(bool by_ticker, std::int64_t now_ns) noexcept;
  schedule::ActivityView view(bool by_ticker, std::int64_t now_ns) const noexcept;  // probe_ is held
  // Is a launch under way? Ended launches are read first, so that a launch that begins meanwhile counts.
  bool launching() const noexcept {
    const std::uint64_t over = launches_.load() + refused_.load();
    return begun_.load() != over;
  }
  void publish_regions() noexcept;                                    // probe_ is held
  void count_activity(std::int64_t now_ns, bool in_region) noexcept;  // probe_ is held
  void count_pending(std::int64_t now_ns) noexcept;                   // probe_ is held
  void write_again() noexcept;
  void wait_for_entry() noexcept;
  // Without MPS, by another process that works while this client is idle.
  bool gpu_is_anothers() const noexcept;

  arbiter::Table* table_ = nullptr;
  static inline constinit std::atomic<bool> any_registered_{false};
  std::atomic<int> slot_{-1};
  std::int64_t max_idle_hold_ns_ = 0;
  std::int64_t stale_heartbeat_ns_ = 0;
  std::int32_t priority_ = 0;  // of the client
  bool by_deadline_ = false;
  bool mps_ = false;
  std::atomic<std::uint64_t> own_best_effort_{0};  // its slot's bit
  schedule::Requests requests_;
  LatencySegments segments_;
  std::atomic<std::uint64_t> region_key_{0};         // the key of the region that begins a request
  std::atomic<std::int64_t> region_deadline_ns_{0};  // and the region's deadline; 0: none
  ContextPrewarmer prewarmer_;                       // under probe_

  std::atomic<bool> active_{false};
  std::atomic<std::int64_t> active_since_ns_{0};  // as the slot has it
  std::atomic<std::uint32_t> regions_{0};
  alignas(64) std::atomic<std::uint64_t> launches_{0};
  std::atomic<std::uint64_t> begun_{0};    // of these and
  std::atomic<std::uint64_t> refused_{0};  // of these
  std::atomic<std::uint64_t> launches_when_idle_{0};
  StreamProbe streams_;

  // The ticker's own.
  std::uint64_t launches_at_tick_ = 0;
  std::int64_t active_since_at_tick_ = 0;
  bool launched_since_last_tick_ = false;

  static inline constinit std::mutex probe_;  // Hot::captures changes under it
  std::int64_t launching_since_ns_ = 0;       // at ticks one after the other; 0: not at the last one; under probe_
  std::int64_t last_launch_ns_ = 0;           // under probe_
  std::array<std::int64_t, 64> deadlines_{};  // of open regions, 0: free; under probe_
  bool had_region_ = false;                   // in the activity under way; under probe_
  // Regions that were left with work on the GPU, and end with that work; under probe_.
  static constexpr std::size_t kMostPending = 16;
  std::array<Region, kMostPending> pending_{};
  std::size_t pending_count_ = 0;
  bool ends_itself_ = true;  // its last end was found where the program synchronised; under probe_
};

}  // namespace cudasched::runtime
