// Launches of graphs in slices, over the simulated driver: what the device runs is what the program launched, in its
// order, whatever the gate does between two slices.
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "graph_program.hpp"
#include "hook/entry_points.hpp"
#include "schedule/admission.hpp"

namespace cudasched::test {
namespace {

using graph::WholeReason;

std::uint64_t whole(WholeReason reason) {
  return runtime::engine().slices().counts().whole[static_cast<std::size_t>(reason)].graphs;
}

class Sliced : public GraphProgram {};

TEST_F(Sliced, AChainRunsInOrderHoweverOftenItIsLaunched) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  destroy(graph);  // as PyTorch does
  ASSERT_TRUE(has_slices(exec));
  EXPECT_GE(slices().counts().slices, 4U);
  const State before = state();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 20));
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 20U);
  EXPECT_EQ(state().slice_launches - before.slice_launches, 20 * slices().counts().slices);
}

TEST_F(Sliced, OnlyBesideALatencyClient) {
  configure(When::kAuto);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const std::uint64_t builds = slices().counts().builds;
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(slices().counts().builds, builds);  // nobody needs them
  clear_log();
  std::uint64_t sliced = 0;
  {
    OtherClient other(/*active=*/false);
    ASSERT_TRUE(has_slices(exec));
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(ran(), numbers(1, 40));
    sliced = state().sliced_launches;
    EXPECT_GT(sliced, 0U);
  }
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 2));
  EXPECT_EQ(state().sliced_launches, sliced);  // whole again
}

TEST_F(Sliced, TheGateClosesBetweenTwoSlices) {
  {
    const InRegion request(CUDASCHED_LATENCY);  // makes the client known
    ASSERT_EQ(program_.launch(9'999), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    CUgraph graph = new_graph();
    chain(graph, 1, 2'000);
    CUgraphExec exec = instantiate(graph);
    ASSERT_TRUE(has_slices(exec));
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  ASSERT_TRUE(eventually([&] { return program_.ran() > 0; }));
  {
    const InRegion request(CUDASCHED_LATENCY);
    ASSERT_TRUE(eventually([&] { return HookedDriver::instance().table().layout().waiting.load() != 0; }));
    // Nothing of it is submitted any more: what was in flight ends, and the rest stays.
    std::uint64_t seen = 0;
    ASSERT_TRUE(eventually([&] {
      std::this_thread::sleep_for(20ms);
      return std::exchange(seen, program_.ran()) == program_.ran();
    }));
    EXPECT_LT(program_.ran(), 2'000U);
  }
  EXPECT_EQ(ran(), numbers(1, 2'000));
}

// Kernels that take far longer than anybody would predict: the first slices hold several.
TEST_F(Sliced, SlicesThatTurnOutLongAreCutAgain) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUmodule module = nullptr;
  Program::check(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(
      &module, "cudasched-sim 1\nkernel slow params=8,8,8 block_us=400 blocks_per_sm=4 effect=append\n"));
  CUfunction slow = nullptr;
  Program::check(call<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction")(&slow, module, "slow"));
  CUgraph graph = new_graph();
  CUgraphNode last = nullptr;
  for (std::uint64_t i = 1; i <= 20; ++i) {
    Parameters parameters(program_, i);
    parameters.node.func = slow;
    Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&last, graph, &last, i > 1 ? 1 : 0,
                                                                                   &parameters.node));
  }
  CUgraphExec exec = instantiate(graph);
  OtherClient other(/*active=*/false);
  ASSERT_TRUE(has_slices(exec));
  EXPECT_LT(slices().counts().slices, 20U);
  EXPECT_TRUE(eventually([&] {
    Program::check(launch(exec));
    Program::check(program_.synchronize());
    clear_log();
    return slices().counts().slices == 20;
  }));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 20));
}

TEST_F(Sliced, BranchesKeepTheirOrder) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  std::vector<std::pair<std::uint64_t, std::uint64_t>> before;
  CUgraphNode last = kernel(graph, 1);
  std::uint64_t last_value = 1;
  std::uint64_t value = 1;
  for (int i = 0; i < 12; ++i) {
    std::vector<CUgraphNode> ends;
    std::vector<std::uint64_t> end_values;
    for (int branch = 0; branch < 3; ++branch) {
      const CUgraphNode one = kernel(graph, ++value, {last});
      before.emplace_back(last_value, value);
      const CUgraphNode two = kernel(graph, ++value, {one});
      before.emplace_back(value - 1, value);
      ends.push_back(two);
      end_values.push_back(value);
    }
    last = kernel(graph, ++value, ends);
    for (const std::uint64_t each : end_values) before.emplace_back(each, value);
    last_value = value;
  }
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  for (int i = 0; i < 10; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  const std::vector<std::uint64_t> all = ran();
  ASSERT_EQ(all.size(), 10 * value);
  for (int i = 0; i < 10; ++i) {
    std::vector<std::size_t> place(value + 1, 0);
    for (std::size_t j = 0; j < value; ++j) place[all[static_cast<std::size_t>(i) * value + j]] = j;
    for (const auto& [a, b] : before) ASSERT_LT(place[a], place[b]);
  }
}

TEST_F(Sliced, LaunchesOnOtherStreamsRunOneAfterAnother) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  std::vector<CUstream> streams{program_.stream(), Program::new_stream(), Program::new_stream()};
  const std::uint64_t before = state().sliced_launches;
  for (int i = 0; i < 30; ++i) ASSERT_EQ(launch(exec, streams[static_cast<std::size_t>(i % 3)]), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 30));
  EXPECT_GE(state().sliced_launches - before, 20U);
  // A stream that ends, and one whose handle may be the same.
  for (int i = 0; i < 5; ++i) {
    CUstream stream = Program::new_stream();
    ASSERT_EQ(launch(exec, stream), CUDA_SUCCESS);
    ASSERT_EQ(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream), CUDA_SUCCESS);
  }
  EXPECT_EQ(ran(), numbers(1, 40, 35));
}

TEST_F(Sliced, ADirectLaunchElsewhereComesBehindTheSlices) {
  CUgraph graph = new_graph();
  chain(graph, 1, 100);
  CUgraphExec exec = nullptr;
  CUstream other = Program::new_stream();
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    exec = instantiate(graph);
    ASSERT_TRUE(has_slices(exec));
  }
  for (int i = 0; i < 10; ++i) {
    {
      const InRegion region(CUDASCHED_BEST_EFFORT);
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    }
    ASSERT_EQ(launch(exec, other), CUDA_SUCCESS);  // normal: not deferred
  }
  EXPECT_EQ(ran(), numbers(1, 100, 20));
}

TEST_F(Sliced, IsDestroyedWhileItIsQueued) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (int round = 0; round < 5; ++round) {
    CUgraph graph = new_graph();
    chain(graph, 1, 40);
    CUgraphExec exec = instantiate(graph);
    ASSERT_TRUE(has_slices(exec));
    for (int i = 0; i < 3; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    destroy(exec);
    EXPECT_EQ(ran(), numbers(1, 40, 3));
    EXPECT_EQ(slices().counts().graphs_sliced, 0U);
    EXPECT_EQ(slices().counts().bytes, 0U);
    clear_log();
  }
}

CUresult update(CUgraphExec exec, CUgraph graph) {
  CUgraphExecUpdateResultInfo info{};
  return call<decltype(cuGraphExecUpdate)>("cuGraphExecUpdate_v2")(exec, graph, &info);
}

TEST_F(Sliced, AnUpdatedGraphRunsAsItIsNowAndKeepsItsSlices) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  const State before = state();
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t i = 0; i < 20; ++i) {  // at each launch
    CUgraph changed = new_graph();
    chain(changed, 100 * i, 40);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_EQ(update(exec, changed), CUDA_SUCCESS);
    destroy(changed);
    for (const std::uint64_t each : numbers(i == 0 ? 1 : 100 * (i - 1), 40)) wanted.push_back(each);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 20U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// From its first launch on, before there can be slices.
TEST_F(Sliced, AGraphThatIsUpdatedAtEachLaunchGetsSlices) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graphs[] = {new_graph(), new_graph()};
  chain(graphs[0], 1, 40);
  chain(graphs[1], 101, 40);
  CUgraphExec exec = instantiate(graphs[0]);
  const std::uint64_t before = state().sliced_launches;
  for (std::uint64_t turn = 1; turn < 3'000 && state().sliced_launches < before + 20; ++turn) {
    ASSERT_EQ(update(exec, graphs[turn % 2]), CUDA_SUCCESS);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_EQ(ran(), numbers(turn % 2 == 0 ? 1 : 101, 40));
    clear_log();
  }
  EXPECT_GE(state().sliced_launches, before + 20);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
}

// Which node of its graph another graph's nodes were paired with is not known: a change of one means no more slices.
TEST_F(Sliced, ANodeThatChangesAfterAnUpdateRunsAsItIsNow) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraph other = new_graph();
  chain(other, 101, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  ASSERT_EQ(update(exec, other), CUDA_SUCCESS);
  const Parameters parameters(program_, 999);
  ASSERT_EQ(call<decltype(cuGraphExecKernelNodeSetParams)>("cuGraphExecKernelNodeSetParams_v2")(exec, nodes[5],
                                                                                                &parameters.node),
            CUDA_SUCCESS);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(101, 40);
  wanted[5] = 999;
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(slices().counts().graphs_sliced, 0U);
  EXPECT_EQ(whole(WholeReason::kUpdated), 1U);
}

