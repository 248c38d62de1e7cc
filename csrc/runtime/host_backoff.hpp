// Host back-off: while a thread of this process is in a latency region, its best-effort threads pause once their next
// launch is queued, or before they change an executable graph, and when they return from a wait for the GPU. The gate
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
// before the GPU has nothing left of it. A request that
// launches and waits again and again, as a decoder does for each token, hardly waits for another thread: the bound
// counts anew from each of its waits, and one launch is held kMostBounds times as long at most.
//
// A thread that waits for the interpreter's lock beside one that launches kernel after kernel does not come to its
// launch. Each launch releases the lock and wakes it, and has taken the lock again before it runs; the wake-ups are
// what an eager request is longer by, a sixth. So at the beginning of such a request the lock is released for as long
// as it takes the best-effort thread to come to its pause (give_way()).
//
// Costs a launch one load while no region is open.
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

  // A latency region of the process was entered: true, if no other was open. Or left, with so many launches in it.
  bool enter() noexcept;
  void leave(std::uint64_t launches) noexcept {
    launches_.store(launches, std::memory_order_relaxed);
    open_.fetch_sub(1, std::memory_order_relaxed);
  }

  // On a thread that has entered a region, for a request that has many launches if it is like the last one: releases
  // the interpreter's lock until a best-effort thread rests, at most for what the request would lose otherwise. Does
  // nothing where one rests already, or where none would pause, because `queue` holds too little; and seldom where it
  // was in vain (threads that keep the lock while they launch never pause).
  void give_way(const queue::Queue* queue) noexcept;

  // In its scope, the thread waits for the GPU.
  class Resting {
   public:
    explicit Resting(HostBackoff& host_backoff) noexcept : resting_(host_backoff.resting_) { ++resting_; }
    ~Resting() { --resting_; }
    Resting(const Resting&) = delete;
    Resting& operator=(const Resting&) = delete;

   private:
    std::atomic<int>& resting_;
  };

  // The request under way has launched and waited for it, and goes on (`harvest`).
  void renew(std::int64_t now_ns) noexcept { since_ns_.store(now_ns, std::memory_order_relaxed); }

  bool requested() const noexcept { return open_.load(std::memory_order_relaxed) > 0; }

  // On a best-effort thread, whose calls go into `queue` (null: into none). Adds one to `count` if it pauses.
  void back_off(std::atomic<std::uint64_t>& count, const queue::Queue* queue) noexcept;

  // In a forked child: the calling thread has so many regions open, and is the only thread.
  void reset(int open) noexcept {
    open_.store(open, std::memory_order_relaxed);
    resting_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr std::int64_t kPauseNs = 50'000;
  static constexpr std::int64_t kMostBounds = 10;
  // What the ring holds that is enough to pause, and enough to go on with that: one or the other.
  struct Enough {
    std::uint64_t operations;
    std::int64_t gpu_ns;

    bool is_in(const queue::Queue& queue) const noexcept;
  };
  static constexpr Enough kFed{64, 2'500'000};
  static constexpr Enough kHungry{16, 600'000};
  static constexpr std::uint64_t kEager = 16;       // launches of a request for which it gives way
  static constexpr std::int64_t kLostNs = 3'000;    // by a launch, to a thread that waits for the interpreter's lock
  static constexpr std::int64_t kMostNs = 200'000;  // to give way
  static constexpr unsigned kInVain = 8;            // requests that gave way to nobody; from there on
  static constexpr unsigned kTries = 16;            // one of so many does

  bool rests(const queue::Queue& queue) const noexcept;

  std::atomic<int> open_{0};
  std::atomic<std::int64_t> since_ns_{0};
  std::atomic<std::int64_t> longest_ns_{0};
  std::atomic<bool> while_fed_{false};
  std::atomic<std::uint64_t> launches_{0};  // of the last request
  std::atomic<int> resting_{0};             // threads
  std::atomic<unsigned> in_vain_{0};        // requests that gave way, or would have, since one did with success
};

}  // namespace cudasched::runtime
