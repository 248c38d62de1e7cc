// Driver calls of programs that may go into the launch queues (csrc/queue). Each is pushed where the queue of its
// device allows that. Else the operations that it depends on are drained, and the driver is called on the program's
// thread.
//
// Called on the program's threads. While no device has a queue, a call costs a load more than the driver's.
#pragma once

#include <cuda.h>

#include <span>

#include "hook/taken_over.hpp"
#include "queue/call.hpp"
#include "queue/router.hpp"

namespace cudasched::hook {

// A launch. True: `status` is the program's answer. False: the operations before it have been drained; the launch goes
// through the gate to the driver.
bool defer_or_drain(const queue::Call& call, CUresult& status) noexcept;
inline bool defer(const queue::Call& call, CUresult& status) noexcept {
  return queue::router().count() != 0 && defer_or_drain(call, status);
}

// The program's own cuEventCreate, cuEventRecord and cuStreamWaitEvent. `stream` is the one meant.
CUresult create_event(CUevent* event, unsigned flags) noexcept;
CUresult record_event(CUevent event, CUstream stream, unsigned flags) noexcept;
CUresult wait_for_event(CUstream stream, CUevent event, unsigned flags) noexcept;

// Waits until the driver has the queued operations of all devices. False: nothing was queued.
bool submit_everything() noexcept;

// Copies, fills, records, waits, host functions, stream-ordered frees, and calls that make and destroy events.
std::span<const TakenOver> deferred_functions() noexcept;

}  // namespace cudasched::hook
