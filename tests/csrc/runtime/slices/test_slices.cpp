// Launches of graphs in slices, over the simulated driver: what the device runs is what the program launched, in its
// order, whatever the gate does between two slices.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "graph_program.hpp"

namespace cudasched::test {
namespace {

using graph::WholeReason;

std::uint64_t whole(WholeReason reason) {
  return runtime::engine().slices().counts().whole[static_cast<std::size_t>(reason)];
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
  const cudasched_state before = state();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 20));
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 20U);
  EXPECT_EQ(state().slice_launches - before.slice_launches, 20 * slices().counts().slices);
}

TEST_F(Sliced, OnlyBesideALatencyClient) {
  configure(When::kBesideLatency);
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

TEST_F(Sliced, WhatIsUpdatedRunsAsItIsNow) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  CUgraph changed = new_graph();
  chain(changed, 101, 40);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  CUgraphExecUpdateResultInfo info{};
  ASSERT_EQ(call<decltype(cuGraphExecUpdate)>("cuGraphExecUpdate_v2")(exec, changed, &info), CUDA_SUCCESS);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  for (const std::uint64_t each : numbers(101, 40)) wanted.push_back(each);
  EXPECT_EQ(ran(), wanted);
  // And is cut anew, after some launches.
  ASSERT_TRUE(has_slices(exec));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(101, 40));
}

TEST_F(Sliced, AnUpdateThatTheDriverRefusesChangesNothing) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  CUgraph other = new_graph();
  chain(other, 101, 41);
  CUgraphExecUpdateResultInfo info{};
  ASSERT_NE(call<decltype(cuGraphExecUpdate)>("cuGraphExecUpdate_v2")(exec, other, &info), CUDA_SUCCESS);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
}

TEST_F(Sliced, GraphsStayWholeForAReason) {
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
  EXPECT_EQ(whole(WholeReason::kOneNode), 2U);
  EXPECT_TRUE(eventually([&] {
    Program::check(launch(execs_.back()));
    return whole(WholeReason::kShort) == 1;
  }));
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

// The functions of a graph that is launched no more may be gone: nothing looks at them.
TEST_F(Sliced, NothingIsBuiltOfAGraphThatWasNotLaunchedSinceAModuleWasUnloaded) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  CUgraph graph = new_graph();
  chain(graph, 1, 40);
  CUgraphExec exec = instantiate(graph);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  CUmodule module = nullptr;
  ASSERT_EQ(call<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(&module, kImage), CUDA_SUCCESS);
  ASSERT_EQ(call<CUresult(CUmodule)>("cuModuleUnload")(module), CUDA_SUCCESS);
  ASSERT_TRUE(has_slices(exec));  // launched again
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
}

}  // namespace
}  // namespace cudasched::test
