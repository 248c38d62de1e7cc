// When does a latency client that is active become idle? Rules over the observations of the client; the runtime asks
// the driver and keeps the arbiter's word (runtime/latency/latency_activity.hpp).
//
// Two callers ask: the program's thread that has just synchronised, and the ticker, about every millisecond, for
// programs that never do. Pure: times are passed in.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

// The driver's word on the streams that the client launched on.
enum class Work : std::uint8_t { kDone, kRunning, kUnknown };

struct ActivityView {
  bool by_ticker = false;
  bool in_region = false;           // one of the client's regions is open
  std::int64_t now_ns = 0;          // of the ticker; a thread that has synchronised needs none of the times
  std::int64_t last_launch_ns = 0;  // when the client was last seen to have launched, or entered a region
  std::int64_t active_since_ns = 0;
  std::int64_t launching_since_ns =
      0;  // since when the driver has been at one launch, at tick after tick; 0: it is not
  bool launched_since_last_tick = false;
  bool ends_itself = false;  // its last end was found by its own synchronising
  std::int64_t max_idle_hold_ns = 0;
};

// For how long the ticker leaves a client alone that goes on launching.
inline constexpr std::int64_t kActivityGraceNs = 100'000'000;

constexpr bool quiet_for_long(const ActivityView& view) noexcept {
  return view.by_ticker && view.now_ns - view.last_launch_ns > view.max_idle_hold_ns;
}

// May the caller ask the driver about the client's work? The ticker may not where the program ends its requests itself
// and has launched since the last tick: the input may be on the GPU and the kernels on the way. In an open region only
// after max_idle_hold without a launch.
constexpr bool may_have_ended(const ActivityView& view) noexcept {
  if (view.in_region) return quiet_for_long(view);
  return !view.by_ticker || !view.launched_since_last_tick || !view.ends_itself ||
         view.now_ns - view.active_since_ns >= kActivityGraceNs;
}

// With the driver's answer: has the client become idle? Unknown work counts as done after max_idle_hold.
constexpr bool has_ended(const ActivityView& view, Work work) noexcept {
  return work == Work::kDone || (work == Work::kUnknown && quiet_for_long(view));
}

// A launch that does not return keeps the client active for max_idle_hold only. Its thread may have ended in the
// driver, or the launch may wait for best-effort work.
constexpr bool launch_hangs(const ActivityView& view) noexcept {
  return view.by_ticker && view.launching_since_ns != 0 &&
         view.now_ns - view.launching_since_ns > view.max_idle_hold_ns;
}

}  // namespace cudasched::schedule
