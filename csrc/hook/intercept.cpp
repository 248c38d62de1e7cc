#include "hook/intercept.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/loader.h"
#include "base/log.hpp"
#include "cudasched/engine.h"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/registry.hpp"
#include "hook/deferred.hpp"
#include "hook/engine_calls.hpp"
#include "hook/find_driver.h"
#include "hook/graphs.hpp"
#include "hook/guards.hpp"
#include "hook/memory.hpp"
#include "hook/other_shims.hpp"
#include "hook/taken_over.hpp"
#include "queue/router.hpp"
#include "runtime/collecting.hpp"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"
#include "runtime/last_error.hpp"
#include "runtime/lifecycle.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/tracing.hpp"
#include "symbol_names.h"

namespace cudasched::hook {
namespace {

using driver::Driver;
using driver::meant_stream;
using driver::table;
using queue::Call;

// ---- launches

// A launch that was not deferred, beyond the barrier.
template <typename Submit>
CUresult launch_directly(const Call& call, Submit&& submit) noexcept {
  const runtime::Ticket ticket = runtime::begin_launch(call);
  runtime::TracedLaunch traced(call, ticket.pass.predicted_ns);
  telemetry::Record record;
  if (telemetry::collecting()) record = runtime::begin_collected(call);
  const CUresult status = submit();
  traced.returned(status);
  if (record.open) runtime::end_collected(record, call, status);
  runtime::end_launch(ticket, call, status);
  return status;
}

// The driver has taken the launch directly: others like it may be deferred.
void learn(const Call& call) noexcept {
  if (call.is_graph) return driver::registry().launched(call.graph());
  if (call.site.caller.latency || call.site.captured || call.site.device == nullptr) return;
  // This may be the launch that started the queue.
  if (queue::Queue* const queue = call.site.device->queue()) queue->kernel_launched(call);
}

// Deferred where allowed, else launched here by submit().
template <typename Submit>
CUresult launch(Call& call, Submit&& submit) noexcept {
  runtime::find_site(call.stream, nullptr, call.site);
  runtime::note_stream_use(call);
  CUresult status = CUDA_SUCCESS;
  if (telemetry::tracing()) [[unlikely]]
    call.site.caller.region = runtime::traced_region(runtime::this_thread());
  const std::int64_t traced_ns = call.site.queue == nullptr ? 0 : telemetry::traced_now();
  const bool deferred = defer(call, status);
  if (deferred && traced_ns != 0) runtime::trace_push(call, traced_ns);
  // Behind the push, which may have waited for room.
  runtime::back_off(call.site);
  if (deferred) return status;
  if (driver::barrier().armed()) [[unlikely]] {
    driver::barrier().wait();
    status = launch_directly(call, [&] { return driver::crossed(submit); });
  } else {
    status = launch_directly(call, submit);
  }
  if (status == CUDA_SUCCESS && !call.always_direct) learn(call);
  return status;
}

template <bool kPerThread>
CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters,
                       void** extra) noexcept {
  Call call{{.function = function,
             .grid = {grid_x, grid_y, grid_z},
             .block = {block_x, block_y, block_z},
             .dynamic_shared_bytes = shared_bytes,
             .parameters = parameters,
             .extra = extra},
            meant_stream<kPerThread>(stream)};
  return launch(call, [&] {
    return table().cuLaunchKernel.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                    shared_bytes, stream, parameters, extra);
  });
}

template <bool kPerThread>
CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) noexcept {
  auto* const real = table().cuLaunchKernelEx.get<kPerThread>();
  if (config == nullptr) return real(config, function, parameters, extra);
  Call call{{.function = function,
             .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
             .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
             .dynamic_shared_bytes = config->sharedMemBytes,
             .parameters = parameters,
             .extra = extra},
            meant_stream<kPerThread>(config->hStream)};
  if (config->numAttrs != 0) call.read_attributes(config->attrs, config->numAttrs);
  return launch(call, [&] { return real(config, function, parameters, extra); });
}

template <bool kPerThread>
CUresult launch_cooperative(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                            void** parameters) noexcept {
  Call call{{.function = function,
             .grid = {grid_x, grid_y, grid_z},
             .block = {block_x, block_y, block_z},
             .dynamic_shared_bytes = shared_bytes,
             .parameters = parameters},
            meant_stream<kPerThread>(stream)};
  call.cooperative = true;
  return launch(call, [&] {
    return table().cuLaunchCooperativeKernel.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y,
                                                               block_z, shared_bytes, stream, parameters);
  });
}

