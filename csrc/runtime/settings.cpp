#include "runtime/settings.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace cudasched::runtime {
namespace {

std::string_view base_name(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

class Reader {
 public:
  Reader(const Settings::Lookup& lookup, std::vector<std::string>& complaints)
      : lookup_(lookup), complaints_(complaints) {}

  std::string text(const char* variable) const {
    const char* value = lookup_(variable);
    return value == nullptr ? std::string() : std::string(value);
  }

  // A number of `unit_ns` nanoseconds, at least `least` of them.
  void duration(const char* variable, std::int64_t unit_ns, double least, std::int64_t& result_ns) const {
    const std::string value = text(variable);
    if (value.empty()) return;
    double number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    const double most = 3600.0 * static_cast<double>(kNsPerSecond) / static_cast<double>(unit_ns);
    if (error != std::errc() || end != value.data() + value.size() || !std::isfinite(number) || number < least ||
        number > most) {
      complain(variable, value, "a number of at least " + std::to_string(least) + " and at most an hour");
      return;
    }
    result_ns = static_cast<std::int64_t>(number * static_cast<double>(unit_ns));
  }

  void integer(const char* variable, std::int32_t& result) const {
    const std::string value = text(variable);
    if (value.empty()) return;
    std::int32_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size()) {
      complain(variable, value, "an integer");
      return;
    }
    result = number;
  }

  void complain(const char* variable, const std::string& value, const std::string& wanted) const {
    complaints_.push_back(std::string(variable) + "=" + value + " has no meaning: it takes " + wanted +
                          "; the default is used");
  }

 private:
  const Settings::Lookup& lookup_;
  std::vector<std::string>& complaints_;
};

}  // namespace

Settings Settings::read(const Lookup& lookup, std::vector<std::string>& complaints) {
  const Reader reader(lookup, complaints);
  Settings settings;
  if (const std::string value = reader.text("CUDASCHED_CLASS"); !value.empty()) {
    if (const auto parsed = parse_class(value)) {
      settings.process_class = *parsed;
    } else {
      reader.complain("CUDASCHED_CLASS", value, "latency, normal or best-effort");
    }
  }
  reader.integer("CUDASCHED_PRIORITY", settings.priority);
  reader.duration("CUDASCHED_SLO_MS", kNsPerMs, 1e-3, settings.slo_ns);
  if (const std::string value = reader.text("CUDASCHED_OFFLOAD"); !value.empty()) {
    settings.offload = value != "0";
    if (value != "0" && value != "1") reader.complain("CUDASCHED_OFFLOAD", value, "0 or 1");
  }
  settings.lead_ns = settings.offload ? kLeadNs : kBlockingLeadNs;
  reader.duration("CUDASCHED_LEAD_US", kNsPerUs, 0, settings.lead_ns);
  reader.duration("CUDASCHED_LINGER_US", kNsPerUs, 0, settings.linger_ns);
  reader.duration("CUDASCHED_MAX_IDLE_HOLD_MS", kNsPerMs, 0.1, settings.max_idle_hold_ns);
  reader.duration("CUDASCHED_STALE_HEARTBEAT_MS", kNsPerMs, 1, settings.stale_heartbeat_ns);
  reader.duration("CUDASCHED_TURN_MS", kNsPerMs, 0.1, settings.turn_ns);
  reader.duration("CUDASCHED_STRAGGLER_MS", kNsPerMs, 0.01, settings.straggler_ns);
  settings.run_directory = reader.text("CUDASCHED_RUN_DIR");
  settings.name = reader.text("CUDASCHED_NAME");
  settings.coverage_directory = reader.text("CUDASCHED_COVERAGE_DIR");
  settings.cupti_path = reader.text("CUDASCHED_CUPTI");
  settings.model_path = reader.text("CUDASCHED_MODEL");
  settings.cache_directory = reader.text("CUDASCHED_CACHE_DIR");
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
