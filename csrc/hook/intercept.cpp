#include "hook/intercept.hpp"

#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/loader.h"
#include "base/log.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "hook/entry_point.hpp"
#include "hook/find_driver.h"
#include "hook/graphs.hpp"
#include "hook/memory.hpp"
#include "hook/offload.hpp"
#include "hook/other_shims.hpp"
#include "queue/treatments.hpp"
#include "runtime/collecting.hpp"
#include "runtime/engine.hpp"
#include "runtime/last_error.hpp"
#include "symbol_names.h"

namespace cudasched::hook {
namespace {

using driver::meant_stream;
using driver::table;

// ---- launches

// What the launch queues want to know of a call (hook/offload.hpp).
Site find_site(CUstream stream, CUevent event) noexcept {
  Site site;
  runtime::ThreadState& thread = runtime::this_thread();
  runtime::engine().name_thread(thread);
  const Class call_class =
      stream != nullptr ? runtime::classify(stream, thread) : runtime::classify_event(event, thread);
  const bool in_latency_region = runtime::in_latency_region(thread);
  site.caller.thread = thread.index;
  site.caller.latency = call_class != Class::kBestEffort || in_latency_region;
  if (!runtime::hot().scheduling.load(std::memory_order_relaxed)) return site;
  site.caller.context = driver::shareable_context();
  // What is collected is timed around the driver's call, on the thread that makes it.
  if (site.caller.latency || stream == nullptr || site.caller.context == nullptr || telemetry::collecting())
    return site;
  if (runtime::is_captured(stream)) return site;
  runtime::Device* const device = runtime::engine().current_device(thread);
  if (device == nullptr) return site;
  if (queue::Queue* const known = device->queue(); known != nullptr && known->active()) site.queue = known;
  return site;
}

// A launch that was not deferred.
template <typename Submit>
CUresult launch(const predict::Launch& what, CUstream stream, bool may_time, Submit&& submit) noexcept {
  const runtime::Ticket ticket = runtime::begin_launch(what, stream, may_time);
  telemetry::Record record;
  if (telemetry::collecting()) record = runtime::begin_collected(stream, may_time);
  const CUresult status = submit();
  if (record.open) runtime::end_collected(record, what, stream, status);
  runtime::end_launch(ticket, stream, status);
  return status;
}

// Deferred if it may be, else launched here.
template <typename Submit>
CUresult launch(const queue::KernelCall& call, bool may_time, const predict::Launch& what, Submit&& submit) noexcept {
  runtime::note_stream_use(call.stream);
  runtime::back_off(call.stream);
  CUresult status = CUDA_SUCCESS;
  if (Offload::push_kernel(call, status)) return status;
  status = launch(what, call.stream, may_time, submit);
  if (status == CUDA_SUCCESS) Offload::launched(call);
  return status;
}

template <bool kPerThread>
CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters,
                       void** extra) noexcept {
  const predict::Launch what{.function = function,
                             .grid = {grid_x, grid_y, grid_z},
                             .block = {block_x, block_y, block_z},
                             .dynamic_shared_bytes = shared_bytes,
                             .parameters = parameters,
                             .extra = extra};
  const queue::KernelCall call{.function = function,
                               .grid = {grid_x, grid_y, grid_z},
                               .block = {block_x, block_y, block_z},
                               .shared_bytes = shared_bytes,
                               .stream = meant_stream<kPerThread>(stream),
                               .parameters = parameters,
                               .extra = extra};
  return launch(call, /*may_time=*/true, what, [&] {
    return table().launch_kernel.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                   shared_bytes, stream, parameters, extra);
  });
}

// What a launch's attributes say that matters here.
struct Attributes {
  bool overlaps_predecessor = false;  // may start before the launch ahead of it has finished: no event between them
  std::uint32_t cluster[3] = {1, 1, 1};

