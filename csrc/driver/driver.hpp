// The real driver's functions that cudasched calls, looked up by name in the real library, never through the shim.
// Optional ones are null on a driver that lacks them. Filled once, before any other thread uses it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <source_location>
#include <string>
#include <type_traits>

#include "base/error.hpp"

namespace cudasched::driver {

// A driver call that failed: the call, its status and its source location.
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
  using InstantiateWithLog = CUresult(CUgraphExec*, CUgraph, CUgraphNode*, char*, std::size_t);

#define CALL(need, name) decltype(::name)* name = nullptr;
#define TWINS(need, name, suffix) Twins<decltype(::name)> name;
#define CALL_AS(need, name, symbol, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
#define TWINS_AS(need, name, symbol, suffix, ...) Twins<__VA_ARGS__> name;
#include "driver/calls.inc"

  const char* lacks = nullptr;  // a function that scheduling needs; null: none

  // Looks every function up in the library behind `handle`. Throws HookError if one that cudasched cannot do without is
  // missing (no driver of the last ten years lacks one).
  void load(void* handle);

  std::string error_name(CUresult status) const;
};

// The process's one table, empty until the shim has attached.
inline constinit Driver driver_table;
inline Driver& table() noexcept { return driver_table; }

// Asks the driver; 14 ns. A stream counts as capturing where the driver cannot say.
inline bool is_capturing(CUstream stream) noexcept {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return table().cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// CU_MEMORYTYPE_... of the memory at an address; 0: the driver does not know it, as pageable memory.
inline unsigned memory_type(CUdeviceptr address) noexcept {
  unsigned type = 0;
  const CUresult status = table().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  return status == CUDA_SUCCESS ? type : 0;
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

// Makes a context current for the length of a scope, unless it is already.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) noexcept;
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  bool ok() const noexcept { return status_ == CUDA_SUCCESS; }
  CUresult status() const noexcept { return status_; }

 private:
  CUresult status_ = CUDA_SUCCESS;
  bool pushed_ = false;
};

// Of the device; null where it does not exist.
CUcontext primary_context(CUdevice device) noexcept;

// Waits for the work in the device's primary context, of all threads, if that context exists.
void synchronize_primary(CUdevice device) noexcept;

// The program has made a green context.
inline constinit std::atomic<bool> green_contexts_exist{false};

// Are contexts of several processes on the GPU at once? Drivers before 12.3 cannot tell, and count as without MPS.
bool under_mps(CUdevice device) noexcept;

// The calling thread's current context, for other threads to make current. Null where there is none, or where the
// context is a green one, which may be current to one thread at a time. On the launch path.
CUcontext shareable_context() noexcept;

// The stream that a call means: stream 0 is the legacy or the per-thread default stream, by entry point.
template <bool kPerThread>
constexpr CUstream meant_stream(CUstream stream) noexcept {
  if (stream != nullptr) return stream;
  return kPerThread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

}  // namespace cudasched::driver
