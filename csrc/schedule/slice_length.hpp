// How long the hardware time slice of a best-effort process is to be. While its slice lasts, a request of another
// process waits; when it is over, the GPU changes to the other process's context, which takes kContextSwitchNs. Pure.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

struct SliceView {
  int best_effort_clients = 1;  // of the GPU, this one included, that may have work on it at the same time
};

// The shortest slice: what runs gives way at once. A process that is alone on the GPU loses nothing by it.
inline constexpr std::uint32_t kShortestSliceUs = 1;
// Several best-effort processes change places at the end of each slice.
inline constexpr std::uint32_t kSharedSliceUs = 1'200;

constexpr std::uint32_t slice_us(const SliceView& view) noexcept {
  return view.best_effort_clients > 1 ? kSharedSliceUs : kShortestSliceUs;
}

}  // namespace cudasched::schedule
