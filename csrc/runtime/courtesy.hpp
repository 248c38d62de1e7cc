// The host's part of a request goes first. While a thread of this process is in a latency region, its best-effort
// threads stand aside at their next launch: what they would prepare meanwhile, the gate would hold, and preparing it
// takes the interpreter's lock and the driver's from the thread that answers the request.
//
// Bounded, because the thread in the region may wait for one that stands aside: at most Settings::stand_aside_ns,
// counted from the moment when the first of the open regions was entered; where regions overlap for ever, once. Never a
// thread that holds the interpreter's lock, or that is in a latency region itself. It goes by process, whatever GPU a
// region is for: it is the host that is shared.
//
// Costs a launch one load while no region is open.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudasched::runtime {

class Courtesy {
 public:
  void configure(std::int64_t longest_ns) noexcept { longest_ns_.store(longest_ns, std::memory_order_relaxed); }

  // A latency region of the process was entered, or left.
  void enter() noexcept;
  void leave() noexcept { open_.fetch_sub(1, std::memory_order_relaxed); }

  bool asked() const noexcept { return open_.load(std::memory_order_relaxed) > 0; }

  // A best-effort launch is about to be made on the calling thread. Counts it if it stands aside.
  void stand_aside(std::atomic<std::uint64_t>& count) const noexcept;

  // In a forked child: the calling thread has so many regions open, and is the only one.
  void reset(int open) noexcept { open_.store(open, std::memory_order_relaxed); }

 private:
  static constexpr std::int64_t kPauseNs = 50'000;

  std::atomic<int> open_{0};
  std::atomic<std::int64_t> since_ns_{0};
  std::atomic<std::int64_t> longest_ns_{0};
};

}  // namespace cudasched::runtime
