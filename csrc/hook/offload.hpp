// Where driver calls meet the launch queues (csrc/queue): calls that may be deferred are, and every other call that
// could observe order drains first, by the table of entry points (entry_points.txt).
//
// Two means. Functions with a signature of our own (offload_functions(), and launches by push()) defer where the queue
// allows it. All others that the table does not call direct, or does not list, are guarded: guarded() gives an entry
// point that drains by the function's rule, tells the queues what they must know, and jumps on with the arguments as
// they were; it answers queries of queued things itself, and hands over a deferred call's error where the program
// synchronises. A guard whose queues are empty costs a few loads.
//
// Called on the program's threads. What is set up here is set up once, by connect(), before any of it is used.
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

  // Frees as `free` does, and takes it out of what the process holds.
  using FreeMemory = CUresult (*)(CUdeviceptr address, CUstream stream,
                                  CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept;

  // What the engine does for this file, which knows none.
  struct Engine {
    FindSite find_site = nullptr;
    NoteEvent note_record = nullptr;
    NoteEvent note_wait = nullptr;
    UncountedCapture uncounted_capture = nullptr;
    FreeMemory free_memory = nullptr;  // null: nothing is counted
  };

  // False where the driver lacks a function that offload needs: nothing is deferred then (drivers before 12.4 do not
  // tell parameter sizes).
  static bool connect(const Engine& engine) noexcept;
  static bool connected() noexcept;

  // A device's queue, once it has started; they are never taken away. At most 32.
  static void add(queue::Queue& queue) noexcept;
  // In a forked child, after each was abandoned.
  static void forget_queues() noexcept;

  // What a program gets where it would get `target`: a guard, or `target` itself where the function is direct or taken
  // over by its signature. `point` is what it asked for, null a function or version that the table does not know:
  // drained to the end of the ring. Asked again, it gives the same guard. Where guards run out (1,024) it drains once,
  // and nothing is deferred from then on.
  static void* guarded(const EntryPoint* point, bool per_thread, void* target) noexcept;

  // A launch. True: `status` is the program's answer. False: what it depends on has been drained; it goes through the
  // gate to the driver.
  static bool push(const queue::Call& call, CUresult& status) noexcept;

  // Before a graph launch on the program's own thread, where launches of the same graph may be queued on other streams.
  static void drain_launches_of(const queue::Call& call) noexcept;

  // Nothing of a stream is queued, and the GPU has done all that the driver has for it; of the legacy default stream
  // (the current context's), and nothing of the blocking streams either. Not for a per-thread default stream. Waits for
  // nothing, and tells no queue that work was seen to be complete. The caller has made its capture mode relaxed.
  static bool is_complete(CUstream stream) noexcept;
  // As the program's own cuEventCreate, cuEventRecord and cuStreamWaitEvent: what of the queues they need they do.
  static CUresult new_event(CUevent& event) noexcept;
  static CUresult record(CUevent event, CUstream stream) noexcept;
  static CUresult wait(CUstream stream, CUevent event) noexcept;

  // What is queued when an executable graph is changed: its launches, and changes of it. One that has event or memory
  // nodes is never queued, and everything counts that is: it may wait for it.
  static bool has_queued(CUgraphExec exec) noexcept;
  static void drain_changed(CUgraphExec exec) noexcept;
  // The only queue that has some; null: there are several.
  static queue::Queue* queue_of(CUgraphExec exec) noexcept;
  static queue::Caller this_caller() noexcept;

  // Waits until the driver has all that is queued, whichever its device. False: nothing was queued.
  static bool submit_everything() noexcept;
};

// Copies, fills, records, waits, host functions, stream-ordered frees, and what makes and destroys events.
std::span<const TakenOver> offload_functions() noexcept;

}  // namespace cudasched::hook
