// Large allocations of a best-effort process in chunks: to the program they are as the driver's, and the driver makes
// them where it must.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hook/intercept.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/memory_calls.hpp"
#include "runtime/other_client.hpp"

namespace cudasched {
namespace {

using namespace std::chrono_literals;
using test::allocate;
using test::call;
using test::free_memory;
using test::held;
using test::InRegion;
using test::kMiB;
using test::OtherClient;
using test::Program;

bool is_ours(CUdeviceptr pointer) { return runtime::memory().pageable.find(pointer).has_value(); }

// Each test is a process of its own, and a best-effort one.
class PageableTest : public ::testing::Test {
 protected:
  std::size_t free_bytes() {
    std::size_t free = 0;
    std::size_t all = 0;
    Program::check(driver::table().cuMemGetInfo(&free, &all));
    return free;
  }
  struct Settings {
    Settings() {
      setenv("CUDASCHED_CLASS", "best_effort", 1);
      setenv("CUDASCHED_PAGEABLE", "on", 1);
      setenv("CUDASCHED_SIM_MEMORY_MB", "1024", 1);  // sanitizers leave less room for addresses
    }
  } settings_;
  Program program_;
};

TEST_F(PageableTest, LooksToTheProgramAsOneAllocation) {
  const std::size_t free_before = free_bytes();
  const std::uint64_t held_before = held();
  CUdeviceptr pointer = 0;
  constexpr std::size_t kBytes = 71 * kMiB + 5;  // chunks of 32 MiB and less
  ASSERT_EQ(allocate(pointer, kBytes), CUDA_SUCCESS);
  ASSERT_TRUE(is_ours(pointer));
  EXPECT_EQ(held(), held_before + kBytes);
  EXPECT_EQ(free_bytes(), free_before - 72 * kMiB);

  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  const CUdeviceptr last = pointer + kBytes - 1;
  ASSERT_EQ((call<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange_v2")(&begin, &bytes, last)), CUDA_SUCCESS);
  EXPECT_EQ(begin, pointer);
  EXPECT_EQ(bytes, kBytes);
  CUcontext context = nullptr;
  unsigned type = 0;
  begin = bytes = 0;
  std::array attributes{CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                        CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  std::array<void*, 4> data{&begin, &bytes, &context, &type};
  ASSERT_EQ(
      (call<decltype(cuPointerGetAttributes)>("cuPointerGetAttributes")(4U, attributes.data(), data.data(), last)),
      CUDA_SUCCESS);
  EXPECT_EQ(begin, pointer);
  EXPECT_EQ(bytes, kBytes);
  EXPECT_EQ(context, program_.context());
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
  bytes = 0;
  ASSERT_EQ((call<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute")(static_cast<void*>(&bytes),
                                                                            CU_POINTER_ATTRIBUTE_RANGE_SIZE, last)),
            CUDA_SUCCESS);
  EXPECT_EQ(bytes, kBytes);

  EXPECT_NE(free_memory(pointer + 512), CUDA_SUCCESS) << "no allocation begins there";
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
  EXPECT_NE(free_memory(pointer), CUDA_SUCCESS) << "it is free";
  EXPECT_EQ(held(), held_before);
  EXPECT_EQ(free_bytes(), free_before) << "nothing is kept";
}

// The kernel's counter is in the block: where a free did not wait, the simulated driver would end the process.
TEST_F(PageableTest, AFreeWaitsForKernelsInFlightAndInTheRing) {
  const OtherClient other(/*active=*/false);
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 64 * kMiB), CUDA_SUCCESS);
  ASSERT_TRUE(is_ours(block));
  ASSERT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t)>("cuMemsetD8_v2")(block, 0, 64 * kMiB)),
            CUDA_SUCCESS);
  std::uint64_t values = block + 40 * kMiB;
  std::uint64_t count = block;
  std::uint64_t value = 7;
  std::uint32_t us = 3000;
  void* parameters[] = {&values, &count, &value, &us};
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ((call<decltype(cuLaunchKernel)>("cuLaunchKernel")(program_.timed_function(), 132U, 1U, 1U, 64U, 1U, 1U,
                                                                0U, program_.stream(), static_cast<void**>(parameters),
                                                                static_cast<void**>(nullptr))),
              CUDA_SUCCESS);
  }
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
  EXPECT_EQ(driver::table().cuStreamQuery.legacy(program_.stream()), CUDA_SUCCESS);
}

