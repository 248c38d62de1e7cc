// Host back-off: while a thread of this process is in a latency region, the process's best-effort threads pause. Such a
// thread pauses once its next launch is queued, before it changes an executable graph, and at the return from a wait
// for the GPU. The gate would hold their launches anyway. Preparing a launch takes the interpreter's lock and the
// driver's locks from the thread that answers the request.
//
// The pause is bounded, because the thread in the region may wait for one that pauses. The pause lasts at most
// Settings::host_backoff_ns from the entry of the first open region. A thread that holds the interpreter's lock, or
// that is in a latency region itself, never pauses. Regions on any GPU count for the whole process, because its threads
// share the host.
//
// Where best effort runs in the gaps of requests (policy `harvest`), it goes on from the ring meanwhile. A thread
// pauses where the ring holds enough (many operations or much GPU time) for the whole request, and goes on before the
// ring runs out. A request that launches and waits again and again, as a decoder does for each token, hardly waits for
// another thread. So the bound counts anew from each of the request's waits, and one launch is held kMostBounds times
// as long at most. A thread that returns from a wait may hold a lock of the program's, as PyTorch's allocator does
// between waits for its events. Such a thread pauses once for all its earlier launches, and for one bound.
//
// Costs a launch, and a wait, a load while no region is open.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudasched::queue {
class Queue;
}

namespace cudasched::runtime {

class HostBackoff {
 public:
  // `while_fed`: only where enough is queued.
  void configure(std::int64_t longest_ns, bool while_fed) noexcept {
    longest_ns_.store(longest_ns, std::memory_order_relaxed);
    while_fed_.store(while_fed, std::memory_order_relaxed);
  }

  // A latency region of the process was entered, or left.
  void enter() noexcept;
  void leave() noexcept { open_.fetch_sub(1, std::memory_order_relaxed); }

  // The request under way has launched and waited for it, and goes on (`harvest`).
  void renew(std::int64_t now_ns) noexcept { since_ns_.store(now_ns, std::memory_order_relaxed); }

  bool requested() const noexcept { return open_.load(std::memory_order_relaxed) > 0; }

  static constexpr std::int64_t kMostBounds = 10;

  // On a best-effort thread, whose calls go into `queue` (null: into none), for so many bounds at most. Adds one to
  // `count` if it pauses.
  void back_off(std::atomic<std::uint64_t>& count, const queue::Queue* queue,
                std::int64_t bounds = kMostBounds) const noexcept;

  // In a forked child: the calling thread has so many regions open, and is the only thread.
  void reset(int open) noexcept { open_.store(open, std::memory_order_relaxed); }

 private:
  static constexpr std::int64_t kPauseNs = 50'000;
  // Enough work in the ring, by operations or by GPU time: to pause, and to go on pausing.
  struct Enough {
    std::uint64_t operations;
    std::int64_t gpu_ns;

    bool is_in(const queue::Queue& queue) const noexcept;
  };
  static constexpr Enough kFed{64, 2'500'000};
  static constexpr Enough kHungry{16, 600'000};

  std::atomic<int> open_{0};
  std::atomic<std::int64_t> since_ns_{0};
  std::atomic<std::int64_t> longest_ns_{0};
  std::atomic<bool> while_fed_{false};
};

}  // namespace cudasched::runtime
