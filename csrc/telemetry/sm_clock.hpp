// The clock of a device's multiprocessors, from NVML, which is opened at run time; 0 where it is not to be had. A
// sample is a call of some ten microseconds: for the collector's thread, never for a launch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace cudasched::telemetry {

class SmClock {
 public:
  static constexpr int kMostDevices = 32;

  // MHz, now. `device` is the driver's ordinal.
  std::uint16_t sample(int device) noexcept;

 private:
  std::array<std::optional<void*>, kMostDevices> handles_{};  // NVML's; null: it has none
};

}  // namespace cudasched::telemetry
