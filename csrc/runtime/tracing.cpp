// The contents of records (runtime/tracing.hpp), and the trace section of include/cudasched/engine.h.
#include "runtime/tracing.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "base/log.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "runtime/device.hpp"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"

namespace cudasched::runtime {
namespace {

using telemetry::TraceKind;
using telemetry::TraceRecord;
using telemetry::WaitReason;

std::uint64_t word(const void* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle); }

int device_of(const queue::Call& call) noexcept {
  const Device* const device = call.site.device != nullptr ? call.site.device : Engine::current_device(this_thread());
  return device == nullptr ? 0 : device->ordinal();
}

// Names the launched kernel or graph. A kernel that the driver has refused is not looked at.
void name(TraceRecord& record, const queue::Call& call, bool refused) noexcept {
  if (call.is_graph) {
    record.what = word(call.function);
    record.detail |= telemetry::kTraceGraph;
  } else if (!refused) {
    record.what = word(driver::functions().find(call.function));
  }
}

// And in which shape. Not of a call that is only deferred: the launcher thread's record of it has that.
void name_with_shape(TraceRecord& record, const queue::Call& call, bool refused) noexcept {
  name(record, call, refused);
  if (!call.is_graph && !refused) record.has_shape(telemetry::trace_shape(call));
}

// Where a call comes from.
TraceRecord record_of(TraceKind kind, const queue::Call& call, Class call_class, int device,
                      std::int64_t begin_ns) noexcept {
  TraceRecord record;
  record.kind = kind;
  record.time_ns = begin_ns;
  record.stream = word(call.stream);
  record.at(call_class, device);
  record.region = call.site.caller.region;
  record.thread = static_cast<std::uint16_t>(call.site.caller.thread);
  return record;
}

}  // namespace

void trace_launch(const queue::Call& call, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t predicted_ns,
                  CUresult status) noexcept {
  if (call.site.captured) return;  // the device does not run it
  TraceRecord record = record_of(TraceKind::kLaunch, call, call.site.call_class, device_of(call), begin_ns);
  record.lasts(end_ns - begin_ns);
  record.predicts(predicted_ns);
  if (status != CUDA_SUCCESS) record.detail |= telemetry::kTraceRefused;
  name_with_shape(record, call, status != CUDA_SUCCESS);
  telemetry::put(record);
}

void trace_push(const queue::Call& call, std::int64_t begin_ns) noexcept {
  TraceRecord record = record_of(TraceKind::kPush, call, call.site.call_class, device_of(call), begin_ns);
  record.lasts(now_ns() - begin_ns);
  name(record, call, /*refused=*/false);
  telemetry::put(record);
}

void trace_region(const Region& region, TraceKind kind) noexcept {
  if (!telemetry::tracing()) return;
  ThreadState& thread = this_thread();
  Engine::name_thread(thread);
  TraceRecord record;
  record.kind = kind;
  record.time_ns = now_ns();
  record.what = region.token;
  record.at(region.region_class, 0);
  record.region = region.traced;
  record.thread = static_cast<std::uint16_t>(thread.index);
  telemetry::put(record);
}

void trace_wait(const queue::Call& call, int device, std::int64_t begin_ns, WaitReason why) noexcept {
  TraceRecord record = record_of(TraceKind::kWait, call, Class::kBestEffort, device, begin_ns);
  record.lasts(now_ns() - begin_ns);
  if (!call.is_graph) record.what = word(driver::functions().find(call.function));
  record.detail = static_cast<std::uint8_t>(why);
  telemetry::put(record);
}

TraceRecord traced_launch(const queue::Call& call, int device, std::int64_t predicted_ns) noexcept {
  TraceRecord record = record_of(TraceKind::kTimed, call, Class::kBestEffort, device, now_ns());
  record.predicts(predicted_ns);
  name_with_shape(record, call, /*refused=*/false);
  return record;
}

void trace_timed(TraceRecord record, std::int64_t took_ns) noexcept {
  record.lasts(took_ns);
  telemetry::put(record);
}

void trace_submission(const queue::Operation& operation, int device, const Submission& what, CUresult status) noexcept {
  TraceRecord record;
  record.kind = TraceKind::kLaunch;
  record.time_ns = what.begin_ns;
  record.lasts(what.end_ns - what.begin_ns);
  record.stream = word(operation.stream);
  record.at(Class::kBestEffort, device);
  record.region = operation.region;
  record.detail = telemetry::kTraceDeferred;
  if (status != CUDA_SUCCESS) record.detail |= telemetry::kTraceRefused;
  if (what.graph != nullptr) {
    record.detail |= telemetry::kTraceGraph;
    record.what = word(what.graph);
  } else {
    record.what = word(driver::functions().find(operation.launch.what.function));
    if (status == CUDA_SUCCESS) record.has_shape(telemetry::trace_shape(operation.launch.what));
  }
  record.predicts(what.predicted_ns);
  if (what.parts != 0) {
    record.detail |= telemetry::kTraceSlice;
    record.value = std::min<std::uint32_t>(what.part, UINT16_MAX) | std::min<std::uint32_t>(what.parts, UINT16_MAX)
                                                                        << 16;
  }
  telemetry::put(record);
}

