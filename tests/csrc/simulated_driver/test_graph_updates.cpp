// Updates of executable graphs, as a whole and of single nodes, and what the driver refuses.
#include "simulated_driver/graph_fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

class GraphUpdatesTest : public GraphTest {
 protected:
  CUresult set(CUgraphExec exec, CUgraphNode node, std::uint64_t value, std::uint32_t block_us = 20) {
    const auto use = [&](const auto& params) { return cuGraphExecKernelNodeSetParams(exec, node, &params); };
    return with_kernel(value, use, block_us);
  }
};

TEST_F(GraphUpdatesTest, ANodeChangesForLaterLaunchesAlone) {
  const CUgraph made = graph();
  const CUgraphNode node = add(made, 1, {}, 2000);
  const CUgraphExec exec = instantiate(made);
  const CUgraphExec other = instantiate(made);
  launch(exec);
  ASSERT_EQ(set(exec, node, 2), CUDA_SUCCESS);
  launch(exec);
  launch(other);
  EXPECT_EQ(log(), (Values{1, 2, 1}));
  EXPECT_EQ(set(exec, nullptr, 3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(set(exec, add(made, 4), 3), CUDA_ERROR_INVALID_VALUE) << "added after the instantiation";
  ASSERT_EQ(cuGraphExecDestroy(other), CUDA_SUCCESS);
  EXPECT_EQ(set(other, node, 3), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuGraphDestroyNode(node), CUDA_SUCCESS);
  EXPECT_EQ(set(exec, node, 3), CUDA_ERROR_INVALID_VALUE) << "no longer in its graph";
}

TEST_F(GraphUpdatesTest, ANodeOfAnotherTypeIsRefused) {
  const CUgraph made = graph();
  const CUgraphNode node = add_host(made, [](void*) {}, nullptr);
  const CUgraphExec exec = instantiate(made);
  EXPECT_EQ(set(exec, node, 3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphNodeSetEnabled(exec, node, 0), CUDA_ERROR_INVALID_VALUE) << "host nodes cannot be switched off";
}

TEST_F(GraphUpdatesTest, AnyNodeByTheGeneralCall) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  ASSERT_EQ(cuMemsetD8(memory, 0, 64), CUDA_SUCCESS);
  int called = 0;
  int called_after = 0;
  const CUhostFn count = [](void* data) { ++*static_cast<int*>(data); };
  const CUgraph made = graph();
  const CUgraph inner = graph();
  add(inner, 2);
  const CUgraphNode kernel = add(made, 1);
  const CUgraphNode child = add_child(made, inner, {kernel});
  const CUgraphNode host = add_host(made, count, &called, {child});
  const CUDA_MEMSET_NODE_PARAMS fill{memory, 0, 1, 1, 16, 1};
  CUgraphNode filled = nullptr;
  ASSERT_EQ(cuGraphAddMemsetNode(&filled, made, &host, 1, &fill, context_), CUDA_SUCCESS);
  std::uint64_t seen = 0;
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = &seen;
  copy.WidthInBytes = 8;
  copy.Height = copy.Depth = 1;
  CUgraphNode copied = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&copied, made, &filled, 1, &copy, context_), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(made);

  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_KERNEL;
  std::uint64_t value = 5;
  std::uint32_t block_us = 1;
  void* kernel_params[] = {&log_, &cursor_, &value, &block_us};
  params.kernel.func = append_;
  params.kernel.gridDimX = params.kernel.gridDimY = params.kernel.gridDimZ = 1;
  params.kernel.blockDimX = params.kernel.blockDimY = params.kernel.blockDimZ = 1;
  params.kernel.kernelParams = kernel_params;
  EXPECT_EQ(cuGraphExecNodeSetParams(exec, kernel, &params), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecNodeSetParams(exec, host, &params), CUDA_ERROR_INVALID_VALUE) << "the type must match";
  const CUgraph after = graph();
  add(after, 6);
  params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = after;
  EXPECT_EQ(cuGraphExecNodeSetParams(exec, child, &params), CUDA_SUCCESS);
  params = {};
  params.type = CU_GRAPH_NODE_TYPE_HOST;
  params.host = {count, &called_after};
  EXPECT_EQ(cuGraphExecNodeSetParams(exec, host, &params), CUDA_SUCCESS);
  params = {};
  params.type = CU_GRAPH_NODE_TYPE_MEMSET;
  params.memset = {memory + 8, 0, 7, 1, 8, 1, context_};
  EXPECT_EQ(cuGraphExecNodeSetParams(exec, filled, &params), CUDA_SUCCESS);
  copy.srcDevice = memory + 8;
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, copied, &copy, context_), CUDA_SUCCESS);
  launch(exec);
  EXPECT_EQ(log(), (Values{5, 6}));
  EXPECT_EQ(called, 0);
  EXPECT_EQ(called_after, 1);
  EXPECT_EQ(seen, 0x0707070707070707U);
}

