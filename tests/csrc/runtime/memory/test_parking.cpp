// A best-effort process whose pageable memory is moved to the host's and back: its calls wait meanwhile, and every byte
// is there afterwards. The simulated driver ends a process whose work touches an unmapped page.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "arbiter/control.hpp"
#include "driver/barrier.hpp"
#include "private_directory.hpp"
#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/memory/host_memory.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/memory_calls.hpp"
#include "runtime/other_client.hpp"

namespace cudasched {
namespace {

using test::allocate;
using test::call;
using test::eventually;
using test::free_memory;
using test::kMiB;
using test::OtherClient;
using test::Program;

// Each test is a process of its own, and a best-effort one. A giver's thread serves want().
class ParkingTest : public ::testing::Test {
 protected:
  explicit ParkingTest(const char* host_memory = "1GiB") : settings_(host_memory) {
    Program::check(program_.launch(0));  // a client, whose launches are offloaded
  }
  ~ParkingTest() override {
    want(false);
    EXPECT_TRUE(ended_ || eventually([&] { return pager().away() == 0; }));
  }

  static runtime::Pager& pager() { return runtime::memory().pager; }
  static void want(bool away) {
    pager().want_away(away);
    test::HookedDriver::instance().table().wake_for_memory();
  }
  static bool park(std::uint64_t bytes) {
    want(true);
    return eventually([&] { return pager().away() == bytes; });
  }
  static bool unpark() {
    want(false);
    return eventually([&] { return pager().away() == 0; });
  }
  static std::size_t free_bytes() {
    std::size_t free = 0;
    std::size_t all = 0;
    Program::check(driver::table().cuMemGetInfo(&free, &all));
    return free;
  }
  static bool is_mapped(CUdeviceptr address) { return driver::memory_type(address) == CU_MEMORYTYPE_DEVICE; }
  static void fill(CUdeviceptr to, unsigned char value, std::size_t bytes) {
    ASSERT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t)>("cuMemsetD8_v2")(to, value, bytes)),
              CUDA_SUCCESS);
    ASSERT_EQ(call<CUresult()>("cuCtxSynchronize")(), CUDA_SUCCESS);
  }
  static std::vector<unsigned char> read(CUdeviceptr from, std::size_t bytes) {
    std::vector<unsigned char> into(bytes);
    EXPECT_EQ((call<CUresult(void*, CUdeviceptr, std::size_t)>("cuMemcpyDtoH_v2")(static_cast<void*>(into.data()), from,
                                                                                  bytes)),
              CUDA_SUCCESS);
    return into;
  }
  CUresult count_in(CUdeviceptr counter, std::uint32_t us = 20) const {
    std::uint64_t values = counter + 8;
    std::uint64_t count = counter;
    std::uint64_t value = 7;
    void* parameters[] = {&values, &count, &value, &us};
    return call<decltype(cuLaunchKernel)>("cuLaunchKernel")(program_.timed_function(), 132U, 1U, 1U, 64U, 1U, 1U, 0U,
                                                            program_.stream(), static_cast<void**>(parameters),
                                                            static_cast<void**>(nullptr));
  }
  struct Settings {
    explicit Settings(const char* host_memory) {
      setenv("CUDASCHED_CLASS", "best_effort", 1);
      setenv("CUDASCHED_PAGEABLE", "on", 1);
      setenv("CUDASCHED_PARK", host_memory, 1);
      setenv("CUDASCHED_SIM_MEMORY_MB", "1024", 1);
    }
  } settings_;
  void keep_every_byte(int steps);
  Program program_;
  bool ended_ = false;  // the process: what is away stays there
};

class LittleHostMemoryTest : public ParkingTest {
 protected:
  LittleHostMemoryTest() : ParkingTest("64MiB") {}
};

