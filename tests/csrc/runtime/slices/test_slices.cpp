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

class Sliced : public GraphProgram {
 protected:
  const InRegion region_{CUDASCHED_BEST_EFFORT};
};

TEST_F(Sliced, AChainRunsInOrderHoweverOftenItIsLaunched) {
  CUgraph graph = chain_graph(1, 40);
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
  CUgraphExec exec = new_chain().exec;
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

TEST_F(GraphProgram, TheGateClosesBetweenTwoSlices) {
  {
    const InRegion request(CUDASCHED_LATENCY);  // makes the client known
    ASSERT_EQ(program_.launch(9'999), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    CUgraph graph = chain_graph(1, 2'000);
    CUgraphExec exec = instantiate(graph);
    ASSERT_TRUE(has_slices(exec));
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  ASSERT_TRUE(eventually([&] { return program_.ran() > 0; }));
  {
    const InRegion request(CUDASCHED_LATENCY);
    ASSERT_TRUE(eventually(someone_waits));
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
  CUfunction slow = load("kernel slow params=8,8,8 block_us=400 blocks_per_sm=4 effect=append", "slow");
  CUgraphExec exec = instantiate(chain_graph(1, 20, slow));
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
  CUgraphExec exec = new_chain().exec;
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

TEST_F(GraphProgram, ADirectLaunchElsewhereComesBehindTheSlices) {
  CUgraph graph = chain_graph(1, 100);
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
  for (int round = 0; round < 5; ++round) {
    CUgraphExec exec = new_chain().exec;
    ASSERT_TRUE(has_slices(exec));
    for (int i = 0; i < 3; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    destroy(exec);
    EXPECT_EQ(ran(), numbers(1, 40, 3));
    EXPECT_EQ(slices().counts().graphs_sliced, 0U);
    EXPECT_EQ(slices().counts().bytes, 0U);
    clear_log();
  }
}

TEST_F(Sliced, AnUpdatedGraphRunsAsItIsNowAndKeepsItsSlices) {
  CUgraphExec exec = new_chain().exec;
  ASSERT_TRUE(has_slices(exec));
  const State before = state();
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t i = 0; i < 20; ++i) {  // at each launch
    CUgraph changed = chain_graph(100 * i, 40);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_EQ(update(exec, changed), CUDA_SUCCESS);
    destroy(changed);
    append(wanted, numbers(i == 0 ? 1 : 100 * (i - 1), 40));
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 20U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// From its first launch on, before there can be slices.
TEST_F(Sliced, AGraphThatIsUpdatedAtEachLaunchGetsSlices) {
  CUgraph graphs[] = {chain_graph(1, 40), chain_graph(101, 40)};
  CUgraphExec exec = instantiate(graphs[0]);
  const std::uint64_t before = state().sliced_launches;
  for (std::uint64_t turn = 1; turn < 3'000 && state().sliced_launches < before + 20; ++turn) {
    ASSERT_EQ(update(exec, graphs[turn % 2]), CUDA_SUCCESS);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_EQ(take_log(), numbers(turn % 2 == 0 ? 1 : 101, 40));
  }
  EXPECT_GE(state().sliced_launches, before + 20);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
}

// Which node of its graph another graph's nodes were paired with is not known: a change of one means no more slices.
TEST_F(Sliced, ANodeThatChangesAfterAnUpdateRunsAsItIsNow) {
  CUgraph other = chain_graph(101, 40);
  const auto [nodes, exec] = new_chain();
  ASSERT_TRUE(has_slices(exec));
  ASSERT_EQ(update(exec, other), CUDA_SUCCESS);
  set_value(exec, nodes[5], 999);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(101, 40);
  wanted[5] = 999;
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(slices().counts().graphs_sliced, 0U);
  EXPECT_EQ(whole(WholeReason::kUpdated), 1U);
}

TEST_F(Sliced, ANodeThatChangesRunsAsItIsNowInItsSlice) {
  const auto [nodes, exec] = new_chain();
  ASSERT_TRUE(has_slices(exec));
  const State before = state();
  std::vector<std::uint64_t> now = numbers(1, 40);
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t i = 0; i < 60; ++i) {
    const auto place = static_cast<std::size_t>(i * 7 % 40);
    now[place] = 1'000 + i;
    if (i % 3 == 0) {
      const Parameters parameters(program_, now[place]);
      CUgraphNodeParams any = parameters.of_any_node();
      ASSERT_EQ(call<decltype(cuGraphExecNodeSetParams)>("cuGraphExecNodeSetParams")(exec, nodes[place], &any),
                CUDA_SUCCESS);
    } else {
      set_value(exec, nodes[place], now[place]);
    }
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    append(wanted, now);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 60U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

TEST_F(Sliced, ANodeThatChangedBeforeTheSlicesWereBuiltIsInThem) {
  const auto [nodes, exec] = new_chain();
  std::vector<std::uint64_t> now = numbers(1, 40);
  // While they are being built, at whatever moment.
  std::uint64_t changes = 0;
  ASSERT_TRUE(eventually([&] {
    const auto place = static_cast<std::size_t>(changes * 11 % 40);
    now[place] = 1'000 + changes++;
    set_value(exec, nodes[place], now[place]);
    Program::check(launch(exec));
    Program::check(program_.synchronize());
    const bool is_right = std::equal(now.begin(), now.end(), program_.log() + 1);
    clear_log();
    EXPECT_TRUE(is_right);
    return !is_right || slices().counts().graphs_sliced == 1;
  }));
  for (int i = 0; i < 5; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted;
  for (int i = 0; i < 5; ++i) append(wanted, now);
  EXPECT_EQ(ran(), wanted);
}

TEST_F(Sliced, ANodeThatIsDisabledDoesNotRunInItsSlice) {
  const auto [nodes, exec] = new_chain();
  enable(exec, nodes[3], false);  // before there are slices
  ASSERT_TRUE(has_slices(exec));
  enable(exec, nodes[30], false);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  std::erase_if(wanted, [](std::uint64_t each) { return each == 4 || each == 31; });
  EXPECT_EQ(ran(), wanted);
  enable(exec, nodes[3], true);
  enable(exec, nodes[30], true);
  clear_log();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
}

// Fills, copies and host functions.
TEST_F(Sliced, OtherNodesThatChangeRunAsTheyAreNow) {
  CUgraph graph = new_graph();
  CUcontext const context = program_.context();
  CUdeviceptr memory = 0;
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, 64));
  void* host = nullptr;
  Program::check(call<CUresult(void**, std::size_t)>("cuMemAllocHost_v2")(&host, 64));
  auto* const words = static_cast<std::uint32_t*>(host);
  std::vector<CUgraphNode> nodes = chain(graph, 1, 20);
  CUDA_MEMSET_NODE_PARAMS fill = fill_of(memory);
  fill.value = 7;
  CUgraphNode const fill_node = add(graph, fill, nodes.back());
  CUDA_MEMCPY3D copy = copy_of(memory);
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = words;
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
  CUgraphExec exec = new_chain().exec;
  ASSERT_TRUE(has_slices(exec));
  ASSERT_NE(update(exec, chain_graph(101, 41)), CUDA_SUCCESS);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40));
}

TEST_F(Sliced, GraphsStayWholeForAReason) {
  configure(When::kAlways, 1'000'000);
  for (const std::uint64_t kernels : {0, 1, 2}) {
    CUgraphExec exec = instantiate(chain_graph(1, kernels));
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
    CUgraph graph = new_graph();
    CUfunction quiet = load("kernel quiet params=8 block_us=1 blocks_per_sm=4", "quiet");
    kernel(graph, 1, {chain(graph, 0, kNodes, quiet).back()});  // the end
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

  CUgraphExec exec_ = nullptr;
};

TEST_F(Huge, OneThatTakesTooLongToCutGoesWhole) {
  slices().configure({.when = When::kAlways, .most_build_ns = kNsPerMs});
  expect_whole(WholeReason::kTooSlow);
}

TEST_F(Huge, OneWhoseSlicesWouldTakeTooMuchMemoryGoesWhole) {
  configure(When::kAlways, runtime::SliceSettings{}.slice_ns, /*most_bytes=*/10'000'000);
  expect_whole(WholeReason::kOverBudget);
}

// Other graphs' slices had the memory; they may be gone since.
TEST_F(Sliced, AGraphThatWentOverTheBudgetIsTriedAgainWhenItHasBeenLaunchedAsOftenAgain) {
  configure(When::kAlways, 30'000, /*most_bytes=*/1);
  CUgraphExec exec = new_chain().exec;
  std::size_t launches = 0;
  const auto launch_again = [&] {
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(take_log(), numbers(1, 40));
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
  slices().configure({.when = When::kAlways, .slice_ns = 5 * kNsPerMs, .most_build_ns = 200 * kNsPerSecond});
  for (int i = 0; i < 2; ++i) ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(take_log().size(), 2U);
  ASSERT_TRUE(eventually([&] { return slices().counts().graphs_sliced == 1; }));
  EXPECT_GT(slices().counts().slices, 10U);
  ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 1));
  EXPECT_EQ(state().sliced_launches, 1U);
}

TEST_F(Sliced, NothingIsClonedWhereItIsOff) {
  configure(When::kOff);
  CUgraphExec exec = new_chain().exec;
  EXPECT_EQ(driver::registry().slices(exec), nullptr);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 5));
}

const runtime::Sliced* sliced_of(CUgraphExec exec) {
  return static_cast<const runtime::Sliced*>(driver::registry().slices(exec));
}
runtime::Sliced::State state_of(CUgraphExec exec) { return sliced_of(exec)->state.load(); }

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
  CUgraphExec const execs[] = {new_chain(1).exec, new_chain(101).exec};
  CUmodule module = Program::load(kImage);
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
  CUgraphExec exec = new_chain().exec;
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
  CUgraphExec exec = new_chain().exec;
  Program::check(program_.launch(0));
  const State before = state();
  const runtime::Sliced* sliced = nullptr;
  {
    const AtTheFirstStep step(slices(), exec, program_.stream());
    sliced = sliced_of(exec);
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
    CUgraphExec exec = new_chain().exec;
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

// The values of the kernels of slices, in the order in which the slices are made.
struct Built {
  std::mutex mutex;
  std::vector<std::vector<std::uint64_t>> slices;
  decltype(cuGraphInstantiateWithFlags)* instantiate = nullptr;
} built;
CUresult note_built(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
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
  if (count < 91) built.slices.push_back(std::move(values));  // a whole graph is instantiated, too
  return built.instantiate(exec, graph, flags);
}
// From here on, until what it returns is gone.
auto note_slices() {
  built.slices.clear();
  built.instantiate = driver::table().cuGraphInstantiateWithFlags;
  return Replaced(driver::table().cuGraphInstantiateWithFlags, &note_built);
}

TEST_F(Sliced, TheGraphThatIsLaunchedMostIsBuiltFirst) {
  const std::vector<int> launches{2, 3, 9, 5, 4};
  std::vector<CUgraphExec> execs;
  for (const std::uint64_t first : {0, 100, 200, 300, 400}) execs.push_back(new_chain(first).exec);
  const auto noted = note_slices();
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
  for (const std::vector<std::uint64_t>& slice : built.slices) {
    const std::uint64_t graph = slice.front() / 100;
    if (order.empty() || order.back() != graph) order.push_back(graph);
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{0, 2, 3, 4, 1}));
}

TEST_F(Sliced, SlicesMayBeBuiltBeforeALatencyClientIsThere) {
  configure(When::kAhead);
  CUgraphExec exec = new_chain().exec;
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
  configure_looks(10, /*look_ns=*/3'600 * kNsPerSecond);
  const auto is_built = [&](CUgraphExec exec) {
    return eventually([&] {
      Program::check(launch(exec));
      take_log();
      return state_of(exec) == runtime::Sliced::State::kReady;
    });
  };
  CUgraphExec const execs[] = {new_chain(1).exec, new_chain(101).exec};
  ASSERT_TRUE(is_built(execs[0]));
  const State before = state();
  ASSERT_TRUE(is_built(execs[1]));
  for (int builds = 0; builds < 40 && state_of(execs[0]) != runtime::Sliced::State::kIdle; ++builds) {
    ASSERT_EQ(launch(execs[1]), CUDA_SUCCESS);
    ASSERT_TRUE(is_built(new_chain(201).exec));
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
  configure_looks(2, /*look_ns=*/20 * kNsPerMs);
  CUgraphExec exec = new_chain().exec;
  ASSERT_TRUE(has_slices(exec));
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ASSERT_TRUE(eventually(someone_waits));
  const State before = state();
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
  other.kill();
  EXPECT_EQ(ran(), numbers(1, 40));
}

// ---- changes of graphs whose launches are queued

class Changed : public Sliced {
 protected:
  // Slices have followed such a change before, directly.
  template <typename Change>
  void prove(CUgraphExec exec, Change&& change) {
    ASSERT_TRUE(has_slices(exec));
    change();
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    take_log();
  }
  void update_to(CUgraphExec exec, std::uint64_t first) { Program::check(update(exec, chain_graph(first, 40))); }
};

TEST_F(Changed, ANodeIsSetWhileTheGateIsClosed) {
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 0; i < 20; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      set_value(exec, nodes[5], 1'000 + i);  // comes back, although a launch of it waits
      append(wanted, numbers(1, 40));
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
  const auto [nodes, exec] = new_chain();
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
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[35], 36); });
  const auto noted = note_uploads();
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[35], 100);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40, 2);
  wanted[75] = 100;
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(uploads.made, 1U);
  EXPECT_NE(uploads.stream, program_.stream());
  EXPECT_NE(uploads.stream, nullptr);
}

TEST_F(Changed, NothingIsUploadedWhileTheGateIsClosed) {
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[0], 1); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[0], 100);
  }
  EXPECT_EQ(take_log(), numbers(1, 40));
  const auto* const sliced = sliced_of(exec);
  ASSERT_NE(sliced, nullptr);
  EXPECT_TRUE(eventually([&] { return sliced->may_await.load(); }));
  const auto noted = note_uploads();
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    ASSERT_TRUE(eventually(someone_waits));
    EXPECT_EQ(uploads.made, 0U);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  wanted[0] = 100;
  EXPECT_EQ(ran(), wanted);
}

