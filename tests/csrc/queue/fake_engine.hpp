// An engine that says to each thread what the thread has told it (hook/engine_calls.hpp).
#pragma once

#include "queue/call.hpp"

namespace cudasched::hook {

inline thread_local queue::Site here;
inline int uncounted_captures = 0;

}  // namespace cudasched::hook
