#include "runtime/latency/segments.hpp"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>

#include "driver/driver.hpp"
#include "predict/sample.hpp"
#include "runtime/hot.hpp"
#include "schedule/policy.hpp"
#include "schedule/requests.hpp"

namespace cudasched::runtime {
namespace {

// Between one kernel and the next of a stream.
constexpr std::int64_t kGapNs = 1'300;

}  // namespace

void LatencySegments::join(arbiter::Table* table, int slot, const Settings& settings) {
  table_ = table;
  slot_.store(slot);
  if (!schedule::looks_into_requests(settings.policy)) return;
  by_target_ = settings.policy == "slack";
  margin_ns_ = settings.margin_ns;
  segments_ = std::make_unique<schedule::Segments>(settings.host_bound_inflation);
  on_.store(true, std::memory_order_release);
}

void LatencySegments::publish(const schedule::Segments::SegmentNews& told) noexcept {
  segment_.store(told.segment, std::memory_order_relaxed);
  timers_used_.store(0, std::memory_order_relaxed);
  const std::int64_t position_ns = slot().latency_gpu_ns.load(std::memory_order_relaxed);
  segment_position_ns_.store(position_ns, std::memory_order_relaxed);
  schedule::publish(told, position_ns, slot());
}

void LatencySegments::begin(std::uint64_t key, std::int64_t now, bool sliced,
                            schedule::Segments::Target target) noexcept {
  if (!on() || (by_target_ && target.deadline_ns == 0)) return;
  const std::unique_lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // the request before is being closed: this one is not known
  target.margin_ns = margin_ns_;
  publish(segments_->begin(key, now, sliced, by_target_ ? std::optional(target) : std::nullopt));
}

LatencySegments::Timing LatencySegments::tell_launch(CUstream stream, bool may_time) noexcept {
  const schedule::Segments::Launch launch = segments_->launch([] { return now_ns(); });
  arbiter::Slot& self = slot();
  Timing timing;
  timing.position_ns = launch.gpu_ns;
  if (launch.gpu_ns != 0) timing.position_ns += self.latency_gpu_ns.fetch_add(launch.gpu_ns, std::memory_order_relaxed);
  self.segment_left.store(launch.left, std::memory_order_relaxed);
  if (launch.number == 0) {
    stream_.store(stream, std::memory_order_relaxed);
    several_streams_.store(false, std::memory_order_relaxed);
  } else if (stream_.load(std::memory_order_relaxed) != stream) {
    several_streams_.store(true, std::memory_order_relaxed);
  }
  timing.marks = launch.gpu_ns != 0 && schedule::SegmentProgress::asks(launch.number) &&
                 !several_streams_.load(std::memory_order_relaxed) &&
                 self.segment_late_ns.load(std::memory_order_relaxed) > 0;
  if (!(launch.is_timed || timing.marks) || !may_time) return {};
  CUcontext const context = driver::shareable_context();
  if (context == nullptr || context != context_.load(std::memory_order_acquire)) return {};
  if (!launch.is_timed) return timing;
  const int place = timers_used_.fetch_add(1, std::memory_order_relaxed);
  if (place >= kTimers) return {};
  Timer& timer = timers_[static_cast<std::size_t>(place)];
  if (timer.end == nullptr) return {};
  timer.segment.store(0, std::memory_order_relaxed);
  timer.number = launch.number;
  const driver::RelaxedCapture relaxed;
  if (driver::table().cuEventRecord(timer.start, stream) != CUDA_SUCCESS) return {};
  return {place, now_ns()};
}

void LatencySegments::mark(const Timing& timing, CUstream stream) noexcept {
  if (marking_.exchange(true, std::memory_order_acquire)) return;
  const driver::RelaxedCapture relaxed;
  const std::uint64_t segment = segment_.load(std::memory_order_relaxed);
  if (segment != marks_segment_) marks_.begin(segment_position_ns_.load(std::memory_order_relaxed));
  marks_segment_ = segment;
  const bool wanted = mark_ != nullptr && marks_.ask(timing.position_ns, [&] {
    return driver::table().cuEventQuery(mark_) == CUDA_SUCCESS;
  });
  if (wanted && driver::table().cuEventRecord(mark_, stream) == CUDA_SUCCESS) marks_.marked(timing.position_ns);
  slot().latency_done_ns.store(marks_.done_ns(), std::memory_order_release);
  slot().latency_not_done_ns.store(marks_.not_done_ns(), std::memory_order_release);
  marking_.store(false, std::memory_order_release);
}

void LatencySegments::end_timer(const Timing& timing, CUstream stream) noexcept {
  const std::int64_t returned_ns = now_ns();
  Timer& timer = timers_[static_cast<std::size_t>(timing.timer)];
  const driver::RelaxedCapture relaxed;
  if (driver::table().cuEventRecord(timer.end, stream) != CUDA_SUCCESS) return;
  const bool awaited = driver::table().cuEventQuery(timer.start) == CUDA_SUCCESS;
  timer.call_ns = awaited ? returned_ns - timing.called_ns : 0;
  timer.segment.store(segment_.load(std::memory_order_relaxed), std::memory_order_release);
}

// Under lock_, before the next segment begins. An incomplete timing teaches nothing.
void LatencySegments::read_timers() noexcept {
  const driver::RelaxedCapture relaxed;
  for (Timer& timer : timers_) {
    const std::uint64_t used = timer.segment.exchange(0, std::memory_order_acquire);
    if (used == 0 || used != segment_.load(std::memory_order_relaxed)) continue;
    float milliseconds = 0;
    if (driver::table().cuEventElapsedTime_v1(&milliseconds, timer.start, timer.end) != CUDA_SUCCESS) continue;
    const predict::Sample kernel =
        predict::event_sample({static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6), timer.call_ns});
    segments_->took(timer.number, std::max<std::int64_t>(static_cast<std::int64_t>(kernel.ns), 0) + kGapNs);
  }
}

