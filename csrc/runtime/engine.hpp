// The process-wide engine: configuration, devices, and the way of a launch (docs/design.md). lifecycle.hpp has the
// begin, failure, forks and end of the process, regions.hpp the regions, ticker.hpp the ticker thread's work,
// device.hpp a GPU's parts.
//
// find_site(), back_off(), begin_launch() and end_launch() are the launch path. Everything else may lock, allocate and
// log.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arbiter/control.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "predict/allocations.hpp"
#include "queue/call.hpp"
#include "queue/queue.hpp"
#include "runtime/classify.hpp"
#include "runtime/device.hpp"
#include "runtime/graphs.hpp"
#include "runtime/hot.hpp"
#include "runtime/lifecycle.hpp"
#include "runtime/regions.hpp"
#include "runtime/settings.hpp"
#include "runtime/slice_keeper.hpp"
#include "runtime/slices/slices.hpp"
#include "runtime/stream_use.hpp"
#include "runtime/ticker.hpp"
#include "telemetry/collector.hpp"

namespace cudasched::runtime {

// A launch's state from begin_launch to end_launch.
struct Ticket {
  Device* device = nullptr;  // null: nothing to report
  Gate::Pass pass;
  LatencySegments::Timing timing;
};

// The state beside the counts (counts.hpp).
struct StateReport {
  bool attached = false;
  bool scheduling = false;
  Class process_class = Class::kNormal;
  int driver_version = 0;
  std::uint64_t unknown_handles = 0;  // without a place in the registry, and streams without a place for a mark
  SliceCounts slices;
  std::string off_reason;
  std::string driver_path;
};

class Engine {
 public:
  static constexpr int kMaxDevices = 32;

  Lifecycle& lifecycle() noexcept { return lifecycle_; }

  void set_process_class(Class value, std::int32_t priority, std::int64_t slo_ns);
  Regions& regions() noexcept { return regions_; }
  // A setting by its name in configuration files ("lead_us"). Throws ConfigError: there is none of that name, the value
  // has no meaning, or the program's first CUDA call has decided it already.
  void configure(const std::string& name, const std::string& value);
  // Decides from now on, on every device, instead of the configured policy.
  void use_policy(schedule::UserPolicy policy);
  // Makes a change of this process that another one has asked for (arbiter/control.hpp), and publishes the settings in
  // each slot. The ticker's.
  void serve_control() noexcept;
  void bind_stream(std::uint64_t stream, Class value);  // throws Error
  void unbind_stream(std::uint64_t stream) noexcept;
  // The class of a stream where nothing else says one. Does nothing where StreamClasses is full.
  void class_by_priority(std::uint64_t stream, Class value);
  void stream_ends(std::uint64_t stream) noexcept;
  // Streams that were bound with this context current, or with one of this device, which ends: their handles may come
  // back for other streams.
  void unbind_streams_of(CUcontext context) noexcept;
  void unbind_streams_of_device(CUdevice device) noexcept;
  void start_coverage(const std::string& cupti_path);  // throws Error
  StateReport report();

  // Memory that CUDA knows from now on.
  void note_memory(std::uint64_t address, std::size_t bytes) noexcept {
    if (allocations_ != nullptr) allocations_->add(address, bytes);
  }
  const predict::Allocations* allocations() const noexcept { return allocations_.get(); }

  // An executable graph was made, or updated to another graph (`behind`: Slices::updated()); one is about to go.
  void note_graph(CUgraphExec exec, CUgraph graph, unsigned long long flags) noexcept;
  void note_update(CUgraphExec exec, CUgraph graph, Slices::UpdateQueue* behind) noexcept;
  // The predicted time of a graph of the current device; 0: not known.
  std::int64_t graph_ns(CUgraphExec exec) noexcept;
  void forget_graph(CUgraphExec exec) noexcept {
    slices_.forget(exec);
    graphs_.forget(exec);
  }
  Slices& slices() noexcept { return slices_; }
  SliceKeeper& slice_keeper() noexcept { return slice_keeper_; }
  // The driver's library is loaded, and the program's first call of it waits.
  void watch_driver(void* real_driver) noexcept;
  const Graphs& graphs() const noexcept { return graphs_; }
  bool note_priority(CUgraphExec exec, GivenPriority priority) noexcept {
    return graphs_.note_priority(exec, priority);
  }
  bool node_priority() const noexcept { return settings_.node_priority; }
  bool class_by_stream_priority() const noexcept { return settings_.class_by_stream_priority; }