TEST_F(Sliced, ANodeThatChangesRunsAsItIsNowInItsSlice) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  const State before = state();
  std::vector<std::uint64_t> now = numbers(1, 40);
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t i = 0; i < 60; ++i) {
    const auto place = static_cast<std::size_t>(i * 7 % 40);
    now[place] = 1'000 + i;
    Parameters parameters(program_, now[place]);
    if (i % 3 == 0) {
      CUgraphNodeParams any{};
      any.type = CU_GRAPH_NODE_TYPE_KERNEL;
      any.kernel.func = parameters.node.func;
      any.kernel.gridDimX = parameters.node.gridDimX;
      any.kernel.gridDimY = any.kernel.gridDimZ = any.kernel.blockDimY = any.kernel.blockDimZ = 1;
      any.kernel.blockDimX = parameters.node.blockDimX;
      any.kernel.kernelParams = parameters.list;
      ASSERT_EQ(call<decltype(cuGraphExecNodeSetParams)>("cuGraphExecNodeSetParams")(exec, nodes[place], &any),
                CUDA_SUCCESS);
    } else {
      ASSERT_EQ(call<decltype(cuGraphExecKernelNodeSetParams)>("cuGraphExecKernelNodeSetParams_v2")(exec, nodes[place],
                                                                                                    &parameters.node),
                CUDA_SUCCESS);
    }
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    wanted.insert(wanted.end(), now.begin(), now.end());
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 60U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

TEST_F(Sliced, ANodeThatChangedBeforeTheSlicesWereBuiltIsInThem) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  std::vector<std::uint64_t> now = numbers(1, 40);
  // While they are being built, at whatever moment.
  std::uint64_t changes = 0;
  ASSERT_TRUE(eventually([&] {
    const auto place = static_cast<std::size_t>(changes * 11 % 40);
    now[place] = 1'000 + changes++;
    const Parameters parameters(program_, now[place]);
    Program::check(call<decltype(cuGraphExecKernelNodeSetParams)>("cuGraphExecKernelNodeSetParams_v2")(
        exec, nodes[place], &parameters.node));
    Program::check(launch(exec));
    Program::check(program_.synchronize());
    const bool is_right = std::equal(now.begin(), now.end(), program_.log() + 1);
    clear_log();
    EXPECT_TRUE(is_right);
    return !is_right || slices().counts().graphs_sliced == 1;
  }));
  for (int i = 0; i < 5; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted;
  for (int i = 0; i < 5; ++i) wanted.insert(wanted.end(), now.begin(), now.end());
  EXPECT_EQ(ran(), wanted);
}

TEST_F(Sliced, ANodeThatIsDisabledDoesNotRunInItsSlice) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto enable = [&](std::size_t place, unsigned enabled) {
    Program::check(call<decltype(cuGraphNodeSetEnabled)>("cuGraphNodeSetEnabled")(exec, nodes[place], enabled));
  };
  enable(3, 0);  // before there are slices
  ASSERT_TRUE(has_slices(exec));
  enable(30, 0);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  std::erase_if(wanted, [](std::uint64_t each) { return each == 4 || each == 31; });
  EXPECT_EQ(ran(), wanted);
  enable(3, 1);
  enable(30, 1);
  clear_log();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
}

// Fills, copies and host functions.
TEST_F(Sliced, OtherNodesThatChangeRunAsTheyAreNow) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  CUcontext const context = program_.context();
  CUdeviceptr memory = 0;
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, 64));
  void* host = nullptr;
  Program::check(call<CUresult(void**, std::size_t)>("cuMemAllocHost_v2")(&host, 64));
  auto* const words = static_cast<std::uint32_t*>(host);
  std::vector<CUgraphNode> nodes = chain(graph, 1, 20);
  CUDA_MEMSET_NODE_PARAMS fill{};
  fill.dst = memory;
  fill.elementSize = 4;
  fill.width = 4;
  fill.height = 1;
  fill.value = 7;
  CUgraphNode const fill_node = add(graph, fill, nodes.back());
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = words;
  copy.WidthInBytes = 16;
  copy.Height = copy.Depth = 1;
  CUgraphNode const copy_node = add(graph, copy, fill_node);
  CUDA_HOST_NODE_PARAMS function{};
  function.fn = [](void* where) { ++*static_cast<std::atomic<int>*>(where); };
  std::atomic<int> first{0};
  std::atomic<int> second{0};
  function.userData = &first;
  CUgraphNode const host_node = add(graph, function, copy_node);
  CUgraphNode last = host_node;
  for (std::uint64_t i = 21; i <= 40; ++i) last = kernel(graph, i, {last});

  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  first = 0;
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_EQ(words[3], 7U);
  EXPECT_EQ(first.load(), 1);
  fill.value = 9;
  copy.dstHost = words + 4;
  function.userData = &second;
  ASSERT_EQ(
      call<decltype(cuGraphExecMemsetNodeSetParams)>("cuGraphExecMemsetNodeSetParams")(exec, fill_node, &fill, context),
      CUDA_SUCCESS);
  ASSERT_EQ(
      call<decltype(cuGraphExecMemcpyNodeSetParams)>("cuGraphExecMemcpyNodeSetParams")(exec, copy_node, &copy, context),
      CUDA_SUCCESS);
  ASSERT_EQ(call<decltype(cuGraphExecHostNodeSetParams)>("cuGraphExecHostNodeSetParams")(exec, host_node, &function),
            CUDA_SUCCESS);
  const std::uint64_t before = state().sliced_launches;
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 2));
  EXPECT_EQ(words[3], 7U);
  EXPECT_EQ(words[7], 9U);
  EXPECT_EQ(first.load(), 1);
  EXPECT_EQ(second.load(), 1);
  EXPECT_EQ(state().sliced_launches - before, 1U);
}

TEST_F(Sliced, AnUpdateThatTheDriverRefusesChangesNothing) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  CUgraph other = new_graph();
  chain(other, 101, 41);
  ASSERT_NE(update(exec, other), CUDA_SUCCESS);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
}

TEST_F(Sliced, GraphsStayWholeForAReason) {
  configure(When::kAlways, 1'000'000);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph empty = new_graph();
  CUgraph one = new_graph();
  kernel(one, 1);
  CUgraph two = new_graph();
  chain(two, 1, 2);
  for (CUgraph graph : {empty, one, two}) {
    CUgraphExec exec = instantiate(graph);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  EXPECT_EQ(ran().size(), 9U);
  EXPECT_EQ(slices().counts().whole[static_cast<std::size_t>(WholeReason::kShort)].longest_nodes, 2U);
  EXPECT_EQ(whole(WholeReason::kOneNode), 2U);
  EXPECT_EQ(whole(WholeReason::kShort), 1U);
  // Those that are gone are remembered: a recording of a whole run ends with them.
  while (!execs_.empty()) destroy(execs_.back());
  EXPECT_EQ(whole(WholeReason::kOneNode), 0U);
  const auto ever = slices().whole_ever();
  EXPECT_EQ(ever[static_cast<std::size_t>(WholeReason::kOneNode)].graphs, 2U);
  EXPECT_EQ(ever[static_cast<std::size_t>(WholeReason::kShort)].longest_nodes, 2U);
}

// Kernels that write nothing.
class Huge : public Sliced {
 protected:
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kNodes = 10'000;
#else
  static constexpr std::size_t kNodes = 100'000;
#endif

  Huge() {
    Program::check(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(
        &module_, "cudasched-sim 1\nkernel quiet params=8 block_us=1 blocks_per_sm=4\n"));
    Program::check(
        call<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction")(&quiet_, module_, "quiet"));
    CUgraph graph = new_graph();
    CUgraphNode last = nullptr;
    for (std::size_t i = 0; i < kNodes; ++i) {
      Parameters parameters(program_, i);
      parameters.node.func = quiet_;
      Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&last, graph, &last, i > 0 ? 1 : 0,
                                                                                     &parameters.node));
    }
    kernel(graph, 1, {last});  // the end
    exec_ = instantiate(graph);
    destroy(graph);
  }

  // It stays whole for this reason, runs to its end, and is counted with its nodes.
  void expect_whole(WholeReason reason) {
    ASSERT_EQ(launch(exec_), CUDA_SUCCESS);  // directly
    ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
    EXPECT_TRUE(eventually([&] { return whole(reason) == 1; }));
    EXPECT_EQ(ran(), numbers(1, 1, 2));
    EXPECT_EQ(slices().counts().whole[static_cast<std::size_t>(reason)].longest_nodes, kNodes + 1);
    EXPECT_EQ(slices().counts().graphs_sliced, 0U);
    EXPECT_EQ(slices().counts().bytes, 0U);
    EXPECT_EQ(state().sliced_launches, 0U);
  }

  CUmodule module_ = nullptr;
  CUfunction quiet_ = nullptr;
  CUgraphExec exec_ = nullptr;
  const InRegion region_{CUDASCHED_BEST_EFFORT};
};

TEST_F(Huge, OneThatTakesTooLongToCutGoesWhole) {
  runtime::SliceSettings settings;
  settings.when = When::kAlways;
  settings.most_build_ns = kNsPerMs;
  slices().configure(settings);
  expect_whole(WholeReason::kTooSlow);
}

TEST_F(Huge, OneWhoseSlicesWouldTakeTooMuchMemoryGoesWhole) {
  runtime::SliceSettings settings;
  settings.when = When::kAlways;
  settings.most_bytes = 10'000'000;
  settings.most_build_ns = 60 * kNsPerSecond;
  slices().configure(settings);
  expect_whole(WholeReason::kOverBudget);
}

