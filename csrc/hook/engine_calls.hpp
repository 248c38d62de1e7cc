// The engine as deferred calls and guards ask it: intercept.cpp and memory.cpp define these functions, the tests of
// deferred calls and guards their own.
#pragma once

#include <cuda.h>

#include "queue/call.hpp"

namespace cudasched::hook {

// runtime::find_site(), of a thread that has returned from its earlier calls.
queue::Site find_site(CUstream stream, CUevent event) noexcept;
inline queue::Caller this_caller() noexcept { return find_site(nullptr, nullptr).caller; }

// A record of `event` on `stream`, or a wait of `stream` for `event`, is about to be made.
void note_record(CUevent event, CUstream stream) noexcept;
void note_wait(CUevent event, CUstream stream) noexcept;

// A function is called that may begin a capture that is not counted.
void capture_may_begin() noexcept;

// Frees on a stream as `free` does, and subtracts the bytes from the process's memory: not for a pool's memory, which
// the pool keeps.
CUresult free_counted(CUdeviceptr address, CUstream stream, CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept;

}  // namespace cudasched::hook
