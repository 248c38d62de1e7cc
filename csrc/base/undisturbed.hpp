// For work on a program's thread that opens, writes or waits: the first launch, the end, a line of the log. Two events
// would end the program there:
// - pthread_cancel() unwinds the stack from within open, write and waits, and functions that may not throw end the
//   process then.
// - A failed write raises a signal: SIGPIPE where a pipe's reader has left, SIGXFSZ beyond the limit of a file's size.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <cerrno>
#include <initializer_list>

namespace cudasched {

// For the length of a scope, on the calling thread: a cancellation waits, and signals of failed writes are taken back.
// One that was pending before is the program's own.
class Undisturbed {
 public:
  Undisturbed() noexcept {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancellation_);
    sigset_t pending;
    sigset_t both;
    sigemptyset(&pending);
    sigemptyset(&both);
    sigemptyset(&taken_back_);
    sigpending(&pending);
    for (const int number : {SIGPIPE, SIGXFSZ}) {
      sigaddset(&both, number);
      if (sigismember(&pending, number) != 1) sigaddset(&taken_back_, number);
    }
    pthread_sigmask(SIG_BLOCK, &both, &before_);
  }
  ~Undisturbed() {
    const timespec at_once{};
    while (sigtimedwait(&taken_back_, nullptr, &at_once) > 0 || errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    pthread_setcancelstate(cancellation_, nullptr);
  }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  sigset_t taken_back_;
  sigset_t before_;
  int cancellation_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace cudasched
