#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "python.hpp"
#include "runtime/gate.hpp"
#include "runtime/host_backoff.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kForEver = 3'600 * kNsPerSecond;

bool backs_off(const HostBackoff& host_backoff) {
  std::atomic<std::uint64_t> count{0};
  host_backoff.back_off(count, nullptr);
  return count == 1;
}

TEST(HostBackoff, NoThreadPausesWhileNoRegionIsOpen) {
  HostBackoff host_backoff;
  host_backoff.configure(kForEver, false);
  EXPECT_FALSE(backs_off(host_backoff));
  host_backoff.enter();
  host_backoff.leave();
  EXPECT_FALSE(backs_off(host_backoff));
}

TEST(HostBackoff, LastsUntilTheLastRegionIsLeft) {
  HostBackoff host_backoff;
  host_backoff.configure(kForEver, false);
  host_backoff.enter();
  host_backoff.enter();
  std::atomic<std::uint64_t> count{0};
  std::thread best_effort([&] {
    host_backoff.back_off(count, nullptr);
    EXPECT_FALSE(host_backoff.requested());
  });
  while (count == 0) std::this_thread::yield();
  host_backoff.leave();
  EXPECT_TRUE(host_backoff.requested());
  host_backoff.leave();
  best_effort.join();  // or it hangs
}

// The thread in the region may be waiting for the one that pauses.
TEST(HostBackoff, IsBoundedInARequestThatDoesNotEnd) {
  HostBackoff host_backoff;
  host_backoff.configure(20 * kNsPerMs, false);
  host_backoff.enter();
  EXPECT_TRUE(backs_off(host_backoff));
  EXPECT_TRUE(host_backoff.requested());
  // Not once more in the same request.
  EXPECT_FALSE(backs_off(host_backoff));
  host_backoff.leave();
  host_backoff.enter();
  EXPECT_TRUE(backs_off(host_backoff));
  host_backoff.reset(0);
  EXPECT_FALSE(backs_off(host_backoff));
}

// A request that goes on after it has waited for the GPU, as a decoder does for each token, does not wait for a thread.
TEST(HostBackoff, LastsForAllOfARequestThatGoesOnAndIsBoundedForEachLaunch) {
  HostBackoff host_backoff;
  host_backoff.configure(kNsPerMs, false);
  host_backoff.enter();
  host_backoff.renew(now_ns() + kForEver);  // again and again
  for (int launch = 0; launch < 2; ++launch) {
    const std::int64_t began = now_ns();
    EXPECT_TRUE(backs_off(host_backoff));
    EXPECT_GT(now_ns() - began, 5 * kNsPerMs) << "several times the bound";
  }
  host_backoff.renew(now_ns() - 2 * kNsPerMs);
  EXPECT_FALSE(backs_off(host_backoff));
}

// In the gaps of requests best effort goes on from what is queued.
TEST(HostBackoff, WhereTheRingFeedsTheGpuAThreadThatHasToFillItDoesNotPause) {
  HostBackoff host_backoff;
  host_backoff.configure(kForEver, /*while_fed=*/true);
  host_backoff.enter();
  EXPECT_FALSE(backs_off(host_backoff));
}

TEST(HostBackoff, CanBeSwitchedOff) {
  HostBackoff host_backoff;
  host_backoff.configure(0, false);
  host_backoff.enter();
  EXPECT_FALSE(backs_off(host_backoff));
}

TEST(HostBackoff, NeverPausesAThreadThatHoldsTheInterpretersLock) {
  find_gil_check();
  HostBackoff host_backoff;
  host_backoff.configure(kForEver, false);
  host_backoff.enter();
  test::gil_held() = true;
  EXPECT_FALSE(backs_off(host_backoff));
  test::gil_held() = false;
}

}  // namespace
}  // namespace cudasched::runtime
