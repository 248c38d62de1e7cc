#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "python.hpp"
#include "runtime/courtesy.hpp"
#include "runtime/gate.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kForEver = 3'600 * kNsPerSecond;

bool stands_aside(const Courtesy& courtesy) {
  std::atomic<std::uint64_t> count{0};
  courtesy.stand_aside(count);
  return count == 1;
}

TEST(Courtesy, NobodyStandsAsideWhereNoRegionIsOpen) {
  Courtesy courtesy;
  courtesy.configure(kForEver);
  EXPECT_FALSE(stands_aside(courtesy));
  courtesy.enter();
  courtesy.leave();
  EXPECT_FALSE(stands_aside(courtesy));
}

TEST(Courtesy, LastsUntilTheLastRegionIsLeft) {
  Courtesy courtesy;
  courtesy.configure(kForEver);
  courtesy.enter();
  courtesy.enter();
  std::atomic<std::uint64_t> count{0};
  std::thread best_effort([&] {
    courtesy.stand_aside(count);
    EXPECT_FALSE(courtesy.asked());
  });
  while (count == 0) std::this_thread::yield();
  courtesy.leave();
  EXPECT_TRUE(courtesy.asked());
  courtesy.leave();
  best_effort.join();  // or it hangs
}

// The thread in the region may be waiting for the one that stands aside.
TEST(Courtesy, IsBoundedInARequestThatDoesNotEnd) {
  Courtesy courtesy;
  courtesy.configure(20 * kNsPerMs);
  courtesy.enter();
  EXPECT_TRUE(stands_aside(courtesy));
  EXPECT_TRUE(courtesy.asked());
  // Not once more in the same request.
  EXPECT_FALSE(stands_aside(courtesy));
  courtesy.leave();
  courtesy.enter();
  EXPECT_TRUE(stands_aside(courtesy));
  courtesy.reset(0);
  EXPECT_FALSE(stands_aside(courtesy));
}

TEST(Courtesy, CanBeSwitchedOff) {
  Courtesy courtesy;
  courtesy.configure(0);
  courtesy.enter();
  EXPECT_FALSE(stands_aside(courtesy));
}

TEST(Courtesy, IsNotForAThreadThatHoldsTheInterpretersLock) {
  find_gil_check();
  Courtesy courtesy;
  courtesy.configure(kForEver);
  courtesy.enter();
  test::gil_held() = true;
  EXPECT_FALSE(stands_aside(courtesy));
  test::gil_held() = false;
}

}  // namespace
}  // namespace cudasched::runtime
