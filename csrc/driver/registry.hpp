// What is known of the process's streams, events and executable graphs, by handle, from the driver's initialisation on,
// whether or not a launch queue exists. (Of functions: driver/functions.hpp.)
//
// find() takes a few loads, on any thread, without a lock, an allocation or a driver call: it is for the launch path.
// The rest is called where a handle is created, first used, changed or destroyed; it takes a spin lock, and may
// allocate and ask the driver. A handle is forgotten before the driver frees it, because another thread may be given it
// at once.
//
// At most HandleTable::kMost handles of a kind are known (90 MB where every kind is full; 28 KB where there are few).
// What finds no place is unknown: a stream's kind is then asked of the driver each time, and calls on the event or
// graph are not deferred. unknown() counts them (`cudasched.state()`).
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/handle_table.hpp"
#include "base/spin_lock.hpp"

namespace cudasched::driver {

struct StreamFacts {
  bool blocking = true;  // ordered with the legacy default stream of its context
  int device = -1;       // -1: unknown
  CUcontext context = nullptr;
};

struct EventFacts {
  bool shared = false;    // other processes see it: created with INTERPROCESS, or opened from another process
  bool captured = false;  // last recorded on a capturing stream: waits on it belong to the capture
  int device = -1;
  CUcontext context = nullptr;  // that was current when it was created
};

struct ExecFacts {
  std::uint64_t identity = 0;         // of the graph's kernels, shapes and order: the same in every run; never 0
  std::int64_t critical_path_ns = 0;  // predicted
  std::uint32_t nodes = 0;
  bool plain = false;  // kernels, copies, fills, host functions and child graphs of these alone: nothing in it is seen
                       // from outside its stream
  bool launched = false;  // directly and with success, since it was made or changed
};

class Registry {
 public:
  // ---- streams, by handle; never the default streams
  bool find(CUstream stream, StreamFacts& facts) const noexcept;
  // As find(); asks the driver where that does not know. False where the driver refuses the handle, or the stream
  // captures.
  bool look_up(CUstream stream, StreamFacts& facts) noexcept;
  void forget(CUstream stream) noexcept;

  // ---- events
  bool find(CUevent event, EventFacts& facts) const noexcept;
  // After the driver has made it, with the context current in which it was made.
  void created(CUevent event, unsigned flags) noexcept;
  void opened(CUevent event) noexcept;  // from another process
  void shared(CUevent event) noexcept;  // with another process
  void recorded(CUevent event, bool capturing) noexcept;
  // Says whether it was known: only one of two threads that destroy the same event is told so.
  bool forget(CUevent event, EventFacts* facts = nullptr) noexcept;

  // ---- executable graphs
  bool find(CUgraphExec exec, ExecFacts& facts) const noexcept;
  // Instantiated, or updated to another graph; not launched yet. With the context current in which it is used.
  void made(CUgraphExec exec, const ExecFacts& facts) noexcept;
  void launched(CUgraphExec exec) noexcept;
  // It is about to be changed, and counts as not launched. Had it been?
  bool changed(CUgraphExec exec) noexcept;
  void forget(CUgraphExec exec) noexcept;
  // Was an executable graph made, ever, that is not known to be plain? Its memory nodes' allocations may be in use by
  // anything.
  bool graphs_hold_memory() const noexcept { return graphs_hold_memory_.load(std::memory_order_relaxed); }
  void may_hold_memory() noexcept { graphs_hold_memory_.store(true, std::memory_order_relaxed); }
  // Was a graph given a user object, ever? Which graphs have some, the driver does not say.
  bool graphs_hold_objects() const noexcept { return graphs_hold_objects_.load(std::memory_order_relaxed); }
  void may_hold_objects() noexcept { graphs_hold_objects_.store(true, std::memory_order_relaxed); }
  // What the runtime keeps of it to launch it in slices; null: nothing. Until it is forgotten.
  void* slices(CUgraphExec exec) const noexcept;
  bool has_slices(CUgraphExec exec, void* slices) noexcept;  // false where there is no room to know it

  // ---- contexts; each told before the driver ends them
  // Its events, and the executable graphs that were made while it was current, are forgotten.
  void context_ends(CUcontext context) noexcept;

  // What a device's primary context has; restore() takes it back where that context lives on, because others retain it.
  struct Ended {
    int device = -1;
    std::vector<std::pair<std::uint64_t, std::array<std::uint64_t, 2>>> events;
    std::vector<std::pair<std::uint64_t, std::array<std::uint64_t, 4>>> execs;
  };
  Ended primary_context_ends(int device) noexcept;
  void restore(const Ended& ended) noexcept;

  // Memory of one device that others can reach, as a bitmap of device ordinals. A device reaches its own.
  std::uint32_t reach(int device) const noexcept;
  void may_reach(int device, int owner) noexcept;  // `device` may use memory of `owner` from here on
  void all_reach_all() noexcept { all_reach_.store(true, std::memory_order_relaxed); }

  // Handles that found no place, each time that one came.
  std::uint64_t unknown() const noexcept { return unknown_.load(std::memory_order_relaxed); }

  // In a forked child: empty.
  void reset_in_child() noexcept;

  // Everything is forgotten; for tests.
  void clear() noexcept;

 private:
  static constexpr int kMostDevices = 32;

  void note_event(CUevent event, bool is_shared) noexcept;

  SpinLock lock_;
  HandleTable<2> streams_;  // context; device and flags
  HandleTable<2> events_;   // context; device and flags
  HandleTable<1> slices_;   // of executable graphs
  HandleTable<4> execs_;    // identity; critical path; nodes and flags; context and device
  std::array<std::atomic<std::uint32_t>, kMostDevices> reach_{};
  std::atomic<bool> all_reach_{false};
  std::atomic<bool> graphs_hold_memory_{false};
  std::atomic<bool> graphs_hold_objects_{false};
  std::atomic<std::uint64_t> unknown_{0};
};

// The process's one registry.
Registry& registry() noexcept;

// The device of the calling thread's current context; -1 without one.
int current_device() noexcept;
// Of a context: makes it current for a moment, unless it is. -1 where the driver refuses it.
int device_of(CUcontext context) noexcept;

}  // namespace cudasched::driver
