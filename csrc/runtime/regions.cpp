#include "runtime/regions.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "runtime/engine.hpp"
#include "runtime/tracing.hpp"

namespace cudasched::runtime {
namespace {

// Where a thread's regions are, from its first one to its end. A thread that ends leaves those that are open.
class ThreadRegions {
 public:
  ~ThreadRegions() {
    engine().regions().leave_all();
    this_thread().stack = nullptr;
  }
  RegionStack* get() noexcept { return stack_.get(); }

 private:
  std::unique_ptr<RegionStack> stack_ = std::make_unique<RegionStack>();
};

RegionStack* region_stack() {
  static thread_local ThreadRegions regions;
  return regions.get();
}

}  // namespace

std::uint64_t Regions::enter(Class value, std::int32_t priority, std::int64_t slo_ns, std::int64_t deadline_ns,
                             std::string_view name) {
  leave_ended();
  ThreadState& thread = this_thread();
  if (thread.depth == RegionStack::kCapacity) {
    throw Error("regions are nested more than " + std::to_string(RegionStack::kCapacity) +
                " deep on this thread; leave some before entering another");
  }
  if (!used()) used_.store(true, std::memory_order_relaxed);
  thread.stack = region_stack();
  ++thread.depth;
  Region& region = thread.stack->regions[static_cast<std::size_t>(thread.depth - 1)];
  region = {};
  region.region_class = value;
  region.priority = priority;
  region.slo_ns = slo_ns;
  region.deadline_ns = deadline_ns;
  region.entered_ns = now_ns();
  // A step of a request is none.
  const bool is_request = slo_ns != 0 || deadline_ns == 0;
  if (value == Class::kLatency && is_request) region.counted = hot().counters.regions.index_of(name);
  region.token = next_token_.fetch_add(1, std::memory_order_relaxed);
  if (telemetry::tracing()) region.traced = telemetry::trace_region(name, value);
  trace_region(region, telemetry::TraceKind::kRegionBegin);
  if (value == Class::kLatency) hot().host_backoff.enter();
  if (value == Class::kBestEffort) {
    hot().marks.entered(region.token);
    hot().carries_origins.store(true, std::memory_order_relaxed);
  }
  // The earliest hint there is: best-effort work holds back before the first launch. On a machine with several GPUs the
  // thread's context says which one; without a context the first launch does.
  if (value == Class::kLatency && hot().scheduling.load(std::memory_order_relaxed)) {
    if (Device* device = Engine::current_device(thread)) engine().prepare(*device, value, thread);
  }
  return region.token;
}

void Regions::exit(std::uint64_t token) {
  leave_ended();
  const ThreadState& thread = this_thread();
  for (int i = thread.depth - 1; i >= 0; --i) {
    const Region& region = thread.stack->regions[static_cast<std::size_t>(i)];
    if (region.token != token) continue;
    if (region.ended_elsewhere) {
      const std::scoped_lock lock(moving_lock_);
      moving_.erase(token);
    }
    take_out(i);
    return;
  }
  throw Error(
      "this region was not entered on this thread, or was left already; a region belongs to the thread that "
      "entered it");
}

void Regions::take_out(int place) noexcept {
  ThreadState& thread = this_thread();
  auto& regions = thread.stack->regions;
  const Region region = std::move(regions[static_cast<std::size_t>(place)]);
  std::move(regions.begin() + place + 1, regions.begin() + thread.depth, regions.begin() + place);
  --thread.depth;
  leave_devices(region);
}

void Regions::leave_ended() noexcept {
  const ThreadState& thread = this_thread();
  for (int i = thread.depth - 1; i >= 0; --i) {
    if (thread.stack->regions[static_cast<std::size_t>(i)].ended()) take_out(i);
  }
}

void Regions::may_move(std::uint64_t token) {
  const ThreadState& thread = this_thread();
  for (int i = thread.depth - 1; i >= 0; --i) {
    Region& region = thread.stack->regions[static_cast<std::size_t>(i)];
    if (region.token != token || region.ended_elsewhere) continue;
    auto ended = std::make_shared<std::atomic<bool>>(false);
    const std::scoped_lock lock(moving_lock_);
    moving_[token] = ended;
    region.ended_elsewhere = std::move(ended);
  }
}

void Regions::end_elsewhere(std::uint64_t token) {
  const std::scoped_lock lock(moving_lock_);
  const auto found = moving_.find(token);
  if (found == moving_.end()) throw Error("this region has ended already, or may not end on another thread");
  found->second->store(true, std::memory_order_relaxed);
  moving_.erase(found);
}

void Regions::leave_devices(const Region& region) noexcept {
  trace_region(region, telemetry::TraceKind::kRegionEnd);
  if (region.region_class == Class::kLatency) hot().host_backoff.leave();
  if (region.region_class == Class::kBestEffort) {
    hot().marks.left(region.token);
    if (hot().marks.in_use()) hot().ticker.wake();
  }
  engine().for_each_device([&](Device& device) {
    const std::uint32_t bit = 1U << device.ordinal();
    if ((region.devices & bit) == 0) return;
    device.latency.exit_region(region, /*counts=*/(region.devices & (bit - 1)) == 0);
  });
}

void Regions::leave_all() noexcept {
  while (this_thread().depth > 0) take_out(this_thread().depth - 1);
}

void Regions::expect(std::int64_t within_ns) {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  ThreadState& thread = this_thread();
  Device* const device = Engine::current_device(thread);
  if (device == nullptr || !engine().prepare(*device, Class::kLatency, thread)) return;
  device->latency.expect(within_ns);
}

void Regions::measure(std::int64_t for_ns, cudasched_measuring& found) {
  found = {};
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  ThreadState& thread = this_thread();
  Device* const device = Engine::current_device(thread);
  if (device == nullptr || !engine().prepare(*device, Class::kBestEffort, thread)) return;
  device->measure(for_ns, now_ns(), found);
}

}  // namespace cudasched::runtime
