// The streams that a latency client has launched on since it was last idle, and whether the streams' work is done. The
// probe asks the driver without an event a launch, which would double a latency launch's cost.
//
// note() is on the launch path: a comparison for a stream that the thread noted last, else a few atomic operations.
// Everything else is called under the process's probe lock, which keeps streams from being destroyed and captures from
// beginning meanwhile. work() never touches a capturing stream and never breaks another thread's capture.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "runtime/classify.hpp"
#include "schedule/activity.hpp"

namespace cudasched::runtime {

class StreamProbe {
 public:
  static constexpr int kMaxStreams = 64;

  // The thread has launched on the stream.
  void note(CUstream stream, ThreadState& thread) noexcept {
    if (thread.noted_stream != stream || !is_noted(thread)) note_anew(stream, thread);
  }
  // Is the stream that the thread noted last still among these?
  bool is_noted(const ThreadState& thread) const noexcept { return thread.noted_epoch == epoch_.load(); }
  void note_anew(CUstream stream, ThreadState& thread) noexcept;

  // Is the work on all of them done? By the ticker, in the context where the client works; or by a thread of the
  // program in its own.
  schedule::Work work(bool by_ticker) const noexcept;

  // Where the client last launched; null: nowhere since it was last idle.
  CUcontext context() const noexcept { return context_.load(std::memory_order_relaxed); }

  // The client is idle.
  void clear() noexcept;
  // Work may be on streams that are not among these.
  void lose_count() noexcept { unaccounted_.store(true, std::memory_order_relaxed); }

  void forget_stream(CUstream stream) noexcept;
  // A context goes. `active`: the client may have work in another one.
  void forget_all(bool active) noexcept;

 private:
  void forget_streams() noexcept;
  schedule::Work work_in_current_context(bool by_ticker) const noexcept;

  std::array<std::atomic<CUstream>, kMaxStreams> streams_{};
  std::atomic<std::uint64_t> epoch_{1};  // changes when noted streams are forgotten
  std::atomic<bool> unaccounted_{false};
  std::atomic<CUcontext> context_{nullptr};
  std::atomic<const ThreadState*> per_thread_owner_{nullptr};  // whose per-thread default stream is among them
};

}  // namespace cudasched::runtime
