// The engine over the simulated driver, called as the shim would call it: cudasched_attach, then every entry point by
// name, ours where the engine took it over. One a process, because the engine is.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>

#include "arbiter/table.hpp"
#include "cudasched/counts.h"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "private_directory.hpp"

namespace cudasched::test {

inline constexpr char kImage[] =
    "cudasched-sim 1\n"
    "kernel short params=8,8,8 block_us=20 blocks_per_sm=4 effect=append\n"
    "kernel timed params=8,8,8,4 block_us=param:3 blocks_per_sm=4 effect=append\n";

class HookedDriver {
 public:
  static HookedDriver& instance() {
    static HookedDriver driver;
    return driver;
  }

  bool has(const char* name) const { return dlsym(real_, name) != nullptr; }

  template <typename Function>
  Function* function(const char* name) const {
    const auto found = overrides_.find(name);
    void* address = found != overrides_.end() ? found->second : dlsym(real_, name);
    if (address == nullptr) throw std::runtime_error(std::string("no driver function ") + name);
    return reinterpret_cast<Function*>(address);
  }

  const std::string& run_directory() const { return run_directory_; }

  // The device's table, as another client of this process sees it.
  arbiter::Table& table() const { return *table_; }

 private:
  HookedDriver() {
    // Made before the engine is attached, so that it is removed after the engine has written its last.
    static const PrivateDirectory made = PrivateDirectory::in_memory();
    const std::string& directory = made.path();
    run_directory_ = directory + "/run";
    setenv("CUDASCHED_RUN_DIR", run_directory_.c_str(), 1);
    setenv("CUDASCHED_SIM_DIR", (directory + "/simulated").c_str(), 1);
    // Longer than a busy machine keeps a thread of a test waiting.
    setenv("CUDASCHED_MAX_IDLE_HOLD_MS", "2000", 1);
    setenv("CUDASCHED_STALE_HEARTBEAT_MS", "2000", 1);
    setenv("CUDASCHED_NAME", "test", 1);
    // The gate steps aside where kernels are interrupted (test_slice_keeper.cpp).
    setenv("CUDASCHED_TIME_SLICE_US", "off", 0);
    setenv("CUDASCHED_CACHE_DIR", (directory + "/cache").c_str(), 1);
    real_ = dlopen(CUDASCHED_SIMULATED_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (real_ == nullptr) throw std::runtime_error(dlerror());
    for (const auto* o = cudasched_attach(real_, CUDASCHED_SIMULATED_DRIVER); o->symbol != nullptr; ++o) {
      overrides_[o->symbol] = o->function;
    }
    if (function<decltype(cuInit)>("cuInit")(0) != CUDA_SUCCESS) throw std::runtime_error("cuInit failed");
    table_ = arbiter::Table::open(run_directory_, driver::device_uuid(0), "test");
  }

  void* real_ = nullptr;
  std::string run_directory_;
  std::map<std::string, void*> overrides_;
  std::unique_ptr<arbiter::Table> table_;
};

// The driver's function of that name, ours where the engine took it over.
template <typename Function>
Function* call(const char* name) {
  return HookedDriver::instance().function<Function>(name);
}

// A program with a context, a stream and two kernels. Each launch leaves its value in a log, in the order in which the
// device ran them.
class Program {
 public:
  static constexpr std::size_t kLogCapacity = 4096;

  explicit Program(int ordinal = 0) {
    CUdevice device = 0;
    check(call<decltype(cuDeviceGet)>("cuDeviceGet")(&device, ordinal));
    check(call<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context_, device));
    check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(context_));
    CUmodule module = load(kImage);
    short_ = find(module, "short");
    timed_ = find(module, "timed");
    void* memory = nullptr;
    check(call<CUresult(void**, std::size_t)>("cuMemAllocHost_v2")(&memory, (kLogCapacity + 1) * 8));
    log_ = static_cast<std::uint64_t*>(memory);
    std::fill_n(log_, kLogCapacity + 1, 0);
    stream_ = new_stream();
  }

  // How many launches the device has run, and the value of the one that ran as the `index`th.
  std::uint64_t ran() const { return std::atomic_ref(log_[0]).load(); }
  std::uint64_t value(std::uint64_t index) const { return std::atomic_ref(log_[index + 1]).load(); }

