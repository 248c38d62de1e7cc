// One GPU as this process uses it: the shared table, a client for each class in use, the gate with its launch queue,
// the latency activity and the predictor's files.
//
// Made once for each GPU that the process launches on, and never destroyed. register_client() and start_queue() are
// called under the engine's lock, tend() by the ticker; the rest by any thread.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "arbiter/table.hpp"
#include "base/clock.hpp"
#include "cudasched/engine.h"
#include "predict/allocations.hpp"
#include "queue/queue.hpp"
#include "runtime/gate.hpp"
#include "runtime/graphs.hpp"
#include "runtime/latency/latency_activity.hpp"
#include "runtime/offload.hpp"
#include "runtime/settings.hpp"
#include "schedule/quiet.hpp"
#include "schedule/slice_length.hpp"

namespace cudasched::runtime {

class Device {
 public:
  Device(CUdevice handle, int ordinal, const Settings& settings);

  // Registers the client of this class, once. Throws ArbiterError.
  // `job`: of a best-effort client, 0: none.
  void register_client(Class client_class, const Settings& settings, const Graphs* graphs, std::uint64_t job);

  // Keeps the table usable (arbiter::Table::tend), and has its clients go on in the slots that they have now. The
  // ticker's, and before a client registers.
  arbiter::Condition tend(std::int64_t now_ns, bool at_once = false) noexcept;

  // Gives the predictor its trees and the saved state of this GPU, once. The log names a file that cannot be used; the
  // predictor does without the file.
  void prepare_predictor(const Settings& settings, const predict::Allocations* allocations) noexcept;

  // Saves the predictor's state.
  bool save_predictor() noexcept;

  // Starts the launch queue behind the gate, once. Without memory or a thread for the queue nothing is ever deferred,
  // and the gate holds the program's own threads.
  void start_queue(bool spins) noexcept;

  // Publishes the process's counts beside the slot of its first client here. The ticker's, and at exit.
  void publish(const arbiter::Counts& counts) noexcept;

  // Launches of graphs may be submitted in slices. Before start_queue().
  void use(Slices* slices) noexcept { admission_.use(slices); }

  // Null where there is none.
  queue::Queue* queue() const noexcept { return queue_.load(std::memory_order_acquire); }
  bool holds_launches() const noexcept { return queue() != nullptr && !queue()->empty(); }
  bool registered(Class client_class) const noexcept { return slot(client_class) >= 0; }
  int slot(Class client_class) const noexcept {
    return slots_[static_cast<std::size_t>(client_class)].load(std::memory_order_acquire);
  }

  int ordinal() const noexcept { return ordinal_; }
  // Its processes are clients of MPS. Once a client is registered.
  bool under_mps() const noexcept { return mps_.load(std::memory_order_relaxed); }
  // How long the time slices of this process are to be for the sake of its best-effort work here. The ticker's.
  std::uint32_t slice_us(std::int64_t now_ns) noexcept;
  // Another process that lives has a client of the class, latency or best effort. The ticker's.
  bool beside(Class client_class, std::int64_t now_ns) noexcept;
  // A latency client has said lately when its requests come, or has a rhythm. The ticker's.
  bool announced(std::int64_t now_ns) noexcept;
  // Another best-effort client asks for pauses, in which it measures. The ticker's.
  bool pauses(std::int64_t now_ns) noexcept;
  // Best-effort clients of other processes pause for so long; 0: no longer; negative: nothing changes. See
  // cudasched_measure().
  void measure(std::int64_t for_ns, std::int64_t now_ns, cudasched_measuring& found) noexcept;
  arbiter::Table& table() noexcept { return *table_; }

  LatencyActivity latency;
  Gate gate;
  JobPeers peers;

 private:
  // Of the slots of other processes' clients of the class, latency or best effort.
  template <typename Visit>
  void for_each_other(Class client_class, Visit&& visit) noexcept;

  CUdevice handle_;
  int ordinal_;
  std::atomic<bool> mps_{false};
  schedule::SliceLength slice_length_;
  schedule::Pauses pauses_;
  std::unique_ptr<arbiter::Table> table_;
  std::mutex tend_;                                         // held while slot numbers change
  arbiter::Condition untold_ = arbiter::Condition::kSound;  // found by a registration; the ticker tells of it
  std::array<std::atomic<int>, kClassCount> slots_{-1, -1, -1};
  std::atomic<int> counts_class_{-1};                                    // beside whose slot the counts are published
  std::uint64_t counts_version_ = static_cast<std::uint64_t>(now_ns());  // above those of the slot's owners before
  std::once_flag predictor_prepared_;
  std::unique_ptr<const predict::trees::Evaluator> trees_;
  std::string state_path_;  // empty: nothing is kept
  GateAdmission admission_{gate};
  std::unique_ptr<queue::Queue> owned_queue_;
  std::atomic<queue::Queue*> queue_{nullptr};
};

}  // namespace cudasched::runtime