template <bool kPerThread>
CUresult launch_graph(CUgraphExec graph, CUstream stream) noexcept {
  Call call{{.function = graph, .is_graph = true}, meant_stream<kPerThread>(stream)};
  return launch(call, [&] {
    order_behind_slices(call);
    const CUresult status = table().cuGraphLaunch.get<kPerThread>()(graph, stream);
    if (status == CUDA_SUCCESS) launched_whole(call);
    return status;
  });
}

// ---- launches of the old interface, and of several devices at once: never deferred

template <typename Submit>
CUresult launch_always_directly(const predict::Launch& what, CUstream stream, Submit&& submit) noexcept {
  Call call{what, stream};
  call.always_direct = true;
  return launch(call, submit);
}

// The block's shape is the function's own, and is not told.
CUresult launch_old(CUfunction function) noexcept {
  return launch_always_directly({.function = function}, CU_STREAM_LEGACY, [&] { return table().cuLaunch(function); });
}

predict::Launch old_grid(CUfunction function, int width, int height) noexcept {
  return {.function = function, .grid = {static_cast<unsigned>(width), static_cast<unsigned>(height), 1}};
}

CUresult launch_grid(CUfunction function, int width, int height) noexcept {
  return launch_always_directly(old_grid(function, width, height), CU_STREAM_LEGACY,
                                [&] { return table().cuLaunchGrid(function, width, height); });
}

CUresult launch_grid_async(CUfunction function, int width, int height, CUstream stream) noexcept {
  return launch_always_directly(old_grid(function, width, height), meant_stream<false>(stream),
                                [&] { return table().cuLaunchGridAsync(function, width, height, stream); });
}

// Passes the gate of the current device as one launch, of its first part.
CUresult launch_on_several_devices(CUDA_LAUNCH_PARAMS* parts, unsigned count, unsigned flags) noexcept {
  const auto submit = [&] { return table().cuLaunchCooperativeKernelMultiDevice(parts, count, flags); };
  if (parts == nullptr || count == 0) return submit();
  const predict::Launch what{.function = parts->function,
                             .grid = {parts->gridDimX, parts->gridDimY, parts->gridDimZ},
                             .block = {parts->blockDimX, parts->blockDimY, parts->blockDimZ},
                             .dynamic_shared_bytes = parts->sharedMemBytes,
                             .parameters = parts->kernelParams};
  return launch_always_directly(what, meant_stream<false>(parts->hStream), submit);
}

// ---- calls by which a program learns that its work is done

CUresult completion_observed(CUresult status) noexcept {
  if (status == CUDA_SUCCESS) runtime::synchronised();
  return status;
}

// A call that waits for the GPU. These are not noexcept: pthread_cancel() may unwind the thread from within the driver.
template <typename Wait>
CUresult waited_for(Wait&& wait) {
  runtime::waits();
  const CUresult status = wait();
  if (status == CUDA_SUCCESS) runtime::waited();
  runtime::back_off_after_wait();
  return status;
}

// Our function for such a call, a member of the driver's table, and for its twin. A copy crosses the barrier; copies
// within the device return early, and then the watched streams still run.
template <auto kCall, bool kCopies = false>
struct Waits;

template <bool kCopies, typename Call>
CUresult waited_for_call(Call&& call) {
  if constexpr (kCopies) return waited_for([&] { return driver::crossed(call); });
  return waited_for(call);
}

template <typename... Arguments, CUresult (*driver::Driver::*kCall)(Arguments...), bool kCopies>
struct Waits<kCall, kCopies> {
  static CUresult call(Arguments... arguments) {
    return waited_for_call<kCopies>([&] { return (table().*kCall)(arguments...); });
  }
  static TakenOver taken_over(const char* symbol) noexcept { return {symbol, &call}; }
};

template <typename... Arguments, driver::Twins<CUresult(Arguments...)> driver::Driver::*kCall, bool kCopies>
struct Waits<kCall, kCopies> {
  template <bool kPerThread>
  static CUresult call(Arguments... arguments) {
    return waited_for_call<kCopies>([&] { return (table().*kCall).template get<kPerThread>()(arguments...); });
  }
  static TakenOver taken_over(const char* symbol) noexcept { return {symbol, &call<false>, &call<true>}; }
};