TEST_F(Changed, AGraphIsUpdatedWhileTheGateIsClosed) {
  CUgraphExec exec = new_chain().exec;
  prove(exec, [&] { update_to(exec, 1); });
  const State before = state();
  std::vector<std::uint64_t> wanted;
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 0; i < 10; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      update_to(exec, 100 * (i + 1));
      append(wanted, numbers(i == 0 ? 1 : 100 * i, 40));
    }
    EXPECT_NE(update(exec, chain_graph(1, 41)), CUDA_SUCCESS);  // refused: nothing has changed
    EXPECT_EQ(state().slice_launches, before.slice_launches);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 10U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// Slices are told of a change when they are launched next: of several changes in the order in which they were made,
// whatever their kind.
TEST_F(Changed, ChangesOfAllKindsReachTheSlicesInTheirOrder) {
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] {
    for (const int i : {5, 6, 30}) set_value(exec, nodes[i], static_cast<std::uint64_t>(i) + 1);
    enable(exec, nodes[20], true);
  });
  const State before = state();
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
    set_value(exec, nodes[6], 101);
    set_value(exec, nodes[30], 102);
    enable(exec, nodes[20], false);
    set_value(exec, nodes[5], 103);  // not launched in between
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    enable(exec, nodes[20], true);
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
  append(wanted, without);
  append(wanted, changed);
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 3U);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// vLLM's pieces are short: a program that updates them would else wait before each launch for all that is queued.
TEST_F(Changed, AGraphThatGoesWholeIsDeferredBehindAChangeToo) {
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 1);
  CUgraph other = chain_graph(11, 1);
  CUgraphExec exec = instantiate(graph);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  take_log();
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
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
  }
  EXPECT_EQ(take_log(), numbers(1, 40));  // and the change is made, but for the slice
  set_value(exec, nodes[7], 101);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  wanted[5] = 100;
  wanted[7] = 101;
  EXPECT_EQ(ran(), wanted);
}