// Other graphs' slices had the memory; they may be gone since.
TEST_F(Sliced, AGraphThatWentOverTheBudgetIsTriedAgainWhenItHasBeenLaunchedAsOftenAgain) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  configure(When::kAlways, 30'000, /*most_bytes=*/1);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  std::size_t launches = 0;
  const auto launch_again = [&] {
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(ran(), numbers(1, 40));
    clear_log();
    ++launches;
  };
  EXPECT_TRUE(eventually([&] {
    launch_again();
    return whole(WholeReason::kOverBudget) == 1;
  }));
  const std::uint64_t builds = state().graph_builds;
  // Not at once, or a graph of no luck would be built for ever.
  for (int i = 0; i < 10; ++i) launch_again();
  EXPECT_EQ(state().graph_builds, builds);
  configure(When::kAlways);
  const std::size_t most = 3 * launches + 100;
  EXPECT_TRUE(eventually([&] {
    if (launches < most) launch_again();
    return state().graphs_sliced == 1;
  }));
  launch_again();
  EXPECT_EQ(whole(WholeReason::kOverBudget), 0U);
  EXPECT_EQ(slices().whole_ever()[static_cast<std::size_t>(WholeReason::kOverBudget)].graphs, 1U);
}

TEST_F(Huge, OneThatMayTakeTheTimeAndMemoryIsCut) {
  runtime::SliceSettings settings;
  settings.when = When::kAlways;
  settings.slice_ns = 5 * kNsPerMs;
  settings.most_build_ns = 200 * kNsPerSecond;
  slices().configure(settings);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(ran().size(), 2U);
  clear_log();
  ASSERT_TRUE(eventually([&] { return slices().counts().graphs_sliced == 1; }));
  EXPECT_GT(slices().counts().slices, 10U);
  ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 1));
  EXPECT_EQ(state().sliced_launches, 1U);
}

TEST_F(Sliced, NothingIsClonedWhereItIsOff) {
  configure(When::kOff);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  EXPECT_EQ(driver::registry().slices(exec), nullptr);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 5));
}

runtime::Sliced::State state_of(CUgraphExec exec) {
  return static_cast<const runtime::Sliced*>(driver::registry().slices(exec))->state.load();
}

// The builder has begun with `exec`, and does no more while this lives. The thread has launched before: what it sets up
// then takes the engine's lock, which comes before the builder's.
class AtTheFirstStep {
 public:
  AtTheFirstStep(runtime::Slices& slices, CUgraphExec exec, CUstream stream) : driving_(slices) {
    for (int i = 0; i < 2; ++i) Program::check(call<decltype(cuGraphLaunch)>("cuGraphLaunch")(exec, stream));
    if (!eventually([&] { return state_of(exec) == runtime::Sliced::State::kBuilding; })) {
      throw std::runtime_error("it is not built");
    }
  }

 private:
  runtime::Slices::Driving driving_;
};

// The functions of a graph that is launched no more may be gone: nothing looks at them.
TEST_F(Sliced, NothingIsBuiltOfAGraphThatWasNotLaunchedSinceAModuleWasUnloaded) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::vector<CUgraphExec> execs = chains({1, 101});
  CUmodule module = nullptr;
  ASSERT_EQ(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(&module, kImage), CUDA_SUCCESS);
  Program::check(program_.launch(0));
  const State before = state();
  std::thread unloads;
  {
    const AtTheFirstStep step(slices(), execs[0], program_.stream());
    for (int i = 0; i < 2; ++i) ASSERT_EQ(launch(execs[1]), CUDA_SUCCESS);
    ASSERT_TRUE(eventually([&] { return state_of(execs[1]) == runtime::Sliced::State::kWanted; }));
    ran();
    // Its thread goes ahead of the builder's next step.
    unloads = std::thread([&] {
      program_.use_on_this_thread();
      Program::check(call<CUresult(CUmodule)>("cuModuleUnload")(module));
    });
    std::this_thread::sleep_for(20ms);
  }
  unloads.join();
  for (CUgraphExec exec : execs) {
    ASSERT_TRUE(eventually([&] { return state_of(exec) == runtime::Sliced::State::kIdle; }));
  }
  EXPECT_EQ(state().graph_builds, before.graph_builds);
  EXPECT_EQ(state().graph_slices, before.graph_slices);
  ASSERT_TRUE(has_slices(execs[1]));  // launched again
  ASSERT_EQ(launch(execs[1]), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(101, 40));
  EXPECT_EQ(state_of(execs[0]), runtime::Sliced::State::kIdle);
}

// Most graphs of a program may be: none of them waits for the builder's step.
TEST_F(Sliced, AGraphThatIsNeverClonedIsInstantiatedBesideABuild) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraphExec exec = chains({1}).front();
  CUgraph one = new_graph();
  kernel(one, 101);
  Program::check(program_.launch(0));
  std::atomic<bool> made{false};
  std::thread instantiates;
  {
    const AtTheFirstStep step(slices(), exec, program_.stream());
    instantiates = std::thread([&] {
      program_.use_on_this_thread();
      instantiate(one);
      made = true;
    });
    EXPECT_TRUE(eventually([&] { return made.load(); }));
  }
  instantiates.join();
}

// cuGraphExecDestroy has come as far as the registry, and waits for the builder: what is missing there is no fault.
TEST_F(Sliced, AGraphThatIsBeingDestroyedWhileItIsBuiltIsNoFailure) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraphExec exec = chains({1}).front();
  Program::check(program_.launch(0));
  const State before = state();
  const runtime::Sliced* sliced = nullptr;
  {
    const AtTheFirstStep step(slices(), exec, program_.stream());
    sliced = static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
    driver::registry().forget(exec);
  }
  ASSERT_TRUE(eventually([&] { return sliced->state.load() != runtime::Sliced::State::kBuilding; }));
  EXPECT_EQ(sliced->state.load(), runtime::Sliced::State::kIdle);
  EXPECT_EQ(state().graph_builds, before.graph_builds);
  destroy(exec);
}

// Exit handlers of the program, which come behind ours, destroy graphs and unload modules. In a process of its own,
// where nothing is built afterwards.
TEST_F(Sliced, AGraphIsDestroyedAtExitThoughTheBuilderWasAtIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exits = [&] {
    alarm(60);  // against a hang alone
    const InRegion region(CUDASCHED_BEST_EFFORT);
    CUgraphExec exec = chains({1}).front();
    Program::check(program_.launch(0));
    {
      const AtTheFirstStep step(slices(), exec, program_.stream());
      std::thread([] { slices().stop(); }).join();
    }
    std::this_thread::sleep_for(100ms);  // the builder comes to its next step
    destroy(exec);
    _exit(0);
  };
  EXPECT_EXIT(exits(), ::testing::ExitedWithCode(0), "");
}

// The values of the first kernels of slices, in the order in which they are made.
struct Built {
  std::mutex mutex;
  std::vector<std::uint64_t> values;
  std::vector<std::vector<std::uint64_t>> slices;
  decltype(cuGraphInstantiateWithFlags)* instantiate = nullptr;
} built;
CUresult note_built(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  CUgraphNode first = nullptr;
  std::size_t count = 1;
  CUDA_KERNEL_NODE_PARAMS parameters{};
  Program::check(driver::table().cuGraphGetNodes(graph, &first, &count));
  Program::check(driver::table().cuGraphKernelNodeGetParams(first, &parameters));
  const std::scoped_lock lock(built.mutex);
  built.values.push_back(*static_cast<std::uint64_t*>(parameters.kernelParams[2]));
  return built.instantiate(exec, graph, flags);
}

CUresult note_all_built(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  std::vector<CUgraphNode> nodes(200);
  std::size_t count = nodes.size();
  Program::check(driver::table().cuGraphGetNodes(graph, nodes.data(), &count));
  std::vector<std::uint64_t> values;
  for (std::size_t i = 0; i < count; ++i) {
    CUDA_KERNEL_NODE_PARAMS parameters{};
    Program::check(driver::table().cuGraphKernelNodeGetParams(nodes[i], &parameters));
    values.push_back(*static_cast<std::uint64_t*>(parameters.kernelParams[2]));
  }
  const std::scoped_lock lock(built.mutex);
  if (count < 91) built.slices.push_back(std::move(values));  // the whole graph is instantiated, too
  return built.instantiate(exec, graph, flags);
}

TEST_F(Sliced, TheGraphThatIsLaunchedMostIsBuiltFirst) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::vector<int> launches{2, 3, 9, 5, 4};
  const std::vector<CUgraphExec> execs = chains({0, 100, 200, 300, 400});
  built.instantiate = driver::table().cuGraphInstantiateWithFlags;
  const Replaced noted(driver::table().cuGraphInstantiateWithFlags, &note_built);
  Program::check(program_.launch(0));
  {
    const AtTheFirstStep step(slices(), execs[0], program_.stream());
    for (std::size_t i = 1; i < execs.size(); ++i) {
      for (int j = 0; j < launches[i]; ++j) ASSERT_EQ(launch(execs[i]), CUDA_SUCCESS);
    }
    ran();
  }
  ASSERT_TRUE(eventually([&] { return slices().counts().graphs_sliced == execs.size(); }));
  std::vector<std::uint64_t> order;
  for (const std::uint64_t value : built.values) {
    if (order.empty() || order.back() != value / 100) order.push_back(value / 100);
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{0, 2, 3, 4, 1}));
}

TEST_F(Sliced, SlicesMayBeBuiltBeforeALatencyClientIsThere) {
  configure(When::kAhead);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const State before = state();
  int launches = 0;
  EXPECT_TRUE(eventually([&] {
    Program::check(launch(exec));
    ran();
    ++launches;
    return state().graphs_sliced == 1;
  }));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ran();
  EXPECT_EQ(state().sliced_launches, before.sliced_launches) << "nobody waits";
  {
    const OtherClient other(/*active=*/false);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ran();
    EXPECT_EQ(state().sliced_launches, before.sliced_launches + 1);
  }
  EXPECT_EQ(ran(), numbers(1, 40, launches + 2));
}

