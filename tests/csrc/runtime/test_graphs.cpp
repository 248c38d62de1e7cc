// What an executable graph is predicted to take, from its nodes, over the simulated driver.
#include <gtest/gtest.h>

#include <vector>

#include "hooked_driver.hpp"
#include "runtime/engine.hpp"
#include "runtime/graphs.hpp"

namespace cudasched::test {
namespace {

// Kernels whose predicted time is the number of their blocks, in us.
std::int64_t blocks_us(const predict::Query& query) { return static_cast<std::int64_t>(query.launch.blocks()) * 1000; }

class Graph : public ::testing::Test {
 protected:
  Graph() {
    module_ = Program::load("cudasched-sim 1\nkernel node params=4\nkernel other params=4 regs=50\n");
    Program::check(call<CUresult(CUgraph*, unsigned)>("cuGraphCreate")(&graph_, 0));
  }
  ~Graph() override { call<CUresult(CUgraph)>("cuGraphDestroy")(graph_); }

  CUgraphNode kernel(unsigned blocks, std::vector<CUgraphNode> after = {}, const char* name = "node") {
    std::uint32_t value = 1;
    void* parameters[] = {&value};
    CUDA_KERNEL_NODE_PARAMS node{};
    node.func = Program::find(module_, name);
    node.gridDimX = blocks;
    node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1;
    node.kernelParams = parameters;
    CUgraphNode handle = nullptr;
    Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&handle, graph_, after.data(),
                                                                                   after.size(), &node));
    return handle;
  }

  CUgraphExec instantiate() {
    CUgraphExec exec = nullptr;
    Program::check(call<decltype(cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags")(&exec, graph_, 0));
    return exec;
  }

  // The facts that a walk with `blocks_us` finds.
  runtime::GraphFacts walked() {
    runtime::Graphs graphs;
    CUgraphExec exec = instantiate();
    graphs.note(exec, graph_, blocks_us);
    const runtime::GraphFacts facts = graphs.find(exec).value_or(runtime::GraphFacts{});
    call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
    return facts;
  }

  Program program_;
  CUmodule module_ = nullptr;
  CUgraph graph_ = nullptr;
};

TEST_F(Graph, OfAChainTakesTheSumAndTheGapsBetween) {
  const CUgraphNode first = kernel(10);
  const CUgraphNode second = kernel(20, {first});
  kernel(30, {second});
  EXPECT_EQ(walked().critical_path_ns, 60'000 + 2 * 1'000);
  EXPECT_EQ(walked().nodes, 3U);
}

TEST_F(Graph, OfBranchesTakesTheLongestPath) {
  const CUgraphNode root = kernel(10);
  const CUgraphNode left = kernel(100, {root});
  const CUgraphNode right = kernel(20, {root});
  const CUgraphNode right_end = kernel(30, {right});
  kernel(5, {left, right_end});
  EXPECT_EQ(walked().critical_path_ns, 10'000 + 100'000 + 5'000 + 2 * 1'000);
}

TEST_F(Graph, ThatIsUpdatedAgainAndAgainIsLookedAtNowAndThen) {
  kernel(10);
  runtime::Graphs graphs;
  CUgraphExec exec = instantiate();
  graphs.forget(exec);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(graphs.wants_note(exec));  // nothing is known of it
  graphs.note(exec, graph_, blocks_us);
  int looks = 0;
  for (int i = 0; i < 64; ++i) looks += graphs.wants_note(exec) ? 1 : 0;
  EXPECT_EQ(looks, 4 + 4);
  graphs.forget(exec);
  graphs.note(exec, graph_, blocks_us);
  EXPECT_TRUE(graphs.wants_note(exec));  // another graph's handle
  call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
}

TEST_F(Graph, WithoutNodesTakesNothing) { EXPECT_EQ(walked().critical_path_ns, 0); }

TEST_F(Graph, IdentityIsThatOfItsKernelsAndShapes) {
  const CUgraphNode first = kernel(10);
  const std::uint64_t one = walked().identity;
  EXPECT_EQ(walked().identity, one);
  kernel(10, {first});
  const std::uint64_t two = walked().identity;
  EXPECT_NE(two, one);
  kernel(10, {}, "other");
  EXPECT_NE(walked().identity, two);
  EXPECT_NE(one, 0U);
}

constinit decltype(cuOccupancyMaxActiveBlocksPerMultiprocessor)* real_occupancy = nullptr;
constinit decltype(cuDeviceGetAttribute)* real_attribute = nullptr;
constinit int occupancies = 0;
constinit int attributes = 0;

// A graph has thousands of nodes, and its instantiation waits for this.
TEST_F(Graph, OfManyNodesAsksTheDriverOnceForWhatTheyHaveInCommon) {
  module_ =
      Program::load("cudasched-sim 1\nkernel node params=4 blocks_per_sm=2\nkernel other params=4 blocks_per_sm=3\n");
  for (unsigned i = 1; i <= 20; ++i) kernel(i, {}, i % 2 == 0 ? "node" : "other");
  real_occupancy = driver::table().cuOccupancyMaxActiveBlocksPerMultiprocessor;
  real_attribute = driver::table().cuDeviceGetAttribute;
  const Replaced counted(
      driver::table().cuOccupancyMaxActiveBlocksPerMultiprocessor,
      +[](int* blocks, CUfunction function, int threads, std::size_t shared) {
        ++occupancies;
        return real_occupancy(blocks, function, threads, shared);
      });
  const Replaced counted_too(
      driver::table().cuDeviceGetAttribute, +[](int* value, CUdevice_attribute attribute, CUdevice device) {
        ++attributes;
        return real_attribute(value, attribute, device);
      });
  const CUgraphExec exec = instantiate();
  occupancies = attributes = 0;
  runtime::Graphs graphs;
  int nodes = 0;
  graphs.note(exec, graph_, [&](const predict::Query& query) {
    ++nodes;
    EXPECT_EQ(query.residency.blocks_per_sm, query.launch.blocks() % 2 == 0 ? 2 : 3);
    EXPECT_GT(query.residency.sm_count, 1);
    return blocks_us(query);
  });
  EXPECT_EQ(nodes, 20);
  EXPECT_EQ(graphs.find(exec)->critical_path_ns, 20'000);
  EXPECT_EQ(occupancies, 2);
  EXPECT_EQ(attributes, 2);
  call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
}

TEST_F(Graph, IsKnownToTheEngineFromInstantiationToDestruction) {
  kernel(132);
  CUgraphExec exec = instantiate();
  const std::optional<runtime::GraphFacts> found = runtime::engine().graphs().find(exec);
  ASSERT_TRUE(found);
  EXPECT_GT(found->critical_path_ns, 0);
  Program::check(call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec));
  EXPECT_FALSE(runtime::engine().graphs().find(exec));
}

}  // namespace
}  // namespace cudasched::test