TEST_F(GraphUpdatesTest, CopiesAndFillsKeepTheirShapeAndKindOfMemory) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 256), CUDA_SUCCESS);
  void* pinned = nullptr;
  ASSERT_EQ(cuMemAllocHost(&pinned, 256), CUDA_SUCCESS);
  const CUgraph made = graph();
  CUDA_MEMSET_NODE_PARAMS fill{memory, 0, 1, 4, 8, 1};
  CUgraphNode filled = nullptr;
  ASSERT_EQ(cuGraphAddMemsetNode(&filled, made, nullptr, 0, &fill, context_), CUDA_SUCCESS);
  CUDA_MEMSET_NODE_PARAMS rows{memory, 64, 1, 4, 2, 2};
  CUgraphNode filled_rows = nullptr;
  ASSERT_EQ(cuGraphAddMemsetNode(&filled_rows, made, nullptr, 0, &rows, context_), CUDA_SUCCESS);
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = pinned;
  copy.WidthInBytes = 8;
  copy.Height = copy.Depth = 1;
  CUgraphNode copied = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&copied, made, nullptr, 0, &copy, context_), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(made);

  const auto set_fill = [&] { return cuGraphExecMemsetNodeSetParams(exec, filled, &fill, context_); };
  fill.width = 4;
  EXPECT_EQ(set_fill(), CUDA_SUCCESS);
  fill.width = 8;
  EXPECT_EQ(set_fill(), CUDA_SUCCESS) << "as large as it was instantiated";
  fill.width = 9;
  EXPECT_EQ(set_fill(), CUDA_ERROR_INVALID_VALUE);
  fill.width = 0;
  EXPECT_EQ(set_fill(), CUDA_ERROR_INVALID_VALUE);
  rows.value = 9;
  EXPECT_EQ(cuGraphExecMemsetNodeSetParams(exec, filled_rows, &rows, context_), CUDA_SUCCESS);
  rows.width = 1;
  EXPECT_EQ(cuGraphExecMemsetNodeSetParams(exec, filled_rows, &rows, context_), CUDA_ERROR_INVALID_VALUE);
  const auto set_copy = [&] { return cuGraphExecMemcpyNodeSetParams(exec, copied, &copy, context_); };
  copy.WidthInBytes = 16;
  EXPECT_EQ(set_copy(), CUDA_SUCCESS);
  copy.Height = 2;
  copy.srcPitch = copy.dstPitch = 32;
  EXPECT_EQ(set_copy(), CUDA_ERROR_INVALID_VALUE) << "several rows";
  copy.Height = 1;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = memory + 64;
  EXPECT_EQ(set_copy(), CUDA_ERROR_INVALID_VALUE) << "from host memory to the device's";
}

