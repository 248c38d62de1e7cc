// The driver's functions that the queue calls: one for each kind of deferred operation, and what the launcher thread
// needs for itself. All are the legacy entry points: a queued operation names its stream. Filled once, before the first
// push; tests fill it with functions of their own.
#pragma once

#include <cuda.h>

namespace cudasched::queue {

struct Calls {
  decltype(cuLaunchKernel)* launch_kernel = nullptr;
  decltype(cuLaunchKernelEx)* launch_kernel_ex = nullptr;
  decltype(cuLaunchCooperativeKernel)* launch_cooperative = nullptr;
  decltype(cuGraphLaunch)* launch_graph = nullptr;
  decltype(cuMemsetD8Async)* fill_8 = nullptr;
  decltype(cuMemsetD16Async)* fill_16 = nullptr;
  decltype(cuMemsetD32Async)* fill_32 = nullptr;
  decltype(cuMemsetD2D8Async)* fill_rows_8 = nullptr;
  decltype(cuMemsetD2D16Async)* fill_rows_16 = nullptr;
  decltype(cuMemsetD2D32Async)* fill_rows_32 = nullptr;
  decltype(cuMemcpyAsync)* copy = nullptr;
  decltype(cuMemcpyHtoDAsync)* copy_to_device = nullptr;
  decltype(cuMemcpyDtoHAsync)* copy_to_host = nullptr;
  decltype(cuMemcpyDtoDAsync)* copy_on_device = nullptr;
  decltype(cuEventRecord)* record = nullptr;
  decltype(cuEventRecordWithFlags)* record_with_flags = nullptr;
  decltype(cuStreamWaitEvent)* wait = nullptr;
  decltype(cuLaunchHostFunc)* host_function = nullptr;
  decltype(cuEventDestroy)* destroy_event = nullptr;
  decltype(cuMemFreeAsync)* free_memory = nullptr;

  decltype(cuCtxGetCurrent)* context_get_current = nullptr;
  decltype(cuCtxSetCurrent)* context_set_current = nullptr;
  decltype(cuThreadExchangeStreamCaptureMode)* exchange_capture_mode = nullptr;

  using Find = void*(void* handle, const char* name);

  // Looks every function up in the library behind `handle`. False where one is missing that offload needs: nothing can
  // be offloaded then (drivers before 12.4 do not tell parameter sizes). The rarer calls are not needed: a program that
  // makes them has found them.
  bool load(void* handle, Find* find) noexcept;
};

}  // namespace cudasched::queue
