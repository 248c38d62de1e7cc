// The real driver's functions that cudasched calls, looked up by name in the real library, never through the shim.
// Optional ones are null on a driver that lacks them. Filled once, before any other thread uses it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <source_location>
#include <string>

#include "base/error.hpp"

namespace cudasched::driver {

// A driver call that failed: which, with what status, called from where.
class DriverError : public Error {
 public:
  DriverError(const char* call, CUresult status, std::source_location where = std::source_location::current());
  CUresult status() const noexcept { return status_; }

 private:
  CUresult status_;
};

// Throws DriverError, unless the call succeeded. Not for the launch path.
void check(const char* call, CUresult status, std::source_location where = std::source_location::current());

// A launch-path entry point and its twin, whose stream 0 is the per-thread default stream.
template <typename Function>
struct Twins {
  Function* legacy = nullptr;
  Function* per_thread = nullptr;

  template <bool kPerThread>
  Function* get() const noexcept {
    return kPerThread ? per_thread : legacy;
  }
};

struct Driver {
  decltype(cuInit)* init = nullptr;
  decltype(cuDriverGetVersion)* driver_get_version = nullptr;
  decltype(cuGetErrorName)* get_error_name = nullptr;
  CUresult (*get_proc_address_v1)(const char*, void**, int, cuuint64_t) = nullptr;
  decltype(cuGetProcAddress)* get_proc_address_v2 = nullptr;  // 12.0 and later

  decltype(cuDeviceGet)* device_get = nullptr;
  decltype(cuDeviceGetCount)* device_get_count = nullptr;
  decltype(cuDeviceGetName)* device_get_name = nullptr;
  decltype(cuDeviceGetUuid)* device_get_uuid = nullptr;
  decltype(cuDeviceGetAttribute)* device_get_attribute = nullptr;
  decltype(cuDevicePrimaryCtxRetain)* primary_context_retain = nullptr;
  decltype(cuDevicePrimaryCtxGetState)* primary_context_get_state = nullptr;
  decltype(cuDevicePrimaryCtxReset)* primary_context_reset = nullptr;
  decltype(cuDevicePrimaryCtxRelease)* primary_context_release = nullptr;

  decltype(cuCtxGetCurrent)* context_get_current = nullptr;
  decltype(cuCtxGetDevice)* context_get_device = nullptr;
  decltype(cuCtxPushCurrent)* context_push = nullptr;
  decltype(cuCtxPopCurrent)* context_pop = nullptr;
  decltype(cuCtxDestroy)* context_destroy = nullptr;
  decltype(cuCtxDestroy)* context_detach = nullptr;  // its own name is deprecated
  decltype(cuCtxSynchronize)* context_synchronize = nullptr;
  CUresult (*context_synchronize_v2)(CUcontext) = nullptr;  // 13.0 and later
  decltype(cuCtxGetStreamPriorityRange)* context_get_priority_range = nullptr;

  Twins<decltype(cuLaunchKernel)> launch_kernel;
  Twins<decltype(cuLaunchKernelEx)> launch_kernel_ex;
  Twins<decltype(cuLaunchCooperativeKernel)> launch_cooperative;
  Twins<decltype(cuGraphLaunch)> graph_launch;
  // Of the old interface; none where a driver has dropped them.
  CUresult (*launch_old)(CUfunction) = nullptr;
  CUresult (*launch_grid)(CUfunction, int, int) = nullptr;
  CUresult (*launch_grid_async)(CUfunction, int, int, CUstream) = nullptr;
  CUresult (*launch_on_several_devices)(CUDA_LAUNCH_PARAMS*, unsigned, unsigned) = nullptr;
  decltype(cuOccupancyMaxActiveBlocksPerMultiprocessor)* occupancy = nullptr;

