// The process-wide engine: configuration, lifecycle, devices, and the way of a launch (docs/design.md).
//
// Life: attach() when the shim loads us (first driver call); start() when cuInit has succeeded; clients register at
// their first launch or region; stop() at exit. A forked child starts anew with its own cuInit. Any internal fault
// calls fail(): scheduling goes off for the process, that is said once, and every call passes through from then on.
//
// begin_launch and end_launch are the launch path. Everything else may lock, allocate and log.
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

#include "arbiter/table.hpp"
#include "driver/driver.hpp"
#include "predict/allocations.hpp"
#include "queue/queue.hpp"
#include "runtime/classify.hpp"
#include "runtime/gate.hpp"
#include "runtime/graphs.hpp"
#include "runtime/hot.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "runtime/offload.hpp"
#include "runtime/settings.hpp"

namespace cudasched::runtime {

// One GPU as this process uses it: a table, a client for each class in use, the gate, the latency activity.
class Device {
 public:
  Device(CUdevice handle, int ordinal, const Settings& settings);

  // A client of this class, registered if it is not yet. Throws ArbiterError.
  // `job`: of a best-effort client, 0: none.
  void register_client(Class client_class, const Settings& settings, const Graphs* graphs, std::uint64_t job);

  // Keeps the table usable (arbiter::Table::tend), and has its clients go on in the slots that they have now. The
  // ticker's, and before a client registers.
  arbiter::Condition tend(std::int64_t now_ns, bool at_once = false) noexcept;

  // Gives the predictor its trees and what was learned of this GPU before, once. A file that cannot be used is said to
  // be so and does without.
  void prepare_predictor(const Settings& settings, const predict::Allocations* allocations) noexcept;

  // Keeps what the predictor learned.
  void save_predictor() noexcept;

  // Starts the launch queue behind the gate, once; `started` is told of it. Without memory or a thread for it nothing
  // is ever deferred, and the gate holds the program's own threads.
  void start_queue(const queue::Calls& calls, void (*started)(queue::Queue&) noexcept) noexcept;

  // Null where there is none.
  queue::Queue* queue() const noexcept { return queue_.load(std::memory_order_acquire); }
  bool holds_launches() const noexcept { return queue() != nullptr && !queue()->empty(); }
  bool registered(Class client_class) const noexcept { return slot(client_class) >= 0; }
  int slot(Class client_class) const noexcept {
    return slots_[static_cast<std::size_t>(client_class)].load(std::memory_order_acquire);
  }

  int ordinal() const noexcept { return ordinal_; }
  arbiter::Table& table() noexcept { return *table_; }

  LatencyActivity latency;
  Gate gate;
  JobPeers peers;

 private:
  CUdevice handle_;
  int ordinal_;
  std::unique_ptr<arbiter::Table> table_;
  std::mutex tend_;  // held while slot numbers change
  arbiter::Condition untold_ = arbiter::Condition::kSound;  // found by a registration; the ticker tells of it
  std::array<std::atomic<int>, kClassCount> slots_{-1, -1, -1};
  std::once_flag predictor_prepared_;
  std::unique_ptr<const predict::trees::Evaluator> trees_;
  std::string state_path_;  // empty: nothing is kept
  GateAdmission admission_{gate};
  std::unique_ptr<queue::Queue> owned_queue_;
  std::atomic<queue::Queue*> queue_{nullptr};
};

// What the hook does for launch queues; the runtime, which is below it, calls it through these.
struct OffloadHooks {
  const queue::Calls* calls = nullptr;  // null: nothing can be deferred
  void (*started)(queue::Queue&) noexcept = nullptr;
  void (*forget_queues)() noexcept = nullptr;
};

// What a launch carries from begin_launch to end_launch.
struct Ticket {
  Class launch_class = Class::kNormal;
  bool captured = false;     // into a graph: the device does not run it
  Device* device = nullptr;  // null: nothing to report
  Gate::Pass pass;
};

struct StateReport {
  bool attached = false;
  bool scheduling = false;
  Class process_class = Class::kNormal;
  int driver_version = 0;
  telemetry::Totals totals;
  std::uint64_t device_launches = 0;
  queue::LauncherTime launcher;  // of all devices
  std::string off_reason;
  std::string driver_path;
};

class Engine {
 public:
  static constexpr int kMaxDevices = 32;
  static constexpr int kLeastDriverVersion = 12040;  // 12.4, release 550: parameter sizes

