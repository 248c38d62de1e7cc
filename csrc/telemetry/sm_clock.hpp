// The clock of a device's multiprocessors, from NVML, which is opened at run time; 0 where it is not to be had. A
// sample is a call of some ten microseconds: for the collector's thread, never for a launch.
#pragma once

#include <array>
#include <cstdint>

namespace cudasched::telemetry {

class SmClock {
 public:
  static constexpr int kMostDevices = 32;

  // MHz, now. `device` is the driver's ordinal.
  std::uint16_t sample(int device) noexcept;

 private:
  enum class State : std::uint8_t { kNew, kKnown, kNone };

  std::array<State, kMostDevices> states_{};
  std::array<void*, kMostDevices> handles_{};
};

}  // namespace cudasched::telemetry
