// Nothing passes the ring or the gate unseen: versions and functions that the table does not know, launches of the old
// interface, captures that nobody counts, pointers that a driver gives and does not export. Over the simulated driver,
// whose CUDA version here is one that does not exist.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>

#include "driver/registry.hpp"
#include "hook/entry_points.hpp"
#include "hook/guards.hpp"
#include "hook/intercept.hpp"
#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/other_client.hpp"

namespace cudasched::test {
namespace {

constexpr int kFuture = 15000;

struct FutureDriver {
  FutureDriver() {
    setenv("CUDASCHED_SIM_DRIVER_VERSION", std::to_string(kFuture).c_str(), 1);
    setenv("CUDASCHED_SIM_DEVICES", "40", 1);  // more than any table of ours has
  }
};

class FallThrough : public FutureDriver, public ::testing::Test {
 protected:
  FallThrough() {
    // The second one is deferred.
    for (std::uint64_t value : {1U, 2U}) Program::check(program_.launch(value));
    Program::check(program_.synchronize());
  }

  // As programs ask for it.
  template <typename Function>
  Function* look_up(const char* name, int version, cuuint64_t flags = 0) const {
    void* found = nullptr;
    CUdriverProcAddressQueryResult result{};
    auto* const ask = call<decltype(cuGetProcAddress)>("cuGetProcAddress_v2");
    EXPECT_EQ(ask(name, &found, version, flags, &result), CUDA_SUCCESS) << name;
    return reinterpret_cast<Function*>(found);
  }

  static bool something_is_queued() {
    bool queued = false;
    runtime::engine().for_each_device([&](runtime::Device& device) { queued = queued || device.holds_launches(); });
    return queued;
  }

  // With a launch in the ring and the gate closed, the call may only come back once the gate has opened and the launch
  // has been passed on.
  template <typename Call>
  void expect_behind_the_queue(Call&& call) {
    OtherClient other(/*active=*/true);
    Program::check(program_.launch(3));
    ASSERT_TRUE(something_is_queued());
    std::atomic<bool> done{false};
    std::atomic<bool> overtook{false};
    std::thread thread([&] {
      program_.use_on_this_thread();
      const InRegion region(CUDASCHED_BEST_EFFORT);
      EXPECT_EQ(call(), CUDA_SUCCESS);
      overtook = something_is_queued();
      done = true;
    });
    std::this_thread::sleep_for(50ms);  // a call that does not wait has come back by then, or this test sees less
    EXPECT_FALSE(done);
    other.kill();
    thread.join();
    EXPECT_FALSE(overtook);
    Program::check(program_.synchronize());
  }

  // With the gate closed, a launch on a stream that begin() captures becomes a node at once.
  template <typename Begin>
  void expect_captured(Begin&& begin) {
    const OtherClient other(/*active=*/true);
    ASSERT_EQ(begin(program_.stream()), CUDA_SUCCESS);
    ASSERT_EQ(program_.launch(3), CUDA_SUCCESS);
    CUgraph graph = nullptr;
    ASSERT_EQ(call<decltype(cuStreamEndCapture)>("cuStreamEndCapture")(program_.stream(), &graph), CUDA_SUCCESS);
    std::size_t nodes = 0;
    ASSERT_EQ(call<decltype(cuGraphGetNodes)>("cuGraphGetNodes")(graph, nullptr, &nodes), CUDA_SUCCESS);
    EXPECT_EQ(nodes, 1U);
  }