TEST_F(ParkingTest, UnmapsEveryPageAndBringsEveryByteBack) {
  constexpr std::size_t kBytes = 71 * kMiB;
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, kBytes), CUDA_SUCCESS);
  const std::size_t free_before = free_bytes();
  std::vector<unsigned char> bytes(kBytes);
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same each time
  for (unsigned char& each : bytes) each = static_cast<unsigned char>(random());
  ASSERT_EQ((call<CUresult(CUdeviceptr, const void*, std::size_t)>("cuMemcpyHtoD_v2")(
                block, static_cast<const void*>(bytes.data()), kBytes)),
            CUDA_SUCCESS);
  program_.synchronize();  // the copy's thread has returned from it
  ASSERT_TRUE(park(72 * kMiB));
  EXPECT_TRUE(driver::barrier().closed());
  EXPECT_EQ(free_bytes(), free_before + 72 * kMiB);
  for (std::size_t at = 0; at < kBytes; at += 2 * kMiB) EXPECT_FALSE(is_mapped(block + at));
  ASSERT_TRUE(unpark());
  EXPECT_EQ(free_bytes(), free_before);
  EXPECT_TRUE(read(block, kBytes) == bytes);
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before + 72 * kMiB);
}

// Or others would wait for its memory.
TEST_F(ParkingTest, AClientWithoutTurnsMendsADamagedWord) {
  const int slot = runtime::engine().known_device(0)->slot(Class::kBestEffort);
  auto& word = test::HookedDriver::instance().table().memory(slot).turn_until_ns;
  word.store(7);
  EXPECT_TRUE(eventually([&] { return word.load() == 0; }));
}

TEST_F(ParkingTest, CallsWaitWhileItIsAwayAndHaveTheirEffectAfterwards) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 64 * kMiB), CUDA_SUCCESS);
  fill(block, 0, 64 * kMiB);
  ASSERT_EQ(count_in(block), CUDA_SUCCESS);
  program_.synchronize();
  const auto reads_one = [&](CUdeviceptr from, std::uint64_t expected) {
    std::uint64_t value = 0;
    const auto bytes = read(from, 8);
    std::memcpy(&value, bytes.data(), 8);
    EXPECT_EQ(value, expected);
  };
  program_.synchronize();
  ASSERT_TRUE(park(64 * kMiB));

  std::atomic<int> returned{0};
  std::vector<std::thread> threads;
  const auto on_a_thread = [&](auto&& what) {
    threads.emplace_back([&, what] {
      program_.use_on_this_thread();
      what();
      returned.fetch_add(1);
    });
  };
  for (int i = 0; i < 5; ++i) ASSERT_EQ(count_in(block), CUDA_SUCCESS) << "launches go into the ring";
  EXPECT_TRUE(pager().away() != 0);
  on_a_thread([&] { fill(block + 32 * kMiB, 9, kMiB); });
  on_a_thread([&] { EXPECT_EQ(read(block + 63 * kMiB, 8)[0], 0); });
  on_a_thread([&] {
    CUdeviceptr begin = 0;
    EXPECT_EQ((call<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute")(static_cast<void*>(&begin),
                                                                              CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block)),
              CUDA_SUCCESS);
  });
  on_a_thread([&] {
    CUdeviceptr made = 0;
    EXPECT_EQ(allocate(made, 4 * kMiB), CUDA_SUCCESS);
    EXPECT_EQ(free_memory(made), CUDA_SUCCESS);
  });
  on_a_thread([&] { EXPECT_EQ(program_.synchronize(), CUDA_SUCCESS); });
  on_a_thread([&] {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    EXPECT_EQ((call<CUresult(CUgraph*, unsigned)>("cuGraphCreate")(&graph, 0U)), CUDA_SUCCESS);
    CUDA_MEMSET_NODE_PARAMS fills{
        .dst = block + 40 * kMiB, .pitch = 0, .value = 3, .elementSize = 1, .width = 64, .height = 1};
    EXPECT_EQ((call<decltype(cuGraphAddMemsetNode)>("cuGraphAddMemsetNode")(
                  &node, graph, static_cast<const CUgraphNode*>(nullptr), std::size_t{0},
                  static_cast<const CUDA_MEMSET_NODE_PARAMS*>(&fills), program_.context())),
              CUDA_SUCCESS);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(returned.load(), 0);
  ASSERT_TRUE(unpark());
  for (std::thread& thread : threads) thread.join();
  program_.synchronize();
  reads_one(block, 6);
  EXPECT_EQ(read(block + 32 * kMiB, 1)[0], 9);
}

// Launches past the ring's room wait on the program's own thread.
TEST_F(ParkingTest, AFullRingHoldsTheProgram) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  fill(block, 0, 4 * kMiB);
  ASSERT_EQ(count_in(block), CUDA_SUCCESS);
  program_.synchronize();
  ASSERT_TRUE(park(4 * kMiB));
  constexpr int kLaunches = 20'000;
  std::atomic<int> launched{0};
  std::thread program([&] {
    program_.use_on_this_thread();
    for (; launched < kLaunches; ++launched) ASSERT_EQ(count_in(block, 0), CUDA_SUCCESS);
  });
  int before = -1;
  EXPECT_TRUE(eventually([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return std::exchange(before, launched.load()) == launched.load() && before > 0;
  }));
  EXPECT_LT(launched.load(), kLaunches);
  ASSERT_TRUE(unpark());
  program.join();
  program_.synchronize();
  std::uint64_t count = 0;
  std::memcpy(&count, read(block, 8).data(), 8);
  EXPECT_EQ(count, kLaunches + 1);
}

