// What is known of handles, before a driver that knows them by their numbers.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"

namespace cudasched::driver {
namespace {

template <typename Handle>
Handle handle(std::uintptr_t number) {
  return reinterpret_cast<Handle>(number);
}

const CUcontext kFirst = handle<CUcontext>(0xc0);
const CUcontext kSecond = handle<CUcontext>(0xc1);
const CUcontext kBesideFirst = handle<CUcontext>(0x7ffe'0000'00c2);  // on the same device

thread_local CUcontext current = nullptr;
thread_local CUcontext before = nullptr;
std::atomic<int> asked{0};
CUstream captures = nullptr;
std::atomic<std::size_t> parameters_of_all{0};

class RegistryTest : public testing::Test {
 protected:
  RegistryTest() {
    current = kFirst;
    asked = 0;
    captures = nullptr;
    Driver& driver = table();
    driver.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; };
    driver.cuCtxGetCurrent = [](CUcontext* context) {
      *context = current;
      return CUDA_SUCCESS;
    };
    driver.cuCtxGetDevice = [](CUdevice* device) {
      *device = current == kSecond ? 1 : 0;
      return current == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    };
    driver.cuCtxPushCurrent = [](CUcontext context) {
      before = std::exchange(current, context);
      return CUDA_SUCCESS;
    };
    driver.cuCtxPopCurrent = [](CUcontext*) {
      current = before;
      return CUDA_SUCCESS;
    };
    driver.cuStreamIsCapturing = [](CUstream stream, CUstreamCaptureStatus* status) {
      *status = stream == captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    };
    // Odd streams are blocking, those from 0x100000 on the second device's.
    driver.cuStreamGetFlags = [](CUstream stream, unsigned* flags) {
      ++asked;
      *flags = handle_word(stream) % 2 == 1 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
      return handle_word(stream) == 0xbad ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
    };
    driver.cuStreamGetCtx_v1 = [](CUstream stream, CUcontext* context) {
      *context = handle_word(stream) >= 0x100000 ? kSecond : kFirst;
      return CUDA_SUCCESS;
    };
    driver.cuFuncGetAttribute = [](int* value, CUfunction_attribute, CUfunction) {
      *value = 1;
      return CUDA_SUCCESS;
    };
    driver.cuFuncGetModule = [](CUmodule* module, CUfunction function) {
      *module = handle<CUmodule>(0x10 + handle_word(function) / 16 % 2);
      return CUDA_SUCCESS;
    };
    driver.cuFuncGetParamInfo = [](CUfunction, std::size_t i, std::size_t* offset, std::size_t* bytes) {
      *offset = 8 * i;
      *bytes = 8;
      return i < parameters_of_all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    };
  }
  ~RegistryTest() override {
    // With small tables again: each unload looks through all of one.
    registry().reset_in_child();
    registry().clear();
    functions().reset_in_child();
    table() = {};
  }

