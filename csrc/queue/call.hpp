// A launch as a value: the program's arguments and cudasched's findings. The entry point that receives the launch makes
// a Call on its thread's stack. Each step hands the Call on until the driver has the launch (docs/design.md, "The way
// of a launch"). Each field is read, asked or decided once, by the function named beside the field.
//
// In the ring, an Operation (queue/operation.hpp) keeps the fields that the gate and the driver need, and copies of the
// data behind the program's pointers. For the gate, the launcher thread makes a Call of the Operation again
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
  CUcontext context = nullptr;  // of best-effort calls the current one; null where only one thread may use that
  bool latency = false;         // the call is latency or normal work, or the thread is in a latency region
  std::uint16_t region = 0;     // the region's number while a trace runs (telemetry/trace.hpp)
};

// A call's class, caller and destination. runtime::find_site() finds these for each launch, and for each other call
// that may be deferred or waits for deferred calls.
struct Site {
  Class call_class = Class::kNormal;  // normal as well while scheduling is off
  bool captured = false;              // into a graph: the device does not run it
  runtime::Device* device = nullptr;  // the current one; null: not needed (a normal call), or there is none
  Queue* queue = nullptr;             // of `device`; null: the call is not to be deferred
  Caller caller;
};

// The meaning of a launch's attributes.
struct Attributes {
  static constexpr unsigned kMost = 32;
  static constexpr std::size_t kMostEvents = 2;

  Attributes() noexcept {}  // `events` as it is

  bool known = true;  // the code knows each attribute, and can copy all
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

  // May timing events surround the launch, at no cost to the program?
  bool may_time() const noexcept { return !always_direct && !meaning.overlaps_predecessor; }

  CUgraphExec graph() const noexcept { return static_cast<CUgraphExec>(const_cast<void*>(function)); }
};

}  // namespace cudasched::queue
