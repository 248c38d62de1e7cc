// When graph launches are submitted in slices, and what slices may cost.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace cudasched::runtime {

struct SliceSettings {
  enum class When : std::uint8_t {
    kOff,
    kAuto,   // while a latency client is on the device
    kAhead,  // likewise, but they are built before one is
    kAlways,
  };
  When when = When::kAuto;                       // CUDASCHED_GRAPH_SLICES
  std::int64_t slice_ns = 200 * kNsPerUs;        // CUDASCHED_GRAPH_SLICE_US
  std::uint64_t most_bytes = 1'000'000'000;      // CUDASCHED_GRAPH_SLICE_MB, of all slices, about
  std::int64_t most_build_ns = 2000 * kNsPerMs;  // CUDASCHED_GRAPH_BUILD_MS, of one graph
  // Set by tests alone.
  std::int64_t look_ns = kNsPerSecond;  // between two looks at what there is
  int idle_looks = 20;                  // without a launch: a graph's slices are dropped
};

}  // namespace cudasched::runtime