  Program program_;
  const InRegion region_{CUDASCHED_BEST_EFFORT};
};

using LaunchHostFunctionV2 = CUresult(CUstream, CUhostFn, void*, unsigned);
constexpr CUhostFn kNothing = [](void*) {};

TEST_F(FallThrough, AHostFunctionOfCuda131IsBehindTheQueueByName) {
  auto* const launch = look_up<LaunchHostFunctionV2>("cuLaunchHostFunc", 13010);
  expect_behind_the_queue([&] { return launch(program_.stream(), kNothing, nullptr, 1); });
}

TEST_F(FallThrough, AHostFunctionOfCuda131IsBehindTheQueueBySymbol) {
  auto* const launch = call<LaunchHostFunctionV2>("cuLaunchHostFunc_v2");
  expect_behind_the_queue([&] { return launch(program_.stream(), kNothing, nullptr, 1); });
}

TEST_F(FallThrough, AVersionThatNoTableKnowsIsBehindTheQueue) {
  auto* const fill =
      look_up<CUresult(CUdeviceptr, unsigned, std::size_t, unsigned, CUstream)>("cuMemsetD32Async", kFuture);
  CUdeviceptr memory = 0;
  ASSERT_EQ(call<decltype(cuMemAlloc)>("cuMemAlloc_v2")(&memory, 16), CUDA_SUCCESS);
  expect_behind_the_queue([&] { return fill(memory, 7, 4, 0, program_.stream()); });
}

// The driver gives a pointer by name and exports no such symbol, so that there is nothing that our own could call.
TEST_F(FallThrough, AFunctionThatTheDriverDoesNotExportIsBehindTheQueue) {
  auto* const fill = look_up<decltype(cuMemsetD16Async)>("cuMemsetD16Async", 12000);
  CUdeviceptr memory = 0;
  ASSERT_EQ(call<decltype(cuMemAlloc)>("cuMemAlloc_v2")(&memory, 16), CUDA_SUCCESS);
  expect_behind_the_queue([&] { return fill(memory, 7, 8, program_.stream()); });
}

TEST_F(FallThrough, AKnownVersionOfALaterCudaIsTheFunctionItself) {
  EXPECT_EQ(look_up<void>("cuLaunchKernel", kFuture), call<void>("cuLaunchKernel"));
  EXPECT_EQ(look_up<void>("cuMemsetD32Async", 13000), call<void>("cuMemsetD32Async"));
  EXPECT_NE(look_up<void>("cuMemsetD32Async", kFuture), call<void>("cuMemsetD32Async"));
}

TEST_F(FallThrough, ANullEntryPointStaysNull) {
  EXPECT_EQ(look_up<void>("cuNoSuchFunction", 13000), nullptr);
  EXPECT_EQ(look_up<void>("cuLaunchKernelEx", 11000), nullptr);
  EXPECT_EQ(hook::replacement("cuLaunchKernel", nullptr, 13000, 0), nullptr);
}

TEST_F(FallThrough, TwinsComeFromCuda7On) {
  const cuuint64_t flag = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  EXPECT_EQ(look_up<void>("cuLaunchKernel", 7000, flag), call<void>("cuLaunchKernel_ptsz"));
  EXPECT_EQ(look_up<void>("cuLaunchKernel", 6050, flag), call<void>("cuLaunchKernel"));
  EXPECT_EQ(look_up<void>("cuCtxSynchronize", 12000, flag), call<void>("cuCtxSynchronize"));
}

// ---- captures that nobody counts

TEST_F(FallThrough, ARecaptureKeepsItsNodes) {
  CUgraph graph = nullptr;
  ASSERT_EQ(call<decltype(cuGraphCreate)>("cuGraphCreate")(&graph, 0), CUDA_SUCCESS);
  auto* const begin =
      look_up<CUresult(CUstream, CUstreamCaptureMode, CUgraph, void*, void*)>("cuStreamBeginRecaptureToGraph", 13030);
  expect_captured(
      [&](CUstream stream) { return begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, graph, nullptr, nullptr); });
}

TEST_F(FallThrough, ACaptureForGraphicsKeepsItsNodes) {
  auto* const begin = call<CUresult(CUstream, void*)>("cuStreamBeginCaptureToCig");
  expect_captured([&](CUstream stream) { return begin(stream, stream); });
}

TEST_F(FallThrough, ACaptureByAFunctionThatNoTableNamesKeepsItsNodes) {
  auto* const begin = look_up<CUresult(CUstream)>("cuFutureBeginCapture", kFuture);
  expect_captured(begin);
}

// Not by any entry point of ours, as through a table that cuGetExportTable gives.
TEST_F(FallThrough, ACaptureThatWeNeverSawKeepsItsNodes) {
  expect_captured([&](CUstream stream) {
    return driver::table().cuStreamBeginCapture.legacy(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  });
}

// Found on two GPUs: to find out whose the stream is, its flags were asked for, which invalidates a capture.
TEST_F(FallThrough, AStreamThatIsFirstUsedWhileItCapturesKeepsItsNodes) {
  CUstream stream = nullptr;
  ASSERT_EQ(call<decltype(cuStreamCreate)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  driver::StreamFacts facts;
  ASSERT_FALSE(driver::registry().find(stream, facts));
  const auto begin = call<decltype(cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  EXPECT_EQ(program_.launch(3, stream), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  ASSERT_EQ(call<decltype(cuStreamEndCapture)>("cuStreamEndCapture")(stream, &graph), CUDA_SUCCESS);
  std::size_t nodes = 0;
  ASSERT_EQ(call<decltype(cuGraphGetNodes)>("cuGraphGetNodes")(graph, nullptr, &nodes), CUDA_SUCCESS);
  EXPECT_EQ(nodes, 1U);
}

TEST_F(FallThrough, TheFirstVersionOfBeginCaptureIsCounted) {
  auto* const begin = look_up<CUresult(CUstream)>("cuStreamBeginCapture", 10000);
  expect_captured([&](CUstream stream) {
    const CUresult status = begin(stream);
    EXPECT_EQ(runtime::hot().captures.load(), 1);
    return status;
  });
  EXPECT_EQ(runtime::hot().captures.load(), 0);
  EXPECT_FALSE(runtime::hot().uncounted_captures.load());
}

// Each line of the table that begins or ends a capture has its call here, and every begin is ended by every end.
TEST_F(FallThrough, WhicheverEntryPointBeginsACaptureAndWhicheverEndsItNodesStayInIt) {
  CUstream const stream = program_.stream();
  constexpr CUstreamCaptureMode kMode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  const auto begin = [&](std::string_view symbol, const std::string& exported) {
    const char* const name = exported.c_str();
    CUgraph into = nullptr;
    Program::check(call<decltype(cuGraphCreate)>("cuGraphCreate")(&into, 0));
    if (symbol == "cuStreamBeginCapture") return call<CUresult(CUstream)>(name)(stream);
    if (symbol == "cuStreamBeginCapture_v2") {
      return call<CUresult(CUstream, CUstreamCaptureMode)>(name)(stream, kMode);
    }
    if (symbol == "cuStreamBeginCaptureToCig") return call<CUresult(CUstream, void*)>(name)(stream, stream);
    if (symbol == "cuStreamBeginCaptureToGraph") {
      return call<decltype(cuStreamBeginCaptureToGraph)>(name)(stream, into, nullptr, nullptr, 0, kMode);
    }
    if (symbol == "cuStreamBeginRecaptureToGraph") {
      return call<CUresult(CUstream, CUstreamCaptureMode, CUgraph, void*, void*)>(name)(stream, kMode, into, nullptr,
                                                                                        nullptr);
    }
    ADD_FAILURE() << symbol << " begins a capture, and no call of it is here";
    return CUDA_ERROR_NOT_SUPPORTED;
  };
  const auto end = [&](std::string_view symbol, const std::string& exported) {
    CUgraph graph = nullptr;
    if (symbol == "cuStreamEndCapture") {
      return call<CUresult(CUstream, CUgraph*)>(exported.c_str())(stream, &graph);
    }
    if (symbol == "cuStreamEndCaptureToCig") return call<CUresult(CUstream)>(exported.c_str())(stream);
    ADD_FAILURE() << symbol << " ends a capture, and no call of it is here";
    return CUDA_ERROR_NOT_SUPPORTED;
  };
  const auto for_each = [](hook::Meaning meaning, const auto& visit) {
    for (const hook::EntryPoint& point : hook::entry_points()) {
      if (point.meaning != meaning) continue;
      visit(point.symbol, std::string(point.symbol));
      if (!point.twin.empty()) visit(point.symbol, std::string(point.twin));
    }
  };
  const std::uint64_t before = program_.ran();
  int captures = 0;
  {
    const OtherClient other(/*active=*/true);
    for_each(hook::Meaning::kBeginCapture, [&](std::string_view begins, const std::string& begin_name) {
      for_each(hook::Meaning::kEndCapture, [&](std::string_view ends, const std::string& end_name) {
        ASSERT_EQ(begin(begins, begin_name), CUDA_SUCCESS) << begin_name;
        ASSERT_EQ(program_.launch(3), CUDA_SUCCESS) << begin_name;
        EXPECT_FALSE(something_is_queued()) << begin_name;
        ASSERT_EQ(end(ends, end_name), CUDA_SUCCESS) << begin_name << " and " << end_name;
        ++captures;
      });
    });
    ASSERT_EQ(program_.launch(4), CUDA_SUCCESS);  // no capture any more: deferred, as before
    EXPECT_TRUE(something_is_queued());
  }
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_GE(captures, 40);
  EXPECT_EQ(program_.ran(), before + 1);
  EXPECT_EQ(program_.value(before), 4U);
}

// ---- more GPUs than any table has

TEST_F(FallThrough, ADeviceBeyondAllTablesIsTheDriversAlone) {
  const State before = state();
  const OtherClient other(/*active=*/true);
  const Program there(35);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(there.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(there.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(there.ran(), 10U);
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_EQ(there.value(i), i);
  EXPECT_EQ(state().offloaded_launches, before.offloaded_launches);
  // Those in the tables go on as ever.
  program_.use_on_this_thread();
  ASSERT_EQ(program_.launch(3), CUDA_SUCCESS);
  EXPECT_TRUE(something_is_queued());
}

// ---- each line of the table of entry points that csrc/hook takes over: launches, and what is direct. The others that
// are deferred are in tests/csrc/queue/test_deferred.cpp, what drains in test_guards.cpp; changes of graphs in
// tests/csrc/runtime/slices.

class EachTakenOver : public FallThrough {
 protected:
  using Calls = std::map<std::string_view, std::function<CUresult(const char* exported)>>;

  EachTakenOver() {
    make_parameters_of_the_old_interface();
    part_.function = program_.function();
    part_.gridDimX = part_.gridDimY = part_.gridDimZ = 1;
    part_.blockDimX = part_.blockDimY = part_.blockDimZ = 1;
    part_.hStream = program_.stream();
    part_.kernelParams = parameters_;
    config_.gridDimX = config_.gridDimY = config_.gridDimZ = 1;
    config_.blockDimX = config_.blockDimY = config_.blockDimZ = 1;
    config_.hStream = program_.stream();
    Program::check(call<decltype(cuGraphCreate)>("cuGraphCreate")(&graph_, 0));
    CUDA_KERNEL_NODE_PARAMS node{};
    node.func = program_.function();
    node.gridDimX = node.gridDimY = node.gridDimZ = 1;
    node.blockDimX = node.blockDimY = node.blockDimZ = 1;
    node.kernelParams = parameters_;
    CUgraphNode made = nullptr;
    Program::check(
        call<CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t, const CUDA_KERNEL_NODE_PARAMS*)>(
            "cuGraphAddKernelNode_v2")(&made, graph_, nullptr, 0, &node));
    Program::check(call<decltype(cuGraphInstantiate)>("cuGraphInstantiateWithFlags")(&exec_, graph_, 0));
  }

  // A call of the function of this type, with these arguments.
  template <typename Function, typename... Arguments>
  auto with(Arguments... arguments) const {
    return [this, arguments...](const char* exported) { return call<Function>(exported)(arguments...); };
  }

  // All launch the same kernel, which leaves kValue in the log.
  Calls launches() {
    CUfunction const kernel = program_.function();
    CUstream const stream = program_.stream();
    return {
        {"cuLaunchKernel",
         with<decltype(cuLaunchKernel)>(kernel, 1, 1, 1, 1, 1, 1, 0, stream, &parameters_[0], nullptr)},
        {"cuLaunchKernelEx", with<decltype(cuLaunchKernelEx)>(&config_, kernel, &parameters_[0], nullptr)},
        {"cuLaunchCooperativeKernel",
         with<decltype(cuLaunchCooperativeKernel)>(kernel, 1, 1, 1, 1, 1, 1, 0, stream, &parameters_[0])},
        {"cuGraphLaunch", with<decltype(cuGraphLaunch)>(exec_, stream)},
        {"cuLaunch", with<CUresult(CUfunction)>(kernel)},
        {"cuLaunchGrid", with<CUresult(CUfunction, int, int)>(kernel, 2, 3)},
        {"cuLaunchGridAsync", with<CUresult(CUfunction, int, int, CUstream)>(kernel, 2, 3, stream)},
        {"cuLaunchCooperativeKernelMultiDevice", with<CUresult(CUDA_LAUNCH_PARAMS*, unsigned, unsigned)>(&part_, 1, 0)},
    };
  }

  // visit(call, exported name) for each line of this treatment that fits; twins, too.
  template <typename Fits, typename Visit>
  static int for_each(hook::Treatment treatment, const Calls& calls, Fits&& fits, Visit&& visit) {
    int lines = 0;
    for (const hook::EntryPoint& point : hook::entry_points()) {
      if (point.treatment != treatment || !fits(point)) continue;
      const auto how = calls.find(point.symbol);
      if (how == calls.end()) {
        ADD_FAILURE() << "there is no call of " << point.symbol << " here";
        continue;
      }
      for (const std::string_view exported : {point.symbol, point.twin}) {
        if (exported.empty()) continue;
        SCOPED_TRACE(exported);
        visit(how->second, exported.data());
        ++lines;
      }
    }
    return lines;
  }

  static std::uint64_t pushed() {
    std::uint64_t all = 0;
    runtime::engine().for_each_device([&](runtime::Device& device) {
      if (device.queue() != nullptr) all += device.queue()->pushed();
    });
    return all;
  }

  void expect_gated_and_counted(const std::function<CUresult()>& call) {
    const std::uint64_t launches = state().launches;
    const std::uint64_t gated = state().gated_launches;
    expect_behind_the_queue(call);
    Program::check(program_.synchronize(CU_STREAM_LEGACY));
    EXPECT_EQ(program_.value(program_.ran() - 1), kValue);
    EXPECT_EQ(state().launches - launches, 2U);
    // With nothing in the ring it still waits.
    OtherClient other(/*active=*/true);
    std::atomic<bool> done{false};
    std::thread thread([&] {
      program_.use_on_this_thread();
      const InRegion region(CUDASCHED_BEST_EFFORT);
      EXPECT_EQ(call(), CUDA_SUCCESS);
      done = true;
    });
    EXPECT_TRUE(eventually([&] { return state().gated_launches > gated + 1; }));
    EXPECT_FALSE(done);
    other.kill();
    thread.join();
    Program::check(program_.synchronize(CU_STREAM_LEGACY));
  }

  static constexpr std::uint64_t kValue = 9;
  CUDA_LAUNCH_PARAMS part_{};
  CUlaunchConfig config_{};
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;

 private:
  void make_parameters_of_the_old_interface() {
    const auto set_size = call<CUresult(CUfunction, unsigned)>("cuParamSetSize");
    const auto set = call<CUresult(CUfunction, int, void*, unsigned)>("cuParamSetv");
    Program::check(set_size(program_.function(), 24));
    for (int i = 0; i < 3; ++i) Program::check(set(program_.function(), 8 * i, parameters_[i], 8));
    EXPECT_EQ(set(program_.function(), 8, parameters_[0], ~0U), CUDA_ERROR_INVALID_VALUE) << "more than there is";
  }

  std::uint64_t* values_ = program_.log() + 1;
  std::uint64_t* count_ = program_.log();
  std::uint64_t value_ = kValue;
  void* parameters_[3] = {&values_, &count_, &value_};
};

bool is_launch(const hook::EntryPoint& point) { return point.meaning == hook::Meaning::kLaunch; }

TEST_F(EachTakenOver, GatedFunctionWaitsBehindTheQueueAndAtTheGateAndIsCounted) {
  const Calls calls = launches();
  const int lines = for_each(hook::Treatment::kGate, calls, &is_launch, [&](const auto& call, const char* exported) {
    expect_gated_and_counted([&] { return call(exported); });
  });
  EXPECT_GE(lines, 4);
}

TEST_F(EachTakenOver, DeferredLaunchReturnsWhileTheGateIsClosedAndIsCounted) {
  const Calls calls = launches();
  const int lines = for_each(hook::Treatment::kDefer, calls, &is_launch, [&](const auto& call, const char* exported) {
    ASSERT_EQ(call(exported), CUDA_SUCCESS);  // the first of its kind goes directly
    Program::check(program_.synchronize());
    const std::uint64_t launches = state().launches;
    const std::uint64_t ran = program_.ran();
    OtherClient other(/*active=*/true);
    const std::uint64_t before = pushed();
    ASSERT_EQ(call(exported), CUDA_SUCCESS);
    EXPECT_EQ(pushed(), before + 1);
    EXPECT_EQ(program_.ran(), ran);
    other.kill();
    Program::check(program_.synchronize());
    EXPECT_EQ(program_.ran(), ran + 1);
    EXPECT_EQ(state().launches, launches + 1);
  });
  EXPECT_GE(lines, 8);
}

// Whatever it answers. What a program gets of a direct function that is not taken over is the driver's own: it has no
// guard (test_guards.cpp).
TEST_F(EachTakenOver, DirectFunctionReturnsWhileTheGateIsClosed) {
  CUdeviceptr memory = 0;
  int registered = 0;
  void* host = nullptr;
  std::size_t size = 0;
  std::size_t other_size = 0;
  unsigned small = 0;
  CUmodule module = nullptr;
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUevent event = nullptr;
  CUstream made = nullptr;
  cuuint64_t flags = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUdriverProcAddressQueryResult result{};
  CUgreenCtx green = nullptr;
  CUgraph graph = nullptr;
  CUuserObject object = nullptr;
  Program::check(call<decltype(cuUserObjectCreate)>("cuUserObjectCreate")(
      &object, nullptr, [](void*) {}, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  CUstream const stream = program_.stream();
  const Calls calls{
      {"cuInit", with<decltype(cuInit)>(0)},
      {"cuGetProcAddress", with<CUresult(const char*, void**, int, cuuint64_t)>("cuInit", &host, 12000, 0)},
      {"cuGetProcAddress_v2", with<decltype(cuGetProcAddress)>("cuInit", &host, 12000, 0, &result)},
      {"cuStreamCreateWithPriority", with<decltype(cuStreamCreateWithPriority)>(&made, 0, 0)},
      {"cuModuleLoadData", with<decltype(cuModuleLoadData)>(&module, &kImage[0])},
      {"cuModuleLoadDataEx", with<decltype(cuModuleLoadDataEx)>(&module, &kImage[0], 0, nullptr, nullptr)},
      {"cuLibraryLoadData",
       with<decltype(cuLibraryLoadData)>(&library, &kImage[0], nullptr, nullptr, 0, nullptr, nullptr, 0)},
      {"cuLibraryGetKernel", with<decltype(cuLibraryGetKernel)>(&kernel, library, "work")},
      {"cuMemGetInfo", with<CUresult(unsigned*, unsigned*)>(&small, &small)},
      {"cuDeviceTotalMem", with<CUresult(unsigned*, CUdevice)>(&small, 0)},
      {"cuMemGetAddressRange_v2", with<decltype(cuMemGetAddressRange)>(&memory, &size, 16)},
      {"cuPointerGetAttribute", with<decltype(cuPointerGetAttribute)>(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 16)},
      {"cuPointerGetAttributes", with<decltype(cuPointerGetAttributes)>(0, nullptr, nullptr, 16)},
      {"cuMemGetInfo_v2", with<decltype(cuMemGetInfo)>(&size, &other_size)},
      {"cuDeviceTotalMem_v2", with<decltype(cuDeviceTotalMem)>(&size, 0)},
      {"cuMemAlloc_v2", with<decltype(cuMemAlloc)>(&memory, 16)},
      {"cuMemAllocPitch_v2", with<decltype(cuMemAllocPitch)>(&memory, &size, 64, 2, 4)},
      {"cuMemAllocHost_v2", with<decltype(cuMemAllocHost)>(&host, 16)},
      {"cuMemHostAlloc", with<decltype(cuMemHostAlloc)>(&host, 16, 0)},
      {"cuMemHostRegister_v2", with<decltype(cuMemHostRegister)>(&registered, sizeof registered, 0)},
      {"cuMemAllocAsync", with<decltype(cuMemAllocAsync)>(&memory, 16, stream)},
      {"cuMemAllocFromPoolAsync", with<decltype(cuMemAllocFromPoolAsync)>(&memory, 16, nullptr, stream)},
      {"cuMemCreate", with<decltype(cuMemCreate)>(&handle, 1 << 21, &properties, 0)},
      {"cuMemAddressReserve", with<decltype(cuMemAddressReserve)>(&memory, 1 << 21, 0, 0, 0)},
      {"cuEventCreate", with<decltype(cuEventCreate)>(&event, 0)},
      {"cuGreenCtxCreate", with<decltype(cuGreenCtxCreate)>(&green, nullptr, 0, 1)},
      {"cuStreamEndCapture", with<decltype(cuStreamEndCapture)>(stream, &graph)},
      {"cuGraphExecGetFlags", with<decltype(cuGraphExecGetFlags)>(exec_, &flags)},
      {"cuGraphRetainUserObject", with<decltype(cuGraphRetainUserObject)>(graph_, object, 1, 0)},
  };
  const OtherClient other(/*active=*/true);
  Program::check(program_.launch(3));
  const std::uint64_t before = pushed();
  const auto fits = [&](const hook::EntryPoint& point) {
    return point.taken_over && HookedDriver::instance().has(point.symbol.data());
  };
  const int lines = for_each(hook::Treatment::kDirect, calls, fits, [&](const auto& call, const char* exported) {
    call(exported);
    EXPECT_TRUE(something_is_queued());
    EXPECT_EQ(pushed(), before);
  });
  EXPECT_GE(lines, 19);
}

// What an update, a launch or a destruction goes by.
TEST_F(EachTakenOver, InstantiationIsKnownToTheRegistry) {
  CUDA_GRAPH_INSTANTIATE_PARAMS parameters{};
  const Calls calls{
      {"cuGraphInstantiate",
       with<CUresult(CUgraphExec*, CUgraph, CUgraphNode*, char*, std::size_t)>(&exec_, graph_, nullptr, nullptr, 0)},
      {"cuGraphInstantiate_v2",
       with<CUresult(CUgraphExec*, CUgraph, CUgraphNode*, char*, std::size_t)>(&exec_, graph_, nullptr, nullptr, 0)},
      {"cuGraphInstantiateWithFlags", with<decltype(cuGraphInstantiateWithFlags)>(&exec_, graph_, 0)},
      {"cuGraphInstantiateWithParams", with<decltype(cuGraphInstantiateWithParams)>(&exec_, graph_, &parameters)},
  };
  const auto fits = [](const hook::EntryPoint& point) { return point.meaning == hook::Meaning::kInstantiate; };
  const int lines = for_each(hook::Treatment::kDrain, calls, fits, [&](const auto& call, const char* exported) {
    driver::registry().forget(exec_);
    driver::ExecFacts facts;
    ASSERT_FALSE(driver::registry().find(exec_, facts));
    ASSERT_EQ(call(exported), CUDA_SUCCESS);
    EXPECT_TRUE(driver::registry().find(exec_, facts));
  });
  EXPECT_GE(lines, 5);
}

// ---- guards

using FallThroughDeathTest = FallThrough;

// More functions than guards: once drained, and nothing is deferred from then on.
TEST_F(FallThroughDeathTest, WhereGuardsRunOutNothingIsDeferredAnyMore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run_out = [&] {
    OtherClient other(/*active=*/true);
    Program::check(program_.launch(3));
    if (!something_is_queued()) std::_Exit(2);
    static char targets[2000];
    for (char& target : targets) hook::guarded(nullptr, false, &target);
    if (something_is_queued()) std::_Exit(3);
    other.kill();
    Program::check(program_.launch(4));
    if (something_is_queued()) std::_Exit(4);
    Program::check(program_.synchronize());
    std::_Exit(program_.ran() == 4 && program_.value(3) == 4 ? 0 : 5);
  };
  EXPECT_EXIT(run_out(), ::testing::ExitedWithCode(0),
              "^cudasched: warning: nothing is deferred any more: [^\n]*1,024[^\n]*\n$");
}

}  // namespace
}  // namespace cudasched::test
