// Records the process's use of the GPU, for people to look at: off by default. While tracing is on, launches, waits,
// regions and counters go as records of 40 bytes into rings in memory, allocated at the start. A thread of the trace's
// own writes the records to files every few milliseconds (trace_file.hpp).
//
// put() is on the launch path: it takes no lock, allocates nothing, makes no system call and never waits. Where records
// come faster than they are written they are dropped and counted. Written records stay, however the process ends.
// Start, stop and names of regions are off the launch path, and may lock and allocate.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/class.hpp"
#include "base/clock.hpp"
#include "telemetry/trace_record.hpp"
#include "telemetry/trace_ring.hpp"
#include "telemetry/trace_shapes.hpp"

namespace cudasched::telemetry {

// A ring for each thread, by its number; beyond kRings threads they share.
struct TraceRings {
  static constexpr unsigned kRings = 16;
  static constexpr std::size_t kCells = 1 << 14;

  std::array<TraceRing<kCells>, kRings> rings;
  TraceShapes shapes;
};

inline constinit std::atomic<bool> tracing_now{false};
inline constinit std::atomic<TraceRings*> trace_rings{nullptr};  // once made, there for good

// The one word that a launch reads while nothing is traced.
inline bool tracing() noexcept { return tracing_now.load(std::memory_order_relaxed); }

// The time while something is traced, else 0.
inline std::int64_t traced_now() noexcept { return tracing() ? now_ns() : 0; }

inline void put(const TraceRecord& record) noexcept {
  TraceRings* const rings = trace_rings.load(std::memory_order_acquire);
  if (rings != nullptr) rings->rings[record.thread % TraceRings::kRings].push(record);
}

// The number of a launch's shape, for its record; 0: none. As put().
inline std::uint16_t trace_shape(const predict::Launch& launch) noexcept {
  TraceRings* const rings = trace_rings.load(std::memory_order_acquire);
  return rings == nullptr ? std::uint16_t{0} : rings->shapes.number_of(TraceShape(launch));
}

struct TraceOptions {
  static constexpr std::uint64_t kDefaultLimitBytes = std::uint64_t{256} << 20;

  std::string directory;                           // it must exist
  std::uint64_t limit_bytes = kDefaultLimitBytes;  // of all files of the process
};

struct Traced {
  std::string base;  // of the files' paths; empty: nothing was traced
  std::uint64_t records = 0;
  std::uint64_t dropped = 0;       // for want of room in memory, or because a file could not be written
  std::uint64_t rotated_away = 0;  // in files that were deleted to keep the limit
};

// Starts. Throws Error: on already, no memory, no thread, or the directory cannot be written to.
void start_tracing(const TraceOptions& options);

// Ends, and returns when the files are written. Does nothing if it is off.
Traced stop_tracing() noexcept;

// The number of regions of that name and class, 1 and up. `name`: of fewer than 64 bytes. Beyond kMostRegions names,
// that of "(others)".
inline constexpr int kMostRegions = 1024;
std::uint16_t trace_region(std::string_view name, Class region_class) noexcept;

// A GPU's capacity, for readers of a trace; told once a GPU, traced or not. Off the launch path; any thread.
struct TraceDevice {
  int ordinal = 0;
  int major = 0;  // compute capability
  int minor = 0;
  int sm_count = 0;
  int max_threads_per_sm = 0;
};
void trace_device(const TraceDevice& device) noexcept;

// In a forked child: off, and nothing of the parent's is touched.
void reset_tracing_in_child() noexcept;

}  // namespace cudasched::telemetry
