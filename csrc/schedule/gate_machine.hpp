// The gate's decisions, for a program (runtime/gate.hpp) and for a simulation (simulate/replay.hpp): what is in flight,
// what a policy is shown, what its answer comes to, and what an admission changes.
//
// The caller has the clock, the driver and the predictor. It calls look() with what the driver says is complete; then
// step() for a launch that asks beside a latency client, until that is admitted; submit() before the launch goes to the
// driver, and submitted() behind that. While no latency client is there, launches are counted by estimates, and what is
// in flight is bounded: estimate(), step_ungated() and submit_ungated().
//
// Pure: no clock, no driver, no allocation, no system call. Not thread-safe but for neighbours().latency_active(): the
// caller holds a lock. 120 KiB.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "schedule/admission.hpp"
#include "schedule/estimates.hpp"
#include "schedule/gate_settings.hpp"
#include "schedule/hold_limit.hpp"
#include "schedule/lead.hpp"
#include "schedule/ledger.hpp"
#include "schedule/neighbours.hpp"
#include "schedule/policy.hpp"
#include "schedule/rendezvous.hpp"
#include "schedule/sleep_plan.hpp"

namespace cudasched::schedule {

class GateMachine {
 public:
  // Between two looks of a launch that waits: for its turn, which may expire without a word; for latency work, whose
  // client may have died; for other members of its job; and for less to be in flight while no latency client is there,
  // where that is proven to be what it is taken for or not, against the shortest it may be.
  static constexpr std::int64_t kTurnLookNs = 500'000;
  static constexpr std::int64_t kLatencyLookNs = 5'000'000;
  static constexpr std::int64_t kMeetLookNs = 30'000;
  static constexpr std::int64_t kUngatedLookNs = 500'000;
  static constexpr std::int64_t kUnprovenLookNs = 50'000;
  static constexpr std::int64_t kNotDueNs = INT64_MAX;

  // A launch that asks beside a latency client, and what its looks so far have seen.
  struct Launch {
    std::uint64_t stream = 0;
    std::int64_t predicted_ns = 0;
    std::int64_t bound_ns = 0;
    bool by_launcher = false;    // it was ready when the one before was submitted
    bool is_collective = false;  // of its job
    bool tells_lead = true;      // its completion will be seen

    std::int64_t looked_ns = 0;  // 0: not yet
    bool was_active = false;     // what the last look saw: latency work,
    bool for_turn = false;       // and what the launch was held for
    bool for_lead = false;
    bool was_for_lead = false;  // once
    bool only_for_lead = true;  // nothing else has held it
    bool late = false;          // the GPU ran out of work because the program had none for it
    std::int64_t calm_ns = 0;   // waited in all: while no latency work was active,
    std::int64_t turn_ns = 0;   // for the turn,
    std::int64_t held_ns = 0;   // and because the lead was in flight
  };

  // What an admitted launch is until its completion is known. 0 in `admitted_ns`: it tells the lead nothing.
  struct Ticket {
    int entry = Ledger::kNone;     // the segment whose marker it records; kNone: nothing is to be reported
    std::uint32_t generation = 0;  // of the ledger: it starts anew when the context goes
    std::int64_t predicted_ns = 0;
    std::int64_t admitted_ns = 0;
    std::int64_t held_ns = 0;       // for the lead
    std::int64_t dry_since_ns = 0;  // since when nothing of ours had been in flight; 0: something was
    bool dry = false;               // nothing else of ours was in flight
  };

  struct Verdict {
    Decision decision;                       // kSubmit: the launch is admitted
    Exception exception = Exception::kNone;  // by which it is, though it was held
    bool again = false;                      // another gate took the slack that was seen: look again at once
    bool for_members = false;                // the policy would let it go: it waits for other members of its job
    bool announce = false;                   // other clients are to know that it waits
    bool passed_on = false;                  // the turn was: those that wait are to look
    bool unmet = false;                      // a collective that goes without another member's
    std::int64_t look_in_ns = 0;             // look again then, at the latest,
    std::int64_t may_be_late_ns = 0;         // or later by this

    bool waits() const noexcept { return decision.answer != Answer::kSubmit; }
  };

  void join(arbiter::Layout* layout, int slot, bool mps, const GateSettings& settings) noexcept {
    neighbours_.join(layout, slot, mps, settings);
    configure(settings);
  }
  // Lead, linger, margin and long_ns from the next launch on.
  void configure(const GateSettings& settings) noexcept;
  void use_policy(const Decider& policy) noexcept;
  std::string_view refused_policy() const noexcept { return decider_.refused(); }