TEST_F(ParkingTest, WithoutPinnedHostMemoryAllStays) {
  const test::Replaced refuses(
      driver::driver_table.cuMemHostRegister, +[](void*, std::size_t, unsigned) { return CUDA_ERROR_OUT_OF_MEMORY; });
  CUdeviceptr block = 0;
  ::testing::internal::CaptureStderr();
  ASSERT_EQ(allocate(block, 8 * kMiB), CUDA_SUCCESS);
  want(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // it tries at least once
  want(false);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the driver does not pin 64.0 MiB of the host's memory"), std::string::npos) << said;
  EXPECT_NE(said.find("is pinned ahead"), std::string::npos) << said;
  EXPECT_EQ(said.find("stays where it is"), said.rfind("stays where it is")) << "once: " << said;
  EXPECT_FALSE(driver::barrier().closed());
  EXPECT_TRUE(is_mapped(block));
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
}

// A copy that fails midway, and memory that cannot be created or mapped again: nothing is lost. The test replaces
// functions that the mover's thread reads, which ThreadSanitizer sees.
#if !defined(__SANITIZE_THREAD__)
TEST_F(ParkingTest, RefusedCallsOfTheDriverLoseNothing) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 72 * kMiB), CUDA_SUCCESS);
  fill(block, 5, 72 * kMiB);
  program_.synchronize();
  static std::atomic<int> left;
  static decltype(driver::driver_table.cuMemcpyDtoHAsync) copy = driver::driver_table.cuMemcpyDtoHAsync;
  left = 12;  // pieces: the second chunk fails
  {
    const test::Replaced fails(
        driver::driver_table.cuMemcpyDtoHAsync, +[](void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
          return left.fetch_sub(1) > 0 ? copy(to, from, bytes, stream) : CUDA_ERROR_INVALID_VALUE;
        });
    ASSERT_TRUE(park(32 * kMiB));
  }
  EXPECT_FALSE(is_mapped(block));
  EXPECT_TRUE(is_mapped(block + 32 * kMiB));
  ASSERT_TRUE(eventually([] { return pager().away() == 72 * kMiB; })) << "the rest follows";
  const std::size_t free_away = free_bytes();
  for (int fault = 0; fault < 3; ++fault) {
    left = 2;
    const auto refuse = [&](auto& entry, auto* with) {
      const test::Replaced refuses(entry, with);
      want(false);
      ASSERT_TRUE(eventually([] { return left.load() < 0; }));
      EXPECT_EQ(pager().away(), 72 * kMiB);
    };
    static const driver::Driver real = driver::driver_table;
    if (fault == 0) {
      refuse(
          driver::driver_table.cuMemCreate, +[](CUmemGenericAllocationHandle* handle, std::size_t bytes,
                                                const CUmemAllocationProp* properties, unsigned long long flags) {
            return left.fetch_sub(1) > 0 ? real.cuMemCreate(handle, bytes, properties, flags)
                                         : CUDA_ERROR_OUT_OF_MEMORY;
          });
    } else if (fault == 1) {
      refuse(
          driver::driver_table.cuMemMap, +[](CUdeviceptr at, std::size_t bytes, std::size_t offset,
                                             CUmemGenericAllocationHandle handle, unsigned long long flags) {
            return left.fetch_sub(1) > 0 ? real.cuMemMap(at, bytes, offset, handle, flags) : CUDA_ERROR_OUT_OF_MEMORY;
          });
    } else {
      refuse(
          driver::driver_table.cuMemSetAccess,
          +[](CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
            return left.fetch_sub(1) > 0 ? real.cuMemSetAccess(at, bytes, access, count) : CUDA_ERROR_OUT_OF_MEMORY;
          });
    }
    want(true);
  }
  ASSERT_TRUE(unpark());
  EXPECT_EQ(free_bytes(), free_away - 72 * kMiB);
  const auto bytes = read(block, 72 * kMiB);
  EXPECT_TRUE(std::ranges::all_of(bytes, [](unsigned char each) { return each == 5; }));
}
#endif