void trace_counter(telemetry::TraceCounter counter, int device, std::uint64_t value) noexcept {
  TraceRecord record;
  record.kind = TraceKind::kCounter;
  record.time_ns = now_ns();
  record.what = value;
  record.at(Class::kNormal, device);
  record.detail = static_cast<std::uint8_t>(counter);
  telemetry::put(record);
}

void trace_counters(Device& device) noexcept {
  // At exit, nothing calls the driver from here once Engine::stop() has passed this lock.
  const std::scoped_lock probe(LatencyActivity::probe_mutex());
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  if (device.gate.registered()) {
    trace_counter(telemetry::TraceCounter::kInFlight, device.ordinal(),
                  static_cast<std::uint64_t>(device.gate.in_flight_ns()));
  }
  // The device says it in any context: in the primary one, where the program has that.
  auto& driver = driver::table();
  unsigned flags = 0;
  int active = 0;
  CUcontext context = nullptr;
  if (driver.cuDevicePrimaryCtxGetState(device.ordinal(), &flags, &active) != CUDA_SUCCESS || active == 0 ||
      driver.cuDevicePrimaryCtxRetain(&context, device.ordinal()) != CUDA_SUCCESS) {
    return;
  }
  {
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext current(context);
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    if (current.ok() && driver.cuMemGetInfo(&free_bytes, &all_bytes) == CUDA_SUCCESS) {
      trace_counter(telemetry::TraceCounter::kDeviceMemoryUsed, device.ordinal(),
                    all_bytes - std::min(free_bytes, all_bytes));
    }
  }
  driver.cuDevicePrimaryCtxRelease(device.ordinal());
}

WaitReason why_it_waits(const schedule::Decision& decision, const schedule::Snapshot& seen) noexcept {
  if (decision.answer == schedule::Answer::kWaitForLatency) return WaitReason::kLatency;
  if (decision.answer == schedule::Answer::kWaitForTurn) return WaitReason::kTurn;
  if (seen.hint_ns > 0) return WaitReason::kHint;
  const std::int64_t linger_ns = seen.linger_ns * (seen.looks_out() ? schedule::Snapshot::kLongLinger : 1);
  if (!seen.latency_active && seen.since_latency_ns < linger_ns) return WaitReason::kLinger;
  if (seen.in_flight_ns + seen.host_bound.gpu_ns > seen.lead_ns) return WaitReason::kInFlight;
  return seen.looks_out() ? WaitReason::kForeseen : WaitReason::kUnknown;
}

void trace_if_asked() noexcept {
  const char* const directory = std::getenv("CUDASCHED_TRACE_DIR");
  if (directory == nullptr || *directory == '\0' || telemetry::tracing()) return;
  try {
    telemetry::TraceOptions options;
    options.directory = directory;
    if (const char* const limit = std::getenv("CUDASCHED_TRACE_LIMIT_MB")) {
      const unsigned long long mebibytes = std::strtoull(limit, nullptr, 10);
      if (mebibytes > 0 && mebibytes <= (1ULL << 30)) options.limit_bytes = mebibytes << 20;
    }
    telemetry::start_tracing(options);
  } catch (const std::exception& error) {
    log::warning(error.what());
  }
}

}  // namespace cudasched::runtime

extern "C" {

int cudasched_trace_start(const char* directory, std::uint64_t limit_bytes) {
  using namespace cudasched;
  return runtime::guarded([&] {
    telemetry::TraceOptions options;
    options.directory = directory;
    if (limit_bytes != 0) options.limit_bytes = limit_bytes;
    telemetry::start_tracing(options);
  });
}

int cudasched_trace_stop(struct cudasched_traced* traced) {
  using namespace cudasched;
  return runtime::guarded([&] {
    *traced = {};
    const telemetry::Traced done = telemetry::stop_tracing();
    std::memcpy(traced->base, done.base.data(), std::min(done.base.size(), sizeof traced->base - 1));
    traced->records = done.records;
    traced->dropped = done.dropped;
    traced->rotated_away = done.rotated_away;
  });
}

}  // extern "C"
