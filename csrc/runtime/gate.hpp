// Where a best-effort launch waits for admission, and the clock of what is in flight. One a device and process.
//
// A launch asks admit(), waits there on the calling thread if told to, goes to the driver, and reports submitted(),
// which records its completion event. Policy is schedule/'s; the gate shows it a snapshot and obeys. The caller is the
// launcher thread for what was deferred (runtime/offload.hpp), else the program's own.
//
// While no latency client is on the device, admit() is one load.
//
// Never waits here (docs/order.md): a launch on a capturing stream; a thread that holds the GIL in a process that has a
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
#include "queue/launcher.hpp"
#include "runtime/classify.hpp"
#include "runtime/graphs.hpp"
#include "runtime/neighbours.hpp"
#include "runtime/settings.hpp"
#include "schedule/in_flight.hpp"
#include "schedule/lead.hpp"
#include "schedule/policy.hpp"
#include "telemetry/counters.hpp"

namespace cudasched::runtime {

class LatencyActivity;

class Gate {
 public:
  // A launch's way through the gate, from admit() to submitted().
  struct Pass {
    int entry = schedule::InFlight::kNone;
    std::uint32_t generation = 0;  // of the bookkeeping: it starts anew when the context goes
    CUevent completion = nullptr;  // to be recorded after the launch; null: none
    // For the lead: when the launch was admitted (0: nothing is to be learned from it), how long the lead had held it,
    // and since when nothing else of ours had been in flight (0: something was).
    std::int64_t admitted_ns = 0;
    std::int64_t held_ns = 0;
    std::int64_t dry_since_ns = 0;
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
  bool registered() const noexcept { return slot_.load(std::memory_order_acquire) >= 0; }

  // The client has another slot now.
  void moved(int slot) noexcept;

  // Writes anew what the arbiter says of this client, where a damaged table says anything else. The ticker's.
  void write_again() noexcept;

  // The figures that a policy goes by, from the next launch on.
  void configure(const Settings& settings) noexcept;

  // Decides from the next launch on.
  void use_policy(const schedule::Decider& policy) noexcept;

  // Why the user's policy was switched off; empty: it was not, or the lock cannot be had.
  std::string_view refused_policy() noexcept;

  std::int64_t lead_ns() noexcept;

  // `may_time`: events may stand before the launch (not with a programmatic dependency on the launch before it).
  // `waiver`: the caller is the launcher thread; null: the program's own.
  Pass admit(const predict::Launch& launch, CUstream stream, bool may_time, telemetry::Shard& count,
             const Waiver* waiver = nullptr) noexcept {
    if (table_->latency_clients() == 0) {
      if (primed_.load(std::memory_order_relaxed)) primed_.store(false, std::memory_order_relaxed);
      return {};
    }
    return admit_gated(launch, stream, may_time, count, waiver);
  }

  void submitted(const Pass& pass, CUstream stream, CUresult status) noexcept;

  // Somebody does, and others look whether he still lives.
  bool waits() const noexcept { return announced_.load() > 0; }

  // Whoever waits looks again.
  void wake() noexcept {
    if (registered()) table_->wake_all();
  }

  // What the predictor goes by: trees (null: none; they must outlive the gate) and the memory that CUDA knows.
  void use(const predict::trees::Evaluator* trees, const predict::Allocations* allocations) noexcept;

  // What a kernel would take, said without counting as a launch.
  std::int64_t estimate_ns(const predict::Query& query) noexcept;

  // What was learned and is worth keeping between runs; nothing if the lock cannot be had (at exit, whoever holds it
  // may be gone). Allocates. restore() throws StateError.
  std::vector<std::byte> save() noexcept;
  void restore(std::span<const std::byte> state);

  // The ticker's: tells the arbiter which launch should have ended and has not (`cudasched status` names its client).
  void report_overdue(std::int64_t now_ns) noexcept;

  // Contexts go with their events; called before the driver destroys one. Null: any context of this device.
  void forget_context(CUcontext context) noexcept;

