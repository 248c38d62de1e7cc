#include "schedule/gate_machine.hpp"

#include <algorithm>

namespace cudasched::schedule {

void GateMachine::configure(const GateSettings& settings) noexcept {
  settings_ = settings;
  lead_ = settings.lead();
}

void GateMachine::use_policy(const Decider& policy) noexcept {
  decider_ = policy;
  unbounded_ = policy.name() == "open";
  neighbours_.look_into_requests(looks_into_requests(policy.name()));
}

Ledger::Gpu GateMachine::gpu() const noexcept {
  using Gpu = Ledger::Gpu;
  const bool in_gaps = latency_was_active_ && seen_.host_bound.known && !seen_.host_bound.closed;
  if (!had_turn_ || (latency_was_active_ && seen_.slack_ns <= 0 && !in_gaps)) return Gpu::kAnothers;
  return in_gaps ? Gpu::kInGaps : latency_was_active_ ? Gpu::kShared : Gpu::kOwn;
}

// ---- work in flight ------------------------------------------------------------------------------------------------

void GateMachine::learn(int segment, const Ledger::Completed& completed, bool marked) noexcept {
  const Note note = std::exchange(at(segment), {});
  if (!marked) return;
  if (note.key == 0) return estimates_.observe_together(completed.predicted_ns, completed.least_ns, completed.most_ns);
  const std::int64_t others_ns = std::min(note.others_ns, completed.least_ns);
  estimates_.observe(note.key, completed.least_ns - others_ns, completed.most_ns);
}

std::int64_t GateMachine::earliest_due_ns() noexcept {
  std::int64_t earliest = kNotDueNs;
  ledger_.for_each([&](int segment) {
    earliest = std::min(earliest, at(segment).due_ns);
    return false;  // the first of each stream
  });
  return earliest;
}

void GateMachine::learn_lead(const Ticket& ticket, std::int64_t now) noexcept {
  std::int64_t dry = 0;
  if (ledger_.launches() <= 1) {
    // While the driver was launching, at some moment unknown.
    dry = ticket.dry_since_ns != 0 ? now - ticket.dry_since_ns : (now - ticket.admitted_ns) / 2;
  }
  lead_.submitted(ticket.held_ns, dry, ticket.predicted_ns);
}

// ---- while no latency client is there ------------------------------------------------------------------------------

GateMachine::Verdict GateMachine::decide_ungated(std::uint64_t stream, const Estimates::Found& found) noexcept {
  latency_was_active_ = false;
  had_turn_ = true;
  Snapshot snapshot;
  snapshot.predicted_ns = found.duration_ns;
  snapshot.in_flight_ns = ledger_.remaining_ns(stream);
  snapshot.launches_in_flight = ledger_.launches();
  Verdict verdict;
  verdict.decision = bounded(snapshot);
  verdict.look_in_ns = found.proven ? kUngatedLookNs : kUnprovenLookNs;
  return verdict;
}

// ---- beside a latency client ---------------------------------------------------------------------------------------

GateMachine::Verdict GateMachine::decide(Launch& launch, int own_latency, const JobProgress* members,
                                         std::int64_t now) noexcept {
  Verdict verdict;
  if (launch.looked_ns == 0) {
    if (launch.is_collective) neighbours_.collective_arrived(now);
    if (ledger_.launches() == 0) {
      launch.late = now - submitted_ns_ > (launch.by_launcher ? kPromptNs : kPromptProgramNs);
      neighbours_.rejoined(now);
    }
  } else {
    // A look's findings hold until the next look.
    const std::int64_t passed_ns = now - launch.looked_ns;
    if (!launch.was_active) launch.calm_ns += passed_ns;
    if (launch.for_turn) launch.turn_ns += passed_ns;
    if (launch.for_lead) launch.held_ns += passed_ns;
  }
  // This client's own state, and by Neighbours the arbiter's words on others.
  Snapshot& snapshot = seen_ = {};
  snapshot.predicted_ns = launch.predicted_ns;
  snapshot.bound_ns = launch.bound_ns;
  snapshot.in_flight_ns = ledger_.remaining_ns(launch.stream);
  snapshot.launches_in_flight = ledger_.launches();
  snapshot.linger_ns = settings_.linger_ns;
  snapshot.margin_ns = settings_.margin_ns;
  snapshot.long_ns = settings_.long_ns;
  snapshot.waited_ns = launch.calm_ns;
  neighbours_.note_own_latency(own_latency);
  verdict.passed_on = neighbours_.look(snapshot, now, launch.turn_ns);
  if (settings_.adaptive_lead) neighbours_.report_requests(lead_);
  snapshot.lead_ns = lead_.ns();
  // A waiter that slept sees the end of the activity, not its last moment.
  if (snapshot.latency_active || latency_was_active_) latency_seen_ns_ = now;
  latency_was_active_ = snapshot.latency_active;
  had_turn_ = snapshot.my_turn;
  if (latency_seen_ns_ != 0) snapshot.since_latency_ns = now - latency_seen_ns_;
  Decision& decision = verdict.decision;
  decision = decider_(seen_);
  if (members != nullptr) {
    const Rendezvous::Verdict met = neighbours_.look_for_members(*members, now);
    verdict.for_members = met == Rendezvous::Verdict::kWait && decision.answer == Answer::kSubmit;
    if (verdict.for_members) decision = {Answer::kWaitForTime, kMeetLookNs};
    if (met == Rendezvous::Verdict::kNow) decision = {};
  }
  launch.looked_ns = now;
  launch.was_active = seen_.latency_active;
  launch.for_turn = decision.answer == Answer::kWaitForTurn;
  launch.for_lead = decision.answer == Answer::kWaitForTime && seen_.in_flight_ns > seen_.lead_ns;
  if (decision.answer != Answer::kSubmit && !launch.for_lead) launch.only_for_lead = false;
  // Where several clients feed at once, one that waits for the lead is behind as much as one that waits for its share.
  // One that waits for foreseen latency work is not: the others may go.
  verdict.announce = decision.answer != Answer::kWaitForTime || (neighbours_.feeds_with_others() && launch.for_lead);
  verdict.look_in_ns = decision.answer == Answer::kWaitForTime   ? std::min(decision.wait_ns, SleepPlan::kLongestNs)
                       : decision.answer == Answer::kWaitForTurn ? kTurnLookNs
                       : members != nullptr                      ? kMeetLookNs
                                                                 : kLatencyLookNs;
  verdict.may_be_late_ns = launch.for_lead ? seen_.lead_ns / 2 : 0;
  return verdict;
}

}  // namespace cudasched::schedule
