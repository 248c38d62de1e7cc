// When graph launches are submitted in slices, and what slices may cost.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace cudasched::runtime {

struct SliceSettings {
  enum class When : std::uint8_t {
    kOff,
    kBesideLatency,  // while a latency client is on the device
    kAlways,
  };
  When when = When::kBesideLatency;
  std::int64_t slice_ns = 200 * kNsPerUs;
  std::uint64_t most_bytes = 1'000'000'000;       // of all slices, about
  std::int64_t most_build_ns = 2 * kNsPerSecond;  // of one graph
};

}  // namespace cudasched::runtime