  explicit Attributes(const CUlaunchConfig& config) noexcept {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
      const CUlaunchAttribute& attribute = config.attrs[i];
      if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
        overlaps_predecessor = attribute.value.programmaticStreamSerializationAllowed != 0;
      } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
        cluster[0] = attribute.value.clusterDim.x;
        cluster[1] = attribute.value.clusterDim.y;
        cluster[2] = attribute.value.clusterDim.z;
      }
    }
  }
};

template <bool kPerThread>
CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) noexcept {
  auto* const real = table().launch_kernel_ex.get<kPerThread>();
  if (config == nullptr) return real(config, function, parameters, extra);
  const Attributes attributes(*config);
  const predict::Launch what{.function = function,
                             .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                             .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                             .dynamic_shared_bytes = config->sharedMemBytes,
                             .cluster = {attributes.cluster[0], attributes.cluster[1], attributes.cluster[2]},
                             .parameters = parameters,
                             .extra = extra};
  const queue::KernelCall call{.function = function,
                               .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                               .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                               .shared_bytes = config->sharedMemBytes,
                               .stream = meant_stream<kPerThread>(config->hStream),
                               .attributes = config->attrs,
                               .attribute_count = config->numAttrs,
                               .parameters = parameters,
                               .extra = extra};
  return launch(call, !attributes.overlaps_predecessor, what,
                [&] { return real(config, function, parameters, extra); });
}

template <bool kPerThread>
CUresult launch_cooperative(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                            void** parameters) noexcept {
  const predict::Launch what{.function = function,
                             .grid = {grid_x, grid_y, grid_z},
                             .block = {block_x, block_y, block_z},
                             .dynamic_shared_bytes = shared_bytes,
                             .parameters = parameters};
  const queue::KernelCall call{.function = function,
                               .grid = {grid_x, grid_y, grid_z},
                               .block = {block_x, block_y, block_z},
                               .shared_bytes = shared_bytes,
                               .stream = meant_stream<kPerThread>(stream),
                               .cooperative = true,
                               .parameters = parameters};
  return launch(call, /*may_time=*/true, what, [&] {
    return table().launch_cooperative.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                        shared_bytes, stream, parameters);
  });
}

template <bool kPerThread>
CUresult launch_graph(CUgraphExec graph, CUstream stream) noexcept {
  predict::Launch what;
  what.function = graph;
  what.is_graph = true;
  const CUstream meant = meant_stream<kPerThread>(stream);
  runtime::note_stream_use(meant);
  runtime::back_off(meant);
  CUresult status = CUDA_SUCCESS;
  if (Offload::push_graph(graph, meant, status)) return status;
  status =
      launch(what, meant, /*may_time=*/true, [&] { return table().graph_launch.get<kPerThread>()(graph, stream); });
  if (status == CUDA_SUCCESS) Offload::launched(graph);
  return status;
}

// ---- calls by which a program learns that its work is done

CUresult told_done(CUresult status) noexcept {
  if (status == CUDA_SUCCESS) runtime::synchronised();
  return status;
}

template <bool kPerThread>
CUresult stream_synchronize(CUstream stream) noexcept {
  return told_done(table().stream_synchronize.get<kPerThread>()(stream));
}

template <bool kPerThread>
CUresult stream_query(CUstream stream) noexcept {
  return told_done(table().stream_query.get<kPerThread>()(stream));
}

CUresult event_synchronize(CUevent event) noexcept { return told_done(table().event_synchronize(event)); }
CUresult event_query(CUevent event) noexcept { return told_done(table().event_query(event)); }
CUresult context_synchronize() noexcept { return told_done(table().context_synchronize()); }

// ---- calls after which a stream, a context or a capture is no more what it was

template <typename Visit>
void for_each_device(Visit&& visit) noexcept {
  runtime::engine().for_each_device(visit);
}

CUresult stream_destroy(CUstream stream) noexcept {
  runtime::forget_stream(stream);
  driver::registry().forget(stream);  // again, should the ticker have asked for it since
  return table().stream_destroy(stream);
}

