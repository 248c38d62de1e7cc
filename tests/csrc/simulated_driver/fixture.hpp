// What the tests of the double share: a directory of simulated devices of this process's own, and a program-like setup.
#pragma once

#include <cuda.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "private_directory.hpp"

namespace cudasched::simulated_driver {

// One directory a test program. Set up before the first cuInit, so from every fixture.
inline const std::string& device_directory() {
  static const std::string path = [] {
    static const test::PrivateDirectory directory;
    setenv("CUDASCHED_SIM_DIR", directory.path().c_str(), 1);
    setenv("CUDASCHED_SIM_SCALE", "1", 1);
    return directory.path();
  }();
  return path;
}

inline constexpr const char* kTestImage =
    "cudasched-sim 1\n"
    "kernel append params=8,8,8,4 block_us=param:3 effect=append\n"
    "kernel axpy params=8,8,4,4 effect=axpy\n"
    "kernel condition params=8,4 effect=condition\n"
    "kernel countdown params=8,8 effect=countdown\n"
    "kernel spin params=4 block_us=param:0 regs=64\n"
    "kernel wide shared=40000 threads_max=256 blocks_per_sm=16 regs=128\n"
    "kernel mixed params=4,8,1\n";

class DoubleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_directory();
    ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    ASSERT_EQ(cuModuleLoadData(&module_, kTestImage), CUDA_SUCCESS);
    append_ = function("append");
    spin_ = function("spin");
    ASSERT_EQ(cuMemAlloc(&log_, kLogEntries * 8), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAlloc(&cursor_, 8), CUDA_SUCCESS);
    ASSERT_EQ(cuMemsetD8(cursor_, 0, 8), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  }

  void TearDown() override {
    EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
    unsigned flags = 0;
    int active = 1;
    // A thread that destroys communicators holds the context until it is done.
    for (int looks = 0; active != 0 && looks < 10'000; ++looks) {
      ASSERT_EQ(cuDevicePrimaryCtxGetState(0, &flags, &active), CUDA_SUCCESS);
      if (active != 0) std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
    EXPECT_EQ(active, 0);
    EXPECT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  }

  CUfunction function(const char* name) {
    CUfunction found = nullptr;
    EXPECT_EQ(cuModuleGetFunction(&found, module_, name), CUDA_SUCCESS);
    return found;
  }

  static CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING, int priority = 0) {
    CUstream made = nullptr;
    EXPECT_EQ(cuStreamCreateWithPriority(&made, flags, priority), CUDA_SUCCESS);
    return made;
  }

  static CUevent event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
    CUevent made = nullptr;
    EXPECT_EQ(cuEventCreate(&made, flags), CUDA_SUCCESS);
    return made;
  }

  CUresult append(CUstream to, std::uint64_t value, std::uint32_t block_us = 20) {
    void* params[] = {&log_, &cursor_, &value, &block_us};
    return cuLaunchKernel(append_, 1, 1, 1, 32, 1, 1, 0, to, params, nullptr);
  }

  CUresult spin(CUstream to, std::uint32_t block_us) {
    void* params[] = {&block_us};
    return cuLaunchKernel(spin_, 1, 1, 1, 32, 1, 1, 0, to, params, nullptr);
  }

  // What has been appended so far, once all work is done.
  std::vector<std::uint64_t> log() {
    EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    std::uint64_t count = 0;
    EXPECT_EQ(cuMemcpyDtoH(&count, cursor_, 8), CUDA_SUCCESS);
    std::vector<std::uint64_t> entries(count);
    if (count != 0) {
      EXPECT_EQ(cuMemcpyDtoH(entries.data(), log_, count * 8), CUDA_SUCCESS);
    }
    return entries;
  }

  static constexpr std::size_t kLogEntries = 1 << 16;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction append_ = nullptr;
  CUfunction spin_ = nullptr;
  CUdeviceptr log_ = 0;
  CUdeviceptr cursor_ = 0;
};

}  // namespace cudasched::simulated_driver
