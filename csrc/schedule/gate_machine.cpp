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

// ---- what is in flight ---------------------------------------------------------------------------------------------

void GateMachine::learn(int segment, const Ledger::Completed& completed, bool marked) noexcept {
  Note& note = at(segment);
  if (note.key != 0 && marked) {
    const std::int64_t others_ns = std::min(note.others_ns, completed.least_ns);
    estimates_.observe(note.key, completed.least_ns - others_ns, completed.most_ns);
  } else if (note.estimated && marked) {
    estimates_.observe_together(completed.predicted_ns, completed.least_ns, completed.most_ns);
  }
  note = {};
}

void GateMachine::looked(std::int64_t now, std::uint64_t completions_before) noexcept {
  // Somewhere between the two looks.
  if (ledger_.launches() == 0 && dry_since_ns_ == 0) dry_since_ns_ = (looked_ns_ + now) / 2;
  looked_ns_ = now;
  // Others count what this client has in flight until they hear that it is done.
  if (ledger_.completions() != completions_before) neighbours_.publish(now + ledger_.remaining_ns());
}

std::int64_t GateMachine::earliest_due_ns() noexcept {
  std::int64_t earliest = kNotDueNs;
  ledger_.for_each([&](int segment) {
    earliest = std::min(earliest, at(segment).due_ns);
    return false;  // the first of each stream
  });
  return earliest;
}

bool GateMachine::submitted(const Ticket& ticket, bool accepted, bool recorded, std::int64_t now) noexcept {
  submitted_ns_ = now;
  if (ticket.generation != generation_) return false;
  if (!recorded) {
    at(ticket.entry) = {};
    ledger_.pin(ticket.entry, false);
  }
  if (accepted) {
    ledger_.submitted(ticket.entry, recorded);
  } else {
    ledger_.withdraw(ticket.entry, ticket.predicted_ns);
  }
  return true;
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

Ledger::Entry GateMachine::submit_ungated(std::uint64_t stream, std::uint64_t key, const Estimates::Found& found,
                                          Ticket& ticket) noexcept {
  const Ledger::Entry entry = ledger_.submit(stream, found.duration_ns, /*mark=*/!found.proven);
  ticket.predicted_ns = found.duration_ns;
  if (entry.segment < 0) return entry;
  const std::int64_t others_ns = ledger_.predicted_ns(entry.segment) - found.duration_ns;
  const bool tells = entry.marks && (!found.proven || ledger_.segment_launches(entry.segment) == 1);
  at(entry.segment) = {.key = tells ? key : 0, .others_ns = others_ns, .estimated = true, .due_ns = kNotDueNs};
  if (!entry.marks) return entry;
  ticket.entry = entry.segment;
  ticket.generation = generation_;
  return entry;
}

// ---- beside a latency client ---------------------------------------------------------------------------------------

void GateMachine::begin(Launch& launch, std::int64_t now) noexcept {
  if (launch.is_collective) neighbours_.collective_arrived(now);
  if (ledger_.launches() != 0) return;
  launch.late = now - submitted_ns_ > (launch.by_launcher ? kPromptNs : kPromptProgramNs);
  neighbours_.rejoined(now);
}

// The snapshot: this client's own state, and by Neighbours what the arbiter tells of others.
void GateMachine::gather(const Launch& launch, int own_latency, Verdict& verdict, std::int64_t now) noexcept {
  Snapshot snapshot;
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
  seen_ = snapshot;
}

GateMachine::Verdict GateMachine::decide(Launch& launch, int own_latency, const JobProgress* members,
                                         std::int64_t now) noexcept {
  Verdict verdict;
  if (launch.looked_ns == 0) {
    begin(launch, now);
  } else {
    // What a look saw lasts until the next one.
    const std::int64_t passed_ns = now - launch.looked_ns;
    if (!launch.was_active) launch.calm_ns += passed_ns;
    if (launch.for_turn) launch.turn_ns += passed_ns;
    if (launch.for_lead) launch.held_ns += passed_ns;
  }
  gather(launch, own_latency, verdict, now);
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

void GateMachine::admit(const Launch& launch, int own_latency, std::int64_t now, Verdict& verdict) noexcept {
  if (!neighbours_.admitted(seen_, own_latency)) {
    verdict.again = true;
    return;
  }
  Ticket& ticket = verdict.ticket;
  ticket.predicted_ns = launch.predicted_ns;
  ticket.dry = ledger_.launches() == 0;
  // Where something else held it, latency work or a turn, a GPU that ran dry says nothing about the lead.
  if (settings_.adaptive_lead && launch.tells_lead && launch.only_for_lead && !launch.late &&
      latency_seen_ns_ < admitted_ns_) {
    ticket.admitted_ns = now;
    ticket.held_ns = launch.held_ns;
    ticket.dry_since_ns = ticket.dry ? dry_since_ns_ : 0;
  }
  if (launch.is_collective) verdict.unmet = neighbours_.collective_submitted(now);
  admitted_ns_ = now;
  dry_since_ns_ = 0;
}

Ledger::Entry GateMachine::submit(const Launch& launch, Ticket& ticket, std::int64_t now) noexcept {
  const Ledger::Entry entry = ledger_.submit(launch.stream, launch.predicted_ns, /*mark=*/true);
  ticket.entry = entry.segment;
  ticket.generation = generation_;
  if (entry.segment >= 0) {
    at(entry.segment) = {};
    note_due(entry.segment, launch.stream, now);
  }
  neighbours_.publish(now + ledger_.remaining_ns());
  return entry;
}

}  // namespace cudasched::schedule
