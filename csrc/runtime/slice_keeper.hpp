// Has the time slices of this process (preempt/time_slices.hpp) be as long as schedule/slice_length.hpp says, and tells
// other processes of it, by its slots. The ticker's, but for watch(), which the driver's loading calls.
#pragma once

#include <cstdint>
#include <optional>

#include "preempt/time_slices.hpp"
#include "runtime/settings.hpp"

namespace cudasched::runtime {

class Engine;

class SliceKeeper {
 public:
  // Before the program's first driver call goes on. `tool`: one is injected into the program.
  void watch(void* real_driver, const Settings& settings, bool tool) noexcept;
  void tick(Engine& engine, std::int64_t now_ns) noexcept;
  void reset_in_child() noexcept;

 private:
  std::uint32_t wanted(Engine& engine, std::int64_t now_ns) noexcept;

  preempt::TimeSlices slices_;
  std::optional<std::uint32_t> setting_;  // none: found on line; 0: off
  preempt::State state_ = preempt::State::kUnused;
  bool best_effort_ = false;  // the process has such work, as of the last tick; else the slice is latency work's
  bool tool_ = false;
  bool said_ = false;
};

}  // namespace cudasched::runtime
