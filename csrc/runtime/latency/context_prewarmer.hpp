// Context prewarming. Without MPS the GPU runs one process's context at a time. Changing to another takes 0.13 ms,
// which the first launch of a request would pay. Latency work may be known ahead: by a hint, by a region in which the
// request is prepared, or by a rhythm of requests. Then the prewarmer sets four bytes on a stream of our own, so that
// the GPU changes to the client's context as soon as the GPU is free.
//
// A prewarm costs the host 10 us. A prewarm does not pay where the request's first launch follows the region's entry at
// once: `pays` goes by the last requests' times from entry to launch.
//
// Off the launch path, except first_launch(). Not thread-safe, except first_launch(): the caller holds a lock.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

namespace cudasched::runtime {

class ContextPrewarmer {
 public:
  // A region was entered with which a request begins; a region was left.
  void entered(std::int64_t now_ns) noexcept { entered_ns_.store(now_ns, std::memory_order_relaxed); }
  void left() noexcept { entered_ns_.store(0, std::memory_order_relaxed); }

  // A latency launch is made: is it the request's first?
  bool awaits_launch() const noexcept { return entered_ns_.load(std::memory_order_relaxed) != 0; }
  void first_launch(std::int64_t now_ns) noexcept;

  // Did the first launches of past requests come long enough after their region's entry?
  bool pays() const noexcept { return ahead_ns_.load(std::memory_order_relaxed) >= kPaysNs; }

  // In the calling thread's current context. Does nothing without one, or while a stream is captured.
  void prewarm() noexcept;

  // In the context where the client last worked; for the ticker, which has none of its own.
  void worked_in(CUcontext context) noexcept { worked_in_ = context; }
  void prewarm_last_context() noexcept;

  // This context (null: any) is destroyed, and with it the stream and the memory made there.
  void forget(CUcontext context) noexcept;

 private:
  static constexpr std::int64_t kPaysNs = 100'000;

  bool prepare(CUcontext context) noexcept;

  std::atomic<std::int64_t> entered_ns_{0};  // 0: the request has launched
  std::atomic<std::int64_t> ahead_ns_{0};    // from entry to first launch, a running mean in which the latest is half
  CUcontext worked_in_ = nullptr;
  CUcontext context_ = nullptr;  // the one that is prewarmed until it is destroyed; others are not
  CUstream stream_ = nullptr;
  CUdeviceptr memory_ = 0;
  bool refused_ = false;  // by the driver: not tried again in this context
};

}  // namespace cudasched::runtime