TEST_F(ParkingTest, AGpuThatDoesNotBecomeIdleEndsTheAttemptAndNotTheProgram) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  // The simulated driver runs host functions on a thread that asks it something: the giver's is to be there before.
  ASSERT_TRUE(eventually([] { return pager().movable() == 4 * kMiB; }));
  static std::atomic<bool> may_end;
  ASSERT_EQ((call<CUresult(CUstream, CUhostFn, void*)>("cuLaunchHostFunc")(
                program_.stream(),
                +[](void*) {
                  while (!may_end) std::this_thread::yield();
                },
                static_cast<void*>(nullptr))),
            CUDA_SUCCESS);
  ASSERT_TRUE(eventually([] { return !runtime::engine().known_device(0)->holds_launches(); })) << "it is submitted";
  want(true);
  ASSERT_TRUE(eventually([] { return driver::barrier().closed(); }));
  // Waits for the mover, and then not any more.
  ASSERT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t)>("cuMemsetD8_v2")(block, 1, 0)), CUDA_SUCCESS);
  want(false);
  may_end = true;
  program_.synchronize();
  EXPECT_EQ(pager().away(), 0U);
  EXPECT_TRUE(eventually([] { return !driver::barrier().closed(); }));
  EXPECT_TRUE(is_mapped(block));
}

TEST_F(ParkingTest, MemoryThatOthersMayUseStays) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  ASSERT_TRUE(eventually([] { return pager().movable() == 4 * kMiB; }));
  CUcontext other = nullptr;
  ASSERT_EQ((call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0U, CUdevice{0})), CUDA_SUCCESS);
  want(true);
  EXPECT_TRUE(eventually([] { return pager().movable() == 0; }));
  EXPECT_EQ(pager().away(), 0U);
  EXPECT_TRUE(is_mapped(block));
}

TEST_F(ParkingTest, AResetOfTheContextEndsIt) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 64 * kMiB), CUDA_SUCCESS);
  const std::size_t free_before = free_bytes();
  ASSERT_TRUE(park(64 * kMiB));
  ASSERT_EQ((call<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(CUdevice{0})), CUDA_SUCCESS);
  EXPECT_EQ(pager().away(), 0U);
  EXPECT_FALSE(driver::barrier().closed());
  CUcontext context = nullptr;
  Program::check(driver::table().cuDevicePrimaryCtxRetain(&context, 0));
  Program::check(driver::table().cuCtxSetCurrent(context));
  EXPECT_GE(free_bytes(), free_before + 64 * kMiB);
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
}

TEST_F(ParkingTest, AFreeMeanwhileTakesEffectLater) {
  CUdeviceptr block = 0;
  CUdeviceptr other = 0;
  const std::size_t free_before = free_bytes();
  ASSERT_EQ(allocate(block, 8 * kMiB), CUDA_SUCCESS);
  ASSERT_EQ(allocate(other, 8 * kMiB), CUDA_SUCCESS);
  ASSERT_TRUE(park(16 * kMiB));
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
  EXPECT_NE(free_memory(block), CUDA_SUCCESS) << "it is free";
  ASSERT_TRUE(unpark());
  EXPECT_EQ(free_memory(other), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before);
}