TEST_F(PageableTest, AFreeOnAStreamGivesBackWithTheNextAllocationThatNeedsIt) {
  const std::size_t most = free_bytes() / (2 * kMiB) * 2 * kMiB;
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, most), CUDA_SUCCESS);
  ASSERT_TRUE(is_ours(block));
  EXPECT_EQ((call<CUresult(CUdeviceptr, CUstream)>("cuMemFreeAsync")(block, program_.stream())), CUDA_SUCCESS);
  EXPECT_FALSE(is_ours(block));
  EXPECT_NE(free_memory(block), CUDA_SUCCESS) << "it is free";
  CUdeviceptr next = 0;
  ASSERT_EQ(allocate(next, most), CUDA_SUCCESS);
  CUdeviceptr more = 0;
  EXPECT_EQ(allocate(more, 4 * kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(free_memory(next), CUDA_SUCCESS);
  EXPECT_GE(free_bytes(), most);
}

TEST_F(PageableTest, WhileAStreamCapturesAllocationsArePlainAndFreesGoLater) {
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  const std::size_t free_before = free_bytes();
  ASSERT_EQ((call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2")(program_.stream(),
                                                                                      CU_STREAM_CAPTURE_MODE_RELAXED)),
            CUDA_SUCCESS);
  CUdeviceptr plain = 0;
  ASSERT_EQ(allocate(plain, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_FALSE(is_ours(plain));
  EXPECT_EQ(free_memory(block), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before - 4 * kMiB) << "the capture is not disturbed";
  CUgraph graph = nullptr;
  ASSERT_EQ((call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture")(program_.stream(), &graph)), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before) << "its end is the time for them";
  CUdeviceptr next = 0;
  ASSERT_EQ(allocate(next, 2 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(next), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(plain), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), free_before + 4 * kMiB);
}

TEST_F(PageableTest, IsNotForSmallAllocationsOtherClassesAndOtherContexts) {
  CUdeviceptr pointer = 0;
  const auto plain = [&](std::size_t bytes) {
    EXPECT_EQ(allocate(pointer, bytes), CUDA_SUCCESS);
    EXPECT_FALSE(is_ours(pointer));
    EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
  };
  plain(2 * kMiB - 1);
  CUcontext other = nullptr;
  ASSERT_EQ((call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0U, CUdevice{0})), CUDA_SUCCESS);
  plain(2 * kMiB);
  ASSERT_EQ((call<CUresult(CUcontext)>("cuCtxDestroy_v2")(other)), CUDA_SUCCESS);
  program_.use_on_this_thread();
  {
    const InRegion region(CUDASCHED_LATENCY);
    plain(2 * kMiB);
  }
  ASSERT_EQ(allocate(pointer, 2 * kMiB), CUDA_SUCCESS);
  EXPECT_TRUE(is_ours(pointer));
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

TEST_F(PageableTest, AProgramThatSharesMemoryGetsPlainAllocationsFromThenOn) {
  static int asked = 0;
  driver::driver_table.cuIpcGetMemHandle = [](CUipcMemHandle*, CUdeviceptr) {
    ++asked;
    return CUDA_ERROR_INVALID_VALUE;
  };
  CUdeviceptr before = 0;
  ASSERT_EQ(allocate(before, 4 * kMiB), CUDA_SUCCESS);
  ASSERT_TRUE(is_ours(before));
  CUipcMemHandle handle{};
  ::testing::internal::CaptureStderr();
  const auto points = hook::taken_over();
  const auto get = std::ranges::find(points, std::string_view("cuIpcGetMemHandle"), &hook::TakenOver::symbol);
  ASSERT_NE(get, points.end());
  EXPECT_EQ(reinterpret_cast<decltype(&cuIpcGetMemHandle)>(get->legacy)(&handle, before), CUDA_ERROR_INVALID_VALUE);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("set pageable = false"), std::string::npos);
  EXPECT_EQ(asked, 1);
  CUdeviceptr after = 0;
  ASSERT_EQ(allocate(after, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_FALSE(is_ours(after));
  EXPECT_EQ(free_memory(before), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(after), CUDA_SUCCESS);
}

TEST_F(PageableTest, GoesWithTheContext) {
  const std::size_t free_before = free_bytes();
  CUdeviceptr block = 0;
  ASSERT_EQ(allocate(block, 64 * kMiB), CUDA_SUCCESS);
  ASSERT_TRUE(is_ours(block));
  ASSERT_EQ((call<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(CUdevice{0})), CUDA_SUCCESS);
  EXPECT_FALSE(is_ours(block));
  CUcontext context = nullptr;
  Program::check(driver::table().cuDevicePrimaryCtxRetain(&context, 0));
  Program::check(driver::table().cuCtxSetCurrent(context));
  EXPECT_GE(free_bytes(), free_before);
  ASSERT_EQ(allocate(block, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_FALSE(is_ours(block));
}

// The first thread has seen its free when the second one carries it out, too, and gets the same address again.
TEST_F(PageableTest, ABlockIsNotTakenForTheOneThatWasThereBefore) {
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  ASSERT_EQ(allocate(first, 8 * kMiB), CUDA_SUCCESS);
  ASSERT_EQ(allocate(second, 4 * kMiB), CUDA_SUCCESS);
  static CUdeviceptr made;
  static CUdeviceptr other_block;
  static std::atomic<bool> is_first{true};
  static std::atomic<bool> allocated{false};
  static std::thread other;
  static Program* program;
  static const auto real = driver::table().cuCtxSynchronize;
  program = &program_;
  other_block = second;
  {
    const test::Replaced between(
        driver::driver_table.cuCtxSynchronize, +[] {
          if (!is_first.exchange(false)) return real();
          other = std::thread([] {
            program->use_on_this_thread();
            EXPECT_EQ(free_memory(other_block), CUDA_SUCCESS);
            EXPECT_EQ(allocate(made, 8 * kMiB), CUDA_SUCCESS);
            allocated = true;
          });
          for (int looks = 0; looks < 300 && !allocated; ++looks) std::this_thread::sleep_for(1ms);  // or it waits
          return real();
        });
    EXPECT_EQ(free_memory(first), CUDA_SUCCESS);
    other.join();
  }
  EXPECT_TRUE(is_ours(made));
  EXPECT_EQ(free_memory(made), CUDA_SUCCESS);
}

// Copies and fills over the seams of chunks, and blocks that share pages: each block keeps its own bytes.
TEST_F(PageableTest, RandomHistoriesKeepEveryByte) {
  const std::size_t free_before = free_bytes();
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same each time
  std::map<CUdeviceptr, std::pair<std::size_t, unsigned char>> blocks;
  std::vector<unsigned char> read;
  const auto check_and_free = [&](auto block) {
    const auto [bytes, value] = block->second;
    read.resize(bytes);
    ASSERT_EQ((call<CUresult(void*, CUdeviceptr, std::size_t)>("cuMemcpyDtoH_v2")(static_cast<void*>(read.data()),
                                                                                  block->first, bytes)),
              CUDA_SUCCESS);
    ASSERT_TRUE(read[0] == value && std::memcmp(read.data(), read.data() + 1, bytes - 1) == 0);  // all are alike
    ASSERT_EQ(free_memory(block->first), CUDA_SUCCESS);
    blocks.erase(block);
  };
  for (int step = 0; step < 200; ++step) {
    if (blocks.size() > 8 || (!blocks.empty() && random() % 3 == 0)) {
      ASSERT_NO_FATAL_FAILURE(check_and_free(std::next(blocks.begin(), random() % blocks.size())));
      continue;
    }
    CUdeviceptr made = 0;
    const std::size_t bytes = 2 * kMiB + random() % (random() % 8 == 0 ? 70 * kMiB : 5 * kMiB);
    const auto value = static_cast<unsigned char>(random());
    ASSERT_EQ(allocate(made, bytes), CUDA_SUCCESS);
    ASSERT_TRUE(is_ours(made));
    ASSERT_EQ((call<CUresult(CUdeviceptr, unsigned char, std::size_t)>("cuMemsetD8_v2")(made, value, bytes)),
              CUDA_SUCCESS);
    blocks[made] = {bytes, value};
  }
  while (!blocks.empty()) ASSERT_NO_FATAL_FAILURE(check_and_free(blocks.begin()));
  EXPECT_EQ(free_bytes(), free_before);
}

}  // namespace
}  // namespace cudasched
