// Calls of the door of memory, as a program makes them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "runtime/hooked_driver.hpp"
#include "runtime/memory/memory.hpp"

namespace cudasched::test {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

inline CUresult allocate(CUdeviceptr& pointer, std::size_t bytes) {
  return call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&pointer, bytes);
}
inline CUresult free_memory(CUdeviceptr pointer) { return call<CUresult(CUdeviceptr)>("cuMemFree_v2")(pointer); }

// Bytes that the first GPU's account of this process has.
inline std::uint64_t held() { return runtime::memory().holdings.held(0); }

}  // namespace cudasched::test
