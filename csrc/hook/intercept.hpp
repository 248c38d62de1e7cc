// The driver entry points that the engine takes over, and what cuGetProcAddress must return for them.
#pragma once

#include <cuda.h>

namespace cudasched::hook {

// What a program gets for `symbol` where the driver gave `real`: our function if we take this entry point over in the
// version that was asked for, else `real`.
void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept;

}  // namespace cudasched::hook
