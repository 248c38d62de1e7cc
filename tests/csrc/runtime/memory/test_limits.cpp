// The door of memory, over the simulated driver: what is counted, where, and what a limit does.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "hook/intercept.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/memory_calls.hpp"
#include "runtime/other_client.hpp"

namespace cudasched {
namespace {

using test::allocate;
using test::call;
using test::free_memory;
using test::held;
using test::HookedDriver;
using test::InRegion;
using test::kMiB;
using test::Program;

class Limit {
 public:
  explicit Limit(const std::string& value) { EXPECT_EQ(set(value), CUDASCHED_OK) << cudasched_last_error(); }
  ~Limit() { set("none"); }
  static int set(const std::string& value) { return cudasched_configure("memory_limit", value.c_str()); }
};

TEST(MemoryDoor, CountsWhatAProgramAllocatesUntilItIsFreed) {
  const Program program;
  const std::uint64_t before = held();
  CUdeviceptr plain = 0;
  ASSERT_EQ(allocate(plain, 3 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(held(), before + 3 * kMiB);
  CUdeviceptr pitched = 0;
  std::size_t pitch = 0;
  ASSERT_EQ((call<CUresult(CUdeviceptr*, std::size_t*, std::size_t, std::size_t, unsigned)>("cuMemAllocPitch_v2")(
                &pitched, &pitch, 100, 4, 4)),
            CUDA_SUCCESS);
  EXPECT_EQ(held(), before + 3 * kMiB + 4 * pitch);
  EXPECT_EQ(free_memory(pitched), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(plain), CUDA_SUCCESS);
  EXPECT_NE(free_memory(plain), CUDA_SUCCESS);
  EXPECT_EQ(held(), before);
}

TEST(MemoryDoor, AFailedFreeIsNone) {
  const Program program;
  CUdeviceptr plain = 0;
  ASSERT_EQ(allocate(plain, kMiB), CUDA_SUCCESS);
  const std::uint64_t before = held();
  auto* const real = driver::table().cuMemFree;
  driver::driver_table.cuMemFree = [](CUdeviceptr) { return CUDA_ERROR_LAUNCH_FAILED; };
  EXPECT_EQ(free_memory(plain), CUDA_ERROR_LAUNCH_FAILED);
  driver::driver_table.cuMemFree = real;
  EXPECT_EQ(held(), before);
  EXPECT_EQ(free_memory(plain), CUDA_SUCCESS);
  EXPECT_EQ(held(), before - kMiB);
}

TEST(MemoryDoor, CountsPhysicalMemoryAndPools) {
  const Program program;
  const std::uint64_t before = held();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ((call<decltype(cuMemCreate)>("cuMemCreate")(&handle, 2 * kMiB, &properties, 0ULL)), CUDA_SUCCESS);
  ASSERT_EQ((call<decltype(cuMemMap)>("cuMemMap")(CUdeviceptr{0x7000'0000}, 2 * kMiB, std::size_t{0}, handle, 0ULL)),
            CUDA_SUCCESS);
  EXPECT_EQ(call<decltype(cuMemRelease)>("cuMemRelease")(handle), CUDA_SUCCESS);
  EXPECT_EQ(held(), before + 2 * kMiB);
  EXPECT_EQ((call<decltype(cuMemUnmap)>("cuMemUnmap")(CUdeviceptr{0x7000'0000}, 2 * kMiB)), CUDA_SUCCESS);
  EXPECT_EQ(held(), before);
  CUdeviceptr pointer = 0;
  ASSERT_EQ((call<decltype(cuMemAllocAsync)>("cuMemAllocAsync")(&pointer, 5 * kMiB, program.stream())), CUDA_SUCCESS);
  EXPECT_EQ(held(), before + 5 * kMiB);
  EXPECT_EQ((call<decltype(cuMemFreeAsync)>("cuMemFreeAsync")(pointer, program.stream())), CUDA_SUCCESS);
  EXPECT_EQ(program.synchronize(), CUDA_SUCCESS);
  runtime::memory().refresh_pools(0);
  EXPECT_EQ(held(), before);
}

// cuMemFreeAsync takes memory that no pool gave, too.
TEST(MemoryDoor, WhatIsFreedOnAStreamIsHeldNoMore) {
  const Program program;
  const std::uint64_t before = held();
  for (const bool best_effort : {false, true}) {
    const InRegion region(best_effort ? CUDASCHED_BEST_EFFORT : CUDASCHED_NORMAL);
    ASSERT_EQ(program.launch(1), CUDA_SUCCESS);
    CUdeviceptr plain = 0;
    ASSERT_EQ(allocate(plain, 3 * kMiB), CUDA_SUCCESS);
    EXPECT_EQ(held(), before + 3 * kMiB);
    EXPECT_EQ((call<decltype(cuMemFreeAsync)>("cuMemFreeAsync")(plain, program.stream())), CUDA_SUCCESS);
    EXPECT_EQ(held(), before);
    EXPECT_EQ(program.synchronize(), CUDA_SUCCESS);
    // The driver refuses it; nothing is given back twice.
    EXPECT_NE((call<decltype(cuMemFreeAsync)>("cuMemFreeAsync")(plain, program.stream())), CUDA_SUCCESS);
    EXPECT_EQ(held(), before);
  }
}

TEST(MemoryDoor, TellsOthersByClientAndClass) {
  const Program program;
  ASSERT_EQ(program.launch(1), CUDA_SUCCESS);
  CUdeviceptr of_best_effort = 0;
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    ASSERT_EQ(program.launch(2), CUDA_SUCCESS);
    ASSERT_EQ(allocate(of_best_effort, 6 * kMiB), CUDA_SUCCESS);
  }
  ASSERT_EQ(program.synchronize(), CUDA_SUCCESS);
  auto& table = HookedDriver::instance().table();
  const auto in_table = [&](Class wanted) {
    for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
      if (table.slot(slot).occupied.load() != 0 &&
          table.slot(slot).client_class.load() == static_cast<std::uint32_t>(wanted)) {
        return table.memory(slot).held_bytes.load();
      }
    }
    return ~std::uint64_t{0};
  };
  EXPECT_EQ(in_table(Class::kBestEffort), 6 * kMiB);
  EXPECT_EQ(free_memory(of_best_effort), CUDA_SUCCESS);
  EXPECT_EQ(in_table(Class::kBestEffort), 0u);
}

TEST(MemoryDoor, ALimitRefusesEveryKindOfAllocation) {
  const Program program;
  const std::uint64_t before = held();
  const Limit limit(std::to_string(before + 4 * kMiB));
  CUdeviceptr first = 0;
  CUdeviceptr other = 0;
  ASSERT_EQ(allocate(first, 3 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(allocate(other, 2 * kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  std::size_t pitch = 0;
  EXPECT_EQ((call<CUresult(CUdeviceptr*, std::size_t*, std::size_t, std::size_t, unsigned)>("cuMemAllocPitch_v2")(
                &other, &pitch, kMiB, 2, 4)),
            CUDA_ERROR_OUT_OF_MEMORY);
  CUmemAllocationProp properties{};
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ((call<decltype(cuMemCreate)>("cuMemCreate")(&handle, 2 * kMiB, &properties, 0ULL)),
            CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ((call<decltype(cuMemAllocAsync)>("cuMemAllocAsync")(&other, 2 * kMiB, program.stream())),
            CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ((call<decltype(cuMemAllocFromPoolAsync)>("cuMemAllocFromPoolAsync")(
                &other, 2 * kMiB, static_cast<CUmemoryPool>(nullptr), program.stream())),
            CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(held(), before + 3 * kMiB);
  EXPECT_EQ(free_memory(first), CUDA_SUCCESS);
  ASSERT_EQ((call<decltype(cuMemAllocAsync)>("cuMemAllocAsync")(&other, 2 * kMiB, program.stream())), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(other), CUDA_SUCCESS);
  runtime::memory().refresh_pools(0);
  EXPECT_EQ(held(), before);
}

// Each one's memory is in the pool's size before the other's reservation is given up.
TEST(MemoryDoor, ThreadsThatAllocateFromAPoolAtOnceHaveTheLimitsRoom) {
  const Program program;
  const Limit limit(std::to_string(held() + 10 * kMiB));
  static std::atomic<int> asked;
  static std::atomic<int> made;
  static std::atomic<bool> first_returned;
  static const auto real = driver::table().cuMemAllocAsync.legacy;
  const test::Replaced at_once(
      driver::driver_table.cuMemAllocAsync.legacy, +[](CUdeviceptr* pointer, std::size_t bytes, CUstream stream) {
        const bool is_first = bytes == 4 * kMiB;
        ++asked;
        EXPECT_TRUE(test::eventually([] { return asked == 2; }));
        const CUresult status = real(pointer, bytes, stream);
        ++made;
        EXPECT_TRUE(test::eventually([&] { return is_first ? made == 2 : first_returned.load(); }));
        return status;
      });
  const auto allocate_async = [&](std::size_t bytes) {
    CUdeviceptr pointer = 0;
    program.use_on_this_thread();
    const CUresult status = call<decltype(cuMemAllocAsync)>("cuMemAllocAsync")(&pointer, bytes, program.stream());
    EXPECT_EQ(status, CUDA_SUCCESS) << bytes;
    return pointer;
  };
  CUdeviceptr second = 0;
  std::thread other([&] { second = allocate_async(5 * kMiB); });
  const CUdeviceptr first = allocate_async(4 * kMiB);
  first_returned = true;
  other.join();
  EXPECT_EQ(free_memory(first), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(second), CUDA_SUCCESS);
}

TEST(MemoryDoor, APoolOfTheHostsMemoryIsNotTheGpus) {
  const Program program;
  const std::uint64_t before = held();
  const test::Replaced creates(
      driver::driver_table.cuMemPoolCreate, +[](CUmemoryPool* pool, const CUmemPoolProps*) {
        *pool = reinterpret_cast<CUmemoryPool>(0x1234);
        return CUDA_SUCCESS;
      });
  const test::Replaced has(
      driver::driver_table.cuMemPoolGetAttribute, +[](CUmemoryPool, CUmemPool_attribute, void* bytes) {
        *static_cast<cuuint64_t*>(bytes) = 4 * kMiB;
        return CUDA_SUCCESS;
      });
  const test::Replaced allocates(
      driver::driver_table.cuMemAllocFromPoolAsync.legacy,
      +[](CUdeviceptr* pointer, std::size_t, CUmemoryPool, CUstream) {
        *pointer = 0x7000'0000;
        return CUDA_SUCCESS;
      });
  CUmemPoolProps properties{};
  properties.location.type = CU_MEM_LOCATION_TYPE_HOST;
  CUmemoryPool pool = nullptr;
  const auto points = hook::taken_over();  // the simulated driver has no such function
  const auto create = std::ranges::find(points, std::string_view("cuMemPoolCreate"), &hook::TakenOver::symbol);
  ASSERT_NE(create, points.end());
  ASSERT_EQ(reinterpret_cast<decltype(&cuMemPoolCreate)>(create->legacy)(&pool, &properties), CUDA_SUCCESS);
  const auto allocate_of_it = [&] {
    CUdeviceptr pointer = 0;
    return call<decltype(cuMemAllocFromPoolAsync)>("cuMemAllocFromPoolAsync")(&pointer, 4 * kMiB, pool,
                                                                              program.stream());
  };
  EXPECT_EQ(allocate_of_it(), CUDA_SUCCESS);
  EXPECT_EQ(held(), before);
  const Limit limit(std::to_string(before + 2 * kMiB));
  EXPECT_EQ(allocate_of_it(), CUDA_SUCCESS);
  runtime::memory().holdings.forget_pool(0x1234);
}

// As another process may do while the allocation waits for memory.
TEST(MemoryDoor, ALimitThatChangesInAnAllocationChangesNoAccount) {
  const Program program;
  const std::uint64_t before = held();
  static const char* next = nullptr;
  static const auto real = driver::table().cuMemAllocAsync.legacy;
  const test::Replaced changes(
      driver::driver_table.cuMemAllocAsync.legacy, +[](CUdeviceptr* pointer, std::size_t bytes, CUstream stream) {
        Limit::set(next);
        return real(pointer, bytes, stream);
      });
  for (const char* const to : {"1GiB", "none"}) {
    next = to;
    CUdeviceptr pointer = 0;
    EXPECT_EQ((call<decltype(cuMemAllocAsync)>("cuMemAllocAsync")(&pointer, 4 * kMiB, program.stream())), CUDA_SUCCESS);
    EXPECT_EQ(held(), before + 4 * kMiB) << to;
    EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
    runtime::memory().refresh_pools(0);
    EXPECT_EQ(held(), before) << to;
  }
}

TEST(MemoryDoor, UnderALimitTheGpuIsAsLargeAsThat) {
  const Program program;
  const std::uint64_t before = held();
  const Limit limit(std::to_string(before + 10 * kMiB));
  CUdeviceptr pointer = 0;
  ASSERT_EQ(allocate(pointer, 4 * kMiB), CUDA_SUCCESS);
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  ASSERT_EQ((call<CUresult(std::size_t*, std::size_t*)>("cuMemGetInfo_v2")(&free_bytes, &all_bytes)), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes, 6 * kMiB);
  EXPECT_EQ(all_bytes, before + 10 * kMiB);
  std::size_t size = 0;
  ASSERT_EQ((call<decltype(cuDeviceTotalMem)>("cuDeviceTotalMem_v2")(&size, CUdevice{0})), CUDA_SUCCESS);
  EXPECT_EQ(size, all_bytes);
  unsigned free_of_v1 = 0;
  unsigned all_of_v1 = 0;
  ASSERT_EQ((call<CUresult(unsigned*, unsigned*)>("cuMemGetInfo")(&free_of_v1, &all_of_v1)), CUDA_SUCCESS);
  EXPECT_EQ(free_of_v1, free_bytes);
  EXPECT_EQ(all_of_v1, all_bytes);
  unsigned size_of_v1 = 0;
  ASSERT_EQ((call<CUresult(unsigned*, CUdevice)>("cuDeviceTotalMem")(&size_of_v1, CUdevice{0})), CUDA_SUCCESS);
  EXPECT_EQ(size_of_v1, all_bytes);
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

TEST(MemoryDoor, WhatTheDriverRefusesChangesNothing) {
  const Program program;
  const std::uint64_t before = held();
  constexpr CUdeviceptr kAddress = 0x7000'0000;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ((call<decltype(cuMemCreate)>("cuMemCreate")(&handle, 4 * kMiB, &properties, 0ULL)), CUDA_SUCCESS);
  ASSERT_EQ((call<decltype(cuMemMap)>("cuMemMap")(kAddress, 4 * kMiB, std::size_t{0}, handle, 0ULL)), CUDA_SUCCESS);
  EXPECT_NE((call<decltype(cuMemUnmap)>("cuMemUnmap")(kAddress, 2 * kMiB)), CUDA_SUCCESS);  // of a part
  EXPECT_EQ((call<decltype(cuMemRelease)>("cuMemRelease")(handle)), CUDA_SUCCESS);
  EXPECT_NE((call<decltype(cuMemRelease)>("cuMemRelease")(handle)), CUDA_SUCCESS);  // twice
  EXPECT_EQ(held(), before + 4 * kMiB);
  EXPECT_EQ((call<decltype(cuMemUnmap)>("cuMemUnmap")(kAddress, 4 * kMiB)), CUDA_SUCCESS);
  EXPECT_NE((call<decltype(cuMemUnmap)>("cuMemUnmap")(kAddress, 4 * kMiB)), CUDA_SUCCESS);
  EXPECT_EQ(held(), before);
}

TEST(MemoryDoor, ALimitBelowWhatIsHeldIsRefusedAndChangesNothing) {
  const Program program;
  CUdeviceptr pointer = 0;
  ASSERT_EQ(allocate(pointer, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(Limit::set("2MiB"), CUDASCHED_CONFIG_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("below the"), std::string::npos) << cudasched_last_error();
  EXPECT_EQ(runtime::memory().holdings.limit(), 0u);
  for (const char* const wrong : {"much", "20 gigabytes", "-5GiB", "12", "", "1e400", "nan", "20GiBs"}) {
    EXPECT_EQ(Limit::set(wrong), CUDASCHED_CONFIG_ERROR) << wrong;
  }
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

}  // namespace
}  // namespace cudasched
