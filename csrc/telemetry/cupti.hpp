// The one place that opens libcupti, and the one activity session of the process; coverage counts with that session,
// collection times with it. CUPTI is opened at run time; a libcupti that the process has already loaded is used, so
// that there are never two. The session holds CUPTI's one subscription: another profiler's start fails meanwhile, and
// our start fails if that profiler was first.
//
// The session reads only fields of a record that have kept their place since CUDA 11.8 (Kernel7 to Kernel10, GraphTrace
// and GraphTrace2; cupti.cpp asserts the headers' layout), and refuses older libraries.
//
// push and pop are for the launch path: two calls into CUPTI. The rest may lock and allocate. Deliver is called on
// threads of CUPTI and on those that flush.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cudasched::telemetry::cupti {

inline constexpr std::uint32_t kLeastVersion = 18;  // CUDA 11.8

// A kernel or a graph that the device ran. Times are CUPTI's (see timestamp()), 0 where it could not tell.
struct DeviceRecord {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  std::uint64_t name_hash = 0;  // hash_of() the mangled name; 0 for graphs
  std::uint32_t correlation = 0;
  std::uint32_t device = 0;
  std::uint32_t stream = 0;  // CUPTI's number of it
  std::uint32_t graph = 0;   // CUPTI's number of it; 0 for kernels
  std::uint32_t grid[3] = {0, 0, 0};
  std::uint32_t block[3] = {0, 0, 0};
  bool is_graph = false;
};

// The driver call with this correlation was made while `launch` was pushed.
struct Correlation {
  std::uint32_t correlation = 0;
  std::uint64_t launch = 0;
};

struct Batch {
  std::vector<DeviceRecord> records;
  std::vector<Correlation> correlations;
};

using Deliver = void (*)(Batch&&);

enum class Use { kCount, kTimes };

// Starts the session for a use. `path` may be empty: the loader's own search. `deliver` is for kTimes. Throws Error: no
// CUPTI or one that is too old, another profiler holds it, or the driver refuses. Call it after cuInit has succeeded.
void start(Use use, const std::string& path, Deliver deliver = nullptr);
void stop(Use use) noexcept;
bool started(Use use) noexcept;

// Where started: hands over complete records; `all`: every record, once the device has been waited for. Throws Error.
void flush(Use use, bool all);

std::uint64_t device_launches() noexcept;  // counted for kCount
std::uint64_t dropped_records() noexcept;  // records that CUPTI lost for want of buffers
std::uint64_t timestamp() noexcept;        // now, on CUPTI's clock; 0: not to be had
std::uint32_t version() noexcept;          // of the library; 0: none is open

// Between these, driver calls of the calling thread are correlated with `launch`.
void push(std::uint64_t launch) noexcept;
void pop() noexcept;

// Of a kernel's mangled name; never 0.
std::uint64_t hash_of(const char* name) noexcept;

}  // namespace cudasched::telemetry::cupti
