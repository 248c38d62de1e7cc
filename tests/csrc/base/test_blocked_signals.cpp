#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <thread>

#include "base/blocked_signals.hpp"

namespace cudasched {
namespace {

sigset_t mask_of_a_thread() {
  sigset_t mask;
  sigemptyset(&mask);
  std::thread([&] { pthread_sigmask(SIG_BLOCK, nullptr, &mask); }).join();
  return mask;
}

TEST(BlockedSignals, AThreadOfOursGetsNoneOfThePrograms) {
  sigset_t mask;
  {
    const BlockedSignals blocked;
    mask = mask_of_a_thread();
  }
  for (const int number : {SIGINT, SIGTERM, SIGALRM, SIGPROF, SIGUSR1, SIGCHLD, SIGRTMIN, SIGRTMAX}) {
    EXPECT_EQ(sigismember(&mask, number), 1) << number;
  }
}

TEST(BlockedSignals, AFaultOfItsOwnReachesTheProgramsHandler) {
  sigset_t mask;
  {
    const BlockedSignals blocked;
    mask = mask_of_a_thread();
  }
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
    EXPECT_EQ(sigismember(&mask, number), 0) << number;
  }
}

TEST(BlockedSignals, TheCallersMaskIsAsItWas) {
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  { const BlockedSignals blocked; }
  sigset_t after;
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (int number = 1; number <= SIGRTMAX; ++number) {
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
  }
}

}  // namespace
}  // namespace cudasched
