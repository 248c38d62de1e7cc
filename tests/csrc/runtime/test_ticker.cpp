#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "hooked_driver.hpp"
#include "runtime/ticker.hpp"
#include "runtime/ticker_sleep.hpp"

namespace cudasched::test {
namespace {

constexpr std::int64_t kForEver = 3'600 * kNsPerSecond;

TEST(TickerSleep, DoesNotSleepOnceSomethingHasBegun) {
  runtime::TickerSleep sleep;
  sleep.wake();
  sleep.sleep_deeply(kForEver, [] { return false; });  // or it hangs
}

TEST(TickerSleep, IsWokenHoweverTheTwoMeet) {
  runtime::TickerSleep sleep;
  std::atomic<int> begun{0};
  std::atomic<int> noticed{0};
  std::thread ticker([&] {
    for (int i = 1; i <= 2'000; ++i) {
      while (begun.load() < i) sleep.sleep_deeply(kForEver, [&] { return begun.load() < i; });
      noticed = i;
    }
  });
  for (int i = 1; i <= 2'000; ++i) {
    begun = i;
    sleep.wake();
    while (noticed.load() < i) std::this_thread::yield();
  }
  ticker.join();
}

TEST(Ticker, WhereNoThreadCanBeStartedTheLimitIsNamedAndTheExitWaitsForNone) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // The limit does not hold for root.
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) _exit(2);
    const rlimit none{0, 0};
    if (setrlimit(RLIMIT_NPROC, &none) != 0) _exit(2);
    runtime::Ticker ticker;
    try {
      ticker.start();
    } catch (const Error& error) {
      alarm(60);
      ticker.finish(kForEver);  // as _exit() does: there is no thread to wait for
      _exit(std::string(error.what()).find("ulimit -u") != std::string::npos ? 0 : 3);
    }
    _exit(4);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A client that has been silent for long is believed from the moment when it begins something.
class SignOfLife : public ::testing::Test {
 protected:
  SignOfLife() { request(); }

  void request() {
    const InRegion region(CUDASCHED_LATENCY);
    Program::check(program_.launch(1));
    program_.synchronize();
  }

  arbiter::Slot& client() { return table().slot(__builtin_ctzll(table().latency_clients())); }
  arbiter::Table& table() { return HookedDriver::instance().table(); }

  Program program_;
};

TEST_F(SignOfLife, IsGivenAtTheEntryOfARegionAndWithAHint) {
  for (const bool hint : {false, true}) {
    client().heartbeat_ns = 1;
    const std::int64_t before = now_ns();
    if (hint) {
      ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
      EXPECT_GE(client().heartbeat_ns, before);
    } else {
      const InRegion region(CUDASCHED_LATENCY);
      EXPECT_GE(client().heartbeat_ns, before);
    }
  }
}

}  // namespace
}  // namespace cudasched::test
