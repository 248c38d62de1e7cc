// Records the launches of the process, for training and advice: off by default. While collecting is on, the hook
// reports each launch before and after the driver's call, and CUPTI's records, events, or both give the launch's time.
// A thread of the collector's own joins the two and appends rows to a journal (telemetry/journal.hpp) every kPassNs.
//
// begin_record and end_record are called around the driver's launch call, by any thread. Both take one lock for a few
// hundred nanoseconds, may allocate, and never throw. CollectOptions::capacity_bytes bounds the waiting launches;
// launches beyond count as lost and have no row. Nothing else is ever waited for on the launch path.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "predict/allocations.hpp"
#include "predict/launch.hpp"

namespace cudasched::telemetry {

inline constinit std::atomic<bool> collecting_now{false};

// The one word that a launch reads while nothing is collected.
inline bool collecting() noexcept { return collecting_now.load(std::memory_order_relaxed); }

// kBoth: CUPTI's times, and beside them the unadjusted time between two events around the launch, as the gate's samples
// have it.
enum class Timing { kCupti, kEvents, kBoth };

struct CollectOptions {
  static constexpr std::uint64_t kDefaultCapacityBytes = std::uint64_t{64} << 20;

  std::string directory;  // where the journal goes; it must exist
  Timing timing = Timing::kCupti;
  std::string cupti_path;                                // empty: the loader's own search
  std::uint64_t capacity_bytes = kDefaultCapacityBytes;  // of launches that wait for the collector's thread
  const predict::Allocations* allocations = nullptr;  // must outlive the process's launches; null: no pointer is known
  // Text for the journal's end, beside its own counts: members of a JSON object, a comma ahead of each. Null: none.
  std::string (*ending)() = nullptr;
};

// A launch's state from begin_record to end_record.
struct Record {
  bool open = false;
  bool correlated = false;
  std::uint32_t session = 0;
  std::uint64_t launch = 0;
  std::int64_t submitted_ns = 0;
  void* events = nullptr;
};

// A launch that the driver accepted.
struct Launched {
  const predict::Launch& launch;
  CUstream stream = nullptr;
  int device = 0;                               // ordinal
  const predict::Function* function = nullptr;  // null: a graph, or a driver that describes no functions
  std::string_view name{};                      // of the function, as the driver gives it
  std::span<const std::uint32_t> words{};       // of the parameter block
  int blocks_per_sm = 0;                        // 0: unknown
};

struct Collected {
  std::string journal;
  std::uint64_t rows = 0;
  std::uint64_t lost = 0;  // launches without a row
};

// Starts. After cuInit has succeeded. Throws Error: on already, no CUPTI, another profiler, no directory.
void start_collecting(const CollectOptions& options);

// Ends: no launch is taken from here on; `synchronize`: the device is waited for, so that all that were taken get their
// times. Returns when the journal is written. Does nothing if it is off.
Collected stop_collecting(bool synchronize) noexcept;

// The label of the process's launches from here on; at most kMostLabels different labels. Throws Error.
inline constexpr std::uint32_t kMostLabels = 1 << 20;
void set_label(std::string_view text);

// `may_time`: events may stand around the launch.
Record begin_record(CUstream stream, bool may_time) noexcept;

// `launched` is null where the driver refused the launch.
void end_record(const Record& record, const Launched* launched) noexcept;

// A context goes; null: every one.
void forget_context(CUcontext context) noexcept;

// In a forked child: off, and nothing of the parent's is touched.
void reset_collecting_in_child() noexcept;

}  // namespace cudasched::telemetry
