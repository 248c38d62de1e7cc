#include "runtime/latency/stream_probe.hpp"

#include "driver/driver.hpp"
#include "runtime/hot.hpp"

namespace cudasched::runtime {
namespace {

using schedule::Work;

// Epochs are unique in the process, so that a thread's note never fits another device's activity.
std::uint64_t new_epoch() noexcept {
  static constinit std::atomic<std::uint64_t> next{2};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

void StreamProbe::note_anew(CUstream stream, ThreadState& thread) noexcept {
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
  if (unaccounted) lose_count();
  thread.noted_stream = stream;
  thread.noted_epoch = epoch;
}

Work StreamProbe::work(bool by_ticker) const noexcept {
  if (!by_ticker) return work_in_current_context(false);
  const driver::CurrentContext current(context());
  // Without a context nothing of ours can be on the GPU, unless work is unaccounted for.
  if (!current.ok() && !unaccounted_.load(std::memory_order_relaxed)) return Work::kDone;
  return work_in_current_context(true);
}

Work StreamProbe::work_in_current_context(bool by_ticker) const noexcept {
  if (unaccounted_.load(std::memory_order_relaxed)) return Work::kUnknown;
  const driver::RelaxedCapture relaxed;
  for (const auto& held : streams_) {
    const CUstream stream = held.load(std::memory_order_acquire);
    if (stream == nullptr) continue;
    // A default stream is another one on another thread or in another context.
    if (stream == CU_STREAM_PER_THREAD && (by_ticker || per_thread_owner_.load() != &this_thread())) {
      return Work::kUnknown;
    }
    if ((stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) && !by_ticker) {
      CUcontext here = nullptr;
      if (driver::table().cuCtxGetCurrent(&here) != CUDA_SUCCESS || here != context_.load()) {
        return Work::kUnknown;
      }
    }
    // Asking for the legacy stream while some stream is captured would invalidate the capture.
    if (hot().may_capture()) {
      if (stream == CU_STREAM_LEGACY) return Work::kUnknown;
      CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
      if (driver::table().cuStreamIsCapturing(stream, &capture) != CUDA_SUCCESS) return Work::kUnknown;
      if (capture != CU_STREAM_CAPTURE_STATUS_NONE) continue;
    }
    if (driver::table().cuStreamQuery.legacy(stream) == CUDA_ERROR_NOT_READY) return Work::kRunning;
  }
  return Work::kDone;
}

void StreamProbe::forget_streams() noexcept {
  for (auto& stream : streams_) stream.store(nullptr, std::memory_order_relaxed);
  context_.store(nullptr, std::memory_order_relaxed);
  per_thread_owner_.store(nullptr, std::memory_order_relaxed);
}

void StreamProbe::clear() noexcept {
  forget_streams();
  unaccounted_.store(false, std::memory_order_relaxed);
  epoch_.store(new_epoch());
}

void StreamProbe::forget_stream(CUstream stream) noexcept {
  bool found = false;
  for (auto& held : streams_) {
    CUstream seen = stream;
    found |= held.compare_exchange_strong(seen, nullptr, std::memory_order_acq_rel);
  }
  if (found) epoch_.store(new_epoch(), std::memory_order_release);
}

void StreamProbe::forget_all(bool active) noexcept {
  forget_streams();
  if (active) lose_count();
  epoch_.store(new_epoch(), std::memory_order_release);
}

}  // namespace cudasched::runtime
