// The user's settings, from environment variables alone: python/cudasched/config.py resolves arguments, files and
// environment into variables. Read once, at the program's first driver call.
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
#define SETTING(type, member, initial, NAME, form) type member = initial;
#define SLICE_SETTING(...)
#define ELSEWHERE(...)
#include "runtime/settings.inc"
  SliceSettings slices;  // of CUDA graphs

  std::uint32_t weight_milli() const noexcept { return static_cast<std::uint32_t>(std::lround(1'000 * weight)); }

  // Where nothing is held back on the GPU, nothing is held back on the host. Under `harvest`, best-effort threads back
  // off for a whole request: queued launches feed the GPU meanwhile.
  static constexpr std::int64_t kHarvestBackoffNs = 20 * kNsPerMs;
  std::int64_t host_backoff_limit_ns() const noexcept {
    if (policy == "open" || host_backoff_ns == 0) return 0;
    return policy == "harvest" && host_backoff_ns < kHarvestBackoffNs ? kHarvestBackoffNs : host_backoff_ns;
  }

  // The first lead: with a launcher thread that feeds the GPU, and where the gate holds the program's own thread. There
  // the lead must cover the program's time between launches.
  static constexpr std::int64_t kLeadNs = 20 * kNsPerUs;
  static constexpr std::int64_t kBlockingLeadNs = 60 * kNsPerUs;
  std::int64_t first_lead_ns() const noexcept { return lead_ns.value_or(offload ? kLeadNs : kBlockingLeadNs); }

  // Sets the setting of `variable` (CUDASCHED_POLICY). Throws ConfigError for an unknown name, or for a bad value with
  // the values that the setting takes; nothing is changed then.
  void set(std::string_view variable, const std::string& value);

  // A variable with a value that has no meaning keeps its default; a message goes to `complaints`.
  using Lookup = std::function<const char*(const char*)>;
  static Settings read(const Lookup& lookup, std::vector<std::string>& complaints);
};

// "python3 train.py": how a client is called that has no name of its own.
std::string program_name();

}  // namespace cudasched::runtime
