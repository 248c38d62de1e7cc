// Changes of this process that other processes ask for, and asking for them: the client's side of arbiter/control.hpp,
// and its C boundary.
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "arbiter/control.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "cudasched/engine.h"
#include "runtime/counts.hpp"
#include "runtime/engine.hpp"
#include "runtime/engine_policy.hpp"
#include "runtime/guarded.hpp"
#include "runtime/memory/memory.hpp"
#include "schedule/fair.hpp"
#include "telemetry/trace.hpp"

namespace cudasched::runtime {
namespace {

using arbiter::Outcome;
using arbiter::Setting;

static_assert(CUDASCHED_APPLIED == static_cast<int>(Outcome::kApplied) &&
              CUDASCHED_UNKNOWN_SETTING == static_cast<int>(Outcome::kUnknown) &&
              CUDASCHED_HAS_REGIONS == static_cast<int>(Outcome::kRegions) &&
              CUDASCHED_POLICY_HANGS == static_cast<int>(Outcome::kPolicyHangs) &&
              CUDASCHED_WITHDRAWN == static_cast<int>(Outcome::kWithdrawn) &&
              CUDASCHED_NO_CLIENT == static_cast<int>(Outcome::kNoClient) &&
              CUDASCHED_ENDED == static_cast<int>(Outcome::kEnded) &&
              CUDASCHED_BUSY == static_cast<int>(Outcome::kBusy) &&
              CUDASCHED_UNCLEAR == static_cast<int>(Outcome::kUnclear) &&
              CUDASCHED_HOLDS_MORE == static_cast<int>(Outcome::kHoldsMore) &&
              CUDASCHED_TRACED == static_cast<int>(Outcome::kTraced) &&
              CUDASCHED_NO_TRACE == static_cast<int>(Outcome::kNoTrace));

constexpr int kMiBShift = 20;
constexpr std::int32_t kLongestTraceMs = 60'000;
constexpr std::uint64_t kTraceBytes = std::uint64_t{64} << 20;
constexpr std::int64_t kLongestTimeoutNs = 60 * kNsPerSecond;

// A policy's place in schedule::policies(), which crosses between processes.
std::int32_t place_of(std::string_view policy) noexcept {
  const auto* const found = schedule::find_policy(policy);
  return found == nullptr ? 0 : static_cast<std::int32_t>(found - schedule::policies().data());
}

// Throws ConfigError, as the setting itself does.
arbiter::Change parse(std::string_view setting, const std::string& value) {
  Settings settings;
  if (setting == "class") {
    settings.set("CUDASCHED_CLASS", value);
    return {Setting::kClass, static_cast<std::int32_t>(settings.process_class)};
  }
  if (setting == "priority") {
    settings.set("CUDASCHED_PRIORITY", value);
    return {Setting::kPriority, settings.priority};
  }
  if (setting == "weight") {
    settings.set("CUDASCHED_WEIGHT", value);
    return {Setting::kWeight, static_cast<std::int32_t>(settings.weight_milli())};
  }
  if (setting == "policy") {
    settings.set("CUDASCHED_POLICY", value);
    return {Setting::kPolicy, place_of(settings.policy)};
  }
  if (setting == "memory_limit") {
    settings.set("CUDASCHED_MEMORY_LIMIT", value);
    const std::uint64_t mib = settings.memory_limit >> kMiBShift;
    return {Setting::kMemoryLimit,
            static_cast<std::int32_t>(std::min<std::uint64_t>(mib, std::numeric_limits<std::int32_t>::max()))};
  }
  if (setting == "parked") {
    if (value != "on" && value != "off") throw ConfigError("parked is on or off, not \"" + value + "\"");
    return {Setting::kParked, value == "on" ? 1 : 0};
  }
  if (setting == "trace") {
    int milliseconds = -1;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), milliseconds);
    if (error != std::errc() || end != value.data() + value.size() || milliseconds < 0 ||
        milliseconds > kLongestTraceMs) {
      throw ConfigError("a program is traced for 1 to 60000 milliseconds, or for 0: its trace ends");
    }
    return {Setting::kTrace, milliseconds};
  }
  throw ConfigError(
      "\"" + std::string(setting) +
      "\" of a running client cannot be changed; class, priority, weight, policy, memory_limit and parked can");
}

