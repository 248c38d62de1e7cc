// Graphs over the simulated driver, whose kernels write down that they ran.
#include <dlfcn.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <thread>

#include "cudasched/graphs.hpp"
#include "simulated_driver/fixture.hpp"

namespace cudasched::graphs {
namespace {

using Values = std::vector<std::uint64_t>;

// A kernel node's parameters, kept as long as it takes to add or change it.
struct Append {
  std::uint64_t log, cursor, value;
  std::uint32_t block_us = 20;
};

class GraphsTest : public simulated_driver::DoubleTest {
 protected:
  template <class Use>
  auto with_append(std::uint64_t value, Use use) {
    Append given{log_, cursor_, value};
    Kernel kernel;
    kernel.function = append_;
    kernel.parameters = {&given.log, &given.cursor, &given.value, &given.block_us};
    return use(kernel);
  }

  CUgraphNode add(Builder& to, std::uint64_t value, std::vector<CUgraphNode> after = {}) {
    return with_append(value, [&](const Kernel& kernel) { return to.add_kernel(kernel, after); });
  }
  CUgraphNode add(CUgraph to, std::uint64_t value) {
    Builder body(to);
    return add(body, value);
  }

  CUgraphNode add_countdown(CUgraph to, Condition condition, CUdeviceptr counter, std::vector<CUgraphNode> after = {}) {
    Kernel kernel;
    kernel.function = function("countdown");
    kernel.parameters = {&condition.handle, &counter};
    return Builder(to).add_kernel(kernel, after);
  }

  CUgraphNode add_set(Builder& to, Condition condition, std::uint32_t value, std::vector<CUgraphNode> after = {}) {
    Kernel kernel;
    kernel.function = function("condition");
    kernel.parameters = {&condition.handle, &value};
    return to.add_kernel(kernel, after);
  }