 private:
  static constexpr int kTimers = 16;
  static constexpr std::int64_t kBacklogNs = 100'000'000;    // for what was submitted before the gate came on
  static constexpr std::int64_t kEventGapNs = 1'300;         // what two timing events add to a kernel between them
  static constexpr std::int64_t kSpinNs = 60'000;            // before a waiter sleeps
  static constexpr std::int64_t kPollNs = 4'000;             // between two looks at completion events
  static constexpr std::int64_t kOverdueNs = 1'000'000'000;  // late beyond any error of prediction
  static constexpr std::int64_t kReapNs = 5'000'000;         // between two looks for dead clients, while waiting
  // Between a submission and the next launch, where the launcher has it ready, and where the program must make it: what
  // takes longer is the program's doing.
  static constexpr std::int64_t kPromptNs = 20'000;
  static constexpr std::int64_t kPromptProgramNs = 200'000;

  enum class Phase : std::uint8_t { kFree, kSubmitting, kRecorded, kByClock };

  struct Tracked {
    Phase phase = Phase::kFree;
    int timer = -1;
    std::int64_t due_ns = 0;  // predicted completion, for launches without an event
    CUstream stream = nullptr;
    bool overlapped = false;  // other work was on the device beside it
    predict::Prediction prediction;
  };
  struct Timer {
    CUevent start = nullptr;
    CUevent end = nullptr;
    bool busy = false;
  };
  struct Waiting;  // what a waiting launch remembers between two looks

  Pass admit_gated(const predict::Launch& launch, CUstream stream, bool may_time, telemetry::Shard& count,
                   const Waiver* waiver) noexcept;
  bool ensure_events(CUcontext context) noexcept;
  void destroy_events() noexcept;
  bool wants_residency(const predict::Query& query) noexcept;
  predict::Prediction predict(const predict::Query& query) noexcept;
  bool beside_others(CUstream stream) noexcept;
  void mark_overlapped() noexcept;
  void retire(std::int64_t now_ns) noexcept;
  std::int64_t earliest_due_ns() noexcept;
  void release(int entry, bool measured) noexcept;
  int enter(CUstream stream, const predict::Prediction& prediction, std::int64_t now_ns) noexcept;
  schedule::Snapshot look(const predict::Prediction& prediction, const Waiting& waiting, std::int64_t now_ns) noexcept;
  void learn_lead(const Pass& pass, std::int64_t gpu_ns, std::int64_t now_ns) noexcept;
  bool must_not_wait(const Waiver* waiver) const noexcept;
  void announce() noexcept;
  void leave() noexcept;
  void wait(const schedule::Decision& decision, Waiting& waiting, const Waiver* waiver) noexcept;
  predict::Residency residency(const predict::Launch& launch) const noexcept;
  std::unique_lock<SpinLock> lock_soon() noexcept;

  arbiter::Table* table_ = nullptr;
  std::atomic<int> slot_{-1};
  const LatencyActivity* own_latency_ = nullptr;
  const Graphs* graphs_ = nullptr;
  int sm_count_ = 1;
  std::atomic<bool> primed_{false};  // what is in flight is known since the gate came on

  SpinLock lock_;
  Neighbours neighbours_;
  schedule::Decider decider_;
  schedule::Lead lead_;
  bool lead_adapts_ = false;
  std::int64_t margin_ns_ = 0;
  std::int64_t long_ns_ = 0;
  std::int64_t linger_ns_ = 0;
  bool latency_was_active_ = false;
  std::int64_t latency_seen_ns_ = 0;  // when it last was; 0: never
  std::int64_t admitted_ns_ = 0;      // the last launch,
  std::int64_t submitted_ns_ = 0;     // and when it had reached the driver
  std::int64_t retired_ns_ = 0;       // when completions were last looked for
  std::int64_t dry_since_ns_ = 0;     // since when nothing of ours has been in flight; 0: something is
  std::atomic<int> announced_{0};     // threads that the arbiter's `waiting` bit stands for
  std::uint32_t generation_ = 0;      // see Pass
  schedule::InFlight in_flight_;
  predict::Predictor predictor_;
  CUcontext context_ = nullptr;  // whose events these are
  std::array<Tracked, schedule::InFlight::kEntries> tracked_{};
  std::array<CUevent, schedule::InFlight::kEntries> done_{};
  std::array<Timer, kTimers> timers_{};
};

// PyGILState_Check, where Python is loaded: does the calling thread hold the GIL?
bool holds_gil() noexcept;
void find_gil_check() noexcept;

// Python's other threads run for the length of a scope, where the calling thread holds the GIL.
class GilReleased {
 public:
  GilReleased() noexcept;
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace cudasched::runtime
