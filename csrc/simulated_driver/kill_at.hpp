// Fault injection: the process is killed, as kill -9 would, when a thread of a given name comes to a given step
// (CUDASCHED_SIM_KILL_AT, see double.hpp). Two steps a driver call: at the start, before any effect, and at the end,
// after all effects.
#pragma once

namespace cudasched::simulated_driver {

// At the top of each call.
class Steps {
 public:
  Steps() noexcept { step(); }
  ~Steps() { step(); }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

 private:
  static void step() noexcept;
};

}  // namespace cudasched::simulated_driver
