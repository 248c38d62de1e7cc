// The gate at which best-effort launches wait for admission, and the work in flight. One a device and process.
//
// A launch asks admit(), waits there on the calling thread if told to, goes to the driver, and reports submitted(),
// which records its marker. The caller is the launcher thread for deferred launches (runtime/offload.hpp), else the
// program's own thread. schedule::GateMachine decides. The gate passes time, predictions and completions to the machine
// under a lock, and waits. Four parts of runtime/gate/ help:
//
//   Copies   pieces of copies outstanding
//   Markers  the events of completions
//   Sampler  predictions, and which launches are timed
//   Waiter   how a thread waits
//
// While no latency client is on the device, the gate counts launches (a marker for each 16) and bounds the time in
// flight (schedule::bounded). So a client that joins meets no long backlog.
//
// Never waits here (docs/order.md): a thread that holds the GIL in a process that has a
// latency client too; a thread in a latency region, whatever class the launch has; anything once scheduling is off.
//
// Locks: lock_ guards the bookkeeping, held for a microsecond, never while waiting and never across a launch.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "arbiter/table.hpp"
#include "base/spin_lock.hpp"
#include "predict/predictor.hpp"
#include "queue/call.hpp"
#include "queue/launcher.hpp"
#include "runtime/classify.hpp"
#include "runtime/gate/copies.hpp"
#include "runtime/gate/markers.hpp"
#include "runtime/gate/sampler.hpp"
#include "runtime/gate/waiter.hpp"
#include "runtime/gil.hpp"
#include "runtime/graphs.hpp"
#include "runtime/settings.hpp"
#include "schedule/gate_machine.hpp"
#include "telemetry/counters.hpp"

namespace cudasched::runtime {

class LatencyActivity;

class Gate {
 public:
  // A launch's way through the gate, from admit() to submitted().
  struct Pass : schedule::GateMachine::Ticket {
    CUevent completion = nullptr;  // to be recorded after the launch; null: none
    // Of a timed kernel: the event before the kernel (null: not timed), and the begin of the launch call. Where nothing
    // else of ours was in flight, the GPU waited for the call. Copies in flight are not known: the gate takes a kernel
    // right behind a copy for one that the GPU waited for. The predictor then learns a time that is a microsecond or
    // two too short.
    CUevent start = nullptr;
    std::int64_t called_ns = 0;
    // The marker may be left out for a launch behind it that may overlap this one: an event between the two would end
    // their overlap.
    bool may_go_unmarked = false;
    bool by_launcher = false;  // the launcher thread's
  };

  // For a launch that waits on the launcher thread: it may go when `opening` is open for it.
  struct Waiver {
    const queue::Opening* opening;
    queue::Position position;

    bool applies() const noexcept { return opening->is_open_for(position); }
  };

  // The client's place in the arbiter. Once, before the first admit().
  void register_client(arbiter::Table* table, int slot, const Settings& settings, const LatencyActivity* own_latency,
                       const Graphs* graphs, CUdevice device);
  int ordinal() const noexcept { return ordinal_; }  // of the device
  bool registered() const noexcept { return slot_.load(std::memory_order_acquire) >= 0; }

  // The other GPUs of the client's job. Before register_client().
  void use_peers(JobPeers* peers) noexcept;

  // The client has another slot now.
  void moved(int slot) noexcept;

  // Restores the arbiter's words on this client in a damaged table. The ticker's.
  void write_again() noexcept;

  // The figures that a policy goes by, from the next launch on.
  void configure(const Settings& settings) noexcept;

  // Decides from the next launch on.
  void use_policy(const schedule::Decider& policy) noexcept;
  // False: the lock cannot be had now.
  bool try_use_policy(const schedule::Decider& policy) noexcept;

  // Why the user's policy was switched off; empty: it was not, or the lock cannot be had.
  std::string_view refused_policy() noexcept;

  std::int64_t lead_ns() noexcept;

  // Predicted GPU time of launches that are complete. Any thread.
  std::int64_t completed_gpu_ns() const noexcept { return gpu_ns_.load(std::memory_order_relaxed); }

  // The predictor's outlook on the GPU by kernel. Any thread.
  const predict::Outlooks& outlooks() const noexcept { return sampler_.predictor().outlooks(); }

  // Kernels whose parameters the predictor has no room to learn. The ticker's.
  std::uint32_t without_room() noexcept;

  // A best-effort launch that no capture takes. `waiver`: the caller is the launcher thread; null: the program's own.
  Pass admit(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver = nullptr) noexcept {
    // The launcher may admit one in slices, and counts it itself.
    if (call.is_graph && waiver == nullptr) count.graph_launches.fetch_add(1, std::memory_order_relaxed);
    return latency_clients() ? admit_gated(call, count, waiver) : admit_ungated(call, count, waiver);
  }

  void submitted(const Pass& pass, CUstream stream, CUresult status) noexcept;

  // Copies, on the launcher thread: see queue::Admission. They go in pieces beside a latency client, unless the GPU
  // interrupts them.
  Copies::Direction direction_of_pieces(const queue::Operation& copy) noexcept;
  std::size_t next_piece(Copies::Direction direction, std::size_t bytes) noexcept;
  void piece_submitted(Copies::Direction direction, CUstream stream) noexcept;

  // All completions up to the ticker's last look, and whether anything was in flight then.
  struct Progress {
    std::uint64_t completions = 0;
    bool in_flight = false;
  };
  Progress progress() const noexcept { return progress_; }

