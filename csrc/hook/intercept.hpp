// The driver entry points that the engine takes over, and what cuGetProcAddress must return for them.
#pragma once

#include <cuda.h>

#include <vector>

#include "hook/taken_over.hpp"

namespace cudasched::hook {

// What a program gets for `symbol` where the driver gave `real`: our function if we take this entry point over in the
// version that was asked for, else `real` or a guard before it.
void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept;

// Every function that is taken over.
std::vector<TakenOver> taken_over();

}  // namespace cudasched::hook
