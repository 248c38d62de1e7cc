#include "hook/intercept.hpp"

#include <dlfcn.h>

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "hook/find_driver.h"
#include "runtime/engine.hpp"
#include "runtime/last_error.hpp"

namespace cudasched::hook {
namespace {

using driver::meant_stream;
using driver::table;

// ---- launches

template <typename Submit>
CUresult launch(const predict::Launch& what, CUstream stream, bool may_time, Submit&& submit) noexcept {
  const runtime::Ticket ticket = runtime::begin_launch(what, stream, may_time);
  const CUresult status = submit();
  runtime::end_launch(ticket, stream, status);
  return status;
}

template <bool kPerThread>
CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters,
                       void** extra) noexcept {
  const predict::Launch what{
      function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, /*is_graph=*/false};
  return launch(what, meant_stream<kPerThread>(stream), /*may_time=*/true, [&] {
    return table().launch_kernel.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                   shared_bytes, stream, parameters, extra);
  });
}

// A kernel that may start before the one ahead of it on its stream has finished: an event between them would end that.
bool overlaps_predecessor(const CUlaunchConfig& config) noexcept {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
        attribute.value.programmaticStreamSerializationAllowed != 0) {
      return true;
    }
  }
  return false;
}

template <bool kPerThread>
CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) noexcept {
  auto* const real = table().launch_kernel_ex.get<kPerThread>();
  if (config == nullptr) return real(config, function, parameters, extra);
  const predict::Launch what{function,
                             {config->gridDimX, config->gridDimY, config->gridDimZ},
                             {config->blockDimX, config->blockDimY, config->blockDimZ},
                             config->sharedMemBytes,
                             /*is_graph=*/false};
  return launch(what, meant_stream<kPerThread>(config->hStream), !overlaps_predecessor(*config),
                [&] { return real(config, function, parameters, extra); });
}

template <bool kPerThread>
CUresult launch_cooperative(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                            void** parameters) noexcept {
  const predict::Launch what{
      function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, /*is_graph=*/false};
  return launch(what, meant_stream<kPerThread>(stream), /*may_time=*/true, [&] {
    return table().launch_cooperative.get<kPerThread>()(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                        shared_bytes, stream, parameters);
  });
}

template <bool kPerThread>
CUresult launch_graph(CUgraphExec graph, CUstream stream) noexcept {
  predict::Launch what;
  what.function = graph;
  what.is_graph = true;
  return launch(what, meant_stream<kPerThread>(stream), /*may_time=*/true,
                [&] { return table().graph_launch.get<kPerThread>()(graph, stream); });
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
  for_each_device([&](runtime::Device& device) { device.latency.forget_stream(stream); });
  if (!runtime::hot().streams.empty()) runtime::engine().unbind_stream(reinterpret_cast<std::uintptr_t>(stream));
  return table().stream_destroy(stream);
}

void primary_context_goes(CUdevice handle) noexcept {
  for_each_device([&](runtime::Device& device) {
    if (device.ordinal() != handle) return;
    device.latency.forget_all_streams();
    device.gate.forget_context(nullptr);
  });
  runtime::hot().context_epoch.fetch_add(1);
}

CUresult context_destroy(CUcontext context) noexcept {
  for_each_device([&](runtime::Device& device) {
    device.latency.forget_all_streams();
    if (context != nullptr) device.gate.forget_context(context);
  });
  runtime::hot().context_epoch.fetch_add(1);
  return table().context_destroy(context);
}

CUresult primary_context_reset(CUdevice device) noexcept {
  primary_context_goes(device);
  return table().primary_context_reset(device);
}

