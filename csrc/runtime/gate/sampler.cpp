#include "runtime/gate/sampler.hpp"

#include <algorithm>

#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "runtime/hot.hpp"
#include "runtime/tracing.hpp"

namespace cudasched::runtime {

Sampler::Question::Question(const predict::Launch& launch, const predict::Residency& device) noexcept
    : query{.launch = launch, .function = nullptr, .words = {}, .residency = device, .lacks_residency = true} {
  if (launch.is_graph) return;
  if (const driver::KernelFacts* const known = driver::functions().find(launch.function)) {
    query.function = &known->facts;
    query.words = std::span(block_).first(known->gather(launch, block_.data()));
  }
}

void Sampler::Question::find_residency() noexcept {
  driver::ask_occupancy(query.launch, query.residency.blocks_per_sm);
  query.lacks_residency = false;
}

void Sampler::make_timers() noexcept {
  const auto create = [](CUevent& event) {
    if (driver::table().cuEventCreate(&event, CU_EVENT_DEFAULT) == CUDA_SUCCESS) return true;
    event = nullptr;
    return false;
  };
  for (Timer& timer : timers_) {
    if (create(timer.end)) create(timer.start);  // without a start: not used
  }
}

void Sampler::destroy_timers() noexcept {
  for (const Timer& timer : timers_) {
    if (timer.start != nullptr) driver::table().cuEventDestroy(timer.start);
    if (timer.end != nullptr) driver::table().cuEventDestroy(timer.end);
  }
  timers_.fill({});
}

predict::Prediction Sampler::predict(const predict::Query& query) noexcept {
  if (!query.launch.is_graph) return predictor_.predict(query);
  const std::optional<GraphFacts> known = graphs_->find(query.launch.function);
  if (!known) return predictor_.predict_graph(query.launch.function, 0, query.busy);
  // By the graph's contents rather than its handle, which another graph may have had.
  return predictor_.predict_graph(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(known->identity)),
                                  known->critical_path_ns, query.busy);
}

bool Sampler::times(const queue::Call& call, const predict::Prediction& prediction) noexcept {
  if (!prediction.wants_sample || call.always_direct) return false;
  if (!call.meaning.overlaps_predecessor || prediction.knowledge != predict::Knowledge::kKnown) return true;
  return ++overlapping_wanted_ % kOverlappingPeriod == 0;
}

std::int64_t Sampler::measured_graph_ns(CUgraphExec exec) const noexcept {
  const std::optional<GraphFacts> known = Graphs::find(exec);
  if (!known) return 0;
  return predictor_.measured_graph_ns(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(known->identity)),
                                      known->critical_path_ns);
}

std::int64_t Sampler::graph_ns(CUgraphExec exec) const noexcept {
  const std::optional<GraphFacts> known = Graphs::find(exec);
  if (!known) return 0;
  return predictor_.graph_ns(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(known->identity)),
                             known->critical_path_ns);
}

void Sampler::entered(int segment, const predict::Prediction& prediction, bool alone, bool beside_others) noexcept {
  if (beside_others) overlap();
  at(segment) = {.timer = -1,
                 .alone = alone,
                 .overlapped = beside_others,
                 .overlap = overlap_,
                 .call_ns = 0,
                 .told_ns = 0,
                 .prediction = prediction,
                 .traced = {}};
}

CUevent Sampler::start_timer(int segment) noexcept {
  const auto timer =
      std::find_if(timers_.begin(), timers_.end(), [](const Timer& t) { return t.start != nullptr && !t.busy; });
  if (timer == timers_.end()) return nullptr;
  timer->busy = true;
  at(segment).timer = static_cast<int>(timer - timers_.begin());
  return timer->start;
}

void Sampler::trace(int segment, const queue::Call& call, int device) noexcept {
  at(segment).traced = traced_launch(call, device, at(segment).prediction.duration_ns);
}

CUevent Sampler::end_event(int segment, CUevent marker) const noexcept {
  const int timer = notes_[static_cast<std::size_t>(segment)].timer;
  return timer >= 0 ? timers_[static_cast<std::size_t>(timer)].end : marker;
}

void Sampler::free_timer(Note& note) noexcept {
  if (note.timer >= 0) timers_[static_cast<std::size_t>(note.timer)].busy = false;
  note.timer = -1;
}

void Sampler::drop(int segment) noexcept {
  free_timer(at(segment));
  at(segment) = Note{};
}

void Sampler::completed(int segment, bool marked) noexcept {
  Note& note = at(segment);
  if (note.timer >= 0 && marked) {
    const Timer& timer = timers_[static_cast<std::size_t>(note.timer)];
    float milliseconds = 0;
    if (driver::table().cuEventElapsedTime_v1(&milliseconds, timer.start, timer.end) == CUDA_SUCCESS) {
      const auto measured_ns = static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
      const std::int64_t took_ns =
          predictor_.observe_elapsed(note.prediction, {measured_ns, note.call_ns}, overlapped(note));
      if (note.traced.kind == telemetry::TraceKind::kTimed) trace_timed(note.traced, measured_ns);
      if (!overlapped(note)) {
        hot().counters.predictions.add(note.prediction.duration_ns, note.prediction.bound_ns, took_ns);
      }
    }
  }
  free_timer(note);
  note = Note{};
}

void Sampler::observe_late(schedule::Ledger& ledger) noexcept {
  ledger.for_each([&](int segment) {
    Note& note = at(segment);
    if (!note.alone || overlapped(note) || ledger.segment_late_ns(segment) == 0) return false;
    const std::int64_t ran_ns = ledger.segment_ran_ns(segment);
    if (ran_ns < 2 * note.told_ns) return false;
    note.told_ns = ran_ns;
    predictor_.observe_at_least(note.prediction, ran_ns);
    return false;  // the first of each stream
  });
}

}  // namespace cudasched::runtime