template <auto kCall>
using Copies = Waits<kCall, true>;

template <bool kPerThread>
CUresult stream_query(CUstream stream) noexcept {
  return completion_observed(table().cuStreamQuery.get<kPerThread>()(stream));
}

CUresult event_query(CUevent event) noexcept { return completion_observed(table().cuEventQuery(event)); }

// ---- calls that invalidate a stream, a context or a capture

runtime::Lifecycle& lifecycle() noexcept { return runtime::engine().lifecycle(); }

CUresult stream_create_with_priority(CUstream* stream, unsigned flags, int priority) noexcept {
  const CUresult status = table().cuStreamCreateWithPriority(stream, flags, priority);
  if (status == CUDA_SUCCESS) runtime::note_priority(*stream, priority);
  return status;
}

CUresult stream_destroy(CUstream stream) noexcept {
  runtime::forget_stream(stream);
  driver::registry().forget(stream);  // again, should the ticker have looked the stream up since
  return table().cuStreamDestroy(stream);
}

CUresult end_context(CUcontext context, CUresult (*end)(CUcontext)) noexcept {
  lifecycle().context_ends(context);
  const CUresult status = end(context);
  if (status == CUDA_SUCCESS) lifecycle().memory_gone(-1, context);
  return status;
}

CUresult context_destroy(CUcontext context) noexcept { return end_context(context, table().cuCtxDestroy); }
// Deprecated, but PyCUDA ends its contexts by this call.
CUresult context_detach(CUcontext context) noexcept { return end_context(context, table().cuCtxDetach); }

// From here on a current context may be one that no other thread may use.
CUresult green_context_create(CUgreenCtx* made, CUdevResourceDesc description, CUdevice device,
                              unsigned flags) noexcept {
  driver::barrier().pin();
  const CUresult status = table().cuGreenCtxCreate(made, description, device, flags);
  if (status == CUDA_SUCCESS) driver::green_contexts_exist.store(true, std::memory_order_relaxed);
  return status;
}

CUresult primary_context_reset(CUdevice device) noexcept {
  runtime::memory().pageable.drop(/*is_gone=*/runtime::memory().pager.drop());
  lifecycle().primary_context_ends(device);
  lifecycle().primary_context_ended(device);
  driver::registry().primary_context_ends(device);
  const CUresult status = table().cuDevicePrimaryCtxReset(device);
  if (status == CUDA_SUCCESS) lifecycle().memory_gone(device, nullptr);
  return status;
}

CUresult primary_context_release(CUdevice device) noexcept {
  lifecycle().primary_context_ends(device);
  const driver::Registry::Ended ended = driver::registry().primary_context_ends(device);
  const CUresult status = table().cuDevicePrimaryCtxRelease(device);
  unsigned flags = 0;
  int lives_on = 0;  // others have it too
  if (table().cuDevicePrimaryCtxGetState(device, &flags, &lives_on) != CUDA_SUCCESS || lives_on == 0) {
    lifecycle().primary_context_ended(device);
    lifecycle().memory_gone(device, nullptr);
  } else {
    driver::registry().restore(ended);
  }
  return status;
}

template <typename Begin>
CUresult begin_capture(Begin&& begin) noexcept {
  runtime::LatencyActivity::capture_begins();
  const CUresult status = begin();
  if (status != CUDA_SUCCESS) runtime::LatencyActivity::capture_ends();
  return status;
}

template <bool kPerThread>
CUresult stream_begin_capture(CUstream stream, CUstreamCaptureMode mode) noexcept {
  return begin_capture([&] { return table().cuStreamBeginCapture.get<kPerThread>()(stream, mode); });
}

// The first version, which captures in global mode.
template <bool kPerThread>
CUresult stream_begin_capture_v1(CUstream stream) noexcept {
  return begin_capture([&] { return table().cuStreamBeginCapture_v1.get<kPerThread>()(stream); });
}

template <bool kPerThread>
CUresult stream_begin_capture_to_graph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                       const CUgraphEdgeData* edges, std::size_t count,
                                       CUstreamCaptureMode mode) noexcept {
  return begin_capture(
      [&] { return table().cuStreamBeginCaptureToGraph.get<kPerThread>()(stream, graph, nodes, edges, count, mode); });
}

