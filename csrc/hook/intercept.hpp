// The driver entry points that the engine takes over, and their replacements for cuGetProcAddress.
#pragma once

#include <cuda.h>

#include <vector>

#include "hook/taken_over.hpp"

namespace cudasched::hook {

// The answer to a program that asks for `symbol` where the driver gave `real`. Our function if we take this entry point
// over in the requested version, else `real` or a guard before it.
void* replacement(const char* symbol, void* real, int cuda_version, cuuint64_t flags) noexcept;

// Every function that is taken over.
std::vector<TakenOver> taken_over();

}  // namespace cudasched::hook
