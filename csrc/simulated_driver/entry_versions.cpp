// Entry points: sizes and launches of the old interface, launches of several devices, and the launches and captures of
// CUDA 13.1 and later. Also functions that no CUDA has (from version 15000 on), for tests with an unknown driver.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "simulated_driver/driver.hpp"
#include "simulated_driver/future.hpp"

namespace cudasched::simulated_driver {
namespace {

unsigned in_32_bits(std::size_t bytes) { return static_cast<unsigned>(std::min<std::size_t>(bytes, UINT_MAX)); }

// The settings of cuFuncSetBlockShape, cuParamSetSize and cuParamSetv for the function's next cuLaunch.
struct OldLaunch {
  std::array<unsigned, 3> block{1, 1, 1};
  std::vector<std::uint8_t> parameters;
};

std::mutex old_lock;

std::map<CUfunction, OldLaunch>& old_launches() {
  static std::map<CUfunction, OldLaunch> known;
  return known;
}

CUresult launch_old(CUfunction function, int width, int height, CUstream stream) {
  if (width <= 0 || height <= 0) return CUDA_ERROR_INVALID_VALUE;
  OldLaunch now;
  {
    const std::scoped_lock lock(old_lock);
    now = old_launches()[function];
  }
  std::size_t bytes = now.parameters.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, now.parameters.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  return cuLaunchKernel(function, static_cast<unsigned>(width), static_cast<unsigned>(height), 1, now.block[0],
                        now.block[1], now.block[2], 0, stream, nullptr, extra);
}

}  // namespace

CUresult future_begin_capture(CUstream stream) {
  return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
}

CUresult future_fill(CUdeviceptr to, unsigned value, std::size_t count, unsigned, CUstream stream) {
  return cuMemsetD32Async(to, value, count, stream);
}

CUresult fill_16(CUdeviceptr to, unsigned short value, std::size_t count, CUstream stream) {
  if (count % 2 != 0) return CUDA_ERROR_INVALID_VALUE;
  return cuMemsetD32Async(to, unsigned{value} << 16 | value, count / 2, stream);
}

}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuDeviceTotalMem(unsigned* bytes, CUdevice device) {
  std::size_t all = 0;
  const CUresult result = cuDeviceTotalMem_v2(&all, device);
  if (result == CUDA_SUCCESS) *bytes = in_32_bits(all);
  return result;
}

CUresult cuMemGetInfo(unsigned* free, unsigned* total) {
  std::size_t left = 0;
  std::size_t all = 0;
  const CUresult result = cuMemGetInfo_v2(&left, &all);
  if (result == CUDA_SUCCESS) *free = in_32_bits(left);
  if (result == CUDA_SUCCESS) *total = in_32_bits(all);
  return result;
}

CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
  if (x <= 0 || y <= 0 || z <= 0) return CUDA_ERROR_INVALID_VALUE;
  const std::scoped_lock lock(old_lock);
  old_launches()[function].block = {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
  return CUDA_SUCCESS;
}

CUresult cuParamSetSize(CUfunction function, unsigned bytes) {
  const std::scoped_lock lock(old_lock);
  old_launches()[function].parameters.resize(bytes);
  return CUDA_SUCCESS;
}

CUresult cuParamSetv(CUfunction function, int offset, void* value, unsigned bytes) {
  const std::scoped_lock lock(old_lock);
  std::vector<std::uint8_t>& parameters = old_launches()[function].parameters;
  if (value == nullptr || offset < 0 || static_cast<std::size_t>(offset) + bytes > parameters.size()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(parameters.data() + offset, value, bytes);
  return CUDA_SUCCESS;
}

CUresult cuLaunch(CUfunction function) { return launch_old(function, 1, 1, nullptr); }
CUresult cuLaunchGrid(CUfunction function, int width, int height) {
  return launch_old(function, width, height, nullptr);
}
CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
  return launch_old(function, width, height, stream);
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS* parts, unsigned count, unsigned flags) {
  if (parts == nullptr || count == 0 || flags > 3) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    const CUDA_LAUNCH_PARAMS& part = parts[i];
    const CUresult result =
        cuLaunchCooperativeKernel(part.function, part.gridDimX, part.gridDimY, part.gridDimZ, part.blockDimX,
                                  part.blockDimY, part.blockDimZ, part.sharedMemBytes, part.hStream, part.kernelParams);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// How the host function is waited for (`mode`, CUDA 13.1) makes no difference here.
CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* data, unsigned mode) {
  return mode > 1 ? CUDA_ERROR_INVALID_VALUE : cuLaunchHostFunc(stream, function, data);
}
CUresult cuLaunchHostFunc_v2_ptsz(CUstream stream, CUhostFn function, void* data, unsigned mode) {
  return cuLaunchHostFunc_v2(per_thread(stream), function, data, mode);
}

// CUDA 13.3. The nodes go into a graph of their own, as those of every capture do.
CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void*, void*) {
  return graph == nullptr ? CUDA_ERROR_INVALID_VALUE : cuStreamBeginCapture_v2(stream, mode);
}
CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void* callback,
                                            void* data) {
  return cuStreamBeginRecaptureToGraph(per_thread(stream), mode, graph, callback, data);
}

// CUDA 13.1, for work of graphics. The capture's nodes are dropped.
CUresult cuStreamBeginCaptureToCig(CUstream stream, void* parameters) {
  if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, void* parameters) {
  return cuStreamBeginCaptureToCig(per_thread(stream), parameters);
}
CUresult cuStreamEndCaptureToCig(CUstream stream) {
  CUgraph graph = nullptr;
  const CUresult result = cuStreamEndCapture(stream, &graph);
  if (graph != nullptr) cuGraphDestroy(graph);
  return result;
}
CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream) { return cuStreamEndCaptureToCig(per_thread(stream)); }

}  // extern "C"
#pragma GCC visibility pop
