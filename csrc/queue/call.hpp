// A launch as a value: what the program asks for, and what cudasched finds out about it. The entry point that receives
// the launch makes it, on its thread's stack, and it is handed on from step to step until the driver has the launch
// (docs/design.md, "The way of a launch"). Each field is read, asked or decided once, by the function that is named at
// it.
//
// What waits in the ring is an Operation (queue/operation.hpp): of the Call it keeps what the gate and the driver need,
// with copies of what the program's pointers lead to. For the gate, the launcher thread makes a Call of that again
// (runtime/offload.cpp).
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/class.hpp"
#include "predict/launch.hpp"

namespace cudasched::runtime {
class Device;  // passed on here, and no more
}

namespace cudasched::queue {

class Queue;

// The thread that makes a call.
struct Caller {
  unsigned thread = 0;          // a number of its own, other than 0
  CUcontext context = nullptr;  // of best-effort calls the current one; null where other threads may not use it
  bool latency = false;         // the call is latency or normal work, or the thread is in a latency region
  std::uint16_t region = 0;     // while something is traced: its number (telemetry/trace.hpp)
};

// In which class a call is made, by whom, and where it may go: found by runtime::find_site(), for each launch and for
// each other call that may be deferred or waits for what was.
struct Site {
  Class call_class = Class::kNormal;  // normal as well while scheduling is off
  bool captured = false;              // into a graph: the device does not run it
  runtime::Device* device = nullptr;  // the current one; null: not needed (a normal call), or there is none
  Queue* queue = nullptr;             // of `device`; null: the call is not to be deferred
  Caller caller;
};

// What a launch's attributes mean.
struct Attributes {
  static constexpr unsigned kMost = 32;
  static constexpr std::size_t kMostEvents = 2;

  Attributes() noexcept {}  // `events` as it is

  bool known = true;  // the code knows each of them, and can copy it
  bool cooperative = false;
  bool overlaps_predecessor = false;  // may start before the launch ahead of it has finished, if no event is between
  std::uint8_t event_count = 0;
  std::array<CUevent, kMostEvents> events;  // that the launch records
  std::uint64_t hash = 0;
};

struct Call : predict::Launch {  // by the entry point; `cluster` by read_attributes()
  // `on` is the stream that is meant, never 0.
  explicit Call(const predict::Launch& what = {}, CUstream on = nullptr) noexcept : predict::Launch(what), stream(on) {}

  // By the entry point.
  CUstream stream;
  const CUlaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
  bool cooperative = false;    // by cuLaunchCooperativeKernel
  bool always_direct = false;  // of the old interface, or on several devices at once: never deferred nor timed
  Attributes meaning;          // by read_attributes()
  // By runtime::find_site().
  Site site;

  // Where the program gives any; once, by the entry point.
  void read_attributes(const CUlaunchAttribute* given, unsigned count) noexcept;

  // May events stand before it, at no cost to the program?
  bool may_time() const noexcept { return !always_direct && !meaning.overlaps_predecessor; }

  CUgraphExec graph() const noexcept { return static_cast<CUgraphExec>(const_cast<void*>(function)); }
};

}  // namespace cudasched::queue
