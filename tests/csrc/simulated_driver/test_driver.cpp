// The double as a program sees it, in one process.
#include <dlfcn.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "simulated_driver/fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

using Values = std::vector<std::uint64_t>;

CUfunction as_function(CUkernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

// Entry points that cuda.h does not declare to programs.
template <class F>
F* entry(const char* name) {
  auto* const found = reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
  EXPECT_NE(found, nullptr) << name;
  return found;
}

TEST(DoubleBeforeInit, RefusesAndStillAnswersWhatNeedsNoDevice) {
  device_directory();
  // In a child that has not called cuInit, whatever other tests did in this process.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int count = 0;
    int version = 0;
    void* pointer = nullptr;
    const bool right = cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
                       cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED &&
                       cuDriverGetVersion(&version) == CUDA_SUCCESS && version == 13000 &&
                       cuGetProcAddress("cuInit", &pointer, 12000, 0, nullptr) == CUDA_SUCCESS && pointer != nullptr &&
                       cuInit(1) == CUDA_ERROR_INVALID_VALUE;
    _exit(right ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(DoubleTest, ForkedChildIsRefused) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool right = cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED && cuInit(0) == CUDA_ERROR_NOT_INITIALIZED;
    _exit(right ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(append(nullptr, 1), CUDA_SUCCESS) << "the parent goes on";
  EXPECT_EQ(log(), Values{1});
}

TEST_F(DoubleTest, DeviceDescribesItself) {
  int count = 0;
  EXPECT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
  EXPECT_EQ(count, 1);
  char name[64];
  EXPECT_EQ(cuDeviceGetName(name, sizeof name, 0), CUDA_SUCCESS);
  EXPECT_STREQ(name, "cudasched simulated GPU");
  EXPECT_EQ(cuDeviceGetName(name, 5, 0), CUDA_SUCCESS);
  EXPECT_STREQ(name, "cuda");
  int value = -1;
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), CUDA_SUCCESS);
  EXPECT_EQ(value, 132);
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0), CUDA_SUCCESS);
  EXPECT_EQ(value, 9);
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 0), CUDA_SUCCESS);
  EXPECT_EQ(value, 0);
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MAX, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 1), CUDA_ERROR_INVALID_DEVICE);
  CUdevice device = -1;
  EXPECT_EQ(cuDeviceGet(&device, 1), CUDA_ERROR_INVALID_DEVICE);
  CUuuid first{};
  CUuuid second{};
  EXPECT_EQ(cuDeviceGetUuid(&first, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuDeviceGetUuid(&second, 0), CUDA_SUCCESS);
  EXPECT_EQ(std::memcmp(&first, &second, sizeof first), 0);
}

