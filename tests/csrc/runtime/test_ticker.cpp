#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "hooked_driver.hpp"
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

// Whoever has been silent for long is believed from the moment on when it begins something.
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
