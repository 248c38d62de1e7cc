// Where driver calls meet the launch queues (csrc/queue), by the table of entry points (entry_points.txt). Calls that
// may be deferred are deferred, and every other call that could observe order drains first.
//
// Two means. Functions with a signature of our own (offload_functions(), and launches by push()) defer where the queue
// allows it. All others that the table does not call direct, or does not list, are guarded. guarded() gives an entry
// point that drains by the function's rule, informs the queues, and jumps on with the arguments unchanged. The guard
// answers queries of queued work itself, and hands over a deferred call's error where the program synchronises. A guard
// whose queues are empty costs a few loads.
//
// Called on the program's threads. connect() sets everything up once, before any use.
#pragma once

#include <cuda.h>

#include <span>

#include "hook/entry_points.hpp"
#include "hook/taken_over.hpp"
#include "queue/queue.hpp"

namespace cudasched::hook {

class Offload {
 public:
  // runtime::find_site()
  using FindSite = queue::Site (*)(CUstream stream, CUevent event) noexcept;
  // A record of `event` on `stream`, or a wait of `stream` for `event`, is about to be made.
  using NoteEvent = void (*)(CUevent event, CUstream stream) noexcept;

  // A function is called that may begin a capture that is not counted.
  using UncountedCapture = void (*)() noexcept;

  // Frees as `free` does, and subtracts the bytes from the process's memory.
  using FreeMemory = CUresult (*)(CUdeviceptr address, CUstream stream,
                                  CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept;

  // The engine's functions for this file, which includes no engine.
  struct Engine {
    FindSite find_site = nullptr;
    NoteEvent note_record = nullptr;
    NoteEvent note_wait = nullptr;
    UncountedCapture uncounted_capture = nullptr;
    FreeMemory free_memory = nullptr;  // null: nothing is counted
  };

  static void connect(const Engine& engine) noexcept;
  static bool connected() noexcept;

  // A device's queue, once started; queues are never removed. At most 32.
  static void add(queue::Queue& queue) noexcept;
  // In a forked child, after each was abandoned.
  static void forget_queues() noexcept;

  // A program's replacement for `target`: a guard, or `target` itself where the function is direct or taken over by its
  // signature. `point` is the requested entry point; null, for a function or version that the table does not know,
  // drains to the end of the ring. The same request gets the same guard. Where guards run out (1,024), the queues drain
  // once, and nothing is deferred from then on.
  static void* guarded(const EntryPoint* point, bool per_thread, void* target) noexcept;

  // A launch. True: `status` is the program's answer. False: the operations before it have been drained; the launch
  // goes through the gate to the driver.
  static bool push(const queue::Call& call, CUresult& status) noexcept;

  // Before a graph launch on the program's own thread, where launches of the same graph may be queued on other streams.
  static void drain_launches_of(const queue::Call& call) noexcept;

  // No operation of a stream is queued, and the GPU has done all work that the driver has. For the legacy default
  // stream (the current context's), also for the blocking streams. Not for a per-thread default stream. Waits for
  // nothing, and tells no queue about completed work. The caller has made its capture mode relaxed.
  static bool is_complete(CUstream stream) noexcept;
  // As the program's own cuEventCreate, cuEventRecord and cuStreamWaitEvent, with the same handling of the queues.
  static CUresult new_event(CUevent& event) noexcept;
  static CUresult record(CUevent event, CUstream stream) noexcept;
  static CUresult wait(CUstream stream, CUevent event) noexcept;

  // The queued launches and changes of an executable graph that is to be changed. A graph with event or memory nodes is
  // never queued; for such a graph all queued operations count, because the graph may wait for them.
  static bool has_queued(CUgraphExec exec) noexcept;
  static void drain_changed(CUgraphExec exec) noexcept;
  // The only queue with such operations; null: there are several.
  static queue::Queue* queue_of(CUgraphExec exec) noexcept;
  static queue::Caller this_caller() noexcept;

  // Waits until the driver has the queued operations of all devices. False: nothing was queued.
  static bool submit_everything() noexcept;
};

// Copies, fills, records, waits, host functions, stream-ordered frees, and calls that make and destroy events.
std::span<const TakenOver> offload_functions() noexcept;

}  // namespace cudasched::hook
