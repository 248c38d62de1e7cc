#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arbiter/table.hpp"
#include "base/error.hpp"
#include "schedule/policy.hpp"
#include "simulate/replay.hpp"

namespace cudasched::simulate {
namespace {

void check(const ReplaySettings& settings) {
  const auto refuse = [](const char* name, const char* least) {
    throw ConfigError(std::string("simulation: ") + name + " must be " + least);
  };
  using Times = std::initializer_list<std::pair<const char*, std::int64_t>>;
  for (const auto& [name, value] : Times{{"lead", settings.lead_ns},
                                         {"linger", settings.linger_ns},
                                         {"margin", settings.margin_ns},
                                         {"launch time", settings.launch_ns},
                                         {"push time", settings.push_ns},
                                         {"kernel gap", settings.kernel_gap_ns},
                                         {"switch time", settings.switch_ns},
                                         {"time of cold caches", settings.cold_ns},
                                         {"slice of best effort", settings.best_effort_slice_ns},
                                         {"slice of latency clients", settings.latency_slice_ns}}) {
    if (value < 0) refuse(name, "0 or more");
  }
  for (const auto& [name, value] : Times{{"reaction time", settings.reaction_ns},
                                         {"turn", settings.turn_ns},
                                         {"slice", settings.slice_ns},
                                         {"length", settings.end_ns}}) {
    if (value <= 0) refuse(name, "above 0");
  }
  if (!settings.user_policy && schedule::find_policy(settings.policy) == nullptr) {
    std::string known;
    for (const schedule::Policy& policy : schedule::policies()) {
      known += (known.empty() ? "" : ", ") + std::string(policy.name);
    }
    throw ConfigError("policy '" + settings.policy + "' is unknown; there are " + known);
  }
  if (!(settings.prediction_sigma >= 0 && settings.prediction_sigma <= 3)) refuse("prediction sigma", "0 to 3");
}

void check(const ReplayClient& client) {
  const auto refuse = [&](const std::string& what) { throw ConfigError("client '" + client.name + "': " + what); };
  const bool latency = client.client_class == Class::kLatency;
  if (!latency && client.client_class != Class::kBestEffort) refuse("its class must be latency or best_effort");
  if (client.launches.empty()) refuse("it has no launches");
  constexpr std::int64_t kMostNs = std::int64_t{1} << 52;  // that a double has to the nanosecond
  const bool possible = std::all_of(client.launches.begin(), client.launches.end(), [](const TraceLaunch& one) {
    return std::min(one.gap_ns, one.duration_ns) >= 0 && std::max(one.gap_ns, one.duration_ns) <= kMostNs &&
           one.kernels >= 1;
  });
  if (!possible) refuse("a gap or duration is negative or over 52 days, or a graph has no kernel");
  const bool shares = std::all_of(client.launches.begin(), client.launches.end(), [](const TraceLaunch& one) {
    return one.sms > 0 && one.sms <= 1 && one.bandwidth >= 0 && one.bandwidth <= 1;
  });
  if (!shares) refuse("the part of the multiprocessors or of the bandwidth that a launch takes is not from 0 to 1");
  if (!latency && !client.arrivals_ns.empty()) refuse("best-effort clients have no arrivals");
  if (!std::is_sorted(client.arrivals_ns.begin(), client.arrivals_ns.end())) refuse("its arrivals are not in order");
  const bool negative_time = client.slo_ns < 0 || client.prepare_ns < 0 || client.expect_ns < 0 || client.joins_ns < 0;
  if (negative_time) refuse("a time is negative");
  if (!client.arrivals_ns.empty() && client.arrivals_ns.front() < client.joins_ns)
    refuse("work begins before the client joins");
  std::size_t before = 0;
  for (const std::size_t end : client.request_ends) {
    if (end <= before || end > client.launches.size()) refuse("the requests do not divide the launches");
    before = end;
  }
  if (!client.request_ends.empty() && before != client.launches.size()) {
    refuse("the last request does not end with the last launch");
  }
}

}  // namespace

void check(std::span<const ReplayClient> clients, const ReplaySettings& settings) {
  check(settings);
  if (clients.empty() || clients.size() > arbiter::kSlotCount) throw ConfigError("a simulation has 1 to 64 clients");
  for (const ReplayClient& client : clients) check(client);
}

std::vector<TraceLaunch> trace_launches(std::span<const RecordedLaunch> recorded) {
  constexpr std::int64_t kAheadNs = 20'000;  // from a launch to its start: others were before it
  constexpr std::size_t kFullQueue = 512;    // launches not complete: no program means to run so far ahead
  constexpr std::int64_t kShortGapNs = 10'000;
  std::vector<TraceLaunch> launches;
  launches.reserve(recorded.size());
  std::int64_t busy_until_ns = INT64_MIN;
  std::size_t done = 0;  // launches before this one are complete
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    TraceLaunch traced{0, std::max<std::int64_t>(launch.duration_ns, 0), false};
    if (i > 0) {
      const RecordedLaunch& before = recorded[i - 1];
      traced.gap_ns = std::max<std::int64_t>(launch.submitted_ns - before.submitted_ns, 0);
      const bool was_ahead = before.start_ns >= 0 && before.start_ns - before.submitted_ns > kAheadNs;
      if (was_ahead && before.submitted_ns < busy_until_ns && busy_until_ns <= launch.submitted_ns) {
        traced.synchronised = true;
        traced.gap_ns = launch.submitted_ns - busy_until_ns;
      }
      while (done < i && recorded[done].start_ns + recorded[done].duration_ns <= launch.submitted_ns) ++done;
      if (i - done >= kFullQueue) traced.gap_ns = std::min(traced.gap_ns, kShortGapNs);
    }
    if (launch.start_ns >= 0) {
      const std::int64_t end_ns = launch.start_ns + traced.duration_ns;
      traced.duration_ns = std::max<std::int64_t>(end_ns - std::max(launch.start_ns, busy_until_ns), 0);
      busy_until_ns = std::max(busy_until_ns, end_ns);
    }
    launches.push_back(traced);
  }
  return launches;
}

std::vector<std::size_t> request_ends(std::span<const RecordedLaunch> recorded, std::int64_t gap_ns) {
  std::vector<std::size_t> ends;
  std::int64_t busy_until_ns = INT64_MIN;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    const bool quiet = i > 0 && launch.submitted_ns - std::max(busy_until_ns, recorded[i - 1].submitted_ns) >= gap_ns;
    if (quiet) ends.push_back(i);
    const std::int64_t start_ns = launch.start_ns >= 0 ? launch.start_ns : launch.submitted_ns;
    busy_until_ns = std::max(busy_until_ns, start_ns + std::max<std::int64_t>(launch.duration_ns, 0));
  }
  if (!recorded.empty()) ends.push_back(recorded.size());
  return ends;
}

}  // namespace cudasched::simulate
