#include "runtime/gate.hpp"

#include <dlfcn.h>
#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>

#include "base/clock.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "runtime/hot.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "schedule/turn.hpp"

namespace cudasched::runtime {
namespace {

constinit std::atomic<int (*)()> gil_check{nullptr};
constinit std::atomic<void* (*)()> gil_release{nullptr};
constinit std::atomic<void (*)(void*)> gil_restore{nullptr};

std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

void pause_until(std::int64_t until_ns) noexcept {
  while (now_ns() < until_ns) {
    for (int i = 0; i < 16; ++i) _mm_pause();
  }
  // The waiting thread may share its core with the one it waits for.
  sched_yield();
}

void sleep_for(std::int64_t duration_ns) noexcept {
  const timespec time{duration_ns / kNsPerSecond, duration_ns % kNsPerSecond};
  nanosleep(&time, nullptr);
}

}  // namespace

void find_gil_check() noexcept {
  gil_restore.store(reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread")));
  gil_release.store(reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread")));
  gil_check.store(reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check")));
}

bool holds_gil() noexcept {
  auto* const check = gil_check.load(std::memory_order_relaxed);
  return check != nullptr && check() != 0;
}

GilReleased::GilReleased() noexcept {
  auto* const release = gil_release.load(std::memory_order_relaxed);
  if (release != nullptr && gil_restore.load(std::memory_order_relaxed) != nullptr && holds_gil()) state_ = release();
}

GilReleased::~GilReleased() {
  if (state_ != nullptr) gil_restore.load(std::memory_order_relaxed)(state_);
}

struct Gate::Waiting {
  // What a look saw lasts until the next one.
  void note(const schedule::Snapshot& seen, const schedule::Decision& decision, std::int64_t now) noexcept {
    looked_ns = now;
    active = seen.latency_active;
    for_turn = decision.answer == schedule::Answer::kWaitForTurn;
    for_lead = decision.answer == schedule::Answer::kWaitForTime && seen.in_flight_ns > seen.lead_ns;
    if (decision.answer != schedule::Answer::kSubmit && !for_lead) only_for_lead = false;
  }
  // To be called before the next look.
  void pass(std::int64_t now) noexcept {
    if (looked_ns == 0) return;
    const std::int64_t passed = now - looked_ns;
    if (!active) calm_ns += passed;
    if (for_turn) turn_ns += passed;
    if (for_lead) lead_ns += passed;
  }

  bool started = false;
  bool announced = false;  // our bit in the arbiter's `waiting` is set
  std::int64_t since_ns = 0;
  std::int64_t reaped_ns = 0;
  std::int64_t looked_ns = 0;  // 0: not yet
  bool active = false;         // what the last look saw: latency work,
  bool for_turn = false;       // and what the launch was held for
  bool for_lead = false;
  std::int64_t calm_ns = 0;      // waited in all: while no latency work was active,
  std::int64_t turn_ns = 0;      // for the turn,
  std::int64_t lead_ns = 0;      // and because the lead was in flight
  bool only_for_lead = true;     // nothing else has held it
  std::int64_t next_end_ns = 0;  // of what is in flight, from the last look
  bool late = false;             // the GPU ran out of work because the program had none for it
};

void Gate::register_client(arbiter::Table* table, int slot, const Settings& settings,
                           const LatencyActivity* own_latency, const Graphs* graphs, CUdevice device) {
  table_ = table;
  own_latency_ = own_latency;
  graphs_ = graphs;
  in_flight_ = schedule::InFlight(settings.straggler_ns);
  sm_count_ = driver::device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  neighbours_.join(table, slot, driver::under_mps(device), settings);
  if (const schedule::Policy* const policy = schedule::find_policy(settings.policy)) {
    use_policy(schedule::Decider(*policy));
  }
  configure(settings);
  slot_.store(slot, std::memory_order_release);
}

void Gate::moved(int slot) noexcept {
  const std::scoped_lock lock(lock_);
  neighbours_.moved(slot);
  slot_.store(slot, std::memory_order_release);
}

// For the ticker, which goes on where a thread keeps the lock for ever: in a user's policy that does not return.
std::unique_lock<SpinLock> Gate::lock_soon() noexcept {
  std::unique_lock lock(lock_, std::defer_lock);
  for (int tries = 0; tries < 1000 && !lock.try_lock(); ++tries) _mm_pause();
  return lock;
}

void Gate::write_again() noexcept {
  const std::unique_lock lock = lock_soon();
  if (!lock.owns_lock()) return;
  neighbours_.write_again();
  const std::uint64_t self = bit(slot_.load(std::memory_order_relaxed));
  auto& waiting = table_->layout().waiting;
  if (announced_ > 0) {
    if ((waiting.load() & self) == 0) waiting.fetch_or(self);
  } else if ((waiting.load() & self) != 0) {
    waiting.fetch_and(~self);
  }
}

void Gate::configure(const Settings& settings) noexcept {
  const std::scoped_lock lock(lock_);
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

void Gate::use_policy(const schedule::Decider& policy) noexcept {
  const std::scoped_lock lock(lock_);
  decider_ = policy;
}

std::string_view Gate::refused_policy() noexcept {
  const std::unique_lock lock = lock_soon();
  return lock.owns_lock() ? decider_.refused() : std::string_view{};
}

std::int64_t Gate::lead_ns() noexcept {
  const std::scoped_lock lock(lock_);
  return lead_.ns();
}

Gate::Pass Gate::admit_gated(const predict::Launch& launch, CUstream stream, bool may_time, telemetry::Shard& count,
                             const Waiver* waiver) noexcept {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (driver::table().stream_is_capturing(stream, &capture) != CUDA_SUCCESS ||
      capture != CU_STREAM_CAPTURE_STATUS_NONE) {
    return {};
  }
  CUcontext const context = driver::shareable_context();
  const driver::RelaxedCapture relaxed;
  count.gated.fetch_add(1, std::memory_order_relaxed);

  Pass pass;
  CUevent start = nullptr;  // to be recorded before the launch, if it is timed
  predict::Prediction prediction;
  // Left as it is: only what is read is set.
  std::array<std::uint32_t, predict::Function::kMaxParameterBytes / 4> block;
  predict::Query query{.launch = launch, .function = nullptr, .words = {}, .residency = {1, sm_count_}};
  if (!launch.is_graph) {
    if (const driver::KernelFacts* const known = driver::functions().find(launch.function)) {
      query.function = &known->facts;
      query.words = std::span(block).first(known->gather(launch, block.data()));
    }
    // Asked outside the lock: where modules load lazily, the driver may load this one now.
    if (wants_residency(query)) query.residency = residency(launch);
  }
  bool predicted = false;
  bool with_events = false;
  Waiting waiting;
  while (hot().scheduling.load(std::memory_order_relaxed)) {
    schedule::Decision decision;
    {
      const std::scoped_lock lock(lock_);
      const std::int64_t now = now_ns();
      if (!predicted) {
        predicted = true;
        with_events = ensure_events(context);
        if (!primed_.exchange(true, std::memory_order_relaxed) && with_events) {
          // Whatever this stream still holds from before the gate came on.
          const int backlog = enter(stream, {.duration_ns = kBacklogNs, .bound_ns = kBacklogNs}, now);
          if (backlog >= 0) {
            const auto place = static_cast<std::size_t>(backlog);
            const bool recorded = driver::table().event_record(done_[place], stream) == CUDA_SUCCESS;
            tracked_[place].phase = recorded ? Phase::kRecorded : Phase::kByClock;
            if (!recorded) tracked_[place].due_ns = now;
          }
        }
        query.busy = beside_others(stream);
        prediction = predict(query);
      }
      retire(now);
      if (waiting.looked_ns == 0 && in_flight_.count() == 0) {
        waiting.late = now - submitted_ns_ > (waiver != nullptr ? kPromptNs : kPromptProgramNs);
        neighbours_.came_back(now);
      }
      waiting.pass(now);
      const schedule::Snapshot seen = look(prediction, waiting, now);
      decision = decider_(seen);
      waiting.note(seen, decision, now);
      waiting.next_end_ns = in_flight_.next_end_ns(now);
      if (decision.answer != schedule::Answer::kSubmit && must_not_wait(waiver)) decision = {};
      if (decision.answer == schedule::Answer::kSubmit) {
        // Another gate was quicker to take from the slack that this one saw.
        if (!neighbours_.admitted(seen, own_latency_->slot())) continue;
        // Where something else held it, latency work or a turn, a GPU that ran dry says nothing about the lead.
        if (lead_adapts_ && with_events && waiting.only_for_lead && !waiting.late && latency_seen_ns_ < admitted_ns_) {
          pass.admitted_ns = now;
          pass.held_ns = waiting.lead_ns;
          pass.dry_since_ns = in_flight_.count() == 0 ? dry_since_ns_ : 0;
        }
        admitted_ns_ = now;
        dry_since_ns_ = 0;
        pass.entry = enter(stream, prediction, now);
        if (pass.entry >= 0) {
          Tracked& tracked = tracked_[static_cast<std::size_t>(pass.entry)];
          pass.generation = generation_;
          if (with_events) pass.completion = done_[static_cast<std::size_t>(pass.entry)];
          if (with_events && may_time && prediction.wants_sample) {
            const auto timer = std::find_if(timers_.begin(), timers_.end(),
                                            [](const Timer& t) { return t.start != nullptr && !t.busy; });
            if (timer != timers_.end()) {
              timer->busy = true;
              tracked.timer = static_cast<int>(timer - timers_.begin());
              start = timer->start;
              pass.completion = timer->end;
            }
          }
        }
        neighbours_.publish(now + in_flight_.remaining_ns(now));
      }
    }
    if (decision.answer == schedule::Answer::kSubmit) break;
    wait(decision, waiting, waiver);
  }

  if (waiting.announced) leave();
  if (waiting.started) {
    count.waits.fetch_add(1, std::memory_order_relaxed);
    count.wait_ns.fetch_add(static_cast<std::uint64_t>(now_ns() - waiting.since_ns), std::memory_order_relaxed);
  }
  if (pass.entry < 0 || !with_events) count.untracked.fetch_add(1, std::memory_order_relaxed);
  // Without a start there is nothing to measure: that one goes by the clock.
  if (start != nullptr && driver::table().event_record(start, stream) != CUDA_SUCCESS) pass.completion = nullptr;
  return pass;
}

void Gate::submitted(const Pass& pass, CUstream stream, CUresult status) noexcept {
  if (pass.entry < 0) return;
  bool recorded = false;
  if (status == CUDA_SUCCESS && pass.completion != nullptr) {
    const driver::RelaxedCapture relaxed;
    recorded = driver::table().event_record(pass.completion, stream) == CUDA_SUCCESS;
  }
  const std::scoped_lock lock(lock_);
  submitted_ns_ = now_ns();
  if (pass.generation != generation_) return;  // the context went meanwhile
  Tracked& tracked = tracked_[static_cast<std::size_t>(pass.entry)];
  if (status != CUDA_SUCCESS) {
    in_flight_.withdraw(pass.entry, submitted_ns_);
    release(pass.entry, false);
  } else {
    tracked.phase = recorded ? Phase::kRecorded : Phase::kByClock;
    if (pass.admitted_ns != 0) learn_lead(pass, tracked.prediction.duration_ns, submitted_ns_);
  }
}

// lock_ is held by the callers of everything from here to wait().

int Gate::enter(CUstream stream, const predict::Prediction& prediction, std::int64_t now) noexcept {
  const int entry = in_flight_.submit(reinterpret_cast<std::uintptr_t>(stream), prediction.duration_ns, now);
  if (entry >= 0) {
    const bool beside = beside_others(stream);
    if (beside) mark_overlapped();
    tracked_[static_cast<std::size_t>(entry)] = {
        Phase::kSubmitting, -1, now + in_flight_.remaining_ns(now), stream, beside, prediction};
  }
  return entry;
}

predict::Prediction Gate::predict(const predict::Query& query) noexcept {
  if (!query.launch.is_graph) return predictor_.predict(query);
  const GraphFacts* const known = graphs_->find(query.launch.function);
  if (known == nullptr) return predictor_.predict_graph(query.launch.function, 0, query.busy);
  // By what is in it rather than by its handle, which another graph may have had.
  return predictor_.predict_graph(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(known->identity)),
                                  known->critical_path_ns, query.busy);
}

// Is work of another stream in flight?
bool Gate::beside_others(CUstream stream) noexcept {
  bool found = false;
  in_flight_.for_each([&](int entry) {
    const Tracked& tracked = tracked_[static_cast<std::size_t>(entry)];
    found = found || (tracked.phase != Phase::kFree && tracked.stream != stream);
    return false;  // the first of each stream says whose it is
  });
  return found;
}

void Gate::mark_overlapped() noexcept {
  in_flight_.for_each([&](int entry) {
    tracked_[static_cast<std::size_t>(entry)].overlapped = true;
    return true;
  });
}

void Gate::release(int entry, bool measured) noexcept {
  Tracked& tracked = tracked_[static_cast<std::size_t>(entry)];
  if (tracked.timer >= 0) {
    Timer& timer = timers_[static_cast<std::size_t>(tracked.timer)];
    float milliseconds = 0;
    if (measured && driver::table().event_elapsed_time(&milliseconds, timer.start, timer.end) == CUDA_SUCCESS) {
      const auto measured_ns = static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
      predictor_.observe(tracked.prediction, std::max<std::int64_t>(measured_ns - kEventGapNs, 1'000),
                         tracked.overlapped);
    }
    timer.busy = false;
  }
  tracked = Tracked{};
}

void Gate::retire(std::int64_t now) noexcept {
  const int before = in_flight_.count();
  in_flight_.for_each([&](int entry) {
    const Tracked& tracked = tracked_[static_cast<std::size_t>(entry)];
    const bool measured = tracked.phase == Phase::kRecorded;
    switch (tracked.phase) {
      case Phase::kSubmitting:
        return false;
      case Phase::kByClock:
        if (now < tracked.due_ns) return false;
        break;
      case Phase::kRecorded: {
        const CUevent event = tracked.timer >= 0 ? timers_[static_cast<std::size_t>(tracked.timer)].end
                                                 : done_[static_cast<std::size_t>(entry)];
        if (driver::table().event_query(event) == CUDA_ERROR_NOT_READY) return false;
        break;
      }
      case Phase::kFree:
        break;
    }
    in_flight_.complete(entry, retired_ns_, now);
    release(entry, measured);
    return true;
  });
  // Somewhere between the two looks.
  if (in_flight_.count() == 0 && dry_since_ns_ == 0) dry_since_ns_ = (retired_ns_ + now) / 2;
  retired_ns_ = now;
  // Others count what this client has in flight until they hear that it is done.
  if (in_flight_.count() < before) neighbours_.publish(now + in_flight_.remaining_ns(now));
}

std::int64_t Gate::earliest_due_ns() noexcept {
  std::int64_t earliest = std::numeric_limits<std::int64_t>::max();
  in_flight_.for_each([&](int entry) {
    earliest = std::min(earliest, tracked_[static_cast<std::size_t>(entry)].due_ns);
    return false;  // the first of each stream
  });
  return earliest;
}

void Gate::report_overdue(std::int64_t now) noexcept {
  if (!registered()) return;
  // At exit, nothing calls the driver from here once stop() has passed this lock.
  const std::scoped_lock probe(LatencyActivity::probe_mutex());
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock = lock_soon();
  if (!lock.owns_lock()) return;
  std::int64_t due = earliest_due_ns();
  if (now - kOverdueNs > due) {
    const driver::RelaxedCapture relaxed;
    retire(now);
    due = earliest_due_ns();
  }
  table_->slot(slot_.load(std::memory_order_relaxed))
      .overdue_since_ns.store(now - kOverdueNs > due ? due : 0, std::memory_order_relaxed);
}

schedule::Snapshot Gate::look(const predict::Prediction& prediction, const Waiting& waiting,
                              std::int64_t now) noexcept {
  schedule::Snapshot snapshot;
  snapshot.predicted_ns = prediction.duration_ns;
  snapshot.bound_ns = prediction.bound_ns;
  snapshot.in_flight_ns = in_flight_.remaining_ns(now);
  snapshot.linger_ns = linger_ns_;
  snapshot.margin_ns = margin_ns_;
  snapshot.long_ns = long_ns_;
  snapshot.waited_ns = waiting.calm_ns;
  neighbours_.look(snapshot, now, waiting.turn_ns);
  if (lead_adapts_) neighbours_.report_requests(lead_);
  snapshot.lead_ns = lead_.ns();
  // A waiter that slept sees the end of the activity, not its last moment.
  if (snapshot.latency_active || latency_was_active_) latency_seen_ns_ = now;
  if (latency_was_active_ && !snapshot.latency_active) {
    in_flight_.restart(now);
    snapshot.in_flight_ns = std::max(snapshot.in_flight_ns, in_flight_.remaining_ns(now));
  }
  latency_was_active_ = snapshot.latency_active;
  if (snapshot.latency_active) mark_overlapped();
  if (latency_seen_ns_ != 0) snapshot.since_latency_ns = now - latency_seen_ns_;
  return snapshot;
}

// Had the GPU run out of our work when the launch reached it? Then the lead was too small, if the lead is what held it.
void Gate::learn_lead(const Pass& pass, std::int64_t gpu_ns, std::int64_t now) noexcept {
  retire(now);
  std::int64_t dry = 0;
  if (in_flight_.count() <= 1) {
    // While the driver was launching, at some moment unknown.
    dry = pass.dry_since_ns != 0 ? now - pass.dry_since_ns : (now - pass.admitted_ns) / 2;
  }
  lead_.submitted(pass.held_ns, dry, gpu_ns);
}

bool Gate::must_not_wait(const Waiver* waiver) const noexcept {
  if (waiver != nullptr) return waiver->applies();
  if (!own_latency_->registered()) return false;
  // In a latency region, this thread's wait is latency work's, and the gate would wait for the region to end.
  return in_latency_region(this_thread()) || holds_gil();
}

// The bit stands for all threads of the process that wait; the last one takes it away.
void Gate::announce() noexcept {
  {
    const std::scoped_lock lock(lock_);
    if (announced_++ != 0) return;
    const int slot = slot_.load(std::memory_order_relaxed);
    table_->slot(slot).heartbeat_ns.store(now_ns(), std::memory_order_relaxed);  // or nobody believes it
    table_->layout().waiting.fetch_or(bit(slot));
  }
  hot().ticker.wake();
}

void Gate::leave() noexcept {
  const std::scoped_lock lock(lock_);
  if (--announced_ == 0) table_->layout().waiting.fetch_and(~bit(slot_.load(std::memory_order_relaxed)));
}

bool Gate::ensure_events(CUcontext context) noexcept {
  if (context_ == context) return context != nullptr;
  if (context_ != nullptr || context == nullptr) return false;  // a second context of one device: by the clock alone
  const auto create = [](CUevent& event, unsigned flags) {
    if (driver::table().event_create(&event, flags) == CUDA_SUCCESS) return true;
    event = nullptr;
    return false;
  };
  for (CUevent& event : done_) {
    if (create(event, CU_EVENT_DISABLE_TIMING)) continue;
    destroy_events();
    return false;
  }
  for (Timer& timer : timers_) {
    if (create(timer.end, CU_EVENT_DEFAULT)) create(timer.start, CU_EVENT_DEFAULT);  // without a start: not used
  }
  context_ = context;
  return true;
}

void Gate::destroy_events() noexcept {
  const auto destroy = [](CUevent event) {
    if (event != nullptr) driver::table().event_destroy(event);
  };
  for (const CUevent event : done_) destroy(event);
  for (const Timer& timer : timers_) {
    destroy(timer.start);
    destroy(timer.end);
  }
  done_.fill(nullptr);
  timers_.fill({});
}

bool Gate::wants_residency(const predict::Query& query) noexcept {
  const std::scoped_lock lock(lock_);
  return predictor_.wants_residency(query.launch, query.function, query.words);
}

void Gate::use(const predict::trees::Evaluator* trees, const predict::Allocations* allocations) noexcept {
  const std::scoped_lock lock(lock_);
  predictor_.use_trees(trees);
  predictor_.use_allocations(allocations);
}

std::int64_t Gate::estimate_ns(const predict::Query& query) noexcept {
  const std::scoped_lock lock(lock_);
  return predictor_.estimate_ns(query);
}

std::vector<std::byte> Gate::save() noexcept {
  for (int tries = 0; tries < 1000; ++tries) {
    if (lock_.try_lock()) {
      const std::scoped_lock lock(std::adopt_lock, lock_);
      try {
        return predictor_.save();
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
  predictor_.restore(state);
}

predict::Residency Gate::residency(const predict::Launch& launch) const noexcept {
  predict::Residency result{1, sm_count_};
  driver::ask_occupancy(launch, result.blocks_per_sm);
  return result;
}

void Gate::forget_context(CUcontext context) noexcept {
  const driver::RelaxedCapture relaxed;
  const std::scoped_lock lock(lock_);
  if (context_ == nullptr || (context != nullptr && context != context_)) return;
  for (std::size_t entry = 0; entry < tracked_.size(); ++entry) {
    // Another thread is about to record these: they are left to the context's end.
    if (tracked_[entry].phase != Phase::kSubmitting) continue;
    done_[entry] = nullptr;
    if (tracked_[entry].timer >= 0) timers_[static_cast<std::size_t>(tracked_[entry].timer)] = {};
  }
  // Not left to the context's end: a primary context that is released may live on.
  destroy_events();
  in_flight_.clear();
  tracked_.fill({});
  ++generation_;
  context_ = nullptr;
  primed_.store(false, std::memory_order_relaxed);
}

void Gate::wait(const schedule::Decision& decision, Waiting& waiting, const Waiver* waiver) noexcept {
  const std::int64_t now = now_ns();
  if (!waiting.started) {
    waiting.started = true;
    waiting.since_ns = waiting.reaped_ns = now;
  }
  auto& layout = table_->layout();
  // Where several feed at once, whoever waits for the lead is behind as much as who waits for its share. Who waits for
  // foreseen latency work is not: the others may go.
  const bool for_time = decision.answer == schedule::Answer::kWaitForTime;
  const bool announced = !for_time || (neighbours_.feeds_with_others() && waiting.for_lead);
  if (announced && !waiting.announced) announce();
  if (!announced && waiting.announced) leave();
  waiting.announced = announced;
  if (for_time) {
    if (const std::int64_t asleep = schedule::sleep_ns(decision.wait_ns, waiting.next_end_ns); asleep > 0) {
      sleep_for(asleep);
    } else {
      pause_until(now + std::min(decision.wait_ns, kPollNs));
    }
    return;
  }

  if (now - waiting.reaped_ns > kReapNs) {
    waiting.reaped_ns = now;
    table_->reap();
  }
  const bool for_latency = decision.answer == schedule::Answer::kWaitForLatency;
  if (now - waiting.since_ns < kSpinNs) {
    // A look asks the driver for what is in flight, by locks that latency work needs at this moment.
    const std::int64_t until = for_latency ? now + kSpinNs / 3 : now;
    for (std::int64_t at = now; at <= until;) {
      pause_until(at + kPollNs / 4);
      at = now_ns();
      if (for_latency && (!neighbours_.latency_active(at) || must_not_wait(waiver))) break;
    }
    return;
  }
  const std::uint32_t seen = layout.wake_sequence.load(std::memory_order_acquire);
  if (must_not_wait(waiver)) return;  // an opening between the last look and this one has woken nobody
  const bool still_waiting = !for_latency || neighbours_.latency_active(now);
  if (still_waiting) table_->sleep(seen, for_latency ? kReapNs : kNsPerMs / 2);
}

}  // namespace cudasched::runtime
