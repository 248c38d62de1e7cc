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
#define CALL(name) decltype(::name)* name = nullptr;
#include "device_graph/calls.inc"
#undef CALL

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
  explicit Current(CUcontext context) noexcept : status_(api().cuCtxPushCurrent(context)) {}
  ~Current() {
    CUcontext popped = nullptr;
    if (ok()) api().cuCtxPopCurrent(&popped);
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
