// Interception of the calls that make memory known to CUDA, and of those that unload code.
#pragma once

#include <span>

#include "hook/taken_over.hpp"

namespace cudasched::hook {

std::span<const TakenOver> memory_functions() noexcept;

// Of pageable memory: those on streams, and those in a capture that has ended. False: nothing was freed.
bool carry_out_late_frees() noexcept;

}  // namespace cudasched::hook
