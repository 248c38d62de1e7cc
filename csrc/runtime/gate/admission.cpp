#include "runtime/gate/admission.hpp"

namespace cudasched::runtime {

void Held::note(const schedule::Snapshot& seen, const schedule::Decision& decision, std::int64_t now_ns) noexcept {
  looked_ns = now_ns;
  active = seen.latency_active;
  for_turn = decision.answer == schedule::Answer::kWaitForTurn;
  for_lead = decision.answer == schedule::Answer::kWaitForTime && seen.in_flight_ns > seen.lead_ns;
  if (decision.answer != schedule::Answer::kSubmit && !for_lead) only_for_lead = false;
}

void Held::pass(std::int64_t now_ns) noexcept {
  if (looked_ns == 0) return;
  const std::int64_t passed_ns = now_ns - looked_ns;
  if (!active) calm_ns += passed_ns;
  if (for_turn) turn_ns += passed_ns;
  if (for_lead) lead_ns += passed_ns;
}

void Admission::join(arbiter::Table* table, int slot, bool mps, const Settings& settings) noexcept {
  neighbours_.join(table, slot, mps, settings);
  if (const schedule::Policy* const policy = schedule::find_policy(settings.policy)) {
    use_policy(schedule::Decider(*policy));
  }
}

void Admission::configure(const Settings& settings) noexcept {
  schedule::Lead::Bounds bounds;
  bounds.first_ns = settings.first_lead_ns();
  lead_adapts_ = !settings.lead_ns.has_value();
  // What was set is what holds.
  if (!lead_adapts_) bounds.least_ns = bounds.most_ns = bounds.first_ns;
  bounds.max_inflation = settings.max_inflation;
  lead_ = schedule::Lead(bounds);
  margin_ns_ = settings.margin_ns;
  long_ns_ = settings.long_ns;
  linger_ns_ = settings.linger_ns;
}

schedule::Decision Admission::decide(const schedule::Ledger& ledger, std::uint64_t stream,
                                     const predict::Prediction& prediction, const Held& held,
                                     std::int64_t now_ns) noexcept {
  schedule::Snapshot snapshot;
  snapshot.predicted_ns = prediction.duration_ns;
  snapshot.bound_ns = prediction.bound_ns;
  snapshot.in_flight_ns = ledger.remaining_ns(stream);
  snapshot.launches_in_flight = ledger.launches();
  snapshot.linger_ns = linger_ns_;
  snapshot.margin_ns = margin_ns_;
  snapshot.long_ns = long_ns_;
  snapshot.waited_ns = held.calm_ns;
  neighbours_.look(snapshot, now_ns, held.turn_ns);
  if (lead_adapts_) neighbours_.report_requests(lead_);
  snapshot.lead_ns = lead_.ns();
  // A waiter that slept sees the end of the activity, not its last moment.
  if (snapshot.latency_active || latency_was_active_) latency_seen_ns_ = now_ns;
  latency_was_active_ = snapshot.latency_active;
  had_turn_ = snapshot.my_turn;
  if (latency_seen_ns_ != 0) snapshot.since_latency_ns = now_ns - latency_seen_ns_;
  seen_ = snapshot;
  return decider_(snapshot);
}

schedule::Decision Admission::decide_ungated(const schedule::Ledger& ledger, std::uint64_t stream,
                                             std::int64_t predicted_ns) noexcept {
  latency_was_active_ = false;
  had_turn_ = true;
  schedule::Snapshot snapshot;
  snapshot.predicted_ns = predicted_ns;
  snapshot.in_flight_ns = ledger.remaining_ns(stream);
  snapshot.launches_in_flight = ledger.launches();
  return schedule::bounded(snapshot);
}

}  // namespace cudasched::runtime
