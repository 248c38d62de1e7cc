// What the driver is asked of a kernel, how its parameters are gathered, and which memory is known, over the simulated
// driver.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <thread>

#include "driver/functions.hpp"
#include "hooked_driver.hpp"
#include "runtime/engine.hpp"

namespace cudasched::test {
namespace {

constexpr char kTwoKernels[] =
    "cudasched-sim 1\n"
    "kernel mixed params=4,8,2,4 regs=40 shared=256 threads_max=512\n"
    "kernel bare regs=16\n";

class Functions : public ::testing::Test {
 protected:
  Functions() { load(kTwoKernels); }

  void load(const char* image) { module_ = Program::load(image); }
  void unload() { Program::check(call<CUresult(CUmodule)>("cuModuleUnload")(module_)); }

  CUfunction function(const char* name) const { return Program::find(module_, name); }

  Program program_;
  CUmodule module_ = nullptr;
};

TEST_F(Functions, AreDescribedAsTheDriverDescribesThem) {
  const driver::KernelFacts* const mixed = driver::functions().find(function("mixed"));
  ASSERT_NE(mixed, nullptr);
  EXPECT_EQ(mixed->name, "mixed");
  EXPECT_EQ(mixed->facts.registers, 40U);
  EXPECT_EQ(mixed->facts.static_shared_bytes, 256U);
  EXPECT_EQ(mixed->facts.max_threads, 512U);
  ASSERT_EQ(mixed->parameters.size(), 4U);
  EXPECT_EQ(mixed->parameters[1].offset, 8U);
  EXPECT_EQ(mixed->parameters[2].bytes, 2U);
  EXPECT_EQ(mixed->facts.parameter_bytes, 24U);
  EXPECT_NE(mixed->facts.identity, 0U);
  EXPECT_EQ(driver::functions().find(function("mixed")), mixed);

  const driver::KernelFacts* const bare = driver::functions().find(function("bare"));
  ASSERT_NE(bare, nullptr);
  EXPECT_TRUE(bare->has_layout);
  EXPECT_EQ(bare->facts.parameter_bytes, 0U);
  EXPECT_NE(bare->facts.identity, mixed->facts.identity);
  EXPECT_NE(bare->facts.index, mixed->facts.index);
}

// The driver may hand a handle out again as soon as it has freed it, to another thread, before the unload returns: a
// layout that is still the old kernel's would be read beyond the new one's parameters.
TEST_F(Functions, AreForgottenBeforeTheDriverFreesThem) {
  static void* const again = reinterpret_cast<void*>(std::uintptr_t{0x1230});
  static std::size_t parameters = 4;
  static const driver::KernelFacts* seen = nullptr;
  const driver::Driver real = driver::table();
  driver::table().cuFuncGetAttribute = [](int* value, CUfunction_attribute, CUfunction) {
    *value = 32;
    return CUDA_SUCCESS;
  };
  driver::table().cuFuncGetParamInfo = [](CUfunction, std::size_t i, std::size_t* offset, std::size_t* bytes) {
    *offset = 8 * i;
    *bytes = 8;
    return i < parameters ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  const auto goes = [] {
    parameters = 1;
    std::thread([] { seen = driver::functions().find(again); }).join();
    return CUDA_SUCCESS;
  };
  driver::table().cuModuleUnload = [](CUmodule) -> CUresult { return decltype(goes){}(); };
  driver::table().cuLibraryUnload = [](CUlibrary) -> CUresult { return decltype(goes){}(); };
  for (const char* const unload : {"cuModuleUnload", "cuLibraryUnload"}) {
    driver::functions().forget_handles();
    parameters = 4;
    seen = nullptr;
    ASSERT_EQ(driver::functions().find(again)->parameters.size(), 4U);
    EXPECT_EQ(call<CUresult(void*)>(unload)(nullptr), CUDA_SUCCESS);
    ASSERT_NE(seen, nullptr);
    EXPECT_EQ(seen->parameters.size(), 1U) << unload;
    EXPECT_EQ(driver::functions().find(again)->parameters.size(), 1U) << unload;
  }
  driver::table() = real;
  driver::functions().forget_handles();
}

TEST_F(Functions, OfAKernelHandleAreTheFunctionsOwn) {
  CUlibrary library = nullptr;
  Program::check(call<decltype(cuLibraryLoadData)>("cuLibraryLoadData")(&library, kTwoKernels, nullptr, nullptr, 0,
                                                                        nullptr, nullptr, 0));
  CUkernel kernel = nullptr;
  Program::check(call<decltype(cuLibraryGetKernel)>("cuLibraryGetKernel")(&kernel, library, "mixed"));
  const driver::KernelFacts* const as_kernel = driver::functions().find(kernel);
  EXPECT_EQ(as_kernel, driver::functions().find(function("mixed")));
  Program::check(call<decltype(cuLibraryUnload)>("cuLibraryUnload")(library));
}

// Tools report each call that fails: the driver is asked for no function where it gave out a kernel.
TEST_F(Functions, GivenOutAsKernelsAreAskedForAsSuch) {
  CUlibrary library = nullptr;
  Program::check(call<decltype(cuLibraryLoadData)>("cuLibraryLoadData")(&library, kTwoKernels, nullptr, nullptr, 0,
                                                                        nullptr, nullptr, 0));
  CUkernel kernel = nullptr;
  Program::check(call<decltype(cuLibraryGetKernel)>("cuLibraryGetKernel")(&kernel, library, "mixed"));
  static int refused;
  refused = 0;
  const driver::Driver real = driver::table();
  driver::table().cuFuncGetAttribute = [](int*, CUfunction_attribute, CUfunction) {
    ++refused;
    return CUDA_ERROR_INVALID_HANDLE;
  };
  driver::table().cuFuncGetModule = [](CUmodule*, CUfunction) {
    ++refused;
    return CUDA_ERROR_INVALID_HANDLE;
  };
  driver::table().cuFuncGetName = [](const char**, CUfunction) {
    ++refused;
    return CUDA_ERROR_INVALID_HANDLE;
  };
  driver::table().cuFuncGetParamInfo = [](CUfunction, std::size_t, std::size_t*, std::size_t*) {
    ++refused;
    return CUDA_ERROR_INVALID_HANDLE;
  };
  const driver::KernelFacts* const facts = driver::functions().find(kernel);
  driver::table() = real;
  ASSERT_NE(facts, nullptr);
  EXPECT_EQ(facts->name, "mixed");
  EXPECT_EQ(refused, 0);
  Program::check(call<decltype(cuLibraryUnload)>("cuLibraryUnload")(library));
}

TEST_F(Functions, AtAHandleThatWasAKernelsAreStillFound) {
  const CUfunction mine = function("mixed");
  driver::functions().given_as_kernel(reinterpret_cast<CUkernel>(mine));
  driver::functions().forget_handles();
  const driver::KernelFacts* const facts = driver::functions().find(mine);
  ASSERT_NE(facts, nullptr);
  EXPECT_EQ(facts->name, "mixed");
}

TEST_F(Functions, KeepWhatTheyAreWhenAModuleIsLoadedAgain) {
  const driver::KernelFacts* const before = driver::functions().find(function("mixed"));
  unload();
  load(kTwoKernels);
  EXPECT_EQ(driver::functions().find(function("mixed")), before);
}

TEST_F(Functions, HandleOfAnUnloadedModuleMeansWhateverHasItNext) {
  const driver::KernelFacts* const before = driver::functions().find(function("bare"));
  unload();
  load("cudasched-sim 1\nkernel another regs=77\n");
  const driver::KernelFacts* const after = driver::functions().find(function("another"));
  ASSERT_NE(after, nullptr);
  EXPECT_NE(after, before);
  EXPECT_EQ(after->facts.registers, 77U);
}

TEST_F(Functions, OfOtherModulesAndLibrariesStayKnown) {
  const auto is_known = [](const void* handle) {
    driver::Functions::Known known;
    return driver::functions().find(handle, known);
  };
  const auto library_of = [] {
    CUlibrary library = nullptr;
    Program::check(call<decltype(cuLibraryLoadData)>("cuLibraryLoadData")(&library, kTwoKernels, nullptr, nullptr, 0,
                                                                          nullptr, nullptr, 0));
    return library;
  };
  const auto kernel_of = [](CUlibrary library) {
    CUkernel kernel = nullptr;
    Program::check(call<decltype(cuLibraryGetKernel)>("cuLibraryGetKernel")(&kernel, library, "bare"));
    return kernel;
  };
  const CUfunction mine = function("mixed");
  const CUlibrary library = library_of();
  const CUlibrary other_library = library_of();
  const CUkernel kernel = kernel_of(library);
  const CUkernel other_kernel = kernel_of(other_library);
  CUmodule other_module = Program::load(kTwoKernels);
  for (const void* handle :
       {static_cast<const void*>(mine), static_cast<const void*>(kernel), static_cast<const void*>(other_kernel)}) {
    ASSERT_NE(driver::functions().find(handle), nullptr);
    ASSERT_TRUE(is_known(handle));
  }
  Program::check(call<CUresult(CUmodule)>("cuModuleUnload")(other_module));
  EXPECT_TRUE(is_known(mine) && is_known(kernel) && is_known(other_kernel));
  unload();
  EXPECT_FALSE(is_known(mine));
  EXPECT_TRUE(is_known(kernel) && is_known(other_kernel));
  Program::check(call<decltype(cuLibraryUnload)>("cuLibraryUnload")(library));
  EXPECT_FALSE(is_known(kernel));
  EXPECT_TRUE(is_known(other_kernel));
  Program::check(call<decltype(cuLibraryUnload)>("cuLibraryUnload")(other_library));
}

// As Triton makes them: the name and the size of the block are the same, the parameters are not.
TEST_F(Functions, OfOneNameAndOtherParametersAreOthers) {
  load("cudasched-sim 1\nkernel twin params=8,8,4,4\n");
  const driver::KernelFacts* const four = driver::functions().find(function("twin"));
  load("cudasched-sim 1\nkernel twin params=8,8,8\n");
  const driver::KernelFacts* const three = driver::functions().find(function("twin"));
  ASSERT_NE(four, three);
  EXPECT_EQ(four->facts.parameter_bytes, three->facts.parameter_bytes);
  EXPECT_EQ(four->parameters.size(), 4U);
  EXPECT_EQ(three->parameters.size(), 3U);
}

TEST_F(Functions, GatherParametersWithZerosBetweenThem) {
  const driver::KernelFacts* const mixed = driver::functions().find(function("mixed"));
  std::uint32_t first = 0x11111111;
  std::uint64_t second = 0x2222222233333333;
  std::uint16_t third = 0x4444;
  std::uint32_t fourth = 0x55555555;
  void* parameters[] = {&first, &second, &third, &fourth};
  predict::Launch launch;
  launch.parameters = parameters;
  std::array<std::uint32_t, 1024> block;
  block.fill(~0U);
  ASSERT_EQ(mixed->gather(launch, block.data()), 6U);
  const std::array<std::uint32_t, 6> wanted{0x11111111, 0, 0x33333333, 0x22222222, 0x4444, 0x55555555};
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), block.begin()));
  EXPECT_EQ(block[6], ~0U);