  // Of functions; the twins are for a CUkernel, which launches accept in a function's place and these do not.
  decltype(cuFuncGetAttribute)* function_get_attribute = nullptr;
  decltype(cuFuncGetName)* function_get_name = nullptr;            // 12.3 and later
  decltype(cuFuncGetParamInfo)* function_get_parameter = nullptr;  // 12.4 and later
  decltype(cuFuncGetModule)* function_get_module = nullptr;
  decltype(cuKernelGetAttribute)* kernel_get_attribute = nullptr;  // 12.0 and later
  decltype(cuKernelGetName)* kernel_get_name = nullptr;            // 12.3 and later
  decltype(cuKernelGetParamInfo)* kernel_get_parameter = nullptr;  // 12.4 and later
  decltype(cuKernelGetLibrary)* kernel_get_library = nullptr;      // 12.5 and later
  decltype(cuModuleLoadData)* module_load_data = nullptr;
  decltype(cuModuleLoadDataEx)* module_load_data_ex = nullptr;
  decltype(cuModuleLoadFatBinary)* module_load_fat_binary = nullptr;
  decltype(cuLibraryLoadData)* library_load_data = nullptr;  // 12.0 and later
  decltype(cuModuleUnload)* module_unload = nullptr;
  decltype(cuLibraryUnload)* library_unload = nullptr;  // 12.0 and later

  decltype(cuMemAlloc)* memory_allocate = nullptr;
  decltype(cuMemsetD32Async)* memory_fill = nullptr;
  decltype(cuMemAllocPitch)* memory_allocate_pitch = nullptr;
  decltype(cuMemAllocManaged)* memory_allocate_managed = nullptr;
  decltype(cuMemAllocHost)* memory_allocate_host = nullptr;
  decltype(cuMemHostAlloc)* memory_host_allocate = nullptr;
  decltype(cuMemHostRegister)* memory_host_register = nullptr;
  decltype(cuMemAddressReserve)* memory_reserve = nullptr;
  decltype(cuMemCreate)* memory_create = nullptr;
  decltype(cuMemFree)* memory_free = nullptr;
  decltype(cuMemRelease)* memory_release = nullptr;
  decltype(cuMemMap)* memory_map = nullptr;
  decltype(cuMemUnmap)* memory_unmap = nullptr;
  decltype(cuMemRetainAllocationHandle)* memory_retain = nullptr;
  decltype(cuArrayDestroy)* array_destroy = nullptr;
  decltype(cuMipmappedArrayDestroy)* mipmapped_array_destroy = nullptr;
  decltype(cuMemPoolGetAttribute)* pool_get_attribute = nullptr;
  decltype(cuMemPoolTrimTo)* pool_trim = nullptr;
  decltype(cuMemPoolCreate)* pool_create = nullptr;
  decltype(cuMemPoolDestroy)* pool_destroy = nullptr;
  decltype(cuDeviceGetMemPool)* device_get_pool = nullptr;
  Twins<decltype(cuMemFreeAsync)> memory_free_async;
  decltype(cuArrayCreate)* array_create = nullptr;
  decltype(cuArray3DCreate)* array_3d_create = nullptr;
  decltype(cuMipmappedArrayCreate)* mipmapped_array_create = nullptr;
  decltype(cuIpcOpenMemHandle)* memory_open_ipc = nullptr;
  decltype(cuModuleGetGlobal)* module_get_global = nullptr;
  decltype(cuLibraryGetGlobal)* library_get_global = nullptr;  // 12.0 and later
  decltype(cuLibraryGetKernel)* library_get_kernel = nullptr;  // 12.0 and later
  Twins<decltype(cuMemAllocAsync)> memory_allocate_async;
  Twins<decltype(cuMemAllocFromPoolAsync)> memory_allocate_from_pool;
  Twins<decltype(cuMemcpyDtoH)> copy_to_host;  // returns when the device is done
  Twins<decltype(cuMemcpy)> copy;
  Twins<decltype(cuMemcpy2D)> copy_2d;
  Twins<decltype(cuMemcpy2DUnaligned)> copy_2d_unaligned;
  Twins<decltype(cuMemcpy3D)> copy_3d;
  Twins<decltype(cuMemcpyAtoH)> copy_array_to_host;