  CUdeviceptr number(std::uint64_t value) {
    CUdeviceptr made = 0;
    EXPECT_EQ(cuMemAlloc(&made, 8), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyHtoD(made, &value, 8), CUDA_SUCCESS);
    return made;
  }
};

TEST_F(GraphsTest, CapturesAndReplays) {
  const CUstream on = stream();
  Capture capture(on);
  append(on, 1);
  append(on, 2);
  const Graph graph = capture.finish();
  EXPECT_EQ(graph.node_count(), 2U);
  EXPECT_TRUE(log().empty());
  const Executable replay(graph);
  replay.upload(on);
  replay.launch(on);
  replay.launch(on);
  EXPECT_EQ(log(), (Values{1, 2, 1, 2}));
}

TEST_F(GraphsTest, ACaptureThatIsLeftEndsWithoutATrace) {
  const CUstream on = stream();
  try {
    const Capture capture(on);
    append(on, 1);
    throw std::runtime_error("the program's own");
  } catch (const std::runtime_error&) {
  }
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  ASSERT_EQ(cuStreamIsCapturing(on, &status), CUDA_SUCCESS);
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  append(on, 2);
  EXPECT_EQ(log(), (Values{2}));
}

TEST_F(GraphsTest, ABrokenCaptureIsSaidAtItsEnd) {
  const CUstream on = stream();
  Capture capture(on);
  append(on, 1);
  EXPECT_NE(cuStreamSynchronize(on), CUDA_SUCCESS);
  try {
    capture.finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_NE(std::string(error.what()).find("cuStreamEndCapture"), std::string::npos) << error.what();
  }
  EXPECT_THROW(capture.finish(), Error);
}

TEST_F(GraphsTest, CapturesIntoAGraphGoOnFromItsNodes) {
  const CUstream on = stream();
  Graph graph;
  const CUgraphNode first = add(graph, 1);
  Capture capture(on, graph, std::vector{first});
  append(on, 2);
  EXPECT_THROW(capture.finish(), Error);
  capture.close();
  Executable(graph).launch(on);
  EXPECT_EQ(log(), (Values{1, 2}));
}

TEST_F(GraphsTest, AGraphThatWasMovedFromHasNoHandle) {
  // It kept the handle, which the graph that it was moved into destroyed.
  Graph graph;
  add(graph, 1);
  Graph moved(std::move(graph));
  EXPECT_EQ(graph.handle(), nullptr);
  EXPECT_EQ(moved.node_count(), 1U);
  graph = std::move(moved);
  EXPECT_EQ(moved.handle(), nullptr);
  EXPECT_EQ(graph.node_count(), 1U);
}

TEST_F(GraphsTest, UpdatesOfWholeGraphsAndOfKernels) {
  const CUstream on = stream();
  Graph graph;
  const CUgraphNode first = add(graph, 1);
  add(graph, 2, {first});
  Executable replay(graph);
  with_append(5, [&](const Kernel& kernel) { replay.set_kernel(first, kernel); });
  replay.launch(on);
  EXPECT_EQ(log(), (Values{5, 2}));

  Graph fits;
  add(fits, 8, {add(fits, 7)});
  EXPECT_TRUE(replay.update(fits).done);
  replay.launch(on);
  Graph longer;
  const CUgraphNode one = add(longer, 1);
  const CUgraphNode two = add(longer, 2, {one});
  add(longer, 3, {two});
  const Update refused = replay.update(longer);
  EXPECT_FALSE(refused.done);
  EXPECT_EQ(refused.why, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  replay.set_enabled(first, false);
  replay.launch(on);
  EXPECT_EQ(log(), (Values{5, 2, 7, 8, 8}));
}

TEST_F(GraphsTest, CopiesFillsAndChildren) {
  const CUstream on = stream();
  const CUdeviceptr from = number(0);
  const CUdeviceptr to = number(0);
  Graph child;
  const CUgraphNode filled = child.add_fill(from, 1, 8);
  child.add_copy(to, from, 8, std::vector{filled});
  Graph graph;
  const CUgraphNode inner = graph.add_graph(child);
  add(graph, 3, {graph.add_empty(std::vector{inner})});
  Executable(graph).launch(on);
  EXPECT_EQ(log(), (Values{3}));
  std::uint64_t got = 0;
  ASSERT_EQ(cuMemcpyDtoH(&got, to, 8), CUDA_SUCCESS);
  EXPECT_EQ(got, 0x0101010101010101U);
}

TEST_F(GraphsTest, IfElse) {
  const CUstream on = stream();
  for (const std::uint32_t value : {0U, 1U, 7U}) {
    for (const bool with_else : {false, true}) {
      ASSERT_EQ(cuMemsetD8(cursor_, 0, 8), CUDA_SUCCESS);
      Graph graph;
      const Condition condition = graph.condition();
      const Conditional choice = graph.add_if(condition, with_else, std::vector{add_set(graph, condition, value)});
      ASSERT_EQ(choice.bodies.size(), with_else ? 2U : 1U);
      add(choice.bodies[0], 1);
      if (with_else) add(choice.bodies[1], 2);
      add(graph, 3, {choice.node});
      Executable(graph).launch(on);
      EXPECT_EQ(log(), value != 0 ? (Values{1, 3}) : with_else ? (Values{2, 3}) : (Values{3}));
    }
  }
}

TEST_F(GraphsTest, WhileWithABodyThatWasCaptured) {
  const CUstream on = stream();
  const CUdeviceptr left = number(4);
  Graph graph;
  const Condition condition = graph.condition(1);
  const Conditional loop = graph.add_while(condition);
  Capture capture(on, Builder(loop.bodies[0]));
  append(on, 9);
  void* parameters[] = {const_cast<CUgraphConditionalHandle*>(&condition.handle), const_cast<CUdeviceptr*>(&left)};
  ASSERT_EQ(cuLaunchKernel(function("countdown"), 1, 1, 1, 1, 1, 1, 0, on, parameters, nullptr), CUDA_SUCCESS);
  capture.close();
  const Executable replay(graph);
  replay.launch(on);
  EXPECT_EQ(log(), (Values{9, 9, 9, 9}));
  replay.launch(on);  // begins anew with 1: once, as nothing is left
  EXPECT_EQ(log().size(), 5U);
}

TEST_F(GraphsTest, SwitchAndNestedLoops) {
  const CUstream on = stream();
  for (const std::uint32_t value : {0U, 2U, 3U}) {
    ASSERT_EQ(cuMemsetD8(cursor_, 0, 8), CUDA_SUCCESS);
    Graph graph;
    const Condition choice = graph.condition(value);
    const Condition loops = graph.condition(1);
    const Conditional cases = graph.add_switch(choice, 3);
    for (std::uint64_t i = 0; i < 2; ++i) add(cases.bodies[i], i);
    const Conditional loop = Builder(cases.bodies[2]).add_while(loops);
    const CUgraphNode turn = add(loop.bodies[0], 2);
    add_countdown(loop.bodies[0], loops, number(2), {turn});
    Executable(graph).launch(on);
    EXPECT_EQ(log(), value == 0 ? (Values{0}) : value == 2 ? (Values{2, 2}) : Values{});
  }
}

TEST_F(GraphsTest, GraphsForTheDevice) {
  Graph graph;
  add(graph, 1);
  const Executable replay(graph, For::kDevice);
  EXPECT_NE(replay.device_handle(), 0U);
  replay.upload(stream());
  Graph hosts;  // nodes that the device cannot launch
  const Condition condition = hosts.condition(1);
  add(hosts.add_if(condition).bodies[0], 1);
  EXPECT_THROW(Executable(hosts, For::kDevice), Error);
}

TEST_F(GraphsTest, AStaticPoolServesTwoCaptures) {
  const CUstream on = stream();
  const std::vector<Use> uses{{64, 0, 0}, {64, 1, 1}, {64, 0, 1}};
  const StaticPool pool(uses);
  EXPECT_EQ(pool.address(0), pool.address(1));
  std::vector<Executable> replays;
  for (const std::size_t use : {0, 1}) {
    Capture capture(on);
    ASSERT_EQ(cuMemsetD8Async(pool.address(use), static_cast<unsigned char>(use + 1), 64, on), CUDA_SUCCESS);
    ASSERT_EQ(cuMemcpyDtoDAsync(pool.address(2) + 32 * use, pool.address(use), 32, on), CUDA_SUCCESS);
    replays.emplace_back(capture.finish());
  }
  for (const Executable& replay : replays) replay.launch(on);
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  std::uint8_t got[64] = {};
  ASSERT_EQ(cuMemcpyDtoH(got, pool.address(2), 64), CUDA_SUCCESS);
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[63], 2);
}

TEST_F(GraphsTest, APoolIsAlignedAsItsUsesAre) {
  // cuMemAlloc aligns to 256 bytes alone.
  constexpr std::size_t kAlignment = 1 << 16;
  const std::vector<Use> uses{{64, 0, 0}, {64, 0, 0}};
  for (int i = 0; i < 2; ++i) {
    const StaticPool pool(uses, kAlignment);
    EXPECT_EQ(pool.address(0) % kAlignment, 0U);
    EXPECT_EQ(pool.address(1) % kAlignment, 0U);
    CUdeviceptr between = 0;
    ASSERT_EQ(cuMemAlloc(&between, 64), CUDA_SUCCESS);
  }
}

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  EXPECT_EQ(cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  return free;
}

TEST_F(GraphsTest, APoolIsFreedInItsOwnContext) {
  // Memory was freed in the context that was current, if one was.
  const std::size_t before = free_bytes();
  std::optional<StaticPool> pool(std::in_place, std::vector<Use>{{1 << 20, 0, 0}});
  EXPECT_LT(free_bytes(), before);
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  pool.reset();
  CUcontext current = context_;
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, nullptr);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes(), before);
}

