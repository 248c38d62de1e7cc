// Where the GPU is to stop kernels, by how long they and their blocks are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "schedule/stop.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::uint64_t kAtOnce = 132 * 2048;

class StopTest : public ::testing::Test {
 protected:
  // So many looks, before each of which a second of kernels ran.
  Stop pass(int looks, std::int64_t kernel_ns, std::uint64_t turns = 1) {
    Stop stop{};
    for (int i = 0; i < looks; ++i) {
      for (std::int64_t ran_ns = 0; ran_ns < StopPoint::kLookNs; ran_ns += kernel_ns)
        lengths_.add(kernel_ns, turns * kAtOnce, kAtOnce);
      stop = point_.look(now_ += StopPoint::kLookNs, lengths_);
    }
    return stop;
  }

  StopPoint point_;
  Lengths lengths_;
  std::int64_t now_ = 100 * StopPoint::kLookNs;
};

TEST_F(StopTest, ShortKernelsAreLetEndAfterSomeLooks) {
  EXPECT_EQ(pass(StopPoint::kLooks - 1, 10'000), Stop::kAtInstruction);
  EXPECT_EQ(pass(1, 10'000), Stop::kBetweenKernels);
  EXPECT_EQ(pass(100, 10'000), Stop::kBetweenKernels);
}

TEST_F(StopTest, ShortBlocksOfLongKernelsAreLetEnd) {
  EXPECT_EQ(pass(StopPoint::kLooks, 1'000'000, 50), Stop::kBetweenBlocks);
}

TEST_F(StopTest, KernelsOfOneTurnAreStoppedAtOnce) {
  EXPECT_EQ(pass(100, 1'000'000), Stop::kAtInstruction);
  EXPECT_EQ(pass(100, 1'000'000, 0), Stop::kAtInstruction);
}

TEST_F(StopTest, OneLongKernelInManyShortOnesCountsByItsTime) {
  for (int i = 0; i < StopPoint::kLooks; ++i) {
    lengths_.add(200'000, 1, kAtOnce);  // in a second
    pass(1, 10'000);
  }
  EXPECT_EQ(pass(1, 10'000), Stop::kBetweenKernels);
  lengths_.add(StopPoint::kLookNs / 2, 1, kAtOnce);
  EXPECT_EQ(pass(1, 10'000), Stop::kAtInstruction);
}

TEST_F(StopTest, EachReturnToLongOnesTakesLongerToForget) {
  int looks = StopPoint::kLooks;
  for (int times = 0; times < 5; ++times) {
    EXPECT_EQ(pass(looks - 1, 10'000), Stop::kAtInstruction) << times;
    EXPECT_EQ(pass(1, 10'000), Stop::kBetweenKernels) << times;
    EXPECT_EQ(pass(1, 2'000'000), Stop::kAtInstruction) << times;
    looks = std::min(4 * looks, StopPoint::kMostLooks);
  }
}

TEST_F(StopTest, LittleWorkTellsNothing) {
  lengths_.add(4'000'000, 1, kAtOnce);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(point_.look(now_ += StopPoint::kLookNs, lengths_), Stop::kAtInstruction);
  EXPECT_EQ(pass(StopPoint::kLooks + 1, 10'000), Stop::kBetweenKernels);
}

}  // namespace
}  // namespace cudasched::schedule
