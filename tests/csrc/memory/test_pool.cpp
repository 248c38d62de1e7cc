// The pool over the simulated driver, which refuses accesses to what is not mapped.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver/driver.hpp"
#include "memory/pool.hpp"
#include "simulated_driver/fixture.hpp"

namespace cudasched::memory {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kMiB = 1 << 20;
constexpr Bytes kGpu = 1024 * kMiB;

class PoolTest : public simulated_driver::DoubleTest {
 protected:
  void SetUp() override {
    setenv("CUDASCHED_SIM_MEMORY_MB", "1024", 1);
    DoubleTest::SetUp();
    driver::driver_table.load(dlopen("libcuda.so.1", RTLD_NOW));
    free_before_ = free_memory();
  }

  // The GPU has back all that a test's pools took.
  void TearDown() override {
    pool_.reset();
    EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    EXPECT_EQ(free_memory(), free_before_);
    DoubleTest::TearDown();
  }

  static std::size_t free_memory() {
    std::size_t free = 0;
    std::size_t total = 0;
    EXPECT_EQ(cuMemGetInfo(&free, &total), CUDA_SUCCESS);
    return free;
  }

  Pool& pool(Bytes limit = 0, Bytes chunk = Pool::kChunkBytes) {
    if (pool_ == nullptr) pool_ = std::make_unique<Pool>(Pool::Options{0, limit, chunk});
    return *pool_;
  }

