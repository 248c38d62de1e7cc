// Entering and leaving regions, and hints. Off the launch path: a region's entry may register a client and wait for a
// more urgent one (LatencyActivity::enter_region).
//
// A region belongs to the thread that entered it. A thread that ends leaves the regions that it has open.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "base/class.hpp"
#include "cudasched/engine.h"
#include "runtime/classify.hpp"

namespace cudasched::runtime {

class Regions {
 public:
  // Opens a region on the calling thread. Requests of one `slo_ns` have one history of times (0: none). `name`: the
  // name under which the region's requests count, of fewer than 64 bytes; "": none. Returns the token that exit()
  // takes. Throws Error: nested too deeply.
  std::uint64_t enter(Class value, std::int32_t priority, std::int64_t slo_ns, std::int64_t deadline_ns,
                      std::string_view name = {});
  // Throws Error: not entered on this thread, or left already.
  void exit(std::uint64_t token);
  // Of the calling thread, which ends.
  void leave_all() noexcept;

  // A region of the calling thread may be ended on another one, as that of a generator which a pool's threads advance.
  void may_move(std::uint64_t token);
  // Ends the region, on any thread. Later launches of the region's own thread are outside, and that thread leaves the
  // region at its next entry or exit of one. Throws Error: the region has ended, or may_move() was not called for it.
  void end_elsewhere(std::uint64_t token);

  // Latency work of the calling thread's device is imminent, within that time; one second counts as the longest. Throws
  // Error.
  void expect(std::int64_t within_ns);
  // See cudasched_measure(). Nothing happens where scheduling is off.
  void measure(std::int64_t for_ns, cudasched_measuring& found);

  // Has any thread ever entered one?
  bool used() const noexcept { return used_.load(std::memory_order_relaxed); }

 private:
  friend class Lifecycle;

  void leave_devices(const Region& region) noexcept;
  // Of the calling thread: the region at that place, and those that were ended elsewhere.
  void take_out(int place) noexcept;
  void leave_ended() noexcept;

  std::atomic<std::uint64_t> next_token_{1};
  std::atomic<bool> used_{false};
  std::mutex moving_lock_;
  std::unordered_map<std::uint64_t, std::shared_ptr<std::atomic<bool>>> moving_;  // by token
};

}  // namespace cudasched::runtime