// Each build of another graph is followed by one look at all of them: no look waits for time here.
TEST_F(Sliced, SlicesOfAGraphThatIsLaunchedNoMoreAreDropped) {
  configure_looks(10, 3'600 * kNsPerSecond);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const auto is_built = [&](CUgraphExec exec) {
    return eventually([&] {
      Program::check(launch(exec));
      ran();
      clear_log();
      return state_of(exec) == runtime::Sliced::State::kReady;
    });
  };
  const std::vector<CUgraphExec> execs = chains({1, 101});
  ASSERT_TRUE(is_built(execs[0]));
  const State before = state();
  ASSERT_TRUE(is_built(execs[1]));
  for (int builds = 0; builds < 40 && state_of(execs[0]) != runtime::Sliced::State::kIdle; ++builds) {
    ASSERT_EQ(launch(execs[1]), CUDA_SUCCESS);
    ASSERT_TRUE(is_built(chains({201}).front()));
  }
  ASSERT_EQ(state_of(execs[0]), runtime::Sliced::State::kIdle);
  EXPECT_GT(state().graph_slices_dropped, before.graph_slices_dropped);
  EXPECT_TRUE(eventually([&] { return state_of(execs[1]) == runtime::Sliced::State::kReady; }));
  // How many slices a graph has depends on how long its kernels took.
  EXPECT_TRUE(eventually([] {
    const runtime::SliceCounts now = slices().counts();
    return now.bytes == now.graphs_sliced * 40 * (4 << 10) + now.slices * (64 << 10);
  }));
  // It goes whole, and gets slices anew.
  ASSERT_EQ(launch(execs[0]), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_TRUE(is_built(execs[0]));
}

// However long the gate holds the launch.
TEST_F(Sliced, SlicesOfALaunchThatTheGateHoldsAreNotDropped) {
  configure_looks(2);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ASSERT_TRUE(eventually([&] { return HookedDriver::instance().table().layout().waiting.load() != 0; }));
  const State before = state();
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
  other.kill();
  EXPECT_EQ(ran(), numbers(1, 40));
}

// ---- changes of graphs whose launches are queued

void enable(CUgraphExec exec, CUgraphNode node, bool enabled) {
  Program::check(call<decltype(cuGraphNodeSetEnabled)>("cuGraphNodeSetEnabled")(exec, node, enabled ? 1 : 0));
}

class Changed : public Sliced {
 protected:
  void set_value(CUgraphExec exec, CUgraphNode node, std::uint64_t value) {
    const Parameters parameters(program_, value);
    Program::check(call<decltype(cuGraphExecKernelNodeSetParams)>("cuGraphExecKernelNodeSetParams_v2")(
        exec, node, &parameters.node));
  }
  // Slices have followed such a change before, directly.
  template <typename Change>
  void prove(CUgraphExec exec, Change&& change) {
    ASSERT_TRUE(has_slices(exec));
    change();
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ran();
    clear_log();
  }

  // The child graph becomes another chain.
  void set_child(CUgraphExec exec, CUgraphNode node, std::uint64_t first, std::uint64_t count = 10) {
    CUgraph changed = new_graph();
    chain(changed, first, count);
    Program::check(
        call<decltype(cuGraphExecChildGraphNodeSetParams)>("cuGraphExecChildGraphNodeSetParams")(exec, node, changed));
  }
};

TEST_F(Changed, ANodeIsSetWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 0; i < 20; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      set_value(exec, nodes[5], 1'000 + i);  // comes back, although a launch of it waits
      const std::vector<std::uint64_t> one = numbers(1, 40);
      wanted.insert(wanted.end(), one.begin(), one.end());
      wanted[wanted.size() - 35] = i == 0 ? 6 : 999 + i;
    }
    EXPECT_EQ(state().slice_launches, before.slice_launches);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 20U);
  clear_log();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran()[5], 1'019U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// While another thread of the process answers a request, changes that come before a launch pause as that would.
TEST_F(Changed, AChangeBacksOffDuringARequestOfTheProcess) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  runtime::hot().host_backoff.configure(60 * kNsPerSecond, false);
  const auto backed_off = [] { return state().backed_off; };
  const std::uint64_t before = backed_off();
  set_value(exec, nodes[5], 7);
  EXPECT_EQ(backed_off(), before);
  std::atomic<bool> entered{false};
  std::thread request([&] {
    const InRegion latency(CUDASCHED_LATENCY);
    entered = true;
    EXPECT_TRUE(eventually([&] { return backed_off() != before; }));
  });
  while (!entered) std::this_thread::yield();
  set_value(exec, nodes[5], 100);
  request.join();
  EXPECT_EQ(backed_off(), before + 1);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran()[5], 100U);
}

struct Uploads {
  decltype(driver::Driver::cuGraphUpload) upload = nullptr;
  std::atomic<std::uint64_t> made{0};
  std::atomic<CUstream> stream{nullptr};
};
Uploads uploads;
CUresult note_upload(CUgraphExec exec, CUstream stream) {
  uploads.made.fetch_add(1);
  uploads.stream = stream;
  return uploads.upload(exec, stream);
}
// From here on, until what it returns is gone.
auto note_uploads() {
  uploads.made = 0;
  uploads.stream = nullptr;
  uploads.upload = driver::table().cuGraphUpload;
  return Replaced(driver::table().cuGraphUpload, &note_upload);
}

// On a stream of ours, so that the GPU is at the slice before meanwhile.
TEST_F(Changed, ASliceThatWasToldOfAChangeIsUploadedBeforeItIsLaunched) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[35], 36); });
  const auto noted = note_uploads();
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[35], 100);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  const std::vector<std::uint64_t> first = wanted;
  wanted[35] = 100;
  wanted.insert(wanted.begin(), first.begin(), first.end());
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(uploads.made, 1U);
  EXPECT_NE(uploads.stream, program_.stream());
  EXPECT_NE(uploads.stream, nullptr);
}

TEST_F(Changed, NothingIsUploadedWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[0], 1); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[0], 100);
  }
  EXPECT_EQ(ran(), numbers(1, 40));
  clear_log();
  const auto* const sliced = static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
  ASSERT_NE(sliced, nullptr);
  EXPECT_TRUE(eventually([&] { return sliced->may_await.load(); }));
  const auto noted = note_uploads();
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_TRUE(eventually([&] { return HookedDriver::instance().table().layout().waiting.load() != 0; }));
    EXPECT_EQ(uploads.made, 0U);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  wanted[0] = 100;
  EXPECT_EQ(ran(), wanted);
}

TEST_F(Changed, AGraphIsUpdatedWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto update_to = [&](std::uint64_t first) {
    CUgraph changed = new_graph();
    chain(changed, first, 40);
    Program::check(update(exec, changed));
  };
  prove(exec, [&] { update_to(1); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 0; i < 10; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      update_to(100 * (i + 1));
      const std::vector<std::uint64_t> one = numbers(i == 0 ? 1 : 100 * i, 40);
      wanted.insert(wanted.end(), one.begin(), one.end());
    }
    CUgraph longer = new_graph();
    chain(longer, 1, 41);
    EXPECT_NE(update(exec, longer), CUDA_SUCCESS);  // refused: nothing has changed
    EXPECT_EQ(state().slice_launches, before.slice_launches);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 10U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// Slices are told of a change when they are launched next: of several changes in the order in which they were made,
// whatever their kind.
TEST_F(Changed, ChangesOfAllKindsReachTheSlicesInTheirOrder) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto enable = [&](CUgraphNode node, bool enabled) {
    Program::check(call<decltype(cuGraphNodeSetEnabled)>("cuGraphNodeSetEnabled")(exec, node, enabled ? 1 : 0));
  };
  prove(exec, [&] {
    for (const int i : {5, 6, 30}) set_value(exec, nodes[i], static_cast<std::uint64_t>(i) + 1);
    enable(nodes[20], true);
  });
  const State before = state();
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
    set_value(exec, nodes[6], 101);
    set_value(exec, nodes[30], 102);
    enable(nodes[20], false);
    set_value(exec, nodes[5], 103);  // not launched in between
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    enable(nodes[20], true);
    set_value(exec, nodes[30], 104);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(state().slice_launches, before.slice_launches);
  }
  std::vector<std::uint64_t> changed = numbers(1, 40);
  changed[5] = 103;
  changed[6] = 101;
  changed[30] = 102;
  std::vector<std::uint64_t> without = changed;
  without.erase(without.begin() + 20);
  changed[30] = 104;
  wanted.insert(wanted.end(), without.begin(), without.end());
  wanted.insert(wanted.end(), changed.begin(), changed.end());
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 3U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// vLLM's pieces are short: a program that updates them would else wait before each launch for all that is queued.
TEST_F(Changed, AGraphThatGoesWholeIsDeferredBehindAChangeToo) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 1);
  CUgraph other = new_graph();
  chain(other, 11, 1);
  CUgraphExec exec = instantiate(graph);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ran();
  clear_log();
  const State before = state();
  EXPECT_EQ(before.graphs_whole[static_cast<std::size_t>(graph::WholeReason::kOneNode)], 1U);
  set_value(exec, nodes[0], 5);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  Program::check(update(exec, other));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  Program::check(update(exec, graph));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), (std::vector<std::uint64_t>{5, 11, 1}));
  EXPECT_EQ(state().offloaded_launches - before.offloaded_launches, 3U);
}

// A change that waits for the next launch is not lost where the program changes the graph once more directly.
TEST_F(Changed, AChangeThatIsAwaitedComesBeforeALaterDirectOne) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
  }
  EXPECT_EQ(ran(), numbers(1, 40));  // and the change is made, but for the slice
  clear_log();
  set_value(exec, nodes[7], 101);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  wanted[5] = 100;
  wanted[7] = 101;
  EXPECT_EQ(ran(), wanted);
}

