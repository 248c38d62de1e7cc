#include "runtime/stream_use.hpp"

#include <mutex>

#include "runtime/engine.hpp"

namespace cudasched::runtime {

void note_stream_use_of(const queue::Call& call, ThreadState& thread) noexcept {
  Hot& state = hot();
  if (!state.scheduling.load(std::memory_order_relaxed) || call.site.captured) return;
  CUstream const stream = call.stream;
  const Region* const region = thread.innermost();
  if (region != nullptr && region->region_class == Class::kBestEffort) {
    // In a program that is best effort as a whole, every thread is without a mark.
    if (state.process_class.load(std::memory_order_relaxed) == Class::kBestEffort) return;
    const std::uint64_t stamp = region->token + (state.marks.epoch() << 48);
    // A default stream is another one in another context.
    if (thread.marked_stream == stream && thread.marked_stamp == stamp && stream != CU_STREAM_LEGACY) return;
    CUcontext context = nullptr;
    if (driver::table().cuCtxGetCurrent(&context) != CUDA_SUCCESS) return;
    state.marks.mark(StreamMarks::key(stream, context), stream, context, region->token);
    thread.marked_stream = stream;
    thread.marked_stamp = stamp;
    return;
  }
  if (!state.marks.in_use()) return;
  telemetry::Shard& count = state.counters.shard(thread.index);
  const std::uint64_t key = mark_key(stream);
  if (region != nullptr && region->region_class == Class::kLatency) {
    if (state.marks.contest(key)) count.contested_streams.fetch_add(1, std::memory_order_relaxed);
  } else if (call.site.call_class == Class::kNormal && state.marks.marked(key)) {
    count.normal_beside_best_effort.fetch_add(1, std::memory_order_relaxed);
  }
}

void note_record_of(CUevent event, CUstream stream) noexcept {
  Hot& state = hot();
  const ThreadState& thread = this_thread();
  Class bound = Class::kNormal;
  Origin origin = kNoOrigin;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), bound)) {
    origin = bound == Class::kBestEffort ? kBoundOrigin : kNoOrigin;
  } else if (const Region* const region = thread.innermost(); region != nullptr) {
    origin = region->region_class == Class::kBestEffort ? region->token : kNoOrigin;
  } else if (state.marks.in_use()) {
    origin = state.marks.find(mark_key(stream));
  }
  state.event_origins.set(event, origin);
}

void note_wait_of(CUevent event, CUstream stream) noexcept {
  Hot& state = hot();
  // A region's calls have the region's class, and a bound stream keeps its class.
  if (this_thread().depth > 0 || state.process_class.load(std::memory_order_relaxed) == Class::kBestEffort) return;
  Class bound = Class::kNormal;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), bound)) return;
  const Origin origin = state.event_origins.find(event);
  if (origin == kNoOrigin && !state.marks.in_use()) return;
  CUcontext context = nullptr;
  if (is_captured(stream) || driver::table().cuCtxGetCurrent(&context) != CUDA_SUCCESS) return;
  state.marks.inherit(StreamMarks::key(stream, context), stream, context, origin);
}

void note_priority(CUstream stream, int priority) noexcept {
  if (!engine().class_by_stream_priority()) return;
  const auto range = driver::table().cuCtxGetStreamPriorityRange;
  int least = 0;
  int greatest = 0;  // a smaller number
  if (range == nullptr || range(&least, &greatest) != CUDA_SUCCESS || least == greatest) return;
  if (priority < least && priority > greatest) return;
  const Class value = priority >= least ? Class::kBestEffort : Class::kLatency;
  engine().class_by_priority(reinterpret_cast<std::uintptr_t>(stream), value);
}

void forget_stream(CUstream stream) noexcept {
  engine().slices().stream_ends();
  engine().for_each_device([&](Device& device) { device.latency.forget_stream(stream); });
  engine().stream_ends(reinterpret_cast<std::uintptr_t>(stream));
  const std::scoped_lock lock(LatencyActivity::probe_mutex());  // no sweep asks the driver for it meanwhile
  hot().marks.forget(StreamMarks::key(stream, nullptr));
}

void forget_streams_of(CUcontext context) noexcept {
  const std::scoped_lock lock(LatencyActivity::probe_mutex());
  hot().marks.forget_context(context);
  hot().event_origins.clear();
}

void sweep_marks() noexcept {
  if (!hot().marks.in_use()) return;
  const std::scoped_lock lock(LatencyActivity::probe_mutex());
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const driver::RelaxedCapture relaxed;
  hot().marks.sweep([&](CUstream stream, CUcontext context) {
    bool queued = false;
    engine().for_each_device([&](Device& device) {
      queued = queued || (device.queue() != nullptr && device.queue()->before(queue::Scope::kStream, stream) != 0);
    });
    if (queued) return false;
    const driver::CurrentContext current(context);
    if (!current.ok()) return true;
    if (hot().may_capture()) {
      // Asking for the legacy stream while some stream is captured would invalidate the capture.
      if (stream == CU_STREAM_LEGACY || is_captured(stream)) return false;
    }
    return driver::table().cuStreamQuery.legacy(stream) != CUDA_ERROR_NOT_READY;
  });
}

}  // namespace cudasched::runtime
