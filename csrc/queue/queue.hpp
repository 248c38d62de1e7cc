// The launch queue of one device in one process. A best-effort program's calls go into a ring with copies of their
// data, and the program's threads return at once. A launcher thread makes the calls when the gate opens. docs/order.md
// has the rules.
//
// A call is treated in one of three ways (csrc/hook/entry_points.txt says which):
//   deferred   push_...() says true: done, the program gets success. False: as drained, and a launch is then gated.
//   drained    drain(caller, before(...), ...), then the driver on the calling thread.
//   direct     nothing.
// take_error() is called first in each call that reports errors of work: a deferred call's error is due there.
//
// The queue never decides which work is best-effort, never sees a capturing stream's calls, and knows no policy. Every
// function may be called from any thread; none throws. Once start() has returned, none allocates, but for the first
// call on a stream, and none locks where nothing is queued. lock_ is held for the bookkeeping of one call, never across
// a driver call or a wait. A signal handler that interrupted the lock's holder does without the lock: the handler's
// calls are not deferred, and wait for the whole ring.
//
// Facts about streams, events, functions and graphs are in the process's registry (driver/registry.hpp).
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/spin_lock.hpp"
#include "queue/call.hpp"
#include "queue/launcher.hpp"
#include "queue/mailbox.hpp"
#include "queue/operation.hpp"
#include "queue/order.hpp"
#include "queue/ring.hpp"

namespace cudasched::queue {

class Queue {
 public:
  using GilCheck = bool (*)() noexcept;

  // `admission` lives as long as the process does. `holds_gil`: does the calling thread?
  Queue(Admission& admission, GilCheck holds_gil, std::uint32_t slots = Ring::kSlots,
        std::uint32_t arena_bytes = Ring::kArenaBytes) noexcept;

  // ---- life
  // False where there is no memory or no thread: nothing is ever deferred then.
  bool start(Launcher::Idle idle = Launcher::Idle::kSleeps) noexcept;
  // The ordinal of the queue's device, before the first push: calls on streams of other devices are not deferred. -1:
  // any device.
  void serve(int device) noexcept { device_ = device; }
  int device() const noexcept { return device_; }
  // Calls may be deferred.
  bool active() const noexcept {
    return accepting_.load(std::memory_order_relaxed) && launcher_.running() && !mailbox_.broken();
  }
  bool empty() const noexcept { return ring_.empty(); }
  // The number of operations in the queue.
  std::uint64_t queued() const noexcept {
    const Position passed = ring_.passed();  // first: never more than pushed()
    return ring_.pushed() - passed;
  }
  // About the GPU time of the queued operations, if they are like those before.
  std::int64_t queued_ns() const noexcept { return static_cast<std::int64_t>(queued()) * launcher_.operation_ns(); }
  // After an internal fault: nothing is deferred from here on, and the gate is open for the ring.
  void fail() noexcept;
  // At exit: as fail(), then waits for the queued operations, at most for `longest_ns`.
  void stop(std::int64_t longest_ns) noexcept;
  // In a forked child: the queue is empty and stays so.
  void abandon() noexcept;
  // Regularly, from a thread that may make driver calls: is the launcher still there?
  void check() noexcept { launcher_.check(); }

  LauncherTime launcher_time() const noexcept { return launcher_.time(); }
  const Histogram& queue_waits() const noexcept { return launcher_.queue_waits(); }
  // The process has latency work from here on: its own threads may not wait behind the gate any more.
  void latency_came() noexcept;

  // ---- deferred
  bool push_kernel(const Call& call) noexcept;
  bool push_graph(const Call& call) noexcept;
  // A fill, copy, record, wait, host function or stream-ordered free. A copy's host memory must be pinned: the driver
  // reads pageable memory before the call returns.
  bool push_call(const Caller& caller, const Operation& call) noexcept;
  // For the slices of an executable graph, behind its queued operations: `bytes` are copied.
  bool push_change(const Caller& caller, CUgraphExec exec, CUcontext context,
                   std::span<const std::byte> bytes) noexcept;
  // Destroys an event that the program may use no more, created in `context`; behind its queued operations.
  bool push_destroy(const Caller& caller, CUevent event, CUcontext context) noexcept;

  // ---- drained
  // The position that a call of this scope waits for; 0: none.
  Position before(Scope scope, CUstream stream, CUevent event = nullptr, CUevent other = nullptr,
                  CUgraphExec exec = nullptr) noexcept;
  void drain(const Caller& caller, Position position, Waiter::For what) noexcept;
  // How often that waited, by Waiter::For.
  std::uint64_t drains(std::size_t what) const noexcept { return drains_[what].load(std::memory_order_relaxed); }

  // Answers of queries without draining: the driver is not asked where these return true. Latency work that asks waits
  // for the work: the gate opens.
  bool stream_not_ready(const Caller& caller, CUstream stream) noexcept;
  bool event_not_ready(const Caller& caller, CUevent event) noexcept;

  // ---- news for the queue, active or not; each before the driver call that it is about, unless marked "after"
  void kernel_launched(const Call& call) noexcept;  // after; directly and with success
  void event_destroyed(CUevent event) noexcept;     // drained
  void stream_destroyed(CUstream stream) noexcept;  // drained
  void context_gone() noexcept;                     // drained; reset or destroyed

  // The error of a deferred call that is due on this thread; each is handed over once.
  CUresult take_error(unsigned thread) noexcept { return mailbox_.take(thread); }
  bool has_error(unsigned thread) const noexcept { return mailbox_.holds(thread); }

  Position pushed() const noexcept { return ring_.pushed(); }
  Position passed() const noexcept { return ring_.passed(); }

 private:
  template <typename May, typename Fill>
  bool push(const Caller& caller, CUstream stream, Waiter::For wait, May&& may, Fill&& fill) noexcept;
  template <typename May, typename Fill>
  bool push_locked(const Caller& caller, CUcontext context, Waiter::For wait, May&& may, Fill&& fill) noexcept;
  enum class StreamOwner : std::uint8_t {
    kOurs,
    kOthers,
    kUnknown
  };  // the queue's device's, another's, the driver refuses to tell
  StreamOwner kind_of(CUstream stream, StreamKind& kind) const noexcept;
  Waiter waiter(const Caller& caller, Waiter::For what) const noexcept;
  bool opens_the_gate(const Caller& caller, Waiter::For what) const noexcept;
  void open_for(const Caller& caller, Position position, Waiter::For what) noexcept;
  bool answer_not_ready(const Caller& caller, Position position) noexcept;

  const GilCheck holds_gil_;
  int device_ = -1;
  SpinLock lock_;
  Order order_;
  Mailbox mailbox_;
  std::array<std::atomic<std::uint64_t>, kDrainKinds> drains_{};
  Ring ring_;
  Launcher launcher_;
  std::atomic<bool> accepting_{false};
  std::atomic<bool> process_has_latency_{false};
  static constexpr unsigned kAsksThatWait = 1000;  // for one position in a row
  std::atomic<Position> asked_{0};                 // for by the last query that was answered with NOT_READY,
  std::atomic<unsigned> asked_times_{0};           // so often again
  std::atomic<Position> claimed_{0};  // waits that stay behind the gate only as long as the process has no latency work
};

}  // namespace cudasched::queue
