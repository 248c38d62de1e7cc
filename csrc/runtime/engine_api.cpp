// include/cudasched/engine.h, all but the hook's functions and collecting (engine_collect.cpp). The hook has
// cudasched_attach, cudasched_find_driver (hook/intercept.cpp) and cudasched_install (hook/install.cpp).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "runtime/counts.hpp"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"
#include "runtime/last_error.hpp"
#include "runtime/memory/memory.hpp"
#include "schedule/policy.hpp"
#include "schedule/quiet.hpp"
#include "telemetry/cupti.hpp"

namespace {

using cudasched::Class;
using cudasched::runtime::guarded;

Class checked_class(int value) {
  if (value < 0 || value >= cudasched::kClassCount) {
    throw cudasched::ConfigError("class " + std::to_string(value) +
                                 " is unknown; there are 0 (normal), 1 (latency) and "
                                 "2 (best effort)");
  }
  return static_cast<Class>(value);
}

std::int64_t checked_slo_ns(double slo_ms) {
  constexpr double kMostMs = 3'600'000;
  if (!std::isfinite(slo_ms) || slo_ms < 0 || slo_ms > kMostMs) {
    throw cudasched::ConfigError("an SLO is a time in milliseconds, more than 0 and at most an hour; got " +
                                 std::to_string(slo_ms));
  }
  return static_cast<std::int64_t>(slo_ms * static_cast<double>(cudasched::kNsPerMs));
}

std::int64_t checked_hint_ns(double within_ms) {
  constexpr double kMostMs = 1000;
  const double within_ns = within_ms * static_cast<double>(cudasched::kNsPerMs);
  if (!(within_ns >= 1) || within_ms > kMostMs) {
    throw cudasched::ConfigError(
        "latency work is expected within a time in milliseconds, over 0 and at most 1000 (later work wants another "
        "call); got " +
        std::to_string(within_ms));
  }
  return static_cast<std::int64_t>(within_ns);
}

void copy_text(char* target, std::size_t bytes, std::string_view text) {
  const std::size_t length = std::min(text.size(), bytes - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

// Of words that may be damaged.
std::int64_t elapsed_ns(std::int64_t now, std::int64_t since) noexcept {
  std::int64_t elapsed = 0;
  return __builtin_sub_overflow(now, since, &elapsed) ? 0 : elapsed;
}

void read_client(cudasched::arbiter::Table& table, int index, std::int64_t now, cudasched_client& client) {
  const auto& slot = table.slot(index);
  const auto& layout = table.layout();
  const std::uint64_t bit = std::uint64_t{1} << index;
  client = {};
  client.slot = index;
  client.client_class = static_cast<std::int32_t>(slot.client_class.load());
  client.priority = slot.priority.load();
  client.pid = slot.pid.load();
  client.alive = table.alive(index) ? 1 : 0;
  client.active = (layout.active.load() & bit) != 0 ? 1 : 0;
  client.waiting = (layout.waiting.load() & bit) != 0 ? 1 : 0;
  client.regions = slot.regions.load();
  client.hook_attached = static_cast<std::int32_t>(slot.hook_attached.load());
  client.age_ns = elapsed_ns(now, slot.claimed_ns.load());
  client.heartbeat_age_ns = elapsed_ns(now, slot.heartbeat_ns.load());
  client.active_since_ns = slot.active_since_ns.load();
  client.slo_ns = slot.slo_ns.load();
  client.in_flight_ns = std::max<std::int64_t>(0, elapsed_ns(slot.in_flight_until_ns.load(), now));
  const std::int64_t due = slot.overdue_since_ns.load();
  client.overdue_ns = due == 0 ? 0 : std::max<std::int64_t>(0, elapsed_ns(now, due));
  const std::int64_t asked = slot.policy_since_ns.load();
  client.policy_ns = asked == 0 ? 0 : std::max<std::int64_t>(0, elapsed_ns(now, asked));
  const std::int64_t deadline = slot.deadline_ns.load();
  client.deadline_in_ns = deadline == 0 ? 0 : elapsed_ns(deadline, now);
  client.launches = slot.launches.load();
  client.device_launches = slot.device_launches.load();
  client.gate_waits = slot.gate_waits.load();
  client.gate_wait_ns = slot.gate_wait_ns.load();
  const cudasched::arbiter::SlotMemory& memory = table.memory(index);
  client.memory_bytes = memory.held_bytes.load();
  client.memory_peak_bytes = memory.peak_bytes.load();
  client.memory_limit_bytes = memory.limit_bytes.load();
  client.memory_away_bytes = memory.away_bytes.load();
  client.memory_given_bytes = memory.given_bytes.load();
  client.memory_refusals = memory.refusals.load();
  client.pool_reserved_bytes = memory.pool_reserved_bytes.load();
  client.pool_allocated_bytes = memory.pool_allocated_bytes.load();
  client.pool_largest_free_bytes = memory.pool_largest_free_bytes.load();
  client.process = table.counts(index).process();
  client.process_class = static_cast<std::int32_t>(slot.process_class.load());
  client.weight_milli = slot.weight_milli.load();
  client.time_slice_us = slot.time_slice_us.load();
  client.time_slice_state = slot.time_slice_state.load();
  const auto policies = cudasched::schedule::policies();
  const std::uint32_t policy = slot.policy.load();
  copy_text(client.policy, sizeof client.policy,
            policy < policies.size()                   ? policies[policy].name
            : policy == cudasched::arbiter::kOwnPolicy ? "own"
                                                       : "");
  copy_text(client.name, sizeof client.name, cudasched::arbiter::text(slot.name));
  copy_text(client.version, sizeof client.version, cudasched::arbiter::text(slot.version));
}

// `counts`: null, or a place for each client.
void read_table(const char* path, cudasched_client* clients, cudasched_counts* counts, std::int32_t capacity,
                std::int32_t& count, char* device_name) {
  const auto table = cudasched::arbiter::Table::open_existing(path);
  table->reap();
  const std::int64_t now = cudasched::now_ns();
  count = 0;
  copy_text(device_name, 64, cudasched::arbiter::text(table->layout().device_name));
  const auto read = std::make_unique<cudasched_counts>();
  for (int i = 0; i < cudasched::arbiter::kSlotCount; ++i) {
    if (table->slot(i).occupied.load() == 0) continue;
    const int place = count++;
    if (place >= capacity) continue;
    read_client(*table, i, now, clients[place]);
    const bool known = table->counts(i).read(*read) && read->process == clients[place].process;
    if (counts != nullptr) counts[place] = known ? *read : cudasched_counts{};
    if (known) clients[place].normal_beside_best_effort = read->normal_beside_best_effort;
  }
  const int filled = std::min(count, capacity);
  for (int i = 0; i < filled; ++i) {
    const auto same = [&](const cudasched_client& other) {
      return other.process != 0 && other.process == clients[i].process && other.normal_beside_best_effort != 0;
    };
    const cudasched_client* const found = std::find_if(clients, clients + filled, same);
    if (found != clients + filled) clients[i].normal_beside_best_effort = found->normal_beside_best_effort;
  }
}

std::string_view checked_name(const char* name) {
  const std::string_view text = name == nullptr ? "" : name;
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  if (name != nullptr && (text.empty() || text.size() >= CUDASCHED_REGION_NAME_BYTES ||
                          std::any_of(text.begin(), text.end(), is_control))) {
    throw cudasched::ConfigError("the name of a region has 1 to " + std::to_string(CUDASCHED_REGION_NAME_BYTES - 1) +
                                 " bytes of UTF-8 and no control characters");
  }
  return text;
}

}  // namespace

namespace cudasched::runtime {
namespace {
thread_local std::string last_error;
}  // namespace

void set_last_error(std::string message) { last_error = std::move(message); }
const char* last_error_text() noexcept { return last_error.c_str(); }
}  // namespace cudasched::runtime

extern "C" {

const char* cudasched_version(void) { return CUDASCHED_VERSION; }
const char* cudasched_last_error(void) { return cudasched::runtime::last_error_text(); }

const char* cudasched_whole_reason(std::int32_t reason) {
  using cudasched::graph::WholeReason;
  if (reason < 0 || reason >= CUDASCHED_WHOLE_REASONS) return nullptr;
  return cudasched::graph::name(static_cast<WholeReason>(reason)).data();
}

void cudasched_get_state(cudasched_state* state) {
  *state = {};
  guarded([&] {
    const auto report = cudasched::runtime::engine().report();
    state->attached = report.attached ? 1 : 0;
    state->scheduling = report.scheduling ? 1 : 0;
    state->process_class = static_cast<std::int32_t>(report.process_class);
    state->driver_version = report.driver_version;
    state->unknown_handles = report.unknown_handles;
    state->graphs_sliced = report.slices.graphs_sliced;
    state->graph_slices = report.slices.slices;
    state->graph_slice_bytes = report.slices.bytes;
    state->graph_builds = report.slices.builds;
    state->graph_build_ns = report.slices.build_ns;
    state->graph_slices_dropped = report.slices.dropped;
    static_assert(CUDASCHED_WHOLE_REASONS == cudasched::graph::kWholeReasons);
    for (std::size_t i = 0; i < report.slices.whole.size(); ++i) {
      const auto longest_ns = static_cast<std::uint64_t>(report.slices.whole[i].longest_ns);
      state->graphs_whole[i] = report.slices.whole[i].graphs;
      state->longest_whole_graph_ns = std::max(state->longest_whole_graph_ns, longest_ns);
    }
    copy_text(state->off_reason, sizeof state->off_reason, report.off_reason);
    copy_text(state->driver_path, sizeof state->driver_path, report.driver_path);
  });
}

std::int64_t cudasched_in_flight_ns(void) {
  std::int64_t in_flight = 0;
  guarded([&] {
    cudasched::runtime::engine().for_each_device([&](cudasched::runtime::Device& device) {
      if (!device.gate.registered()) return;
      const std::int64_t until = device.table().slot(device.slot(Class::kBestEffort)).in_flight_until_ns.load();
      in_flight += std::max<std::int64_t>(0, elapsed_ns(until, cudasched::now_ns()));
    });
  });
  return in_flight;
}

std::int64_t cudasched_graph_ns(void* graph) {
  std::int64_t predicted_ns = 0;
  guarded([&] { predicted_ns = cudasched::runtime::engine().graph_ns(static_cast<CUgraphExec>(graph)); });
  return predicted_ns;
}

std::int64_t cudasched_others_slack_ns(void) {
  std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
  guarded([&] {
    cudasched::runtime::engine().for_each_device([&](cudasched::runtime::Device& device) {
      const std::int64_t slack_ns = device.latency.others_slack_ns();
      if (slack_ns != cudasched::schedule::Snapshot::kUnknownNs) least_ns = std::min(least_ns, slack_ns);
    });
  });
  return least_ns;
}

int cudasched_get_counts(cudasched_counts* counts) {
  return guarded([&] { cudasched::runtime::gather_counts(*counts); });
}

void cudasched_finish(void) { cudasched::runtime::engine().lifecycle().finish(); }

int cudasched_set_process_class(std::int32_t client_class, std::int32_t priority, double slo_ms) {
  return guarded([&] {
    cudasched::runtime::engine().set_process_class(checked_class(client_class), priority, checked_slo_ns(slo_ms));
  });
}

int cudasched_region_enter(std::int32_t client_class, std::int32_t priority, double slo_ms, std::uint64_t* token) {
  return cudasched_region_enter_named(client_class, priority, slo_ms, nullptr, token);
}

int cudasched_region_enter_named(std::int32_t client_class, std::int32_t priority, double slo_ms, const char* name,
                                 std::uint64_t* token) {
  return guarded([&] {
    const std::string_view checked = checked_name(name);
    const Class region_class = checked_class(client_class);
    const std::int64_t slo_ns = checked_slo_ns(slo_ms);
    const std::int64_t deadline_ns = slo_ns == 0 ? 0 : cudasched::now_ns() + slo_ns;
    *token = cudasched::runtime::engine().regions().enter(region_class, priority, slo_ns, deadline_ns, checked);
  });
}

int cudasched_region_enter_until(std::int32_t client_class, std::int32_t priority, std::int64_t deadline_ns,
                                 std::uint64_t* token) {
  return guarded([&] {
    if (deadline_ns < 0) {
      throw cudasched::ConfigError("a deadline is a time of CLOCK_MONOTONIC in ns, 0 for none; got " +
                                   std::to_string(deadline_ns));
    }
    *token = cudasched::runtime::engine().regions().enter(checked_class(client_class), priority, 0, deadline_ns);
  });
}

int cudasched_region_exit(std::uint64_t token) {
  return guarded([&] { cudasched::runtime::engine().regions().exit(token); });
}

int cudasched_region_may_move(std::uint64_t token) {
  return guarded([&] { cudasched::runtime::engine().regions().may_move(token); });
}

int cudasched_region_end_elsewhere(std::uint64_t token) {
  return guarded([&] { cudasched::runtime::engine().regions().end_elsewhere(token); });
}

int cudasched_bind_stream(std::uint64_t stream, std::int32_t client_class) {
  return guarded([&] { cudasched::runtime::engine().bind_stream(stream, checked_class(client_class)); });
}

int cudasched_unbind_stream(std::uint64_t stream) {
  return guarded([&] { cudasched::runtime::engine().unbind_stream(stream); });
}

int cudasched_configure(const char* name, const char* value) {
  return guarded([&] {
    if (name == nullptr || value == nullptr) throw cudasched::ConfigError("a setting has a name and a value");
    cudasched::runtime::engine().configure(name, value);
  });
}

int cudasched_use_cache(cudasched_release_cache release, void* context) {
  return guarded([&] { cudasched::runtime::memory().use_cache(release, context); });
}

int cudasched_add_pool(const cudasched_pool* pool) {
  return guarded([&] {
    if (pool == nullptr || pool->trim == nullptr || pool->read == nullptr) {
      throw cudasched::ConfigError("a pool has functions that trim and read it");
    }
    cudasched::runtime::memory().pools.add(*pool);
  });
}

int cudasched_remove_pool(void* pool) {
  return guarded([&] { cudasched::runtime::memory().pools.remove(pool); });
}

int cudasched_expect(double within_ms) {
  return guarded([&] { cudasched::runtime::engine().regions().expect(checked_hint_ns(within_ms)); });
}

int cudasched_measure(double pause_ms, cudasched_measuring* found) {
  return guarded([&] {
    constexpr double kMostMs = static_cast<double>(cudasched::schedule::kLongestPauseNs / cudasched::kNsPerMs);
    if (!(pause_ms <= kMostMs)) {
      throw cudasched::ConfigError("others pause for at most " + std::to_string(static_cast<int>(kMostMs)) +
                                   " ms at a time; got " + std::to_string(pause_ms));
    }
    const double pause_ns = std::max(pause_ms, -1.0) * static_cast<double>(cudasched::kNsPerMs);
    cudasched::runtime::engine().regions().measure(static_cast<std::int64_t>(pause_ns), *found);
  });
}

int cudasched_coverage_start(const char* cupti_path) {
  return guarded([&] { cudasched::runtime::engine().start_coverage(cupti_path == nullptr ? "" : cupti_path); });
}

int cudasched_coverage_flush(void) {
  return guarded([] { cudasched::telemetry::cupti::flush(cudasched::telemetry::cupti::Use::kCount, /*all=*/true); });
}

int cudasched_read_table(const char* path, cudasched_client* clients, std::int32_t capacity, std::int32_t* count,
                         char* device_name) {
  return guarded([&] { read_table(path, clients, nullptr, capacity, *count, device_name); });
}

int cudasched_read_counts(const char* path, cudasched_client* clients, cudasched_counts* counts, std::int32_t capacity,
                          std::int32_t* count, char* device_name) {
  return guarded([&] { read_table(path, clients, counts, capacity, *count, device_name); });
}

int cudasched_run_directory(char* path, std::uint64_t path_bytes) {
  return guarded([&] {
    const std::string directory = cudasched::arbiter::default_directory();
    if (directory.size() >= path_bytes) {
      throw cudasched::ConfigError("the path " + directory + " wants " + std::to_string(directory.size() + 1) +
                                   " bytes, and there is room for " + std::to_string(path_bytes));
    }
    copy_text(path, path_bytes, directory);
  });
}

}  // extern "C"