  struct Aside {
    bool interrupted = false;  // the GPU interrupts kernels of this process for latency clients of others
    bool copies = false;       // then: and its copies
    bool pauses = false;  // another best-effort client asks for pauses: launches are held as beside a latency client
  };
  // Where it is interrupted, the time in flight needs no bound, and under the default policy the gate holds nothing.
  // The ticker's.
  void step_aside(const Aside& of) noexcept {
    interrupted_.store(of.interrupted && !of.pauses, std::memory_order_relaxed);
    copies_interrupted_.store(of.interrupted && of.copies, std::memory_order_relaxed);
    const bool aside = of.interrupted && strict_.load(std::memory_order_relaxed);
    holds_.store(of.pauses ? Holds::kAlways : aside ? Holds::kNever : Holds::kBesideLatency, std::memory_order_relaxed);
  }

  // Requests of other processes wait for no copy of this one. Any thread.
  bool copies_interrupted() const noexcept { return copies_interrupted_.load(std::memory_order_relaxed); }

  // The longest launch so far. Any thread.
  std::int64_t longest_ns() const noexcept { return longest_ns_.load(std::memory_order_relaxed); }

  // A latency client is there: launches are held.
  bool beside_latency() const noexcept { return registered() && latency_clients(); }

  // Latency work is under way. Any thread.
  bool latency_active() const noexcept;

  // True while a thread waits that others are to know of; they then check that this process is alive.
  bool waits() const noexcept { return waiter_.waits(); }

  // Threads that wait look again.
  void wake() noexcept {
    if (!registered()) return;
    table_->wake_all();
    if (peers_ != nullptr) peers_->wake_all();
  }

  // The predictor's sources: trees (null: none; the trees must outlive the gate) and the memory that CUDA knows.
  void use(const predict::trees::Evaluator* trees, const predict::Allocations* allocations) noexcept;

  // A kernel's predicted time, without counting a launch.
  std::int64_t estimate_ns(const predict::Query& query) noexcept;
  // The measured time of an executable graph; 0: not known yet.
  std::int64_t measured_graph_ns(CUgraphExec exec) noexcept;
  // Its predicted time, by its history or its nodes; 0: not known.
  std::int64_t graph_ns(CUgraphExec exec) noexcept;

  // The learned state worth keeping between runs; empty if the lock cannot be had (at exit, the lock's holder may be
  // gone). Allocates. restore() throws StateError.
  std::vector<std::byte> save() noexcept;
  void restore(std::span<const std::byte> state);

  // The ticker's: tells the arbiter which launch should have ended and has not (`cudasched status` names its client),
  // and warns, once, of launches that the backstop let go.
  void report_overdue(std::int64_t now_ns) noexcept;

  // Contexts go with their events; called before the driver destroys one. Null: any context of this device.
  void forget_context(CUcontext context) noexcept;

  // Predicted GPU time in flight, as of now.
  std::int64_t in_flight_ns() noexcept;

 private:
  enum class Holds : std::uint8_t { kNever, kBesideLatency, kAlways };

  static constexpr std::int64_t kOverdueNs = 1'000'000'000;  // late beyond any error of prediction

  void note_length(std::int64_t duration_ns) noexcept;
  Pass admit_gated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept;
  // The event before a launch that is timed.
  static void record_start(CUevent start, CUstream stream, bool is_graph, Pass& pass) noexcept;
  Pass admit_ungated(const queue::Call& call, telemetry::Shard& count, const Waiver* waiver) noexcept;
  [[gnu::noinline]] bool hold_ungated(const queue::Call& call, const schedule::Estimates::Found& found,
                                      telemetry::Shard& count, const Waiver* waiver,
                                      std::unique_lock<SpinLock>& lock) noexcept;
  bool make_ready(CUcontext context) noexcept;
  void mark_tail(CUstream stream) noexcept;
  void retire(std::int64_t now_ns) noexcept;
  bool must_not_wait(const Waiver* waiver) const noexcept;
  std::unique_lock<SpinLock> lock_soon() noexcept;
  void note_exception(schedule::Exception exception, telemetry::Shard& count) noexcept;
  void take_policy(const schedule::Decider& policy) noexcept;
  [[gnu::always_inline]] inline CUevent enter(const queue::Call& call, const predict::Prediction& prediction,
                                              const schedule::GateMachine::Launch& launch, Pass& pass,
                                              std::int64_t now_ns) noexcept;

  // Launches are held: for a latency client on this GPU or another one of the job, or for a client that measures.
  bool latency_clients() const noexcept {
    const Holds holds = holds_.load(std::memory_order_relaxed);
    return holds == Holds::kAlways || (holds == Holds::kBesideLatency && any_latency_client());
  }
  bool any_latency_client() const noexcept {
    return table_->latency_clients() != 0 || (peers_ != nullptr && peers_->latency_clients());
  }

  arbiter::Table* table_ = nullptr;
  JobPeers* peers_ = nullptr;
  std::atomic<int> slot_{-1};
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> copies_interrupted_{false};
  std::atomic<Holds> holds_{Holds::kBesideLatency};
  std::atomic<bool> strict_{false};  // the policy, the default one
  std::atomic<std::int64_t> longest_ns_{0};
  const LatencyActivity* own_latency_ = nullptr;
  predict::Residency device_;  // of an unknown kernel
  int ordinal_ = 0;
  Waiter waiter_;
  schedule::SleepPlan launcher_sleep_;  // the launcher thread's alone, once there is one

  SpinLock lock_;
  Copies copies_;
  Markers markers_;
  Sampler sampler_;
  schedule::GateMachine machine_;
  std::atomic<std::uint32_t> without_room_{0};  // as last read
  std::atomic<std::int64_t> gpu_ns_{0};
  Progress progress_;  // the ticker's
  std::atomic<bool> backstop_used_{false};
  std::atomic<bool> backstop_told_{false};
};

}  // namespace cudasched::runtime
