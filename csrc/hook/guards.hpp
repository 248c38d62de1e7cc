// Guards: entry points before driver functions that could observe queued work. A guard drains by its function's rule
// (entry_points.txt), informs the queues, and jumps on with the arguments unchanged. It answers queries of queued work
// itself, and hands over a deferred call's error where the program synchronises. A guard whose queues are empty costs a
// few loads.
//
// guarded() is called when a program asks for a function, on any thread; the guards on the program's threads.
#pragma once

#include "hook/entry_points.hpp"

namespace cudasched::hook {

// A program's replacement for `target`: a guard, or `target` itself where the function is direct or taken over by its
// signature. `point` is the requested entry point; null, for a function or version that the table does not know, drains
// to the end of the ring. The same request gets the same guard. Where guards run out (1,024), the queues drain once,
// and nothing is deferred from then on.
void* guarded(const EntryPoint* point, bool per_thread, void* target) noexcept;

}  // namespace cudasched::hook
