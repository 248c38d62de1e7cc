// The kernels of the example and of the benchmark (examples/persistent_queue.cu, benchmarks/device/queue.cu): what each
// computes, one block at a time where it has shared memory.
#include <gtest/gtest.h>

#include <random>

#include "cudasched/device/threads.hpp"

#define __forceinline__ inline
#define __shared__ static
#include "benchmarks/device/queue.cu"
#include "examples/persistent_queue.cu"

namespace {

using device_threads::Index;
using Kernel = void (*)(WorkQueue*, unsigned long long, unsigned, const unsigned*, float*);

class BenchmarkKernels : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937 random(5);
    for (unsigned& length : lengths_) length = std::uniform_int_distribution<unsigned>(1, 5)(random);
    lengths_[3] = 40;
    for (std::size_t i = 0; i < lengths_.size(); ++i) wanted_.push_back(chain(i, lengths_[i]));
  }

  void check(const char* name, Kernel kernel, unsigned blocks, unsigned batch) {
    SCOPED_TRACE(name);
    WorkQueue queue{};
    for (int launch = 0; launch < 2; ++launch) {
      std::vector<float> found(lengths_.size(), -1.0f);
      device_threads::launch({blocks, 1, 1}, {64, 1, 1}, 0,
                             [&] { kernel(&queue, lengths_.size(), batch, lengths_.data(), found.data()); });
      EXPECT_EQ(found, wanted_);
      EXPECT_EQ(queue.next, 0U);
    }
  }

  std::vector<unsigned> lengths_ = std::vector<unsigned>(200);
  std::vector<float> wanted_;
};

TEST_F(BenchmarkKernels, AllLeaveTheSameNumbers) {
  check("blocked", blocked, 3, 1);
  check("cyclic", cyclic, 3, 1);
  check("cyclic_flat", cyclic_flat, 3, 1);
  check("cyclic_flat_4", cyclic_flat_4, 3, 1);
  check("queue_thread", queue_thread, 3, 1);
  check("queue_thread", queue_thread, 3, 8);
  check("queue_warp", queue_warp, 3, 32);
  check("queue_lanes", queue_lanes, 3, 32);
  check("queue_shared_warp", queue_shared_warp, 1, 100);
  check("queue_block", queue_block, 1, 64);
}

TEST_F(BenchmarkKernels, ABlockForEachItem) {
  lengths_.resize(9);
  wanted_.resize(9);
  check("block_per_item", block_per_item, 9, 1);
}

TEST(PersistentQueue, CountsTheStepsOfCollatz) {
  WorkQueue queue{};
  std::vector<unsigned> steps(300, ~0U);
  device_threads::launch({1, 1, 1}, {64, 1, 1}, 0, [&] { collatz(&queue, steps.size(), steps.data()); });
  for (unsigned long long i = 0; i < steps.size(); ++i) {
    unsigned wanted = 0;
    for (unsigned long long n = i + 1; n != 1; n = n % 2 == 0 ? n / 2 : 3 * n + 1) ++wanted;
    ASSERT_EQ(steps[i], wanted) << i + 1;
  }
}

}  // namespace
