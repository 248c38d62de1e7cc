// Which class a call has, and the marks on the call's streams (docs/order.md, "Which class a call has"). Best-effort
// regions leave marks on streams, and streams inherit marks by waiting for events.
//
// The inline functions are on the launch path: a load or two where no region of class best effort was ever entered.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "driver/driver.hpp"
#include "queue/call.hpp"
#include "runtime/classify.hpp"
#include "runtime/hot.hpp"

namespace cudasched::runtime {

// The slow paths of the functions of these names.
void note_stream_use_of(const queue::Call& call, ThreadState& thread) noexcept;
void note_record_of(CUevent event, CUstream stream) noexcept;
void note_wait_of(CUevent event, CUstream stream) noexcept;

// The program has made the stream with this priority: where priorities say classes, the least is best effort, and the
// greatest latency.
void note_priority(CUstream stream, int priority) noexcept;

// The stream, or all of the context (null: of any), is about to be destroyed.
void forget_stream(CUstream stream) noexcept;
void forget_streams_of(CUcontext context) noexcept;

// The ticker's: takes away the marks of regions that were left and whose work is complete.
void sweep_marks() noexcept;

// As driver::is_capturing(), asking only where some stream of the process may be.
inline bool is_captured(CUstream stream) noexcept { return hot().may_capture() && driver::is_capturing(stream); }

// By which the marks know the stream; 0: they do not.
inline std::uint64_t mark_key(CUstream stream) noexcept {
  CUcontext context = nullptr;
  if (stream == CU_STREAM_LEGACY && driver::table().cuCtxGetCurrent(&context) != CUDA_SUCCESS) return 0;
  return StreamMarks::key(stream, context);
}

// `stream` is the one meant; null for calls that have none.
inline Class classify(CUstream stream, const ThreadState& thread) noexcept {
  Hot& state = hot();
  Class found = Class::kNormal;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), found)) return found;
  if (const Region* const region = thread.innermost()) return region->region_class;
  if (state.marks.in_use() && state.marks.find(mark_key(stream)) != kNoOrigin) return Class::kBestEffort;
  if (!state.by_priority.empty() && state.by_priority.find(reinterpret_cast<std::uintptr_t>(stream), found))
    return found;
  return state.process_class.load(std::memory_order_relaxed);
}

// The class of a call about `event`, or of one without a handle (null): a thread in no region that queries an event
// of best-effort work does so for it.
inline Class classify_event(CUevent event, const ThreadState& thread) noexcept {
  if (const Region* const region = thread.innermost()) return region->region_class;
  Hot& state = hot();
  if (event != nullptr && state.carries_origins.load(std::memory_order_relaxed) &&
      state.event_origins.find(event) != kNoOrigin) {
    return Class::kBestEffort;
  }
  return state.process_class.load(std::memory_order_relaxed);
}

// Before a launch: a best-effort region marks its stream, and latency work contests a mark that is there. Counts normal
// work on a stream that best effort uses.
inline void note_stream_use(const queue::Call& call) noexcept {
  ThreadState& thread = this_thread();
  Hot& state = hot();
  if (thread.depth == 0 && !state.marks.in_use()) [[likely]]
    return;
  note_stream_use_of(call, thread);
}

// The calling thread records `event` on `stream`, or makes `stream` wait for it.
inline void note_record(CUevent event, CUstream stream) noexcept {
  if (hot().carries_origins.load(std::memory_order_relaxed)) note_record_of(event, stream);
}
inline void note_wait(CUevent event, CUstream stream) noexcept {
  if (hot().carries_origins.load(std::memory_order_relaxed)) note_wait_of(event, stream);
}

}  // namespace cudasched::runtime