// Unlike driver::is_capturing(), with certainty: only a capture that was begun may be counted as ended.
bool captures(CUstream stream) noexcept {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return table().cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

template <bool kPerThread>
CUresult stream_end_capture(CUstream stream, CUgraph* graph) noexcept {
  // A failed end may have ended the capture all the same (invalidated), or found none to end, or another thread's.
  const CUstream meant = meant_stream<kPerThread>(stream);
  const bool was_capturing = captures(meant);
  const CUresult status = table().cuStreamEndCapture.get<kPerThread>()(stream, graph);
  if (status == CUDA_SUCCESS) note_captured(meant, *graph);
  if (was_capturing && (status == CUDA_SUCCESS || !captures(meant))) {
    runtime::LatencyActivity::capture_ends();
    carry_out_late_frees();
  }
  return status;
}

// ---- initialisation and look-up

CUresult init(unsigned flags) noexcept {
  const CUresult status = table().cuInit(flags);
  if (status == CUDA_SUCCESS) lifecycle().start();
  return status;
}

CUresult replaced(CUresult status, const char* symbol, void** function, int cuda_version, cuuint64_t flags) noexcept {
  if (status == CUDA_SUCCESS && function != nullptr) *function = replacement(symbol, *function, cuda_version, flags);
  return status;
}

CUresult get_proc_address_v1(const char* symbol, void** function, int cuda_version, cuuint64_t flags) noexcept {
  const CUresult status = table().cuGetProcAddress_v1(symbol, function, cuda_version, flags);
  return replaced(status, symbol, function, cuda_version, flags);
}

CUresult get_proc_address_v2(const char* symbol, void** function, int cuda_version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* result) noexcept {
  const CUresult status = table().cuGetProcAddress(symbol, function, cuda_version, flags, result);
  return replaced(status, symbol, function, cuda_version, flags);
}

std::span<const TakenOver> launch_functions() noexcept {
  static const TakenOver points[] = {
      {"cuInit", &init},
      {"cuGetProcAddress_v2", &get_proc_address_v2},
      {"cuGetProcAddress", &get_proc_address_v1},
      {"cuLaunchKernel", &launch_kernel<false>, &launch_kernel<true>},
      {"cuLaunchKernelEx", &launch_kernel_ex<false>, &launch_kernel_ex<true>},
      {"cuLaunchCooperativeKernel", &launch_cooperative<false>, &launch_cooperative<true>},
      {"cuLaunch", &launch_old},
      {"cuLaunchGrid", &launch_grid},
      {"cuLaunchGridAsync", &launch_grid_async},
      {"cuLaunchCooperativeKernelMultiDevice", &launch_on_several_devices},
      {"cuGraphLaunch", &launch_graph<false>, &launch_graph<true>},
      Waits<&Driver::cuStreamSynchronize>::taken_over("cuStreamSynchronize"),
      {"cuStreamQuery", &stream_query<false>, &stream_query<true>},
      {"cuStreamCreateWithPriority", &stream_create_with_priority},
      {"cuStreamDestroy_v2", &stream_destroy},
      // The first versions of these took the same arguments.
      {"cuStreamDestroy", &stream_destroy},
      {"cuCtxDestroy", &context_destroy},
      {"cuDevicePrimaryCtxReset", &primary_context_reset},
      {"cuDevicePrimaryCtxRelease", &primary_context_release},
      {"cuStreamBeginCapture", &stream_begin_capture_v1<false>, &stream_begin_capture_v1<true>},
      {"cuStreamBeginCapture_v2", &stream_begin_capture<false>, &stream_begin_capture<true>},
      {"cuStreamBeginCaptureToGraph", &stream_begin_capture_to_graph<false>, &stream_begin_capture_to_graph<true>},
      {"cuStreamEndCapture", &stream_end_capture<false>, &stream_end_capture<true>},
      Waits<&Driver::cuEventSynchronize>::taken_over("cuEventSynchronize"),
      {"cuEventQuery", &event_query},
      Waits<&Driver::cuCtxSynchronize>::taken_over("cuCtxSynchronize"),
      Copies<&Driver::cuMemcpyDtoH>::taken_over("cuMemcpyDtoH_v2"),
      Copies<&Driver::cuMemcpy>::taken_over("cuMemcpy"),
      Copies<&Driver::cuMemcpy2D>::taken_over("cuMemcpy2D_v2"),
      Copies<&Driver::cuMemcpy2DUnaligned>::taken_over("cuMemcpy2DUnaligned_v2"),
      Copies<&Driver::cuMemcpy3D>::taken_over("cuMemcpy3D_v2"),
      Copies<&Driver::cuMemcpyAtoH>::taken_over("cuMemcpyAtoH_v2"),
      Waits<&Driver::cuCtxSynchronize_v2>::taken_over("cuCtxSynchronize_v2"),
      {"cuCtxDestroy_v2", &context_destroy},
      {"cuCtxDetach", &context_detach},
      {"cuGreenCtxCreate", &green_context_create},
      {"cuDevicePrimaryCtxReset_v2", &primary_context_reset},
      {"cuDevicePrimaryCtxRelease_v2", &primary_context_release},
  };
  return points;
}

template <typename Visit>
void for_each_taken_over(Visit&& visit) {
  for (const auto functions : {launch_functions(), memory_functions(), graph_functions(), deferred_functions()}) {
    for (const TakenOver& each : functions) visit(each);
  }
}

// Our functions by place in the table of entry points. Null where we have none, and where the driver lacks the function
// that ours would call, even if it gives a pointer for the name.
struct HookedPoint {
  void* legacy = nullptr;
  void* per_thread = nullptr;
};

// Filled by exported_points(), before any program's call goes on.
std::vector<HookedPoint>& given() {
  static std::vector<HookedPoint> list;
  return list;
}

void find_given(void* real_driver) {
  const auto points = entry_points();
  given().assign(points.size(), {});
  for_each_taken_over([&](const TakenOver& each) {
    const EntryPoint* const point = find_symbol(each.symbol);
    if (point == nullptr || !point->taken_over) return;
    const auto if_there = [&](std::string_view symbol, void* ours) {
      return symbol.empty() || cudasched_loader_find(real_driver, symbol.data()) == nullptr ? nullptr : ours;
    };
    given()[static_cast<std::size_t>(point - points.data())] = {if_there(point->symbol, each.legacy),
                                                                if_there(point->twin, each.per_thread)};
  });
}

// The program's pointer for this version of a function, where the driver gave `real`.
void* given_for(const EntryPoint& point, bool per_thread, void* real) noexcept {
  const HookedPoint& ours = given()[static_cast<std::size_t>(&point - entry_points().data())];
  void* const function = per_thread ? ours.per_thread : ours.legacy;
  if (function != nullptr) return guarded(&point, per_thread, function);
  // A version that we know and cannot take over in this driver: as one that we do not know.
  return guarded(point.taken_over ? nullptr : &point, per_thread, real);
}

// The functions that dlsym and linking find, by exported name; only those of this driver: an older one lacks some, and
// programs find out by asking. Functions that we do not take over, but that could observe queued work, are guarded.
const cudasched_override* exported_points(void* real_driver) {
  find_given(real_driver);
  static std::vector<cudasched_override> list;
  list.clear();
  for (const char* const name : cudasched_hook_names) {
    void* const real = cudasched_loader_find(real_driver, name);
    const EntryPoint* const point = find_symbol(name);
    if (real == nullptr || point == nullptr) continue;
    void* const function = given_for(*point, is_twin(name), real);
    if (function != real) list.push_back({name, function});
  }
  list.push_back({nullptr, nullptr});
  return list.data();
}

// Does `symbol` mean the same function for a program of a CUDA version that the table does not know?
bool means_the_same(const char* symbol, const void* real, cuuint64_t flags) noexcept {
  int driver_version = 0;
  void* known = nullptr;
  return table().cuDriverGetVersion(&driver_version) == CUDA_SUCCESS &&
         table().cuGetProcAddress_v1(symbol, &known, std::min(kNewestVersion, driver_version), flags) == CUDA_SUCCESS &&
         known == real;
}

}  // namespace

