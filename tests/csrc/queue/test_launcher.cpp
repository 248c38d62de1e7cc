// The launcher's life: what thread it is, how it sleeps, how it ends, and what happens when it is gone.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "fake_driver.hpp"
#include "queue/launcher.hpp"

namespace cudasched::queue {
namespace {

using testing::ElementsAre;
using For = Waiter::For;

TEST_F(QueueTest, TheLauncherBlocksSignalsAndDisturbsNoCapture) {
  sigset_t seen{};
  CUstreamCaptureMode mode{};
  driver_.on_call = [&](const DriverCall&) {
    pthread_sigmask(SIG_BLOCK, nullptr, &seen);
    mode = FakeDriver::capture_mode();
    return CUDA_SUCCESS;
  };
  ASSERT_TRUE(launch());
  finish();
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1}) EXPECT_EQ(sigismember(&seen, signal), 1);
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
  // Here nothing has changed.
  sigset_t mine{};
  pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  EXPECT_EQ(sigismember(&mine, SIGUSR1), 0);
  EXPECT_EQ(FakeDriver::capture_mode(), CU_STREAM_CAPTURE_MODE_GLOBAL);
}

TEST_F(QueueTest, EachOperationRunsInItsOwnContextOnOneThread) {
  ASSERT_TRUE(launch(kStream, {1, kContext, false}));
  ASSERT_TRUE(launch(kStream, {1, kContext, false}));
  ASSERT_TRUE(launch(kStream, {1, kOtherContext, false}));
  ASSERT_TRUE(launch(kStream, {1, kContext, false}));
  finish();
  std::vector<CUcontext> contexts;
  std::vector<pid_t> threads;
  for (const DriverCall& call : driver_.made()) {
    contexts.push_back(call.context);
    threads.push_back(call.thread);
  }
  EXPECT_THAT(contexts, ElementsAre(kContext, kContext, kOtherContext, kContext));
  EXPECT_EQ(std::count(threads.begin(), threads.end(), threads[0]), 4);
  EXPECT_NE(threads[0], static_cast<pid_t>(syscall(SYS_gettid)));
  EXPECT_EQ(driver_.context_switches, 3);
}

// A context's handle may come back for another one: the launcher makes it current anew.
TEST_F(QueueTest, AContextThatWentIsMadeCurrentAnew) {
  ASSERT_TRUE(launch());
  finish();
  queue().context_gone();
  ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(driver_.context_switches, 2);
}

TEST_F(QueueTest, StreamFlagsAreAskedOnce) {
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(driver_.flag_queries, 1);
  driver::registry().forget(kStream);
  ASSERT_TRUE(launch());
  EXPECT_EQ(driver_.flag_queries, 2);
}

TEST_F(QueueTest, OnlyLaunchesWaitAtTheGate) {
  gate_.close();
  ASSERT_TRUE(queue().push_call(caller_, fill_of({0x1000, 0, 10, 1, 7, 1}, false, kStream)));
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  queue().drain(caller_, queue().pushed(), For::kSynchronise);
  EXPECT_EQ(driver_.count(), 2U);
  EXPECT_EQ(gate_.asked(), 0);
}

TEST_F(QueueTest, AnIdleLauncherCostsNoCpu) {
  ASSERT_TRUE(launch());
  finish();
  // It goes to sleep sooner or later; from then on the process's CPU time stands still (but for our own looking).
  EXPECT_TRUE(eventually([] {
    rusage before{};
    getrusage(RUSAGE_SELF, &before);
    std::this_thread::sleep_for(50ms);
    rusage after{};
    getrusage(RUSAGE_SELF, &after);
    const auto used = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1'000'000 +
                      (after.ru_utime.tv_usec - before.ru_utime.tv_usec);
    return used < 5'000;
  }));
  ASSERT_TRUE(launch());  // and it wakes
  finish();
  EXPECT_EQ(driver_.count(), 2U);
}

class SpinningTest : public QueueTest {
 protected:
  SpinningTest() : QueueTest(64, 1U << 16, Launcher::Idle::kSpins) {}
};

