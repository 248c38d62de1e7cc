// Allocations of every kind where there is no memory, and a free that would make room waits at the gate.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "driver/driver.hpp"
#include "hook/entry_points.hpp"
#include "hook/intercept.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/other_client.hpp"

namespace cudasched::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kAsked = 16 * kMiB;  // of device memory that has kLeft
constexpr std::size_t kLeft = 4 * kMiB;

// The hook's own function: the simulated driver does not have all that a driver has.
template <typename Function, typename... Arguments>
CUresult call(const char* name, Arguments... arguments) {
  const auto points = hook::taken_over();
  const auto found = std::find_if(points.begin(), points.end(),
                                  [&](const auto& each) { return each.symbol == std::string_view(name); });
  if (found == points.end()) throw std::runtime_error(std::string(name) + " is not taken over");
  return reinterpret_cast<Function*>(found->legacy)(arguments...);
}

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t all = 0;
  Program::check(driver::table().cuMemGetInfo(&free, &all));
  return free;
}

// A driver that waits for what it was given to free before it says that there is no memory. What the simulated one does
// not allocate is there without being so.
struct Full {
  driver::Driver real;
  CUstream stream = nullptr;
  std::atomic<int> asked{0};
  bool has_memory() {
    ++asked;
    Program::check(real.cuStreamSynchronize.legacy(stream));
    return free_bytes() >= kAsked;
  }
} full;

template <auto kEntry>
struct Late;
template <typename... Arguments, CUresult (*driver::Driver::*kEntry)(Arguments...)>
struct Late<kEntry> {
  static CUresult call(Arguments... arguments) {
    if (!full.has_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
    auto* const real = full.real.*kEntry;
    return real == nullptr ? CUDA_SUCCESS : real(arguments...);
  }
  static void inject() { driver::table().*kEntry = &call; }
  static void restore() { driver::table().*kEntry = full.real.*kEntry; }
};
template <typename Function, driver::Twins<Function> driver::Driver::*kEntry>
struct Late<kEntry> {
  template <typename... Arguments>
  static CUresult call(Arguments... arguments) {
    return full.has_memory() ? (full.real.*kEntry).legacy(arguments...) : CUDA_ERROR_OUT_OF_MEMORY;
  }
  static void inject() { (driver::table().*kEntry).legacy = &call; }
  static void restore() { driver::table().*kEntry = full.real.*kEntry; }
};

struct Kind {
  const char* name;
  const char* symbol;
  void (*inject)();
  void (*restore)();
  CUresult (*allocate)(const char* symbol, const Program& program);
};
std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

template <auto kEntry>
constexpr Kind kind(const char* name, const char* symbol, CUresult (*allocate)(const char*, const Program&)) {
  return {name, symbol, &Late<kEntry>::inject, &Late<kEntry>::restore, allocate};
}

CUDA_ARRAY3D_DESCRIPTOR description(std::size_t depth) {
  return {.Width = 2048, .Height = 2048, .Depth = depth, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1, .Flags = 0};
}

CUresult create(const char* symbol, CUmemLocationType where) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = where;
  CUmemGenericAllocationHandle handle = 1;
  const CUresult status = call<decltype(cuMemCreate)>(symbol, &handle, kAsked, &properties, 0ULL);
  // The simulated driver has none on the host: it was asked again, which is what counts.
  return where == CU_MEM_LOCATION_TYPE_HOST && status == CUDA_ERROR_NOT_SUPPORTED ? CUDA_SUCCESS : status;
}

