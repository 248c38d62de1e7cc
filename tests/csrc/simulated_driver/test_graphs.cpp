// Kernel-node priorities, their rule at updates, and child graphs.
#include "simulated_driver/graph_fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

class PriorityTest : public GraphTest {
 protected:
  static void set_priority(CUgraphNode node, int priority) {
    CUkernelNodeAttrValue value{};
    value.priority = priority;
    EXPECT_EQ(cuGraphKernelNodeSetAttribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value), CUDA_SUCCESS);
  }

  static int priority(CUgraphNode node) {
    CUkernelNodeAttrValue value{};
    EXPECT_EQ(cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value), CUDA_SUCCESS);
    return value.priority;
  }
};

TEST_F(PriorityTest, CapturedNodesHaveTheirStreamsPriority) {
  for (const int of_stream : {0, -3}) {
    const CUstream from = stream(CU_STREAM_NON_BLOCKING, of_stream);
    ASSERT_EQ(cuStreamBeginCapture(from, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    ASSERT_EQ(append(from, 1), CUDA_SUCCESS);
    CUgraph captured = nullptr;
    ASSERT_EQ(cuStreamEndCapture(from, &captured), CUDA_SUCCESS);
    CUgraphNode node = nullptr;
    std::size_t count = 1;
    ASSERT_EQ(cuGraphGetNodes(captured, &node, &count), CUDA_SUCCESS);
    EXPECT_EQ(priority(node), of_stream);
  }
}

TEST_F(PriorityTest, TheyCannotChangeWhereTheyCount) {
  const CUgraph made = graph();
  const CUgraphNode node = add(made, 1);
  const CUgraphExec plain = instantiate(made);
  const CUgraphExec fixed = instantiate(made, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
  set_priority(node, -9);  // compared as asked for, though it counts as -5
  EXPECT_EQ(update(plain, made).result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  EXPECT_EQ(update(fixed, made).result, CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED);
  set_priority(node, 0);
  EXPECT_EQ(update(fixed, made).result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
}

TEST_F(GraphTest, AttributesAreThoseOfKernelNodes) {
  const CUgraph made = graph();
  CUgraphNode empty = nullptr;
  ASSERT_EQ(cuGraphAddEmptyNode(&empty, made, nullptr, 0), CUDA_SUCCESS);
  CUkernelNodeAttrValue value{};
  EXPECT_EQ(cuGraphKernelNodeGetAttribute(empty, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value), CUDA_ERROR_INVALID_VALUE);
  const CUgraphNode node = add(made, 1);
  ASSERT_EQ(cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value), CUDA_SUCCESS);
  EXPECT_EQ(value.cooperative, 0);
  EXPECT_EQ(cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_IGNORE, &value), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(GraphTest, ChildGraphsRunInTheirNodesPlace) {
  const CUgraph inner = graph();
  add(inner, 3, {add(inner, 2)});
  const CUgraph middle = graph();
  add(middle, 4, {add_child(middle, inner)});
  const CUgraph outer = graph();
  const CUgraphNode first = add(outer, 1);
  add(outer, 5, {add_child(outer, middle, {first})});
  add(inner, 9);  // a child graph is a copy
  const CUstream to = stream();
  ASSERT_EQ(cuGraphLaunch(instantiate(outer), to), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 2, 3, 4, 5}));
}

TEST_F(GraphTest, OneChildGraphCanBeReplaced) {
  const CUgraph before = graph();
  add(before, 2);
  const CUgraph outer = graph();
  const CUgraphNode first = add(outer, 1);
  const CUgraphNode child = add_child(outer, before, {first});
  add(outer, 3, {child});
  const CUgraphExec exec = instantiate(outer);
  const CUgraph after = graph();
  const CUgraphNode other = add(after, 7);
  ASSERT_EQ(cuGraphExecChildGraphNodeSetParams(exec, child, after), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(exec, stream()), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 7, 3}));
  add(after, 8, {other});
  EXPECT_NE(cuGraphExecChildGraphNodeSetParams(exec, child, after), CUDA_SUCCESS);
  EXPECT_EQ(update(exec, outer).result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(exec, stream()), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 7, 3, 1, 2, 3}));
}

}  // namespace
}  // namespace cudasched::simulated_driver
