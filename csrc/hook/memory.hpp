// Interception of the calls that make memory known to CUDA, and of those that unload code.
#pragma once

#include <span>

#include "hook/taken_over.hpp"

namespace cudasched::hook {

std::span<const TakenOver> memory_functions() noexcept;

}  // namespace cudasched::hook