  // The time is `now_ns`. `is_complete(segment)`: what the driver says of a segment with a marker. done(segment,
  // completed, marked) is called for each that is complete, `marked` where the driver said so and not the clock.
  template <typename IsComplete, typename Done>
  void look(std::int64_t now_ns, IsComplete&& is_complete, Done&& done) noexcept {
    const std::uint64_t before = ledger_.completions();
    ledger_.look(now_ns, gpu());
    estimates_.look(now_ns);
    ledger_.for_each([&](int segment) {
      const Ledger::State state = ledger_.state(segment);
      if (state == Ledger::State::kPending) return false;
      const bool marked = state == Ledger::State::kMarked;
      if (marked ? !is_complete(segment) : !ledger_.has_run_out(segment)) return false;
      const Ledger::Completed completed = ledger_.complete(segment);
      if (at(segment).estimated) learn(segment, completed, marked);
      done(segment, completed, marked);
      return true;
    });
    // Somewhere between the two looks.
    if (ledger_.launches() == 0 && dry_since_ns_ == 0) dry_since_ns_ = (looked_ns_ + now_ns) / 2;
    looked_ns_ = now_ns;
    // Others count what this client has in flight until they hear that it is done.
    if (ledger_.completions() != before) neighbours_.publish(now_ns + ledger_.remaining_ns());
  }

  // ---- beside a latency client

  // A launch asks beside one. True: none was there before.
  bool begin_gated() noexcept { return !std::exchange(gated_, true); }
  bool gated() const noexcept { return gated_; }

  // The launch looks, after look(); its ticket is made out where it is admitted. `own_latency`: the slot of this
  // process's latency client, -1: it has none. `members`: how far other members of its job are, whose collectives are
  // to go with this one; null: it is none. `must_go()`: it may not wait. `others_queued()`: are operations of other
  // streams queued behind it? Both are asked only where it is held.
  template <typename MustGo, typename OthersQueued>
  Verdict step(Launch& launch, Ticket& ticket, int own_latency, const JobProgress* members, std::int64_t now_ns,
               MustGo&& must_go, OthersQueued&& others_queued) noexcept {
    Verdict verdict = decide(launch, own_latency, members, now_ns);
    if (verdict.waits()) {
      if (must_go()) {
        verdict.decision = {};
      } else if (launch.for_lead && !seen_.latency_active) {
        verdict.exception = exception(launch.stream, launch.was_for_lead, others_queued);
        if (verdict.exception != Exception::kNone) verdict.decision = {};
      }
    }
    if (!verdict.waits()) admit(launch, ticket, own_latency, now_ns, verdict);
    return verdict;
  }
  // What the policy was shown.
  const Snapshot& seen() const noexcept { return seen_; }

  // The admitted launch goes to the driver now.
  Ledger::Entry submit(const Launch& launch, Ticket& ticket, std::int64_t now_ns) noexcept {
    const Ledger::Entry entry = ledger_.submit(launch.stream, launch.predicted_ns, /*mark=*/true);
    ticket.entry = entry.segment;
    ticket.generation = generation_;
    if (entry.segment >= 0) {
      at(entry.segment).estimated = false;
      note_due(entry.segment, launch.stream, now_ns);
    }
    neighbours_.publish(now_ns + ledger_.remaining_ns());
    return entry;
  }

  // ---- while no latency client is there

  // By the launch's key; where there is none, ask the predictor and note() what it says.
  Estimates::Found estimate(std::uint64_t key) noexcept {
    if (gated_) estimates_.clear();  // the predictor has learned
    gated_ = false;
    return estimates_.find(key);
  }
  Estimates::Found note(std::uint64_t key, std::int64_t duration_ns, bool is_collective = false) noexcept {
    estimates_.note(key, duration_ns, is_collective);
    return estimates_.find(key);
  }
  // May it be too much, without a look at the clock?
  bool is_much(const Estimates::Found& found) const noexcept {
    return !unbounded_ && ledger_.launches() >= kFewestUngated &&
           ledger_.submitted_ns() + found.duration_ns > kMostUngatedNs;
  }
  bool unbounded() const noexcept { return unbounded_; }  // the policy is to let everything go

  // The launch looks, after look(). `was_held`: by an earlier look.
  template <typename MustGo, typename OthersQueued>
  Verdict step_ungated(std::uint64_t stream, const Estimates::Found& found, bool& was_held, MustGo&& must_go,
                       OthersQueued&& others_queued) noexcept {
    Verdict verdict = decide_ungated(stream, found);
    if (!verdict.waits()) return verdict;
    if (must_go()) {
      verdict.decision = {};
      return verdict;
    }
    verdict.exception = exception(stream, was_held, others_queued);
    if (verdict.exception != Exception::kNone) verdict.decision = {};
    return verdict;
  }
  // The launch goes to the driver now. Without a marker nothing more is to be done: the ticket has no entry then.
  Ledger::Entry submit_ungated(std::uint64_t stream, std::uint64_t key, const Estimates::Found& found,
                               Ticket& ticket) noexcept {
    const Ledger::Entry entry = ledger_.submit(stream, found.duration_ns, /*mark=*/!found.proven);
    ticket.predicted_ns = found.duration_ns;
    if (entry.segment < 0) return entry;
    const bool tells = entry.marks && (!found.proven || ledger_.segment_launches(entry.segment) == 1);
    Note& note = at(entry.segment);
    note.key = tells ? key : 0;
    note.others_ns = ledger_.predicted_ns(entry.segment) - found.duration_ns;
    note.estimated = true;
    note.due_ns = kNotDueNs;
    if (!entry.marks) return entry;
    ticket.entry = entry.segment;
    ticket.generation = generation_;
    return entry;
  }
  // One with a marker is predicted to end by what is in flight before it.
  void note_due(int segment, std::uint64_t stream, std::int64_t now_ns) noexcept {
    at(segment).due_ns = now_ns + ledger_.remaining_ns(stream);
  }

