// Interception of the calls that make, change and destroy executable graphs, so that their time can be predicted.
#pragma once

#include <span>

#include "hook/entry_point.hpp"

namespace cudasched::hook {

std::span<const EntryPoint> graph_entry_points() noexcept;

}  // namespace cudasched::hook
