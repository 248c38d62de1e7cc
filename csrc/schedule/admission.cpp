#include "schedule/admission.hpp"

#include <algorithm>

#include "schedule/host_bound.hpp"

namespace cudasched::schedule {
namespace {

constexpr Decision kGo{Answer::kSubmit, 0};

// In the gaps of another context's requests. Where best effort has nothing left for a moment, the GPU changes to the
// other context and back, which takes longer than most kernels: with 20 us in flight it got a third of the gaps.
constexpr std::int64_t kSlicedLeadNs = 200'000;

// How long a launch waits at most until the next look at the latency work on the GPU.
constexpr std::int64_t kLookAgainNs = 200'000;

Decision wait_for_time(std::int64_t wait_ns) noexcept {
  return {Answer::kWaitForTime, std::max<std::int64_t>(wait_ns, 1)};
}

// The rest of the decision, once latency work does not stand in the way.
Decision just_in_time(const Snapshot& snapshot) noexcept {
  if (!snapshot.my_turn) return {Answer::kWaitForTurn, 0};
  if (snapshot.in_flight_ns > snapshot.lead_ns) return wait_for_time(snapshot.in_flight_ns - snapshot.lead_ns);
  if (snapshot.looks_out() && snapshot.in_flight_ns + snapshot.longest_ns() > snapshot.free_ns) {
    return wait_for_time(std::min(snapshot.foreseen_over_ns, snapshot.max_hold_ns - snapshot.waited_ns));
  }
  return kGo;
}

}  // namespace

Decision bounded(const Snapshot& snapshot) noexcept {
  const std::int64_t with_it_ns = snapshot.in_flight_ns + snapshot.predicted_ns;
  if (snapshot.launches_in_flight < kFewestUngated || with_it_ns <= kMostUngatedNs) return kGo;
  return wait_for_time(with_it_ns - kMostUngatedNs);
}

Decision open(const Snapshot&) noexcept { return kGo; }

Decision strict(const Snapshot& snapshot) noexcept {
  if (!snapshot.latency_clients) return kGo;
  if (snapshot.latency_active) return {Answer::kWaitForLatency, 0};
  if (snapshot.hint_ns > 0) return wait_for_time(snapshot.hint_ns);
  const std::int64_t linger_ns = snapshot.linger_ns * (snapshot.looks_out() ? Snapshot::kLongLinger : 1);
  if (snapshot.since_latency_ns < linger_ns) return wait_for_time(linger_ns - snapshot.since_latency_ns);
  return just_in_time(snapshot);
}

Decision slack(const Snapshot& snapshot) noexcept {
  if (!snapshot.latency_clients || !snapshot.latency_active) return strict(snapshot);
  if (snapshot.host_bound.known) return harvest(snapshot);
  const bool fits =
      snapshot.slack_ns > 0 && snapshot.in_flight_ns + snapshot.longest_ns() <= snapshot.slack_ns - snapshot.margin_ns;
  if (!fits) return {Answer::kWaitForLatency, 0};
  if (snapshot.hint_ns > 0) return wait_for_time(snapshot.hint_ns);
  return just_in_time(snapshot);
}

Decision harvest(const Snapshot& snapshot) noexcept {
  if (!snapshot.latency_clients || !snapshot.latency_active) return strict(snapshot);
  const HostBound& requests = snapshot.host_bound;
  if (!requests.known) return {Answer::kWaitForLatency, 0};
  if (snapshot.hint_ns > 0) return wait_for_time(snapshot.hint_ns);
  if (!snapshot.my_turn) return {Answer::kWaitForTurn, 0};
  if (requests.sliced) {
    if (requests.closed) return {Answer::kWaitForLatency, 0};
    const std::int64_t lead_ns = std::max(snapshot.lead_ns, kSlicedLeadNs);
    if (snapshot.in_flight_ns > lead_ns) return wait_for_time(snapshot.in_flight_ns - lead_ns);
    return kGo;
  }
  const std::int64_t on_gpu_ns = snapshot.in_flight_ns + requests.gpu_ns;
  const std::int64_t most_ns = snapshot.in_flight_ns + requests.gpu_most_ns + snapshot.longest_ns();
  // The GPU's work may turn out to be less than the most, as long as the host has time left.
  if (const std::int64_t excess_ns = late_by_ns(requests, most_ns) - requests.late_ns; excess_ns > 0) {
    const std::int64_t spare_ns = requests.left_host_ns - requests.left_gpu_ns;
    if (spare_ns <= 0) return {Answer::kWaitForLatency, 0};
    return wait_for_time(std::min({excess_ns, spare_ns, kLookAgainNs}));
  }
  if (on_gpu_ns > snapshot.lead_ns) return wait_for_time(on_gpu_ns - snapshot.lead_ns);
  return kGo;
}

std::int64_t foreign_in_flight_ns(std::int64_t until_ns, std::int64_t now_ns) noexcept {
  constexpr std::int64_t kMostNs = 1'000'000'000;
  return until_ns > now_ns && until_ns - now_ns <= kMostNs ? until_ns - now_ns : 0;
}

bool is_fresh(std::int64_t beat_ns, std::int64_t now_ns, std::int64_t stale_ns) noexcept {
  return beat_ns >= now_ns - stale_ns && beat_ns <= now_ns + stale_ns;
}

}  // namespace cudasched::schedule
