#include "runtime/gate.hpp"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/processor.hpp"
#include "driver/driver.hpp"
#include "runtime/hot.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "runtime/stream_use.hpp"
#include "runtime/tracing.hpp"

namespace cudasched::runtime {
namespace {

std::uint64_t id_of(CUstream stream) noexcept { return reinterpret_cast<std::uintptr_t>(stream); }

}  // namespace

// ---- set-up --------------------------------------------------------------------------------------------------------

void Gate::register_client(arbiter::Table* table, int slot, const Settings& settings,
                           const LatencyActivity* own_latency, const Graphs* graphs, CUdevice device) {
  table_ = table;
  own_latency_ = own_latency;
  ordinal_ = device;
  device_.sm_count = driver::device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device_.max_threads_per_sm = driver::device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  waiter_.join(table, slot);
  sampler_.use_graphs(graphs);
  admission_.join(table, slot, driver::under_mps(device), settings);
  unbounded_ = settings.policy == "open";
  strict_ = settings.policy == "strict";
  launcher_sleep_ = schedule::SleepPlan(settings.launcher_spins);
  configure(settings);
  slot_.store(slot, std::memory_order_release);
}

void Gate::use_peers(JobPeers* peers) noexcept {
  peers_ = peers;
  waiter_.use_peers(peers);
  admission_.neighbours().use_peers(peers);
}

void Gate::moved(int slot) noexcept {
  const std::scoped_lock lock(lock_);
  admission_.neighbours().moved(slot);
  waiter_.moved(slot);
  slot_.store(slot, std::memory_order_release);
}

// For the ticker, which goes on where a thread keeps the lock for ever: in a user's policy that does not return.
std::unique_lock<SpinLock> Gate::lock_soon() noexcept {
  std::unique_lock lock(lock_, std::defer_lock);
  for (int tries = 0; tries < 1000 && !lock.try_lock(); ++tries) spin_pause();
  return lock;
}

void Gate::write_again() noexcept {
  waiter_.write_again();
  const std::unique_lock lock = lock_soon();
  if (lock.owns_lock()) admission_.neighbours().write_again();
}

void Gate::configure(const Settings& settings) noexcept {
  const std::scoped_lock lock(lock_);
  admission_.configure(settings);
}

void Gate::use_policy(const schedule::Decider& policy) noexcept {
  const std::scoped_lock lock(lock_);
  admission_.use_policy(policy);
  unbounded_ = policy.name() == "open";
  strict_ = policy.name() == "strict";
}

bool Gate::try_use_policy(const schedule::Decider& policy) noexcept {
  const std::unique_lock lock = lock_soon();
  if (!lock.owns_lock()) return false;
  admission_.use_policy(policy);
  unbounded_ = policy.name() == "open";
  strict_ = policy.name() == "strict";
  return true;
}

std::string_view Gate::refused_policy() noexcept {
  const std::unique_lock lock = lock_soon();
  return lock.owns_lock() ? admission_.refused_policy() : std::string_view{};
}

std::uint32_t Gate::without_room() noexcept {
  const std::unique_lock lock = lock_soon();
  if (lock.owns_lock()) without_room_.store(sampler_.predictor().words().without_room(), std::memory_order_relaxed);
  return without_room_.load(std::memory_order_relaxed);
}

std::int64_t Gate::lead_ns() noexcept {
  const std::scoped_lock lock(lock_);
  return admission_.lead().ns();
}

void Gate::use(const predict::trees::Evaluator* trees, const predict::Allocations* allocations) noexcept {
  const std::scoped_lock lock(lock_);
  sampler_.predictor().use_trees(trees);
  sampler_.predictor().use_allocations(allocations);
}

std::int64_t Gate::estimate_ns(const predict::Query& query) noexcept {
  const std::scoped_lock lock(lock_);
  return sampler_.predictor().estimate_ns(query);
}

std::int64_t Gate::measured_graph_ns(CUgraphExec exec) noexcept {
  const std::scoped_lock lock(lock_);
  return sampler_.measured_graph_ns(exec);
}

std::vector<std::byte> Gate::save() noexcept {
  for (int tries = 0; tries < 1000; ++tries) {
    if (lock_.try_lock()) {
      const std::scoped_lock lock(std::adopt_lock, lock_);
      try {
        return sampler_.predictor().save();
      } catch (const std::exception&) {
        return {};  // no memory for it
      }
    }
    sched_yield();
  }
  return {};
}

void Gate::restore(std::span<const std::byte> state) {
  const std::scoped_lock lock(lock_);
  sampler_.predictor().restore(state);
}

void Gate::forget_context(CUcontext context) noexcept {
  const driver::RelaxedCapture relaxed;
  const std::scoped_lock lock(lock_);
  if (!markers_.belongs_to(context)) return;
  sampler_.forget([&](int segment) { return markers_.ledger().state(segment) == schedule::Ledger::State::kPending; });
  markers_.forget();
}

// The caller holds lock_.
void Gate::note_length(std::int64_t duration_ns) noexcept {
  if (duration_ns <= admission_.long_ns()) return;
  long_seen_ns_.store(now_ns(), std::memory_order_relaxed);
  if (duration_ns > longest_ns()) longest_ns_.store(duration_ns, std::memory_order_relaxed);
}

// ---- while no latency client is on the device ----------------------------------------------------------------------

// A few nanoseconds for most launches: a lock, an estimate by the launch's geometry, an addition. Only one launch in
// 16, a kernel that was not seen before, and what may be too much look at the clock and ask the driver what is
// complete.
Gate::Pass Gate::admit_ungated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept {
  CUstream const stream = call.stream;
  const std::uint64_t key = Sampler::key_of(call);
  std::unique_lock lock(lock_);
  if (unbounded_) return {};
  if (gated_) sampler_.forget_estimates();
  gated_ = false;
  schedule::Estimates::Found found = sampler_.find(key);
  if (!found.known) {
    lock.unlock();
    const Sampler::Question question(call, device_);
    lock.lock();
    found = sampler_.estimate(key, question.query);
  }
  schedule::Ledger& ledger = markers_.ledger();
  if (ledger.launches() == 0) ledger.look(now_ns(), admission_.gpu());
  bool first_look = true;
  TracedWait traced;
  while (!interrupted_.load(std::memory_order_relaxed) && ledger.launches() >= schedule::kFewestUngated &&
         ledger.submitted_ns() + found.duration_ns > schedule::kMostUngatedNs &&
         hot().scheduling.load(std::memory_order_relaxed)) {
    const driver::RelaxedCapture relaxed;
    retire(now_ns());
    const schedule::Decision decision = admission_.decide_ungated(ledger, id_of(stream), found.duration_ns);
    if (decision.answer == schedule::Answer::kSubmit || must_not_wait(waiver)) break;
    if (is_excepted(stream, first_look, waiver, count)) break;
    first_look = false;
    lock.unlock();
    traced.waits(call, ordinal_, telemetry::WaitReason::kBacklog);
    Waiter::sleep_for(found.proven ? kUngatedLookNs : kUnprovenLookNs);
    if (latency_clients()) {
      traced.ends(call, ordinal_);
      return admit_gated(call, count, waiver);
    }
    lock.lock();
  }
  traced.ends(call, ordinal_);
  if (!first_look) hot().counters.was_held(telemetry::WaitReason::kBacklog);
  if (found.proven) note_length(found.duration_ns);
  if (found.is_collective) admission_.neighbours().collective_submitted(now_ns());
  const schedule::Ledger::Entry entry = ledger.submit(id_of(stream), found.duration_ns, !found.proven);
  Pass pass;
  pass.predicted_ns = found.duration_ns;
  if (entry.segment < 0) {
    count.untracked_launches.fetch_add(1, std::memory_order_relaxed);
    return pass;
  }
  due_ns_[static_cast<std::size_t>(entry.segment)] = kNotDueNs;
  const std::int64_t others_ns = ledger.predicted_ns(entry.segment) - found.duration_ns;
  const bool tells = entry.marks && (!found.proven || ledger.segment_launches(entry.segment) == 1);
  sampler_.entered(entry.segment, tells ? key : 0, others_ns);
  if (!entry.marks) return pass;

  pass.entry = entry.segment;
  pass.generation = markers_.generation();
  const driver::RelaxedCapture relaxed;
  const std::int64_t now = now_ns();
  retire(now);
  due_ns_[static_cast<std::size_t>(entry.segment)] = now + ledger.remaining_ns(id_of(stream));
  if (make_ready(call.site.caller.context)) pass.completion = markers_.event(entry.segment);
  pass.may_go_unmarked = found.proven && ledger.may_stay_open(entry.segment);
  return pass;
}

// ---- beside a latency client ---------------------------------------------------------------------------------------

Gate::Pass Gate::admit_gated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept {
  CUstream const stream = call.stream;
  const driver::RelaxedCapture relaxed;
  count.gated_launches.fetch_add(1, std::memory_order_relaxed);

  Sampler::Question question(call, device_);
  bool wants_residency = false;
  {
    const std::scoped_lock lock(lock_);
    wants_residency = sampler_.wants_residency(question.query);
  }
  if (wants_residency) question.find_residency();

  Pass pass;
  CUevent start = nullptr;  // to be recorded before the launch, if it is timed
  predict::Prediction prediction;
  bool with_events = false;
  bool was_held_for_lead = false;
  const bool is_collective = Sampler::is_collective(question.query);
  // A thread of the program's own may have to launch for the other members, too.
  const bool meets = is_collective && waiver != nullptr && peers_ != nullptr && peers_->any();
  bool late = false;  // the GPU ran out of work because the program had none for it
  Held held;
  Waiter::Wait wait;
  TracedWait traced;
  telemetry::WaitReason held_by{};
  schedule::SleepPlan own_sleep;
  schedule::SleepPlan& sleep = waiver != nullptr ? launcher_sleep_ : own_sleep;
  schedule::Ledger& ledger = markers_.ledger();
  while (hot().scheduling.load(std::memory_order_relaxed)) {
    schedule::Decision decision;
    std::int64_t next_end_ns = 0;
    std::int64_t lead_ns = 0;
    telemetry::WaitReason why{};
    const std::uint32_t wakes = waiter_.wakes();
    {
      const std::scoped_lock lock(lock_);
      const std::int64_t now = now_ns();
      retire(now);
      if (held.looked_ns == 0) {
        with_events = make_ready(call.site.caller.context);
        if (!std::exchange(gated_, true) && with_events) mark_tail(stream);
        question.query.busy = ledger.holds_others(id_of(stream));
        prediction = sampler_.predict(question.query);
        if (is_collective) admission_.neighbours().collective_arrived(now);
        if (ledger.launches() == 0) {
          late = now - submitted_ns_ > (waiver != nullptr ? kPromptNs : kPromptProgramNs);
          admission_.neighbours().rejoined(now);
        }
      }
      held.pass(now);
      admission_.neighbours().note_own_latency(own_latency_->slot());
      decision = admission_.decide(ledger, id_of(stream), prediction, held, now);
      const bool held_by_policy = decision.answer != schedule::Answer::kSubmit;
      if (meets) decision = meet(decision, now);
      const schedule::Snapshot& seen = admission_.seen();
      held.note(seen, decision, now);
      if (seen.latency_active) sampler_.overlap();
      sampler_.observe_late(ledger);
      next_end_ns = ledger.next_end_ns();
      lead_ns = seen.lead_ns;
      if (decision.answer != schedule::Answer::kSubmit) {
        why = held_by_policy ? why_it_waits(decision, seen) : telemetry::WaitReason::kMembers;
        if (must_not_wait(waiver)) {
          decision = {};
        } else if (held.for_lead && !seen.latency_active) {
          if (is_excepted(stream, !was_held_for_lead, waiver, count)) decision = {};
          was_held_for_lead = true;
        }
      }
      if (decision.answer == schedule::Answer::kSubmit) {
        // Another gate was quicker to take from the slack that this one saw.
        if (!admission_.admitted(own_latency_->slot())) continue;
        // Where something else held it, latency work or a turn, a GPU that ran dry says nothing about the lead.
        if (admission_.lead_adapts() && with_events && held.only_for_lead && !late &&
            !admission_.latency_seen_since(admitted_ns_)) {
          pass.admitted_ns = now;
          pass.held_ns = held.lead_ns;
          pass.dry_since_ns = ledger.launches() == 0 ? dry_since_ns_ : 0;
        }
        if (is_collective && admission_.neighbours().collective_submitted(now)) {
          count.unmet_collectives.fetch_add(1, std::memory_order_relaxed);
        }
        admitted_ns_ = now;
        note_length(prediction.duration_ns);
        dry_since_ns_ = 0;
        const bool beside_others = ledger.holds_others(id_of(stream));
        const bool times = with_events && sampler_.times(call, prediction);
        pass.dry = ledger.launches() == 0;
        if (times) mark_tail(stream);
        const schedule::Ledger::Entry entry = ledger.submit(id_of(stream), prediction.duration_ns, /*mark=*/true);
        pass.entry = entry.segment;
        pass.generation = markers_.generation();
        pass.predicted_ns = prediction.duration_ns;
        if (entry.segment >= 0) {
          const bool alone = ledger.segment_launches(entry.segment) == 1;
          sampler_.entered(entry.segment, prediction, alone, beside_others);
          due_ns_[static_cast<std::size_t>(entry.segment)] = now + ledger.remaining_ns(id_of(stream));
          if (times && alone) start = sampler_.start_timer(entry.segment);
          if (start != nullptr && telemetry::tracing()) [[unlikely]]
            sampler_.trace(entry.segment, call, ordinal_);
          if (start != nullptr) ledger.pin(entry.segment, true);
          pass.may_go_unmarked = start == nullptr && ledger.may_stay_open(entry.segment);
          if (with_events) pass.completion = sampler_.end_event(entry.segment, markers_.event(entry.segment));
        }
        admission_.neighbours().publish(now + ledger.remaining_ns());
      }
    }
    if (decision.answer == schedule::Answer::kSubmit) break;
    traced.waits(call, ordinal_, why);
    held_by = why;
    const bool for_latency = decision.answer == schedule::Answer::kWaitForLatency;
    // Where several clients feed at once, one that waits for the lead is behind as much as one that waits for its
    // share. One that waits for foreseen latency work is not: the others may go.
    const bool announce = decision.answer != schedule::Answer::kWaitForTime ||
                          (admission_.neighbours().feeds_with_others() && held.for_lead);
    waiter_.wait(decision, wakes, announce, next_end_ns, held.for_lead ? lead_ns / 2 : 0, sleep, wait,
                 meets ? kMeetLookNs : Waiter::kReapNs, [&] {
                   return must_not_wait(waiver) || (for_latency && !admission_.neighbours().latency_active(now_ns()));
                 });
  }

  waiter_.end(wait);
  traced.ends(call, ordinal_);
  if (wait.started) {
    const std::int64_t waited_ns = now_ns() - wait.since_ns;
    hot().counters.gate_waits.add(waited_ns);
    hot().counters.was_held(held_by);
  }
  if (pass.entry < 0 || !with_events) count.untracked_launches.fetch_add(1, std::memory_order_relaxed);
  if (start != nullptr) {
    if (driver::table().cuEventRecord(start, stream) != CUDA_SUCCESS) {
      pass.completion = nullptr;  // there is nothing to measure: this one goes by the clock
    } else if (!question.query.launch.is_graph) {
      pass.start = start;
      pass.called_ns = now_ns();
    }
  }
  return pass;
}

void Gate::submitted(const Pass& pass, CUstream stream, CUresult status) noexcept {
  if (pass.entry < 0) return;
  bool recorded = false;
  std::int64_t waited_call_ns = 0;  // of a launch call that the GPU waited for
  if (status == CUDA_SUCCESS && pass.completion != nullptr) {
    const std::int64_t returned_ns = pass.start != nullptr ? now_ns() : 0;
    const driver::RelaxedCapture relaxed;
    recorded = driver::table().cuEventRecord(pass.completion, stream) == CUDA_SUCCESS;
    if (pass.start != nullptr && (pass.dry || driver::table().cuEventQuery(pass.start) == CUDA_SUCCESS)) {
      waited_call_ns = returned_ns - pass.called_ns;
    }
  }
  const std::scoped_lock lock(lock_);
  submitted_ns_ = now_ns();
  if (pass.generation != markers_.generation()) return;  // the context went meanwhile
  schedule::Ledger& ledger = markers_.ledger();
  if (!recorded) {
    sampler_.drop(pass.entry);
    ledger.pin(pass.entry, false);
  } else if (waited_call_ns > 0) {
    sampler_.waited(pass.entry, waited_call_ns);
  }
  if (status != CUDA_SUCCESS) {
    ledger.withdraw(pass.entry, pass.predicted_ns);
    return;
  }
  ledger.submitted(pass.entry, recorded);
  if (pass.admitted_ns != 0) learn_lead(pass, submitted_ns_);
}

// ---- bookkeeping: lock_ is held ------------------------------------------------------------------------------------

bool Gate::make_ready(CUcontext context) noexcept {
  const bool had = markers_.made();
  if (!markers_.ready(context)) return false;
  if (!had) sampler_.make_timers();
  return true;
}

// A collective goes together with those of the job's other members.
schedule::Decision Gate::meet(schedule::Decision decision, std::int64_t now) noexcept {
  using Verdict = schedule::Rendezvous::Verdict;
  switch (admission_.neighbours().look_for_members(now)) {
    case Verdict::kNow:
      return {};
    case Verdict::kWait:
      if (decision.answer == schedule::Answer::kSubmit) return {schedule::Answer::kWaitForTime, kMeetLookNs};
      return decision;
    case Verdict::kPolicy:
      return decision;
  }
  return decision;
}

// The last launches of the stream may have no marker.
void Gate::mark_tail(CUstream stream) noexcept {
  const int segment = markers_.ledger().mark(id_of(stream));
  if (segment < 0) return;
  const bool recorded = driver::table().cuEventRecord(markers_.event(segment), stream) == CUDA_SUCCESS;
  markers_.ledger().submitted(segment, recorded);
}

void Gate::retire(std::int64_t now) noexcept {
  schedule::Ledger& ledger = markers_.ledger();
  const std::uint64_t before = ledger.completions();
  ledger.look(now, admission_.gpu());
  sampler_.look(now);
  markers_.retire([&](int segment) { return sampler_.end_event(segment, markers_.event(segment)); },
                  [&](int segment, const schedule::Ledger::Completed& completed, bool marked) {
                    sampler_.completed(segment, completed, marked);
                    // Under lock_: no other thread writes it.
                    gpu_ns_.store(gpu_ns_.load(std::memory_order_relaxed) + completed.predicted_ns,
                                  std::memory_order_relaxed);
                  });
  // Somewhere between the two looks.
  if (ledger.launches() == 0 && dry_since_ns_ == 0) dry_since_ns_ = (retired_ns_ + now) / 2;
  retired_ns_ = now;
  // Others count what this client has in flight until they hear that it is done.
  if (ledger.completions() != before) admission_.neighbours().publish(now + ledger.remaining_ns());
}

// A launch that is held because of what is in flight, and goes nonetheless.
bool Gate::is_excepted(CUstream stream, bool first_look, const Waiver* waiver, telemetry::Shard& count) noexcept {
  const schedule::Exception exception = admission_.exception(markers_.ledger(), id_of(stream), first_look, [&] {
    return waiver == nullptr || waiver->opening->others_behind();
  });
  if (exception == schedule::Exception::kNone) return false;
  count.gate_exceptions.fetch_add(1, std::memory_order_relaxed);
  if (exception == schedule::Exception::kBackstop) backstop_used_.store(true, std::memory_order_relaxed);
  // What is late may have waited for this launch: how long it took says nothing.
  sampler_.overlap();
  return true;
}

// Had the GPU run out of our work when the launch reached it? Then the lead was too small, if the lead is what held it.
void Gate::learn_lead(const Pass& pass, std::int64_t now) noexcept {
  retire(now);
  std::int64_t dry = 0;
  if (markers_.ledger().launches() <= 1) {
    // While the driver was launching, at some moment unknown.
    dry = pass.dry_since_ns != 0 ? now - pass.dry_since_ns : (now - pass.admitted_ns) / 2;
  }
  admission_.lead().submitted(pass.held_ns, dry, pass.predicted_ns);
}

std::int64_t Gate::earliest_due_ns() noexcept {
  std::int64_t earliest = kNotDueNs;
  markers_.ledger().for_each([&](int segment) {
    earliest = std::min(earliest, due_ns_[static_cast<std::size_t>(segment)]);
    return false;  // the first of each stream
  });
  return earliest;
}

// ---- for others ----------------------------------------------------------------------------------------------------

void Gate::report_overdue(std::int64_t now) noexcept {
  if (!registered()) return;
  if (backstop_used_.load(std::memory_order_relaxed) && !backstop_told_.exchange(true)) {
    log::warning(
        "a best-effort launch was held for 100 ms in which nothing on the GPU was complete, and went nonetheless: "
        "a kernel runs for very long, or waits for another one; the latency clients of this GPU may wait for it");
  }
  // At exit, nothing calls the driver from here once stop() has passed this lock.
  const std::scoped_lock probe(LatencyActivity::probe_mutex());
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock = lock_soon();
  if (!lock.owns_lock()) return;
  // While the gate is off, launches look seldom, and how long kernels take shows in when they end.
  std::int64_t due = earliest_due_ns();
  const bool looks = now - kOverdueNs > due || (!gated_ && markers_.ledger().launches() > 0);
  if (looks && markers_.made()) {
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext current(markers_.context());
    if (current.ok()) retire(now);
    due = earliest_due_ns();
  }
  progress_ = {markers_.ledger().completions(), markers_.ledger().launches() > 0};
  table_->slot(slot_.load(std::memory_order_relaxed))
      .overdue_since_ns.store(now - kOverdueNs > due ? due : 0, std::memory_order_relaxed);
}

bool Gate::latency_active() const noexcept { return admission_.neighbours().latency_active(now_ns()); }

std::int64_t Gate::in_flight_ns() noexcept {
  const driver::RelaxedCapture relaxed;
  const std::scoped_lock lock(lock_);
  retire(now_ns());
  return markers_.ledger().remaining_ns();
}

bool Gate::must_not_wait(const Waiver* waiver) const noexcept {
  if (waiver != nullptr) return waiver->applies();
  const bool own =
      own_latency_->registered() || (peers_ != nullptr && peers_->any() && LatencyActivity::any_registered());
  if (!own) return false;
  // In a latency region, this thread's wait is latency work's, and the gate would wait for the region to end.
  return in_latency_region(this_thread()) || holds_gil();
}

}  // namespace cudasched::runtime
