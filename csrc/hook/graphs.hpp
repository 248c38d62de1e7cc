// Interception of the calls that make, change and destroy executable graphs. The engine so predicts a graph's time, and
// gives its kernel nodes the priority of the caller's class. Where the driver refuses that priority, the user's own
// call is made unchanged.
#pragma once

#include <cuda.h>

#include <span>

#include "hook/taken_over.hpp"
#include "queue/call.hpp"

namespace cudasched::hook {

std::span<const TakenOver> graph_functions() noexcept;

// Around a graph launch that is not deferred, just before the driver call and after its success: slices of an earlier
// launch come before it.
void order_behind_slices(const queue::Call& call) noexcept;
void launched_whole(const queue::Call& call) noexcept;

// This thread has captured `graph`, beginning on `stream`.
void note_captured(CUstream stream, CUgraph graph) noexcept;

}  // namespace cudasched::hook
