// What the user set, from environment variables, the only thing the engine reads (python/cudasched/config.py resolves
// arguments, files and environment into them). Read once, at the program's first driver call.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/class.hpp"
#include "base/clock.hpp"
#include "runtime/slices/settings.hpp"

namespace cudasched::runtime {

struct Settings {
  Class process_class = Class::kNormal;              // CUDASCHED_CLASS
  std::int32_t priority = 0;                         // CUDASCHED_PRIORITY
  double weight = 1.0;                               // CUDASCHED_WEIGHT, of the share among best-effort clients
  std::int64_t slo_ns = 0;                           // CUDASCHED_SLO_MS, 0: none
  bool offload = true;                               // CUDASCHED_OFFLOAD
  bool offload_beside_tools = false;                 // CUDASCHED_OFFLOAD_BESIDE_TOOLS: to test slices under sanitizers
  bool launcher_spins = false;                       // CUDASCHED_LAUNCHER_SPINS: to measure what its sleeping costs
  std::string policy = "strict";                     // CUDASCHED_POLICY, a name of schedule/policy.hpp
  std::optional<std::int64_t> lead_ns;               // CUDASCHED_LEAD_US; none ("auto"): found on line
  double max_inflation = 0;                          // CUDASCHED_MAX_INFLATION, 0: no target
  double host_bound_inflation = 1.03;                // CUDASCHED_HOST_BOUND_INFLATION, of a segment of a request
  std::int64_t margin_ns = 200 * kNsPerUs;           // CUDASCHED_MARGIN_US
  std::int64_t long_ns = 300 * kNsPerUs;             // CUDASCHED_LONG_US
  double miss_probability = 0;                       // CUDASCHED_MISS_PROBABILITY, 0: rates of arrival are not used
  bool earliest_deadline_first = false;              // CUDASCHED_LATENCY_ORDER=deadline
  bool node_priority = true;                         // CUDASCHED_NODE_PRIORITY
  bool class_by_stream_priority = false;             // CUDASCHED_CLASS_BY_STREAM_PRIORITY
  std::int64_t host_backoff_ns = 2 * kNsPerMs;       // CUDASCHED_HOST_BACKOFF_MS
  std::int64_t linger_ns = 100 * kNsPerUs;           // CUDASCHED_LINGER_US
  std::int64_t max_idle_hold_ns = 5 * kNsPerMs;      // CUDASCHED_MAX_IDLE_HOLD_MS
  std::int64_t stale_heartbeat_ns = 100 * kNsPerMs;  // CUDASCHED_STALE_HEARTBEAT_MS
  std::int64_t turn_ns = 3 * kNsPerMs;               // CUDASCHED_TURN_MS
  std::optional<std::uint32_t> time_slice_us;        // CUDASCHED_TIME_SLICE_US; none ("auto"): found on line, 0: off
  std::uint64_t memory_limit = 0;                    // CUDASCHED_MEMORY_LIMIT, of each GPU; 0: none
  std::int64_t give_back_ns = 1000 * kNsPerMs;       // CUDASCHED_GIVE_BACK_MS, 0: off
  SliceSettings slices;                              // of CUDA graphs
  std::string job = "auto";                          // CUDASCHED_JOB, see job_peers.hpp
  std::string run_directory;                         // CUDASCHED_RUN_DIR, empty: the default
  std::string name;                                  // CUDASCHED_NAME, empty: the program's
  std::string coverage_directory;                    // CUDASCHED_COVERAGE_DIR, empty: no coverage count
  std::string cupti_path;                            // CUDASCHED_CUPTI
  std::string model_path;                            // CUDASCHED_MODEL, empty: what the package ships, "off": no trees
  std::string cache_directory;                       // CUDASCHED_CACHE_DIR, empty: the default, "off": nothing is kept

  std::uint32_t weight_milli() const noexcept { return static_cast<std::uint32_t>(std::lround(1'000 * weight)); }

  // Where nothing is held back on the GPU, nothing is held back on the host. Under `harvest`, best-effort threads back
  // off for a whole request: what is queued feeds the GPU meanwhile.
  static constexpr std::int64_t kHarvestBackoffNs = 20 * kNsPerMs;
  std::int64_t host_backoff_limit_ns() const noexcept {
    if (policy == "open" || host_backoff_ns == 0) return 0;
    return policy == "harvest" && host_backoff_ns < kHarvestBackoffNs ? kHarvestBackoffNs : host_backoff_ns;
  }

  // What the lead is to begin with: with a launcher thread that feeds the GPU, and where the gate holds the program's
  // own thread, whose time between launches the lead must cover then.
  static constexpr std::int64_t kLeadNs = 20 * kNsPerUs;
  static constexpr std::int64_t kBlockingLeadNs = 60 * kNsPerUs;
  std::int64_t first_lead_ns() const noexcept { return lead_ns.value_or(offload ? kLeadNs : kBlockingLeadNs); }

  // Sets what `variable` (CUDASCHED_POLICY) stands for. Throws ConfigError where there is none of that name, or with
  // what it takes instead; nothing is changed then.
  void set(std::string_view variable, const std::string& value);

  // A variable with a value that has no meaning keeps its default; what was wrong goes to `complaints`.
  using Lookup = std::function<const char*(const char*)>;
  static Settings read(const Lookup& lookup, std::vector<std::string>& complaints);
};

// "python3 train.py": how a client is called that has no name of its own.
std::string program_name();

}  // namespace cudasched::runtime
