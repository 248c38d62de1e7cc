// Graphs get the priority of their caller's class, and their users notice nothing of it; over the simulated driver.
// What priority an executable graph's nodes have shows in which updates the driver itself accepts: those of equal ones.
#include <gtest/gtest.h>

#include <vector>

#include "hooked_driver.hpp"

namespace cudasched::test {
namespace {

constexpr int kLowest = 0;
constexpr int kHighest = -5;

class NodePriority : public ::testing::Test {
 protected:
  NodePriority() {
    function_ = Program::find(Program::load("cudasched-sim 1\nkernel node params=4\n"), "node");
    graph_ = new_graph();
    kernel(graph_);
    kernel(graph_);
  }

  ~NodePriority() override {
    for (CUgraphExec exec : execs_) call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
    for (CUgraph graph : graphs_) call<CUresult(CUgraph)>("cuGraphDestroy")(graph);
  }

  CUgraph new_graph() {
    CUgraph graph = nullptr;
    Program::check(call<CUresult(CUgraph*, unsigned)>("cuGraphCreate")(&graph, 0));
    graphs_.push_back(graph);
    return graph;
  }

  CUgraphNode kernel(CUgraph graph, int priority = 0) {
    std::uint32_t value = 1;
    void* parameters[] = {&value};
    CUDA_KERNEL_NODE_PARAMS what{};
    what.func = function_;
    what.gridDimX = what.gridDimY = what.gridDimZ = what.blockDimX = what.blockDimY = what.blockDimZ = 1;
    what.kernelParams = parameters;
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&node, graph, nullptr, 0, &what));
    if (priority != 0) set_priority(node, priority);
    return node;
  }

  // A graph of kernels of these priorities.
  CUgraph graph_of(std::vector<int> priorities) {
    CUgraph graph = new_graph();
    for (const int priority : priorities) kernel(graph, priority);
    return graph;
  }

  static void set_priority(CUgraphNode node, int priority) {
    CUkernelNodeAttrValue value{};
    value.priority = priority;
    Program::check(call<decltype(cuGraphKernelNodeSetAttribute)>("cuGraphKernelNodeSetAttribute")(
        node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value));
  }

  static std::vector<int> priorities(CUgraph graph) {
    std::size_t count = 0;
    Program::check(call<decltype(cuGraphGetNodes)>("cuGraphGetNodes")(graph, nullptr, &count));
    std::vector<CUgraphNode> nodes(count);
    Program::check(call<decltype(cuGraphGetNodes)>("cuGraphGetNodes")(graph, nodes.data(), &count));
    std::vector<int> found;
    for (const CUgraphNode node : nodes) {
      CUkernelNodeAttrValue value{};
      const CUresult status = call<decltype(cuGraphKernelNodeGetAttribute)>("cuGraphKernelNodeGetAttribute")(
          node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value);
      if (status == CUDA_SUCCESS) found.push_back(value.priority);
    }
    return found;
  }

  CUgraphExec keep(CUgraphExec exec) { return execs_.emplace_back(exec); }