  // Reads the settings and the driver's functions. Throws HookError.
  void attach(void* real_driver, const std::string& path);
  void use_offload(const OffloadHooks& hooks) noexcept { offload_ = hooks; }
  bool attached() const noexcept { return attached_.load(std::memory_order_acquire); }

  // cuInit has succeeded (each time). Never throws.
  void start() noexcept;
  void fail(const std::string& why) noexcept;
  // Instead of attach(): nothing is taken over in this process, for a reason that it is told, once.
  void decline(const std::string& why);

  void set_process_class(Class value, std::int32_t priority, std::int64_t slo_ns);
  // Throws Error. What requests take is known by their `slo_ns` (0: nothing is known of this one).
  std::uint64_t enter_region(Class value, std::int32_t priority, std::int64_t slo_ns, std::int64_t deadline_ns);
  void exit_region(std::uint64_t token);  // throws Error
  void leave_all_regions() noexcept;      // of the calling thread, which ends
  // Latency work of this thread's device comes within that time; one second counts as the longest. Throws Error.
  void expect(std::int64_t within_ns);
  // A setting by its name in configuration files ("lead_us"). Throws ConfigError: there is none of that name, the value
  // has no meaning, or the program's first CUDA call has decided it already.
  void configure(const std::string& name, const std::string& value);
  // Decides from now on, on every device, instead of the configured policy.
  void use_policy(schedule::UserPolicy policy);
  void bind_stream(std::uint64_t stream, Class value);  // throws Error
  void unbind_stream(std::uint64_t stream) noexcept;
  void start_coverage(const std::string& cupti_path);  // throws Error
  StateReport report();

  // Memory that CUDA knows from now on.
  void note_memory(std::uint64_t address, std::size_t bytes) noexcept {
    if (allocations_ != nullptr) allocations_->add(address, bytes);
  }
  const predict::Allocations* allocations() const noexcept { return allocations_.get(); }

  // An executable graph was made or changed; one is about to go.
  void note_graph(CUgraphExec exec, CUgraph graph) noexcept;
  void forget_graph(CUgraphExec exec) noexcept { graphs_.forget(exec); }
  const Graphs& graphs() const noexcept { return graphs_; }
  bool note_priority(CUgraphExec exec, GivenPriority priority) noexcept {
    return graphs_.note_priority(exec, priority);
  }
  bool node_priority() const noexcept { return settings_.node_priority; }

  // The device of the calling thread's current context; null if there is none, or scheduling is off. Makes it known on
  // first sight.
  Device* current_device(ThreadState& thread) noexcept {
    if (Device* only = hot().only_device.load(std::memory_order_acquire)) return only;
    return find_device(thread);
  }

  // The launch path's slow corner: a class's first launch on a device, a region's first launch on a device. False if
  // the launch is to pass unscheduled.
  bool prepare(Device& device, Class launch_class, ThreadState& thread) noexcept;

  // What the functions of these names below do where there may be something to do.
  void note_stream_use(CUstream stream, ThreadState& thread) noexcept;
  void note_record(CUevent event, CUstream stream) noexcept;
  void note_wait(CUevent event, CUstream stream) noexcept;
  // The stream, or all of the context (null: of any), goes.
  void forget_stream(CUstream stream) noexcept;
  void forget_streams_of(CUcontext context) noexcept;

  // Gives the thread its number, if it has none.
  void name_thread(ThreadState& thread) noexcept {
    if (thread.index == 0) thread.index = hot().next_thread.fetch_add(1, std::memory_order_relaxed);
  }