  // The same, as one buffer.
  std::array<std::uint32_t, 6> buffer = wanted;
  std::size_t bytes = sizeof buffer;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  launch.parameters = nullptr;
  launch.extra = extra;
  block.fill(~0U);
  ASSERT_EQ(mixed->gather(launch, block.data()), 6U);
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), block.begin()));

  bytes = 4096;  // more than the kernel takes: nothing is read
  EXPECT_EQ(mixed->gather(launch, block.data()), 0U);
  launch.extra = nullptr;
  EXPECT_EQ(mixed->gather(launch, block.data()), 0U);
}

TEST_F(Functions, KernelsWithoutDescriptionAreNone) {
  int nothing = 0;
  EXPECT_EQ(driver::functions().find(&nothing), nullptr);
}

TEST_F(Functions, MemoryIsKnownOnceCudaHasMadeIt) {
  const predict::Allocations& known = *runtime::engine().allocations();
  CUdeviceptr device = 0;
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&device, kBytes));
  EXPECT_TRUE(known.contains(device));
  EXPECT_TRUE(known.contains(device + kBytes - 1));
  void* host = nullptr;
  Program::check(call<CUresult(void**, std::size_t, unsigned)>("cuMemHostAlloc")(&host, 4096, 0));
  EXPECT_TRUE(known.contains(reinterpret_cast<std::uintptr_t>(host)));
  EXPECT_FALSE(known.contains(0));
  EXPECT_FALSE(known.contains(4096));
  Program::check(call<CUresult(CUdeviceptr)>("cuMemFree_v2")(device));
  Program::check(call<CUresult(void*)>("cuMemFreeHost")(host));
}

}  // namespace
}  // namespace cudasched::test