queue::Site find_site(CUstream stream, CUevent event) noexcept {
  queue::Site site;
  driver::barrier().settle();
  runtime::find_site(stream, event, site);
  return site;
}

void note_record(CUevent event, CUstream stream) noexcept { runtime::note_record(event, stream); }
void note_wait(CUevent event, CUstream stream) noexcept { runtime::note_wait(event, stream); }

// From here on every launch asks the driver, for good: no call tells when such a capture ends, or that none began.
void capture_may_begin() noexcept { runtime::hot().uncounted_captures.store(true, std::memory_order_relaxed); }

void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept {
  if (symbol == nullptr || real == nullptr || given().empty()) return real;
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 && cuda_version >= kTwinsSince;
  const EntryPoint* point = find_version(symbol, cuda_version);
  if (cuda_version > kNewestVersion && !means_the_same(symbol, real, flags)) point = nullptr;
  if (point == nullptr) return guarded(nullptr, per_thread, real);
  return given_for(*point, per_thread && !point->twin.empty(), real);
}

std::vector<TakenOver> taken_over() {
  std::vector<TakenOver> all;
  for_each_taken_over([&](const TakenOver& each) { all.push_back(each); });
  return all;
}

}  // namespace cudasched::hook

extern "C" const cudasched_override* cudasched_attach(void* real_driver, const char* real_driver_path) {
  try {
    const std::vector<std::string> libraries = cudasched::hook::loaded_libraries();
    if (const std::string rival = cudasched::hook::rival_among(libraries); !rival.empty()) {
      cudasched::runtime::engine().lifecycle().decline(rival);
      return nullptr;
    }
    if (const std::string limits = cudasched::hook::limits_among(libraries); !limits.empty()) {
      cudasched::log::info("works behind " + limits);
    }
    cudasched::runtime::engine().lifecycle().attach(real_driver, real_driver_path);
    cudasched::runtime::engine().watch_driver(real_driver);
    return cudasched::hook::exported_points(real_driver);
  } catch (const std::exception& error) {
    cudasched::log::error(std::string("every call passes through: ") + error.what());
    return nullptr;
  }
}

