// The log's lines at level debug, once a second, from other threads' counts: why the gate held launches and why the
// ring drained. The ticker alone calls this; nothing here is on the launch path.
#pragma once

#include <array>
#include <cstdint>

#include "queue/order.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::runtime {

class Decisions {
 public:
  // Writes the events of the last second, where there are any and the level is written.
  void say(std::int64_t now_ns) noexcept;

 private:
  std::int64_t said_ns_ = 0;
  std::array<std::uint64_t, telemetry::kWaitReasons> held_{};
  std::array<std::uint64_t, queue::kDrainKinds> drains_{};
};

}  // namespace cudasched::runtime
