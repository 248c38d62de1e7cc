// Host back-off: while a thread of this process is in a latency region, its best-effort threads pause once their next
// launch is queued, before they change an executable graph, and where they return from a wait for the GPU. The gate
// would hold what they launch anyway, and preparing it takes the interpreter's lock and the driver's locks from the
// thread that answers the request.
//
// The pause is bounded, because the thread in the region may wait for one that pauses: at most
// Settings::host_backoff_ns, counted from the entry of the first region that is open. A thread that holds the
// interpreter's lock, or that is in a latency region itself, never pauses. Regions count for the whole process,
// whatever GPU they are for: the host is what is shared.
//
// Where best effort runs in the gaps of requests (policy `harvest`), it goes on from the ring meanwhile: a thread
// pauses where that holds enough, many operations or much GPU time, for the whole request, and goes on to fill it
// before the GPU has nothing left of it. A request that launches and waits again and again, as a decoder does for each
// token, hardly waits for another thread: the bound counts anew from each of its waits, and one launch is held
// kMostBounds times as long at most. A thread that returns from a wait may hold a lock of the program's, as PyTorch's
// allocator does when it waits for its events one by one: it pauses once for what it has launched before, and for one
// bound.
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
  // What the ring holds that is enough to pause, and enough to go on with that: one or the other.
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