void context_is_gone(CUcontext context) noexcept {
  runtime::forget_streams_of(context);
  runtime::hot().context_epoch.fetch_add(1);
  driver::functions().forget_handles();
}

void primary_context_goes(CUdevice handle) noexcept {
  for_each_device([&](runtime::Device& device) {
    if (device.ordinal() != handle) return;
    device.latency.forget_all_streams();
    device.gate.forget_context(nullptr);
  });
  telemetry::forget_context(nullptr);
  context_is_gone(nullptr);
}

void context_goes(CUcontext context) noexcept {
  for_each_device([&](runtime::Device& device) {
    device.latency.forget_all_streams();
    if (context == nullptr) return;
    device.latency.forget_context(context);
    device.gate.forget_context(context);
  });
  if (context != nullptr) telemetry::forget_context(context);
  driver::registry().context_ends(context);
  context_is_gone(context);
}

CUresult context_destroy(CUcontext context) noexcept {
  context_goes(context);
  return table().context_destroy(context);
}

// Deprecated, and what PyCUDA ends its contexts by.
CUresult context_detach(CUcontext context) noexcept {
  context_goes(context);
  return table().context_detach(context);
}

// From here on a current context may be one that no other thread may use.
CUresult green_context_create(CUgreenCtx* made, CUdevResourceDesc description, CUdevice device,
                              unsigned flags) noexcept {
  const CUresult status = table().green_context_create(made, description, device, flags);
  if (status == CUDA_SUCCESS) driver::green_contexts_exist.store(true, std::memory_order_relaxed);
  return status;
}

void primary_context_went(CUdevice handle) noexcept {
  for_each_device([&](runtime::Device& device) {
    if (device.ordinal() == handle) device.latency.forget_context(nullptr);
  });
}

CUresult primary_context_reset(CUdevice device) noexcept {
  primary_context_goes(device);
  primary_context_went(device);
  driver::registry().primary_context_ends(device);
  return table().primary_context_reset(device);
}

CUresult primary_context_release(CUdevice device) noexcept {
  primary_context_goes(device);
  const driver::Registry::Ended ended = driver::registry().primary_context_ends(device);
  const CUresult status = table().primary_context_release(device);
  unsigned flags = 0;
  int lives_on = 0;  // others have it too
  if (table().primary_context_get_state(device, &flags, &lives_on) != CUDA_SUCCESS || lives_on == 0) {
    primary_context_went(device);
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
  return begin_capture([&] { return table().stream_begin_capture.get<kPerThread>()(stream, mode); });
}

template <bool kPerThread>
CUresult stream_begin_capture_to_graph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                       const CUgraphEdgeData* edges, std::size_t count,
                                       CUstreamCaptureMode mode) noexcept {
  return begin_capture([&] {
    return table().stream_begin_capture_to_graph.get<kPerThread>()(stream, graph, nodes, edges, count, mode);
  });
}