CUresult primary_context_release(CUdevice device) noexcept {
  primary_context_goes(device);
  return table().primary_context_release(device);
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

template <typename Function>
void* address(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}

// An entry point as cuGetProcAddress knows it: one name, one signature from `since` on, and perhaps a per-thread twin.
struct EntryPoint {
  std::string_view name;
  int since;  // the CUDA version from which the name means this signature
  void* legacy;
  void* per_thread;  // null: the name has no twin
};

std::span<const EntryPoint> entry_points() noexcept {
  static const std::array points{
      EntryPoint{"cuInit", 2000, address(&init), nullptr},
      EntryPoint{"cuGetProcAddress", 12000, address(&get_proc_address_v2), nullptr},
      EntryPoint{"cuGetProcAddress", 11030, address(&get_proc_address_v1), nullptr},
      EntryPoint{"cuLaunchKernel", 4000, address(&launch_kernel<false>), address(&launch_kernel<true>)},
      EntryPoint{"cuLaunchKernelEx", 11060, address(&launch_kernel_ex<false>), address(&launch_kernel_ex<true>)},
      EntryPoint{"cuLaunchCooperativeKernel", 9000, address(&launch_cooperative<false>),
                 address(&launch_cooperative<true>)},
      EntryPoint{"cuGraphLaunch", 10000, address(&launch_graph<false>), address(&launch_graph<true>)},
      EntryPoint{"cuStreamSynchronize", 2000, address(&stream_synchronize<false>), address(&stream_synchronize<true>)},
      EntryPoint{"cuStreamQuery", 2000, address(&stream_query<false>), address(&stream_query<true>)},
      EntryPoint{"cuStreamDestroy", 4000, address(&stream_destroy), nullptr},
      EntryPoint{"cuStreamBeginCapture", 10010, address(&stream_begin_capture<false>),
                 address(&stream_begin_capture<true>)},
      EntryPoint{"cuStreamBeginCaptureToGraph", 12030, address(&stream_begin_capture_to_graph<false>),
                 address(&stream_begin_capture_to_graph<true>)},
      EntryPoint{"cuStreamEndCapture", 10000, address(&stream_end_capture<false>), address(&stream_end_capture<true>)},
      EntryPoint{"cuEventSynchronize", 2000, address(&event_synchronize), nullptr},
      EntryPoint{"cuEventQuery", 2000, address(&event_query), nullptr},
      EntryPoint{"cuCtxSynchronize", 2000, address(&context_synchronize), nullptr},
      EntryPoint{"cuCtxDestroy", 4000, address(&context_destroy), nullptr},
      EntryPoint{"cuDevicePrimaryCtxReset", 11000, address(&primary_context_reset), nullptr},
      EntryPoint{"cuDevicePrimaryCtxRelease", 11000, address(&primary_context_release), nullptr},
  };
  return points;
}

// What dlsym and linking find, by exported name.
std::span<const cudasched_override> exported_points() noexcept {
  static const std::array list{
      cudasched_override{"cuInit", address(&init)},
      cudasched_override{"cuGetProcAddress", address(&get_proc_address_v1)},
      cudasched_override{"cuGetProcAddress_v2", address(&get_proc_address_v2)},
      cudasched_override{"cuLaunchKernel", address(&launch_kernel<false>)},
      cudasched_override{"cuLaunchKernel_ptsz", address(&launch_kernel<true>)},
      cudasched_override{"cuLaunchKernelEx", address(&launch_kernel_ex<false>)},
      cudasched_override{"cuLaunchKernelEx_ptsz", address(&launch_kernel_ex<true>)},
      cudasched_override{"cuLaunchCooperativeKernel", address(&launch_cooperative<false>)},
      cudasched_override{"cuLaunchCooperativeKernel_ptsz", address(&launch_cooperative<true>)},
      cudasched_override{"cuGraphLaunch", address(&launch_graph<false>)},
      cudasched_override{"cuGraphLaunch_ptsz", address(&launch_graph<true>)},
      cudasched_override{"cuStreamSynchronize", address(&stream_synchronize<false>)},
      cudasched_override{"cuStreamSynchronize_ptsz", address(&stream_synchronize<true>)},
      cudasched_override{"cuStreamQuery", address(&stream_query<false>)},
      cudasched_override{"cuStreamQuery_ptsz", address(&stream_query<true>)},
      cudasched_override{"cuStreamDestroy", address(&stream_destroy)},
      cudasched_override{"cuStreamDestroy_v2", address(&stream_destroy)},
      cudasched_override{"cuStreamBeginCapture_v2", address(&stream_begin_capture<false>)},
      cudasched_override{"cuStreamBeginCapture_v2_ptsz", address(&stream_begin_capture<true>)},
      cudasched_override{"cuStreamBeginCaptureToGraph", address(&stream_begin_capture_to_graph<false>)},
      cudasched_override{"cuStreamBeginCaptureToGraph_ptsz", address(&stream_begin_capture_to_graph<true>)},
      cudasched_override{"cuStreamEndCapture", address(&stream_end_capture<false>)},
      cudasched_override{"cuStreamEndCapture_ptsz", address(&stream_end_capture<true>)},
      cudasched_override{"cuEventSynchronize", address(&event_synchronize)},
      cudasched_override{"cuEventQuery", address(&event_query)},
      cudasched_override{"cuCtxSynchronize", address(&context_synchronize)},
      cudasched_override{"cuCtxDestroy", address(&context_destroy)},
      cudasched_override{"cuCtxDestroy_v2", address(&context_destroy)},
      cudasched_override{"cuDevicePrimaryCtxReset_v2", address(&primary_context_reset)},
      cudasched_override{"cuDevicePrimaryCtxRelease_v2", address(&primary_context_release)},
  };
  return list;
}

}  // namespace

void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept {
  if (symbol == nullptr) return real;
  for (const EntryPoint& point : entry_points()) {
    if (point.name != symbol || cuda_version < point.since) continue;
    if (cuda_version > CUDA_VERSION) {
      // A version that we do not know may have changed the signature; it has not if it means the same function still.
      void* known = nullptr;
      const CUresult status = table().get_proc_address_v1(symbol, &known, CUDA_VERSION, flags);
      if (status != CUDA_SUCCESS || known != real) return real;
    }
    const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    return per_thread && point.per_thread != nullptr ? point.per_thread : point.legacy;
  }
  return real;
}

}  // namespace cudasched::hook

extern "C" const cudasched_override* cudasched_attach(void* real_driver, const char* real_driver_path) {
  try {
    cudasched::runtime::engine().attach(real_driver, real_driver_path);
    // Only what this driver has: an older one lacks some, and programs find out by asking.
    static std::vector<cudasched_override> taken;
    taken.clear();
    for (const cudasched_override& point : cudasched::hook::exported_points()) {
      if (dlsym(real_driver, point.symbol) != nullptr) taken.push_back(point);
    }
    taken.push_back({nullptr, nullptr});
    return taken.data();
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