TEST_F(DoubleTest, ErrorsHaveNames) {
  const char* text = nullptr;
  EXPECT_EQ(cuGetErrorName(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT");
  EXPECT_EQ(cuGetErrorString(CUDA_ERROR_NOT_READY, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "device not ready");
  EXPECT_EQ(cuGetErrorName(static_cast<CUresult>(998), &text), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(text, nullptr);
}

// ---- contexts

TEST_F(DoubleTest, ContextStack) {
  CUcontext made = nullptr;
  ASSERT_EQ(cuCtxCreate(&made, nullptr, 0, 0), CUDA_SUCCESS);
  CUcontext current = nullptr;
  EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, made);
  EXPECT_EQ(cuCtxPopCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, made);
  EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, context_);
  EXPECT_EQ(cuCtxPushCurrent(made), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxDestroy(made), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, context_);
  EXPECT_EQ(cuCtxDestroy(made), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuCtxDestroy(context_), CUDA_ERROR_INVALID_CONTEXT) << "the primary one is released, not destroyed";
}

TEST_F(DoubleTest, NoCurrentContext) {
  std::thread([&] {
    EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(append(nullptr, 1), CUDA_ERROR_INVALID_CONTEXT);
    CUdeviceptr memory = 0;
    EXPECT_EQ(cuMemAlloc(&memory, 16), CUDA_ERROR_INVALID_CONTEXT);
    CUcontext current = context_;
    EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
  }).join();
}

TEST_F(DoubleTest, DestroyedContextIsSaidToBe) {
  CUcontext made = nullptr;
  ASSERT_EQ(cuCtxCreate(&made, nullptr, 0, 0), CUDA_SUCCESS);
  std::thread([&] {
    ASSERT_EQ(cuCtxSetCurrent(made), CUDA_SUCCESS);
    std::thread([&] { EXPECT_EQ(cuCtxDestroy(made), CUDA_SUCCESS); }).join();
    EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  }).join();
  cuCtxPopCurrent(nullptr);
}

TEST_F(DoubleTest, ContextsOfTheDeviceRunOut) {
  std::vector<CUcontext> made;
  for (CUcontext context = nullptr; cuCtxCreate(&context, nullptr, 0, 0) == CUDA_SUCCESS;) made.push_back(context);
  EXPECT_EQ(made.size(), 63U) << "64 with the primary context";
  CUcontext more = nullptr;
  EXPECT_EQ(cuCtxCreate(&more, nullptr, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
  while (!made.empty()) {
    EXPECT_EQ(cuCtxDestroy(made.back()), CUDA_SUCCESS);
    made.pop_back();
  }
}

// ---- modules and functions

TEST_F(DoubleTest, ModulesAndFunctions) {
  CUmodule bad = nullptr;
  EXPECT_EQ(cuModuleLoadData(&bad,
                             "\x7f"
                             "ELF"),
            CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(cuModuleLoad(&bad, "/nonexistent/file"), CUDA_ERROR_FILE_NOT_FOUND);
  CUfunction missing = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&missing, module_, "missing"), CUDA_ERROR_NOT_FOUND);
  const CUfunction mixed = function("mixed");
  const char* name = nullptr;
  EXPECT_EQ(cuFuncGetName(&name, mixed), CUDA_SUCCESS);
  EXPECT_STREQ(name, "mixed");
  std::size_t offset = 0;
  std::size_t bytes = 0;
  EXPECT_EQ(cuFuncGetParamInfo(mixed, 1, &offset, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(offset, 8U);
  EXPECT_EQ(bytes, 8U);
  EXPECT_EQ(cuFuncGetParamInfo(mixed, 3, &offset, &bytes), CUDA_ERROR_INVALID_VALUE);
  CUmodule module = nullptr;
  EXPECT_EQ(cuFuncGetModule(&module, mixed), CUDA_SUCCESS);
  EXPECT_EQ(module, module_);
  int value = 0;
  EXPECT_EQ(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, spin_), CUDA_SUCCESS);
  EXPECT_EQ(value, 64);
  EXPECT_EQ(cuModuleUnload(module_), CUDA_SUCCESS);
  EXPECT_EQ(cuModuleUnload(module_), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(append(nullptr, 1), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(DoubleTest, KernelsOfALibrary) {
  CUlibrary library = nullptr;
  ASSERT_EQ(cuLibraryLoadData(&library, kTestImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  CUkernel kernel = nullptr;
  ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "append"), CUDA_SUCCESS);
  std::size_t offset = 0;
  std::size_t bytes = 0;
  EXPECT_EQ(cuKernelGetParamInfo(kernel, 3, &offset, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(offset, 24U);
  EXPECT_EQ(cuFuncGetParamInfo(as_function(kernel), 0, &offset, &bytes), CUDA_ERROR_INVALID_HANDLE);
  std::uint64_t value = 7;
  std::uint32_t block_us = 5;
  void* params[] = {&log_, &cursor_, &value, &block_us};
  EXPECT_EQ(cuLaunchKernel(as_function(kernel), 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), CUDA_SUCCESS);
  CUfunction plain = nullptr;
  ASSERT_EQ(cuKernelGetFunction(&plain, kernel), CUDA_SUCCESS);
  EXPECT_EQ(cuFuncGetParamInfo(plain, 0, &offset, &bytes), CUDA_SUCCESS);
  value = 8;
  EXPECT_EQ(cuLaunchKernel(plain, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{7, 8}));
  EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
  EXPECT_EQ(cuLaunchKernel(as_function(kernel), 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr),
            CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(DoubleTest, OccupancyCountsThreadsRegistersAndSharedMemory) {
  const CUfunction wide = function("wide");  // 40000 bytes of shared memory, 128 registers, at most 16 blocks
  int blocks = 0;
  EXPECT_EQ(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, wide, 32, 0), CUDA_SUCCESS);
  EXPECT_EQ(blocks, 5) << "shared memory: 228 KiB over 40000 + 1024";
  EXPECT_EQ(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, wide, 256, 0), CUDA_SUCCESS);
  EXPECT_EQ(blocks, 2) << "registers: 65536 over 128 x 256";
  EXPECT_EQ(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, wide, 257, 0), CUDA_SUCCESS);
  EXPECT_EQ(blocks, 0);
  EXPECT_EQ(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, spin_, 1024, 0), CUDA_SUCCESS);
  EXPECT_EQ(blocks, 1);
}

TEST_F(DoubleTest, BadLaunches) {
  std::uint32_t block_us = 1;
  void* params[] = {&block_us};
  const auto launch = [&](unsigned grid, unsigned block, unsigned shared, void** values) {
    return cuLaunchKernel(spin_, grid, 1, 1, block, 1, 1, shared, nullptr, values, nullptr);
  };
  EXPECT_EQ(launch(0, 32, 0, params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 0, 0, params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 1025, 0, params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 32, 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(1, 32, 64 * 1024, params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuFuncSetAttribute(spin_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 64 * 1024), CUDA_SUCCESS);
  EXPECT_EQ(launch(1, 32, 64 * 1024, params), CUDA_SUCCESS);
  EXPECT_EQ(cuFuncSetAttribute(spin_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr), CUDA_ERROR_INVALID_HANDLE);
  const auto wrong = reinterpret_cast<CUstream>(&block_us);
  EXPECT_EQ(cuLaunchKernel(spin_, 1, 1, 1, 1, 1, 1, 0, wrong, params, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuLaunchCooperativeKernel(spin_, 132 * 4 + 1, 1, 1, 32, 1, 1, 0, nullptr, params),
            CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  EXPECT_EQ(cuLaunchCooperativeKernel(spin_, 132 * 4, 1, 1, 32, 1, 1, 0, nullptr, params), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
}

TEST_F(DoubleTest, LaunchWithAParameterBufferAndWithAttributes) {
  struct {
    CUdeviceptr log, cursor;
    std::uint64_t value = 3;
    std::uint32_t block_us = 5;
  } buffer{log_, cursor_};
  std::size_t bytes = 28;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  EXPECT_EQ(cuLaunchKernel(append_, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra), CUDA_SUCCESS);
  bytes = 20;
  EXPECT_EQ(cuLaunchKernel(append_, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra), CUDA_ERROR_INVALID_VALUE);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attribute.value.priority = -3;
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  std::uint64_t value = 4;
  void* params[] = {&log_, &cursor_, &value, &buffer.block_us};
  EXPECT_EQ(cuLaunchKernelEx(&config, append_, params, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{3, 4}));
}

// ---- order

TEST_F(DoubleTest, StreamsKeepTheirOrderAndEffectsHappenOnce) {
  constexpr int kStreams = 5;
  constexpr std::uint64_t kEach = 1500;  // far more than a context's table of operations
  std::vector<CUstream> streams;
  for (int i = 0; i < kStreams; ++i) streams.push_back(stream(CU_STREAM_NON_BLOCKING, -i));
  for (std::uint64_t i = 0; i < kEach; ++i) {
    for (std::uint64_t s = 0; s < kStreams; ++s) {
      ASSERT_EQ(append(streams[s], s * kEach + i, 1 + static_cast<std::uint32_t>((i * 7 + s * 3) % 9)), CUDA_SUCCESS);
    }
  }
  const Values entries = log();
  ASSERT_EQ(entries.size(), kStreams * kEach);
  std::vector<std::uint64_t> next(kStreams, 0);
  for (const std::uint64_t entry : entries) ASSERT_EQ(entry % kEach, next[entry / kEach]++);
}

TEST_F(DoubleTest, EventsOrderStreams) {
  const CUstream a = stream();
  const CUstream b = stream();
  const CUevent done = event();
  EXPECT_EQ(cuEventQuery(done), CUDA_SUCCESS) << "never recorded";
  ASSERT_EQ(append(a, 1, 500'000), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(done, a), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(done), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
  ASSERT_EQ(append(a, 2, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(b, done, 0), CUDA_SUCCESS);
  ASSERT_EQ(append(b, 3, 1), CUDA_SUCCESS);
  const Values entries = log();
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries.front(), 1U);
  EXPECT_EQ(cuEventQuery(done), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(a), CUDA_SUCCESS);
}

TEST_F(DoubleTest, EventSynchronizeWaitsForItsRecordOnly) {
  const CUstream a = stream();
  const CUevent done = event(CU_EVENT_DEFAULT);
  const CUevent end = event(CU_EVENT_DEFAULT);
  ASSERT_EQ(append(a, 1, 100), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(done, a), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 2, 1'000'000), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(end, a), CUDA_SUCCESS);
  EXPECT_EQ(cuEventSynchronize(done), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
  float ms = -1;
  EXPECT_EQ(cuEventElapsedTime(&ms, done, end), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuEventSynchronize(end), CUDA_SUCCESS);
  EXPECT_EQ(cuEventElapsedTime(&ms, done, end), CUDA_SUCCESS);
  EXPECT_GE(ms, 999.0F) << "the model's time, whatever the machine does";
  EXPECT_EQ(cuEventElapsedTime(&ms, done, event()), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(DoubleTest, LegacyDefaultStreamWaitsForBlockingStreamsAndHoldsThemBack) {
  const CUstream blocking = stream(CU_STREAM_DEFAULT);
  const CUstream other = stream(CU_STREAM_DEFAULT);
  for (std::uint64_t round = 0; round < 50; ++round) {
    ASSERT_EQ(append(blocking, round * 4, 300), CUDA_SUCCESS);
    ASSERT_EQ(append(nullptr, round * 4 + 1, 100), CUDA_SUCCESS);
    ASSERT_EQ(append(other, round * 4 + 2, 1), CUDA_SUCCESS);
    ASSERT_EQ(append(CU_STREAM_LEGACY, round * 4 + 3, 1), CUDA_SUCCESS);
  }
  Values expected(200);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(log(), expected);
}

TEST_F(DoubleTest, NonBlockingStreamsIgnoreTheDefaultStream) {
  const CUstream free_stream = stream(CU_STREAM_NON_BLOCKING);
  ASSERT_EQ(append(nullptr, 1, 500'000), CUDA_SUCCESS);
  ASSERT_EQ(append(free_stream, 2, 10), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(free_stream), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(log(), (Values{2, 1}));
}

TEST_F(DoubleTest, PerThreadDefaultStreams) {
  auto* const launch = entry<decltype(cuLaunchKernel)>("cuLaunchKernel_ptsz");
  auto* const query = entry<decltype(cuStreamQuery)>("cuStreamQuery_ptsz");
  auto* const synchronize = entry<decltype(cuStreamSynchronize)>("cuStreamSynchronize_ptsz");
  const auto append_here = [&](std::uint64_t value, std::uint32_t block_us) {
    void* params[] = {&log_, &cursor_, &value, &block_us};
    return launch(append_, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr);
  };
  ASSERT_EQ(append_here(1, 500'000), CUDA_SUCCESS);
  std::thread([&] {
    ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    ASSERT_EQ(append_here(2, 10), CUDA_SUCCESS);
    EXPECT_EQ(synchronize(nullptr), CUDA_SUCCESS) << "this thread's stream only";
  }).join();
  EXPECT_EQ(query(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuStreamQuery(CU_STREAM_PER_THREAD), CUDA_ERROR_NOT_READY);
  ASSERT_EQ(append(CU_STREAM_PER_THREAD, 3, 1), CUDA_SUCCESS);
  ASSERT_EQ(append(nullptr, 4, 1), CUDA_SUCCESS) << "the legacy stream waits for per-thread ones";
  EXPECT_EQ(log(), (Values{2, 1, 3, 4}));
}

TEST_F(DoubleTest, ThreadsComeAndGoWithTheirDefaultStreams) {
  for (std::uint64_t i = 0; i < 400; ++i) {
    std::thread([&] {
      ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      ASSERT_EQ(append(CU_STREAM_PER_THREAD, i, 1), CUDA_SUCCESS);
    }).join();
  }
  EXPECT_EQ(log().size(), 400U) << "more than a context has streams";
}

TEST_F(DoubleTest, DestroyedStreamsFinishTheirWork) {
  for (std::uint64_t i = 0; i < 600; ++i) {
    const CUstream once = stream(CU_STREAM_DEFAULT);
    ASSERT_NE(once, nullptr);
    ASSERT_EQ(append(once, i, 20), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamDestroy(once), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamQuery(once), CUDA_ERROR_INVALID_HANDLE);
    if (i % 100 == 99) {
      ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    }
  }
  EXPECT_EQ(log().size(), 600U);
}

TEST_F(DoubleTest, StreamProperties) {
  int least = -1;
  int greatest = 1;
  EXPECT_EQ(cuCtxGetStreamPriorityRange(&least, &greatest), CUDA_SUCCESS);
  EXPECT_EQ(least, 0);
  EXPECT_EQ(greatest, -5);
  const CUstream urgent = stream(CU_STREAM_NON_BLOCKING, -100);
  int priority = 0;
  EXPECT_EQ(cuStreamGetPriority(urgent, &priority), CUDA_SUCCESS);
  EXPECT_EQ(priority, -5);
  unsigned flags = 0;
  EXPECT_EQ(cuStreamGetFlags(urgent, &flags), CUDA_SUCCESS);
  EXPECT_EQ(flags, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
  CUcontext context = nullptr;
  EXPECT_EQ(cuStreamGetCtx(urgent, &context), CUDA_SUCCESS);
  EXPECT_EQ(context, context_);
}

TEST_F(DoubleTest, HostFunctionsRunInOrderAndMayNotCall) {
  struct Seen {
    std::vector<int> order;
    CUresult inside = CUDA_SUCCESS;
  } seen;
  const CUstream a = stream();
  ASSERT_EQ(append(a, 1, 50), CUDA_SUCCESS);
  const auto call = [](void* data) {
    auto& to = *static_cast<Seen*>(data);
    to.order.push_back(static_cast<int>(to.order.size()));
    to.inside = cuCtxSynchronize();
  };
  ASSERT_EQ(cuLaunchHostFunc(a, call, &seen), CUDA_SUCCESS);
  ASSERT_EQ(cuLaunchHostFunc(a, call, &seen), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamSynchronize(a), CUDA_SUCCESS);
  EXPECT_EQ(seen.order, (std::vector<int>{0, 1}));
  EXPECT_EQ(seen.inside, CUDA_ERROR_NOT_PERMITTED);
}

TEST_F(DoubleTest, ManyThreadsLaunchAndSynchronize) {
  constexpr int kThreads = 6;
  constexpr std::uint64_t kEach = 400;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      const CUstream own = stream();
      for (std::uint64_t i = 0; i < kEach; ++i) {
        ASSERT_EQ(append(own, static_cast<std::uint64_t>(t) * kEach + i, 2), CUDA_SUCCESS);
        if (i % 50 == 0) {
          ASSERT_EQ(cuStreamSynchronize(own), CUDA_SUCCESS);
        }
        cuStreamQuery(own);
      }
      ASSERT_EQ(cuStreamSynchronize(own), CUDA_SUCCESS);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Values next(kThreads, 0);
  const Values entries = log();
  ASSERT_EQ(entries.size(), kThreads * kEach);
  for (const std::uint64_t entry : entries) ASSERT_EQ(entry % kEach, next[entry / kEach]++);
}

// ---- memory

TEST_F(DoubleTest, CopiesMoveDataInStreamOrder) {
  constexpr std::size_t kCount = 1000;
  const CUstream a = stream();
  CUdeviceptr x = 0;
  CUdeviceptr y = 0;
  ASSERT_EQ(cuMemAlloc(&x, kCount * 4), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAllocAsync(&y, kCount * 4, a), CUDA_SUCCESS);
  std::vector<float> host(kCount, 2.0F);
  ASSERT_EQ(cuMemcpyHtoDAsync(x, host.data(), kCount * 4, a), CUDA_SUCCESS);
  std::fill(host.begin(), host.end(), 9.0F);  // pageable memory is taken at the call
  float three = 3.0F;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &three, 4);
  ASSERT_EQ(cuMemsetD32Async(y, bits, kCount, a), CUDA_SUCCESS);
  float factor = 10.0F;
  std::uint32_t count = kCount;
  void* params[] = {&y, &x, &factor, &count};
  ASSERT_EQ(cuLaunchKernel(function("axpy"), 10, 1, 1, 128, 1, 1, 0, a, params, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoDAsync(x, y, kCount * 4, a), CUDA_SUCCESS);
  void* pinned = nullptr;
  ASSERT_EQ(cuMemAllocHost(&pinned, kCount * 4), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoHAsync(pinned, x, kCount * 4, a), CUDA_SUCCESS);
  ASSERT_EQ(cuMemFreeAsync(y, a), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamSynchronize(a), CUDA_SUCCESS);
  for (std::size_t i = 0; i < kCount; ++i) ASSERT_EQ(static_cast<float*>(pinned)[i], 23.0F);
  EXPECT_EQ(cuMemFree(y), CUDA_ERROR_INVALID_VALUE) << "freed in the stream";
  unsigned type = 0;
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, x + 8), CUDA_SUCCESS);
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(pinned)),
            CUDA_SUCCESS);
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_HOST));
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(&type)),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoH(host.data(), x, kCount * 4 + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(host.data()), host.data(), 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(x), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(x), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(0), CUDA_SUCCESS);
}

TEST_F(DoubleTest, DeviceMemoryIsBoundedAndCounted) {
  std::size_t free_before = 0;
  std::size_t total = 0;
  ASSERT_EQ(cuMemGetInfo(&free_before, &total), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuMemAlloc(&memory, total + 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuMemAlloc(&memory, 0), CUDA_ERROR_INVALID_VALUE);
  std::size_t pitch = 0;
  EXPECT_EQ(cuMemAllocPitch(&memory, &pitch, 1 << 20, (std::size_t{1} << 44) + 1, 4), CUDA_ERROR_OUT_OF_MEMORY)
      << "1 MiB more than 2^64 bytes";
  ASSERT_EQ(cuMemAlloc(&memory, 1 << 20), CUDA_SUCCESS);
  std::size_t free_after = 0;
  ASSERT_EQ(cuMemGetInfo(&free_after, &total), CUDA_SUCCESS);
  EXPECT_EQ(free_before - free_after, std::size_t{1} << 20);
}

TEST_F(DoubleTest, EffectOnMemoryThatIsNotThereIsStickyInItsContext) {
  CUcontext made = nullptr;
  ASSERT_EQ(cuCtxCreate(&made, nullptr, 0, 0), CUDA_SUCCESS);
  CUmodule module = nullptr;
  ASSERT_EQ(cuModuleLoadData(&module, kTestImage), CUDA_SUCCESS);
  CUfunction broken = nullptr;
  ASSERT_EQ(cuModuleGetFunction(&broken, module, "append"), CUDA_SUCCESS);
  CUdeviceptr nowhere = 4096;
  std::uint64_t value = 1;
  std::uint32_t block_us = 1;
  void* params[] = {&nowhere, &nowhere, &value, &block_us};
  ASSERT_EQ(cuLaunchKernel(broken, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuLaunchKernel(broken, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuCtxDestroy(made), CUDA_SUCCESS);
  EXPECT_EQ(append(nullptr, 5), CUDA_SUCCESS) << "other contexts live on";
  EXPECT_EQ(log(), Values{5});
}

// ---- cuGetProcAddress

TEST_F(DoubleTest, GetProcAddressVariants) {
  const auto find = [](const char* name, int version, cuuint64_t flags,
                       CUdriverProcAddressQueryResult* status = nullptr) {
    void* found = reinterpret_cast<void*>(1);
    EXPECT_EQ(cuGetProcAddress(name, &found, version, flags, status), CUDA_SUCCESS);
    return found;
  };
  const auto symbol = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
  EXPECT_EQ(find("cuLaunchKernel", 12000, 0), symbol("cuLaunchKernel"));
  EXPECT_EQ(find("cuLaunchKernel", 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM), symbol("cuLaunchKernel"));
  EXPECT_EQ(find("cuLaunchKernel", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM),
            symbol("cuLaunchKernel_ptsz"));
  EXPECT_EQ(find("cuMemcpyHtoD", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM), symbol("cuMemcpyHtoD_v2_ptds"));
  EXPECT_EQ(find("cuMemAlloc", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM), symbol("cuMemAlloc_v2"));
  EXPECT_EQ(find("cuGetProcAddress", 11030, 0), symbol("cuGetProcAddress"));
  EXPECT_EQ(find("cuGetProcAddress", 12000, 0), symbol("cuGetProcAddress_v2"));
  EXPECT_EQ(find("cuStreamGetCaptureInfo", 10010, 0), symbol("cuStreamGetCaptureInfo"));
  EXPECT_EQ(find("cuStreamGetCaptureInfo", 12000, 0), symbol("cuStreamGetCaptureInfo_v2"));
  EXPECT_EQ(find("cuStreamGetCaptureInfo", 13000, 0), symbol("cuStreamGetCaptureInfo_v3"));
  EXPECT_EQ(find("cuCtxCreate", 13000, 0), symbol("cuCtxCreate_v4"));
  CUdriverProcAddressQueryResult status{};
  EXPECT_EQ(find("cuMemAlloc", 2000, 0, &status), nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT_EQ(find("cuNoSuchThing", 13000, 0, &status), nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(find("cuInit", 13000, 0, &status), symbol("cuInit"));
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SUCCESS);
  void* found = nullptr;
  EXPECT_EQ(cuGetProcAddress("cuInit", &found, 99000, 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGetProcAddress("cuInit", &found, 13000, 8, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGetProcAddress(nullptr, &found, 13000, 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  using V1 = CUresult(const char*, void**, int, cuuint64_t);
  auto* const v1 = entry<V1>("cuGetProcAddress");
  EXPECT_EQ(v1("cuNoSuchThing", &found, 13000, 0), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(v1("cuInit", &found, 13000, 0), CUDA_SUCCESS);
  const void* table = nullptr;
  const CUuuid id{};
  EXPECT_EQ(cuGetExportTable(&table, &id), CUDA_ERROR_NOT_FOUND);
}

}  // namespace
}  // namespace cudasched::simulated_driver
