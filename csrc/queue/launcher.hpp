// The thread that makes the deferred calls: takes the ring's head, waits at the gate if that is a launch, and calls the
// driver. One a ring.
//
// A long copy between host and device goes in pieces where the gate says so (docs/order.md). Until the last one is
// submitted, the launcher makes operations that nothing orders behind the copy.
//
// The launcher makes each operation's context current and never creates one. It blocks all signals, and runs in relaxed
// capture mode, so that the launcher disturbs no capture of the program's threads. When the ring is empty, the launcher
// spins a little, for an eighth of its time at most. Then it naps, so that a program that goes on launching never pays
// for waking the launcher, and then sleeps.
//
// A launcher may end without stop() (a callback of the driver's may end its thread). The robust mutex that the launcher
// holds for life shows this. From then on the program's own threads run the rest of the ring, in order, and nothing is
// pushed any more. The interrupted operation counts as made, with CUDA_ERROR_UNKNOWN to the thread that pushed it,
// because making an operation twice would be worse.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/histogram.hpp"
#include "base/spin_lock.hpp"
#include "queue/mailbox.hpp"
#include "queue/overtaking.hpp"
#include "queue/ring.hpp"

namespace cudasched::queue {

class Launcher;

// The queue's words to a launch that waits at the gate. The position up to which the gate is open, despite the policy:
// a call that may not wait behind a closed gate waits for that position. And the operations behind the launch.
class Opening {
 public:
  static constexpr std::int64_t kPieceLookNs = 20'000;  // between two looks at copies in pieces

  // Null: the queued operations are not known.
  explicit Opening(const Ring* ring = nullptr, Launcher* launcher = nullptr) noexcept
      : ring_(ring), launcher_(launcher) {}

  // The launcher thread's, before it waits: submits the next pieces of copies under way. True: it is to call again
  // after kPieceLookNs.
  bool submit_pieces() const;

  // Are operations of other streams queued behind the oldest launch, which is the one that waits? The launcher thread
  // asks. True where that is not known.
  bool others_behind() const noexcept { return ring_ == nullptr || ring_->other_streams_behind(); }

  bool is_open_for(Position position) const noexcept { return position <= until_.load(std::memory_order_seq_cst); }
  // True where the gate was closed for `position`.
  bool open_until(Position position) noexcept {
    Position seen = until_.load(std::memory_order_seq_cst);
    while (seen < position) {
      if (until_.compare_exchange_weak(seen, position, std::memory_order_seq_cst)) return true;
    }
    return false;
  }