// Nor does it wait for what else is queued.
TEST_F(Changed, ANodeIsSwitchedOffWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  CUgraph other_graph = new_graph();
  const std::vector<CUgraphNode> other_nodes = chain(other_graph, 101, 2);
  CUgraphExec other_exec = instantiate(other_graph);
  prove(exec, [&] {
    enable(exec, nodes[3], false);
    enable(exec, nodes[3], true);
  });
  ASSERT_EQ(launch(other_exec, program_.stream()), CUDA_SUCCESS);
  ran();
  clear_log();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::size_t i = 0; i < 10; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      enable(exec, nodes[i], false);
      enable(other_exec, other_nodes[0], false);
      for (std::uint64_t each : numbers(1, 40)) {
        if (each > i) wanted.push_back(each);
      }
    }
  }
  EXPECT_EQ(ran(), wanted);
}

// Executable graphs are copies, so that nothing queued needs the graph that one was updated to.
TEST_F(Changed, AGraphIsDestroyedWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] {});
  const State before = state();
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    std::atomic<bool> done{false};
    std::thread opens([&] {  // against a hang
      for (int i = 0; i < 10'000 && !done; ++i) std::this_thread::sleep_for(1ms);
      other.kill();
    });
    destroy(graph);
    EXPECT_EQ(state().slice_launches, before.slice_launches);
    done = true;
    opens.join();
  }
  EXPECT_EQ(ran(), numbers(1, 40));
}

// What memory nodes have allocated may be in use by what is queued.
TEST_F(Changed, AGraphWithMemoryNodesIsDestroyedBehindWhatIsQueued) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph allocates = new_graph();
  CUDA_MEM_ALLOC_NODE_PARAMS memory{};
  memory.bytesize = 4096;
  CUgraphNode node = nullptr;
  ASSERT_EQ(call<decltype(cuGraphAddMemAllocNode)>("cuGraphAddMemAllocNode")(&node, allocates, nullptr, 0, &memory),
            CUDA_SUCCESS);
  instantiate(allocates);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] {});
  const State before = state();
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::thread opens([&] {
    std::this_thread::sleep_for(50ms);
    other.kill();
  });
  destroy(allocates);  // waits
  EXPECT_GT(state().slice_launches, before.slice_launches);
  opens.join();
  EXPECT_EQ(ran(), numbers(1, 40));
}

// Freed memory of a user object, and how many kernels had run by then.
struct Freed {
  const Program* program = nullptr;
  std::atomic<int> count{0};
  std::atomic<std::uint64_t> ran{0};
};
void CUDA_CB note_freed(void* data) {
  auto& freed = *static_cast<Freed*>(data);
  freed.ran = freed.program->ran();
  ++freed.count;
}

// The driver keeps the objects of a graph that an executable was updated to for launches that it has seen. It has seen
// none of those that go in slices.
TEST_F(Changed, UserObjectsOfUpdatesOutliveTheLaunchesThatAreQueued) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto update_to = [&](CUgraph changed) {
    Program::check(update(exec, changed));
    destroy(changed);
  };
  const auto new_chain = [&](std::uint64_t first) {
    CUgraph made = new_graph();
    chain(made, first, 40);
    return made;
  };
  prove(exec, [&] { update_to(new_chain(1)); });
  Freed freed;
  freed.program = &program_;
  CUuserObject object = nullptr;
  ASSERT_EQ(call<decltype(cuUserObjectCreate)>("cuUserObjectCreate")(&object, &freed, note_freed, 1,
                                                                     CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
            CUDA_SUCCESS);
  {
    OtherClient other(/*active=*/true);
    std::thread opens([&] {
      std::this_thread::sleep_for(100ms);
      other.kill();
    });
    CUgraph holding = new_chain(101);
    ASSERT_EQ(call<decltype(cuGraphRetainUserObject)>("cuGraphRetainUserObject")(holding, object, 1,
                                                                                 CU_GRAPH_USER_OBJECT_MOVE),
              CUDA_SUCCESS);
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);  // in slices, as it was
    update_to(holding);
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    update_to(new_chain(201));
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    opens.join();
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  for (const std::uint64_t first : {101, 201}) {
    for (const std::uint64_t each : numbers(first, 40)) wanted.push_back(each);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(freed.count, 1);
  EXPECT_GE(freed.ran, 80U);
}

// The program has given everything away when the slices run.
TEST_F(Changed, AUserObjectOfTheGraphOutlivesItsSlices) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  Freed freed;
  freed.program = &program_;
  CUuserObject object = nullptr;
  ASSERT_EQ(call<decltype(cuUserObjectCreate)>("cuUserObjectCreate")(&object, &freed, note_freed, 1,
                                                                     CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
            CUDA_SUCCESS);
  ASSERT_EQ(
      call<decltype(cuGraphRetainUserObject)>("cuGraphRetainUserObject")(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE),
      CUDA_SUCCESS);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  ran();
  clear_log();
  const State before = state();
  OtherClient other(/*active=*/true);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  destroy(graph);
  EXPECT_EQ(state().slice_launches, before.slice_launches);
  std::atomic<int> freed_early{0};
  std::thread opens([&] {
    std::this_thread::sleep_for(50ms);
    freed_early = freed.count.load();
    other.kill();
  });
  destroy(exec);  // waits until they are submitted
  opens.join();
  EXPECT_EQ(freed_early, 0);
  EXPECT_EQ(ran(), numbers(1, 40, 3));
  EXPECT_EQ(state().sliced_launches, before.sliced_launches + 3);
  EXPECT_TRUE(eventually([&] { return freed.count == 1; }));
  EXPECT_EQ(freed.ran, 120U);
}

// As programs that were built with CUDA 11 call them.
TEST_F(Changed, TheFirstVersionsOfChangesReachTheSlices) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto set_first = [&](std::uint64_t value) {
    const Parameters now(program_, value);
    const CUDA_KERNEL_NODE_PARAMS_v1 parameters{
        now.node.func,      now.node.gridDimX,  now.node.gridDimY,       now.node.gridDimZ,     now.node.blockDimX,
        now.node.blockDimY, now.node.blockDimZ, now.node.sharedMemBytes, now.node.kernelParams, nullptr};
    Program::check(call<CUresult(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1*)>(
        "cuGraphExecKernelNodeSetParams")(exec, nodes[5], &parameters));
  };
  const auto update_first = [&](std::uint64_t first) {
    CUgraph changed = new_graph();
    chain(changed, first, 40);
    CUgraphNode node = nullptr;
    CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_ERROR;
    Program::check(call<CUresult(CUgraphExec, CUgraph, CUgraphNode*, CUgraphExecUpdateResult*)>("cuGraphExecUpdate")(
        exec, changed, &node, &result));
    EXPECT_EQ(result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
    destroy(changed);
  };
  prove(exec, [&] { set_first(500); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  const auto add = [&](std::vector<std::uint64_t> one) { wanted.insert(wanted.end(), one.begin(), one.end()); };
  const auto hold = [&](auto&& launches) {
    const OtherClient other(/*active=*/true);
    const State held = state();
    launches();
    EXPECT_EQ(state().slice_launches, held.slice_launches);
  };
  std::vector<std::uint64_t> one = numbers(1, 40);
  hold([&] {
    for (std::uint64_t i = 0; i < 3; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      one[5] = 500 + i;
      add(one);
      set_first(501 + i);
    }
  });
  ran();
  update_first(101);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  add(numbers(101, 40));
  ran();
  hold([&] {
    for (std::uint64_t i = 1; i <= 3; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      add(numbers(100 * i + 1, 40));
      update_first(100 * i + 101);
    }
  });
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches, before.sliced_launches + 7);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// Each line of the table of entry points that is deferred and changes a graph has its call here, which changes nothing.
TEST_F(Changed, WhicheverFunctionIsDeferredComesBackWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUcontext const context = program_.context();
  CUdeviceptr memory = 0;
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, 64));
  CUgraph inner = new_graph();
  chain(inner, 100, 10);
  CUgraph graph = new_graph();
  CUgraphNode const kernel_node = chain(graph, 1, 20).back();
  const Parameters kernel_params(program_, 20);
  const CUDA_KERNEL_NODE_PARAMS& of_kernel = kernel_params.node;
  const CUDA_KERNEL_NODE_PARAMS_v1 of_kernel_v1{
      of_kernel.func,      of_kernel.gridDimX,  of_kernel.gridDimY,       of_kernel.gridDimZ,     of_kernel.blockDimX,
      of_kernel.blockDimY, of_kernel.blockDimZ, of_kernel.sharedMemBytes, of_kernel.kernelParams, nullptr};
  CUgraphNodeParams of_any{};
  of_any.type = CU_GRAPH_NODE_TYPE_KERNEL;
  of_any.kernel.func = of_kernel.func;
  of_any.kernel.gridDimX = of_kernel.gridDimX;
  of_any.kernel.gridDimY = of_any.kernel.gridDimZ = of_any.kernel.blockDimY = of_any.kernel.blockDimZ = 1;
  of_any.kernel.blockDimX = of_kernel.blockDimX;
  of_any.kernel.kernelParams = of_kernel.kernelParams;
  CUDA_MEMSET_NODE_PARAMS fill{};
  fill.dst = memory;
  fill.elementSize = 4;
  fill.width = 4;
  fill.height = 1;
  CUgraphNode const fill_node = add(graph, fill, kernel_node);
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.dstDevice = memory + 16;
  copy.WidthInBytes = 16;
  copy.Height = copy.Depth = 1;
  CUgraphNode const copy_node = add(graph, copy, fill_node);
  CUDA_HOST_NODE_PARAMS function{};
  function.fn = [](void*) {};
  CUgraphNode const host_node = add(graph, function, copy_node);
  CUgraphNode const child_node = child(graph, inner, {host_node});
  CUgraphNode last = child_node;
  for (std::uint64_t i = 21; i <= 40; ++i) last = kernel(graph, i, {last});
  CUgraphExec exec = nullptr;

  CUgraphNode wrong = nullptr;
  CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  CUgraphExecUpdateResultInfo info{};
  using SetKernelV1 = CUresult(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1*);
  using UpdateV1 = CUresult(CUgraphExec, CUgraph, CUgraphNode*, CUgraphExecUpdateResult*);
  const std::map<std::string_view, std::function<CUresult(const char*)>> changes{
      {"cuGraphExecKernelNodeSetParams",
       [&](const char* f) { return call<SetKernelV1>(f)(exec, kernel_node, &of_kernel_v1); }},
      {"cuGraphExecKernelNodeSetParams_v2",
       [&](const char* f) { return call<decltype(cuGraphExecKernelNodeSetParams)>(f)(exec, kernel_node, &of_kernel); }},
      {"cuGraphExecNodeSetParams",
       [&](const char* f) {
         return call<CUresult(CUgraphExec, CUgraphNode, CUgraphNodeParams*)>(f)(exec, kernel_node, &of_any);
       }},
      {"cuGraphNodeSetEnabled",
       [&](const char* f) { return call<decltype(cuGraphNodeSetEnabled)>(f)(exec, kernel_node, 1); }},
      {"cuGraphExecMemsetNodeSetParams",
       [&](const char* f) {
         return call<decltype(cuGraphExecMemsetNodeSetParams)>(f)(exec, fill_node, &fill, context);
       }},
      {"cuGraphExecMemcpyNodeSetParams",
       [&](const char* f) {
         return call<decltype(cuGraphExecMemcpyNodeSetParams)>(f)(exec, copy_node, &copy, context);
       }},
      {"cuGraphExecHostNodeSetParams",
       [&](const char* f) { return call<decltype(cuGraphExecHostNodeSetParams)>(f)(exec, host_node, &function); }},
      {"cuGraphExecChildGraphNodeSetParams",
       [&](const char* f) { return call<decltype(cuGraphExecChildGraphNodeSetParams)>(f)(exec, child_node, inner); }},
      {"cuGraphExecUpdate", [&](const char* f) { return call<UpdateV1>(f)(exec, graph, &wrong, &result); }},
      {"cuGraphExecUpdate_v2", [&](const char* f) { return call<decltype(cuGraphExecUpdate)>(f)(exec, graph, &info); }},
  };
  int lines = 0;
  for (const hook::EntryPoint& point : hook::entry_points()) {
    if (point.treatment != hook::Treatment::kDefer || point.meaning != hook::Meaning::kChangeExec) continue;
    SCOPED_TRACE(point.symbol);
    const auto change = changes.find(point.symbol);
    ASSERT_NE(change, changes.end()) << "there is no call of it here";
    const auto make = [&] { ASSERT_EQ(change->second(point.symbol.data()), CUDA_SUCCESS); };
    exec = instantiate(graph);
    prove(exec, make);
    // Where the builder cuts the graph again at that moment, the change waits for the gate; it opens, and the next may
    // not.
    EXPECT_TRUE(eventually([&] {
      OtherClient other(/*active=*/true);
      const State before = state();
      std::promise<void> came_back;
      std::thread opens([&, done = came_back.get_future()] {
        if (done.wait_for(2s) == std::future_status::timeout) other.kill();
      });
      Program::check(launch(exec));
      make();
      const bool is_closed = state().slice_launches == before.slice_launches;
      came_back.set_value();
      opens.join();
      other.kill();
      prove(exec, make);
      return is_closed;
    }));
    destroy(exec);
    ++lines;
  }
  EXPECT_GE(lines, 10);
}

// ---- slices at the gate

// Of the launches that a policy is asked about.
struct Asked {
  std::atomic<std::int64_t> longest_ns{0};
  std::atomic<std::uint64_t> submitted{0};
};
schedule::Decision ask_slack(const schedule::Snapshot& seen, void* context) noexcept {
  Asked& asked = *static_cast<Asked*>(context);
  if (seen.longest_ns() > asked.longest_ns) asked.longest_ns = seen.longest_ns();
  const schedule::Decision decision = schedule::slack(seen);
  if (decision.answer == schedule::Answer::kSubmit) ++asked.submitted;
  return decision;
}

// The request of another process leaves less time than the graph takes, and more than slices do.
TEST_F(Sliced, UnderSlackSlicesGoWhereTheGraphWouldNot) {
  constexpr std::uint64_t kKernels = 4'000;  // of 20 us
  constexpr std::int64_t kSlackNs = 60 * kNsPerMs;
  OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, kKernels);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  Asked asked;
  runtime::engine().use_policy({&ask_slack, &asked});
  arbiter::Table& table = HookedDriver::instance().table();
  arbiter::Slot& client = table.slot(other.slot());
  const std::uint64_t bit = std::uint64_t{1} << other.slot();
  const auto begin_request = [&] {
    client.entered_ns = now_ns();
    client.expected_ns = 1'000 * kNsPerSecond;
    client.deadline_ns = client.entered_ns + client.expected_ns + kSlackNs;
    client.admitted_at_entry_ns = table.layout().admitted_ns.load();
    table.layout().active.fetch_or(bit);
  };
  const auto end_request = [&] {
    table.layout().active.fetch_and(~bit);
    table.wake_all();
  };
  begin_request();
  const State before = state();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return state().slice_launches > before.slice_launches; }));
  EXPECT_GT(asked.submitted, 0U);
  end_request();
  EXPECT_EQ(ran(), numbers(1, kKernels));
  clear_log();

  configure(When::kOff);
  begin_request();
  asked.submitted = 0;
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return table.layout().waiting.load() != 0; }));
  EXPECT_EQ(asked.submitted, 0U);
  EXPECT_EQ(program_.ran(), 0U);
  EXPECT_GT(asked.longest_ns, kSlackNs);
  end_request();
  EXPECT_EQ(ran(), numbers(1, kKernels));
  runtime::engine().configure("policy", "strict");
}