bool captures(CUstream stream) noexcept {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return table().stream_is_capturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

template <bool kPerThread>
CUresult stream_end_capture(CUstream stream, CUgraph* graph) noexcept {
  // A failed end may have ended the capture all the same (invalidated), or found none to end, or another thread's.
  const CUstream meant = meant_stream<kPerThread>(stream);
  const bool was_capturing = captures(meant);
  const CUresult status = table().stream_end_capture.get<kPerThread>()(stream, graph);
  if (status == CUDA_SUCCESS) note_captured(meant, *graph);
  if (was_capturing && (status == CUDA_SUCCESS || !captures(meant))) runtime::LatencyActivity::capture_ends();
  return status;
}

// ---- initialisation and look-up

CUresult init(unsigned flags) noexcept {
  const CUresult status = table().init(flags);
  if (status == CUDA_SUCCESS) runtime::engine().start();
  return status;
}

CUresult get_proc_address_v1(const char* symbol, void** function, int cuda_version, cuuint64_t flags) noexcept {
  const CUresult status = table().get_proc_address_v1(symbol, function, cuda_version, flags);
  if (status == CUDA_SUCCESS && function != nullptr && *function != nullptr) {
    *function = replacement(symbol, *function, cuda_version, flags);
  }
  return status;
}

CUresult get_proc_address_v2(const char* symbol, void** function, int cuda_version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* result) noexcept {
  const CUresult status = table().get_proc_address_v2(symbol, function, cuda_version, flags, result);
  if (status == CUDA_SUCCESS && function != nullptr && *function != nullptr) {
    *function = replacement(symbol, *function, cuda_version, flags);
  }
  return status;
}

std::span<const EntryPoint> launch_entry_points() noexcept {
  static const std::array points{
      EntryPoint{"cuInit", 2000, address(&init), nullptr, "cuInit"},
      EntryPoint{"cuGetProcAddress", 12000, address(&get_proc_address_v2), nullptr, "cuGetProcAddress_v2"},
      EntryPoint{"cuGetProcAddress", 11030, address(&get_proc_address_v1), nullptr, "cuGetProcAddress"},
      EntryPoint{"cuLaunchKernel", 4000, address(&launch_kernel<false>), address(&launch_kernel<true>),
                 "cuLaunchKernel"},
      EntryPoint{"cuLaunchKernelEx", 11060, address(&launch_kernel_ex<false>), address(&launch_kernel_ex<true>),
                 "cuLaunchKernelEx"},
      EntryPoint{"cuLaunchCooperativeKernel", 9000, address(&launch_cooperative<false>),
                 address(&launch_cooperative<true>), "cuLaunchCooperativeKernel"},
      EntryPoint{"cuGraphLaunch", 10000, address(&launch_graph<false>), address(&launch_graph<true>), "cuGraphLaunch"},
      EntryPoint{"cuStreamSynchronize", 2000, address(&stream_synchronize<false>), address(&stream_synchronize<true>),
                 "cuStreamSynchronize"},
      EntryPoint{"cuStreamQuery", 2000, address(&stream_query<false>), address(&stream_query<true>), "cuStreamQuery"},
      EntryPoint{"cuStreamDestroy", 4000, address(&stream_destroy), nullptr, "cuStreamDestroy_v2"},
      EntryPoint{"cuStreamBeginCapture", 10010, address(&stream_begin_capture<false>),
                 address(&stream_begin_capture<true>), "cuStreamBeginCapture_v2"},
      EntryPoint{"cuStreamBeginCaptureToGraph", 12030, address(&stream_begin_capture_to_graph<false>),
                 address(&stream_begin_capture_to_graph<true>), "cuStreamBeginCaptureToGraph"},
      EntryPoint{"cuStreamEndCapture", 10000, address(&stream_end_capture<false>), address(&stream_end_capture<true>),
                 "cuStreamEndCapture"},
      EntryPoint{"cuEventSynchronize", 2000, address(&event_synchronize), nullptr, "cuEventSynchronize"},
      EntryPoint{"cuEventQuery", 2000, address(&event_query), nullptr, "cuEventQuery"},
      EntryPoint{"cuCtxSynchronize", 2000, address(&context_synchronize), nullptr, "cuCtxSynchronize"},
      EntryPoint{"cuCtxDestroy", 4000, address(&context_destroy), nullptr, "cuCtxDestroy_v2"},
      EntryPoint{"cuCtxDetach", 2000, address(&context_detach), nullptr, "cuCtxDetach"},
      EntryPoint{"cuGreenCtxCreate", 12040, address(&green_context_create), nullptr, "cuGreenCtxCreate"},
      EntryPoint{"cuDevicePrimaryCtxReset", 11000, address(&primary_context_reset), nullptr,
                 "cuDevicePrimaryCtxReset_v2"},
      EntryPoint{"cuDevicePrimaryCtxRelease", 11000, address(&primary_context_release), nullptr,
                 "cuDevicePrimaryCtxRelease_v2"},
  };
  return points;
}

template <typename Visit>
void for_each_entry_point(Visit&& visit) {
  for (const auto points :
       {launch_entry_points(), memory_entry_points(), graph_entry_points(), offload_entry_points()}) {
    for (const EntryPoint& point : points) visit(point);
  }
}

// What dlsym and linking find, by exported name; only what this driver has: an older one lacks some, and programs find
// out by asking. Functions that we do not take over, but that could observe what is queued, are guarded.
const cudasched_override* exported_points(void* real_driver) {
  std::map<std::string, void*> taken;
  for_each_entry_point([&](const EntryPoint& point) {
    taken.emplace(point.exported, point.legacy);
    if (point.per_thread != nullptr) taken.emplace(std::string(point.exported) + "_ptsz", point.per_thread);
  });
  // The first versions of these took the same arguments.
  taken.emplace("cuStreamDestroy", address(&stream_destroy));
  taken.emplace("cuCtxDestroy", address(&context_destroy));
  taken.emplace("cuDevicePrimaryCtxReset", address(&primary_context_reset));
  taken.emplace("cuDevicePrimaryCtxRelease", address(&primary_context_release));

  static std::vector<cudasched_override> list;
  list.clear();
  for (const char* const name : cudasched_hook_names) {
    void* const real = cudasched_loader_find(real_driver, name);
    if (real == nullptr) continue;
    const auto ours = taken.find(name);
    void* const target = ours == taken.end() ? real : ours->second;
    void* const given = Offload::guarded(name, queue::is_per_thread(name), target);
    if (given != real) list.push_back({name, given});
  }
  list.push_back({nullptr, nullptr});
  return list.data();
}

}  // namespace