void LatencySegments::make_timers(CUcontext context) noexcept {
  if (context_.load(std::memory_order_relaxed) != nullptr) return;
  for (Timer& timer : timers_) {
    if (driver::table().cuEventCreate(&timer.start, CU_EVENT_DEFAULT) != CUDA_SUCCESS) timer.start = nullptr;
    if (timer.start == nullptr || driver::table().cuEventCreate(&timer.end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
      timer.end = nullptr;  // not used
    }
  }
  if (driver::table().cuEventCreate(&mark_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) mark_ = nullptr;
  context_.store(context, std::memory_order_release);
}

void LatencySegments::destroy_timers() noexcept {
  context_.store(nullptr, std::memory_order_relaxed);
  for (Timer& timer : timers_) {
    timer.segment.store(0, std::memory_order_relaxed);
    if (timer.start != nullptr) driver::table().cuEventDestroy(timer.start);
    if (timer.end != nullptr) driver::table().cuEventDestroy(timer.end);
    timer.start = timer.end = nullptr;
  }
  while (marking_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  if (mark_ != nullptr) driver::table().cuEventDestroy(mark_);
  mark_ = nullptr;
  marks_segment_ = 0;
  marking_.store(false, std::memory_order_release);
}

void LatencySegments::count() noexcept {
  const schedule::Segments::Counts now = segments_->counts();
  telemetry::Counters& counters = hot().counters;
  counters.clean_segments.fetch_add(now.clean - counted_.clean, std::memory_order_relaxed);
  counters.halved_budgets.fetch_add(now.halved - counted_.halved, std::memory_order_relaxed);
  counters.profile_fallbacks.fetch_add(now.fallbacks - counted_.fallbacks, std::memory_order_relaxed);
  counted_ = now;
}

void LatencySegments::waited(std::int64_t now, CUcontext context) noexcept {
  if (!on()) return;
  bool wakes = false;
  {
    const std::scoped_lock lock(lock_);
    if (context != nullptr) {
      make_timers(context);
      read_timers();
    }
    schedule::Segments::SegmentNews told;
    if (!segments_->next(now, told)) return;
    publish(told);
    if (!by_target_) hot().host_backoff.renew(now);
    wakes = told.late_ns > 0 && schedule::worth_waking(told.left);
  }
  // Gates that had closed for the segment before sleep until latency work is over.
  if (wakes && table_->layout().waiting.load() != 0) table_->wake_all();
}

void LatencySegments::end(std::int64_t now, CUcontext context) noexcept {
  if (!on()) return;
  const std::scoped_lock lock(lock_);
  if (context != nullptr) {
    make_timers(context);
    read_timers();
  }
  segments_->end(now);
  slot().segment_late_ns.store(0, std::memory_order_release);
  count();
}

void LatencySegments::lose() noexcept {
  if (!on()) return;
  const std::scoped_lock lock(lock_);
  segments_->lose();
  slot().segment_late_ns.store(0, std::memory_order_release);
}

void LatencySegments::forget_events() noexcept {
  if (!on()) return;
  const std::scoped_lock lock(lock_);
  if (context_.load(std::memory_order_relaxed) != nullptr) destroy_timers();
}

}  // namespace cudasched::runtime
