#include "driver/driver.hpp"

#include <array>
#include <cstdio>

#include "base/loader.h"

namespace cudasched::driver {
namespace {

std::string describe(const char* call, CUresult status, const std::source_location& where) {
  return std::string(call) + " failed with " + table().error_name(status) + " (" + std::to_string(status) + ") at " +
         where.file_name() + ":" + std::to_string(where.line());
}

template <typename Function>
void optional(void* handle, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(cudasched_loader_find(handle, name));
}

template <typename Function>
void required(void* handle, Function*& function, const char* name) {
  optional(handle, function, name);
  if (function == nullptr) {
    throw HookError(std::string("the NVIDIA driver has no ") + name +
                    "; cudasched needs a driver of release 470 or later, and 550 or later to schedule");
  }
}

template <typename Function>
void twins(void* handle, Twins<Function>& pair, const std::string& name) {
  required(handle, pair.legacy, name.c_str());
  required(handle, pair.per_thread, (name + "_ptsz").c_str());
}

}  // namespace

DriverError::DriverError(const char* call, CUresult status, std::source_location where)
    : Error(describe(call, status, where)), status_(status) {}

void Driver::load(void* handle) {
  required(handle, init, "cuInit");
  required(handle, driver_get_version, "cuDriverGetVersion");
  required(handle, get_error_name, "cuGetErrorName");
  required(handle, get_proc_address_v1, "cuGetProcAddress");
  optional(handle, get_proc_address_v2, "cuGetProcAddress_v2");

  required(handle, device_get, "cuDeviceGet");
  required(handle, device_get_count, "cuDeviceGetCount");
  required(handle, device_get_name, "cuDeviceGetName");
  optional(handle, device_get_uuid, "cuDeviceGetUuid_v2");
  if (device_get_uuid == nullptr) required(handle, device_get_uuid, "cuDeviceGetUuid");
  required(handle, device_get_attribute, "cuDeviceGetAttribute");
  required(handle, primary_context_retain, "cuDevicePrimaryCtxRetain");
  required(handle, primary_context_get_state, "cuDevicePrimaryCtxGetState");
  required(handle, primary_context_reset, "cuDevicePrimaryCtxReset_v2");
  required(handle, primary_context_release, "cuDevicePrimaryCtxRelease_v2");

  required(handle, context_get_current, "cuCtxGetCurrent");
  required(handle, context_get_device, "cuCtxGetDevice");
  required(handle, context_push, "cuCtxPushCurrent_v2");
  required(handle, context_pop, "cuCtxPopCurrent_v2");
  required(handle, context_destroy, "cuCtxDestroy_v2");
  optional(handle, context_detach, "cuCtxDetach");
  required(handle, context_synchronize, "cuCtxSynchronize");
  optional(handle, context_synchronize_v2, "cuCtxSynchronize_v2");
  optional(handle, context_get_priority_range, "cuCtxGetStreamPriorityRange");

  twins(handle, launch_kernel, "cuLaunchKernel");
  optional(handle, launch_kernel_ex.legacy, "cuLaunchKernelEx");
  optional(handle, launch_kernel_ex.per_thread, "cuLaunchKernelEx_ptsz");
  twins(handle, launch_cooperative, "cuLaunchCooperativeKernel");
  twins(handle, graph_launch, "cuGraphLaunch");
  optional(handle, launch_old, "cuLaunch");
  optional(handle, launch_grid, "cuLaunchGrid");
  optional(handle, launch_grid_async, "cuLaunchGridAsync");
  optional(handle, launch_on_several_devices, "cuLaunchCooperativeKernelMultiDevice");
  required(handle, occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");

  required(handle, function_get_attribute, "cuFuncGetAttribute");
  optional(handle, function_get_name, "cuFuncGetName");
  optional(handle, function_get_parameter, "cuFuncGetParamInfo");
  optional(handle, function_get_module, "cuFuncGetModule");
  optional(handle, kernel_get_attribute, "cuKernelGetAttribute");
  optional(handle, kernel_get_name, "cuKernelGetName");
  optional(handle, kernel_get_parameter, "cuKernelGetParamInfo");
  optional(handle, kernel_get_library, "cuKernelGetLibrary");
  optional(handle, module_load_data, "cuModuleLoadData");
  optional(handle, module_load_data_ex, "cuModuleLoadDataEx");
  optional(handle, module_load_fat_binary, "cuModuleLoadFatBinary");
  optional(handle, library_load_data, "cuLibraryLoadData");
  required(handle, module_unload, "cuModuleUnload");
  optional(handle, library_unload, "cuLibraryUnload");

  required(handle, memory_allocate, "cuMemAlloc_v2");
  required(handle, memory_fill, "cuMemsetD32Async");
  optional(handle, memory_allocate_pitch, "cuMemAllocPitch_v2");
  optional(handle, memory_allocate_managed, "cuMemAllocManaged");
  optional(handle, memory_allocate_host, "cuMemAllocHost_v2");
  optional(handle, memory_host_allocate, "cuMemHostAlloc");
  optional(handle, memory_host_register, "cuMemHostRegister_v2");
  optional(handle, memory_reserve, "cuMemAddressReserve");
  optional(handle, memory_create, "cuMemCreate");
  optional(handle, memory_free, "cuMemFree_v2");
  optional(handle, memory_release, "cuMemRelease");
  optional(handle, memory_map, "cuMemMap");
  optional(handle, memory_unmap, "cuMemUnmap");
  optional(handle, memory_retain, "cuMemRetainAllocationHandle");
  optional(handle, array_destroy, "cuArrayDestroy");
  optional(handle, mipmapped_array_destroy, "cuMipmappedArrayDestroy");
  optional(handle, pool_get_attribute, "cuMemPoolGetAttribute");
  optional(handle, pool_trim, "cuMemPoolTrimTo");
  optional(handle, pool_create, "cuMemPoolCreate");
  optional(handle, pool_destroy, "cuMemPoolDestroy");
  optional(handle, device_get_pool, "cuDeviceGetMemPool");
  optional(handle, memory_free_async.legacy, "cuMemFreeAsync");
  optional(handle, memory_free_async.per_thread, "cuMemFreeAsync_ptsz");
  optional(handle, array_create, "cuArrayCreate_v2");
  optional(handle, array_3d_create, "cuArray3DCreate_v2");
  optional(handle, mipmapped_array_create, "cuMipmappedArrayCreate");
  optional(handle, memory_open_ipc, "cuIpcOpenMemHandle_v2");
  optional(handle, module_get_global, "cuModuleGetGlobal_v2");
  optional(handle, library_get_global, "cuLibraryGetGlobal");
  optional(handle, library_get_kernel, "cuLibraryGetKernel");
  optional(handle, memory_allocate_async.legacy, "cuMemAllocAsync");
  optional(handle, memory_allocate_async.per_thread, "cuMemAllocAsync_ptsz");
  optional(handle, memory_allocate_from_pool.legacy, "cuMemAllocFromPoolAsync");
  optional(handle, memory_allocate_from_pool.per_thread, "cuMemAllocFromPoolAsync_ptsz");
  required(handle, copy_to_host.legacy, "cuMemcpyDtoH_v2");
  required(handle, copy_to_host.per_thread, "cuMemcpyDtoH_v2_ptds");
  required(handle, copy.legacy, "cuMemcpy");
  required(handle, copy.per_thread, "cuMemcpy_ptds");
  optional(handle, copy_2d.legacy, "cuMemcpy2D_v2");
  optional(handle, copy_2d.per_thread, "cuMemcpy2D_v2_ptds");
  optional(handle, copy_2d_unaligned.legacy, "cuMemcpy2DUnaligned_v2");
  optional(handle, copy_2d_unaligned.per_thread, "cuMemcpy2DUnaligned_v2_ptds");
  optional(handle, copy_3d.legacy, "cuMemcpy3D_v2");
  optional(handle, copy_3d.per_thread, "cuMemcpy3D_v2_ptds");
  optional(handle, copy_array_to_host.legacy, "cuMemcpyAtoH_v2");
  optional(handle, copy_array_to_host.per_thread, "cuMemcpyAtoH_v2_ptds");

  optional(handle, graph_instantiate_v1, "cuGraphInstantiate");
  optional(handle, graph_instantiate_v2, "cuGraphInstantiate_v2");
  optional(handle, graph_instantiate, "cuGraphInstantiateWithFlags");
  optional(handle, graph_instantiate_with_parameters.legacy, "cuGraphInstantiateWithParams");
  optional(handle, graph_instantiate_with_parameters.per_thread, "cuGraphInstantiateWithParams_ptsz");
  optional(handle, graph_destroy, "cuGraphExecDestroy");
  optional(handle, graph_get_flags, "cuGraphExecGetFlags");
  optional(handle, graph_update_v1, "cuGraphExecUpdate");
  optional(handle, graph_update, "cuGraphExecUpdate_v2");
  optional(handle, graph_update_child, "cuGraphExecChildGraphNodeSetParams");
  optional(handle, graph_retain_object, "cuGraphRetainUserObject");
  optional(handle, graph_update_node, "cuGraphExecNodeSetParams");
  optional(handle, graph_kernel_node_get_attribute, "cuGraphKernelNodeGetAttribute");
  optional(handle, graph_kernel_node_set_attribute, "cuGraphKernelNodeSetAttribute");
  optional(handle, graph_get_nodes, "cuGraphGetNodes");
  optional(handle, graph_node_get_type, "cuGraphNodeGetType");
  optional(handle, graph_kernel_node_get, "cuGraphKernelNodeGetParams_v2");
  optional(handle, graph_copy_node_get, "cuGraphMemcpyNodeGetParams");
  optional(handle, graph_set_node_get, "cuGraphMemsetNodeGetParams");
  optional(handle, graph_child_node_get, "cuGraphChildGraphNodeGetGraph");
  optional(handle, graph_get_edges, "cuGraphGetEdges_v2");

  optional(handle, graph_clone, "cuGraphClone");
  optional(handle, graph_find_in_clone, "cuGraphNodeFindInClone");
  optional(handle, graph_clone_destroy, "cuGraphDestroy");
  optional(handle, graph_node_destroy, "cuGraphDestroyNode");
  optional(handle, graph_upload, "cuGraphUpload");
  optional(handle, graph_exec_kernel_set_v1, "cuGraphExecKernelNodeSetParams");
  optional(handle, graph_exec_kernel_set, "cuGraphExecKernelNodeSetParams_v2");
  optional(handle, graph_exec_copy_set, "cuGraphExecMemcpyNodeSetParams");
  optional(handle, graph_exec_fill_set, "cuGraphExecMemsetNodeSetParams");
  optional(handle, graph_exec_host_set, "cuGraphExecHostNodeSetParams");
  optional(handle, graph_exec_enable, "cuGraphNodeSetEnabled");
  optional(handle, graph_node_set, "cuGraphNodeSetParams");
  optional(handle, graph_kernel_node_set, "cuGraphKernelNodeSetParams_v2");
  optional(handle, graph_copy_node_set, "cuGraphMemcpyNodeSetParams");
  optional(handle, graph_fill_node_set, "cuGraphMemsetNodeSetParams");
  optional(handle, graph_host_node_set, "cuGraphHostNodeSetParams");
  optional(handle, graph_host_node_get, "cuGraphHostNodeGetParams");
  optional(handle, graph_kernel_node_copy_attributes, "cuGraphKernelNodeCopyAttributes");
  optional(handle, memory_get_info, "cuMemGetInfo_v2");
  optional(handle, device_total_memory, "cuDeviceTotalMem_v2");
  optional(handle, stream_wait_event, "cuStreamWaitEvent");

  optional(handle, device_get_resource, "cuDeviceGetDevResource");
  optional(handle, split_sms, "cuDevSmResourceSplitByCount");
  optional(handle, describe_resource, "cuDevResourceGenerateDesc");
  optional(handle, green_context_create, "cuGreenCtxCreate");
  optional(handle, green_context_destroy, "cuGreenCtxDestroy");
  optional(handle, green_context_stream_create, "cuGreenCtxStreamCreate");
  optional(handle, stream_get_green_context, "cuStreamGetGreenCtx");

  twins(handle, stream_synchronize, "cuStreamSynchronize");
  twins(handle, stream_query, "cuStreamQuery");
  optional(handle, stream_begin_capture_v1.legacy, "cuStreamBeginCapture");
  optional(handle, stream_begin_capture_v1.per_thread, "cuStreamBeginCapture_ptsz");
  twins(handle, stream_begin_capture, "cuStreamBeginCapture_v2");
  optional(handle, stream_begin_capture_to_graph.legacy, "cuStreamBeginCaptureToGraph");
  optional(handle, stream_begin_capture_to_graph.per_thread, "cuStreamBeginCaptureToGraph_ptsz");
  twins(handle, stream_end_capture, "cuStreamEndCapture");
  required(handle, stream_is_capturing, "cuStreamIsCapturing");
  required(handle, stream_create, "cuStreamCreate");
  required(handle, stream_destroy, "cuStreamDestroy_v2");
  required(handle, stream_get_flags, "cuStreamGetFlags");
  optional(handle, stream_get_context, "cuStreamGetCtx");
  required(handle, exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");

  required(handle, event_create, "cuEventCreate");
  required(handle, event_destroy, "cuEventDestroy_v2");
  required(handle, event_record, "cuEventRecord");
  required(handle, event_query, "cuEventQuery");
  required(handle, event_synchronize, "cuEventSynchronize");
  required(handle, event_elapsed_time, "cuEventElapsedTime");
}

void check(const char* call, CUresult status, std::source_location where) {
  if (status != CUDA_SUCCESS) throw DriverError(call, status, where);
}

std::string Driver::error_name(CUresult status) const {
  const char* name = nullptr;
  if (get_error_name != nullptr && get_error_name(status, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return "an unknown status";
}

std::string device_uuid(CUdevice device) {
  // A MIG instance has a UUID of its own, and is told from a GPU by its name alone: "NVIDIA H200 MIG 1g.18gb".
  const bool is_instance = device_name(device).find(" MIG ") != std::string::npos;
  CUuuid uuid{};
  check("cuDeviceGetUuid", table().device_get_uuid(&uuid, device));
  std::string text = is_instance ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; ++i) {
    std::array<char, 4> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits.data();
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

std::string device_name(CUdevice device) {
  std::array<char, 64> name{};
  check("cuDeviceGetName", table().device_get_name(name.data(), name.size(), device));
  return name.data();
}

int device_attribute(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  check("cuDeviceGetAttribute", table().device_get_attribute(&value, attribute, device));
  return value;
}

bool under_mps(CUdevice device) noexcept {
  int mps = 0;
  return table().device_get_attribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) == CUDA_SUCCESS && mps != 0;
}

CUcontext shareable_context() noexcept {
  CUcontext context = nullptr;
  if (table().context_get_current(&context) != CUDA_SUCCESS) return nullptr;
  if (!green_contexts_exist.load(std::memory_order_relaxed)) return context;
  CUgreenCtx green = nullptr;
  const bool shareable = table().stream_get_green_context != nullptr &&
                         table().stream_get_green_context(CU_STREAM_LEGACY, &green) == CUDA_SUCCESS && green == nullptr;
  return shareable ? context : nullptr;
}

RelaxedCapture::RelaxedCapture() noexcept { table().exchange_capture_mode(&mode_); }
RelaxedCapture::~RelaxedCapture() { table().exchange_capture_mode(&mode_); }

CurrentContext::CurrentContext(CUcontext context) noexcept : pushed_(table().context_push(context) == CUDA_SUCCESS) {}
CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) table().context_pop(&popped);
}

void synchronize_primary(CUdevice device) noexcept {
  unsigned flags = 0;
  int active = 0;
  CUcontext context = nullptr;
  if (table().primary_context_get_state(device, &flags, &active) != CUDA_SUCCESS || active == 0) return;
  if (table().primary_context_retain(&context, device) != CUDA_SUCCESS) return;
  {
    const CurrentContext current(context);
    if (current.ok()) table().context_synchronize();
  }
  table().primary_context_release(device);
}

}  // namespace cudasched::driver