// A trace that another process asked for ends by itself, so that nothing is left to a controller that may be killed.
std::int64_t trace_ends_ns = 0;  // 0: there is none; the ticker's

// Waits until the trace is whole in its file: milliseconds on the memory that the run directory is on by default.
void end_trace() noexcept {
  trace_ends_ns = 0;
  static_cast<void>(telemetry::stop_tracing());
}

Outcome apply_trace(std::int32_t milliseconds, const std::string& table) {
  if (milliseconds < 0 || milliseconds > kLongestTraceMs) return Outcome::kUnknown;
  if (milliseconds == 0) {
    if (trace_ends_ns != 0) end_trace();
    return Outcome::kApplied;
  }
  if (telemetry::tracing()) return Outcome::kTraced;
  cudasched_counts counts{};
  gather_counts(counts);
  std::array<char, 17> process{};
  std::snprintf(process.data(), process.size(), "%016llx", static_cast<unsigned long long>(counts.process));
  const std::string traces = table.substr(0, table.rfind('/')) + "/traces";
  telemetry::TraceOptions options;
  options.directory = traces + "/" + process.data();
  options.limit_bytes = kTraceBytes;
  std::error_code ignored;
  std::filesystem::remove_all(options.directory, ignored);  // left by a controller that was killed
  for (const std::string& directory : {traces, options.directory}) {
    if (mkdir(directory.c_str(), S_IRWXU) != 0 && errno != EEXIST) return Outcome::kNoTrace;
  }
  try {
    telemetry::start_tracing(options);
  } catch (const Error& error) {
    log::warning(error.what());
    return Outcome::kNoTrace;
  }
  trace_ends_ns = now_ns() + milliseconds * kNsPerMs;
  return Outcome::kApplied;
}

}  // namespace

void Engine::note_policy() noexcept {
  policy_place_.store(user_policy_ ? arbiter::kOwnPolicy : static_cast<std::uint32_t>(place_of(settings_.policy)),
                      std::memory_order_relaxed);
}

// This process's slots, in each device's table.
template <typename Visit>
void Engine::for_each_slot(Visit&& visit) noexcept {
  for_each_device([&](Device& device) {
    if (device.table().lost()) return;
    for (int i = 0; i < kClassCount; ++i) {
      if (const int slot = device.slot(static_cast<Class>(i)); slot >= 0) visit(device.table(), slot);
    }
  });
}

void Engine::serve_control() noexcept {
  for_each_slot([&](arbiter::Table& table, int index) {
    std::unique_lock lock(mutex_, std::defer_lock);  // a registration may hold it for seconds
    arbiter::control::serve(
        table.slot(index).control, [&] { return lock.try_lock(); },
        [&](const arbiter::Change& change) {
          try {
            const Outcome outcome =
                change.setting == Setting::kTrace ? apply_trace(change.value, table.path()) : apply(change);
            publish_choices();  // before the controller has the answer
            return outcome;
          } catch (const std::exception& error) {
            log::error(error.what());  // no memory for a policy's name
            return Outcome::kUnknown;
          }
        });
  });
  if (trace_ends_ns != 0 && now_ns() >= trace_ends_ns) end_trace();
  publish_choices();
}

void Engine::publish_choices() noexcept {
  const auto process_class = static_cast<std::uint32_t>(hot().process_class.load(std::memory_order_relaxed));
  const std::uint32_t policy = policy_place_.load(std::memory_order_relaxed);
  for_each_slot([&](arbiter::Table& table, int index) {
    table.slot(index).process_class.store(process_class, std::memory_order_relaxed);
    table.slot(index).policy.store(policy, std::memory_order_relaxed);
  });
}

