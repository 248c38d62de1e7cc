// Interception of the calls that make memory known to CUDA, and of those that unload code.
#pragma once

#include <cuda.h>

#include <span>

#include "hook/taken_over.hpp"

namespace cudasched::hook {

std::span<const TakenOver> memory_functions() noexcept;

// Frees on a stream as `free` does, and subtracts the bytes from the process's memory: not for a pool's memory, which
// the pool keeps.
CUresult free_counted(CUdeviceptr address, CUstream stream, CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept;

}  // namespace cudasched::hook