// Nor does it wait for what else is queued.
TEST_F(Changed, ANodeIsSwitchedOffWhileTheGateIsClosed) {
  const auto [nodes, exec] = new_chain();
  CUgraph other_graph = new_graph();
  const std::vector<CUgraphNode> other_nodes = chain(other_graph, 101, 2);
  CUgraphExec other_exec = instantiate(other_graph);
  prove(exec, [&] {
    enable(exec, nodes[3], false);
    enable(exec, nodes[3], true);
  });
  ASSERT_EQ(launch(other_exec, program_.stream()), CUDA_SUCCESS);
  take_log();
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
  CUgraph graph = chain_graph(1, 40);
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
  CUgraph allocates = new_graph();
  CUDA_MEM_ALLOC_NODE_PARAMS memory{};
  memory.bytesize = 4096;
  CUgraphNode node = nullptr;
  ASSERT_EQ(call<decltype(cuGraphAddMemAllocNode)>("cuGraphAddMemAllocNode")(&node, allocates, nullptr, 0, &memory),
            CUDA_SUCCESS);
  instantiate(allocates);
  CUgraphExec exec = new_chain().exec;
  prove(exec, [&] {});
  const State before = state();
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::jthread opens = kill_later(other, 50ms);
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
// The graph gets the user object, and is its only owner.
void give(CUgraph graph, Freed& freed) {
  CUuserObject object = nullptr;
  Program::check(call<decltype(cuUserObjectCreate)>("cuUserObjectCreate")(&object, &freed, note_freed, 1,
                                                                          CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  Program::check(
      call<decltype(cuGraphRetainUserObject)>("cuGraphRetainUserObject")(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
}

// The driver keeps the objects of a graph that an executable was updated to for launches that it has seen. It has seen
// none of those that go in slices.
TEST_F(Changed, UserObjectsOfUpdatesOutliveTheLaunchesThatAreQueued) {
  CUgraphExec exec = new_chain().exec;
  const auto update_to = [&](CUgraph changed) {
    Program::check(update(exec, changed));
    destroy(changed);
  };
  prove(exec, [&] { update_to(chain_graph(1, 40)); });
  Freed freed{&program_};
  {
    OtherClient other(/*active=*/true);
    std::jthread opens = kill_later(other, 100ms);
    CUgraph holding = chain_graph(101, 40);
    give(holding, freed);
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);  // in slices, as it was
    update_to(holding);
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    update_to(chain_graph(201, 40));
    EXPECT_EQ(launch(exec), CUDA_SUCCESS);
    opens.join();
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  for (const std::uint64_t first : {101, 201}) append(wanted, numbers(first, 40));
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(freed.count, 1);
  EXPECT_GE(freed.ran, 80U);
}

// The program has given everything away when the slices run.
TEST_F(Changed, AUserObjectOfTheGraphOutlivesItsSlices) {
  CUgraph graph = chain_graph(1, 40);
  Freed freed{&program_};
  give(graph, freed);
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  take_log();
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
  const auto [nodes, exec] = new_chain();
  const auto set_first = [&](std::uint64_t value) {
    const Parameters now(program_, value);
    const CUDA_KERNEL_NODE_PARAMS_v1 parameters = now.first_version();
    Program::check(call<CUresult(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1*)>(
        "cuGraphExecKernelNodeSetParams")(exec, nodes[5], &parameters));
  };
  const auto update_first = [&](std::uint64_t first) {
    CUgraph changed = chain_graph(first, 40);
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
      append(wanted, one);
      set_first(501 + i);
    }
  });
  ran();
  update_first(101);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  append(wanted, numbers(101, 40));
  ran();
  hold([&] {
    for (std::uint64_t i = 1; i <= 3; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      append(wanted, numbers(100 * i + 1, 40));
      update_first(100 * i + 101);
    }
  });
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches, before.sliced_launches + 7);
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
}

// Each line of the table of entry points that is deferred and changes a graph has its call here, which changes nothing.
TEST_F(Changed, WhicheverFunctionIsDeferredComesBackWhileTheGateIsClosed) {
  CUcontext const context = program_.context();
  CUdeviceptr memory = 0;
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, 64));
  CUgraph inner = chain_graph(100, 10);
  CUgraph graph = new_graph();
  CUgraphNode const kernel_node = chain(graph, 1, 20).back();
  const Parameters kernel_params(program_, 20);
  const CUDA_KERNEL_NODE_PARAMS& of_kernel = kernel_params.node;
  const CUDA_KERNEL_NODE_PARAMS_v1 of_kernel_v1 = kernel_params.first_version();
  CUgraphNodeParams of_any = kernel_params.of_any_node();
  const CUDA_MEMSET_NODE_PARAMS fill = fill_of(memory);
  CUgraphNode const fill_node = add(graph, fill, kernel_node);
  CUDA_MEMCPY3D copy = copy_of(memory);
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = memory + 16;
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
  CUgraphExec exec = instantiate(chain_graph(1, kKernels));
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
  EXPECT_EQ(take_log(), numbers(1, kKernels));

  configure(When::kOff);
  begin_request();
  asked.submitted = 0;
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_TRUE(eventually(someone_waits));
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
  const auto [nodes, exec] = new_chain();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  take_log();
  OtherClient other(/*active=*/true);
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::jthread opens = kill_later(other, 50ms);
  set_value(exec, nodes[0], 999);  // waits
  opens.join();
  EXPECT_EQ(ran(), numbers(1, 40));
}

