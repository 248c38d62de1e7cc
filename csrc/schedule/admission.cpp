#include "schedule/admission.hpp"

namespace cudasched::schedule {

Decision strict(const Snapshot& snapshot) noexcept {
  if (!snapshot.latency_clients) return {Answer::kSubmit, 0};
  if (snapshot.latency_active) return {Answer::kWaitForLatency, 0};
  if (snapshot.since_latency_ns < snapshot.linger_ns) {
    return {Answer::kWaitForTime, snapshot.linger_ns - snapshot.since_latency_ns};
  }
  if (!snapshot.my_turn) return {Answer::kWaitForTurn, 0};
  if (snapshot.in_flight_ns > snapshot.lead_ns) {
    return {Answer::kWaitForTime, snapshot.in_flight_ns - snapshot.lead_ns};
  }
  return {Answer::kSubmit, 0};
}

std::int64_t foreign_in_flight_ns(std::int64_t until_ns, std::int64_t now_ns) noexcept {
  constexpr std::int64_t kMostNs = 1'000'000'000;
  return until_ns > now_ns && until_ns - now_ns <= kMostNs ? until_ns - now_ns : 0;
}

bool is_fresh(std::int64_t beat_ns, std::int64_t now_ns, std::int64_t stale_ns) noexcept {
  return beat_ns >= now_ns - stale_ns && beat_ns <= now_ns + stale_ns;
}

}  // namespace cudasched::schedule