// What goes whole is submitted before the whole graph changes.
TEST_F(Changed, ALaunchThatIsQueuedAndGoesWholeRunsAsItWas) {
  configure(When::kAuto, 1'000'000'000);  // no slice is so long
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ran();
  clear_log();
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::thread opens([&] {
    std::this_thread::sleep_for(50ms);
    other.kill();
  });
  set_value(exec, nodes[0], 999);  // waits
  opens.join();
  EXPECT_EQ(ran(), numbers(1, 40));
}

// ---- child graphs

TEST_F(Sliced, ChildGraphsAreCutInside) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph inner = new_graph();
  chain(inner, 100, 10);
  CUgraph middle = new_graph();
  CUgraphNode last = chain(middle, 200, 5).back();
  last = child(middle, inner, {last});
  kernel(middle, 205, {last});
  CUgraph graph = new_graph();
  last = chain(graph, 1, 3).back();
  last = child(graph, middle, {last});
  last = child(graph, new_graph(), {last});  // an empty one
  last = child(graph, inner, {last});
  kernel(graph, 4, {last});
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  EXPECT_GE(slices().counts().slices, 5U);
  std::vector<std::uint64_t> one = numbers(1, 3);
  const auto add = [&](std::uint64_t first, std::uint64_t count) {
    for (const std::uint64_t each : numbers(first, count)) one.push_back(each);
  };
  add(200, 5);
  add(100, 10);
  add(205, 1);
  add(100, 10);
  add(4, 1);
  std::vector<std::uint64_t> wanted;
  const std::uint64_t before = state().sliced_launches;
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    wanted.insert(wanted.end(), one.begin(), one.end());
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before, 5U);
}