  template <typename Visit>
  void for_each_device(Visit&& visit) noexcept {
    for (auto& device : devices_) {
      if (Device* known = device.load(std::memory_order_acquire)) visit(*known);
    }
  }

 private:
  Device* find_device(ThreadState& thread) noexcept;
  Device* device_by_ordinal(CUdevice handle) noexcept;
  void leave_devices(const Region& region) noexcept;
  bool wants_offload() const noexcept;
  void start_ticker();
  void tick_forever() noexcept;
  bool tick(std::int64_t now_ns) noexcept;
  bool tend(Device& device, std::int64_t now_ns) noexcept;
  void watch_policy(Device& device, std::int64_t now_ns) noexcept;
  bool needs_ticks() noexcept;
  void sweep_marks() noexcept;
  void stop() noexcept;
  void write_coverage_report() noexcept;
  void reset_in_child() noexcept;

  std::mutex mutex_;  // lifecycle, registration, settings
  Settings settings_;
  std::atomic<bool> attached_{false};
  std::string driver_path_;
  int driver_version_ = 0;
  int device_count_ = 0;
  bool class_was_set_ = false;                                   // by a call, which goes before the environment
  std::vector<std::pair<std::string, std::string>> configured_;  // variables and values by configure(), likewise
  std::optional<schedule::UserPolicy> user_policy_;
  std::atomic<bool> policy_refused_{false};  // and that was said
  std::atomic<bool> contest_said_{false};    // that latency work is on a stream of best effort
  bool said_repaired_ = false;               // the ticker's own: what was said of tables that were not sound
  bool said_moved_ = false;
  bool said_stranded_ = false;
  bool said_policy_hangs_ = false;
  bool started_ = false;
  std::atomic<bool> stopping_{false};
  bool handlers_registered_ = false;
  std::string off_reason_;
  std::string coverage_error_;
  std::optional<std::uint64_t> job_;  // of this process; decided by its first best-effort client
  std::atomic<std::uint64_t> next_token_{1};
  std::array<std::atomic<Device*>, kMaxDevices> devices_{};
  std::atomic<bool> ticker_running_{false};
  std::unique_ptr<predict::Allocations> allocations_;  // made before the program's first CUDA call goes on
  Graphs graphs_;
  OffloadHooks offload_;
};

Engine& engine() noexcept;

// By which the marks know the stream; 0: they do not.
inline std::uint64_t mark_key(CUstream stream) noexcept {
  CUcontext context = nullptr;
  if (stream == CU_STREAM_LEGACY && driver::table().context_get_current(&context) != CUDA_SUCCESS) return 0;
  return StreamMarks::key(stream, context);
}

// `stream` is the one meant; null for calls that have none.
inline Class classify(CUstream stream, const ThreadState& thread) noexcept {
  Hot& state = hot();
  Class found = Class::kNormal;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), found)) return found;
  if (thread.depth > 0) return thread.innermost().region_class;
  if (state.marks.in_use() && state.marks.find(mark_key(stream)) != kNoOrigin) return Class::kBestEffort;
  return state.process_class.load(std::memory_order_relaxed);
}

// The class of a call about `event`, or of one without a handle (null): a thread in no region that asks after an event
// of best-effort work does so for it.
inline Class classify_event(CUevent event, const ThreadState& thread) noexcept {
  if (thread.depth > 0) return thread.innermost().region_class;
  Hot& state = hot();
  if (event != nullptr && state.carries_origins.load(std::memory_order_relaxed) &&
      state.event_origins.find(event) != kNoOrigin) {
    return Class::kBestEffort;
  }
  return state.process_class.load(std::memory_order_relaxed);
}

// Before a launch on `stream`: a best-effort region marks it, latency work contests a mark that is there, and normal
// work on a stream that best effort uses is counted.
inline void note_stream_use(CUstream stream) noexcept {
  ThreadState& thread = this_thread();
  Hot& state = hot();
  if (thread.depth == 0 && !state.marks.in_use()) [[likely]]
    return;
  engine().note_stream_use(stream, thread);
}

