#include "queue/calls.hpp"

namespace cudasched::queue {

bool Calls::load(void* handle, Find* find) noexcept {
  bool complete = true;
  const auto look_up = [&]<typename Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(find(handle, name));
    complete = complete && function != nullptr;
  };
  look_up(launch_kernel, "cuLaunchKernel");
  look_up(launch_kernel_ex, "cuLaunchKernelEx");
  look_up(launch_cooperative, "cuLaunchCooperativeKernel");
  look_up(launch_graph, "cuGraphLaunch");
  look_up(fill_8, "cuMemsetD8Async");
  look_up(fill_16, "cuMemsetD16Async");
  look_up(fill_32, "cuMemsetD32Async");
  look_up(fill_rows_8, "cuMemsetD2D8Async");
  look_up(fill_rows_16, "cuMemsetD2D16Async");
  look_up(fill_rows_32, "cuMemsetD2D32Async");
  look_up(copy, "cuMemcpyAsync");
  look_up(copy_to_device, "cuMemcpyHtoDAsync_v2");
  look_up(copy_to_host, "cuMemcpyDtoHAsync_v2");
  look_up(copy_on_device, "cuMemcpyDtoDAsync_v2");
  look_up(record, "cuEventRecord");
  look_up(record_with_flags, "cuEventRecordWithFlags");
  look_up(wait, "cuStreamWaitEvent");
  look_up(host_function, "cuLaunchHostFunc");
  look_up(context_get_current, "cuCtxGetCurrent");
  look_up(context_set_current, "cuCtxSetCurrent");
  look_up(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  look_up(stream_get_flags, "cuStreamGetFlags");
  look_up(stream_is_capturing, "cuStreamIsCapturing");
  look_up(function_get_parameter, "cuFuncGetParamInfo");
  look_up(kernel_get_parameter, "cuKernelGetParamInfo");
  return complete;
}

}  // namespace cudasched::queue