  // Graphs, as their nodes are walked when one is instantiated.
  using InstantiateWithLog = CUresult(CUgraphExec*, CUgraph, CUgraphNode*, char*, std::size_t);
  InstantiateWithLog* graph_instantiate_v1 = nullptr;
  InstantiateWithLog* graph_instantiate_v2 = nullptr;
  decltype(cuGraphInstantiateWithFlags)* graph_instantiate = nullptr;
  Twins<decltype(cuGraphInstantiateWithParams)> graph_instantiate_with_parameters;  // 12.0 and later
  decltype(cuGraphExecDestroy)* graph_destroy = nullptr;
  decltype(cuGraphExecGetFlags)* graph_get_flags = nullptr;  // 12.0 and later
  CUresult (*graph_update_v1)(CUgraphExec, CUgraph, CUgraphNode*, CUgraphExecUpdateResult*) = nullptr;
  decltype(cuGraphExecUpdate)* graph_update = nullptr;
  decltype(cuGraphExecChildGraphNodeSetParams)* graph_update_child = nullptr;
  decltype(cuGraphRetainUserObject)* graph_retain_object = nullptr;
  decltype(cuGraphExecNodeSetParams)* graph_update_node = nullptr;  // 12.2 and later
  decltype(cuGraphKernelNodeGetAttribute)* graph_kernel_node_get_attribute = nullptr;
  decltype(cuGraphKernelNodeSetAttribute)* graph_kernel_node_set_attribute = nullptr;
  decltype(cuGraphGetNodes)* graph_get_nodes = nullptr;
  decltype(cuGraphNodeGetType)* graph_node_get_type = nullptr;
  decltype(cuGraphKernelNodeGetParams)* graph_kernel_node_get = nullptr;
  decltype(cuGraphMemcpyNodeGetParams)* graph_copy_node_get = nullptr;
  decltype(cuGraphMemsetNodeGetParams)* graph_set_node_get = nullptr;
  decltype(cuGraphChildGraphNodeGetGraph)* graph_child_node_get = nullptr;
  decltype(cuGraphGetEdges)* graph_get_edges = nullptr;

  // Graphs, as they are cut into slices (runtime/slices.hpp): private clones, and what changes executable graphs.
  decltype(cuGraphClone)* graph_clone = nullptr;
  decltype(cuGraphNodeFindInClone)* graph_find_in_clone = nullptr;
  decltype(cuGraphDestroy)* graph_clone_destroy = nullptr;
  decltype(cuGraphDestroyNode)* graph_node_destroy = nullptr;
  decltype(cuGraphUpload)* graph_upload = nullptr;
  CUresult (*graph_exec_kernel_set_v1)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1*) = nullptr;
  decltype(cuGraphExecKernelNodeSetParams)* graph_exec_kernel_set = nullptr;  // 12.0 and later
  decltype(cuGraphExecMemcpyNodeSetParams)* graph_exec_copy_set = nullptr;
  decltype(cuGraphExecMemsetNodeSetParams)* graph_exec_fill_set = nullptr;
  decltype(cuGraphExecHostNodeSetParams)* graph_exec_host_set = nullptr;
  decltype(cuGraphNodeSetEnabled)* graph_exec_enable = nullptr;  // 11.6 and later
  decltype(cuGraphNodeSetParams)* graph_node_set = nullptr;      // 12.2 and later
  decltype(cuGraphKernelNodeSetParams)* graph_kernel_node_set = nullptr;
  decltype(cuGraphMemcpyNodeSetParams)* graph_copy_node_set = nullptr;
  decltype(cuGraphMemsetNodeSetParams)* graph_fill_node_set = nullptr;
  decltype(cuGraphHostNodeSetParams)* graph_host_node_set = nullptr;
  decltype(cuGraphHostNodeGetParams)* graph_host_node_get = nullptr;
  decltype(cuGraphKernelNodeCopyAttributes)* graph_kernel_node_copy_attributes = nullptr;  // 11.0 and later
  decltype(cuMemGetInfo)* memory_get_info = nullptr;
  decltype(cuDeviceTotalMem)* device_total_memory = nullptr;
  decltype(cuStreamWaitEvent)* stream_wait_event = nullptr;

