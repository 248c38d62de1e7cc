#include "schedule/admission.hpp"

namespace cudasched::schedule {

Decision strict(const Snapshot& snapshot) noexcept {
  if (!snapshot.latency_clients) return {Answer::kSubmit, 0};
  if (snapshot.latency_active) return {Answer::kWaitForLatency, 0};
  if (!snapshot.my_turn) return {Answer::kWaitForTurn, 0};
  if (snapshot.in_flight_ns > snapshot.lead_ns) {
    return {Answer::kWaitForTime, snapshot.in_flight_ns - snapshot.lead_ns};
  }
  return {Answer::kSubmit, 0};
}

}  // namespace cudasched::schedule
