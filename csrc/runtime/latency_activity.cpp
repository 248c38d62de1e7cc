#include "runtime/latency_activity.hpp"

#include <time.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "base/clock.hpp"
#include "driver/driver.hpp"
#include "runtime/gate.hpp"
#include "runtime/hot.hpp"
#include "schedule/deadline.hpp"

namespace cudasched::runtime {
namespace {

// So long does the ticker leave alone a client that goes on launching.
constexpr std::int64_t kGraceNs = 100 * kNsPerMs;

// Epochs are unique in the process, so that a thread's note never fits another device's activity.
std::uint64_t new_epoch() noexcept {
  static constinit std::atomic<std::uint64_t> next{2};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::int64_t earliest(const std::array<std::int64_t, 64>& deadlines) noexcept {
  std::int64_t first = 0;
  for (const std::int64_t deadline : deadlines) {
    if (deadline != 0 && (first == 0 || deadline < first)) first = deadline;
  }
  return first;
}

}  // namespace

void LatencyActivity::register_client(arbiter::Table* table, int slot, const Settings& settings, bool mps) noexcept {
  table_ = table;
  mps_ = mps;
  max_idle_hold_ns_ = settings.max_idle_hold_ns;
  stale_heartbeat_ns_ = settings.stale_heartbeat_ns;
  priority_ = settings.priority;
  by_deadline_ = settings.earliest_deadline_first;
  requests_.register_client(table, slot, settings);
  slot_.store(slot, std::memory_order_release);
}

void LatencyActivity::note(CUstream stream, ThreadState& thread) noexcept {
  const std::uint64_t epoch = epoch_.load(std::memory_order_acquire);
  bool held_now = false;
  for (auto& held : streams_) {
    CUstream seen = held.load(std::memory_order_relaxed);
    if (seen == nullptr && held.compare_exchange_strong(seen, stream, std::memory_order_acq_rel)) seen = stream;
    if (seen == stream) {
      held_now = true;
      break;
    }
  }
  bool unaccounted = !held_now;
  if (stream == CU_STREAM_PER_THREAD) {
    const ThreadState* owner = nullptr;
    unaccounted |= !per_thread_owner_.compare_exchange_strong(owner, &thread) && owner != &thread;
  }
  if (CUcontext const context = driver::shareable_context(); context != nullptr) {
    CUcontext const before = context_.exchange(context, std::memory_order_relaxed);
    unaccounted |= before != nullptr && before != context;
  } else {
    unaccounted = true;
  }
  if (unaccounted) unaccounted_.store(true, std::memory_order_relaxed);
  thread.noted_stream = stream;
  thread.noted_epoch = epoch;
}

void LatencyActivity::activate() noexcept {
  if (active_.exchange(true)) return;
  requests_.begin(now_ns(), regions_.load(std::memory_order_acquire) != 0);
  publish();
}

bool LatencyActivity::expected(std::int64_t now) const noexcept {
  const arbiter::Slot& self = table_->slot(slot());
  return active_.load() || regions_.load() != 0 || self.hint_until_ns.load() > now ||
         self.foreseen_over_ns.load() > now || self.rate_free_ns.load() > 0 ||
         launches_.load() != launches_when_idle_.load();
}

// Makes the arbiter say what active_ says. Whoever changed active_ calls this; two that do at once may write in either
// order, so each looks again after it has written.
void LatencyActivity::publish() noexcept {
  bool active = false;
  do {
    active = active_.load();
    if (active) {
      table_->set_active(slot(), now_ns());
    } else {
      table_->clear_active(slot());
    }
  } while (active_.load() != active);
}

void LatencyActivity::deactivate(std::uint64_t launches_seen, bool forget_streams, bool lapsed) noexcept {
  const auto on_its_way = [&] { return !lapsed && launching(); };
  if (launches_.load() != launches_seen || on_its_way()) return;
  launches_when_idle_.store(launches_seen, std::memory_order_relaxed);
  if (forget_streams) {
    if (CUcontext const context = context_.load(std::memory_order_relaxed); context != nullptr) {
      prewarmer_.worked_in(context);
    }
    for (auto& stream : streams_) stream.store(nullptr, std::memory_order_relaxed);
    unaccounted_.store(false, std::memory_order_relaxed);
    context_.store(nullptr, std::memory_order_relaxed);
    per_thread_owner_.store(nullptr, std::memory_order_relaxed);
    epoch_.store(new_epoch());
  }
  const std::int64_t now = now_ns();  // before the next activity can begin
  const bool was_active = active_.exchange(false);
  // A launch counted since the check above may have found the client active still, and its stream may have been
  // forgotten. One counted later finds it inactive, and the epoch changed.
  if (launches_.load() != launches_seen) {
    unaccounted_.store(true, std::memory_order_relaxed);
    active_.store(true);
  } else if (!was_active) {
    return;  // a launch that begins now finds it inactive, too
  } else if (on_its_way()) {
    // It may have found the client active still, and will note its stream anew.
    active_.store(true);
  } else {
    requests_.end(now, regions_.load(std::memory_order_acquire) != 0);
  }
  publish();
}

LatencyActivity::Work LatencyActivity::probe(bool by_ticker) noexcept {
  if (unaccounted_.load(std::memory_order_relaxed)) return Work::kUnknown;
  const driver::RelaxedCapture relaxed;
  for (auto& held : streams_) {
    const CUstream stream = held.load(std::memory_order_acquire);
    if (stream == nullptr) continue;
    // A default stream is another one on another thread or in another context.
    if (stream == CU_STREAM_PER_THREAD && (by_ticker || per_thread_owner_.load() != &this_thread())) {
      return Work::kUnknown;
    }
    if ((stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) && !by_ticker) {
      CUcontext context = nullptr;
      if (driver::table().context_get_current(&context) != CUDA_SUCCESS || context != context_.load()) {
        return Work::kUnknown;
      }
    }
    // Asking for the legacy stream while some stream is captured would invalidate the capture.
    if (hot().captures.load(std::memory_order_relaxed) > 0) {
      if (stream == CU_STREAM_LEGACY) return Work::kUnknown;
      CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
      if (driver::table().stream_is_capturing(stream, &capture) != CUDA_SUCCESS) return Work::kUnknown;
      if (capture != CU_STREAM_CAPTURE_STATUS_NONE) continue;
    }
    if (driver::table().stream_query.legacy(stream) == CUDA_ERROR_NOT_READY) return Work::kRunning;
  }
  return Work::kDone;
}

void LatencyActivity::settle(bool by_ticker, std::int64_t now) noexcept {
  const std::scoped_lock lock(probe_);
  // At exit, nothing calls the driver from here once stop() has passed probe_.
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const std::uint64_t seen = launches_.load();
  const bool in_region = regions_.load(std::memory_order_acquire) != 0;
  if (in_region && !by_ticker) return;
  const bool long_quiet = by_ticker && now - last_launch_ns_ > max_idle_hold_ns_;
  if (in_region && !long_quiet) return;

  Work work = Work::kUnknown;
  if (by_ticker) {
    const driver::CurrentContext current(context_.load(std::memory_order_relaxed));
    // Without a context nothing of ours can be on the GPU, but what one took with it is unknown.
    work = current.ok() || unaccounted_.load(std::memory_order_relaxed) ? probe(true) : Work::kDone;
  } else {
    work = probe(false);
  }
  if (work == Work::kRunning || (work == Work::kUnknown && !long_quiet)) return;
  // A launch that does not come back (its thread was ended in the driver, or it waits for best-effort work).
  const bool lapsed = by_ticker && launching_since_ns_ != 0 && now - launching_since_ns_ > max_idle_hold_ns_;
  deactivate(seen, /*forget_streams=*/!in_region, lapsed);
  if (!active_.load()) ends_itself_ = !by_ticker;
}

// What the arbiter says of the regions that are open.
void LatencyActivity::publish_regions() noexcept {
  arbiter::Slot& self = table_->slot(slot());
  self.regions.store(regions_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  self.deadline_ns.store(earliest(deadlines_), std::memory_order_relaxed);
}

// Without MPS, by whoever works while this client has nothing to do.
bool LatencyActivity::gpu_is_anothers() const noexcept {
  const std::uint64_t others = table_->layout().best_effort.load(std::memory_order_relaxed) & ~own_best_effort_.load();
  return !mps_ && others != 0;
}

void LatencyActivity::enter_region(const Region& region) noexcept {
  bool alone = false;
  {
    const std::scoped_lock lock(probe_);
    alone = regions_.fetch_add(1, std::memory_order_acq_rel) == 0 && !active_.load();
    if (region.deadline_ns != 0) {
      const auto free = std::find(deadlines_.begin(), deadlines_.end(), 0);
      if (free != deadlines_.end()) *free = region.deadline_ns;
    }
    publish_regions();
    table_->slot(slot()).heartbeat_ns.store(now_ns(), std::memory_order_relaxed);  // or nobody believes it
    if (region.priority != 0) table_->slot(slot()).priority.store(region.priority, std::memory_order_relaxed);
    requests_.enter(region.slo_ns, alone);
    last_launch_ns_ = now_ns();
  }
  hot().ticker.wake();
  // Within a request nothing waits.
  if (by_deadline_ && latency_regions(this_thread()) <= 1) {
    wait_for_entry();
    const std::scoped_lock lock(probe_);
    last_launch_ns_ = now_ns();  // from when on it may lapse
  }
  activate();
  if (!alone) return;
  // Best effort holds back by now.
  const std::scoped_lock lock(probe_);
  if (prewarmer_.pays() && gpu_is_anothers()) prewarmer_.prewarm();
  prewarmer_.entered(now_ns());
}

void LatencyActivity::exit_region(const Region& region) noexcept {
  {
    const std::scoped_lock lock(probe_);
    const bool last = regions_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (region.deadline_ns != 0) {
      const auto ours = std::find(deadlines_.begin(), deadlines_.end(), region.deadline_ns);
      if (ours != deadlines_.end()) *ours = 0;
    }
    publish_regions();
    prewarmer_.left();
    if (last) table_->slot(slot()).priority.store(priority_, std::memory_order_relaxed);
  }
  on_synchronised();
}

void LatencyActivity::wait_for_entry() noexcept {
  constexpr timespec kPause{0, 50 * kNsPerUs};
  std::optional<GilReleased> released;  // once it is clear that it waits
  const std::int64_t since = now_ns();
  schedule::EntryView view;
  // As a client, by what it says of itself: were two to see each other differently, both might wait.
  const auto entrant = [&](int of) {
    const arbiter::Slot& client = table_->slot(of);
    return schedule::Entrant{of, client.priority.load(std::memory_order_relaxed),
                             client.deadline_ns.load(std::memory_order_relaxed)};
  };
  std::array<schedule::Entrant, arbiter::kSlotCount> others;
  for (std::int64_t reaped = since;;) {
    const std::int64_t now = now_ns();
    std::size_t count = 0;
    std::uint64_t there = 0;
    for (std::uint64_t rest = table_->latency_clients(); rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctzll(rest);
      const arbiter::Slot& client = table_->slot(other);
      if (other == slot() || client.regions.load(std::memory_order_relaxed) == 0) continue;
      if (!schedule::is_fresh(client.heartbeat_ns.load(std::memory_order_relaxed), now, stale_heartbeat_ns_)) continue;
      there |= std::uint64_t{1} << other;
      others[count++] = entrant(other);
    }
    view.self = entrant(slot());
    view.others = std::span(others).first(count);
    view.waited_ns = now - since;
    if (schedule::earliest_deadline_first(view).answer == schedule::Answer::kSubmit) return;
    if (now - reaped > 5 * kNsPerMs) {
      reaped = now;
      table_->reap(there);
    }
    if (!released) released.emplace();
    nanosleep(&kPause, nullptr);
  }
}

void LatencyActivity::expect(std::int64_t within_ns) noexcept {
  {
    const std::scoped_lock lock(probe_);
    const std::int64_t now = now_ns();
    requests_.expect(within_ns, now);
    table_->slot(slot()).heartbeat_ns.store(now, std::memory_order_relaxed);  // or nobody believes it
    if (gpu_is_anothers()) prewarmer_.prewarm();
  }
  hot().ticker.wake();
}

void LatencyActivity::tick(std::int64_t now) noexcept {
  const std::uint64_t launches_now = launches_.load(std::memory_order_acquire);
  const bool launched = launches_now != launches_at_tick_;
  const bool active = active_.load(std::memory_order_acquire);
  const std::int64_t active_since = table_->slot(slot()).active_since_ns.load(std::memory_order_relaxed);
  const bool begun = launched || active_since != active_since_at_tick_;  // something, since the last tick
  active_since_at_tick_ = active_since;
  bool leave_alone = false;
  {
    const std::scoped_lock lock(probe_);
    if (begun) last_launch_ns_ = now;
    launching_since_ns_ = !launching() ? 0 : launching_since_ns_ == 0 ? now : launching_since_ns_;
    leave_alone = begun && ends_itself_ && now - active_since < kGraceNs;
    if (launched) {
      launches_at_tick_ = launches_now;
      table_->slot(slot()).last_launch_ns.store(now, std::memory_order_relaxed);
    }
    if (!active_.load(std::memory_order_relaxed)) {
      if (gpu_is_anothers() && requests_.get_ready(now)) prewarmer_.prewarm_last_context();
      requests_.look_ahead(now);
    }
  }
  if (active) {
    if (!leave_alone) settle(/*by_ticker=*/true, now);
  } else if (launches_now != launches_when_idle_.load(std::memory_order_relaxed)) {
    activate();
  }
}

void LatencyActivity::forget_stream(CUstream stream) noexcept {
  const std::scoped_lock lock(probe_);
  bool found = false;
  for (auto& held : streams_) {
    CUstream seen = stream;
    found |= held.compare_exchange_strong(seen, nullptr, std::memory_order_acq_rel);
  }
  if (found) epoch_.store(new_epoch(), std::memory_order_release);
}

void LatencyActivity::forget_all_streams() noexcept {
  const std::scoped_lock lock(probe_);
  for (auto& stream : streams_) stream.store(nullptr, std::memory_order_relaxed);
  context_.store(nullptr, std::memory_order_relaxed);
  prewarmer_.worked_in(nullptr);
  per_thread_owner_.store(nullptr, std::memory_order_relaxed);
  // A primary context that is released may live on, and other contexts do.
  if (active_.load()) unaccounted_.store(true, std::memory_order_relaxed);
  epoch_.store(new_epoch(), std::memory_order_release);
}

void LatencyActivity::set_priority(std::int32_t priority) noexcept {
  const std::scoped_lock lock(probe_);
  priority_ = priority;
}

void LatencyActivity::forget_context(CUcontext context) noexcept {
  const std::scoped_lock lock(probe_);
  prewarmer_.forget(context);
}

void LatencyActivity::capture_begins() noexcept {
  const std::scoped_lock lock(probe_);
  hot().captures.fetch_add(1, std::memory_order_relaxed);
}

void LatencyActivity::capture_ends() noexcept {
  const std::scoped_lock lock(probe_);
  auto& captures = hot().captures;
  captures.store(std::max(0, captures.load(std::memory_order_relaxed) - 1), std::memory_order_relaxed);
}

}  // namespace cudasched::runtime