// ---- child graphs

TEST_F(Sliced, ChildGraphsAreCutInside) {
  CUgraph inner = chain_graph(100, 10);
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
  append(one, numbers(200, 5));
  append(one, numbers(100, 10));
  one.push_back(205);
  append(one, numbers(100, 10));
  one.push_back(4);
  std::vector<std::uint64_t> wanted;
  const std::uint64_t before = state().sliced_launches;
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    append(wanted, one);
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before, 5U);
}

TEST_F(Changed, AChildGraphIsChangedWhileTheGateIsClosed) {
  CUgraph graph = new_graph();
  CUgraphNode const first = chain(graph, 1, 3).back();
  CUgraphNode const node = child(graph, chain_graph(100, 10), {first});
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
      append(wanted, numbers(1, 3));
      append(wanted, numbers(i == 0 ? 120 : 1'000 * i, 10));
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
  CUgraph graph = new_graph();
  std::vector<CUgraphNode> children;
  CUgraphNode last = chain(graph, 1, 3).back();
  for (std::uint64_t i = 0; i < 3; ++i) {
    last = child(graph, chain_graph(100 * (i + 1), 4), {last});
    children.push_back(last);
  }
  CUgraphExec exec = instantiate(graph);
  const auto set_children = [&](std::uint64_t value) {
    for (std::uint64_t i = 0; i < 3; ++i) set_child(exec, children[i], value + 100 * (i + 1), 4);
  };
  prove(exec, [&] { set_children(0); });
  const auto* const sliced = sliced_of(exec);
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
    append(wanted, numbers(1, 3));
    for (std::uint64_t i = 0; i < 3; ++i) append(wanted, numbers(value + 100 * (i + 1), 4));
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
  CUgraph graph = new_graph();
  CUgraphNode const node = child(graph, chain_graph(100, 10), {chain(graph, 1, 3).back()});
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
        append(wanted, numbers(1, 3));
        append(wanted, numbers(value, 10));
        set_child(exec, node, value += 1'000);
      }
    }
    EXPECT_EQ(take_log(), wanted);
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
  CUgraphExec exec = new_chain().exec;
  prove(exec, [&] { update_to(exec, 1); });
  const auto noted = note_clones();
  {
    OtherClient other(/*active=*/true);
    for (std::uint64_t i = 1; i <= 5; ++i) {
      ASSERT_EQ(launch(exec), CUDA_SUCCESS);
      update_to(exec, 1'000 * i);
    }
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  }
  std::vector<std::uint64_t> wanted = numbers(1, 40);
  for (std::uint64_t i = 1; i <= 5; ++i) append(wanted, numbers(1'000 * i, 40));
  EXPECT_EQ(ran(), wanted);
  update_to(exec, 1);
  EXPECT_EQ(clones.made, 6U);
  EXPECT_LE(clones_alive(), 2U);
  EXPECT_EQ(clones.destroyed_by_launcher, 0U);
  Program::check(call<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy")(exec));
  EXPECT_EQ(clones_alive(), 0U);
}

// Changes that are not followed any more leave no copies of child graphs behind.
TEST_F(Changed, CopiesOfChildGraphsGoWhereNoneIsUsedAgain) {
  const auto outer_of = [&](std::uint64_t value, CUgraphNode& node) {
    CUgraph graph = new_graph();
    node = child(graph, chain_graph(value, 10), {chain(graph, 1, 3).back()});
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
  CUgraph graph = chain_graph(1, 40);
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
  CUgraph graph = new_graph();
  const std::vector<CUgraphNode> nodes = chain(graph, 1, 3);
  CUgraphNode const node = child(graph, chain_graph(100, 10), {nodes.back()});
  CUgraphNode const last = kernel(graph, 4, {node});
  CUgraphExec exec = instantiate(graph);
  has_slices(exec);
  const State before = state();
  for (std::uint64_t round = 1; round <= 3; ++round) {
    take_log();
    std::vector<std::uint64_t> wanted;
    for (std::uint64_t i = 0; i < 3; ++i) {
      wanted.push_back(1'000 * round + i);
      set_value(exec, nodes[i], wanted.back());
    }
    set_value(exec, last, 1'000 * round + 500);
    set_child(exec, node, 1'000 * round + 100);
    append(wanted, numbers(1'000 * round + 100, 10));
    wanted.push_back(1'000 * round + 500);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    EXPECT_EQ(ran(), wanted);
  }
  EXPECT_EQ(state().graph_slices_dropped, before.graph_slices_dropped);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 3U);
}

// What slices have not been told may be that they are to have no kernel of that module any more.
TEST_F(Changed, SlicesAreToldOfWhatWaitsBeforeAModuleIsUnloaded) {
  CUmodule module = Program::load(kImage);
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  {
    OtherClient other(/*active=*/true);
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    set_value(exec, nodes[5], 100);
  }
  take_log();
  const auto* const sliced = sliced_of(exec);
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
  const auto [nodes, exec] = new_chain();
  prove(exec, [&] { set_value(exec, nodes[5], 6); });
  const auto* const sliced = sliced_of(exec);
  ASSERT_NE(sliced, nullptr);
  std::vector<std::uint64_t> wanted;
  const auto launch_with = [&](std::uint64_t value) {
    ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    append(wanted, numbers(1, 40));
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
  const auto [nodes, exec] = new_chain();
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
  const auto make = [&](std::uint64_t first) {
    CUgraph graph = new_graph();
    CUgraphNode const node = child(graph, chain_graph(first + 3, 20), {chain(graph, first, 3).back()});
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
    append(wanted, numbers(100 * i, 24));
  }
  EXPECT_EQ(ran(), wanted);
  EXPECT_EQ(state().sliced_launches - before.sliced_launches, 5U);
}

TEST_F(Sliced, AGraphLaunchInSlicesCountsAsOne) {
  CUgraphExec exec = new_chain().exec;
  ASSERT_TRUE(has_slices(exec));
  const std::uint64_t before = runtime::hot().counters.total(&telemetry::Shard::graph_launches);
  for (int i = 0; i < 7; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran().size(), 7U * 40U);
  EXPECT_EQ(runtime::hot().counters.total(&telemetry::Shard::graph_launches) - before, 7U);
}

// A collective (by its name) between two chains, and a third chain beside it that nothing orders to it: the peer that
// it waits for may wait for any of that one. What the piece that holds it has, it runs with.
TEST_F(Sliced, ACollectiveSharesItsSliceWithAllThatIsNotOrderedToIt) {
  CUfunction collective = load("kernel ncclDevKernel_AllReduce params=8,8,8 block_us=20 blocks_per_sm=4 effect=append",
                               "ncclDevKernel_AllReduce");
  CUgraph graph = new_graph();
  CUgraphNode const before = chain(graph, 1, 40).back();
  CUgraphNode const node = kernel(graph, 500, {before}, collective);
  CUgraphNode beside = before;
  for (std::uint64_t i = 0; i < 10; ++i) beside = kernel(graph, 600 + i, {beside});
  CUgraphNode last = kernel(graph, 41, {node, beside});
  for (std::uint64_t i = 42; i <= 80; ++i) last = kernel(graph, i, {last});
  const auto noted = note_slices();
  CUgraphExec exec = instantiate(graph);
  ASSERT_TRUE(has_slices(exec));
  const auto holds = [](const auto& slice, std::uint64_t value) { return std::ranges::count(slice, value) != 0; };
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
  CUgraph graph = chain_graph(1, 40);
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
  CUgraphExec exec = new_chain().exec;
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
  destroy_node = std::exchange(driver::table().cuGraphDestroyNode, &destroy_none_inside);
  CUgraph graph = new_graph();
  CUgraphNode const node = child(graph, chain_graph(1'000, 20), {chain(graph, 1, 20).back()});
  CUgraphNode last = node;
  for (std::uint64_t i = 21; i <= 40; ++i) last = kernel(graph, i, {last});
  CUgraphExec exec = instantiate(graph);
  EXPECT_TRUE(has_slices(exec));
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  std::vector<std::uint64_t> wanted = numbers(1, 20);
  append(wanted, numbers(1'000, 20));
  append(wanted, numbers(21, 20));
  EXPECT_EQ(ran(), wanted);
  // Changed as a whole then.
  set_child(exec, node, 2'000, 20);
  clear_log();
  ASSERT_EQ(launch(exec), CUDA_SUCCESS);
  EXPECT_EQ(ran()[20], 2'000U);
  EXPECT_EQ(slices().counts().graphs_sliced, 1U);
  driver::table().cuGraphDestroyNode = destroy_node;
}

}  // namespace
}  // namespace cudasched::test