  CUgraphExec instantiate(CUgraph graph, unsigned long long flags = 0) {
    CUgraphExec exec = nullptr;
    Program::check(call<decltype(cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags")(&exec, graph, flags));
    return keep(exec);
  }

  CUgraphExec instantiate_in(cudasched_class value, CUgraph graph, unsigned long long flags = 0) {
    const InRegion region(value);
    return instantiate(graph, flags);
  }

  // What the driver itself says.
  static unsigned long long flags(CUgraphExec exec) {
    cuuint64_t found = 0;
    Program::check(driver::table().cuGraphExecGetFlags(exec, &found));
    return found;
  }
  static bool takes(CUgraphExec exec, CUgraph graph) {
    CUgraphExecUpdateResultInfo info{};
    return driver::table().cuGraphExecUpdate(exec, graph, &info) == CUDA_SUCCESS;
  }
  static bool has(CUgraphExec exec, CUgraph like) {
    return flags(exec) == CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY && takes(exec, like);
  }

  static CUresult update(CUgraphExec exec, CUgraph graph) {
    CUgraphExecUpdateResultInfo info{};
    return call<decltype(cuGraphExecUpdate)>("cuGraphExecUpdate_v2")(exec, graph, &info);
  }

  Program program_;
  CUfunction function_ = nullptr;
  CUgraph graph_ = nullptr;
  std::vector<CUgraph> graphs_;
  std::vector<CUgraphExec> execs_;
};

TEST_F(NodePriority, IsTheHighestForLatencyCallersAndTheLowestForBestEffortOnes) {
  const std::uint64_t before = state().prioritised_graphs;
  EXPECT_TRUE(has(instantiate_in(CUDASCHED_LATENCY, graph_), graph_of({kHighest, kHighest})));
  EXPECT_TRUE(has(instantiate_in(CUDASCHED_BEST_EFFORT, graph_), graph_of({kLowest, kLowest})));
  EXPECT_EQ(state().prioritised_graphs, before + 2);
  EXPECT_EQ(flags(instantiate(graph_)), 0U);
  EXPECT_EQ(flags(instantiate_in(CUDASCHED_NORMAL, graph_)), 0U);
  EXPECT_EQ(state().prioritised_graphs, before + 2);
}

TEST_F(NodePriority, LeavesTheUsersGraphAsItWas) {
  instantiate_in(CUDASCHED_LATENCY, graph_);
  EXPECT_EQ(priorities(graph_), (std::vector<int>{0, 0}));
}

TEST_F(NodePriority, IsGivenByEveryWayToInstantiate) {
  const InRegion region(CUDASCHED_LATENCY);
  const CUgraph like = graph_of({kHighest, kHighest});
  for (const char* name : {"cuGraphInstantiate", "cuGraphInstantiate_v2"}) {
    CUgraphExec exec = nullptr;
    CUgraphNode error = reinterpret_cast<CUgraphNode>(1);
    char log[8] = "before";
    Program::check(call<driver::Driver::InstantiateWithLog>(name)(&exec, graph_, &error, log, sizeof log));
    EXPECT_TRUE(has(keep(exec), like)) << name;
    EXPECT_EQ(error, nullptr);
    EXPECT_STREQ(log, "");
  }
  for (const char* name : {"cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz"}) {
    CUgraphExec exec = nullptr;
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters{};
    parameters.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    Program::check(call<decltype(cuGraphInstantiateWithParams)>(name)(&exec, graph_, &parameters));
    EXPECT_TRUE(has(keep(exec), like)) << name;
    EXPECT_EQ(parameters.flags, 0U);
    EXPECT_EQ(parameters.result_out, CUDA_GRAPH_INSTANTIATE_SUCCESS);
  }
}

TEST_F(NodePriority, ReachesIntoChildGraphs) {
  const auto add = call<decltype(cuGraphAddChildGraphNode)>("cuGraphAddChildGraphNode");
  const auto parent_of = [&](std::vector<int> priorities, CUgraphNode* node) {
    CUgraph parent = new_graph();
    Program::check(add(node, parent, nullptr, 0, graph_of(priorities)));
    return parent;
  };
  CUgraphNode node = nullptr;
  CUgraphNode other = nullptr;
  const CUgraph parent = parent_of({0, 0}, &node);
  const CUgraphExec exec = instantiate_in(CUDASCHED_LATENCY, parent);
  EXPECT_TRUE(has(exec, parent_of({kHighest, kHighest}, &other)));
  CUgraph child = nullptr;
  Program::check(call<decltype(cuGraphChildGraphNodeGetGraph)>("cuGraphChildGraphNodeGetGraph")(node, &child));
  EXPECT_EQ(priorities(child), (std::vector<int>{0, 0}));

  const auto set_child = call<decltype(cuGraphExecChildGraphNodeSetParams)>("cuGraphExecChildGraphNodeSetParams");
  EXPECT_NE(driver::table().cuGraphExecChildGraphNodeSetParams(exec, node, graph_), CUDA_SUCCESS);
  EXPECT_EQ(set_child(exec, node, graph_), CUDA_SUCCESS);
  EXPECT_EQ(priorities(graph_), (std::vector<int>{0, 0}));
}

TEST_F(NodePriority, IsKeptByUpdates) {
  const CUgraphExec exec = instantiate_in(CUDASCHED_LATENCY, graph_);
  EXPECT_FALSE(takes(exec, graph_));
  EXPECT_EQ(update(exec, graph_), CUDA_SUCCESS);  // in no region: it belongs to the executable graph
  const CUgraph chosen = graph_of({-1, -2});
  EXPECT_EQ(update(exec, chosen), CUDA_SUCCESS);
  EXPECT_EQ(priorities(chosen), (std::vector<int>{-1, -2}));
  CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_ERROR;
  EXPECT_EQ((call<CUresult(CUgraphExec, CUgraph, CUgraphNode*, CUgraphExecUpdateResult*)>("cuGraphExecUpdate")(
                exec, graph_, nullptr, &result)),
            CUDA_SUCCESS);
  EXPECT_EQ(result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  EXPECT_TRUE(has(exec, graph_of({kHighest, kHighest})));
  EXPECT_EQ(update(exec, graph_of({0, 0, 0})), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}

TEST_F(NodePriority, IsNotGivenToWhoChoseHisOwn) {
  const CUgraph chosen = graph_of({0, -2});
  EXPECT_EQ(flags(instantiate_in(CUDASCHED_LATENCY, chosen)), 0U);
  const auto own = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  EXPECT_TRUE(takes(instantiate_in(CUDASCHED_LATENCY, chosen, own), chosen));
}

// As PyTorch does for every graph.
TEST_F(NodePriority, IsGivenToWhoAsksForNodePrioritiesAndChoseNone) {
  const CUgraphExec exec = instantiate_in(CUDASCHED_LATENCY, graph_, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
  EXPECT_TRUE(has(exec, graph_of({kHighest, kHighest})));
  EXPECT_EQ(update(exec, graph_), CUDA_SUCCESS);
}

TEST_F(NodePriority, TheFlagIsNotShownToWhoDidNotGiveIt) {
  const auto get = call<decltype(cuGraphExecGetFlags)>("cuGraphExecGetFlags");
  cuuint64_t shown = ~cuuint64_t{0};
  Program::check(
      get(instantiate_in(CUDASCHED_LATENCY, graph_, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH), &shown));
  EXPECT_EQ(shown, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
  const auto own = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  Program::check(get(instantiate_in(CUDASCHED_LATENCY, graph_, own), &shown));
  EXPECT_EQ(shown, own);
}

TEST_F(NodePriority, OfAClassOfTheCapturingStreamGoesBeforeTheRegions) {
  const CUstream stream = Program::new_stream();
  Program::check(program_.launch(1, stream));  // loads the code
  ASSERT_EQ(cudasched_bind_stream(reinterpret_cast<std::uintptr_t>(stream), CUDASCHED_LATENCY), CUDASCHED_OK);
  CUgraph graph = nullptr;
  Program::check(call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2")(
      stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  Program::check(program_.launch(2, stream));
  Program::check(call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture")(stream, &graph));
  graphs_.push_back(graph);
  const CUgraphExec exec = instantiate_in(CUDASCHED_BEST_EFFORT, graph);
  EXPECT_FALSE(takes(exec, graph));  // which has 0, the lowest
  EXPECT_EQ(update(exec, graph), CUDA_SUCCESS);
  EXPECT_EQ(cudasched_unbind_stream(reinterpret_cast<std::uintptr_t>(stream)), CUDASCHED_OK);
}

constinit decltype(cuGraphInstantiateWithFlags)* real_instantiate = nullptr;
constinit decltype(cuGraphKernelNodeSetAttribute)* real_set = nullptr;
constinit int sets_left = 0;
constinit decltype(cuGraphKernelNodeGetAttribute)* real_get = nullptr;
constinit int gets = 0;

// Their nodes are at the default, which is the lowest, unless the program has chosen another, which it keeps.
TEST_F(NodePriority, OfBestEffortWithNodePrioritiesOfItsOwnNeedsNoLook) {
  const auto own = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  const CUgraph chosen = graph_of({0, -2});
  const CUgraph other = graph_of({-2, 0});
  const std::uint64_t before = state().prioritised_graphs;
  real_get = driver::table().cuGraphKernelNodeGetAttribute;
  gets = 0;
  const Replaced replaced(
      driver::table().cuGraphKernelNodeGetAttribute,
      +[](CUgraphNode node, CUkernelNodeAttrID id, CUkernelNodeAttrValue* value) {
        ++gets;
        return real_get(node, id, value);
      });
  const CUgraphExec exec = instantiate_in(CUDASCHED_BEST_EFFORT, graph_, own);
  const CUgraphExec keeps = instantiate_in(CUDASCHED_BEST_EFFORT, chosen, own);
  EXPECT_TRUE(has(exec, graph_of({kLowest, kLowest})));
  EXPECT_TRUE(has(keeps, chosen));
  EXPECT_EQ(update(exec, graph_), CUDA_SUCCESS);
  EXPECT_EQ(update(keeps, chosen), CUDA_SUCCESS);
  EXPECT_EQ(gets, 0);
  EXPECT_EQ(update(exec, chosen), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(update(keeps, other), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(state().prioritised_graphs, before + 2);
  instantiate_in(CUDASCHED_BEST_EFFORT, graph_);
  EXPECT_EQ(gets, 2) << "who gives no flag may have chosen priorities that it does not count on";
}

TEST_F(NodePriority, WhereTheDriverRefusesTheFlagTheUsersOwnCallIsMade) {
  real_instantiate = driver::table().cuGraphInstantiateWithFlags;
  const auto refuse = +[](CUgraphExec* exec, CUgraph graph, unsigned long long with) {
    const bool prioritised = (with & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) != 0;
    return prioritised ? CUDA_ERROR_INVALID_VALUE : real_instantiate(exec, graph, with);
  };
  const Replaced replaced(driver::table().cuGraphInstantiateWithFlags, refuse);
  const std::uint64_t before = state().unprioritised_graphs;
  const CUgraphExec exec = instantiate_in(CUDASCHED_LATENCY, graph_);
  EXPECT_EQ(flags(exec), 0U);
  EXPECT_EQ(priorities(graph_), (std::vector<int>{0, 0}));
  EXPECT_EQ(state().unprioritised_graphs, before + 1);
  EXPECT_EQ(update(exec, graph_of({-1, -2})), CUDA_SUCCESS);
}

TEST_F(NodePriority, WhereTheDriverRefusesAnAttributeTheGraphIsAsItWas) {
  real_set = driver::table().cuGraphKernelNodeSetAttribute;
  sets_left = 1;
  const auto refuse_second = +[](CUgraphNode node, CUkernelNodeAttrID id, const CUkernelNodeAttrValue* value) {
    // Giving the old value back works.
    if (value->priority != 0 && sets_left-- == 0) return CUDA_ERROR_NOT_SUPPORTED;
    return real_set(node, id, value);
  };
  const Replaced replaced(driver::table().cuGraphKernelNodeSetAttribute, refuse_second);
  EXPECT_EQ(flags(instantiate_in(CUDASCHED_LATENCY, graph_)), 0U);
  EXPECT_EQ(priorities(graph_), (std::vector<int>{0, 0}));
}

TEST_F(NodePriority, AGraphThatTheDriverRefusesFailsAsItWouldAlone) {
  const InRegion region(CUDASCHED_LATENCY);
  CUgraphExec exec = nullptr;
  const auto with_flags = call<decltype(cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags");
  EXPECT_EQ(with_flags(&exec, graph_, 1ULL << 40), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(with_flags(&exec, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(with_flags(nullptr, graph_, 0), CUDA_ERROR_INVALID_VALUE);
  const auto with_parameters = call<decltype(cuGraphInstantiateWithParams)>("cuGraphInstantiateWithParams");
  EXPECT_EQ(with_parameters(&exec, graph_, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(priorities(graph_), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace cudasched::test