// The calling thread records `event` on `stream`, or makes `stream` wait for it.
inline void note_record(CUevent event, CUstream stream) noexcept {
  if (hot().carries_origins.load(std::memory_order_relaxed)) engine().note_record(event, stream);
}
inline void note_wait(CUevent event, CUstream stream) noexcept {
  if (hot().carries_origins.load(std::memory_order_relaxed)) engine().note_wait(event, stream);
}

// True if this launch needs prepare() first.
inline bool unprepared(const Device& device, Class launch_class, const ThreadState& thread) noexcept {
  if (thread.index == 0 || !device.registered(launch_class)) return true;
  if (launch_class != Class::kLatency || thread.depth == 0) return false;
  const Region& region = thread.innermost();
  return region.region_class == Class::kLatency && (region.devices & (1U << device.ordinal())) == 0;
}

// A launch on a capturing stream goes straight to the driver, with nothing of ours beside it.
inline bool is_captured(CUstream stream) noexcept {
  if (hot().captures.load(std::memory_order_relaxed) == 0) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return driver::table().stream_is_capturing(stream, &status) != CUDA_SUCCESS ||
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Host back-off (runtime/host_backoff.hpp): the first step of a launch.
inline void back_off(CUstream stream) noexcept {
  Hot& state = hot();
  if (!state.host_backoff.requested()) [[likely]]
    return;
  const ThreadState& thread = this_thread();
  if (!state.scheduling.load(std::memory_order_relaxed) || in_latency_region(thread) ||
      classify(stream, thread) != Class::kBestEffort || is_captured(stream)) {
    return;
  }
  state.host_backoff.back_off(state.counters.shard(thread.index).backed_off);
}

inline Ticket begin_launch(const predict::Launch& launch, CUstream stream, bool may_time) noexcept {
  Ticket ticket;
  Hot& state = hot();
  if (!state.scheduling.load(std::memory_order_relaxed)) return ticket;
  if (is_captured(stream)) {
    ticket.captured = true;
    return ticket;
  }
  ThreadState& thread = this_thread();
  ticket.launch_class = classify(stream, thread);
  if (ticket.launch_class == Class::kNormal && thread.normal_registered) return ticket;
  Device* const device = engine().current_device(thread);
  if (device == nullptr) return ticket;
  if (unprepared(*device, ticket.launch_class, thread) && !engine().prepare(*device, ticket.launch_class, thread)) {
    return ticket;
  }
  if (ticket.launch_class == Class::kLatency) {
    ticket.device = device;
    device->latency.before_launch();
  } else if (ticket.launch_class == Class::kBestEffort) {
    ticket.device = device;
    ticket.pass = device->gate.admit(launch, stream, may_time, state.counters.shard(thread.index));
  } else {
    thread.normal_registered = true;
  }
  return ticket;
}

inline void end_launch(const Ticket& ticket, CUstream stream, CUresult status) noexcept {
  if (ticket.pass.entry >= 0) ticket.device->gate.submitted(ticket.pass, stream, status);
  const bool latency = ticket.launch_class == Class::kLatency && ticket.device != nullptr;
  if (status == CUDA_SUCCESS && !ticket.captured) {
    ThreadState& thread = this_thread();
    if (latency) ticket.device->latency.after_launch(stream, thread);
    hot()
        .counters.shard(thread.index)
        .launches[static_cast<std::size_t>(ticket.launch_class)]
        .fetch_add(1, std::memory_order_relaxed);
  } else if (latency) {
    ticket.device->latency.launch_refused();
  }
}

// The calling thread has waited for work (a synchronise or a query that found it complete).
inline void synchronised() noexcept {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  engine().for_each_device([](Device& device) { device.latency.on_synchronised(); });
}

}  // namespace cudasched::runtime
