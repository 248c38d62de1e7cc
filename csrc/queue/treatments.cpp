#include "queue/treatments.hpp"

namespace cudasched::queue {
namespace {

constexpr Family kFamilies[] = {
    {{Treatment::kDeferred, Scope::kStream, -1},
     "Launches. Which argument is the stream differs; the hook takes each over by its signature.",
     "cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel"},
    {{Treatment::kDeferred, Scope::kStream, 1},
     "A graph launch, once the like has succeeded; one with event nodes is not deferred and drains to the end.",
     "cuGraphLaunch"},
    {{Treatment::kDeferred, Scope::kStream, 3},
     "Asynchronous fills and copies between device and pinned memory: ordered by their stream alone.",
     "cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async cuMemcpyAsync cuMemcpyHtoDAsync cuMemcpyDtoHAsync "
     "cuMemcpyDtoDAsync"},
    {{Treatment::kDeferred, Scope::kStream, 5},
     "Fills of rows, likewise.",
     "cuMemsetD2D8Async cuMemsetD2D16Async cuMemsetD2D32Async"},
    {{Treatment::kDeferred, Scope::kStreamAndEvent, 1},
     "A record: its event counts as recorded from the call on, so later waits and queries go by its position.",
     "cuEventRecord cuEventRecordWithFlags"},
    {{Treatment::kDeferred, Scope::kStreamAndEvent, 0},
     "A stream's wait on an event: must see the record that was the last one when it was called.",
     "cuStreamWaitEvent"},
    {{Treatment::kDeferred, Scope::kStream, 0}, "A host function runs in its stream's order.", "cuLaunchHostFunc"},
    {{Treatment::kGated, Scope::kEnd, -1},
     "Launches of the old interface, and of several devices at once: their parameters or streams lie in state "
     "that the queue does not follow.",
     "cuLaunch cuLaunchGrid cuLaunchGridAsync cuLaunchCooperativeKernelMultiDevice"},
    {{Treatment::kDrained, Scope::kStream, 0},
     "Waits for, or changes, one stream; or enqueues on it what the queue does not carry (memory operations, "
     "callbacks).",
     "cuStreamSynchronize cuStreamQuery cuStreamDestroy cuStreamSetAttribute "
     "cuStreamAddCallback cuStreamAttachMemAsync cuStreamBatchMemOp cuStreamWaitValue32 "
     "cuStreamWaitValue64 cuStreamWriteValue32 cuStreamWriteValue64"},
    {{Treatment::kDrained, Scope::kStream, 0},
     "Capture takes the stream from here on: what was queued on it before must not be captured. The rest reads "
     "or changes a capture.",
     "cuStreamBeginCapture cuStreamBeginCaptureToGraph"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Of a capture under way or of none: a capturing stream has nothing queued, for its capture began with a "
     "drain, and its calls go directly.",
     "cuStreamEndCapture cuStreamIsCapturing cuStreamGetCaptureInfo cuStreamUpdateCaptureDependencies "
     "cuThreadExchangeStreamCaptureMode"},
    {{Treatment::kDrained, Scope::kEnd, -1}, "Speaks of two streams.", "cuStreamCopyAttributes"},
    {{Treatment::kDrained, Scope::kEvent, 0}, "Waits for, or asks for, one event.", "cuEventSynchronize cuEventQuery"},
    {{Treatment::kDeferred, Scope::kEvent, 0},
     "Ends one event, behind what is queued of it. Its handle comes back only once the driver has ended it.",
     "cuEventDestroy"},
    {{Treatment::kDrained, Scope::kEvent, 1},
     "Gives an event to other processes, for which an unsubmitted record looks complete.",
     "cuIpcGetEventHandle"},
    {{Treatment::kDrained, Scope::kTwoEvents, 1}, "Reads two records.", "cuEventElapsedTime"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Records, or waits on behalf of, all streams of a context.",
     "cuCtxRecordEvent cuCtxWaitEvent cuGreenCtxRecordEvent cuGreenCtxWaitEvent"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Waits for the whole context, or ends it.",
     "cuCtxSynchronize cuCtxDestroy cuCtxDetach cuGreenCtxDestroy cuDevicePrimaryCtxRelease "
     "cuDevicePrimaryCtxReset"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Changes what every launch in a context means or may use.",
     "cuCtxSetLimit cuCtxSetCacheConfig cuCtxSetSharedMemConfig cuCtxSetFlags cuCtxResetPersistingL2Cache "
     "cuCtxEnablePeerAccess cuCtxDisablePeerAccess cuDevicePrimaryCtxSetFlags cuDeviceSetMemPool "
     "cuMemSetMemPool"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Changes what a queued launch of the function means.",
     "cuFuncSetAttribute cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig "
     "cuFuncSetSharedSize cuKernelSetAttribute cuKernelSetCacheConfig cuParamSetSize cuParamSetTexRef "
     "cuParamSetf cuParamSeti cuParamSetv"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Queued launches may still use the code that goes.",
     "cuModuleUnload cuLibraryUnload"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Frees, unmaps or hands back memory that queued work may use; a free also waits for all work, which must "
     "have been submitted.",
     "cuMemFree cuMemFreeHost cuMemHostUnregister cuMemUnmap cuMemRelease cuMemAddressFree cuMemMap "
     "cuMemSetAccess cuArrayDestroy cuMipmappedArrayDestroy cuIpcCloseMemHandle cuDestroyExternalMemory "
     "cuDestroyExternalSemaphore cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolSetAccess cuMemPoolSetAttribute "
     "cuDeviceGraphMemTrim cuDeviceSetGraphMemAttribute cuMulticastBindAddr cuMulticastBindMem "
     "cuMulticastUnbind"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Stream-ordered allocation: nothing queued can use an address that the driver has not given yet, and memory "
     "whose free is queued it does not give.",
     "cuMemAllocAsync cuMemAllocFromPoolAsync"},
    {{Treatment::kDeferred, Scope::kStream, 1},
     "A stream-ordered free: what other streams did with the memory is ordered before it by its own stream.",
     "cuMemFreeAsync"},
    {{Treatment::kDrained, Scope::kStream, 1},
     "Enqueues on one stream what the queue does not carry: copies of rows and volumes read a description, and "
     "perhaps pageable memory.",
     "cuMemcpy2DAsync cuMemcpy3DAsync cuMemcpy3DPeerAsync cuGraphUpload"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Enqueues on a stream that is no register argument, or not the same one in every version; or on several.",
     "cuMemcpyPeerAsync cuMemcpyAtoHAsync cuMemcpyHtoAAsync cuMemcpyBatchAsync cuMemcpy3DBatchAsync "
     "cuMemPrefetchAsync cuMemPrefetchBatchAsync cuMemDiscardBatchAsync cuMemDiscardAndPrefetchBatchAsync "
     "cuMemBatchDecompressAsync cuMemMapArrayAsync cuSignalExternalSemaphoresAsync "
     "cuWaitExternalSemaphoresAsync"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Synchronous copies and fills, on the legacy stream or behind pageable memory: they observe order.",
     "cuMemcpy cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DPeer cuMemcpyAtoA cuMemcpyAtoD "
     "cuMemcpyAtoH cuMemcpyDtoA cuMemcpyDtoD cuMemcpyDtoH cuMemcpyHtoA cuMemcpyHtoD cuMemcpyPeer "
     "cuMemsetD16 cuMemsetD2D16 cuMemsetD2D32 cuMemsetD2D8 cuMemsetD32 cuMemsetD8"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Hints on managed memory, and attributes of ranges and pointers that order work or read where memory is "
     "now.",
     "cuMemAdvise cuMemRangeGetAttribute cuMemRangeGetAttributes cuPointerSetAttribute"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Makes or changes an executable graph: a queued launch of it must run as it was, and instantiation may "
     "load code.",
     "cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphExecDestroy "
     "cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams "
     "cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent "
     "cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams "
     "cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams cuGraphExecMemcpyNodeSetParams "
     "cuGraphExecMemsetNodeSetParams cuGraphExecNodeSetParams cuGraphExecUpdate"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Sets or reads a node that an executable graph may share with the device, or ends what graphs hold.",
     "cuGraphNodeSetEnabled cuGraphDestroy cuGraphReleaseUserObject cuUserObjectRelease"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Builds or reads a graph that no launch runs: an executable graph is a copy.",
     "cuGraphAddBatchMemOpNode cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddEmptyNode "
     "cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode "
     "cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddMemAllocNode "
     "cuGraphAddMemFreeNode cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphAddNode "
     "cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams cuGraphChildGraphNodeGetGraph "
     "cuGraphClone cuGraphConditionalHandleCreate cuGraphCreate cuGraphDebugDotPrint cuGraphDestroyNode "
     "cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent "
     "cuGraphEventWaitNodeSetEvent cuGraphExecGetFlags cuGraphExternalSemaphoresSignalNodeGetParams "
     "cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams "
     "cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetNodes cuGraphGetRootNodes "
     "cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphKernelNodeCopyAttributes "
     "cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams cuGraphKernelNodeSetAttribute "
     "cuGraphKernelNodeSetParams cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams "
     "cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams "
     "cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies "
     "cuGraphNodeGetDependentNodes cuGraphNodeGetEnabled cuGraphNodeGetType cuGraphNodeSetParams "
     "cuGraphRemoveDependencies cuGraphRetainUserObject cuUserObjectCreate cuUserObjectRetain"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Queued launches may still read through it.",
     "cuTexObjectDestroy cuSurfObjectDestroy cuTexRefDestroy cuSurfRefSetArray cuTexRefSetAddress "
     "cuTexRefSetAddress2D cuTexRefSetAddressMode cuTexRefSetArray cuTexRefSetBorderColor "
     "cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy "
     "cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp "
     "cuTexRefSetMipmappedArray"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Shares memory with graphics or video, with an order of its own.",
     "cuEGLApiInit cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect "
     "cuEGLStreamConsumerConnectWithFlags cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame "
     "cuEGLStreamProducerConnect cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame "
     "cuEGLStreamProducerReturnFrame cuGLCtxCreate cuGLInit cuGLMapBufferObject cuGLMapBufferObjectAsync "
     "cuGLRegisterBufferObject cuGLSetBufferObjectMapFlags cuGLUnmapBufferObject "
     "cuGLUnmapBufferObjectAsync cuGLUnregisterBufferObject cuGraphicsEGLRegisterImage "
     "cuGraphicsGLRegisterBuffer cuGraphicsGLRegisterImage cuGraphicsMapResources "
     "cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray "
     "cuGraphicsResourceGetMappedPointer cuGraphicsResourceSetMapFlags cuGraphicsSubResourceGetMappedArray "
     "cuGraphicsUnmapResources cuGraphicsUnregisterResource cuGraphicsVDPAURegisterOutputSurface "
     "cuGraphicsVDPAURegisterVideoSurface cuVDPAUCtxCreate cuEventCreateFromEGLSync"},
    {{Treatment::kDrained, Scope::kEnd, -1},
     "Observes the whole process or device from outside of any stream.",
     "cuCheckpointProcessCheckpoint cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState "
     "cuCheckpointProcessLock cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCoredumpSetAttribute "
     "cuCoredumpSetAttributeGlobal cuProfilerInitialize cuProfilerStart cuProfilerStop "
     "cuFlushGPUDirectRDMAWrites cuGetExportTable"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Creates what nothing queued can know yet.",
     "cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate cuGreenCtxCreate cuEventCreate "
     "cuIpcOpenEventHandle cuIpcOpenMemHandle cuCtxCreate cuCtxAttach cuCtxFromGreenCtx "
     "cuDevicePrimaryCtxRetain cuMemAlloc cuMemAllocHost cuMemAllocManaged cuMemAllocPitch cuMemHostAlloc "
     "cuMemHostRegister cuMemCreate cuMemAddressReserve cuMemImportFromShareableHandle "
     "cuMemRetainAllocationHandle cuMemPoolCreate cuMemPoolImportFromShareableHandle "
     "cuMemPoolImportPointer cuArrayCreate cuArray3DCreate cuMipmappedArrayCreate cuTexObjectCreate "
     "cuSurfObjectCreate cuTexRefCreate cuImportExternalMemory cuImportExternalSemaphore "
     "cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray cuMulticastCreate "
     "cuMulticastAddDevice cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide cuTensorMapEncodeTiled "
     "cuTensorMapReplaceAddress"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Loads or links code, which is new.",
     "cuLinkAddData cuLinkAddFile cuLinkComplete cuLinkCreate cuLinkDestroy cuModuleLoad cuModuleLoadData "
     "cuModuleLoadDataEx cuModuleLoadFatBinary cuLibraryLoadData cuLibraryLoadFromFile cuFuncLoad"},
    {{Treatment::kDirect, Scope::kNothing, -1},
     "Reads what no queued call can change, or sets what is the calling thread's own.",
     "cuArray3DGetDescriptor cuArrayGetDescriptor cuArrayGetMemoryRequirements cuArrayGetPlane "
     "cuArrayGetSparseProperties cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal cuCtxGetApiVersion "
     "cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevResource cuCtxGetDevice cuCtxGetExecAffinity "
     "cuCtxGetFlags cuCtxGetId cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange "
     "cuCtxPopCurrent cuCtxPushCurrent cuCtxSetCurrent cuDevResourceGenerateDesc "
     "cuDevSmResourceSplitByCount cuDeviceCanAccessPeer cuDeviceComputeCapability cuDeviceGet "
     "cuDeviceGetAttribute cuDeviceGetByPCIBusId cuDeviceGetCount cuDeviceGetDefaultMemPool "
     "cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute "
     "cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid cuDeviceGetMemPool cuDeviceGetName "
     "cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities cuDeviceGetP2PAttribute "
     "cuDeviceGetPCIBusId cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid "
     "cuDevicePrimaryCtxGetState cuDeviceRegisterAsyncNotification cuDeviceTotalMem "
     "cuDeviceUnregisterAsyncNotification cuDriverGetVersion cuFuncGetAttribute cuFuncGetModule "
     "cuFuncGetName cuFuncGetParamInfo cuFuncIsLoaded cuGLGetDevices cuGetErrorName cuGetErrorString "
     "cuGetProcAddress cuGreenCtxGetDevResource cuGreenCtxGetId cuInit cuIpcGetMemHandle "
     "cuKernelGetAttribute cuKernelGetFunction cuKernelGetLibrary cuKernelGetName cuKernelGetParamInfo "
     "cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel cuLibraryGetKernelCount "
     "cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction cuLogsCurrent cuLogsDumpToFile "
     "cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemExportToShareableHandle "
     "cuMemGetAccess cuMemGetAddressRange cuMemGetAllocationGranularity "
     "cuMemGetAllocationPropertiesFromHandle cuMemGetAttribute cuMemGetDefaultMemPool "
     "cuMemGetHandleForAddressRange cuMemGetInfo cuMemGetMemPool cuMemHostGetDevicePointer "
     "cuMemHostGetFlags cuMemPoolExportPointer cuMemPoolExportToShareableHandle cuMemPoolGetAccess "
     "cuMemPoolGetAttribute cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements "
     "cuMipmappedArrayGetSparseProperties cuModuleEnumerateFunctions cuModuleGetFunction "
     "cuModuleGetFunctionCount cuModuleGetGlobal cuModuleGetLoadingMode cuModuleGetSurfRef "
     "cuModuleGetTexRef cuMulticastGetGranularity cuOccupancyAvailableDynamicSMemPerBlock "
     "cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags "
     "cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialBlockSize "
     "cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxPotentialClusterSize cuPointerGetAttribute "
     "cuPointerGetAttributes cuStreamGetAttribute cuStreamGetCtx cuStreamGetDevice cuStreamGetFlags "
     "cuStreamGetGreenCtx "
     "cuStreamGetId cuStreamGetPriority cuSurfObjectGetResourceDesc cuSurfRefGetArray "
     "cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc "
     "cuTexRefGetAddress cuTexRefGetAddressMode cuTexRefGetArray cuTexRefGetBorderColor "
     "cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy "
     "cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp "
     "cuTexRefGetMipmappedArray cuVDPAUGetDevice cuWGLGetDevice"},
};

// Is `name` one of the words of `list`?
constexpr bool names(std::string_view list, std::string_view name) noexcept {
  while (!list.empty()) {
    const std::size_t end = list.find(' ');
    if (list.substr(0, end) == name) return true;
    if (end == std::string_view::npos) return false;
    list.remove_prefix(end + 1);
  }
  return false;
}

}  // namespace

std::span<const Family> families() noexcept { return kFamilies; }

std::string_view base_name(std::string_view symbol) noexcept {
  if (is_per_thread(symbol)) symbol.remove_suffix(5);
  const std::size_t mark = symbol.rfind("_v");
  if (mark != std::string_view::npos && symbol.find_first_not_of("0123456789", mark + 2) == std::string_view::npos) {
    symbol = symbol.substr(0, mark);
  }
  return symbol;
}

Rule rule_of(std::string_view symbol) noexcept {
  const std::string_view name = base_name(symbol);
  for (const Family& family : kFamilies) {
    if (names(family.names, name)) return family.rule;
  }
  return {};
}

}  // namespace cudasched::queue
