// A foothold on the GPU for work that is still to come. Without MPS the GPU has one process's context at a time, and
// changing to another takes 0.13 ms: the first launch of a request pays that. Where it is known ahead that work comes
// (a hint, a region in which the request is prepared, a rhythm of requests) it can be paid by then: four bytes are set,
// on a stream of our own, which makes the GPU change to the client's context as soon as it is free.
//
// Not worth its 10 us on the host where the request's launch follows at once: `worth` says how long after its region's
// entry it came of late.
//
// Not on the launch path, but for first_launch(). Not thread-safe: the caller holds a lock, but for first_launch().
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

namespace cudasched::runtime {

class Foothold {
 public:
  // A region was entered with which a request begins; a region was left.
  void entered(std::int64_t now_ns) noexcept { entered_ns_.store(now_ns, std::memory_order_relaxed); }
  void left() noexcept { entered_ns_.store(0, std::memory_order_relaxed); }

  // A latency launch is made: is it the request's first?
  bool awaits_launch() const noexcept { return entered_ns_.load(std::memory_order_relaxed) != 0; }
  void first_launch(std::int64_t now_ns) noexcept;

  // Did launches come long enough after their region's entry?
  bool worth() const noexcept { return ahead_ns_.load(std::memory_order_relaxed) >= kWorthNs; }

  // On a thread with the context in which the work will be; nothing happens without one, or while something captures.
  void take() noexcept;

  // By the ticker, which has no context: in the one where the client last worked.
  void worked_in(CUcontext context) noexcept { worked_in_ = context; }
  void take_again() noexcept;

  // This context goes, or has gone (null: any), and takes with it what was made in it.
  void forget(CUcontext context) noexcept;

 private:
  static constexpr std::int64_t kWorthNs = 100'000;

  bool prepare(CUcontext context) noexcept;

  std::atomic<std::int64_t> entered_ns_{0};  // 0: the request has launched
  std::atomic<std::int64_t> ahead_ns_{0};    // from entry to first launch, the later requests counting for more
  CUcontext worked_in_ = nullptr;
  CUcontext context_ = nullptr;  // one, until it goes: work in others has no foothold
  CUstream stream_ = nullptr;
  CUdeviceptr memory_ = 0;
  bool refused_ = false;  // by the driver: not asked again in this context
};

}  // namespace cudasched::runtime