// The launcher submits these only when the memory is back.
TEST_F(ParkingTest, AFreeOnAStreamMeanwhileIsBehindTheLaunchesInTheRing) {
  CUdeviceptr block = 0;
  const std::size_t free_before = free_bytes();
  ASSERT_EQ(allocate(block, 8 * kMiB), CUDA_SUCCESS);
  fill(block, 0, 8 * kMiB);
  ASSERT_EQ(count_in(block), CUDA_SUCCESS);
  program_.synchronize();
  ASSERT_TRUE(park(8 * kMiB));
  for (int i = 0; i < 50; ++i) ASSERT_EQ(count_in(block), CUDA_SUCCESS);
  EXPECT_EQ((call<CUresult(CUdeviceptr, CUstream)>("cuMemFreeAsync")(block, program_.stream())), CUDA_SUCCESS);
  ASSERT_TRUE(unpark());
  EXPECT_EQ(program_.synchronize(), CUDA_SUCCESS);
  CUdeviceptr last = 0;  // its free carries out the one that came while memory was away
  ASSERT_EQ(allocate(last, 2 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(last), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before);
}

TEST_F(ParkingTest, AProcessEndsWhileItsMemoryIsAway) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  ASSERT_EQ(count_in(block, 0), CUDA_SUCCESS);
  program_.synchronize();
  ASSERT_TRUE(park(4 * kMiB));
  ASSERT_EQ(count_in(block, 0), CUDA_SUCCESS);
  std::thread waits([&] {
    program_.use_on_this_thread();
    EXPECT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t)>("cuMemsetD8_v2")(block, 0, 8)),
              CUDA_ERROR_DEINITIALIZED);
  });
  ended_ = true;
  runtime::engine().lifecycle().stop();
  waits.join();
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
  want(false);
  driver::barrier().reset_in_child();
}

