// The gate's decisions, for programs (runtime/gate.hpp) and simulations (simulate/replay.hpp): the work in flight, a
// policy's snapshot, the limits of the policy's answer, and the effects of an admission.
//
// The caller has the clock, the driver and the predictor. look() takes the time and the completions. Beside a latency
// client, a launch calls step() until the verdict admits it. submit() precedes the driver's call, submitted() follows
// it. Without a latency client, launches count by estimates and the time in flight is bounded: estimate(),
// step_ungated() and submit_ungated().
//
// Pure: no clock, no driver, no allocation, no system call. Not thread-safe but for neighbours().latency_active(): the
// caller holds a lock. 120 KiB.
#pragma once

#include <algorithm>
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
  // Between two looks of a waiting launch: for a turn, which may expire without a word; for latency work, whose client
  // may have died; for other members of a job; without a latency client, by a proven estimate and by an unproven one.
  static constexpr std::int64_t kTurnLookNs = 500'000;
  static constexpr std::int64_t kLatencyLookNs = 5'000'000;
  static constexpr std::int64_t kMeetLookNs = 30'000;
  static constexpr std::int64_t kUngatedLookNs = 500'000;
  static constexpr std::int64_t kUnprovenLookNs = 50'000;
  static constexpr std::int64_t kNotDueNs = INT64_MAX;

  // A launch beside a latency client, from its first look to its admission.
  struct Launch {
    std::uint64_t stream = 0;
    std::int64_t predicted_ns = 0;
    std::int64_t bound_ns = 0;
    bool by_launcher = false;    // the launcher thread had the launch ready
    bool is_collective = false;  // of the client's job
    bool tells_lead = true;      // the driver will report the completion

    std::int64_t looked_ns = 0;  // the last look; 0: none
    bool was_active = false;     // latency work, at the last look
    bool for_turn = false;       // the launch waits for a turn,
    bool for_lead = false;       // or because the lead is in flight
    bool was_for_lead = false;   // at some look
    bool only_for_lead = true;   // at every look
    bool late = false;           // the GPU ran dry before the program launched
    std::int64_t calm_ns = 0;    // waited without active latency work,
    std::int64_t turn_ns = 0;    // for a turn,
    std::int64_t held_ns = 0;    // and for the lead
  };

  // An admitted launch until its completion.
  struct Ticket {
    int entry = Ledger::kNone;     // the segment of the launch's marker; kNone: submitted() is not to be called
    std::uint32_t generation = 0;  // of the ledger, which starts anew when the context goes
    std::int64_t predicted_ns = 0;
    std::int64_t admitted_ns = 0;   // 0: the lead learns nothing from the launch
    std::int64_t held_ns = 0;       // for the lead
    std::int64_t dry_since_ns = 0;  // the beginning of the time without work in flight; 0: work was in flight
    bool dry = false;               // no other launch was in flight
  };

  struct Verdict {
    Decision decision;                       // kSubmit: admitted
    Exception exception = Exception::kNone;  // the reason to admit a held launch
    bool again = false;                      // another gate took the slack: look again at once
    bool for_members = false;                // the launch waits for other members of the job alone
    bool announce = false;                   // other clients are to know that the launch waits
    bool passed_on = false;                  // the turn has a new owner: waiting clients are to look
    bool unmet = false;                      // a collective goes without another member's
    std::int64_t look_in_ns = 0;             // the latest time of the next look,
    std::int64_t may_be_late_ns = 0;         // and the tolerance

    bool waits() const noexcept { return decision.answer != Answer::kSubmit; }
    void look_within(std::int64_t ns) noexcept {
      decision.wait_ns = std::min(decision.wait_ns, ns);
      look_in_ns = std::min(look_in_ns, ns);
    }
  };

  void join(arbiter::Layout* layout, int slot, bool mps, const GateSettings& settings) noexcept {
    neighbours_.join(layout, slot, mps, settings);
    configure(settings);
  }
  // Lead, linger, margin and long_ns from the next launch on.
  void configure(const GateSettings& settings) noexcept;
  void use_policy(const Decider& policy) noexcept;
  std::string_view refused_policy() const noexcept { return decider_.refused(); }

  // The time is `now_ns`. `is_complete(segment)`: the driver's word on a segment's marker. Calls done(segment,
  // completed, marked) for each complete segment, `marked` by the driver's word and not by the clock.
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
    // Other clients count this one's work in flight until they hear of the completion.
    if (ledger_.completions() != before) neighbours_.publish(now_ns + ledger_.remaining_ns());
  }

  // ---- beside a latency client

  // A launch asks. True: the last one found no latency client.
  bool begin_gated() noexcept { return !std::exchange(gated_, true); }
  bool gated() const noexcept { return gated_; }

  // The launch looks, after look(); an admission makes out the ticket. `own_latency`: the slot of this process's
  // latency client, -1: none. `members`: the progress of a job's other members, for a collective; else null. must_go():
  // the launch may not wait. others_queued(): operations of other streams are queued behind the launch. The machine
  // asks both of a held launch alone.
  template <typename MustGo, typename OthersQueued>
  Verdict step(Launch& launch, Ticket& ticket, int own_latency, const JobProgress* members, std::int64_t now_ns,
               MustGo&& must_go, OthersQueued&& others_queued) noexcept {
    Verdict verdict = decide(launch, own_latency, members, now_ns);
    const bool for_lead = launch.for_lead && !seen_.latency_active;
    release(verdict, launch.stream, for_lead ? &launch.was_for_lead : nullptr, must_go, others_queued);
    if (!verdict.waits()) admit(launch, ticket, own_latency, now_ns, verdict);
    return verdict;
  }
  // The policy's last snapshot.
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

  // By the launch's key. For an unknown key, note() the predictor's answer.
  Estimates::Found estimate(std::uint64_t key) noexcept {
    if (gated_) estimates_.clear();  // the predictor has learned
    gated_ = false;
    return estimates_.find(key);
  }
  Estimates::Found note(std::uint64_t key, std::int64_t duration_ns, bool is_collective = false) noexcept {
    estimates_.note(key, duration_ns, is_collective);
    return estimates_.find(key);
  }
  // May the launch exceed the bound? Without a look at the clock.
  bool is_much(const Estimates::Found& found) const noexcept {
    return !unbounded_ && ledger_.launches() >= kFewestUngated &&
           ledger_.submitted_ns() + found.duration_ns > kMostUngatedNs;
  }
  bool unbounded() const noexcept { return unbounded_; }  // the policy is to let everything go

  // The launch looks, after look(). `was_held`: an earlier look held the launch.
  template <typename MustGo, typename OthersQueued>
  Verdict step_ungated(std::uint64_t stream, const Estimates::Found& found, bool& was_held, MustGo&& must_go,
                       OthersQueued&& others_queued) noexcept {
    Verdict verdict = decide_ungated(stream, found);
    release(verdict, stream, &was_held, must_go, others_queued);
    return verdict;
  }
  // The launch goes to the driver now. The ticket of a launch without a marker has no entry.
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
  // Notes the predicted end of a segment with a marker.
  void note_due(int segment, std::uint64_t stream, std::int64_t now_ns) noexcept {
    at(segment).due_ns = now_ns + ledger_.remaining_ns(stream);
  }

  // ---- both

  // The launch call has returned. `recorded`: the marker is behind the launch. False: the context is gone. For a ticket
  // with admitted_ns, look() and learn_lead() follow.
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
  // A GPU that ran dry before a held launch reached the driver had too small a lead.
  void learn_lead(const Ticket& ticket, std::int64_t now_ns) noexcept;

  // Forgets the work in flight, whose context goes.
  void forget() noexcept {
    ledger_.clear();
    notes_.fill({});
    ++generation_;
  }

  // The earliest predicted end of a segment in flight; kNotDueNs: none is predicted.
  std::int64_t earliest_due_ns() noexcept;

  Ledger& ledger() noexcept { return ledger_; }
  const Ledger& ledger() const noexcept { return ledger_; }
  Neighbours& neighbours() noexcept { return neighbours_; }
  const Neighbours& neighbours() const noexcept { return neighbours_; }
  const Lead& lead() const noexcept { return lead_; }
  // The owner of the GPU since the last decision.
  Ledger::Gpu gpu() const noexcept;

 private:
  // The longest time from a submission to the next launch of a launcher thread, and of a program's own thread. A longer
  // one is the program's doing.
  static constexpr std::int64_t kPromptNs = 20'000;
  static constexpr std::int64_t kPromptProgramNs = 200'000;

  // Of a segment.
  struct Note {
    std::uint64_t key = 0;       // of the estimate that learns from the completion; 0: none
    std::int64_t others_ns = 0;  // estimated, of the segment's other launches
    bool estimated = false;      // not predicted
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
    // A GPU that ran dry while latency work or a turn held the launch says nothing about the lead.
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

  // Does a held launch go nonetheless? `was_held`: the time in flight holds it, and did at an earlier look; null: it
  // does not.
  template <typename MustGo, typename OthersQueued>
  void release(Verdict& verdict, std::uint64_t stream, bool* was_held, MustGo&& must_go,
               OthersQueued&& others_queued) noexcept {
    if (!verdict.waits()) return;
    const bool goes = must_go();
    if (!goes && was_held != nullptr) verdict.exception = exception(stream, *was_held, others_queued);
    if (goes || verdict.exception != Exception::kNone) verdict.decision = {};
  }
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
  std::int64_t latency_seen_ns_ = 0;  // the last active latency work; 0: never
  std::int64_t admitted_ns_ = 0;      // the last gated admission
  std::int64_t submitted_ns_ = 0;     // the last return of a launch call
  std::int64_t looked_ns_ = 0;        // the last look()
  std::int64_t dry_since_ns_ = 0;     // the beginning of the time without work in flight; 0: work is in flight
  std::uint32_t generation_ = 0;
  Ledger ledger_;
  Estimates estimates_;
  std::array<Note, Ledger::kMarkers> notes_{};
};

}  // namespace cudasched::schedule
