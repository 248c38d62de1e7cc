// The host program's signals are for its own threads: one of ours starts while the calling thread blocks all signals,
// and never gets any. Signals of a thread's own faults stay unblocked. Where one is blocked, the kernel ends the
// process at once, and the program's handler (Python's faulthandler, a crash reporter) does not report the fault.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace cudasched {

// For the length of a scope, on the calling thread. A thread that is started meanwhile inherits the blocked signals.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace cudasched