// Launches, copies, fills, allocations and frees by two threads, while memory goes and comes: each block keeps its own
// bytes, and no page is lost.
void ParkingTest::keep_every_byte(int steps) {
  ASSERT_EQ(program_.launch(1, program_.stream(), 20), CUDA_SUCCESS);  // known to be launched with success
  const std::size_t free_before = free_bytes();
  std::atomic<bool> ends{false};
  int moves = 0;
  std::thread mover([&] {
    for (; !ends; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      want(true);
      for (int looks = 0; looks < 100 && pager().away() == 0; ++looks) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      moves += pager().away() != 0 ? 1 : 0;
      if (!unpark()) return;
    }
  });
  const auto history = [&](unsigned seed) {
    program_.use_on_this_thread();
    CUstream const stream = Program::new_stream();
    std::mt19937 random(seed);
    struct Block {
      std::size_t bytes = 0;
      unsigned char value = 0;
      std::uint64_t count = 0;
    };
    std::map<CUdeviceptr, Block> blocks;
    const auto set = [&](CUdeviceptr to, int value, std::size_t bytes) {
      ASSERT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t, CUstream)>("cuMemsetD8Async")(
                    to, static_cast<unsigned char>(value), bytes, stream)),
                CUDA_SUCCESS);
    };
    const auto check = [&](CUdeviceptr at, const Block& block) {
      ASSERT_EQ(program_.synchronize(stream), CUDA_SUCCESS);
      const auto bytes = read(at, block.bytes);
      std::uint64_t count = 0;
      std::memcpy(&count, bytes.data(), 8);
      ASSERT_EQ(count, block.count);
      ASSERT_TRUE(std::all_of(bytes.begin() + 4096, bytes.end(), [&](unsigned char b) { return b == block.value; }));
    };
    for (int step = 0; step < steps; ++step) {
      const auto any = [&] { return std::next(blocks.begin(), random() % blocks.size()); };
      const unsigned what = blocks.empty() ? 0 : random() % 8;
      if (what == 0 && blocks.size() < 5) {
        CUdeviceptr made = 0;
        const std::size_t bytes = 2 * kMiB + random() % (random() % 4 == 0 ? 40 * kMiB : 3 * kMiB);
        ASSERT_EQ(allocate(made, bytes), CUDA_SUCCESS);
        set(made, 0, 4096);
        set(made + 4096, static_cast<int>(step), bytes - 4096);
        blocks[made] = {bytes, static_cast<unsigned char>(step), 0};
      } else if (what == 1) {
        const auto block = any();
        ASSERT_NO_FATAL_FAILURE(check(block->first, block->second)) << "seed " << seed << " step " << step;
      } else if (what == 2) {
        const auto block = any();
        ASSERT_NO_FATAL_FAILURE(check(block->first, block->second)) << "seed " << seed << " step " << step;
        ASSERT_EQ(free_memory(block->first), CUDA_SUCCESS);
        blocks.erase(block);
      } else if (!blocks.empty()) {
        const auto block = any();
        if (block->second.count >= 500) continue;
        std::uint64_t values = block->first + 8;
        std::uint64_t count = block->first;
        std::uint64_t value = step;
        std::uint32_t us = 20;
        void* parameters[] = {&values, &count, &value, &us};
        ASSERT_EQ((call<decltype(cuLaunchKernel)>("cuLaunchKernel")(program_.timed_function(), 132U, 1U, 1U, 64U, 1U,
                                                                    1U, 0U, stream, static_cast<void**>(parameters),
                                                                    static_cast<void**>(nullptr))),
                  CUDA_SUCCESS);
        ++block->second.count;
      }
    }
    for (const auto& [at, block] : blocks) {
      ASSERT_NO_FATAL_FAILURE(check(at, block));
      ASSERT_EQ(free_memory(at), CUDA_SUCCESS);
    }
  };
  std::thread other([&] { history(2); });
  history(1);
  other.join();
  ends = true;
  mover.join();
  EXPECT_GT(moves, 3);
  ASSERT_TRUE(unpark());
  CUdeviceptr last = 0;  // its free carries out those that came while memory was away
  ASSERT_EQ(allocate(last, 2 * kMiB), CUDA_SUCCESS);
  ASSERT_EQ(free_memory(last), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 60;  // each takes several times as long
#else
constexpr int kSteps = 150;
#endif
TEST_F(ParkingTest, RandomHistoriesKeepEveryByte) { keep_every_byte(kSteps); }
TEST_F(LittleHostMemoryTest, RandomHistoriesKeepEveryByte) { keep_every_byte(60); }

TEST_F(LittleHostMemoryTest, BoundsTheBytesThatMove) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 72 * kMiB), CUDA_SUCCESS);
  fill(block, 5, 72 * kMiB);
  program_.synchronize();
  ASSERT_TRUE(park(64 * kMiB));
  EXPECT_EQ(pager().movable(), 0U);
  EXPECT_FALSE(is_mapped(block + 63 * kMiB));
  EXPECT_TRUE(is_mapped(block + 64 * kMiB));
  ASSERT_TRUE(unpark());
  const auto bytes = read(block, 72 * kMiB);
  EXPECT_TRUE(std::ranges::all_of(bytes, [](unsigned char each) { return each == 5; }));
}

TEST(ControlGroupRoom, IsTheLeastOfTheGroupsAbove) {
  const test::PrivateDirectory directory;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(directory.path() + name).parent_path());
    std::ofstream(directory.path() + name) << text;
  };
  const auto room = [&] { return runtime::control_group_room(directory.path() + "/cgroup", directory.path() + "/fs"); };
  EXPECT_EQ(room(), runtime::kUnknownMemory);
  write("/cgroup", "1:name=x:/y\n0::/a/b\n");
  EXPECT_EQ(room(), runtime::kUnknownMemory);
  write("/fs/a/b/memory.max", "max\n");
  write("/fs/a/b/memory.current", "40\n");
  EXPECT_EQ(room(), runtime::kUnknownMemory);
  write("/fs/a/memory.max", "100\n");
  write("/fs/a/memory.current", "70\n");
  EXPECT_EQ(room(), 30U);
  write("/fs/a/b/memory.max", "50\n");
  EXPECT_EQ(room(), 10U);
  write("/fs/a/b/memory.current", "60\n");
  EXPECT_EQ(room(), 0U);
  write("/fs/a/b/memory.stat", "anon 9\ninactive_file 35\nactive_file 20\n");
  EXPECT_EQ(room(), 25U) << "the kernel takes files back";
}

}  // namespace
}  // namespace cudasched