TEST_F(GraphUpdatesTest, AWholeGraphIsTakenOverOrRefusedWithTheNodeThatDiffers) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1);
  add(made, 3, {add(made, 2, {first})});
  const CUgraphExec exec = instantiate(made);

  const CUgraph fewer = graph();
  add(fewer, 4);
  CUgraphExecUpdateResultInfo said = update(exec, fewer);
  EXPECT_EQ(said.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  EXPECT_EQ(said.errorNode, nullptr);

  const CUgraph other_edges = graph();
  const CUgraphNode a = add(other_edges, 4);
  const CUgraphNode b = add(other_edges, 5, {a});
  const CUgraphNode c = add(other_edges, 6, {a});
  said = update(exec, other_edges);
  EXPECT_EQ(said.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  EXPECT_EQ(said.errorNode, c);
  EXPECT_EQ(said.errorFromNode, a);
  ASSERT_EQ(cuGraphRemoveDependencies(other_edges, &a, &c, nullptr, 1), CUDA_SUCCESS);
  const CUgraphEdgeData programmatic{
      CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, 0, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, {}};
  ASSERT_EQ(cuGraphAddDependencies(other_edges, &b, &c, &programmatic, 1), CUDA_SUCCESS);
  EXPECT_EQ(update(exec, other_edges).errorNode, c) << "the edge is of another kind";

  const CUgraph other_type = graph();
  const CUgraphNode host = add_host(other_type, [](void*) {}, nullptr);
  add(other_type, 6, {add(other_type, 5, {host})});
  said = update(exec, other_type);
  EXPECT_EQ(said.result, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED);
  EXPECT_EQ(said.errorNode, host);

  launch(exec);
  const CUgraph same = graph();
  add(same, 6, {add(same, 5, {add(same, 4)})});
  EXPECT_EQ(update(exec, same).result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  launch(exec);
  EXPECT_EQ(log(), (Values{1, 2, 3, 4, 5, 6})) << "what was refused changed nothing";
  ASSERT_EQ(set(exec, first, 7), CUDA_SUCCESS) << "nodes are still named by the graph that it was made of";
  launch(exec);
  EXPECT_EQ(log().size(), 9U);
  EXPECT_EQ(log()[6], 7U);
}

TEST_F(GraphUpdatesTest, SwitchedOffNodesStaySoOverUpdates) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1);
  const CUgraphNode second = add(made, 2, {first});
  add(made, 3, {second});
  const CUgraphExec exec = instantiate(made);
  ASSERT_EQ(cuGraphNodeSetEnabled(exec, second, 0), CUDA_SUCCESS);
  unsigned enabled = 1;
  ASSERT_EQ(cuGraphNodeGetEnabled(exec, second, &enabled), CUDA_SUCCESS);
  EXPECT_EQ(enabled, 0U);
  launch(exec);
  ASSERT_EQ(set(exec, second, 9), CUDA_SUCCESS);
  EXPECT_EQ(update(exec, made).result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  launch(exec);
  ASSERT_EQ(set(exec, second, 8), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphNodeSetEnabled(exec, second, 1), CUDA_SUCCESS);
  launch(exec);
  EXPECT_EQ(log(), (Values{1, 3, 1, 3, 1, 8, 3}));
}

TEST_F(GraphUpdatesTest, ADestroyedExecutableRunsToItsEnd) {
  const CUgraph made = graph();
  add(made, 2, {add(made, 1, {}, 5000)});
  const CUgraphExec exec = instantiate(made);
  launch(exec);
  ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_ERROR_INVALID_VALUE);
  CUgraphExecUpdateResultInfo info{};
  EXPECT_EQ(cuGraphExecUpdate(exec, made, &info), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR);
  EXPECT_EQ(log(), (Values{1, 2}));
}

TEST_F(GraphUpdatesTest, ADeviceLaunchableGraphHasPlainNodesAlone) {
  CUDA_GRAPH_INSTANTIATE_PARAMS params{};
  params.flags = CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
  CUgraphExec exec = nullptr;
  const CUgraph made = graph();
  EXPECT_NE(cuGraphInstantiateWithParams(&exec, made, &params), CUDA_SUCCESS) << "it is empty";
  add(made, 1);
  EXPECT_EQ(cuGraphInstantiateWithParams(&exec, made, &params), CUDA_SUCCESS);
  EXPECT_EQ(params.result_out, CUDA_GRAPH_INSTANTIATE_SUCCESS);
  const CUgraphNode host = add_host(made, [](void*) {}, nullptr);
  EXPECT_NE(cuGraphInstantiateWithParams(&exec, made, &params), CUDA_SUCCESS);
  EXPECT_EQ(params.result_out, CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED);
  EXPECT_EQ(params.hErrNode_out, host);
}

}  // namespace
}  // namespace cudasched::simulated_driver