// One that sleeps would take minutes to use so much.
TEST_F(SpinningTest, AnIdleLauncherThatSpinsUsesItsCore) {
  ASSERT_TRUE(launch());
  finish();
  const std::int64_t before = queue().launcher_time().cpu_ns;
  EXPECT_TRUE(eventually([&] { return queue().launcher_time().cpu_ns > before + 200 * kNsPerMs; }));
  ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(driver_.count(), 2U);
  queue().stop(60 * kNsPerSecond);
  EXPECT_FALSE(queue().active());
}

// ---- exit

TEST_F(QueueTest, StopOpensTheGateAndDrains) {
  block();
  ASSERT_TRUE(launch());
  queue().stop(60 * kNsPerSecond);
  EXPECT_EQ(driver_.count(), 2U);
  EXPECT_FALSE(queue().active());
  EXPECT_FALSE(launch());  // passes through from here on
  EXPECT_EQ(queue().before(Scope::kEnd, nullptr), 0U);
}

TEST_F(QueueTest, StopWaitsNoLongerThanItIsTold) {
  std::atomic<bool> release{false};
  driver_.on_call = [&](const DriverCall&) {
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    return CUDA_SUCCESS;
  };
  ASSERT_TRUE(launch());
  ASSERT_TRUE(launch());
  queue().stop(kNsPerMs);  // a driver call that does not return
  // Nothing waits for what will never run.
  queue().drain(caller_, queue().pushed(), For::kSynchronise);
  EXPECT_FALSE(queue().stream_not_ready(caller_, kStream));
  release = true;
  queue_.reset();  // the launcher still reads `release`
}

TEST_F(QueueTest, AfterAFaultWhatIsQueuedRunsAndNothingIsDeferred) {
  block();
  queue().fail();
  EXPECT_FALSE(launch());
  queue().drain(caller_, queue().pushed(), For::kSynchronise);
  EXPECT_EQ(driver_.count(), 1U);
}

// ---- a launcher that is gone

enum class End { kUnwinding, kAtOnce };

class LostLauncherTest : public QueueTest, public testing::WithParamInterface<End> {
 protected:
  // The launcher's thread ends in the middle of the first driver call.
  void lose() {
    gate_.close();
    const auto us = static_cast<pid_t>(syscall(SYS_gettid));
    driver_.on_call = [this, us, first = true](const DriverCall& call) mutable {
      if (!first || call.thread == us) return CUDA_SUCCESS;
      first = false;
      gone_ = true;
      if (GetParam() == End::kAtOnce) syscall(SYS_exit, 0);
      pthread_exit(nullptr);
      return CUDA_SUCCESS;
    };
    ASSERT_TRUE(launch(kStream, {7, kContext, false}));
    ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
    ASSERT_TRUE(launch(kOtherStream, {1, kOtherContext, false}));
    gate_.open();
    ASSERT_TRUE(eventually([&] { return gone_.load(); }));
  }
  std::atomic<bool> gone_{false};
};

