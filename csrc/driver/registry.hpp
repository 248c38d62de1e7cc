// Facts about the process's streams, events and executable graphs, by handle, from the driver's initialisation on, with
// or without a launch queue. (Of functions: driver/functions.hpp.)
//
// find() takes a few loads, on any thread, without a lock, an allocation or a driver call, for the launch path. The
// other functions are for a handle's creation, first use, change or destruction. They take a spin lock, and may
// allocate and ask the driver. A handle is forgotten before the driver frees it, because the driver may give the handle
// to another thread at once.
//
// At most HandleTable::kMost handles of a kind are known (90 MB where every kind is full; 28 KB where there are few). A
// handle without a place is unknown. The driver is then asked for a stream's kind each time, and calls on the event or
// graph are not deferred. unknown() counts such handles (`cudasched.state()`).
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
  bool shared = false;    // visible to other processes: created with INTERPROCESS, or opened from another process
  bool captured = false;  // last recorded on a capturing stream: waits on it belong to the capture
  int device = -1;
  CUcontext context = nullptr;  // that was current when it was created
};

struct ExecFacts {
  std::uint64_t identity = 0;         // of the graph's kernels, shapes and order: the same in every run; never 0
  std::int64_t critical_path_ns = 0;  // predicted
  std::uint32_t nodes = 0;
  bool plain = false;     // only kernels, copies, fills, host functions and child graphs of these: no effect is seen
                          // outside its stream
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
  // After the driver has created the event, with the same context current.
  void created(CUevent event, unsigned flags) noexcept;
  void opened(CUevent event) noexcept;  // from another process
  void shared(CUevent event) noexcept;  // with another process
  void recorded(CUevent event, bool capturing) noexcept;
  // True where the event was known. Of two threads that destroy the same event, only one gets true.
  bool forget(CUevent event, EventFacts* facts = nullptr) noexcept;

  // ---- executable graphs
  bool find(CUgraphExec exec, ExecFacts& facts) const noexcept;
  bool is_plain(CUgraphExec exec) const noexcept {
    ExecFacts facts;
    return find(exec, facts) && facts.plain;
  }
  // Instantiated, or updated to another graph; not launched yet. With the context of its use current.
  void made(CUgraphExec exec, const ExecFacts& facts) noexcept;
  void launched(CUgraphExec exec) noexcept;
  // The graph is about to be changed, and counts as not launched. True: it had been launched.
  bool changed(CUgraphExec exec) noexcept;
  void forget(CUgraphExec exec) noexcept;
  // Was an executable graph ever made that is not known to be plain? Any work may use the allocations of that graph's
  // memory nodes.
  bool graphs_hold_memory() const noexcept { return graphs_hold_memory_.load(std::memory_order_relaxed); }
  void may_hold_memory() noexcept { graphs_hold_memory_.store(true, std::memory_order_relaxed); }
  // Was a graph given a user object, ever? Which graphs have some, the driver does not say.
  bool graphs_hold_objects() const noexcept { return graphs_hold_objects_.load(std::memory_order_relaxed); }
  void may_hold_objects() noexcept { graphs_hold_objects_.store(true, std::memory_order_relaxed); }
  // The runtime's record for launching the graph in slices, until the graph is forgotten; null: none.
  void* slices(CUgraphExec exec) const noexcept;
  bool has_slices(CUgraphExec exec, void* slices) noexcept;  // false where there is no room

  // ---- contexts; each told before the driver ends them
  // Forgets the context's events, and the executable graphs that were made while the context was current.
  void context_ends(CUcontext context) noexcept;

  // The facts of a device's primary context. restore() takes them back where other holders keep that context alive.
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
// A context's device. Makes the context current for a moment where necessary. -1 where the driver refuses.
int device_of(CUcontext context) noexcept;

}  // namespace cudasched::driver