  static std::string error_of(auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  std::unique_ptr<Pool> pool_;
  std::size_t free_before_ = 0;
};

TEST_F(PoolTest, BlocksCanBeWrittenAndReadOverSeams) {
  const CUdeviceptr block = pool(0, 2 * kMiB).allocate(7 * kMiB + 100, nullptr);
  ASSERT_EQ(cuMemsetD8(block, 3, 7 * kMiB + 100), CUDA_SUCCESS);
  std::vector<unsigned char> read(7 * kMiB + 100);
  ASSERT_EQ(cuMemcpyDtoH(read.data(), block, read.size()), CUDA_SUCCESS);
  EXPECT_EQ(std::count(read.begin(), read.end(), 3), static_cast<std::ptrdiff_t>(read.size()));
  pool().free(block, nullptr);
  EXPECT_EQ(pool().statistics().reserved, 8 * kMiB);
  EXPECT_EQ(pool().statistics().peak_allocated, 7 * kMiB + 512);
}

TEST_F(PoolTest, AlternateFreesLeaveRoomForOneLargeBlock) {
  std::vector<CUdeviceptr> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(pool(128 * kMiB).allocate(2 * kMiB, nullptr));
  for (std::size_t i = 1; i < blocks.size(); i += 2) ASSERT_EQ(cuMemsetD32(blocks[i], static_cast<unsigned>(i), 1), 0);
  for (std::size_t i = 0; i < blocks.size(); i += 2) pool().free(blocks[i], nullptr);
  const CUdeviceptr large = pool().allocate(64 * kMiB, nullptr);
  ASSERT_EQ(cuMemsetD8(large, 1, 64 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(pool().statistics().reserved, 128 * kMiB);
  EXPECT_EQ(pool().statistics().moved, 32U);
  for (std::size_t i = 1; i < blocks.size(); i += 2) {
    unsigned value = 0;
    ASSERT_EQ(cuMemcpyDtoH(&value, blocks[i], sizeof value), CUDA_SUCCESS);
    EXPECT_EQ(value, i);
    pool().free(blocks[i], nullptr);
  }
  pool().free(large, nullptr);
}

TEST_F(PoolTest, AFreeAndAnAllocationOfOneSizeCallNoMapping) {
  const CUdeviceptr first = pool().allocate(5 * kMiB, nullptr);
  const driver::Driver real = driver::table();
  driver::driver_table.cuMemMap = nullptr;
  driver::driver_table.cuMemSetAccess = nullptr;
  driver::driver_table.cuMemUnmap = nullptr;
  driver::driver_table.cuMemCreate = nullptr;
  driver::driver_table.cuEventQuery = nullptr;
  for (int i = 0; i < 100; ++i) {
    pool().free(first, nullptr);
    ASSERT_EQ(pool().allocate(5 * kMiB, nullptr), first);
  }
  driver::driver_table = real;
  pool().free(first, nullptr);
}

TEST_F(PoolTest, AnotherStreamsWorkIsWaitedFor) {
  CUstream const busy = stream();
  CUstream const other = stream();
  const CUdeviceptr block = pool(4 * kMiB).allocate(4 * kMiB, busy);
  ASSERT_EQ(append(busy, 1, 20'000), CUDA_SUCCESS);
  pool().free(block, busy);
  EXPECT_EQ(pool().allocate(4 * kMiB, busy), block);
  pool().free(block, busy);
  const CUdeviceptr after = pool().allocate(4 * kMiB, other);
  EXPECT_EQ(cuStreamQuery(busy), CUDA_SUCCESS);
  pool().free(after, other);
}

// A stream's handle may be given again; its number is not.
TEST_F(PoolTest, FreeMemoryOfADestroyedStreamIsOrdered) {
  CUstream const gone = stream();
  const CUdeviceptr block = pool(4 * kMiB).allocate(4 * kMiB, gone);
  ASSERT_EQ(append(gone, 1, 20'000), CUDA_SUCCESS);
  CUevent const before = event();
  ASSERT_EQ(cuEventRecord(before, gone), CUDA_SUCCESS);
  pool().free(block, gone);
  ASSERT_EQ(cuStreamDestroy(gone), CUDA_SUCCESS);
  CUstream const next = stream();
  pool().free(pool().allocate(4 * kMiB, next), next);
  EXPECT_EQ(cuEventQuery(before), CUDA_SUCCESS);
}

TEST_F(PoolTest, ACapturingStreamTakesMemoryThatNothingUses) {
  CUstream const capturing = stream();
  const CUdeviceptr used = pool().allocate(4 * kMiB, capturing);
  ASSERT_EQ(append(capturing, 1, 20'000), CUDA_SUCCESS);
  pool().free(used, capturing);
  ASSERT_EQ(cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  const CUdeviceptr block = pool().allocate(2 * kMiB, capturing);
  EXPECT_NE(block, used);
  EXPECT_THAT(error_of([&] { pool().free(block, capturing); }), HasSubstr("captures a graph"));
  CUgraph graph = nullptr;
  ASSERT_EQ(cuStreamEndCapture(capturing, &graph), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  pool().free(block, capturing);
}

TEST_F(PoolTest, ErrorsSayWhatIsWrong) {
  EXPECT_THAT(error_of([] { const Pool none({.device = 9}); }), HasSubstr("there is no device 9"));
  EXPECT_THAT(error_of([] { const Pool none({.limit_bytes = 4096}); }), HasSubstr("less than a page of 2.00 MiB"));
  const CUdeviceptr block = pool(8 * kMiB).allocate(6 * kMiB, nullptr);
  EXPECT_THAT(
      error_of([&] { pool().allocate(4 * kMiB, nullptr); }),
      HasSubstr("an allocation of 4.00 MiB on device 0 does not fit in the pool's limit: the pool has 6.00 MiB of "
                "the GPU, its limit is 8.00 MiB; 1 blocks hold 6.00 MiB"));
  EXPECT_THAT(error_of([&] { pool().allocate(0, nullptr); }), HasSubstr("0 bytes"));
  EXPECT_THAT(error_of([&] { pool().allocate(Bytes{1} << 62, nullptr); }), HasSubstr("the GPU's memory"));
  EXPECT_THAT(error_of([&] { pool().free(block + 512, nullptr); }), HasSubstr("is no block of this pool"));
  EXPECT_THAT(error_of([&] { pool().free(1, nullptr); }), HasSubstr("0x1 is no block of this pool"));
  EXPECT_THAT(error_of([&] { pool().close(); }), HasSubstr("1 blocks hold 6.00 MiB"));
  pool().free(block, nullptr);
  EXPECT_THAT(error_of([&] { pool().free(block, nullptr); }), HasSubstr("was freed already"));
  pool().close();
  pool().close();
  EXPECT_THAT(error_of([&] { pool().allocate(1, nullptr); }), HasSubstr("the pool of device 0 is closed"));
}

TEST_F(PoolTest, TheGpuMayBeFull) {
  const CUdeviceptr most = pool().allocate(kGpu - 64 * kMiB, nullptr);
  EXPECT_THAT(error_of([&] { pool().allocate(128 * kMiB, nullptr); }), HasSubstr("the GPU's memory"));
  const CUdeviceptr rest = pool().allocate(32 * kMiB, nullptr);
  pool().free(most, nullptr);
  pool().free(rest, nullptr);
  EXPECT_EQ(pool().trim(), pool().statistics().peak_reserved);
}

// Each call in turn refuses once, half-way through an allocation that moves chunks and creates one.
TEST_F(PoolTest, ARefusalLosesNothing) {
  const driver::Driver real = driver::table();
  static int left = 0;
  static driver::Driver calls;
  calls = real;
  const auto refuse = [&](int which) {
    if (which == 0) {
      driver::driver_table.cuMemCreate = [](CUmemGenericAllocationHandle* handle, std::size_t bytes,
                                            const CUmemAllocationProp* properties, unsigned long long flags) {
        return left-- == 0 ? CUDA_ERROR_OUT_OF_MEMORY : calls.cuMemCreate(handle, bytes, properties, flags);
      };
    } else if (which == 1) {
      driver::driver_table.cuMemMap = [](CUdeviceptr at, std::size_t bytes, std::size_t offset,
                                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
        return left-- == 0 ? CUDA_ERROR_NOT_SUPPORTED : calls.cuMemMap(at, bytes, offset, handle, flags);
      };
    } else if (which == 2) {
      driver::driver_table.cuMemSetAccess = [](CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* access,
                                               std::size_t count) {
        return left-- == 0 ? CUDA_ERROR_NOT_SUPPORTED : calls.cuMemSetAccess(at, bytes, access, count);
      };
    } else {
      driver::driver_table.cuMemUnmap = [](CUdeviceptr at, std::size_t bytes) {
        return left-- == 0 ? CUDA_ERROR_NOT_SUPPORTED : calls.cuMemUnmap(at, bytes);
      };
    }
  };
  const auto clean = driver::table();
  for (const int which : {0, 1, 2, 3}) {
    for (const int call : {0, 1, 2}) {
      Pool made({0, 64 * kMiB, 4 * kMiB});
      std::vector<CUdeviceptr> blocks;
      for (int i = 0; i < 8; ++i) blocks.push_back(made.allocate(4 * kMiB, nullptr));
      for (std::size_t i = 0; i < blocks.size(); i += 2) made.free(blocks[i], nullptr);
      left = call;
      refuse(which);
      CUdeviceptr large = 0;
      const std::string error = error_of([&] { large = made.allocate(28 * kMiB, nullptr); });
      driver::driver_table = clean;
      if (large == 0) {
        EXPECT_THAT(error, ::testing::AnyOf(HasSubstr("NOT_SUPPORTED"), HasSubstr("does not fit in the GPU's memory")));
      }
      const Statistics after = made.statistics();
      EXPECT_EQ(after.blocks, large == 0 ? 4U : 5U);
      if (large == 0) large = made.allocate(28 * kMiB, nullptr);
      ASSERT_EQ(cuMemsetD8(large, 1, 28 * kMiB), CUDA_SUCCESS);
      EXPECT_EQ(made.statistics().reserved, 44 * kMiB);
      made.free(large, nullptr);
      for (std::size_t i = 1; i < blocks.size(); i += 2) made.free(blocks[i], nullptr);
      made.close();
    }
  }
}

// Others may use it meanwhile.
TEST_F(PoolTest, WhatIsNotEnoughGoesBackToTheGpu) {
  std::array<CUdeviceptr, 3> blocks{};
  for (CUdeviceptr& block : blocks) block = pool().allocate(32 * kMiB, nullptr);
  const std::size_t free = free_memory();
  EXPECT_THAT(error_of([&] { pool().allocate(free + 2 * kMiB, nullptr); }), HasSubstr("does not fit in the GPU's"));
  EXPECT_EQ(free_memory(), free);
  EXPECT_EQ(pool().statistics().reserved, 96 * kMiB);
  pool().free(blocks[0], nullptr);
  pool().free(blocks[2], nullptr);
  pool().free(pool().allocate(64 * kMiB, nullptr), nullptr);
  EXPECT_EQ(pool().statistics().moved, 1U);
  pool().free(blocks[1], nullptr);
}

TEST_F(PoolTest, BlocksInUseOutliveThePool) {
  const CUdeviceptr kept = pool().allocate(2 * kMiB, nullptr);
  pool().free(pool().allocate(64 * kMiB, nullptr), nullptr);
  pool_.reset();
  EXPECT_EQ(cuMemsetD8(kept, 1, 2 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(), free_before_ - 2 * kMiB);
  free_before_ -= 2 * kMiB;
  cuDevicePrimaryCtxRelease(0);  // the pool's
}

TEST_F(PoolTest, AForkedChildIsToldSo) {
  const CUdeviceptr block = pool().allocate(2 * kMiB, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const std::string error = error_of([&] { pool().free(block, nullptr); });
    pool_.reset();
    _exit(error.find("forked this one") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  pool().free(block, nullptr);
}

// Fills run behind what other streams do, at a limit that moves memory; the driver faults on what is not mapped, and
// each block has its own value to its end.
TEST_F(PoolTest, RandomHistoriesKeepWhatIsWritten) {
  struct Live {
    CUdeviceptr at = 0;
    Bytes bytes = 0;
    unsigned char value = 0;
    CUstream stream = nullptr;
  };
  const std::array<CUstream, 3> streams{stream(), stream(), stream()};
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Pool made({0, 32 * kMiB, (2 + 6 * (seed % 2)) * kMiB});
    std::vector<Live> blocks;
    const auto end = [&](std::size_t which) {
      const Live block = blocks[which];
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
      ASSERT_EQ(cuStreamSynchronize(block.stream), CUDA_SUCCESS) << "seed " << seed;
      std::array<unsigned char, 2> read{};
      ASSERT_EQ(cuMemcpyDtoH(read.data(), block.at, 1), CUDA_SUCCESS);
      ASSERT_EQ(cuMemcpyDtoH(&read[1], block.at + block.bytes - 1, 1), CUDA_SUCCESS);
      ASSERT_THAT(read, ::testing::Each(block.value)) << "seed " << seed;
      if (random() % 2 == 0) {  // work that is still there when the block is freed
        ASSERT_EQ(append(block.stream, 1, 50), CUDA_SUCCESS);
        ASSERT_EQ(cuMemsetD8Async(block.at, 0, block.bytes, block.stream), CUDA_SUCCESS);
      }
      made.free(block.at, block.stream);
    };
    for (int step = 0; step < 40; ++step) {
      if (random() % 5 < 3) {
        const Live block{0, 1 + random() % (random() % 2 == 0 ? 9 * kMiB : 64 * 1024),
                         static_cast<unsigned char>(1 + step), streams[random() % streams.size()]};
        try {
          blocks.push_back(block);
          blocks.back().at = made.allocate(block.bytes, block.stream);
          ASSERT_EQ(cuMemsetD8Async(blocks.back().at, block.value, block.bytes, block.stream), CUDA_SUCCESS);
        } catch (const OutOfMemoryError&) {
          blocks.pop_back();
        }
      } else if (!blocks.empty()) {
        end(random() % blocks.size());
      }
      if (HasFatalFailure()) return;
    }
    while (!blocks.empty()) end(0);
    made.close();
  }
}

// Threads with streams of their own, at a limit that makes them wait for one another's work and move its memory.
TEST_F(PoolTest, ThreadsShareAPool) {
  constexpr int kThreads = 4;
  pool(48 * kMiB, 4 * kMiB);
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      cuCtxSetCurrent(context_);
      CUstream const mine = stream();
      std::mt19937 random(static_cast<unsigned>(i));
      std::vector<CUdeviceptr> blocks;
      for (int step = 0; step < 150; ++step) {
        if (blocks.size() < 3 && random() % 3 != 0) {
          const Bytes bytes = 1 + random() % (6 * kMiB);
          try {
            blocks.push_back(pool_->allocate(bytes, mine));
            EXPECT_EQ(cuMemsetD8Async(blocks.back(), 1, bytes, mine), CUDA_SUCCESS);
          } catch (const OutOfMemoryError&) {
            refused.fetch_add(1);
          }
        } else if (!blocks.empty()) {
          const std::size_t which = random() % blocks.size();
          pool_->free(blocks[which], mine);
          blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
        }
        if (step % 50 == 49) pool_->trim(16 * kMiB);
        EXPECT_LE(step % 40 == 39 ? pool_->statistics().fragmentation() : 0.0, 1.0);
      }
      for (const CUdeviceptr block : blocks) pool_->free(block, mine);
      EXPECT_EQ(cuStreamSynchronize(mine), CUDA_SUCCESS);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool().statistics().blocks, 0U);
  EXPECT_LE(pool().statistics().peak_reserved, 48 * kMiB);
}

}  // namespace
}  // namespace cudasched::memory
