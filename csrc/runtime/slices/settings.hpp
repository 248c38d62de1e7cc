// When graph launches are submitted in slices, and the cost limits of slices.
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
#define SETTING(...)
#define SLICE_SETTING(type, member, initial, NAME, form) type member = initial;
#define ELSEWHERE(...)
#include "runtime/settings.inc"
  // Set by tests alone.
  std::int64_t look_ns = kNsPerSecond;  // between two looks at the graphs
  int idle_looks = 20;                  // without a launch: a graph's slices are dropped
};

}  // namespace cudasched::runtime
