// cuGetProcAddress, v1 and v2, and the table it goes by: which function a name means from which CUDA version on (the
// versions of cudaTypedefs.h), and its per-thread-default-stream twin.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <string_view>

#include "simulate/double/driver.hpp"
#include "simulate/double/future.hpp"

namespace cudasched::simulate {
namespace {

struct Entry {
  std::string_view name;
  int version;
  void* function;
  void* per_thread;  // null: there is none
};

constexpr int kPerThreadVersion = 7000;

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

// Sorted by name, then version.
const Entry kEntries[] = {
    {"cuCtxCreate", 3020, address(cuCtxCreate_v2), nullptr},
    {"cuCtxCreate", 11040, address(cuCtxCreate_v3), nullptr},
    {"cuCtxCreate", 12050, address(cuCtxCreate_v4), nullptr},
    {"cuCtxDestroy", 4000, address(cuCtxDestroy_v2), nullptr},
    {"cuCtxDetach", 2000, address(cuCtxDetach), nullptr},
    {"cuCtxFromGreenCtx", 12040, address(cuCtxFromGreenCtx), nullptr},
    {"cuCtxGetApiVersion", 3020, address(cuCtxGetApiVersion), nullptr},
    {"cuCtxGetCurrent", 4000, address(cuCtxGetCurrent), nullptr},
    {"cuCtxGetDevice", 2000, address(cuCtxGetDevice), nullptr},
    {"cuCtxGetDevice", 13000, address(cuCtxGetDevice_v2), nullptr},
    {"cuCtxGetFlags", 7000, address(cuCtxGetFlags), nullptr},
    {"cuCtxGetId", 12000, address(cuCtxGetId), nullptr},
    {"cuCtxGetStreamPriorityRange", 5050, address(cuCtxGetStreamPriorityRange), nullptr},
    {"cuCtxPopCurrent", 4000, address(cuCtxPopCurrent_v2), nullptr},
    {"cuCtxPushCurrent", 4000, address(cuCtxPushCurrent_v2), nullptr},
    {"cuCtxSetCurrent", 4000, address(cuCtxSetCurrent), nullptr},
    {"cuCtxSynchronize", 2000, address(cuCtxSynchronize), nullptr},
    {"cuCtxSynchronize", 13000, address(cuCtxSynchronize_v2), nullptr},
    {"cuDevResourceGenerateDesc", 12040, address(cuDevResourceGenerateDesc), nullptr},
    {"cuDevSmResourceSplitByCount", 12040, address(cuDevSmResourceSplitByCount), nullptr},
    {"cuDeviceGet", 2000, address(cuDeviceGet), nullptr},
    {"cuDeviceGetAttribute", 2000, address(cuDeviceGetAttribute), nullptr},
    {"cuDeviceGetCount", 2000, address(cuDeviceGetCount), nullptr},
    {"cuDeviceGetDefaultMemPool", 11020, address(cuDeviceGetDefaultMemPool), nullptr},
    {"cuDeviceGetDevResource", 12040, address(cuDeviceGetDevResource), nullptr},
    {"cuDeviceGetMemPool", 11020, address(cuDeviceGetMemPool), nullptr},
    {"cuDeviceGetName", 2000, address(cuDeviceGetName), nullptr},
    {"cuDeviceGetPCIBusId", 4010, address(cuDeviceGetPCIBusId), nullptr},
    {"cuDeviceGetUuid", 9020, address(cuDeviceGetUuid), nullptr},
    {"cuDeviceGetUuid", 11040, address(cuDeviceGetUuid_v2), nullptr},
    {"cuDevicePrimaryCtxGetState", 7000, address(cuDevicePrimaryCtxGetState), nullptr},
    {"cuDevicePrimaryCtxRelease", 7000, address(cuDevicePrimaryCtxRelease), nullptr},
    {"cuDevicePrimaryCtxRelease", 11000, address(cuDevicePrimaryCtxRelease_v2), nullptr},
    {"cuDevicePrimaryCtxReset", 7000, address(cuDevicePrimaryCtxReset), nullptr},
    {"cuDevicePrimaryCtxReset", 11000, address(cuDevicePrimaryCtxReset_v2), nullptr},
    {"cuDevicePrimaryCtxRetain", 7000, address(cuDevicePrimaryCtxRetain), nullptr},
    {"cuDevicePrimaryCtxSetFlags", 7000, address(cuDevicePrimaryCtxSetFlags), nullptr},
    {"cuDevicePrimaryCtxSetFlags", 11000, address(cuDevicePrimaryCtxSetFlags_v2), nullptr},
    {"cuDeviceTotalMem", 3020, address(cuDeviceTotalMem_v2), nullptr},
    {"cuDriverGetVersion", 2020, address(cuDriverGetVersion), nullptr},
    {"cuEventCreate", 2000, address(cuEventCreate), nullptr},
    {"cuEventDestroy", 4000, address(cuEventDestroy_v2), nullptr},
    {"cuEventElapsedTime", 2000, address(cuEventElapsedTime), nullptr},
    {"cuEventElapsedTime", 12080, address(cuEventElapsedTime_v2), nullptr},
    {"cuEventQuery", 2000, address(cuEventQuery), nullptr},
    {"cuEventRecord", 2000, address(cuEventRecord), address(cuEventRecord_ptsz)},
    {"cuEventRecordWithFlags", 11010, address(cuEventRecordWithFlags), address(cuEventRecordWithFlags_ptsz)},
    {"cuEventSynchronize", 2000, address(cuEventSynchronize), nullptr},
    {"cuFuncGetAttribute", 2020, address(cuFuncGetAttribute), nullptr},
    {"cuFuncGetModule", 11000, address(cuFuncGetModule), nullptr},
    {"cuFuncGetName", 12030, address(cuFuncGetName), nullptr},
    {"cuFuncGetParamInfo", 12040, address(cuFuncGetParamInfo), nullptr},
    {"cuFuncSetAttribute", 9000, address(cuFuncSetAttribute), nullptr},
    {"cuFuncSetBlockShape", 2000, address(cuFuncSetBlockShape), nullptr},
    // No CUDA has this one.
    {"cuFutureBeginCapture", 15000, address(future_begin_capture), nullptr},
    {"cuGetErrorName", 6000, address(cuGetErrorName), nullptr},
    {"cuGetErrorString", 6000, address(cuGetErrorString), nullptr},
    {"cuGetExportTable", 3000, address(cuGetExportTable), nullptr},
    {"cuGetProcAddress", 11030, address(cuGetProcAddress), nullptr},
    {"cuGetProcAddress", 12000, address(cuGetProcAddress_v2), nullptr},
    {"cuGraphAddChildGraphNode", 10000, address(cuGraphAddChildGraphNode), nullptr},
    {"cuGraphAddDependencies", 10000, address(cuGraphAddDependencies), nullptr},
    {"cuGraphAddDependencies", 12030, address(cuGraphAddDependencies_v2), nullptr},
    {"cuGraphAddEmptyNode", 10000, address(cuGraphAddEmptyNode), nullptr},
    {"cuGraphAddEventRecordNode", 11010, address(cuGraphAddEventRecordNode), nullptr},
    {"cuGraphAddEventWaitNode", 11010, address(cuGraphAddEventWaitNode), nullptr},
    {"cuGraphAddHostNode", 10000, address(cuGraphAddHostNode), nullptr},
    {"cuGraphAddKernelNode", 10000, address(cuGraphAddKernelNode), nullptr},
    {"cuGraphAddKernelNode", 12000, address(cuGraphAddKernelNode_v2), nullptr},
    {"cuGraphAddMemAllocNode", 11040, address(cuGraphAddMemAllocNode), nullptr},
    {"cuGraphAddMemFreeNode", 11040, address(cuGraphAddMemFreeNode), nullptr},
    {"cuGraphAddMemcpyNode", 10000, address(cuGraphAddMemcpyNode), nullptr},
    {"cuGraphAddMemsetNode", 10000, address(cuGraphAddMemsetNode), nullptr},
    {"cuGraphAddNode", 12020, address(cuGraphAddNode), nullptr},
    {"cuGraphAddNode", 12030, address(cuGraphAddNode_v2), nullptr},
    {"cuGraphChildGraphNodeGetGraph", 10000, address(cuGraphChildGraphNodeGetGraph), nullptr},
    {"cuGraphClone", 10000, address(cuGraphClone), nullptr},
    {"cuGraphConditionalHandleCreate", 12030, address(cuGraphConditionalHandleCreate), nullptr},
    {"cuGraphCreate", 10000, address(cuGraphCreate), nullptr},
    {"cuGraphDestroy", 10000, address(cuGraphDestroy), nullptr},
    {"cuGraphDestroyNode", 10000, address(cuGraphDestroyNode), nullptr},
    {"cuGraphEventRecordNodeGetEvent", 11010, address(cuGraphEventRecordNodeGetEvent), nullptr},
    {"cuGraphEventRecordNodeSetEvent", 11010, address(cuGraphEventRecordNodeSetEvent), nullptr},
    {"cuGraphEventWaitNodeGetEvent", 11010, address(cuGraphEventWaitNodeGetEvent), nullptr},
    {"cuGraphEventWaitNodeSetEvent", 11010, address(cuGraphEventWaitNodeSetEvent), nullptr},
    {"cuGraphExecChildGraphNodeSetParams", 11010, address(cuGraphExecChildGraphNodeSetParams), nullptr},
    {"cuGraphExecDestroy", 10000, address(cuGraphExecDestroy), nullptr},
    {"cuGraphExecEventRecordNodeSetEvent", 11010, address(cuGraphExecEventRecordNodeSetEvent), nullptr},
    {"cuGraphExecEventWaitNodeSetEvent", 11010, address(cuGraphExecEventWaitNodeSetEvent), nullptr},
    {"cuGraphExecGetFlags", 12000, address(cuGraphExecGetFlags), nullptr},
    {"cuGraphExecHostNodeSetParams", 10020, address(cuGraphExecHostNodeSetParams), nullptr},
    {"cuGraphExecKernelNodeSetParams", 10010, address(cuGraphExecKernelNodeSetParams), nullptr},
    {"cuGraphExecKernelNodeSetParams", 12000, address(cuGraphExecKernelNodeSetParams_v2), nullptr},
    {"cuGraphExecMemcpyNodeSetParams", 10020, address(cuGraphExecMemcpyNodeSetParams), nullptr},
    {"cuGraphExecMemsetNodeSetParams", 10020, address(cuGraphExecMemsetNodeSetParams), nullptr},
    {"cuGraphExecNodeSetParams", 12020, address(cuGraphExecNodeSetParams), nullptr},
    {"cuGraphExecUpdate", 10020, address(cuGraphExecUpdate), nullptr},
    {"cuGraphExecUpdate", 12000, address(cuGraphExecUpdate_v2), nullptr},
    {"cuGraphGetEdges", 10000, address(cuGraphGetEdges), nullptr},
    {"cuGraphGetEdges", 12030, address(cuGraphGetEdges_v2), nullptr},
    {"cuGraphGetNodes", 10000, address(cuGraphGetNodes), nullptr},
    {"cuGraphGetRootNodes", 10000, address(cuGraphGetRootNodes), nullptr},
    {"cuGraphHostNodeGetParams", 10000, address(cuGraphHostNodeGetParams), nullptr},
    {"cuGraphHostNodeSetParams", 10000, address(cuGraphHostNodeSetParams), nullptr},
    {"cuGraphInstantiate", 10000, address(cuGraphInstantiate), nullptr},
    {"cuGraphInstantiate", 11000, address(cuGraphInstantiate_v2), nullptr},
    {"cuGraphInstantiateWithFlags", 11040, address(cuGraphInstantiateWithFlags), nullptr},
    {"cuGraphInstantiateWithParams", 12000, address(cuGraphInstantiateWithParams),
     address(cuGraphInstantiateWithParams_ptsz)},
    {"cuGraphKernelNodeCopyAttributes", 11000, address(cuGraphKernelNodeCopyAttributes), nullptr},
    {"cuGraphKernelNodeGetAttribute", 11000, address(cuGraphKernelNodeGetAttribute), nullptr},
    {"cuGraphKernelNodeGetParams", 10000, address(cuGraphKernelNodeGetParams), nullptr},
    {"cuGraphKernelNodeGetParams", 12000, address(cuGraphKernelNodeGetParams_v2), nullptr},
    {"cuGraphKernelNodeSetAttribute", 11000, address(cuGraphKernelNodeSetAttribute), nullptr},
    {"cuGraphKernelNodeSetParams", 10000, address(cuGraphKernelNodeSetParams), nullptr},
    {"cuGraphKernelNodeSetParams", 12000, address(cuGraphKernelNodeSetParams_v2), nullptr},
    {"cuGraphLaunch", 10000, address(cuGraphLaunch), address(cuGraphLaunch_ptsz)},
    {"cuGraphMemAllocNodeGetParams", 11040, address(cuGraphMemAllocNodeGetParams), nullptr},
    {"cuGraphMemFreeNodeGetParams", 11040, address(cuGraphMemFreeNodeGetParams), nullptr},
    {"cuGraphMemcpyNodeGetParams", 10000, address(cuGraphMemcpyNodeGetParams), nullptr},
    {"cuGraphMemcpyNodeSetParams", 10000, address(cuGraphMemcpyNodeSetParams), nullptr},
    {"cuGraphMemsetNodeGetParams", 10000, address(cuGraphMemsetNodeGetParams), nullptr},
    {"cuGraphMemsetNodeSetParams", 10000, address(cuGraphMemsetNodeSetParams), nullptr},
    {"cuGraphNodeFindInClone", 10000, address(cuGraphNodeFindInClone), nullptr},
    {"cuGraphNodeGetDependencies", 10000, address(cuGraphNodeGetDependencies), nullptr},
    {"cuGraphNodeGetDependencies", 12030, address(cuGraphNodeGetDependencies_v2), nullptr},
    {"cuGraphNodeGetDependentNodes", 10000, address(cuGraphNodeGetDependentNodes), nullptr},
    {"cuGraphNodeGetDependentNodes", 12030, address(cuGraphNodeGetDependentNodes_v2), nullptr},
    {"cuGraphNodeGetEnabled", 11060, address(cuGraphNodeGetEnabled), nullptr},
    {"cuGraphNodeGetType", 10000, address(cuGraphNodeGetType), nullptr},
    {"cuGraphNodeSetEnabled", 11060, address(cuGraphNodeSetEnabled), nullptr},
    {"cuGraphNodeSetParams", 12020, address(cuGraphNodeSetParams), nullptr},
    {"cuGraphReleaseUserObject", 11030, address(cuGraphReleaseUserObject), nullptr},
    {"cuGraphRemoveDependencies", 10000, address(cuGraphRemoveDependencies), nullptr},
    {"cuGraphRemoveDependencies", 12030, address(cuGraphRemoveDependencies_v2), nullptr},
    {"cuGraphRetainUserObject", 11030, address(cuGraphRetainUserObject), nullptr},
    {"cuGraphUpload", 11010, address(cuGraphUpload), address(cuGraphUpload_ptsz)},
    {"cuGreenCtxCreate", 12040, address(cuGreenCtxCreate), nullptr},
    {"cuGreenCtxDestroy", 12040, address(cuGreenCtxDestroy), nullptr},
    {"cuGreenCtxGetDevResource", 12040, address(cuGreenCtxGetDevResource), nullptr},
    {"cuGreenCtxStreamCreate", 12050, address(cuGreenCtxStreamCreate), nullptr},
    {"cuInit", 2000, address(cuInit), nullptr},
    {"cuKernelGetAttribute", 12000, address(cuKernelGetAttribute), nullptr},
    {"cuKernelGetFunction", 12000, address(cuKernelGetFunction), nullptr},
    {"cuKernelGetLibrary", 12050, address(cuKernelGetLibrary), nullptr},
    {"cuKernelGetName", 12030, address(cuKernelGetName), nullptr},
    {"cuKernelGetParamInfo", 12040, address(cuKernelGetParamInfo), nullptr},
    {"cuKernelSetAttribute", 12000, address(cuKernelSetAttribute), nullptr},
    {"cuLaunch", 2000, address(cuLaunch), nullptr},
    {"cuLaunchCooperativeKernel", 9000, address(cuLaunchCooperativeKernel), address(cuLaunchCooperativeKernel_ptsz)},
    {"cuLaunchCooperativeKernelMultiDevice", 9000, address(cuLaunchCooperativeKernelMultiDevice), nullptr},
    {"cuLaunchGrid", 2000, address(cuLaunchGrid), nullptr},
    {"cuLaunchGridAsync", 2000, address(cuLaunchGridAsync), nullptr},
    {"cuLaunchHostFunc", 10000, address(cuLaunchHostFunc), address(cuLaunchHostFunc_ptsz)},
    {"cuLaunchHostFunc", 13010, address(cuLaunchHostFunc_v2), address(cuLaunchHostFunc_v2_ptsz)},
    {"cuLaunchKernel", 4000, address(cuLaunchKernel), address(cuLaunchKernel_ptsz)},
    {"cuLaunchKernelEx", 11060, address(cuLaunchKernelEx), address(cuLaunchKernelEx_ptsz)},
    {"cuLibraryGetKernel", 12000, address(cuLibraryGetKernel), nullptr},
    {"cuLibraryLoadData", 12000, address(cuLibraryLoadData), nullptr},
    {"cuLibraryUnload", 12000, address(cuLibraryUnload), nullptr},
    {"cuMemAlloc", 3020, address(cuMemAlloc_v2), nullptr},
    {"cuMemAllocAsync", 11020, address(cuMemAllocAsync), address(cuMemAllocAsync_ptsz)},
    {"cuMemAllocFromPoolAsync", 11020, address(cuMemAllocFromPoolAsync), address(cuMemAllocFromPoolAsync_ptsz)},
    {"cuMemAllocHost", 3020, address(cuMemAllocHost_v2), nullptr},
    {"cuMemAllocPitch", 3020, address(cuMemAllocPitch_v2), nullptr},
    {"cuMemCreate", 10020, address(cuMemCreate), nullptr},
    {"cuMemFree", 3020, address(cuMemFree_v2), nullptr},
    {"cuMemFreeAsync", 11020, address(cuMemFreeAsync), address(cuMemFreeAsync_ptsz)},
    {"cuMemFreeHost", 2000, address(cuMemFreeHost), nullptr},
    {"cuMemGetInfo", 3020, address(cuMemGetInfo_v2), nullptr},
    {"cuMemHostAlloc", 2020, address(cuMemHostAlloc), nullptr},
    {"cuMemHostGetDevicePointer", 3020, address(cuMemHostGetDevicePointer_v2), nullptr},
    {"cuMemMap", 10020, address(cuMemMap), nullptr},
    {"cuMemPoolGetAttribute", 11020, address(cuMemPoolGetAttribute), nullptr},
    {"cuMemPoolTrimTo", 11020, address(cuMemPoolTrimTo), nullptr},
    {"cuMemRelease", 10020, address(cuMemRelease), nullptr},
    {"cuMemUnmap", 10020, address(cuMemUnmap), nullptr},
    {"cuMemcpy", 4000, address(cuMemcpy), address(cuMemcpy_ptds)},
    {"cuMemcpy2D", 3020, address(cuMemcpy2D_v2), address(cuMemcpy2D_v2_ptds)},
    {"cuMemcpy2DUnaligned", 3020, address(cuMemcpy2DUnaligned_v2), address(cuMemcpy2DUnaligned_v2_ptds)},
    {"cuMemcpy3D", 3020, address(cuMemcpy3D_v2), address(cuMemcpy3D_v2_ptds)},
    {"cuMemcpyAsync", 4000, address(cuMemcpyAsync), address(cuMemcpyAsync_ptsz)},
    {"cuMemcpyDtoD", 3020, address(cuMemcpyDtoD_v2), address(cuMemcpyDtoD_v2_ptds)},
    {"cuMemcpyDtoDAsync", 3020, address(cuMemcpyDtoDAsync_v2), address(cuMemcpyDtoDAsync_v2_ptsz)},
    {"cuMemcpyDtoH", 3020, address(cuMemcpyDtoH_v2), address(cuMemcpyDtoH_v2_ptds)},
    {"cuMemcpyDtoHAsync", 3020, address(cuMemcpyDtoHAsync_v2), address(cuMemcpyDtoHAsync_v2_ptsz)},
    {"cuMemcpyHtoD", 3020, address(cuMemcpyHtoD_v2), address(cuMemcpyHtoD_v2_ptds)},
    {"cuMemcpyHtoDAsync", 3020, address(cuMemcpyHtoDAsync_v2), address(cuMemcpyHtoDAsync_v2_ptsz)},
    // Given by name and not exported.
    {"cuMemsetD16Async", 3020, address(fill_16), nullptr},
    {"cuMemsetD32", 3020, address(cuMemsetD32_v2), address(cuMemsetD32_v2_ptds)},
    {"cuMemsetD32Async", 3020, address(cuMemsetD32Async), address(cuMemsetD32Async_ptsz)},
    // A version that no CUDA has.
    {"cuMemsetD32Async", 15000, address(future_fill), nullptr},
    {"cuMemsetD8", 3020, address(cuMemsetD8_v2), address(cuMemsetD8_v2_ptds)},
    {"cuMemsetD8Async", 3020, address(cuMemsetD8Async), address(cuMemsetD8Async_ptsz)},
    {"cuModuleGetFunction", 2000, address(cuModuleGetFunction), nullptr},
    {"cuModuleGetLoadingMode", 11070, address(cuModuleGetLoadingMode), nullptr},
    {"cuModuleLoad", 2000, address(cuModuleLoad), nullptr},
    {"cuModuleLoadData", 2000, address(cuModuleLoadData), nullptr},
    {"cuModuleLoadDataEx", 2010, address(cuModuleLoadDataEx), nullptr},
    {"cuModuleUnload", 2000, address(cuModuleUnload), nullptr},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, address(cuOccupancyMaxActiveBlocksPerMultiprocessor),
     nullptr},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 7000,
     address(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags), nullptr},
    {"cuParamSetSize", 2000, address(cuParamSetSize), nullptr},
    {"cuParamSetv", 2000, address(cuParamSetv), nullptr},
    {"cuPointerGetAttribute", 4000, address(cuPointerGetAttribute), nullptr},
    {"cuProfilerStart", 4000, address(cuProfilerStart), nullptr},
    {"cuProfilerStop", 4000, address(cuProfilerStop), nullptr},
    {"cuStreamBeginCapture", 10000, address(cuStreamBeginCapture), address(cuStreamBeginCapture_ptsz)},
    {"cuStreamBeginCapture", 10010, address(cuStreamBeginCapture_v2), address(cuStreamBeginCapture_v2_ptsz)},
    {"cuStreamBeginCaptureToCig", 13010, address(cuStreamBeginCaptureToCig), address(cuStreamBeginCaptureToCig_ptsz)},
    {"cuStreamBeginCaptureToGraph", 12030, address(cuStreamBeginCaptureToGraph),
     address(cuStreamBeginCaptureToGraph_ptsz)},
    {"cuStreamBeginRecaptureToGraph", 13030, address(cuStreamBeginRecaptureToGraph),
     address(cuStreamBeginRecaptureToGraph_ptsz)},
    {"cuStreamCreate", 2000, address(cuStreamCreate), nullptr},
    {"cuStreamCreateWithPriority", 5050, address(cuStreamCreateWithPriority), nullptr},
    {"cuStreamDestroy", 4000, address(cuStreamDestroy_v2), nullptr},
    {"cuStreamEndCapture", 10000, address(cuStreamEndCapture), address(cuStreamEndCapture_ptsz)},
    {"cuStreamEndCaptureToCig", 13010, address(cuStreamEndCaptureToCig), address(cuStreamEndCaptureToCig_ptsz)},
    {"cuStreamGetCaptureInfo", 10010, address(cuStreamGetCaptureInfo), address(cuStreamGetCaptureInfo_ptsz)},
    {"cuStreamGetCaptureInfo", 11030, address(cuStreamGetCaptureInfo_v2), address(cuStreamGetCaptureInfo_v2_ptsz)},
    {"cuStreamGetCaptureInfo", 12030, address(cuStreamGetCaptureInfo_v3), address(cuStreamGetCaptureInfo_v3_ptsz)},
    {"cuStreamGetCtx", 9020, address(cuStreamGetCtx), address(cuStreamGetCtx_ptsz)},
    {"cuStreamGetFlags", 5050, address(cuStreamGetFlags), address(cuStreamGetFlags_ptsz)},
    {"cuStreamGetGreenCtx", 12040, address(cuStreamGetGreenCtx), nullptr},
    {"cuStreamGetId", 12000, address(cuStreamGetId), address(cuStreamGetId_ptsz)},
    {"cuStreamGetPriority", 5050, address(cuStreamGetPriority), address(cuStreamGetPriority_ptsz)},
    {"cuStreamIsCapturing", 10000, address(cuStreamIsCapturing), address(cuStreamIsCapturing_ptsz)},
    {"cuStreamQuery", 2000, address(cuStreamQuery), address(cuStreamQuery_ptsz)},
    {"cuStreamSynchronize", 2000, address(cuStreamSynchronize), address(cuStreamSynchronize_ptsz)},
    {"cuStreamUpdateCaptureDependencies", 11030, address(cuStreamUpdateCaptureDependencies),
     address(cuStreamUpdateCaptureDependencies_ptsz)},
    {"cuStreamUpdateCaptureDependencies", 12030, address(cuStreamUpdateCaptureDependencies_v2),
     address(cuStreamUpdateCaptureDependencies_v2_ptsz)},
    {"cuStreamWaitEvent", 3020, address(cuStreamWaitEvent), address(cuStreamWaitEvent_ptsz)},
    {"cuTensorMapEncodeTiled", 12000, address(cuTensorMapEncodeTiled), nullptr},
    {"cuThreadExchangeStreamCaptureMode", 10010, address(cuThreadExchangeStreamCaptureMode), nullptr},
    {"cuUserObjectCreate", 11030, address(cuUserObjectCreate), nullptr},
    {"cuUserObjectRelease", 11030, address(cuUserObjectRelease), nullptr},
    {"cuUserObjectRetain", 11030, address(cuUserObjectRetain), nullptr},
};