  // The device of the calling thread's current context; null if there is none, or scheduling is off. Makes it known on
  // first sight.
  static Device* current_device(ThreadState& thread) noexcept;

  // The device of this number, if the process has used it; null else.
  Device* known_device(int ordinal) const noexcept {
    if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
    return devices_[static_cast<std::size_t>(ordinal)].load(std::memory_order_acquire);
  }

  // The launch slow path: a class's first launch on a device, a region's first launch on a device. False if
  // the launch is to pass unscheduled.
  bool prepare(Device& device, Class launch_class, ThreadState& thread) noexcept;

  // Gives the thread its number, if it has none.
  static void name_thread(ThreadState& thread) noexcept {
    if (thread.index == 0) thread.index = hot().next_thread.fetch_add(1, std::memory_order_relaxed);
  }

  template <typename Visit>
  void for_each_device(Visit&& visit) noexcept {
    for (auto& device : devices_) {
      if (Device* known = device.load(std::memory_order_acquire)) visit(*known);
    }
  }

 private:
  friend class Lifecycle;

  // For a change by another process. The caller holds mutex_.
  arbiter::Outcome apply(const arbiter::Change& change);
  arbiter::Outcome apply_policy(const schedule::Policy& policy);
  void use_class(Class value, std::int32_t priority, std::int64_t slo_ns);  // the caller holds mutex_
  void note_policy() noexcept;                                              // the caller holds mutex_
  void publish_choices() noexcept;
  template <typename Visit>
  void for_each_slot(Visit&& visit) noexcept;

  Device* find_device(ThreadState& thread) noexcept;
  Device* device_by_ordinal(CUdevice handle) noexcept;
  // Null: best-effort launches are offloaded.
  const char* why_no_offload() const noexcept;
  bool wants_offload() const noexcept { return why_no_offload() == nullptr; }