TEST_F(GraphsTest, APoolGoesWithItsContext) {
  CUcontext other = nullptr;
  const auto create =
      reinterpret_cast<CUresult (*)(CUcontext*, unsigned, CUdevice)>(dlsym(RTLD_DEFAULT, "cuCtxCreate_v2"));
  ASSERT_NE(create, nullptr);
  ASSERT_EQ(create(&other, 0, 0), CUDA_SUCCESS);
  std::optional<StaticPool> pool(std::in_place, std::vector<Use>{{1 << 20, 0, 0}});
  ASSERT_EQ(cuCtxDestroy(other), CUDA_SUCCESS);
  pool.reset();
  CUcontext current = nullptr;
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, context_);
}

TEST_F(GraphsTest, TooFewParametersAndOfOtherSizesAreRefused) {
  // The driver reads as many as the kernel has: before, from beyond the end of those that were given.
  Graph graph;
  const auto refused = [](const auto& ask) -> std::string {
    try {
      ask();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  std::uint64_t value = 0;
  Kernel kernel;
  kernel.function = append_;
  kernel.parameters = {&value, &value};
  const std::string said = "the kernel append has 4 parameters, and 2 are given";
  EXPECT_EQ(refused([&] { graph.add_kernel(kernel); }), said);
  kernel.parameters = {&value, &value, &value, &value};
  kernel.parameter_bytes = {8, 8, 4, 4};
  EXPECT_EQ(refused([&] { graph.add_kernel(kernel); }),
            "the kernel append has 8 bytes as parameter 2, and 4 are given");
  kernel.parameters = {&value, &value};
  EXPECT_EQ(graph.node_count(), 0U);
  const CUgraphNode node = add(graph, 1);
  Executable replay(graph);
  EXPECT_EQ(refused([&] { replay.set_kernel(node, kernel); }), said);
  replay.launch(stream());
  EXPECT_EQ(log(), (Values{1}));
}

TEST_F(GraphsTest, ASumThatCannotBeBegunLeavesNoGroupOpen) {
  void* const library = dlopen(FAKE_NCCL, RTLD_NOW);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto open_groups = reinterpret_cast<int (*)()>(dlsym(library, "fake_nccl_open_groups"));
  ASSERT_NE(open_groups, nullptr);
  Collectives collectives(std::vector{0});
  const CUdeviceptr data = number(0);
  ASSERT_EQ(cuDevicePrimaryCtxReset(0), CUDA_SUCCESS);
  try {
    collectives.sum(std::vector{data}, 2, std::vector<CUstream>{nullptr});
    ADD_FAILURE() << "the context is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), CUDA_ERROR_CONTEXT_IS_DESTROYED) << error.what();
  }
  EXPECT_EQ(open_groups(), 0);
}

TEST_F(GraphsTest, SumsOverGpusAreCapturedOnAllStreams) {
  ASSERT_NE(dlopen(FAKE_NCCL, RTLD_NOW), nullptr) << dlerror();
  const std::vector<int> devices{0};
  Collectives collectives(devices);
  const CUstream on = stream();
  CUdeviceptr data = 0;
  ASSERT_EQ(cuMemAlloc(&data, 8), CUDA_SUCCESS);
  const float ones[2] = {1, 2};
  ASSERT_EQ(cuMemcpyHtoD(data, ones, 8), CUDA_SUCCESS);
  Capture capture(on);
  collectives.sum(std::vector{data}, 2, std::vector{on});
  const Executable replay(capture.finish());
  replay.launch(on);
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  float got[2] = {};
  ASSERT_EQ(cuMemcpyDtoH(got, data, 8), CUDA_SUCCESS);
  EXPECT_EQ(got[1], 2);
  EXPECT_THROW(collectives.sum({}, 2, {}), std::invalid_argument);
}

// The fake NCCL's.
int communicators() {
  static void* const library = dlopen(FAKE_NCCL, RTLD_NOW);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<int (*)()>(dlsym(library, "fake_nccl_communicators"))();
}

// Waits for so many, 20 s at most.
void await_communicators(int wanted) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (communicators() != wanted && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

// Of one GPU's number, by collectives that are gone.
Graph graph_of_a_sum(CUdeviceptr data, CUstream on) {
  Collectives collectives(std::vector{0});
  Capture capture(on);
  collectives.sum(std::vector{data}, 2, std::vector{on});
  return capture.finish();
}

// NCCL waits for the graphs before it destroys a communicator: where a program destroyed both, graphs last, it hung.
TEST_F(GraphsTest, SumsMayBeDestroyedAheadOfTheGraphsThatHaveThem) {
  const int before = communicators();
  const CUstream on = stream();
  const CUdeviceptr data = number(0);
  {
    const Graph graph = graph_of_a_sum(data, on);
    const Executable replay(graph);
    replay.launch(on);
    ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    EXPECT_EQ(communicators(), before + 1);  // the graph may be replayed
  }
  await_communicators(before);
  EXPECT_EQ(communicators(), before);
}

// A new thread's calls would end captures in global mode, PyTorch's among them.
TEST_F(GraphsTest, SumsThatAreDestroyedBehindTheirGraphsDisturbNoCapture) {
  const int before = communicators();
  const CUstream on = stream();
  const CUdeviceptr data = number(0);
  std::optional<Graph> graph(graph_of_a_sum(data, on));
  Capture capture(on, CU_STREAM_CAPTURE_MODE_GLOBAL);
  graph.reset();
  await_communicators(before);
  EXPECT_EQ(communicators(), before);
  EXPECT_NO_THROW(capture.finish());
}

TEST_F(GraphsTest, SumsThatWereNotCapturedAreGoneWithTheirCommunicators) {
  const int before = communicators();
  {
    Collectives collectives(std::vector{0});
    collectives.sum(std::vector{number(0)}, 2, std::vector{stream()});
    ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(communicators(), before);
}

TEST_F(GraphsTest, WhatThisDriverLacksIsSaid) {
  // The simulated driver links no code and has no peers.
  const auto said = [](const auto& ask) -> std::string {
    try {
      ask();
    } catch (const UnsupportedError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(said([] { LinkedModule(std::vector<std::string>{"x"}); }).find("linked at run time"), std::string::npos);
  EXPECT_NE(said([&] { enable_peer_access(context_, context_); }).find("peers need"), std::string::npos);
}

TEST_F(GraphsTest, WithoutAContextItIsSaid) {
  Graph graph;
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  try {
    graph.condition();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), CUDA_ERROR_INVALID_CONTEXT);
  }
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
}

// In a process of its own, whose driver says that it is older.
void ask_an_old_driver(const char* version, bool with_else) {
  setenv("CUDASCHED_SIM_DRIVER_VERSION", version, 1);
  simulated_driver::device_directory();
  CUcontext context = nullptr;
  if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) std::exit(2);
  cuCtxSetCurrent(context);
  try {
    Graph graph;
    graph.add_if(graph.condition(), with_else);
  } catch (const UnsupportedError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::exit(0);
  }
  std::exit(1);
}

TEST(OldDriverDeathTest, NamesTheDriverThatIsNeeded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      ask_an_old_driver("12020", false), testing::ExitedWithCode(0),
      "conditional nodes need an NVIDIA driver for CUDA 12.4 .release 550. or later; this one is for CUDA 12.2");
  EXPECT_EXIT(ask_an_old_driver("12060", true), testing::ExitedWithCode(0),
              "with an else need .*CUDA 12.8 .release 570");
}

}  // namespace
}  // namespace cudasched::graphs
