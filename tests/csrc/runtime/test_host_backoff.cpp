#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "python.hpp"
#include "queue/fake_driver.hpp"
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

class FedBackoff : public queue::QueueTest {
 protected:
  FedBackoff() : queue::QueueTest(/*slots=*/256) {
    host_backoff_.configure(kForEver, /*while_fed=*/true);
    host_backoff_.enter();
  }
  // Launches take so long from here on, as far as is known.
  void take(std::int64_t ns) {
    gate_.predict(ns);
    for (int i = 0; i < 1'000; ++i) {
      ASSERT_TRUE(launch());
      finish();
    }
    block();
  }
  void fill(std::uint64_t operations) {
    while (queue().queued() < operations) ASSERT_TRUE(launch());
  }
  // A thread pauses, until the ring is emptied.
  bool pauses() {
    const std::uint64_t before = count_;
    std::atomic<bool> returned{false};
    std::thread best_effort([&] {
      host_backoff_.back_off(count_, &queue());
      returned = true;
    });
    EXPECT_TRUE(queue::eventually([&] { return count_ != before || returned; }));
    finish();
    best_effort.join();  // or it hangs
    return count_ != before;
  }
  // All but so many of what is queued goes.
  void leave(std::uint64_t operations) {
    queue().drain(latency_, queue().pushed() - operations, queue::Waiter::For::kSynchronise);
    ASSERT_EQ(queue().queued(), operations);
  }

  HostBackoff host_backoff_;
  std::atomic<std::uint64_t> count_{0};
};

TEST_F(FedBackoff, ManyOperationsFeedTheGpu) {
  take(1'000);
  fill(63);
  EXPECT_FALSE(pauses());
  block();
  fill(64);
  EXPECT_TRUE(pauses());
}

TEST_F(FedBackoff, AThreadThatPausesGoesOnBeforeTheRingIsEmpty) {
  take(1'000);
  fill(100);
  std::atomic<bool> returned{false};
  std::thread best_effort([&] {
    host_backoff_.back_off(count_, &queue());
    returned = true;
  });
  ASSERT_TRUE(queue::eventually([&] { return count_ == 1; }));
  leave(16);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(returned);
  leave(15);
  EXPECT_TRUE(queue::eventually([&] { return returned.load(); }));
  EXPECT_TRUE(host_backoff_.requested());
  finish();
  best_effort.join();
}

// A program that keeps a few long kernels ahead never has many operations queued.
TEST_F(FedBackoff, AFewLongKernelsFeedTheGpu) {
  take(1'000'000);
  fill(2);
  EXPECT_FALSE(pauses());
  block();
  fill(3);
  EXPECT_TRUE(pauses());
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
