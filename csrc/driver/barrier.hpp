// Between this process's driver calls that may use device memory and the thread that moves such memory away
// (runtime/memory/pager.hpp). A call enters, goes to the driver, and leaves. The mover closes the barrier, waits until
// no call is inside and the GPU is idle, and moves; calls wait until the mover opens the barrier again.
//
// A guard (hook/guards.cpp) jumps to the driver and cannot leave: its thread counts as inside until that thread's next
// call, or its end. A call whose effect a move cannot follow (memory known to other processes or contexts) pins: the
// barrier does not close any more.
//
// Threads: any. Not armed, an entry is one relaxed load; armed, two atomic additions to one word.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

namespace cudasched::driver {

class Barrier {
 public:
  // How long a call waits for a mover that waits for the GPU; then the call ends the attempt.
  static constexpr std::int64_t kPatienceNs = 1'000'000'000;

  // Before the process's first driver call.
  void arm() noexcept;
  bool armed() const noexcept { return armed_.load(std::memory_order_relaxed); }

  // Waits while the barrier is closed. False: the process ends while its memory is away, and the call must fail.
  bool enter() noexcept { return !armed() || enter(/*stays=*/false); }
  void leave() noexcept {
    if (armed()) [[unlikely]]
      left();
  }
  // The same for a call that will not leave.
  bool jump() noexcept { return !armed() || enter(/*stays=*/true); }
  // False, without waiting, where the barrier is closed.
  bool try_enter() noexcept;
  // The thread makes another call: it has returned from the one that it jumped to.
  void settle() noexcept {
    if (thread.jumped) [[unlikely]]
      has_returned();
  }
  // Waits while the barrier is closed, and stays outside.
  void wait() noexcept {
    if (armed()) [[unlikely]]
      wait_outside();
  }
  void pin() noexcept { pinned_.store(true); }
  bool pinned() const noexcept { return pinned_.load(); }

  // ---- the mover's, one thread at a time
  // False: a call stayed inside for `longest_ns`, or the memory is pinned; the barrier is open.
  bool close(std::int64_t longest_ns) noexcept;
  // The GPU is idle: from here on no call ends the attempt. False: one did.
  bool shut() noexcept;
  void open() noexcept;

  bool closed() const noexcept { return word_.load() != kOpen; }
  // Calls wait until it opens.
  bool waited_for() const noexcept { return waiting_.load() != 0; }
  // At exit: calls that wait, and later ones, fail where the barrier is shut.
  void end() noexcept;
  void reset_in_child() noexcept;

 private:
  enum Word : std::uint32_t { kOpen, kClosing, kShut, kEnded };

  struct Thread {
    std::int16_t depth = 0;
    bool jumped = false;
  };
  static constinit thread_local Thread thread __attribute__((tls_model("initial-exec")));

  bool enter(bool stays) noexcept;
  void left() noexcept;
  void wait_outside() noexcept;
  bool await() noexcept;
  bool awaited() noexcept;
  void has_returned() noexcept;
  bool change(std::uint32_t from, std::uint32_t to) noexcept;

  std::atomic<bool> armed_{false};
  std::atomic<bool> pinned_{false};
  std::atomic<std::uint32_t> word_{kOpen};
  std::atomic<std::int64_t> inside_{0};
  std::atomic<int> waiting_{0};
  std::atomic<std::int64_t> closing_ns_{0};  // since when
};

inline constinit Barrier the_barrier;

inline Barrier& barrier() noexcept { return the_barrier; }

// A call inside the barrier, for the length of a scope.
class Crossing {
 public:
  Crossing() noexcept : inside_(barrier().enter()) {}
  ~Crossing() {
    if (inside_) barrier().leave();
  }
  Crossing(const Crossing&) = delete;
  Crossing& operator=(const Crossing&) = delete;
  explicit operator bool() const noexcept { return inside_; }

 private:
  bool inside_;
};

// Makes a call inside the barrier.
template <typename Call>
CUresult crossed(Call&& call) noexcept(noexcept(call())) {
  const Crossing inside;
  return inside ? call() : CUDA_ERROR_DEINITIALIZED;
}

}  // namespace cudasched::driver
