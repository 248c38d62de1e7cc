// A trace's records: of one size, with one layout in the rings and in a trace's files (trace_file.hpp).
// python/cudasched/observe/trace/_file.py reads the same layout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/class.hpp"

namespace cudasched::telemetry {

enum class TraceKind : std::uint8_t {
  kLaunch = 1,       // the driver's call of a launch, on the thread that made it
  kPush = 2,         // a launch was deferred: the call as the program's thread saw it
  kWait = 3,         // at the gate; `detail` is a WaitReason
  kTimed = 4,        // a launch that the gate timed: `time_ns` is the submission, `duration` the time on the GPU
  kRegionBegin = 5,  // on a thread
  kRegionEnd = 6,
  kCounter = 7,  // `detail` is a TraceCounter, `what` its value
};

// Of a launch: TraceRecord::detail.
enum TraceFlag : std::uint8_t {
  kTraceGraph = 1,     // `what` is an executable graph
  kTraceRefused = 2,   // by the driver
  kTraceDeferred = 4,  // made by the launcher thread
  kTraceSlice = 8,     // one part of a graph launch: `value` is its number from 0, below, and how many there are, above
};

// Why a best-effort launch waits.
enum class WaitReason : std::uint8_t {
  kUnknown = 0,
  kLatency = 1,   // latency work is active
  kLinger = 2,    // latency work was just done
  kHint = 3,      // latency work was announced
  kForeseen = 4,  // latency work is due within the launch's bound
  kInFlight = 5,  // enough is in flight
  kTurn = 6,      // it is another best-effort client's turn
  kMembers = 7,   // the other members of its job have not come yet
  kBacklog = 8,   // no latency client is there, and enough is in flight for one that joins
  kRequest = 9,   // on the host: a request of the same process is under way
};
inline constexpr std::size_t kWaitReasons = 10;

enum class TraceCounter : std::uint8_t {
  kDeviceMemoryUsed = 0,  // bytes, of all processes, as the driver says
  kInFlight = 1,          // ns, predicted, of this process
};

struct TraceRecord {
  std::int64_t time_ns = 0;  // CLOCK_MONOTONIC; its begin
  // The kernel and, of a launch, its shape: in the rings a driver::KernelFacts with the shape's number
  // (trace_shapes.hpp) in the upper 16 bits, which no address has; in a file the kernel's number with the shape's in
  // the upper 32. 0: not known. Else a graph's handle, or a value.
  std::uint64_t what = 0;
  std::uint64_t stream = 0;  // handle
  std::uint32_t duration_low = 0;
  std::uint8_t duration_high = 0;
  TraceKind kind{};
  std::uint8_t place = 0;  // the class, and the device's ordinal above it
  std::uint8_t detail = 0;
  std::uint16_t region = 0;  // its number; 0: none
  std::uint16_t thread = 0;  // its number
  std::uint32_t value = 0;   // of launches: predicted ns, 0: unknown

  void lasts(std::int64_t duration_ns) noexcept {
    const auto duration = static_cast<std::uint64_t>(std::clamp<std::int64_t>(duration_ns, 0, (1LL << 40) - 1));
    duration_low = static_cast<std::uint32_t>(duration);
    duration_high = static_cast<std::uint8_t>(duration >> 32);
  }
  std::int64_t duration_ns() const noexcept {
    return static_cast<std::int64_t>(std::uint64_t{duration_high} << 32 | duration_low);
  }
  void at(Class launch_class, int device) noexcept {
    place = static_cast<std::uint8_t>(static_cast<unsigned>(launch_class) | static_cast<unsigned>(device) << 2);
  }
  static constexpr int kShapeBit = 48;
  // Of a kernel's launch, where `what` is the kernel.
  void has_shape(std::uint16_t shape) noexcept {
    if (what != 0) what |= std::uint64_t{shape} << kShapeBit;
  }
  void predicts(std::int64_t predicted_ns) noexcept {
    value = static_cast<std::uint32_t>(std::clamp<std::int64_t>(predicted_ns, 0, UINT32_MAX));
  }
};
static_assert(sizeof(TraceRecord) == 40 && std::is_trivially_copyable_v<TraceRecord>);
static_assert(offsetof(TraceRecord, duration_low) == 24 && offsetof(TraceRecord, kind) == 29);
static_assert(offsetof(TraceRecord, region) == 32 && offsetof(TraceRecord, value) == 36);

}  // namespace cudasched::telemetry