  static bool knows(CUevent event) {
    EventFacts facts;
    return registry().find(event, facts);
  }
  static bool knows(CUgraphExec exec) {
    ExecFacts facts;
    return registry().find(exec, facts);
  }
};

TEST_F(RegistryTest, AContextThatIsCurrentIsNotPushed) {
  static int pushes = 0;
  pushes = 0;
  table().cuCtxPushCurrent = [](CUcontext context) {
    ++pushes;
    before = std::exchange(current, context);
    return CUDA_SUCCESS;
  };
  {
    const CurrentContext here(kFirst);
    EXPECT_TRUE(here.ok());
    EXPECT_EQ(pushes, 0);
    const CurrentContext there(kSecond);
    EXPECT_EQ(current, kSecond);
    EXPECT_FALSE(CurrentContext(nullptr).ok());
  }
  EXPECT_EQ(pushes, 1);
  EXPECT_EQ(current, kFirst);
}

TEST_F(RegistryTest, AStreamIsAskedForOnceUntilItIsForgotten) {
  const CUstream stream = handle<CUstream>(0x51);
  const CUstream there = handle<CUstream>(0x100052);
  StreamFacts facts;
  EXPECT_FALSE(registry().find(stream, facts));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(registry().look_up(stream, facts));
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(facts.blocking);
  EXPECT_EQ(facts.device, 0);
  EXPECT_EQ(facts.context, kFirst);
  ASSERT_TRUE(registry().look_up(there, facts));
  EXPECT_FALSE(facts.blocking);
  EXPECT_EQ(facts.device, 1);
  EXPECT_EQ(current, kFirst);
  registry().forget(stream);
  EXPECT_FALSE(registry().find(stream, facts));
  EXPECT_FALSE(registry().look_up(handle<CUstream>(0xbad), facts));
}

// Asking for its flags would invalidate the capture.
TEST_F(RegistryTest, AStreamThatCapturesIsNotAskedFor) {
  const CUstream stream = handle<CUstream>(0x51);
  StreamFacts facts;
  captures = stream;
  EXPECT_FALSE(registry().look_up(stream, facts));
  EXPECT_EQ(asked, 0);
  captures = nullptr;
  ASSERT_TRUE(registry().look_up(stream, facts));
  captures = stream;
  EXPECT_TRUE(registry().look_up(stream, facts));
  EXPECT_EQ(asked, 1);
}

TEST_F(RegistryTest, AnEventIsWhatItWasMadeAndWhereItWasRecorded) {
  const CUevent plain = handle<CUevent>(0xe0);
  const CUevent shared = handle<CUevent>(0xe1);
  const CUevent opened = handle<CUevent>(0xe2);
  registry().created(plain, CU_EVENT_DISABLE_TIMING);
  registry().created(shared, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
  registry().opened(opened);
  EventFacts facts;
  ASSERT_TRUE(registry().find(plain, facts));
  EXPECT_FALSE(facts.shared || facts.captured);
  EXPECT_EQ(facts.context, kFirst);
  registry().recorded(plain, true);
  ASSERT_TRUE(registry().find(plain, facts));
  EXPECT_TRUE(facts.captured);
  registry().recorded(plain, false);
  registry().shared(plain);
  ASSERT_TRUE(registry().find(plain, facts));
  EXPECT_TRUE(facts.shared && !facts.captured);
  for (const CUevent event : {shared, opened}) {
    ASSERT_TRUE(registry().find(event, facts));
    EXPECT_TRUE(facts.shared);
  }
  EXPECT_TRUE(registry().forget(plain, &facts));
  EXPECT_FALSE(registry().forget(plain));
  EXPECT_FALSE(knows(plain));
  registry().recorded(plain, true);  // not known: nothing to say of it
  EXPECT_FALSE(knows(plain));
}

TEST_F(RegistryTest, AGraphIsLaunchedFromItsLaunchToItsChange) {
  const CUgraphExec exec = handle<CUgraphExec>(0x91);
  registry().launched(exec);
  EXPECT_FALSE(registry().changed(exec));
  EXPECT_FALSE(knows(exec));
  registry().made(exec, {.identity = 7, .critical_path_ns = 1000, .nodes = 3, .plain = true});
  ExecFacts facts;
  ASSERT_TRUE(registry().find(exec, facts));
  EXPECT_EQ(facts.identity, 7U);
  EXPECT_EQ(facts.critical_path_ns, 1000);
  EXPECT_EQ(facts.nodes, 3U);
  EXPECT_TRUE(facts.plain && !facts.launched);
  registry().launched(exec);
  ASSERT_TRUE(registry().find(exec, facts));
  EXPECT_TRUE(facts.plain && facts.launched);
  EXPECT_TRUE(registry().changed(exec));
  EXPECT_FALSE(registry().changed(exec));
  ASSERT_TRUE(registry().find(exec, facts));
  EXPECT_TRUE(facts.plain && !facts.launched);
  EXPECT_EQ(facts.nodes, 3U);
  registry().forget(exec);
  EXPECT_FALSE(knows(exec));
}

// Others may retain a primary context that one of them releases.
TEST_F(RegistryTest, WhatAContextHasEndsWithItAndComesBackWhereItLivesOn) {
  const CUevent here = handle<CUevent>(0xe0);
  const CUevent there = handle<CUevent>(0xe1);
  const CUgraphExec graph = handle<CUgraphExec>(0x90);
  const CUgraphExec beside = handle<CUgraphExec>(0x91);
  const auto make = [&] {
    current = kFirst;
    registry().created(here, 0);
    registry().made(graph, {.identity = 1, .plain = true});
    current = kBesideFirst;
    registry().made(beside, {.identity = 2, .plain = true});
    current = kSecond;
    registry().created(there, 0);
  };
  make();
  registry().context_ends(kFirst);
  EXPECT_FALSE(knows(here) || knows(graph));
  EXPECT_TRUE(knows(there) && knows(beside));
  registry().context_ends(kBesideFirst);
  EXPECT_FALSE(knows(beside));
  make();
  const Registry::Ended ended = registry().primary_context_ends(0);
  EXPECT_FALSE(knows(here) || knows(graph) || knows(beside));
  EXPECT_TRUE(knows(there));
  registry().restore(ended);
  EXPECT_TRUE(knows(here) && knows(graph) && knows(beside) && knows(there));
}

TEST_F(RegistryTest, ADeviceReachesItsOwnMemoryAndThatOfItsPeers) {
  EXPECT_EQ(registry().reach(3), 8U);
  registry().may_reach(1, 3);
  EXPECT_EQ(registry().reach(3), 8U | 2U);
  EXPECT_EQ(registry().reach(1), 2U);
  EXPECT_EQ(registry().reach(-1), ~0U);
  registry().all_reach_all();
  EXPECT_EQ(registry().reach(1), ~0U);
}

TEST_F(RegistryTest, MoreAreKnownThanAnyProgramHas) {
  constexpr std::uintptr_t kHandles = 50'000;  // vLLM has thousands of graphs, torch.compile of kernels
  parameters_of_all = 2;
  for (std::uintptr_t i = 1; i <= kHandles; ++i) {
    StreamFacts stream;
    ASSERT_TRUE(registry().look_up(handle<CUstream>(i * 16), stream));
    registry().created(handle<CUevent>(i * 16), i % 3 == 0 ? CU_EVENT_INTERPROCESS : 0);
    registry().made(handle<CUgraphExec>(i * 16), {.identity = i, .plain = true});
    registry().launched(handle<CUgraphExec>(i * 16));
  }
  for (std::uintptr_t i = 1; i <= kHandles; ++i) {
    StreamFacts stream;
    EventFacts event;
    ExecFacts exec;
    ASSERT_TRUE(registry().find(handle<CUstream>(i * 16), stream));
    ASSERT_TRUE(registry().find(handle<CUevent>(i * 16), event));
    ASSERT_EQ(event.shared, i % 3 == 0);
    ASSERT_TRUE(registry().find(handle<CUgraphExec>(i * 16), exec));
    ASSERT_EQ(exec.identity, i);
    ASSERT_TRUE(exec.launched);
  }
  EXPECT_EQ(registry().unknown(), 0U);
  constexpr std::uintptr_t kFunctions = 20'000;
  for (std::uintptr_t i = 1; i <= kFunctions; ++i) ASSERT_NE(functions().find(handle<void*>(i * 16)), nullptr);
  { const Functions::Ending unload(handle<CUmodule>(0x10)); }  // of every second one
  for (std::uintptr_t i = 1; i <= kFunctions; ++i) {
    Functions::Known known;
    ASSERT_EQ(functions().find(handle<void*>(i * 16), known), i % 2 == 1) << i;
  }
}

TEST_F(RegistryTest, AKernelsSerialIsAnotherOnceItsHandleOrItsSettingsAre) {
  void* const one = handle<void*>(0x10);
  void* const two = handle<void*>(0x20);
  const auto serial = [](void* function) {
    functions().find(function);
    Functions::Known known;
    return functions().find(function, known) ? known.serial : 0;
  };
  std::vector<std::uint64_t> seen{serial(one), serial(two)};
  functions().changed(one);
  seen.push_back(serial(one));
  EXPECT_EQ(serial(two), seen[1]);
  functions().all_changed();
  seen.push_back(serial(one));
  seen.push_back(serial(two));
  { const Functions::Ending unload(handle<CUmodule>(0x11)); }
  seen.push_back(serial(one));
  EXPECT_EQ(serial(two), seen[4]);
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
}

// Handles that the driver hands out again at once, to whichever thread asks: each finds its own, never what the handle
// stood for before. What the driver would say of a kernel is what was loaded last under its handle.
TEST_F(RegistryTest, HandlesThatComeAgainOnOtherThreadsAreNeverTakenForWhatTheyWere) {
  constexpr std::uintptr_t kHandles = 8;
  constexpr unsigned kThreads = 4;
  constexpr int kSteps = 20'000;
  static std::array<std::atomic<std::size_t>, kHandles + 1> parameters{};  // of the kernel under this handle
  table().cuFuncGetParamInfo = [](CUfunction function, std::size_t i, std::size_t* offset, std::size_t* bytes) {
    *offset = 8 * i;
    *bytes = 8;
    return i < parameters[handle_word(function) / 16].load() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  table().cuFuncGetModule = [](CUmodule* module, CUfunction function) {
    *module = handle<CUmodule>(handle_word(function));
    return CUDA_SUCCESS;
  };
  std::mutex driver;
  std::vector<std::uintptr_t> unused;
  for (std::uintptr_t i = 1; i <= kHandles; ++i) unused.push_back(i * 16);
  const auto take = [&]() -> std::uintptr_t {
    const std::scoped_lock lock(driver);
    if (unused.empty()) return 0;
    const std::uintptr_t number = unused.back();
    unused.pop_back();
    return number;
  };
  const auto give_back = [&](std::uintptr_t number) {
    const std::scoped_lock lock(driver);
    unused.push_back(number);
  };
  std::atomic<int> wrong{0};
  const auto work = [&](unsigned seed) {
    current = kFirst;
    std::mt19937 random(seed);
    for (int step = 0; step < kSteps; ++step) {
      const std::uintptr_t number = take();
      if (number == 0) continue;
      const bool is_shared = random() % 2 == 0;
      const std::size_t count = 1 + random() % 4;
      switch (random() % 3) {
        case 0: {
          const CUevent event = handle<CUevent>(number);
          registry().created(event, is_shared ? CU_EVENT_INTERPROCESS : 0);
          EventFacts facts;
          if (!registry().find(event, facts) || facts.shared != is_shared || facts.captured) ++wrong;
          if (is_shared) registry().recorded(event, true);
          if (!registry().forget(event, &facts) || facts.captured != is_shared) ++wrong;
          break;
        }
        case 1: {
          const CUgraphExec exec = handle<CUgraphExec>(number);
          registry().made(exec, {.identity = number * 8 + count, .plain = is_shared});
          ExecFacts facts;
          if (!registry().find(exec, facts) || facts.identity != number * 8 + count || facts.launched) ++wrong;
          registry().launched(exec);
          if (!registry().find(exec, facts) || !facts.launched || facts.plain != is_shared) ++wrong;
          registry().forget(exec);
          break;
        }
        default: {
          parameters[number / 16] = count;  // loaded
          const KernelFacts* const facts = functions().find(handle<void*>(number));
          if (facts == nullptr || facts->parameters.size() != count) ++wrong;
          Functions::Known known;
          if (functions().find(handle<void*>(number), known) && known.facts->parameters.size() != count) ++wrong;
          const Functions::Ending unload(handle<CUmodule>(number));
          give_back(number);  // the driver has freed it, and the unload has not returned
          continue;
        }
      }
      give_back(number);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned thread = 1; thread <= kThreads; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace cudasched::driver