Outcome Engine::apply(const arbiter::Change& change) {
  switch (change.setting) {
    case Setting::kClass:
      if (change.value < 0 || change.value >= kClassCount) return Outcome::kUnknown;
      if (regions_.used()) return Outcome::kRegions;
      class_was_set_ = true;
      use_class(static_cast<Class>(change.value), settings_.priority, settings_.slo_ns);
      break;
    case Setting::kPriority:
      if (change.value < -schedule::kLargestPriority || change.value > schedule::kLargestPriority) {
        return Outcome::kUnknown;
      }
      settings_.priority = change.value;
      for_each_slot([&](arbiter::Table& table, int slot) { table.set_priority(slot, change.value); });
      for_each_device([&](Device& device) {
        if (!device.table().lost() && device.registered(Class::kLatency)) device.latency.set_priority(change.value);
      });
      break;
    case Setting::kWeight: {
      const auto weight_milli = static_cast<std::uint32_t>(change.value);
      if (weight_milli < schedule::kLeastWeightMilli || weight_milli > schedule::kMostWeightMilli) {
        return Outcome::kUnknown;
      }
      settings_.weight = weight_milli / 1e3;
      for_each_slot([&](arbiter::Table& table, int slot) { table.set_weight(slot, weight_milli); });
      break;
    }
    case Setting::kPolicy: {
      const auto place = static_cast<std::size_t>(change.value);
      if (change.value < 0 || place >= schedule::policies().size()) return Outcome::kUnknown;
      return apply_policy(schedule::policies()[place]);
    }
    case Setting::kMemoryLimit: {
      if (change.value < 0) return Outcome::kUnknown;
      Settings wanted = settings_;
      wanted.memory_limit = static_cast<std::uint64_t>(change.value) << kMiBShift;
      try {
        memory().configure(wanted);
      } catch (const ConfigError&) {
        return Outcome::kHoldsMore;
      }
      settings_.memory_limit = wanted.memory_limit;
      for_each_device([](Device& device) { memory().publish(device); });
      break;
    }
    case Setting::kParked:
      if (!settings_.pageable || settings_.park == 0 || settings_.give_back_ns == 0 || change.value < 0 ||
          change.value > 1) {
        return Outcome::kUnknown;
      }
      memory().pager.want_away(change.value != 0);
      for_each_device([](Device& device) { device.table().wake_for_memory(); });
      break;
    default:
      return Outcome::kUnknown;  // of a later version, or a damaged word
  }
  return Outcome::kApplied;
}

// A gate's lock is held for a microsecond, but by a user's policy that does not return.
Outcome Engine::apply_policy(const schedule::Policy& policy) {
  std::string name(policy.name);  // may throw, before anything is changed
  constexpr int kTries = 100;
  bool had_locks = true;
  for_each_device([&](Device& device) {
    if (!device.gate.registered()) return;
    bool had_lock = false;
    for (int tries = 0; tries < kTries && !had_lock; ++tries) {
      had_lock = device.gate.try_use_policy(schedule::Decider(policy));
      if (!had_lock && policy_asked_since_ns() != 0 && now_ns() - policy_asked_since_ns() > kNsPerSecond) break;
      if (!had_lock) std::this_thread::yield();
    }
    had_locks = had_locks && had_lock;
  });
  if (!had_locks) return Outcome::kPolicyHangs;
  user_policy_.reset();
  settings_.policy = std::move(name);
  hot().host_backoff.configure(settings_.host_backoff_limit_ns(), settings_.policy == "harvest");
  note_policy();
  return Outcome::kApplied;
}

}  // namespace cudasched::runtime

extern "C" int cudasched_change(const char* path, std::uint64_t process, const char* setting, const char* value,
                                std::int64_t timeout_ns, std::int32_t* outcome) {
  using namespace cudasched;
  return runtime::guarded([&] {
    if (path == nullptr || setting == nullptr || value == nullptr) {
      throw ConfigError("a change has a table, a setting and a value");
    }
    if (timeout_ns < 0 || timeout_ns > runtime::kLongestTimeoutNs) {
      throw ConfigError("a client's answer is waited for from 0 to 60 seconds");
    }
    const arbiter::Change wanted = runtime::parse(setting, value);
    const auto table = arbiter::Table::open_existing(path);
    *outcome = static_cast<std::int32_t>(arbiter::change(*table, process, wanted, timeout_ns));
  });
}
