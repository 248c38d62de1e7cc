// Captures, replays and counts, over whichever libcuda.so.1 the loader finds.
#include <dlfcn.h>

#include <cstdio>
#include <cudasched/graphs.hpp>

namespace graphs = cudasched::graphs;

template <class Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name));
}

int main() {
  CUcontext context = nullptr;
  CUdeviceptr data = 0;
  CUstream stream = nullptr;
  find<decltype(cuInit)>("cuInit")(0);
  find<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context, 0);
  find<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent")(context);
  find<decltype(cuMemAlloc)>("cuMemAlloc_v2")(&data, 8);
  find<decltype(cuStreamCreate)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING);
  graphs::Graph graph;
  graph.add_fill(data, 7, 8);
  graphs::Executable(graph).launch(stream);
  find<decltype(cuStreamSynchronize)>("cuStreamSynchronize")(stream);
  unsigned char got = 0;
  find<decltype(cuMemcpyDtoH)>("cuMemcpyDtoH_v2")(&got, data, 1);
  std::printf("driver %d, %u\n", graphs::driver_version(), got);
  return got == 7 ? 0 : 1;
}
