// A thread that makes passes over what others leave for it, until it is told to end: one last pass, then it is over.
// start() and stop() are called under one lock of the caller's.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

#include "base/blocked_signals.hpp"

namespace cudasched::telemetry {

class PassThread {
 public:
  // pass(last) returns the time until the next pass, in ns, and does not throw. False: no thread can be made.
  template <typename Pass>
  bool start(const char* name, std::int64_t first_ns, Pass pass) noexcept {
    ending_ = ended_ = false;
    try {
      const BlockedSignals blocked;
      std::thread([this, name, first_ns, pass = std::move(pass)] {
        pthread_setname_np(pthread_self(), name);
        std::int64_t wait_ns = first_ns;
        for (bool last = false; !last; wait_ns = pass(last)) last = wait(wait_ns);
        const std::scoped_lock done(lock_);
        ended_ = true;
        wake_.notify_all();
      }).detach();
      return true;
    } catch (...) {
      ended_ = true;
      return false;
    }
  }

  // Returns after the last pass.
  void stop() noexcept {
    std::unique_lock waiting(lock_);
    ending_ = true;
    wake_.notify_all();
    wake_.wait(waiting, [this] { return ended_; });
  }

 private:
  bool wait(std::int64_t longest_ns) noexcept {
    std::unique_lock waiting(lock_);
    wake_.wait_for(waiting, std::chrono::nanoseconds(longest_ns), [this] { return ending_; });
    return ending_;
  }

  std::mutex lock_;
  std::condition_variable wake_;
  bool ending_ = false;
  bool ended_ = true;
};

}  // namespace cudasched::telemetry
