// The launch queues of the process, one a device: which of them a call is about, and draining these.
//
// runtime/device.cpp adds a device's queue once it has started; queues are never removed. The calls are of any thread,
// and take no lock where nothing is queued.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "queue/queue.hpp"

namespace cudasched::queue {

// A bitmap of ordinals.
using Devices = std::uint32_t;
inline constexpr Devices kAllDevices = ~Devices{0};

constexpr Devices bit_of(int device) noexcept {
  return device < 0 || device >= 32 ? kAllDevices : Devices{1} << device;
}

// The operations that a call depends on. A device may wait for an event of another one: events count on all devices.
struct Dependency {
  Scope scope = Scope::kEnd;
  Devices devices = kAllDevices;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUevent other = nullptr;
  CUgraphExec exec = nullptr;
};

class Router {
 public:
  // At most 32.
  void add(Queue& queue) noexcept;
  // In a forked child, after each was abandoned.
  void forget_queues() noexcept { count_.store(0); }

  std::size_t count() const noexcept { return count_.load(std::memory_order_acquire); }
  // No queue holds an operation.
  bool empty() const noexcept;
  template <typename Visit>
  void for_each(Visit&& visit) const noexcept {
    const std::size_t queues = count();
    for (std::size_t i = 0; i < queues; ++i) visit(*queues_[i].load(std::memory_order_acquire));
  }

  bool one_device() const noexcept { return one_device_; }  // on this machine
  // Of a stream its own; of a default stream the current context's.
  Devices devices_of(CUstream stream) const noexcept;
  // Those that can use the memory: of host and managed memory all.
  Devices devices_of(CUdeviceptr address) const noexcept;

  // Waits in each queue but `except` for the operations that the call depends on.
  void drain(const Caller& caller, const Dependency& dependency, Waiter::For what,
             const Queue* except = nullptr) const noexcept;
  // A queue that holds such operations, and whether several do.
  struct Holders {
    Queue* queue = nullptr;
    bool several = false;
  };
  Holders holders_of(const Dependency& dependency) const noexcept;

  // Is an operation of the stream queued? For the legacy default stream (the current context's), also one of the
  // blocking streams. Not for a per-thread default stream.
  bool has_queued(CUstream stream) const noexcept {
    if (empty()) return false;
    return holders_of({.scope = Scope::kStream, .devices = devices_of(stream), .stream = stream}).queue != nullptr;
  }

  // An executable graph that is to be changed: its queued launches and changes. A graph with event or memory nodes is
  // never queued; for such a graph all queued operations count, because the graph may wait for them.
  bool has_queued(CUgraphExec exec) const noexcept { return holders_of(on_graph(exec)).queue != nullptr; }
  void drain_changed(const Caller& caller, CUgraphExec exec) const noexcept {
    drain(caller, on_graph(exec), Waiter::For::kOther);
  }
  // The only queue with operations of the graph's own; null: there are none, or several.
  Queue* queue_of(CUgraphExec exec) const noexcept;

  // Drains once; from then on nothing is deferred.
  void stop_deferring(std::string_view message) noexcept;

 private:
  static constexpr std::size_t kQueues = 32;

  static Dependency on_graph(CUgraphExec exec) noexcept;
  static Position position_in(Queue& queue, const Dependency& dependency) noexcept;

  std::array<std::atomic<Queue*>, kQueues> queues_{};
  std::atomic<std::size_t> count_{0};
  bool one_device_ = false;
  std::atomic<bool> off_{false};
};

inline constinit Router the_router;

inline Router& router() noexcept { return the_router; }

}  // namespace cudasched::queue