TEST_P(LostLauncherTest, TheProgramsThreadsRunWhatItLeftInOrder) {
  lose();
  FakeDriver::current() = kContext;
  queue().drain(caller_, queue().pushed(), For::kSynchronise);
  EXPECT_THAT(driver_.story(), ElementsAre("record e1", "kernel f2"));
  EXPECT_EQ(driver_.made()[1].context, kOtherContext);
  EXPECT_EQ(FakeDriver::current(), kContext);
  EXPECT_EQ(FakeDriver::capture_mode(), CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_FALSE(queue().active());
  EXPECT_FALSE(launch());
  EXPECT_TRUE(queue().empty());
  // What it was in the middle of is not made twice, and is owned up to.
  EXPECT_EQ(queue().take_error(9), CUDA_ERROR_UNKNOWN);
}

TEST_P(LostLauncherTest, AQueryNoticesToo) {
  lose();
  EXPECT_TRUE(eventually([&] { return !queue().event_not_ready(caller_, kEvent); }));
  EXPECT_EQ(driver_.count(), 2U);
}

TEST_P(LostLauncherTest, ARegularLookNoticesToo) {
  lose();
  EXPECT_TRUE(eventually([&] {
    queue().check();
    return !queue().active();
  }));
  EXPECT_EQ(driver_.count(), 2U);
}

// The sanitizers lose their way when a thread ends at once: they learn of ends by unwinding.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
INSTANTIATE_TEST_SUITE_P(Ends, LostLauncherTest, testing::Values(End::kUnwinding));
#else
INSTANTIATE_TEST_SUITE_P(Ends, LostLauncherTest, testing::Values(End::kUnwinding, End::kAtOnce));
#endif

// ---- fork

TEST_F(QueueTest, AForkedChildHasAnEmptyQueueAndNoLauncher) {
  block();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    queue().abandon();
    bool good = !queue().active() && queue().empty();
    good = good && !queue().push_call({1, kContext, false}, record_of(kEvent, kStream, 0));
    queue().drain({1, kContext, false}, 100, For::kSynchronise);  // returns
    good = good && queue().before(Scope::kEnd, nullptr) == 0;
#if !defined(__SANITIZE_THREAD__)  // it lets a forked child start no threads
    // Scheduling starts anew with the child's own calls.
    FakeDriver driver;
    FakeGate gate;
    auto* anew = new Queue(gate, +[]() noexcept { return false; }, 8, 4096);
    good = good && anew->start() && anew->push_call({1, kContext, false}, record_of(kEvent, kStream, 0));
    anew->drain({1, kContext, false}, anew->pushed(), For::kSynchronise);
    good = good && driver.count() == 1;
    anew->stop(kNsPerSecond);
#endif
    _exit(good ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  finish();
  EXPECT_EQ(driver_.count(), 1U);
}

// ---- all at once

// Threads launch, record, wait, query and drain over a small ring while the gate opens and closes: nothing is lost,
// each thread's calls come in its order, and the driver sees them one at a time.
class StressTest : public QueueTest {
 protected:
  StressTest() : QueueTest(32, 1U << 12) {}
};

TEST_F(StressTest, NothingIsLostOrReordered) {
  constexpr unsigned kThreads = 4;
  constexpr std::uint64_t kEach = 2'000;
  std::atomic<int> inside{0};
  driver_.on_call = [&](const DriverCall&) {
    EXPECT_EQ(inside.fetch_add(1), 0);
    inside.fetch_sub(1);
    return CUDA_SUCCESS;
  };
  queue().kernel_launched(plain());
  std::atomic<bool> done{false};
  std::thread gatekeeper([&] {
    while (!done) {
      gate_.close();
      std::this_thread::sleep_for(100us);
      gate_.open();
      std::this_thread::sleep_for(100us);
    }
  });
  std::vector<std::thread> threads;
  for (unsigned thread = 1; thread <= kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const Caller caller{thread, kContext, thread == kThreads};
      const auto stream = handle<CUstream>(0x1000 * thread + thread % 2);
      const auto event = handle<CUevent>(0x1000 * thread);
      driver::registry().created(event, CU_EVENT_DISABLE_TIMING);
      for (std::uint64_t i = 0; i < kEach; ++i) {
        Call call = plain(stream);
        call.grid[0] = static_cast<unsigned>(i + 1);
        call.grid[1] = thread;
        ASSERT_TRUE(push(call, caller));
        if (i % 50 == 0) {
          ASSERT_TRUE(queue().push_call(caller, record_of(event, stream, 0)));
          const Position position = queue().before(Scope::kEvent, nullptr, event);
          if (i % 100 == 0) queue().drain(caller, position, For::kSynchronise);
          while (queue().event_not_ready(caller, event)) std::this_thread::yield();
          EXPECT_GE(queue().passed(), position);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  finish();
  done = true;
  gatekeeper.join();
  std::array<std::uint64_t, kThreads + 1> next{};
  std::size_t launches = 0;
  for (const DriverCall& call : driver_.made()) {
    if (call.name != "kernel") continue;
    ++launches;
    EXPECT_EQ(call.values[0], ++next[call.values[1]]);
  }
  EXPECT_EQ(launches, kThreads * kEach);
}

}  // namespace
}  // namespace cudasched::queue
