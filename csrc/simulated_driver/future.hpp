// Functions that cuGetProcAddress gives and the library does not export, as drivers may.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace cudasched::simulated_driver {

CUresult fill_16(CUdeviceptr to, unsigned short value, std::size_t count, CUstream stream);

// Of CUDA 15: no header has them.
CUresult future_begin_capture(CUstream stream);
CUresult future_fill(CUdeviceptr to, unsigned value, std::size_t count, unsigned flags, CUstream stream);

}  // namespace cudasched::simulated_driver

// Of CUDA 13.1 and later, which the headers of 13.0 lack.
extern "C" {
CUresult CUDAAPI cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* data, unsigned mode);
CUresult CUDAAPI cuLaunchHostFunc_v2_ptsz(CUstream stream, CUhostFn function, void* data, unsigned mode);
CUresult CUDAAPI cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void* callback,
                                               void* data);
CUresult CUDAAPI cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                                    void* callback, void* data);
CUresult CUDAAPI cuStreamBeginCaptureToCig(CUstream stream, void* parameters);
CUresult CUDAAPI cuStreamBeginCaptureToCig_ptsz(CUstream stream, void* parameters);
CUresult CUDAAPI cuStreamEndCaptureToCig(CUstream stream);
CUresult CUDAAPI cuStreamEndCaptureToCig_ptsz(CUstream stream);
}