TEST_F(Changed, AChildGraphIsChangedWhileTheGateIsClosed) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph inner = new_graph();
  chain(inner, 100, 10);
  CUgraph graph = new_graph();
  CUgraphNode const first = chain(graph, 1, 3).back();
  CUgraphNode const node = child(graph, inner, {first});
  kernel(graph, 4, {node});
  CUgraphExec exec = instantiate(graph);
  set_child(exec, node, 110);  // before there are slices
  prove(exec, [&] { set_child(exec, node, 120); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 0; i < 5; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      for (const std::uint64_t each : numbers(1, 3)) wanted.push_back(each);
      for (const std::uint64_t each : numbers(i == 0 ? 120 : 1'000 * i, 10)) wanted.push_back(each);
      wanted.push_back(4);
      set_child(exec, node, 1'000 * (i + 1));
    }
    EXPECT_EQ(state().slice_launches, before.slice_launches);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 5U);
}

std::atomic<std::uint64_t> updates{0};
decltype(driver::Driver::cuGraphExecUpdate) update_graph = nullptr;
CUresult count_updates(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* result) {
  updates.fetch_add(1);
  return update_graph(exec, graph, result);
}

// XLA changes dozens of child graphs before each launch: a slice is told of all that it has once, when it is launched.
TEST_F(Changed, ChildGraphsThatAreChangedTogetherRefreshASliceOnce) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  std::vector<CUgraphNode> children;
  CUgraphNode last = chain(graph, 1, 3).back();
  for (std::uint64_t i = 0; i < 3; ++i) {
    CUgraph inner = new_graph();
    chain(inner, 100 * (i + 1), 4);
    last = child(graph, inner, {last});
    children.push_back(last);
  }
  CUgraphExec exec = instantiate(graph);
  const auto set_children = [&](std::uint64_t value) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      set_child(exec, children[i], value + 100 * (i + 1), 4);
    }
  };
  prove(exec, [&] { set_children(0); });
  const auto* const sliced = static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
  ASSERT_NE(sliced, nullptr);
  const auto& pieces = sliced->pieces->pieces;
  const auto with_inner = std::count_if(pieces.begin(), pieces.end(), [](const auto& each) { return each.has_inner; });
  updates = 0;
  update_graph = driver::table().cuGraphExecUpdate;
  const Replaced noted(driver::table().cuGraphExecUpdate, &count_updates);
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    for (std::uint64_t round = 1; round <= 5; ++round) set_children(1'000 * round);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  std::vector<std::uint64_t> wanted;
  for (const std::uint64_t value : {0, 5'000}) {
    for (const std::uint64_t each : numbers(1, 3)) wanted.push_back(each);
    for (std::uint64_t i = 0; i < 3; ++i) {
      for (const std::uint64_t each : numbers(value + 100 * (i + 1), 4)) wanted.push_back(each);
    }
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_GE(updates, 1U);
  EXPECT_LE(updates, static_cast<std::uint64_t>(with_inner));
}

// Clones that were made, those of them that are alive, and graphs of ours that the launcher thread destroyed.
struct Clones {
  decltype(driver::Driver::cuGraphClone) clone = nullptr;
  decltype(driver::Driver::cuGraphDestroy) destroy = nullptr;
  std::atomic<std::uint64_t> made{0};
  std::atomic<std::uint64_t> destroyed_by_launcher{0};
  std::mutex mutex;
  std::set<CUgraph> alive;
};
Clones clones;
CUresult note_clone(CUgraph* made, CUgraph of) {
  const CUresult result = clones.clone(made, of);
  clones.made.fetch_add(1);
  const std::scoped_lock lock(clones.mutex);
  if (result == CUDA_SUCCESS) clones.alive.insert(*made);
  return result;
}
CUresult note_destroy(CUgraph graph) {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::string_view(name) == "cudasched-queue") clones.destroyed_by_launcher.fetch_add(1);
  {
    const std::scoped_lock lock(clones.mutex);
    clones.alive.erase(graph);
  }
  return clones.destroy(graph);
}
auto note_clones() {
  struct Noted {
    Replaced<decltype(Clones::clone), decltype(note_clone)> clone{driver::table().cuGraphClone, &note_clone};
    Replaced<decltype(Clones::destroy), decltype(note_destroy)> destroy{driver::table().cuGraphDestroy, &note_destroy};
  };
  clones.made = clones.destroyed_by_launcher = 0;
  clones.alive.clear();
  clones.clone = driver::table().cuGraphClone;
  clones.destroy = driver::table().cuGraphDestroy;
  return Noted{};
}
std::size_t clones_alive() {
  const std::scoped_lock lock(clones.mutex);
  return clones.alive.size();
}

// Driver 580 keeps something beside a graph that is cloned: a clone that the launcher thread destroyed crashed there.
TEST_F(Changed, ClonesAreDestroyedByTheProgramsThreadAndThoseOfChildGraphsAreUsedAgain) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph inner = new_graph();
  chain(inner, 100, 10);
  CUgraph graph = new_graph();
  CUgraphNode const node = child(graph, inner, {chain(graph, 1, 3).back()});
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_child(exec, node, 120); });
  const auto noted = note_clones();
  std::uint64_t value = 120;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::uint64_t> wanted;
    {
      OtherClient other(/*active=*/true);
      for (int i = 0; i < 5; ++i) {
        ASSERT_EQ(launch(exec), CUDA_SUCCESS);
        for (const std::uint64_t each : numbers(1, 3)) wanted.push_back(each);
        for (const std::uint64_t each : numbers(value, 10)) wanted.push_back(each);
        set_child(exec, node, value += 1'000);
      }
    }
    EXPECT_EQ(ran(), wanted);
    clear_log();
  }
  EXPECT_GE(clones.made, 1U);
  EXPECT_LE(clones.made, 6U);  // as many as were queued at once
  EXPECT_EQ(clones.destroyed_by_launcher, 0U);
  Program::check(call<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy")(exec));
  EXPECT_EQ(clones.destroyed_by_launcher, 0U);
  EXPECT_EQ(clones_alive(), 0U);
}