  void use_on_this_thread() const { check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(context_)); }

  static CUstream new_stream() {
    CUstream stream = nullptr;
    check(call<CUresult(CUstream*, unsigned)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
  }

  CUresult launch(std::uint64_t value, CUstream stream, std::uint32_t us = 0) const {
    std::uint64_t* values = log_ + 1;
    std::uint64_t* count = log_;
    void* parameters[] = {&values, &count, &value, &us};
    return call<decltype(cuLaunchKernel)>("cuLaunchKernel")(us == 0 ? short_ : timed_, 132, 1, 1, 64, 1, 1, 0, stream,
                                                            parameters, nullptr);
  }

  // Of a kind of its own, by its shared memory: on this thread.
  CUresult launch_directly(unsigned shared_bytes) const {
    std::uint64_t* values = log_ + 1;
    std::uint64_t* count = log_;
    std::uint64_t value = 0;
    void* parameters[] = {&values, &count, &value};
    return call<decltype(cuLaunchKernel)>("cuLaunchKernel")(short_, 132, 1, 1, 64, 1, 1, shared_bytes, stream_,
                                                            parameters, nullptr);
  }

  // As XLA launches: the kernel may overlap the one before it.
  CUresult launch_overlapping(std::uint64_t value, CUstream stream, std::uint32_t us) const {
    std::uint64_t* values = log_ + 1;
    std::uint64_t* count = log_;
    void* parameters[] = {&values, &count, &value, &us};
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = 132;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 64;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return call<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx")(&config, timed_, parameters, nullptr);
  }
  CUresult launch(std::uint64_t value) const { return launch(value, stream_); }

  CUresult synchronize(CUstream stream) const { return call<CUresult(CUstream)>("cuStreamSynchronize")(stream); }
  CUresult synchronize() const { return synchronize(stream_); }

  CUfunction function() const { return short_; }
  CUfunction timed_function() const { return timed_; }
  // Where launches leave their values: the count, then the values.
  std::uint64_t* log() const { return log_; }

  CUstream stream() const { return stream_; }
  CUcontext context() const { return context_; }

  static void check(CUresult status) {
    if (status != CUDA_SUCCESS) throw std::runtime_error("driver call failed: " + std::to_string(status));
  }
  static CUmodule load(const char* image) {
    CUmodule module = nullptr;
    check(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(&module, image));
    return module;
  }
  static CUfunction find(CUmodule module, const char* name) {
    CUfunction function = nullptr;
    check(call<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction")(&function, module, name));
    return function;
  }

 private:
  std::uint64_t* log_ = nullptr;  // the count, then the values
  CUcontext context_ = nullptr;
  CUfunction short_ = nullptr;
  CUfunction timed_ = nullptr;
  CUstream stream_ = nullptr;
};

// A region for the length of a scope.
class InRegion {
 public:
  explicit InRegion(cudasched_class value, double slo_ms = 0, const char* name = nullptr) {
    if (cudasched_region_enter_named(value, 0, slo_ms, name, &token_) != CUDASCHED_OK) {
      throw std::runtime_error(cudasched_last_error());
    }
  }
  ~InRegion() { cudasched_region_exit(token_); }
  InRegion(const InRegion&) = delete;
  InRegion& operator=(const InRegion&) = delete;

 private:
  std::uint64_t token_ = 0;
};

// What a driver does that is older, or knows a rule that we do not.
template <typename Entry, typename Function>
class Replaced {
 public:
  Replaced(Entry& entry, Function* with) : entry_(entry), before_(entry) { entry_ = with; }
  ~Replaced() { entry_ = before_; }
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

 private:
  Entry& entry_;
  Entry before_;
};

// What the engine does and what it has counted.
struct State : cudasched_state, cudasched_counts {
  std::uint64_t launches = 0;
  std::uint64_t gate_waits = 0;  // how many, where the counts have a histogram of them
};

inline State state() {
  State result{};
  cudasched_get_state(&result);
  if (cudasched_get_counts(&result) != CUDASCHED_OK) throw std::runtime_error(cudasched_last_error());
  result.launches = result.normal_launches + result.latency_launches + result.best_effort_launches;
  const auto& waits = result.cudasched_counts::gate_waits.buckets;
  result.gate_waits = std::accumulate(std::begin(waits), std::end(waits), std::uint64_t{0});
  return result;
}

}  // namespace cudasched::test