void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept {
  if (symbol == nullptr) return real;
  void* found = real;
  bool is_found = false;
  for_each_entry_point([&](const EntryPoint& point) {
    if (is_found || point.name != symbol || cuda_version < point.since) return;
    is_found = true;
    if (cuda_version > CUDA_VERSION) {
      // A version that we do not know may have changed the signature; it has not if it means the same function still.
      void* known = nullptr;
      const CUresult status = table().get_proc_address_v1(symbol, &known, CUDA_VERSION, flags);
      if (status != CUDA_SUCCESS || known != real) return;
    }
    const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    found = per_thread && point.per_thread != nullptr ? point.per_thread : point.legacy;
  });
  return Offload::guarded(symbol, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, found);
}

}  // namespace cudasched::hook

extern "C" const cudasched_override* cudasched_attach(void* real_driver, const char* real_driver_path) {
  try {
    const std::vector<std::string> libraries = cudasched::hook::loaded_libraries();
    if (const std::string rival = cudasched::hook::rival_among(libraries); !rival.empty()) {
      cudasched::runtime::engine().decline(rival);
      return nullptr;
    }
    if (const std::string limits = cudasched::hook::limits_among(libraries); !limits.empty()) {
      cudasched::log::info("works behind " + limits);
    }
    cudasched::runtime::engine().attach(real_driver, real_driver_path);
    using cudasched::hook::Offload;
    const bool can_defer = Offload::connect(
        real_driver, &cudasched_loader_find,
        {&cudasched::hook::find_site, &cudasched::runtime::note_record, &cudasched::runtime::note_wait});
    cudasched::runtime::engine().use_offload(
        {can_defer ? &Offload::calls() : nullptr, &Offload::add, &Offload::forget_queues});
    return cudasched::hook::exported_points(real_driver);
  } catch (const std::exception& error) {
    cudasched::log::error(std::string("every call passes through: ") + error.what());
    return nullptr;
  }
}

extern "C" int cudasched_find_driver(char* path, std::uint64_t path_bytes) {
  std::array<char, 1024> why{};
  if (cudasched_hook_find_driver(path, path_bytes, why.data(), why.size()) == 0) return CUDASCHED_OK;
  cudasched::runtime::set_last_error(why.data());
  return CUDASCHED_HOOK_ERROR;
}