// Of updates each has a clone of its own, of another graph.
TEST_F(Changed, ClonesOfUpdatesAreDestroyedByTheProgramsThread) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  const auto update_to = [&](std::uint64_t value) {
    CUgraph changed = new_graph();
    chain(changed, value, 40);
    Program::check(update(exec, changed));
  };
  prove(exec, [&] { update_to(1); });
  const auto noted = note_clones();
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 1; i <= 5; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      update_to(1'000 * i);
    }
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  for (std::uint64_t i = 1; i <= 5; ++i) {
    for (const std::uint64_t each : numbers(1'000 * i, 40)) wanted.push_back(each);
  }
  EXPECT_EQ(ran(), wanted);
  update_to(1);
  EXPECT_EQ(clones.made, 6U);
  EXPECT_LE(clones_alive(), 2U);
  EXPECT_EQ(clones.destroyed_by_launcher, 0U);
  Program::check(call<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy")(exec));
  EXPECT_EQ(clones_alive(), 0U);
}

// Changes that are not followed any more leave no copies of child graphs behind.
TEST_F(Changed, CopiesOfChildGraphsGoWhereNoneIsUsedAgain) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const auto outer_of = [&](std::uint64_t value, CUgraphNode& node) {
    CUgraph inner = new_graph();
    chain(inner, value, 10);
    CUgraph graph = new_graph();
    node = child(graph, inner, {chain(graph, 1, 3).back()});
    return graph;
  };
  CUgraphNode node = nullptr;
  CUgraphExec exec = instantiate(outer_of(100, node));
  const auto noted = note_clones();
  prove(exec, [&] { set_child(exec, node, 120); });
  set_child(exec, node, 140);
  const std::size_t with_copies = clones_alive();
  ASSERT_GE(clones.made, 1U);
  CUgraphNode of_another = nullptr;
  Program::check(update(exec, outer_of(160, of_another)));
  EXPECT_LE(clones_alive(), with_copies);  // one more of the whole graph, none of a child
  Program::check(call<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy")(exec));
  EXPECT_EQ(clones_alive(), 0U);
}

// A graph that is kept as a template: one thread instantiates it again while another one is done with an earlier one.
TEST_F(Changed, AGraphIsInstantiatedAgainWhileAnotherThreadDestroysAnEarlierOne) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  std::atomic<CUgraphExec> given{nullptr};
  std::atomic<bool> all{false};
  std::thread other([&] {
    while (true) {
      const bool last = all.load();
      if (CUgraphExec exec = given.exchange(nullptr); exec != nullptr) {
        Program::check(call<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy")(exec));
      } else if (last) {
        return;
      } else {
        std::this_thread::yield();
      }
    }
  });
  for (int i = 0; i < 300; ++i) {
    CUgraphExec exec = instantiate(graph);
    while (given.load() != nullptr) std::this_thread::yield();
    given.store(exec);
  }
  all.store(true);
  other.join();
  EXPECT_EQ(given.load(), nullptr);
}

// A slice gets a child graph's nodes by an update of its executable, which must not undo what that was told before.
TEST_F(Changed, ANodeKeepsItsChangeWhereAChildGraphInItsSliceIsChangedLater) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph inner = new_graph();
  chain(inner, 100, 10);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 3);
  CUgraphNode const node = child(graph, inner, {nodes.back()});
  CUgraphNode const last = kernel(graph, 4, {node});
  CUgraphExec exec = instantiate(graph);
  has_slices(exec);
  const State before = state();
  for (std::uint64_t round = 1; round <= 3; ++round) {
    ran();
    clear_log();
    std::vector<std::uint64_t> wanted;
    for (std::uint64_t i = 0; i < 3; ++i) {
      wanted.push_back(1'000 * round + i);
      set_value(exec, nodes[i], wanted.back());
    }
    set_value(exec, last, 1'000 * round + 500);
    set_child(exec, node, 1'000 * round + 100);
    for (const std::uint64_t each : numbers(1'000 * round + 100, 10)) wanted.push_back(each);
    wanted.push_back(1'000 * round + 500);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(ran(), wanted);
  }
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 3U);
}

// What slices have not been told may be that they are to have no kernel of that module any more.
TEST_F(Changed, SlicesAreToldOfWhatWaitsBeforeAModuleIsUnloaded) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUmodule module = nullptr;
  ASSERT_EQ(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(&module, kImage), CUDA_SUCCESS);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
  }
  ran();
  clear_log();
  const auto* const sliced = static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
  ASSERT_NE(sliced, nullptr);
  EXPECT_TRUE(eventually([&] { return sliced->may_await.load(); }));
  Program::check(call<CUresult(CUmodule)>("cuModuleUnload")(module));
  EXPECT_FALSE(sliced->may_await);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  wanted[5] = 100;
  EXPECT_EQ(ran(), wanted);
}

std::atomic<int> asked_to_submit{0};
bool note_that_it_asks() noexcept {
  asked_to_submit.fetch_add(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// One thread launches and changes, another one unloads a module: what is at the gate by then is waited for, and nothing
// that follows it is lost.
TEST_F(Changed, WhatUnloadsAModuleWaitsForALaunchThatIsAtTheGate) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  const auto* const sliced = static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
  ASSERT_NE(sliced, nullptr);
  std::vector<std::uint64_t> wanted;
  const auto launch_with = [&](std::uint64_t value) {
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    const std::vector<std::uint64_t> one = numbers(1, 40);
    wanted.insert(wanted.end(), one.begin(), one.end());
    wanted[wanted.size() - 35] = value;
  };
  {
    OtherClient other(/*active=*/true);
    launch_with(6);
    set_value(exec, nodes[5], 100);
  }
  EXPECT_TRUE(eventually([&] { return sliced->may_await.load(); }));
  std::optional<OtherClient> other(std::in_place, /*active=*/true);
  launch_with(100);
  EXPECT_TRUE(eventually([&] { return sliced->taken.load(); }));
  for (const std::uint64_t value : {101U, 102U}) {
    set_value(exec, nodes[5], value);
    launch_with(value);
  }
  asked_to_submit = 0;
  std::thread unloads([] { const runtime::Slices::Unloading unloading(slices(), &note_that_it_asks); });
  EXPECT_TRUE(eventually([] { return asked_to_submit >= 2; }));
  other.reset();
  unloads.join();
  EXPECT_EQ(ran(), wanted);
}

// Nothing else may be launched in its place while a change follows it; so no further change is to follow.
TEST_F(Changed, AfterAFirstSliceThatIsRefusedNoChangeFollowsUntilOneIsNot) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  ASSERT_TRUE(slices().follow(exec));
  // As the launcher thread does it.
  const auto launch_slices = [&](CUresult status) {
    const runtime::Slices::Launch begun = slices().begin(exec, nullptr, program_.context(), /*beside_latency=*/true);
    EXPECT_GT(begun.parts, 0U);
    EXPECT_EQ(slices().may_go_whole(begun), false);
    slices().end(begun, nullptr, program_.context(), status, /*refused=*/status != CUDA_SUCCESS);
  };
  launch_slices(CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(slices().follow(exec));
  launch_slices(CUDA_SUCCESS);
  EXPECT_TRUE(slices().follow(exec));
  slices().followed(exec);
  slices().followed(exec);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
}

TEST_F(Changed, AGraphWithChildGraphsIsUpdated) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const auto make = [&](std::uint64_t first) {
    CUgraph inner = new_graph();
    chain(inner, first + 3, 20);
    CUgraph graph = new_graph();
    CUgraphNode const node = child(graph, inner, {chain(graph, first, 3).back()});
    kernel(graph, first + 23, {node});
    return graph;
  };
  CUgraphExec exec = instantiate(make(1));
  ASSERT_TRUE(has_slices(exec));
  const State before = state();
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t i = 1; i <= 5; ++i) {
    ASSERT_EQ(update(exec, make(100 * i)), CUDA_SUCCESS);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    for (const std::uint64_t each : numbers(100 * i, 24)) wanted.push_back(each);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 5U);
}

TEST_F(Sliced, AGraphLaunchInSlicesCountsAsOne) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  const std::uint64_t before = runtime::hot().counters.total(&telemetry::Shard::graph_launches);
  for (int i = 0; i < 7; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran().size(), 7U * 40U);
  EXPECT_EQ(runtime::hot().counters.total(&telemetry::Shard::graph_launches) - before, 7U);
}

// A collective (by its name) between two chains, and a third chain beside it that nothing orders to it: the peer that
// it waits for may wait for any of that one. What the piece that holds it has, it runs with.
TEST_F(Sliced, ACollectiveSharesItsSliceWithAllThatIsNotOrderedToIt) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUmodule module = nullptr;
  Program::check(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(
      &module,
      "cudasched-sim 1\nkernel ncclDevKernel_AllReduce params=8,8,8 block_us=20 blocks_per_sm=4 effect=append\n"));
  CUfunction collective = nullptr;
  Program::check(call<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction")(&collective, module,
                                                                                           "ncclDevKernel_AllReduce"));
  CUgraph graph = new_graph();
  CUgraphNode const before = chain(graph, 1, 40).back();
  Parameters parameters(program_, 500);
  parameters.node.func = collective;
  CUgraphNode node = nullptr;
  Program::check(
      call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&node, graph, &before, 1, &parameters.node));
  CUgraphNode beside = before;
  for (std::uint64_t i = 0; i < 10; ++i) beside = kernel(graph, 600 + i, {beside});
  CUgraphNode last = kernel(graph, 41, {node, beside});
  for (std::uint64_t i = 42; i <= 80; ++i) last = kernel(graph, i, {last});
  built.instantiate = driver::table().cuGraphInstantiateWithFlags;
  const Replaced noted(driver::table().cuGraphInstantiateWithFlags, &note_all_built);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  const auto holds = [](const std::vector<std::uint64_t>& slice, std::uint64_t value) {
    return std::find(slice.begin(), slice.end(), value) != slice.end();
  };
  std::size_t with_collective = 0;
  for (const std::vector<std::uint64_t>& slice : built.slices) {
    if (!holds(slice, 500)) continue;
    ++with_collective;
    for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(holds(slice, 600 + i)) << i;
  }
  EXPECT_EQ(with_collective, 1U);
  EXPECT_GE(built.slices.size(), 5U);
  const std::uint64_t sliced = state().sliced_launches;
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  const std::vector<std::uint64_t> all = ran();
  EXPECT_EQ(state().sliced_launches, sliced + 1);
  ASSERT_EQ(all.size(), 91U);
  EXPECT_TRUE(std::equal(all.begin(), all.begin() + 40, numbers(1, 40).begin()));
  EXPECT_TRUE(std::equal(all.begin() + 51, all.end(), numbers(41, 40).begin()));
}

// ---- what may go wrong

// Lets three launches go, and the others when it is told to.
struct Three {
  std::atomic<int> submitted{0};
  std::atomic<bool> holds{true};
};
schedule::Decision let_three_go(const schedule::Snapshot& seen, void* context) noexcept {
  Three& three = *static_cast<Three*>(context);
  if (three.holds && seen.latency_active && three.submitted >= 3) return {schedule::Answer::kWaitForLatency, 0};
  ++three.submitted;
  return {schedule::Answer::kSubmit, 0};
}

TEST_F(Sliced, IsDestroyedWhenHalfOfItIsSubmitted) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  OtherClient other(/*active=*/true);
  Three three;
  runtime::engine().use_policy({&let_three_go, &three});
  const State before = state();
  ASSERT_GT(before.graph_slices, 4U);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ASSERT_TRUE(eventually([&] { return state().slice_launches == before.slice_launches + 3; }));
  destroy(graph);
  std::atomic<std::uint64_t> submitted{0};
  std::thread opens([&] {
    std::this_thread::sleep_for(50ms);
    submitted = state().slice_launches;
    three.holds = false;
    other.kill();
  });
  destroy(exec);  // waits
  EXPECT_EQ(submitted, before.slice_launches + 3);
  EXPECT_EQ(state().slice_launches, before.slice_launches + before.graph_slices);
  opens.join();
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_EQ(slices().counts().graphs_sliced, 0U);
  EXPECT_EQ(slices().counts().bytes, 0U);
  runtime::engine().configure("policy", "strict");
}

// The simulated device is nearly full: neither all slices nor a little to spare fit.
TEST_F(Sliced, WhereThereIsNoMemoryToBuildWithAGraphGoesWhole) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  ASSERT_EQ(call<CUresult(std::size_t*, std::size_t*)>("cuMemGetInfo_v2")(&free_bytes, &all_bytes), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  ASSERT_EQ(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, free_bytes - (1U << 20)), CUDA_SUCCESS);
  const std::uint64_t before = whole(WholeReason::kNoMemory);
  EXPECT_TRUE(eventually([&] {
    Program::check(launch(exec));
    Program::check(program_.synchronize());
    clear_log();
    return whole(WholeReason::kNoMemory) == before + 1;
  }));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_EQ(slices().counts().bytes, 0U);
  ASSERT_EQ(call<CUresult(CUdeviceptr)>("cuMemFree_v2")(memory), CUDA_SUCCESS);
}

// As of a driver that lets nobody change a child graph.
decltype(cuGraphDestroyNode)* destroy_node = nullptr;
CUresult destroy_none_inside(CUgraphNode node) {
  CUDA_KERNEL_NODE_PARAMS parameters{};
  if (driver::table().cuGraphKernelNodeGetParams(node, &parameters) == CUDA_SUCCESS &&
      *static_cast<std::uint64_t*>(parameters.kernelParams[2]) >= 1'000) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return destroy_node(node);
}

TEST_F(Sliced, ChildGraphsStayWholeWhereTheDriverDestroysNoNodeInside) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  destroy_node = std::exchange(driver::table().cuGraphDestroyNode, &destroy_none_inside);
  CUgraph inner = new_graph();
  chain(inner, 1'000, 20);
  CUgraph graph = new_graph();
  CUgraphNode const node = child(graph, inner, {chain(graph, 1, 20).back()});
  CUgraphNode last = node;
  for (std::uint64_t i = 21; i <= 40; ++i) last = kernel(graph, i, {last});
  CUgraphExec exec = instantiate(graph);
  EXPECT_TRUE(has_slices(exec));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 20);
  for (const std::uint64_t each : numbers(1'000, 20)) wanted.push_back(each);
  for (const std::uint64_t each : numbers(21, 20)) wanted.push_back(each);
  EXPECT_EQ(ran(), wanted);
  // Changed as a whole then.
  CUgraph changed = new_graph();
  chain(changed, 2'000, 20);
  ASSERT_EQ(
      call<decltype(cuGraphExecChildGraphNodeSetParams)>("cuGraphExecChildGraphNodeSetParams")(exec, node, changed),
      CUDA_SUCCESS);
  clear_log();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran()[20], 2'000U);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
  driver::table().cuGraphDestroyNode = destroy_node;
}

}  // namespace
}  // namespace cudasched::test
