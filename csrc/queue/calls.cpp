#include "queue/calls.hpp"

namespace cudasched::queue {

bool Calls::load(void* handle, Find* find) noexcept {
  bool complete = true;
  const auto look_up = [&]<typename Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(find(handle, name));
    return function != nullptr;
  };
  const auto required = [&](auto*& function, const char* name) { complete = look_up(function, name) && complete; };
  required(launch_kernel, "cuLaunchKernel");
  required(launch_kernel_ex, "cuLaunchKernelEx");
  required(launch_cooperative, "cuLaunchCooperativeKernel");
  required(launch_graph, "cuGraphLaunch");
  required(fill_8, "cuMemsetD8Async");
  look_up(fill_16, "cuMemsetD16Async");
  required(fill_32, "cuMemsetD32Async");
  look_up(fill_rows_8, "cuMemsetD2D8Async");
  look_up(fill_rows_16, "cuMemsetD2D16Async");
  look_up(fill_rows_32, "cuMemsetD2D32Async");
  required(copy, "cuMemcpyAsync");
  required(copy_to_device, "cuMemcpyHtoDAsync_v2");
  required(copy_to_host, "cuMemcpyDtoHAsync_v2");
  required(copy_on_device, "cuMemcpyDtoDAsync_v2");
  required(record, "cuEventRecord");
  required(record_with_flags, "cuEventRecordWithFlags");
  required(wait, "cuStreamWaitEvent");
  required(host_function, "cuLaunchHostFunc");
  required(destroy_event, "cuEventDestroy_v2");
  look_up(free_memory, "cuMemFreeAsync");
  required(context_get_current, "cuCtxGetCurrent");
  required(context_set_current, "cuCtxSetCurrent");
  required(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  decltype(cuFuncGetParamInfo)* parameter_sizes = nullptr;
  required(parameter_sizes, "cuFuncGetParamInfo");
  return complete;
}

}  // namespace cudasched::queue
