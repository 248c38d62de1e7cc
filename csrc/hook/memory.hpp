// Interception of the calls that make memory known to CUDA, and of those that unload code.
#pragma once

#include <span>

#include "hook/entry_point.hpp"

namespace cudasched::hook {

std::span<const EntryPoint> memory_entry_points() noexcept;

}  // namespace cudasched::hook