 private:
  const Ring* ring_;
  Launcher* launcher_;
  std::atomic<Position> until_{0};
};

// The gate, as the launcher sees it. The first two are called on the launcher thread, with the launch's context
// current, around its driver call.
class Admission {
 public:
  virtual ~Admission() = default;
  // Returns once the launch may go, at the latest soon after `opening` is open for `position`. Returns the launch's
  // predicted GPU time; 0: no prediction.
  virtual std::int64_t admit(const Operation& launch, Position position, const Opening& opening) noexcept = 0;
  // `overlap_follows`: the next operation is a launch that may overlap this one; an event between the two would end the
  // overlap.
  virtual void submitted(const Operation& launch, CUresult status, bool overlap_follows) noexcept = 0;
  // Around a graph launch, before the first admit() and after the last submitted(). begin_graph() returns the number of
  // parts; 0: whole. Each part is a graph launch that is admitted and submitted by itself, in order and on the launch's
  // stream.
  virtual std::uint32_t begin_graph(const Operation& launch) noexcept = 0;
  // Null: the part is out of date, because the driver refused a change of it.
  virtual CUgraphExec part(std::uint32_t index) noexcept = 0;
  // Is the whole graph still the launched one? Asked where there are no parts, and where the driver has refused the
  // first, so that no part of the launch has run. False: the graph has a change already that is queued behind the
  // launch.
  virtual bool may_go_whole() noexcept = 0;
  // On another thread where the launcher's own has ended, at any point.
  virtual void end_graph(const Operation& launch, CUresult status) noexcept = 0;
  // Applies a graph's change to its parts, or gives up the change's contents. Makes the necessary context current. On
  // another thread where the launcher's own has ended.
  virtual void change_graph(const Operation& change) noexcept = 0;
  // Copies, the context current as well. Is this one to go in pieces? kToDevice or kToHost: yes, and its direction.
  virtual Operation::Direction direction_of_pieces(const Operation& copy) noexcept = 0;
  // The bytes of the copy that may go now; 0: none yet. `all`: the rest may not wait.
  virtual std::size_t next_piece(const Operation& copy, Operation::Direction direction, bool all) noexcept = 0;
  // After the driver's call, and before the next piece.
  virtual void piece_submitted(const Operation& piece, Operation::Direction direction, CUresult status) noexcept = 0;
  // On any thread: `opening` has changed, and admit() may be asleep.
  virtual void wake() noexcept = 0;
};

// A launcher thread's use of CPU time. Read at any time, by any thread.
struct LauncherTime {
  std::int64_t cpu_ns = 0;     // of the thread, in all
  std::int64_t driver_ns = 0;  // about how long its driver calls took: one in Launcher::kTimed is timed
};

class Launcher {
 public:
  static constexpr std::uint64_t kTimed = 16;
  // Drawn rather than each 16th, which a program's own rhythm may meet.
  static constexpr bool is_timed(Position position) noexcept {
    return ((position * 0x9e37'79b9'7f4a'7c15ULL) >> 32) % kTimed == 0;
  }

  // All must outlive the thread and the operations that it leaves at exit. `push_lock` is the queue's.
  Launcher(Ring& ring, SpinLock& push_lock, Mailbox& mailbox, Admission& admission) noexcept;
  // Ends the thread; not in the product, where the thread lives as long as the process.
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // The thread's behaviour while the ring is empty. kSpins takes a whole core, to measure the cost of sleeping.
  enum class Idle : std::uint8_t { kSleeps, kSpins };

  // False where no thread can be had.
  bool start(Idle idle = Idle::kSleeps) noexcept;
  // A push that finds this true under the push lock will be run.
  bool running() const noexcept { return state_.load(std::memory_order_acquire) == State::kRunning; }
  // Queued operations will never run: not started, stopped, or in a forked child.
  bool off() const noexcept { return state_.load(std::memory_order_acquire) == State::kOff; }

  // Opens the gate up to `position`.
  void open_until(Position position) noexcept;

  // Waits until `position` is passed. Returns at once where nothing will run any more (after stop(), in a forked
  // child).
  void drain(Position position) noexcept;

  // Checks that the launcher is still there. If not, runs its remaining operations on the calling thread, in order;
  // running() tells so from then on. Cheap enough for each "not ready" answer.
  void check() noexcept;

  // Opens the gate, waits until everything is passed, at most for `longest_ns`, and ends the thread. Operations left
  // then are dropped.
  void stop(std::int64_t longest_ns) noexcept;

  // In a forked child: there is no thread and nothing is queued.
  void abandon() noexcept;

  // Nothing where there is no thread.
  LauncherTime time() const noexcept;

  // GPU time of one operation, launch or not: the mean of those that passed the gate lately.
  std::int64_t operation_ns() const noexcept { return operation_ns_.load(std::memory_order_relaxed); }

  // Of timed launches: from the program's call to the driver's.
  const Histogram& queue_waits() const noexcept { return queue_waits_; }

  // A context ends, and another one may get its handle.
  void forget_context() noexcept { context_epoch_.fetch_add(1, std::memory_order_release); }

  // The next pieces of copies under way, as far as the gate lets them go. False: no copy is under way. The launcher
  // thread's.
  bool submit_pieces();

 private:
  enum class State : std::uint8_t { kOff, kRunning, kLeft };  // kLeft: the thread died, and another one runs the rest

  static constexpr std::int64_t kLately = 64;              // operations that operation_ns() goes by
  static constexpr std::int64_t kSpinNs = 30'000;          // on an empty ring, at a time
  static constexpr std::int64_t kSpinShare = 8;            // one part in so many of the time, at most,
  static constexpr std::int64_t kSpinSavedNs = 1'000'000;  // of which so much may be saved up
  static constexpr std::int64_t kNapNs = 40'000;
  static constexpr std::int64_t kNapsNs = 300'000;         // since the last operation; then the launcher sleeps
  static constexpr std::int64_t kSleepNs = 1'000'000'000;  // nothing depends on waking
  static constexpr std::int64_t kLookNs = 20'000'000;      // between two checks of a waiter that the launcher is there

  // Functions that lead to a driver call are not noexcept: pthread_exit() unwinds.
  static void* run(void* self);
  void work();
  void await_work();
  void consume(const Operation& operation, bool gated);
  void pass(bool gated) noexcept;
  CUresult submit(const Operation& operation, Position position, bool at_gate, bool is_first = true,
                  bool is_last = true);
  CUresult submit_graph(const Operation& operation, Position position, bool at_gate);
  CUresult submit_copy(Operation& copy, Position position);
  bool goes_in_pieces(const Operation& copy, Position position) noexcept;
  bool make_next(Overtaking& overtaking);
  CUresult make_current(CUcontext context) noexcept;
  void run_what_is_left();

  Ring& ring_;
  SpinLock& push_lock_;
  Mailbox& mailbox_;
  Admission& admission_;
  Opening opening_{&ring_, this};
  std::array<Position, 2> in_pieces_{};  // copies under way, by direction; 0: none

  pthread_mutex_t alive_;  // held by the thread for life; afterwards by the thread that runs the rest
  pthread_t thread_{};
  bool started_ = false;
  std::atomic<State> state_{State::kOff};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> at_gate_{false};
  std::atomic<std::uint32_t> settled_{0};  // the new thread holds the mutex

  Idle idle_ = Idle::kSleeps;  // set before the start
  std::atomic<std::int64_t> driver_ns_{0};
  std::atomic<std::int64_t> operation_ns_{0};
  std::int64_t admitted_ns_ = 0;  // of the operation under way
  Histogram queue_waits_;
  std::atomic<Position> begun_{0};  // whose driver call is, or was, under way
  std::int64_t spin_saved_ns_ = kSpinSavedNs;
  std::int64_t spin_counted_ns_ = 0;  // when it was last added to
  CUcontext current_ = nullptr;       // of the launcher
  std::uint64_t current_epoch_ = 0;
  std::atomic<std::uint64_t> context_epoch_{1};
};

inline bool Opening::submit_pieces() const { return launcher_ != nullptr && launcher_->submit_pieces(); }

}  // namespace cudasched::queue