  std::mutex mutex_;  // lifecycle, registration, settings
  Settings settings_;
  int device_count_ = 0;
  bool class_was_set_ = false;                                   // by a call, which goes before the environment
  std::vector<std::pair<std::string, std::string>> configured_;  // variables and values by configure(), likewise
  std::optional<schedule::UserPolicy> user_policy_;
  std::atomic<std::uint32_t> policy_place_{0};  // as a slot has it
  struct Bound {
    std::uint64_t stream = 0;
    CUcontext context = nullptr;  // null: none was current
    CUdevice device = -1;
  };
  template <typename Ends>
  void unbind_where(Ends&& ends) noexcept;
  void note_place(std::uint64_t stream);
  std::vector<Bound> bound_;          // streams with a class, by either table
  std::optional<std::uint64_t> job_;  // of this process; decided by its first best-effort client
  std::array<std::atomic<Device*>, kMaxDevices> devices_{};
  Lifecycle lifecycle_{*this};
  Regions regions_;
  Ticker ticker_;
  std::unique_ptr<predict::Allocations> allocations_;  // made before the program's first CUDA call goes on
  Graphs graphs_;
  Slices slices_;
  SliceKeeper slice_keeper_;
};

Engine& engine() noexcept;

inline Device* Engine::current_device(ThreadState& thread) noexcept {
  if (Device* only = hot().only_device.load(std::memory_order_acquire)) return only;
  return engine().find_device(thread);
}

// True if this launch needs prepare() first.
inline bool unprepared(const Device& device, Class launch_class, const ThreadState& thread) noexcept {
  if (thread.index == 0 || !device.registered(launch_class)) return true;
  if (launch_class != Class::kLatency) return false;
  const Region* const region = thread.innermost();
  return region != nullptr && region->region_class == Class::kLatency &&
         (region->devices & (1U << device.ordinal())) == 0;
}

// Of a call on `stream`, the one meant, or, where it has none (null), about `event`; of a call that has neither, the
// thread's region and process decide the class. Whether the stream captures, the driver is asked for each best-effort
// call, whatever is counted: a launch that a capture loses is lost.
inline void find_site(CUstream stream, CUevent event, queue::Site& site) noexcept {
  Hot& state = hot();
  ThreadState& thread = this_thread();
  Engine::name_thread(thread);
  site.caller.thread = thread.index;
  const bool scheduling = state.scheduling.load(std::memory_order_relaxed);
  if (scheduling) site.call_class = stream != nullptr ? classify(stream, thread) : classify_event(event, thread);
  const bool best_effort = site.call_class == Class::kBestEffort;
  site.caller.latency = !best_effort || thread.empties_cache || in_latency_region(thread);
  if (stream == nullptr) return;
  const bool collecting = telemetry::collecting();
  site.captured = (best_effort || collecting || state.may_capture()) && driver::is_capturing(stream);
  if (site.captured || site.call_class == Class::kNormal) return;
  site.device = Engine::current_device(thread);
  if (!best_effort) return;
  site.caller.context = driver::shareable_context();
  // A collected launch is timed around the driver's call, on the calling thread.
  if (site.caller.latency || collecting || site.device == nullptr || site.caller.context == nullptr) return;
  queue::Queue* const known = site.device->queue();
  if (known != nullptr && known->active()) site.queue = known;
}

// Host back-off (runtime/host_backoff.hpp), of a launch or a change of a graph.
inline void back_off(const queue::Site& site) noexcept {
  Hot& state = hot();
  this_thread().feeds = site.queue;
  if (!state.host_backoff.requested()) [[likely]]
    return;
  if (site.caller.latency || site.captured) return;
  driver::barrier().settle();
  state.host_backoff.back_off(state.counters.shard(site.caller.thread).backed_off, site.queue);
}

// The same after a call that has waited for the GPU: once for the thread's launches since the last such call.
inline void back_off_after_wait() noexcept {
  Hot& state = hot();
  if (!state.host_backoff.requested()) [[likely]]
    return;
  ThreadState& thread = this_thread();
  const queue::Queue* const queue = std::exchange(thread.feeds, nullptr);
  if (queue == nullptr || in_latency_region(thread)) return;
  state.host_backoff.back_off(state.counters.shard(thread.index).backed_off, queue, /*bounds=*/1);
}

// Before a launch that was not deferred goes to the driver.
inline Ticket begin_launch(const queue::Call& call) noexcept {
  Ticket ticket;
  const queue::Site& site = call.site;
  if (site.captured || !hot().scheduling.load(std::memory_order_relaxed)) return ticket;
  ThreadState& thread = this_thread();
  const bool normal = site.call_class == Class::kNormal;
  Device* const device = normal ? Engine::current_device(thread) : site.device;
  if (device == nullptr) return ticket;
  if (unprepared(*device, site.call_class, thread) && !engine().prepare(*device, site.call_class, thread)) {
    return ticket;
  }
  if (normal) return ticket;
  ticket.device = device;
  if (site.call_class == Class::kLatency) {
    ticket.timing = device->latency.before_launch(call.stream, call.may_time());
  } else {
    ticket.pass = device->gate.admit(call, hot().counters.shard(thread.index));
  }
  return ticket;
}

inline void end_launch(const Ticket& ticket, const queue::Call& call, CUresult status) noexcept {
  if (ticket.pass.entry >= 0) ticket.device->gate.submitted(ticket.pass, call.stream, status);
  const Class launch_class = call.site.call_class;
  const bool latency = launch_class == Class::kLatency && ticket.device != nullptr;
  if (status == CUDA_SUCCESS && !call.site.captured) {
    if (latency) ticket.device->latency.after_launch(call.stream, this_thread(), ticket.timing);
    hot()
        .counters.shard(call.site.caller.thread)
        .launches[static_cast<std::size_t>(launch_class)]
        .fetch_add(1, std::memory_order_relaxed);
  } else if (latency) {
    ticket.device->latency.launch_refused();
  }
}

// Does the thread serve requests? Other threads' waits tell nothing of requests.
inline bool serves_requests(const ThreadState& thread) noexcept {
  return hot().process_class.load(std::memory_order_relaxed) == Class::kLatency || in_latency_region(thread);
}

// Around a call by which the calling thread waits for work.
inline void waits() noexcept {
  if (!LatencyActivity::any_registered() || !serves_requests(this_thread())) return;
  engine().for_each_device([](Device& device) { device.latency.waits(); });
}
inline void waited() noexcept {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const bool serves = serves_requests(this_thread());
  engine().for_each_device([&](Device& device) {
    if (serves) {
      device.latency.on_waited();
    } else {
      device.latency.on_synchronised();
    }
  });
}

// The calling thread has learned that work is done (a query that found it complete).
inline void synchronised() noexcept {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  engine().for_each_device([](Device& device) { device.latency.on_synchronised(); });
}

}  // namespace cudasched::runtime