using driver::Driver;
const Kind kKinds[] = {
    kind<&Driver::cuMemAlloc>("plain", "cuMemAlloc_v2",
                              [](const char* symbol, const Program&) {
                                CUdeviceptr pointer = 0;
                                return call<decltype(cuMemAlloc)>(symbol, &pointer, kAsked);
                              }),
    kind<&Driver::cuMemAllocPitch>("pitch", "cuMemAllocPitch_v2",
                                   [](const char* symbol, const Program&) {
                                     CUdeviceptr pointer = 0;
                                     std::size_t pitch = 0;
                                     return call<decltype(cuMemAllocPitch)>(symbol, &pointer, &pitch, kMiB,
                                                                            kAsked / kMiB, 4U);
                                   }),
    kind<&Driver::cuMemAllocManaged>("managed", "cuMemAllocManaged",
                                     [](const char* symbol, const Program&) {
                                       CUdeviceptr pointer = 0;
                                       return call<decltype(cuMemAllocManaged)>(
                                           symbol, &pointer, kAsked, static_cast<unsigned>(CU_MEM_ATTACH_GLOBAL));
                                     }),
    kind<&Driver::cuMemAllocHost>("host", "cuMemAllocHost_v2",
                                  [](const char* symbol, const Program&) {
                                    void* pointer = nullptr;
                                    return call<decltype(cuMemAllocHost)>(symbol, &pointer, kAsked);
                                  }),
    kind<&Driver::cuMemHostAlloc>("host_with_flags", "cuMemHostAlloc",
                                  [](const char* symbol, const Program&) {
                                    void* pointer = nullptr;
                                    return call<decltype(cuMemHostAlloc)>(symbol, &pointer, kAsked, 0U);
                                  }),
    kind<&Driver::cuMemHostRegister>("registered", "cuMemHostRegister_v2",
                                     [](const char* symbol, const Program&) {
                                       static char memory[4096];
                                       return call<decltype(cuMemHostRegister)>(symbol, static_cast<void*>(memory),
                                                                                sizeof memory, 0U);
                                     }),
    kind<&Driver::cuArrayCreate>("array", "cuArrayCreate_v2",
                                 [](const char* symbol, const Program&) {
                                   CUarray array = nullptr;
                                   const CUDA_ARRAY_DESCRIPTOR of{2048, 2048, CU_AD_FORMAT_FLOAT, 1};
                                   return call<decltype(cuArrayCreate)>(symbol, &array, &of);
                                 }),
    kind<&Driver::cuArray3DCreate>("array_3d", "cuArray3DCreate_v2",
                                   [](const char* symbol, const Program&) {
                                     CUarray array = nullptr;
                                     const CUDA_ARRAY3D_DESCRIPTOR of = description(2);
                                     return call<decltype(cuArray3DCreate)>(symbol, &array, &of);
                                   }),
    kind<&Driver::cuMipmappedArrayCreate>("mipmapped_array", "cuMipmappedArrayCreate",
                                          [](const char* symbol, const Program&) {
                                            CUmipmappedArray array = nullptr;
                                            const CUDA_ARRAY3D_DESCRIPTOR of = description(1);
                                            return call<decltype(cuMipmappedArrayCreate)>(symbol, &array, &of, 2U);
                                          }),
    kind<&Driver::cuMemCreate>(
        "physical", "cuMemCreate",
        [](const char* symbol, const Program&) { return create(symbol, CU_MEM_LOCATION_TYPE_DEVICE); }),
    kind<&Driver::cuMemCreate>(
        "physical_on_the_host", "cuMemCreate",
        [](const char* symbol, const Program&) { return create(symbol, CU_MEM_LOCATION_TYPE_HOST); }),
    kind<&Driver::cuMemAllocAsync>("stream_ordered", "cuMemAllocAsync",
                                   [](const char* symbol, const Program& program) {
                                     CUdeviceptr pointer = 0;
                                     return call<decltype(cuMemAllocAsync)>(symbol, &pointer, kAsked, program.stream());
                                   }),
    kind<&Driver::cuMemAllocFromPoolAsync>("of_a_pool", "cuMemAllocFromPoolAsync",
                                           [](const char* symbol, const Program& program) {
                                             CUdeviceptr pointer = 0;
                                             return call<decltype(cuMemAllocFromPoolAsync)>(
                                                 symbol, &pointer, kAsked, static_cast<CUmemoryPool>(nullptr),
                                                 program.stream());
                                           }),
};

class NoMemory : public ::testing::TestWithParam<Kind> {
 protected:
  NoMemory() {
    full.real = driver::table();
    full.stream = program_.stream();
    Program::check(call<decltype(cuMemAllocAsync)>("cuMemAllocAsync", &most_, free_bytes() - kLeft, program_.stream()));
    {
      const InRegion region(CUDASCHED_BEST_EFFORT);  // its next launches are deferred
      for (std::uint64_t i = 0; i < 2; ++i) Program::check(program_.launch(i));
      Program::check(program_.synchronize());
    }
    GetParam().inject();
    full.asked = 0;
  }
  ~NoMemory() override { GetParam().restore(); }

  Program program_;
  CUdeviceptr most_ = 0;  // of the memory
};

TEST_P(NoMemory, IsSaidOnlyWhenEveryQueuedFreeWasMade) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  OtherClient other(/*active=*/true);
  ASSERT_EQ(program_.launch(2), CUDA_SUCCESS);
  ASSERT_EQ(call<decltype(cuMemFreeAsync)>("cuMemFreeAsync", most_, program_.stream()), CUDA_SUCCESS);
  std::thread opens([&] {
    EXPECT_TRUE(eventually([] { return full.asked > 0; }));
    other.kill();
  });
  EXPECT_EQ(GetParam().allocate(GetParam().symbol, program_), CUDA_SUCCESS);
  opens.join();
  EXPECT_EQ(full.asked, 2);
  EXPECT_EQ(program_.ran(), 3U);
}

// Nothing is queued: it is not asked twice.
TEST_P(NoMemory, IsSaidAtOnceWhereNothingIsQueued) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_EQ(GetParam().allocate(GetParam().symbol, program_), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(full.asked, 1);
}

TEST(Kinds, EachLineOfTheTableThatAllocatesIsOne) {
  std::set<std::string_view> tested;
  for (const Kind& each : kKinds) tested.insert(each.symbol);
  std::set<std::string_view> listed;
  for (const hook::EntryPoint& each : hook::entry_points()) {
    if (each.meaning == hook::Meaning::kAllocate) listed.insert(each.symbol);
  }
  EXPECT_EQ(tested, listed);
}

INSTANTIATE_TEST_SUITE_P(Kinds, NoMemory, ::testing::ValuesIn(kKinds),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace cudasched::test
