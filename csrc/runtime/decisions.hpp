// What the log says at level debug: why the gate held launches and what drained the ring, once a second, of what other
// threads have counted. By the ticker alone; nothing here is on the launch path.
#pragma once

#include <array>
#include <cstdint>

#include "queue/order.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::runtime {

class Decisions {
 public:
  // Writes what has happened since a second ago, where that is anything and the level is written.
  void say(std::int64_t now_ns) noexcept;

 private:
  std::int64_t said_ns_ = 0;
  std::array<std::uint64_t, telemetry::kWaitReasons> held_{};
  std::array<std::uint64_t, queue::kDrainKinds> drains_{};
};

}  // namespace cudasched::runtime
