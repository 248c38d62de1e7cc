#include "runtime/latency_activity.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "driver/driver.hpp"
#include "runtime/hot.hpp"

namespace cudasched::runtime {
namespace {

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

void LatencyActivity::register_client(arbiter::Table* table, int slot, std::int64_t max_idle_hold_ns) noexcept {
  table_ = table;
  max_idle_hold_ns_ = max_idle_hold_ns;
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
  CUcontext context = nullptr;
  if (driver::table().context_get_current(&context) == CUDA_SUCCESS && context != nullptr) {
    const CUcontext before = context_.exchange(context, std::memory_order_relaxed);
    unaccounted |= before != nullptr && before != context;
  }
  if (unaccounted) unaccounted_.store(true, std::memory_order_relaxed);
  thread.noted_stream = stream;
  thread.noted_epoch = epoch;
}

void LatencyActivity::activate() noexcept {
  if (!active_.exchange(true)) publish();
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

void LatencyActivity::deactivate(std::uint64_t launches_seen, bool forget_streams) noexcept {
  if (launches_.load() != launches_seen) return;
  launches_when_idle_.store(launches_seen, std::memory_order_relaxed);
  if (forget_streams) {
    for (auto& stream : streams_) stream.store(nullptr, std::memory_order_relaxed);
    unaccounted_.store(false, std::memory_order_relaxed);
    context_.store(nullptr, std::memory_order_relaxed);
    per_thread_owner_.store(nullptr, std::memory_order_relaxed);
    epoch_.store(new_epoch());
  }
  const bool was_active = active_.exchange(false);
  // A launch counted since the check above may have found the client active still, and its stream may have been
  // forgotten. One counted later finds it inactive, and the epoch changed.
  if (launches_.load() != launches_seen) {
    unaccounted_.store(true, std::memory_order_relaxed);
    active_.store(true);
  } else if (!was_active) {
    return;
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
  deactivate(seen, /*forget_streams=*/!in_region);
}

void LatencyActivity::enter_region(std::int64_t deadline_ns) noexcept {
  {
    const std::scoped_lock lock(probe_);
    regions_.fetch_add(1, std::memory_order_acq_rel);
    if (deadline_ns != 0) {
      const auto free = std::find(deadlines_.begin(), deadlines_.end(), 0);
      if (free != deadlines_.end()) *free = deadline_ns;
    }
    auto& slot_state = table_->slot(slot());
    slot_state.regions.store(regions_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    slot_state.deadline_ns.store(earliest(deadlines_), std::memory_order_relaxed);
    last_launch_ns_ = now_ns();
  }
  activate();
}

void LatencyActivity::exit_region(std::int64_t deadline_ns) noexcept {
  {
    const std::scoped_lock lock(probe_);
    regions_.fetch_sub(1, std::memory_order_acq_rel);
    if (deadline_ns != 0) {
      const auto ours = std::find(deadlines_.begin(), deadlines_.end(), deadline_ns);
      if (ours != deadlines_.end()) *ours = 0;
    }
    auto& slot_state = table_->slot(slot());
    slot_state.regions.store(regions_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    slot_state.deadline_ns.store(earliest(deadlines_), std::memory_order_relaxed);
  }
  on_synchronised();
}

void LatencyActivity::tick(std::int64_t now) noexcept {
  const std::uint64_t launches_now = launches_.load(std::memory_order_acquire);
  {
    const std::scoped_lock lock(probe_);
    if (launches_now != launches_at_tick_) {
      launches_at_tick_ = launches_now;
      last_launch_ns_ = now;
      table_->slot(slot()).last_launch_ns.store(now, std::memory_order_relaxed);
    }
  }
  if (active_.load(std::memory_order_acquire)) {
    settle(/*by_ticker=*/true, now);
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
  per_thread_owner_.store(nullptr, std::memory_order_relaxed);
  // A primary context that is released may live on, and other contexts do.
  if (active_.load()) unaccounted_.store(true, std::memory_order_relaxed);
  epoch_.store(new_epoch(), std::memory_order_release);
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