  // Green contexts: 12.4 and later, their streams 12.5.
  decltype(cuDeviceGetDevResource)* device_get_resource = nullptr;
  decltype(cuDevSmResourceSplitByCount)* split_sms = nullptr;
  decltype(cuDevResourceGenerateDesc)* describe_resource = nullptr;
  decltype(cuGreenCtxCreate)* green_context_create = nullptr;
  decltype(cuGreenCtxDestroy)* green_context_destroy = nullptr;
  decltype(cuGreenCtxStreamCreate)* green_context_stream_create = nullptr;
  decltype(cuStreamGetGreenCtx)* stream_get_green_context = nullptr;

  Twins<decltype(cuStreamSynchronize)> stream_synchronize;
  Twins<decltype(cuStreamQuery)> stream_query;
  Twins<CUresult(CUstream)> stream_begin_capture_v1;
  Twins<decltype(cuStreamBeginCapture)> stream_begin_capture;
  Twins<decltype(cuStreamBeginCaptureToGraph)> stream_begin_capture_to_graph;  // 12.3 and later
  Twins<decltype(cuStreamEndCapture)> stream_end_capture;
  decltype(cuStreamIsCapturing)* stream_is_capturing = nullptr;
  decltype(cuStreamCreate)* stream_create = nullptr;
  decltype(cuStreamDestroy)* stream_destroy = nullptr;
  decltype(cuStreamGetFlags)* stream_get_flags = nullptr;
  CUresult (*stream_get_context)(CUstream, CUcontext*) = nullptr;
  decltype(cuThreadExchangeStreamCaptureMode)* exchange_capture_mode = nullptr;

  decltype(cuEventCreate)* event_create = nullptr;
  decltype(cuEventDestroy)* event_destroy = nullptr;
  decltype(cuEventRecord)* event_record = nullptr;
  decltype(cuEventQuery)* event_query = nullptr;
  decltype(cuEventSynchronize)* event_synchronize = nullptr;
  CUresult (*event_elapsed_time)(float*, CUevent, CUevent) = nullptr;

  // Looks every function up in the library behind `handle`. Throws HookError if one that cudasched cannot do without is
  // missing (no driver of the last ten years lacks one).
  void load(void* handle);

  std::string error_name(CUresult status) const;
};

// The process's one table, empty until the shim has attached.
inline constinit Driver driver_table;
inline Driver& table() noexcept { return driver_table; }

// The driver is asked; 14 ns. A stream of which it cannot say counts as capturing.
inline bool is_capturing(CUstream stream) noexcept {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return table().stream_is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// "GPU-xxxxxxxx-xxxx-...", or "MIG-..." for a MIG instance, as nvidia-smi prints it. Throws DriverError.
std::string device_uuid(CUdevice device);
std::string device_name(CUdevice device);
int device_attribute(CUdevice device, CUdevice_attribute attribute);

// For the length of a scope, calls of this thread do not disturb captures of other threads ("relaxed" mode).
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Makes a context current for the length of a scope.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) noexcept;
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  bool ok() const noexcept { return pushed_; }

 private:
  bool pushed_;
};

// Waits for what runs in the device's primary context, on whichever thread, if there is one.
void synchronize_primary(CUdevice device) noexcept;

// The program has made a green context.
inline constinit std::atomic<bool> green_contexts_exist{false};

// Are contexts of several processes on the GPU at once? Drivers before 12.3 do not know; they count as without MPS.
bool under_mps(CUdevice device) noexcept;

// The calling thread's current context, for other threads to make current. Null where there is none, or where it is a
// green one: that may be current to one thread at a time. On the launch path.
CUcontext shareable_context() noexcept;

// The stream that a call means: stream 0 is the legacy or the per-thread default stream, by entry point.
template <bool kPerThread>
constexpr CUstream meant_stream(CUstream stream) noexcept {
  if (stream != nullptr) return stream;
  return kPerThread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

}  // namespace cudasched::driver