struct Found {
  void* function = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
};

Found find_entry(std::string_view name, int version, bool per_thread) {
  Found found;
  for (const Entry& entry : kEntries) {
    if (entry.name != name || entry.version > driver_version()) continue;
    if (entry.version > version) {
      if (found.function == nullptr) found.status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
      continue;
    }
    const bool twin = per_thread && entry.per_thread != nullptr && version >= kPerThreadVersion;
    found = {twin ? entry.per_thread : entry.function, CU_GET_PROC_ADDRESS_SUCCESS};
  }
  return found;
}

CUresult get_address(const char* symbol, void** function, int version, cuuint64_t flags, Found& found) {
  constexpr cuuint64_t kKnown = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (symbol == nullptr || *symbol == '\0' || function == nullptr || (flags & ~kKnown) != 0 || flags == kKnown ||
      version <= 0 || version > driver_version()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  found = find_entry(symbol, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
  *function = found.function;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasched::simulate

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulate;

CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  Found found;
  const CUresult result = get_address(symbol, function, version, flags, found);
  if (result != CUDA_SUCCESS) return result;
  return found.function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  Found found;
  const CUresult result = get_address(symbol, function, version, flags, found);
  if (result == CUDA_SUCCESS && status != nullptr) *status = found.status;
  return result;
}

}  // extern "C"
#pragma GCC visibility pop