namespace {

void need_events() {
  if (!cudasched::runtime::engine().lifecycle().attached()) throw cudasched::HookError("no CUDA call was made yet");
}

// Asks the driver which streams are idle, while no stream of the process can be capturing: queries are forbidden then.
class StreamQueries {
 public:
  StreamQueries() noexcept {
    if (!cudasched::runtime::hot().may_capture()) relaxed_.emplace();
  }
  bool is_idle(CUstream stream) const noexcept {
    return relaxed_ && stream != CU_STREAM_PER_THREAD && !cudasched::queue::router().has_queued(stream) &&
           cudasched::driver::table().cuStreamQuery.legacy(stream) == CUDA_SUCCESS;
  }

 private:
  std::optional<cudasched::driver::RelaxedCapture> relaxed_;  // another thread may begin to capture meanwhile
};

}  // namespace

extern "C" int cudasched_order(std::uint64_t stream, const cudasched_ahead* ahead, std::int32_t count) {
  using cudasched::driver::meant_stream;
  return cudasched::runtime::guarded([&] {
    need_events();
    const StreamQueries queries;
    const auto behind = meant_stream<false>(reinterpret_cast<CUstream>(stream));
    for (const cudasched_ahead& each : std::span(ahead, static_cast<std::size_t>(count))) {
      const auto other = meant_stream<false>(reinterpret_cast<CUstream>(each.stream));
      if (queries.is_idle(other)) continue;
      const auto marker = reinterpret_cast<CUevent>(each.event);
      cudasched::driver::check("cuEventRecord", cudasched::hook::record_event(marker, other, 0));
      cudasched::driver::check("cuStreamWaitEvent", cudasched::hook::wait_for_event(behind, marker, 0));
    }
  });
}

extern "C" int cudasched_is_idle(std::uint64_t stream, std::int32_t* idle) {
  return cudasched::runtime::guarded([&] {
    need_events();
    *idle = StreamQueries().is_idle(reinterpret_cast<CUstream>(stream)) ? 1 : 0;
  });
}

extern "C" int cudasched_new_event(std::uint64_t* event) {
  return cudasched::runtime::guarded([&] {
    need_events();
    CUevent made = nullptr;
    cudasched::driver::check("cuEventCreate", cudasched::hook::create_event(&made, CU_EVENT_DISABLE_TIMING));
    *event = reinterpret_cast<std::uint64_t>(made);
  });
}

extern "C" int cudasched_find_driver(char* path, std::uint64_t path_bytes) {
  std::array<char, 1024> why{};
  if (cudasched_hook_find_driver(path, path_bytes, why.data(), why.size()) == 0) return CUDASCHED_OK;
  cudasched::runtime::set_last_error(why.data());
  return CUDASCHED_HOOK_ERROR;
}
