// The driver's functions that this room calls, looked up by name in libcuda.so.1 at the first use. Under cudasched this
// is the shim, so that graphs made here are scheduled as any other. Any thread. This room stands beside the others
// (docs/design.md) and includes none of them: it is a library for programs.
#pragma once

#include <cuda.h>

#include <string>

#include "cudasched/graphs.hpp"

namespace cudasched::graphs {

struct Api {
  int version = 0;  // of the driver
  decltype(cuGetErrorName)* get_error_name = nullptr;
  decltype(cuCtxGetCurrent)* context_current = nullptr;
  decltype(cuCtxGetDevice)* context_device = nullptr;
  decltype(cuCtxPushCurrent)* context_push = nullptr;
  decltype(cuCtxPopCurrent)* context_pop = nullptr;
  decltype(cuCtxEnablePeerAccess)* enable_peer = nullptr;
  decltype(cuDeviceCanAccessPeer)* can_access_peer = nullptr;
  decltype(cuDevicePrimaryCtxRetain)* primary_retain = nullptr;
  decltype(cuDevicePrimaryCtxRelease)* primary_release = nullptr;

  decltype(cuStreamBeginCapture)* begin_capture = nullptr;
  decltype(cuStreamBeginCaptureToGraph)* begin_capture_to_graph = nullptr;
  decltype(cuStreamIsCapturing)* is_capturing = nullptr;
  decltype(cuStreamEndCapture)* end_capture = nullptr;
  decltype(cuThreadExchangeStreamCaptureMode)* exchange_capture_mode = nullptr;

  decltype(cuGraphCreate)* graph_create = nullptr;
  decltype(cuGraphDestroy)* graph_destroy = nullptr;
  decltype(cuGraphGetNodes)* graph_nodes = nullptr;
  decltype(cuGraphAddKernelNode)* add_kernel = nullptr;
  decltype(cuGraphAddMemcpyNode)* add_copy = nullptr;
  decltype(cuGraphAddMemsetNode)* add_fill = nullptr;
  decltype(cuGraphAddChildGraphNode)* add_child = nullptr;
  decltype(cuGraphAddEmptyNode)* add_empty = nullptr;
  decltype(cuGraphAddNode)* add_node = nullptr;
  decltype(cuGraphConditionalHandleCreate)* create_condition = nullptr;

  decltype(cuGraphInstantiateWithFlags)* instantiate = nullptr;
  decltype(cuGraphExecDestroy)* exec_destroy = nullptr;
  decltype(cuGraphLaunch)* launch = nullptr;
  decltype(cuGraphUpload)* upload = nullptr;
  decltype(cuGraphExecUpdate)* update = nullptr;
  decltype(cuGraphExecKernelNodeSetParams)* set_kernel = nullptr;
  decltype(cuGraphNodeSetEnabled)* set_enabled = nullptr;

  decltype(cuMemAlloc)* allocate = nullptr;
  decltype(cuMemFree)* free = nullptr;
  decltype(cuModuleLoadData)* load_module = nullptr;
  decltype(cuModuleUnload)* unload_module = nullptr;
  decltype(cuModuleGetFunction)* get_function = nullptr;
  decltype(cuLinkCreate)* link_create = nullptr;
  decltype(cuLinkAddData)* link_add_data = nullptr;
  decltype(cuLinkAddFile)* link_add_file = nullptr;
  decltype(cuLinkComplete)* link_complete = nullptr;
  decltype(cuLinkDestroy)* link_destroy = nullptr;
  decltype(cuFuncGetParamInfo)* function_parameter = nullptr;  // 12.4
  decltype(cuFuncGetName)* function_name = nullptr;            // 12.3

  // Throws UnsupportedError where the driver is older, or lacks the function all the same.
  void need(bool has, int needed_version, const char* what) const;
};

// Throws UnsupportedError: there is no driver, or one that is older than CUDA 11.4.
const Api& api();

// Throws Error with the call's name and the driver's error text, unless the call succeeded.
void check(CUresult status, const char* call);

// Of the calling thread; null: none.
CUcontext context_of_thread();

// Makes a context current to the calling thread for a scope, where the driver allows this.
class Current {
 public:
  explicit Current(CUcontext context) noexcept : status_(api().context_push(context)) {}
  ~Current() {
    CUcontext popped = nullptr;
    if (ok()) api().context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  bool ok() const noexcept { return status_ == CUDA_SUCCESS; }
  CUresult status() const noexcept { return status_; }
  // Throws Error: the context is not current.
  void need() const { check(status_, "cuCtxPushCurrent"); }

 private:
  CUresult status_;
};

}  // namespace cudasched::graphs
