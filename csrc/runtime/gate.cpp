#include "runtime/gate.hpp"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/processor.hpp"
#include "base/sleep.hpp"
#include "driver/driver.hpp"
#include "runtime/hot.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "runtime/stream_use.hpp"
#include "runtime/tracing.hpp"

namespace cudasched::runtime {
namespace {

std::uint64_t id_of(CUstream stream) noexcept { return reinterpret_cast<std::uintptr_t>(stream); }

// Calls of this thread disturb no captures: the launcher thread's never do.
struct Relaxed : std::optional<driver::RelaxedCapture> {
  explicit Relaxed(bool by_launcher) noexcept {
    if (!by_launcher) emplace();
  }
};

schedule::GateSettings gate_settings(const Settings& settings) noexcept {
  schedule::GateSettings gate;
  gate.adaptive_lead = !settings.lead_ns.has_value();
  gate.lead_ns = settings.first_lead_ns();
  gate.lead_bounds.max_inflation = settings.max_inflation;
  gate.host_bound_inflation = settings.host_bound_inflation;
  gate.linger_ns = settings.linger_ns;
  gate.margin_ns = settings.margin_ns;
  gate.long_ns = settings.long_ns;
  gate.turn_ns = settings.turn_ns;
  gate.stale_heartbeat_ns = settings.stale_heartbeat_ns;
  return gate;
}

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
  machine_.join(&table->layout(), slot, driver::under_mps(device), gate_settings(settings));
  if (const schedule::Policy* const policy = schedule::find_policy(settings.policy)) {
    take_policy(schedule::Decider(*policy));
  }
  launcher_sleep_ = schedule::SleepPlan(settings.launcher_spins);
  slot_.store(slot, std::memory_order_release);
}

void Gate::use_peers(JobPeers* peers) noexcept {
  peers_ = peers;
  waiter_.use_peers(peers);
  machine_.neighbours().use_peers(peers != nullptr ? &peers->tables() : nullptr);
}

void Gate::moved(int slot) noexcept {
  const std::scoped_lock lock(lock_);
  machine_.neighbours().moved(slot);
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
  if (lock.owns_lock()) machine_.neighbours().write_again();
}

void Gate::configure(const Settings& settings) noexcept {
  const std::scoped_lock lock(lock_);
  machine_.configure(gate_settings(settings));
}

// The caller holds lock_, but at registration.
void Gate::take_policy(const schedule::Decider& policy) noexcept {
  machine_.use_policy(policy);
  strict_ = policy.name() == "strict";
}

void Gate::use_policy(const schedule::Decider& policy) noexcept {
  const std::scoped_lock lock(lock_);
  take_policy(policy);
}

bool Gate::try_use_policy(const schedule::Decider& policy) noexcept {
  const std::unique_lock lock = lock_soon();
  if (lock.owns_lock()) take_policy(policy);
  return lock.owns_lock();
}

std::string_view Gate::refused_policy() noexcept {
  const std::unique_lock lock = lock_soon();
  return lock.owns_lock() ? machine_.refused_policy() : std::string_view{};
}

std::uint32_t Gate::without_room() noexcept {
  const std::unique_lock lock = lock_soon();
  if (lock.owns_lock()) without_room_.store(sampler_.predictor().words().without_room(), std::memory_order_relaxed);
  return without_room_.load(std::memory_order_relaxed);
}

std::int64_t Gate::lead_ns() noexcept {
  const std::scoped_lock lock(lock_);
  return machine_.lead().ns();
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

std::int64_t Gate::graph_ns(CUgraphExec exec) noexcept {
  const std::scoped_lock lock(lock_);
  return sampler_.graph_ns(exec);
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
  copies_.forget(context);
  if (!markers_.belongs_to(context)) return;
  const schedule::Ledger& ledger = machine_.ledger();
  sampler_.forget([&](int segment) { return ledger.state(segment) == schedule::Ledger::State::kPending; });
  markers_.forget(ledger);
  machine_.forget();
}

// The caller holds lock_.
void Gate::note_length(std::int64_t duration_ns) noexcept {
  if (duration_ns > longest_ns()) longest_ns_.store(duration_ns, std::memory_order_relaxed);
}

// ---- while no latency client is on the device ----------------------------------------------------------------------

// A few nanoseconds for most launches: a lock, an estimate by the launch's geometry, an addition. Only one launch in
// 16, a kernel that was not seen before, and a launch that may exceed the bound look at the clock and ask the driver
// for completions.
Gate::Pass Gate::admit_ungated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept {
  const std::uint64_t stream = id_of(call.stream);
  const std::uint64_t key = Sampler::key_of(call);
  std::unique_lock lock(lock_);
  if (machine_.unbounded()) return {};
  schedule::Estimates::Found found = machine_.estimate(key);
  if (!found.known) {
    lock.unlock();
    const Sampler::Question question(call, device_);
    lock.lock();
    found = machine_.note(key, sampler_.estimate_ns(question.query), Sampler::is_collective(question.query));
  }
  schedule::Ledger& ledger = machine_.ledger();
  if (ledger.launches() == 0) ledger.look(now_ns(), machine_.gpu());
  const bool is_much = !interrupted_.load(std::memory_order_relaxed) && machine_.is_much(found);
  if (is_much && hold_ungated(call, found, count, waiver, lock)) return admit_gated(call, count, waiver);
  if (found.proven) note_length(found.duration_ns);
  if (found.is_collective) machine_.neighbours().collective_submitted(now_ns());
  Pass pass;
  pass.by_launcher = waiver != nullptr;
  const schedule::Ledger::Entry entry = machine_.submit_ungated(stream, key, found, pass);
  if (entry.segment < 0) {
    count.untracked_launches.fetch_add(1, std::memory_order_relaxed);
    return pass;
  }
  sampler_.entered(entry.segment);
  if (!entry.marks) return pass;

  const Relaxed relaxed(waiver != nullptr);
  const std::int64_t now = now_ns();
  retire(now);
  machine_.note_due(entry.segment, stream, now);
  if (make_ready(call.site.caller.context)) pass.completion = markers_.event(entry.segment);
  pass.may_go_unmarked = found.proven && ledger.may_stay_open(entry.segment);
  return pass;
}

// Until less is in flight. True: a latency client has come, and `lock` is given back.
bool Gate::hold_ungated(const queue::Call& call, const schedule::Estimates::Found& found, telemetry::Shard& count,
                        const Waiver* waiver, std::unique_lock<SpinLock>& lock) noexcept {
  const Relaxed relaxed(waiver != nullptr);
  bool was_held = false;
  bool has_come = false;
  TracedWait traced;
  while (!interrupted_.load(std::memory_order_relaxed) && machine_.is_much(found) &&
         hot().scheduling.load(std::memory_order_relaxed)) {
    retire(now_ns());
    const schedule::GateMachine::Verdict verdict = machine_.step_ungated(
        id_of(call.stream), found, was_held, [&] { return must_not_wait(waiver); },
        [&] { return waiver == nullptr || waiver->opening->others_behind(); });
    if (verdict.exception != schedule::Exception::kNone) note_exception(verdict.exception, count);
    if (!verdict.waits()) break;
    lock.unlock();
    traced.waits(call, ordinal_, telemetry::WaitReason::kBacklog);
    sleep_ns(verdict.look_in_ns);
    has_come = latency_clients();
    if (has_come) break;
    lock.lock();
  }
  traced.ends(call, ordinal_);
  if (was_held && !has_come) hot().counters.was_held(telemetry::WaitReason::kBacklog);
  return has_come;
}

// ---- beside a latency client ---------------------------------------------------------------------------------------

Gate::Pass Gate::admit_gated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept {
  CUstream const stream = call.stream;
  const Relaxed relaxed(waiver != nullptr);
  count.gated_launches.fetch_add(1, std::memory_order_relaxed);

  Sampler::Question question(call, device_);
  Pass pass;
  pass.by_launcher = waiver != nullptr;
  CUevent start = nullptr;  // to be recorded before the launch, if it is timed
  predict::Prediction prediction;
  schedule::GateMachine::Launch launch;
  launch.stream = id_of(stream);
  launch.by_launcher = waiver != nullptr;
  launch.is_collective = Sampler::is_collective(question.query);
  launch.tells_lead = false;
  // A thread of the program's own may have to launch for the other members, too.
  const bool meets = launch.is_collective && waiver != nullptr && peers_ != nullptr && peers_->any();
  Waiter::Wait wait;
  TracedWait traced;
  telemetry::WaitReason held_by{};
  schedule::SleepPlan own_sleep;
  schedule::SleepPlan& sleep = waiver != nullptr ? launcher_sleep_ : own_sleep;
  while (hot().scheduling.load(std::memory_order_relaxed)) {
    schedule::GateMachine::Verdict verdict;
    std::int64_t next_end_ns = 0;
    const std::uint32_t wakes = waiter_.wakes();
    const schedule::JobProgress members = meets ? peers_->progress() : schedule::JobProgress{};
    {
      std::unique_lock lock(lock_);
      const std::int64_t now = now_ns();
      retire(now);
      if (launch.looked_ns == 0) {
        launch.tells_lead = make_ready(call.site.caller.context);
        if (machine_.begin_gated() && launch.tells_lead) mark_tail(stream);
        question.query.busy = machine_.ledger().holds_others(launch.stream);
        prediction = sampler_.predict(question.query);
        if (prediction.wants_residency) {
          lock.unlock();
          question.find_residency();
          continue;
        }
        launch.predicted_ns = prediction.duration_ns;
        launch.bound_ns = prediction.bound_ns;
      }
      verdict = machine_.step(
          launch, pass, own_latency_->slot(), meets ? &members : nullptr, now, [&] { return must_not_wait(waiver); },
          [&] { return waiver == nullptr || waiver->opening->others_behind(); });
      const schedule::Snapshot& seen = machine_.seen();
      if (verdict.passed_on) table_->wake_all();
      if (seen.latency_active) sampler_.overlap();
      sampler_.observe_late(machine_.ledger());
      if (verdict.exception != schedule::Exception::kNone) note_exception(verdict.exception, count);
      if (verdict.again) continue;
      if (verdict.waits()) {
        held_by = verdict.for_members ? telemetry::WaitReason::kMembers : why_it_waits(verdict.decision, seen);
        next_end_ns = machine_.ledger().next_end_ns();
      } else {
        if (verdict.unmet) count.unmet_collectives.fetch_add(1, std::memory_order_relaxed);
        start = enter(call, prediction, launch, pass, now);
      }
    }
    if (!verdict.waits()) break;
    if (waiver != nullptr && waiver->opening->submit_pieces()) verdict.look_within(queue::Opening::kPieceLookNs);
    traced.waits(call, ordinal_, held_by);
    const bool for_latency = verdict.decision.answer == schedule::Answer::kWaitForLatency;
    waiter_.wait(verdict, wakes, next_end_ns, sleep, wait, [&] {
      return must_not_wait(waiver) || (for_latency && !machine_.neighbours().latency_active(now_ns()));
    });
  }

  waiter_.end(wait);
  traced.ends(call, ordinal_);
  if (wait.started) {
    hot().counters.gate_waits.add(now_ns() - wait.since_ns);
    hot().counters.was_held(held_by);
  }
  if (pass.entry < 0 || !launch.tells_lead) count.untracked_launches.fetch_add(1, std::memory_order_relaxed);
  if (start != nullptr) record_start(start, stream, question.query.launch.is_graph, pass);
  return pass;
}

void Gate::record_start(CUevent start, CUstream stream, bool is_graph, Pass& pass) noexcept {
  if (driver::table().cuEventRecord(start, stream) != CUDA_SUCCESS) {
    pass.completion = nullptr;  // there is nothing to measure: this one goes by the clock
  } else if (!is_graph) {
    pass.start = start;
    pass.called_ns = now_ns();
  }
}

void Gate::submitted(const Pass& pass, CUstream stream, CUresult status) noexcept {
  if (pass.entry < 0) return;
  const Relaxed relaxed(pass.by_launcher);
  bool recorded = false;
  std::int64_t waited_call_ns = 0;  // of a launch call that the GPU waited for
  if (status == CUDA_SUCCESS && pass.completion != nullptr) {
    const std::int64_t returned_ns = pass.start != nullptr ? now_ns() : 0;
    recorded = driver::table().cuEventRecord(pass.completion, stream) == CUDA_SUCCESS;
    if (pass.start != nullptr && (pass.dry || driver::table().cuEventQuery(pass.start) == CUDA_SUCCESS)) {
      waited_call_ns = returned_ns - pass.called_ns;
    }
  }
  const std::scoped_lock lock(lock_);
  const std::int64_t now = now_ns();
  if (!machine_.submitted(pass, status == CUDA_SUCCESS, recorded, now)) return;
  if (!recorded) {
    sampler_.drop(pass.entry);
  } else if (waited_call_ns > 0) {
    sampler_.waited(pass.entry, waited_call_ns);
  }
  if (status != CUDA_SUCCESS || pass.admitted_ns == 0) return;
  retire(now);
  machine_.learn_lead(pass, now);
}

// ---- copies in pieces ----------------------------------------------------------------------------------------------

Copies::Direction Gate::direction_of_pieces(const queue::Operation& copy) noexcept {
  if (!registered() || !any_latency_client() || copies_interrupted()) return Copies::Direction::kAny;
  const Copies::Direction direction = Copies::direction_of(copy.copy);
  if (direction == Copies::Direction::kAny) return direction;
  const std::scoped_lock lock(lock_);
  return copies_.ready(copy.context) ? direction : Copies::Direction::kAny;
}

std::size_t Gate::next_piece(Copies::Direction direction, std::size_t bytes) noexcept {
  if (!any_latency_client()) return bytes;
  const std::int64_t now = now_ns();
  const bool beside_request = machine_.neighbours().latency_active(now);
  const std::scoped_lock lock(lock_);
  return copies_.next(direction, bytes, beside_request, now);
}

void Gate::piece_submitted(Copies::Direction direction, CUstream stream) noexcept {
  const std::scoped_lock lock(lock_);
  copies_.submitted(direction, stream, now_ns());
}

// ---- bookkeeping: lock_ is held ------------------------------------------------------------------------------------

bool Gate::make_ready(CUcontext context) noexcept {
  const bool had = markers_.made();
  if (!markers_.ready(context)) return false;
  if (!had) sampler_.make_timers();
  return true;
}

// The last launches of the stream may have no marker.
void Gate::mark_tail(CUstream stream) noexcept {
  const int segment = machine_.ledger().mark(id_of(stream));
  if (segment < 0) return;
  const bool recorded = driver::table().cuEventRecord(markers_.event(segment), stream) == CUDA_SUCCESS;
  machine_.ledger().submitted(segment, recorded);
}

// The admitted launch becomes part of a segment. The event to record before it, if it is timed.
CUevent Gate::enter(const queue::Call& call, const predict::Prediction& prediction,
                    const schedule::GateMachine::Launch& launch, Pass& pass, std::int64_t now) noexcept {
  schedule::Ledger& ledger = machine_.ledger();
  const bool with_events = launch.tells_lead;
  note_length(prediction.duration_ns);
  const bool beside_others = ledger.holds_others(launch.stream);
  const bool times = with_events && sampler_.times(call, prediction);
  if (times) mark_tail(call.stream);
  const int segment = machine_.submit(launch, pass, now).segment;
  if (segment < 0) return nullptr;
  const bool alone = ledger.segment_launches(segment) == 1;
  sampler_.entered(segment, prediction, alone, beside_others);
  CUevent const start = times && alone ? sampler_.start_timer(segment) : nullptr;
  if (start != nullptr && telemetry::tracing()) [[unlikely]]
    sampler_.trace(segment, call, ordinal_);
  if (start != nullptr) ledger.pin(segment, true);
  pass.may_go_unmarked = start == nullptr && ledger.may_stay_open(segment);
  if (with_events) pass.completion = sampler_.end_event(segment, markers_.event(segment));
  return start;
}

void Gate::retire(std::int64_t now) noexcept {
  machine_.look(
      now, [&](int segment) { return Markers::is_complete(sampler_.end_event(segment, markers_.event(segment))); },
      [&](int segment, const schedule::Ledger::Completed& completed, bool marked) {
        sampler_.completed(segment, marked);
        // Under lock_: no other thread writes it.
        gpu_ns_.store(gpu_ns_.load(std::memory_order_relaxed) + completed.predicted_ns, std::memory_order_relaxed);
      });
}

// A launch that the time in flight holds goes nonetheless.
void Gate::note_exception(schedule::Exception exception, telemetry::Shard& count) noexcept {
  count.gate_exceptions.fetch_add(1, std::memory_order_relaxed);
  if (exception == schedule::Exception::kBackstop) backstop_used_.store(true, std::memory_order_relaxed);
  // Late work may have waited for this launch: the late work's time says nothing.
  sampler_.overlap();
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
  std::int64_t due = machine_.earliest_due_ns();
  const bool looks = now - kOverdueNs > due || (!machine_.gated() && machine_.ledger().launches() > 0);
  if (looks && markers_.made()) {
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext current(markers_.context());
    if (current.ok()) retire(now);
    due = machine_.earliest_due_ns();
  }
  progress_ = {machine_.ledger().completions(), machine_.ledger().launches() > 0};
  table_->slot(slot_.load(std::memory_order_relaxed))
      .overdue_since_ns.store(now - kOverdueNs > due ? due : 0, std::memory_order_relaxed);
}

bool Gate::latency_active() const noexcept { return machine_.neighbours().latency_active(now_ns()); }

std::int64_t Gate::in_flight_ns() noexcept {
  const driver::RelaxedCapture relaxed;
  const std::scoped_lock lock(lock_);
  retire(now_ns());
  return machine_.ledger().remaining_ns();
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
