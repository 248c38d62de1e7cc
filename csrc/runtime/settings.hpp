// What the user set, from environment variables, the only thing the engine reads (python/cudasched/config.py resolves
// arguments, files and environment into them). Read once, at the program's first driver call.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/class.hpp"
#include "base/clock.hpp"

namespace cudasched::runtime {

struct Settings {
  Class process_class = Class::kNormal;              // CUDASCHED_CLASS
  std::int32_t priority = 0;                         // CUDASCHED_PRIORITY
  std::int64_t slo_ns = 0;                           // CUDASCHED_SLO_MS, 0: none
  bool offload = true;                               // CUDASCHED_OFFLOAD
  std::int64_t lead_ns = 0;                          // CUDASCHED_LEAD_US, unset: kLeadNs, or kBlockingLeadNs
  std::int64_t linger_ns = 50 * kNsPerUs;            // CUDASCHED_LINGER_US
  std::int64_t max_idle_hold_ns = 5 * kNsPerMs;      // CUDASCHED_MAX_IDLE_HOLD_MS
  std::int64_t stale_heartbeat_ns = 100 * kNsPerMs;  // CUDASCHED_STALE_HEARTBEAT_MS
  std::int64_t turn_ns = 3 * kNsPerMs;               // CUDASCHED_TURN_MS
  std::int64_t straggler_ns = kNsPerMs;              // CUDASCHED_STRAGGLER_MS
  std::string run_directory;                         // CUDASCHED_RUN_DIR, empty: the default
  std::string name;                                  // CUDASCHED_NAME, empty: the program's
  std::string coverage_directory;                    // CUDASCHED_COVERAGE_DIR, empty: no coverage count
  std::string cupti_path;                            // CUDASCHED_CUPTI
  std::string model_path;                            // CUDASCHED_MODEL, empty or "off": no trees
  std::string cache_directory;                       // CUDASCHED_CACHE_DIR, empty: the default, "off": nothing is kept

  // With a launcher thread that feeds the GPU, and where the gate holds the program's own thread, whose time between
  // launches the lead must cover then.
  static constexpr std::int64_t kLeadNs = 20 * kNsPerUs;
  static constexpr std::int64_t kBlockingLeadNs = 60 * kNsPerUs;

  // A variable with a value that has no meaning keeps its default; what was wrong goes to `complaints`.
  using Lookup = std::function<const char*(const char*)>;
  static Settings read(const Lookup& lookup, std::vector<std::string>& complaints);
};

// "python3 train.py": how a client is called that has no name of its own.
std::string program_name();

}  // namespace cudasched::runtime
