#include "runtime/settings.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/switch.h"
#include "schedule/fair.hpp"
#include "schedule/policy.hpp"

namespace cudasched::runtime {
namespace {

std::string_view base_name(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

// What a value must be instead.
using Problem = std::string;

double number(const std::string& value, double least, double most, const Problem& wanted) {
  double result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || !std::isfinite(result) || result < least ||
      result > most) {
    throw wanted;
  }
  return result;
}

// A number of `unit_ns` nanoseconds, at least `least` of them.
std::int64_t duration(const std::string& value, std::int64_t unit_ns, double least) {
  const auto unit = static_cast<double>(unit_ns);
  const double most = 3600.0 * static_cast<double>(kNsPerSecond) / unit;
  std::array<char, 96> wanted{};
  std::snprintf(wanted.data(), wanted.size(), "a number of %s, from %g to %.0f", unit_ns == kNsPerMs ? "ms" : "us",
                least, most);
  return static_cast<std::int64_t>(number(value, least, most, wanted.data()) * unit);
}

std::uint32_t whole(const std::string& value, std::uint32_t least, std::uint32_t most, const Problem& wanted) {
  std::uint32_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || result < least || result > most) throw wanted;
  return result;
}

std::int32_t priority(const std::string& value) {
  std::int32_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  constexpr int kMost = schedule::kLargestPriority;
  if (error != std::errc() || end != value.data() + value.size() || result < -kMost || result > kMost) {
    throw Problem("an integer from " + std::to_string(-kMost) + " to " + std::to_string(kMost));
  }
  return result;
}

// "20GiB", "1.5 GB" or a number of bytes; "none" and "0" are 0. As python/cudasched/config.py.
std::uint64_t size(const std::string& value) {
  const Problem wanted = "a size of at least 1 MiB, such as 20GiB, 500MB or a number of bytes, or none";
  if (value == "none" || value == "0") return 0;
  const char* const last = value.data() + value.size();
  std::uint64_t whole = 0;  // to the byte, which a double has no room for
  auto parsed = std::from_chars(value.data(), last, whole);
  const bool is_whole = parsed.ec == std::errc() &&
                        (parsed.ptr == last || std::string_view(".eE").find(*parsed.ptr) == std::string_view::npos);
  double amount = static_cast<double>(whole);
  if (!is_whole) parsed = std::from_chars(value.data(), last, amount);
  if (parsed.ec != std::errc() || !std::isfinite(amount)) throw wanted;
  std::string_view unit(parsed.ptr, static_cast<std::size_t>(last - parsed.ptr));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  constexpr std::pair<std::string_view, std::uint64_t> kUnits[] = {{"", 1},
                                                                   {"B", 1},
                                                                   {"KB", 1'000},
                                                                   {"MB", 1'000'000},
                                                                   {"GB", 1'000'000'000},
                                                                   {"TB", 1'000'000'000'000},
                                                                   {"KiB", 1ULL << 10},
                                                                   {"MiB", 1ULL << 20},
                                                                   {"GiB", 1ULL << 30},
                                                                   {"TiB", 1ULL << 40}};
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    const double bytes = amount * static_cast<double>(factor);
    if (bytes < 0x1p20 || bytes > 0x1p60 || (is_whole && whole > (1ULL << 60) / factor)) throw wanted;
    return is_whole ? whole * factor : static_cast<std::uint64_t>(bytes);
  }
  throw wanted;
}

double weight(const std::string& value) {
  constexpr double kThousand = schedule::kEvenWeightMilli;
  return number(value, schedule::kLeastWeightMilli / kThousand, schedule::kMostWeightMilli / kThousand,
                "a number from 0.01 to 100");
}

bool one_of(const std::string& value, const char* no, const char* yes) {
  if (value != no && value != yes) throw Problem(std::string(no) + " or " + yes);
  return value == yes;
}

bool on_or_off(const std::string& value) {
  const int parsed = cudasched_switch(value.c_str());
  if (parsed < 0) throw Problem("on or off (or 1 and 0, true and false, yes and no)");
  return parsed == 1;
}

SliceSettings::When when_sliced(const std::string& value) {
  if (value == "auto") return SliceSettings::When::kAuto;
  if (value == "ahead") return SliceSettings::When::kAhead;
  if (value == "always") return SliceSettings::When::kAlways;
  if (value == "off") return SliceSettings::When::kOff;
  throw Problem("auto, ahead, always or off");
}

std::string policy(const std::string& value) {
  if (schedule::find_policy(value) != nullptr) return value;
  Problem known;
  for (const schedule::Policy& each : schedule::policies())
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  throw Problem("one of " + known);
}

// A variable, and what its value does to settings; throws Problem.
struct Variable {
  const char* name;
  void (*apply)(Settings& settings, const std::string& value);
};

constexpr Variable kVariables[] = {
    {"CUDASCHED_CLASS",
     [](Settings& s, const std::string& value) {
       const auto parsed = parse_class(value);
       if (!parsed) throw Problem("latency, normal or best_effort");
       s.process_class = *parsed;
     }},
    {"CUDASCHED_PRIORITY", [](Settings& s, const std::string& value) { s.priority = priority(value); }},
    {"CUDASCHED_WEIGHT", [](Settings& s, const std::string& value) { s.weight = weight(value); }},
    {"CUDASCHED_SLO_MS", [](Settings& s, const std::string& value) { s.slo_ns = duration(value, kNsPerMs, 1e-3); }},
    {"CUDASCHED_POLICY", [](Settings& s, const std::string& value) { s.policy = policy(value); }},
    {"CUDASCHED_OFFLOAD", [](Settings& s, const std::string& value) { s.offload = on_or_off(value); }},
    {"CUDASCHED_OFFLOAD_BESIDE_TOOLS",
     [](Settings& s, const std::string& value) { s.offload_beside_tools = on_or_off(value); }},
    {"CUDASCHED_LAUNCHER_SPINS", [](Settings& s, const std::string& value) { s.launcher_spins = on_or_off(value); }},
    {"CUDASCHED_LEAD_US",
     [](Settings& s, const std::string& value) {
       s.lead_ns = value == "auto" ? std::nullopt : std::optional(duration(value, kNsPerUs, 0));
     }},
    {"CUDASCHED_MAX_INFLATION",
     [](Settings& s, const std::string& value) {
       s.max_inflation = number(value, 1.001, 1000, "a number above 1 (1.2: 20% longer)");
     }},
    {"CUDASCHED_HOST_BOUND_INFLATION",
     [](Settings& s, const std::string& value) {
       s.host_bound_inflation = number(value, 1.001, 2, "a number above 1 and at most 2 (1.03: 3% longer)");
     }},
    {"CUDASCHED_MARGIN_US", [](Settings& s, const std::string& value) { s.margin_ns = duration(value, kNsPerUs, 0); }},
    {"CUDASCHED_LONG_US", [](Settings& s, const std::string& value) { s.long_ns = duration(value, kNsPerUs, 0); }},
    {"CUDASCHED_MISS_PROBABILITY",
     [](Settings& s, const std::string& value) {
       s.miss_probability = number(value, 0, 0.999, "a number from 0 (rates are not used) to below 1");
     }},
    {"CUDASCHED_LATENCY_ORDER",
     [](Settings& s, const std::string& value) { s.earliest_deadline_first = one_of(value, "free", "deadline"); }},
    {"CUDASCHED_NODE_PRIORITY", [](Settings& s, const std::string& value) { s.node_priority = on_or_off(value); }},
    {"CUDASCHED_CLASS_BY_STREAM_PRIORITY",
     [](Settings& s, const std::string& value) { s.class_by_stream_priority = on_or_off(value); }},
    {"CUDASCHED_HOST_BACKOFF_MS",
     [](Settings& s, const std::string& value) { s.host_backoff_ns = duration(value, kNsPerMs, 0); }},
    {"CUDASCHED_LINGER_US", [](Settings& s, const std::string& value) { s.linger_ns = duration(value, kNsPerUs, 0); }},
    {"CUDASCHED_MAX_IDLE_HOLD_MS",
     [](Settings& s, const std::string& value) { s.max_idle_hold_ns = duration(value, kNsPerMs, 0.1); }},
    {"CUDASCHED_STALE_HEARTBEAT_MS",
     [](Settings& s, const std::string& value) { s.stale_heartbeat_ns = duration(value, kNsPerMs, 1); }},
    {"CUDASCHED_TURN_MS", [](Settings& s, const std::string& value) { s.turn_ns = duration(value, kNsPerMs, 0.1); }},
    {"CUDASCHED_TIME_SLICE_US",
     [](Settings& s, const std::string& value) {
       s.time_slice_us =
           value == "auto" ? std::nullopt
           : value == "off"
               ? std::optional(0U)
               : std::optional(whole(value, 1, 100'000, "auto, off, or a whole number of us, from 1 to 100000"));
     }},
    {"CUDASCHED_GRAPH_SLICES", [](Settings& s, const std::string& value) { s.slices.when = when_sliced(value); }},
    {"CUDASCHED_GRAPH_SLICE_US",
     [](Settings& s, const std::string& value) { s.slices.slice_ns = duration(value, kNsPerUs, 10); }},
    {"CUDASCHED_GRAPH_SLICE_MB",
     [](Settings& s, const std::string& value) {
       s.slices.most_bytes =
           static_cast<std::uint64_t>(number(value, 0, 1e6, "a number of MB, from 0 to 1000000") * 1e6);
     }},
    {"CUDASCHED_GRAPH_BUILD_MS",
     [](Settings& s, const std::string& value) { s.slices.most_build_ns = duration(value, kNsPerMs, 1); }},
    {"CUDASCHED_MEMORY_LIMIT", [](Settings& s, const std::string& value) { s.memory_limit = size(value); }},
    {"CUDASCHED_GIVE_BACK_MS",
     [](Settings& s, const std::string& value) {
       s.give_back_ns =
           static_cast<std::int64_t>(number(value, 0, 60'000, "a number of ms, from 0 to 60000") * double(kNsPerMs));
     }},
    {"CUDASCHED_JOB", [](Settings& s, const std::string& value) { s.job = value; }},
    {"CUDASCHED_RUN_DIR", [](Settings& s, const std::string& value) { s.run_directory = value; }},
    {"CUDASCHED_NAME", [](Settings& s, const std::string& value) { s.name = value; }},
    {"CUDASCHED_COVERAGE_DIR", [](Settings& s, const std::string& value) { s.coverage_directory = value; }},
    {"CUDASCHED_CUPTI", [](Settings& s, const std::string& value) { s.cupti_path = value; }},
    {"CUDASCHED_MODEL", [](Settings& s, const std::string& value) { s.model_path = value; }},
    {"CUDASCHED_CACHE_DIR", [](Settings& s, const std::string& value) { s.cache_directory = value; }},
};

}  // namespace

void Settings::set(std::string_view variable, const std::string& value) {
  const auto known =
      std::find_if(std::begin(kVariables), std::end(kVariables), [&](const Variable& v) { return variable == v.name; });
  if (known == std::end(kVariables)) throw ConfigError("there is no setting " + std::string(variable));
  try {
    known->apply(*this, value);
  } catch (const Problem& wanted) {
    throw ConfigError(std::string(variable) + "=" + value + " has no meaning: it takes " + wanted);
  }
}

Settings Settings::read(const Lookup& lookup, std::vector<std::string>& complaints) {
  Settings settings;
  for (const Variable& variable : kVariables) {
    const char* const value = lookup(variable.name);
    if (value == nullptr || *value == '\0') continue;
    try {
      settings.set(variable.name, value);
    } catch (const ConfigError& error) {
      complaints.push_back(std::string(error.what()) + "; the default is used");
    }
  }
  return settings;
}

std::string program_name() {
  std::array<char, 4096> line{};
  std::size_t bytes = 0;
  if (std::FILE* file = std::fopen("/proc/self/cmdline", "re")) {
    bytes = std::fread(line.data(), 1, line.size() - 1, file);
    std::fclose(file);
  }
  const std::string_view program = line.data();
  std::string name(base_name(program));
  // An interpreter says little; the script it runs says more.
  const std::size_t second = program.size() + 1;
  if (second < bytes && line[second] != '-') name += " " + std::string(base_name(line.data() + second));
  return name.empty() ? "unknown" : name;
}

}  // namespace cudasched::runtime