  // ---- both

  // The launch call has returned. `recorded`: the marker is behind it. False: the context went meanwhile. Where the
  // ticket tells the lead, a look() and learn_lead() are to follow.
  bool submitted(const Ticket& ticket, bool accepted, bool recorded, std::int64_t now_ns) noexcept {
    submitted_ns_ = now_ns;
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
  // Had the GPU run out of our work when the launch reached it? Then the lead was too small, if it is what held it.
  void learn_lead(const Ticket& ticket, std::int64_t now_ns) noexcept;

  // What was in flight is forgotten: its context goes.
  void forget() noexcept {
    ledger_.clear();
    notes_.fill({});
    ++generation_;
  }

  // When the first of the segments in flight should have ended; kNotDueNs: none is predicted.
  std::int64_t earliest_due_ns() noexcept;

  Ledger& ledger() noexcept { return ledger_; }
  const Ledger& ledger() const noexcept { return ledger_; }
  Neighbours& neighbours() noexcept { return neighbours_; }
  const Neighbours& neighbours() const noexcept { return neighbours_; }
  const Lead& lead() const noexcept { return lead_; }
  std::int64_t long_ns() const noexcept { return settings_.long_ns; }
  // Whose the GPU has been since the last decision.
  Ledger::Gpu gpu() const noexcept;

 private:
  // Between a submission and the next launch, where the launcher has it ready, and where the program must make it: what
  // takes longer is the program's doing.
  static constexpr std::int64_t kPromptNs = 20'000;
  static constexpr std::int64_t kPromptProgramNs = 200'000;

  // Of a segment.
  struct Note {
    std::uint64_t key = 0;       // the estimate that its completion tells of
    std::int64_t others_ns = 0;  // of its other launches
    bool estimated = false;      // its launches were estimated, not predicted
    std::int64_t due_ns = kNotDueNs;
  };

  Note& at(int segment) noexcept { return notes_[static_cast<std::size_t>(segment)]; }
  void learn(int segment, const Ledger::Completed& completed, bool marked) noexcept;
  Verdict decide(Launch& launch, int own_latency, const JobProgress* members, std::int64_t now_ns) noexcept;
  Verdict decide_ungated(std::uint64_t stream, const Estimates::Found& found) noexcept;
  void admit(const Launch& launch, Ticket& ticket, int own_latency, std::int64_t now_ns, Verdict& verdict) noexcept {
    verdict.again = !neighbours_.admitted(seen_, own_latency);
    if (verdict.again) return;
    ticket.predicted_ns = launch.predicted_ns;
    ticket.dry = ledger_.launches() == 0;
    // Where something else held it, latency work or a turn, a GPU that ran dry says nothing about the lead.
    if (settings_.adaptive_lead && launch.tells_lead && launch.only_for_lead && !launch.late &&
        latency_seen_ns_ < admitted_ns_) {
      ticket.admitted_ns = now_ns;
      ticket.held_ns = launch.held_ns;
      ticket.dry_since_ns = ticket.dry ? dry_since_ns_ : 0;
    }
    if (launch.is_collective) verdict.unmet = neighbours_.collective_submitted(now_ns);
    admitted_ns_ = now_ns;
    dry_since_ns_ = 0;
  }

  // The launch is held because of what is in flight: is it to go nonetheless?
  template <typename OthersQueued>
  Exception exception(std::uint64_t stream, bool& was_held, OthersQueued&& others_queued) noexcept {
    const std::int64_t observed_ns = ledger_.observed_ns();
    if (!std::exchange(was_held, true)) hold_limit_.begin(observed_ns);
    HoldLimit::View view{observed_ns, ledger_.completions(), ledger_.any_late(), ledger_.late_ns(stream) > 0, false};
    view.others_queued = view.own_stream_is_late && others_queued();
    return hold_limit_.look(view);
  }

  GateSettings settings_;
  Neighbours neighbours_;
  Decider decider_;
  Lead lead_;
  HoldLimit hold_limit_;
  Snapshot seen_;
  bool unbounded_ = false;
  bool gated_ = false;  // the last launch found a latency client
  bool latency_was_active_ = false;
  bool had_turn_ = true;
  std::int64_t latency_seen_ns_ = 0;  // when it last was; 0: never
  std::int64_t admitted_ns_ = 0;      // the last gated launch,
  std::int64_t submitted_ns_ = 0;     // and when it had reached the driver
  std::int64_t looked_ns_ = 0;        // when completions were last looked for
  std::int64_t dry_since_ns_ = 0;     // since when nothing of ours has been in flight; 0: something is
  std::uint32_t generation_ = 0;
  Ledger ledger_;
  Estimates estimates_;
  std::array<Note, Ledger::kMarkers> notes_{};
};

}  // namespace cudasched::schedule
