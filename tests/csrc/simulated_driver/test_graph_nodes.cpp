// What slicing a graph does to it, and what the driver refuses: clones, deletion, edges, memory nodes, user objects.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "simulated_driver/graph_fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr CUgraphEdgeData kProgrammatic{
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, 0, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, {}};

class GraphNodesTest : public GraphTest {
 protected:
  struct Edges {
    std::vector<CUgraphNode> from, to;
    std::vector<CUgraphEdgeData> data;
  };

  static Edges edges(CUgraph of) {
    std::size_t count = 0;
    EXPECT_EQ(cuGraphGetEdges(of, nullptr, nullptr, nullptr, &count), CUDA_SUCCESS);
    Edges found{std::vector<CUgraphNode>(count), std::vector<CUgraphNode>(count), std::vector<CUgraphEdgeData>(count)};
    if (count > 0) {
      EXPECT_EQ(cuGraphGetEdges(of, found.from.data(), found.to.data(), found.data.data(), &count), CUDA_SUCCESS);
    }
    return found;
  }

  static CUgraphNode add_allocation(CUgraph to, CUdeviceptr& address) {
    CUDA_MEM_ALLOC_NODE_PARAMS params{};
    params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    params.bytesize = 64;
    CUgraphNode made = nullptr;
    EXPECT_EQ(cuGraphAddMemAllocNode(&made, to, nullptr, 0, &params), CUDA_SUCCESS);
    address = params.dptr;
    return made;
  }
};

TEST_F(GraphNodesTest, ACloneHasTheSameNodesAndEdgesAndIsItsOwn) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1);
  const CUgraphNode second = add(made, 2, {first});
  const CUgraphNode third = add(made, 3, {first, second});
  const CUgraph copy = cloned(made);
  EXPECT_EQ(nodes(copy), (std::vector{in_clone(first, copy), in_clone(second, copy), in_clone(third, copy)}));
  const Edges copied = edges(copy);
  EXPECT_EQ(copied.from, (std::vector{in_clone(first, copy), in_clone(first, copy), in_clone(second, copy)}));
  EXPECT_EQ(copied.to, (std::vector{in_clone(second, copy), in_clone(third, copy), in_clone(third, copy)}));
  ASSERT_EQ(cuGraphDestroyNode(in_clone(second, copy)), CUDA_SUCCESS);
  CUgraphNode found = nullptr;
  EXPECT_EQ(cuGraphNodeFindInClone(&found, second, copy), CUDA_ERROR_INVALID_VALUE) << "it was removed";
  EXPECT_EQ(cuGraphNodeFindInClone(&found, first, made), CUDA_ERROR_INVALID_VALUE) << "that is no clone";
  EXPECT_EQ(nodes(made).size(), 3U);
  const CUgraphExec exec = instantiate(copy);
  ASSERT_EQ(cuGraphDestroy(made), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphNodeFindInClone(&found, first, copy), CUDA_ERROR_INVALID_VALUE) << "the node asked after is gone";
  launch(exec);
  EXPECT_EQ(log(), (Values{1, 3}));
}

TEST_F(GraphNodesTest, ADestroyedNodeTakesItsEdgesAlong) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1, {}, 500);
  const CUgraphNode second = add(made, 2, {first});
  add(made, 3, {second});
  ASSERT_EQ(cuGraphDestroyNode(second), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphDestroyNode(second), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(edges(made).from.empty());
  launch(instantiate(made));
  EXPECT_EQ(log(), (Values{3, 1})) << "nothing orders them any more, and 1 takes longer";
}

// A graph halved by clones, whose nodes outside a half are destroyed, runs as the whole does.
TEST_F(GraphNodesTest, HalvesInOrderDoWhatTheWholeDoes) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round) {
    const CUgraph made = graph();
    const std::size_t count = 2 + random() % 40;
    std::vector<CUgraphNode> all(count);
    std::vector<std::set<std::size_t>> before(count);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::uint64_t e = 0; i > 0 && e < random() % 4; ++e) before[i].insert(random() % i);
      std::vector<CUgraphNode> after;
      for (const std::size_t from : before[i]) after.push_back(all[from]);
      all[i] = add(made, i, after, static_cast<std::uint32_t>(1 + random() % 50));
    }
    const std::size_t at = 1 + random() % (count - 1);
    std::vector<CUgraphExec> slices;
    for (const bool second : {false, true}) {
      const CUgraph half = cloned(made);
      for (std::size_t i = 0; i < count; ++i) {
        if ((i >= at) != second) {
          ASSERT_EQ(cuGraphDestroyNode(in_clone(all[i], half)), CUDA_SUCCESS);
        }
      }
      slices.push_back(instantiate(half));
      ASSERT_EQ(cuGraphDestroy(half), CUDA_SUCCESS);
    }
    ASSERT_EQ(cuGraphDestroy(made), CUDA_SUCCESS);
    const std::size_t had = log().size();
    for (const CUgraphExec slice : slices) launch(slice);
    const Values entries = log();
    ASSERT_EQ(entries.size(), had + count);
    std::set<std::uint64_t> seen;
    for (std::size_t i = had; i < entries.size(); ++i) {
      for (const std::size_t from : before[entries[i]]) ASSERT_TRUE(seen.contains(from));
      ASSERT_TRUE(seen.insert(entries[i]).second);
    }
    for (const CUgraphExec slice : slices) ASSERT_EQ(cuGraphExecDestroy(slice), CUDA_SUCCESS);
  }
}

TEST_F(GraphNodesTest, ChildGraphsAreClonedToo) {
  const CUgraph inner = graph();
  const CUgraphNode inside = add(inner, 2);
  const CUgraph outer = graph();
  const CUgraphNode child = add_child(outer, inner);
  CUgraph held = nullptr;
  ASSERT_EQ(cuGraphChildGraphNodeGetGraph(child, &held), CUDA_SUCCESS);
  const CUgraphNode held_inside = in_clone(inside, held);
  const CUgraph copy = cloned(outer);
  CUgraph copied = nullptr;
  ASSERT_EQ(cuGraphChildGraphNodeGetGraph(in_clone(child, copy), &copied), CUDA_SUCCESS);
  const CUgraphNode twin = in_clone(held_inside, copied);
  EXPECT_NE(twin, held_inside);
  // What changes in the clone's child does not change in the original's.
  ASSERT_EQ(with_kernel(7, [&](const auto& params) { return cuGraphKernelNodeSetParams(twin, &params); }),
            CUDA_SUCCESS);
  launch(instantiate(copy));
  launch(instantiate(outer));
  EXPECT_EQ(log(), (Values{7, 2}));
}

TEST_F(GraphNodesTest, EdgesKeepTheirOrderAndData) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1);
  const CUgraphNode second = add(made, 2);
  const CUgraphNode third = add(made, 3);
  CUgraphNode empty = nullptr;
  ASSERT_EQ(cuGraphAddEmptyNode(&empty, made, nullptr, 0), CUDA_SUCCESS);
  const CUgraphNode from[] = {second, first};
  const CUgraphNode to[] = {third, third};
  const CUgraphEdgeData data[] = {kProgrammatic, {}};
  ASSERT_EQ(cuGraphAddDependencies(made, from, to, data, 2), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphAddDependencies(made, &second, &third, nullptr, 1), CUDA_ERROR_INVALID_VALUE) << "twice";
  EXPECT_EQ(cuGraphAddDependencies(made, &first, &empty, &kProgrammatic, 1), CUDA_ERROR_INVALID_VALUE)
      << "programmatic edges go between kernels";
  std::vector<CUgraphNode> found(2);
  std::vector<CUgraphEdgeData> found_data(2);
  std::size_t count = 2;
  ASSERT_EQ(cuGraphNodeGetDependencies(third, found.data(), found_data.data(), &count), CUDA_SUCCESS);
  EXPECT_EQ(found, (std::vector{second, first}));
  EXPECT_EQ(found_data[0].from_port, CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC);
  EXPECT_EQ(found_data[1].from_port, 0);
  EXPECT_EQ(cuGraphNodeGetDependencies(third, found.data(), nullptr, &count), CUDA_ERROR_LOSSY_QUERY);
  EXPECT_EQ(cuGraphGetEdges(made, found.data(), found.data(), nullptr, &count), CUDA_ERROR_LOSSY_QUERY);
  const CUgraph copy = cloned(made);
  EXPECT_EQ(edges(copy).data[0].type, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
  count = 1;
  ASSERT_EQ(cuGraphNodeGetDependentNodes(first, found.data(), found_data.data(), &count), CUDA_SUCCESS);
  EXPECT_EQ(count, 1U);
  EXPECT_EQ(found[0], third);
  EXPECT_EQ(cuGraphRemoveDependencies(made, &second, &third, nullptr, 1), CUDA_ERROR_INVALID_VALUE)
      << "that edge has data";
  EXPECT_EQ(cuGraphRemoveDependencies(made, from, to, data, 2), CUDA_SUCCESS);
  EXPECT_TRUE(edges(made).from.empty());
  std::vector<CUgraphNode> roots(8);
  count = roots.size();
  ASSERT_EQ(cuGraphGetRootNodes(made, roots.data(), &count), CUDA_SUCCESS);
  EXPECT_EQ(count, 4U);
  EXPECT_EQ(roots[7], nullptr);
}

TEST_F(GraphNodesTest, NodesRunInTheOrderOfTheirEdgesNotOfTheirAddition) {
  const CUgraph made = graph();
  const CUgraphNode late = add(made, 2);
  const CUgraphNode early = add(made, 1, {}, 300);
  ASSERT_EQ(cuGraphAddDependencies(made, &early, &late, nullptr, 1), CUDA_SUCCESS);
  launch(instantiate(made));
  EXPECT_EQ(log(), (Values{1, 2}));
  ASSERT_EQ(cuGraphAddDependencies(made, &late, &early, nullptr, 1), CUDA_SUCCESS);
  CUgraphExec exec = nullptr;
  CUDA_GRAPH_INSTANTIATE_PARAMS params{};
  EXPECT_EQ(cuGraphInstantiateWithParams(&exec, made, &params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(params.result_out, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
  EXPECT_NE(params.hErrNode_out, nullptr);
}

TEST_F(GraphNodesTest, MemoryNodesForbidClonesDeletionAndASecondInstance) {
  const CUgraph made = graph();
  CUdeviceptr address = 0;
  const CUgraphNode allocation = add_allocation(made, address);
  CUgraphNode freed = nullptr;
  const CUgraphNode kernel = add(made, 1, {allocation});
  ASSERT_EQ(cuGraphAddMemFreeNode(&freed, made, &kernel, 1, address), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphAddMemFreeNode(&freed, made, &kernel, 1, address), CUDA_ERROR_INVALID_VALUE) << "twice";
  CUgraph copy = nullptr;
  EXPECT_NE(cuGraphClone(&copy, made), CUDA_SUCCESS);
  EXPECT_NE(cuGraphDestroyNode(kernel), CUDA_SUCCESS);
  CUgraphNode child = nullptr;
  EXPECT_NE(cuGraphAddChildGraphNode(&child, graph(), nullptr, 0, made), CUDA_SUCCESS);
  CUgraphExec exec = instantiate(made);
  CUgraphExec another = nullptr;
  EXPECT_NE(cuGraphInstantiate(&another, made, 0), CUDA_SUCCESS);
  launch(exec);
  launch(exec);
  EXPECT_EQ(log(), (Values{1, 1}));
  ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  exec = instantiate(made);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, WhatALaunchAllocatesMustBeFreedBeforeTheNext) {
  const CUgraph made = graph();
  CUdeviceptr address = 0;
  add_allocation(made, address);
  const CUgraphExec exec = instantiate(made);
  EXPECT_EQ(cuMemFreeAsync(address, nullptr), CUDA_ERROR_INVALID_VALUE) << "not allocated yet";
  launch(exec);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFreeAsync(address, nullptr), CUDA_SUCCESS);
  launch(exec);
  ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  const CUgraphExec freeing = instantiate(made, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
  launch(freeing);
  launch(freeing);
}

TEST_F(GraphNodesTest, ARefusedNodeTakesNothingAlong) {
  const CUgraph made = graph();
  const CUgraph child = graph();
  const CUgraphNode elsewhere = add(graph(), 1);
  add(child, 2);
  CUgraphNode node = nullptr;
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  EXPECT_EQ(cuGraphAddNode(&node, made, &elsewhere, nullptr, 1, &params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphAddNode(&node, made, nullptr, nullptr, 0, &params), CUDA_SUCCESS) << "the graph is still there";
  params = {};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.type = CU_GRAPH_COND_TYPE_IF;
  params.conditional.size = 1;
  ASSERT_EQ(cuGraphConditionalHandleCreate(&params.conditional.handle, made, context_, 1, CU_GRAPH_COND_ASSIGN_DEFAULT),
            CUDA_SUCCESS);
  EXPECT_EQ(cuGraphAddNode(&node, made, &elsewhere, nullptr, 1, &params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphAddNode(&node, made, nullptr, nullptr, 0, &params), CUDA_SUCCESS) << "the condition is still free";
  add(params.conditional.phGraph_out[0], 3);
  launch(instantiate(made));
  EXPECT_EQ(log(), (Values{2, 3}));
}

TEST_F(GraphNodesTest, ConditionalNodesForbidClones) {
  const CUgraph made = graph();
  CUgraphConditionalHandle handle = 0;
  ASSERT_EQ(cuGraphConditionalHandleCreate(&handle, made, context_, 0, CU_GRAPH_COND_ASSIGN_DEFAULT), CUDA_SUCCESS);
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.handle = handle;
  params.conditional.type = CU_GRAPH_COND_TYPE_IF;
  params.conditional.size = 1;
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddNode(&node, made, nullptr, nullptr, 0, &params), CUDA_SUCCESS);
  add(params.conditional.phGraph_out[0], 5);
  CUgraph copy = nullptr;
  EXPECT_NE(cuGraphClone(&copy, made), CUDA_SUCCESS);
  launch(instantiate(made));
  EXPECT_TRUE(log().empty());
}

TEST_F(GraphNodesTest, ConditionalNodesRunWhatTheirConditionsSay) {
  const auto conditional = [&](CUgraph to, CUgraphConditionalHandle handle, CUgraphConditionalNodeType type,
                               unsigned size, std::vector<CUgraphNode> after, CUgraphNode* node) {
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.conditional.handle = handle;
    params.conditional.type = type;
    params.conditional.size = size;
    EXPECT_EQ(cuGraphAddNode(node, to, after.data(), nullptr, after.size(), &params), CUDA_SUCCESS);
    return std::vector<CUgraph>(params.conditional.phGraph_out, params.conditional.phGraph_out + size);
  };
  const auto kernel = [&](CUgraph to, const char* name, std::vector<void*> params, std::vector<CUgraphNode> after) {
    CUDA_KERNEL_NODE_PARAMS with{};
    with.func = function(name);
    with.gridDimX = with.gridDimY = with.gridDimZ = with.blockDimX = with.blockDimY = with.blockDimZ = 1;
    with.kernelParams = params.data();
    CUgraphNode made = nullptr;
    EXPECT_EQ(cuGraphAddKernelNode(&made, to, after.data(), after.size(), &with), CUDA_SUCCESS);
    return made;
  };
  const CUgraph made = graph();
  CUgraphConditionalHandle loops = 0;
  CUgraphConditionalHandle choice = 0;
  CUgraphConditionalHandle truth = 0;
  ASSERT_EQ(cuGraphConditionalHandleCreate(&loops, made, context_, 1, CU_GRAPH_COND_ASSIGN_DEFAULT), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphConditionalHandleCreate(&choice, made, context_, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphConditionalHandleCreate(&truth, made, context_, 0, 0), CUDA_SUCCESS);
  CUdeviceptr counter = 0;
  ASSERT_EQ(cuMemAlloc(&counter, 8), CUDA_SUCCESS);
  CUgraphNode loop = nullptr;
  const auto body = conditional(made, loops, CU_GRAPH_COND_TYPE_WHILE, 1, {add(made, 1)}, &loop);
  kernel(body[0], "countdown", {&loops, &counter}, {add(body[0], 2)});
  std::uint32_t chosen = 2;
  const CUgraphNode set = kernel(made, "condition", {&choice, &chosen}, {loop});
  const CUgraphNode set_too = kernel(made, "condition", {&truth, &chosen}, {set});
  CUgraphNode switched = nullptr;
  const auto cases = conditional(made, choice, CU_GRAPH_COND_TYPE_SWITCH, 3, {set_too}, &switched);
  for (std::size_t i = 0; i < cases.size(); ++i) add(cases[i], 10 + i);
  CUgraphNode either = nullptr;
  const auto sides = conditional(made, truth, CU_GRAPH_COND_TYPE_IF, 2, {switched}, &either);
  CUgraphNodeParams again{};  // each condition decides one node
  again.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  again.conditional.handle = truth;
  again.conditional.size = 1;
  CUgraphNode refused = nullptr;
  EXPECT_EQ(cuGraphAddNode(&refused, made, nullptr, nullptr, 0, &again), CUDA_ERROR_INVALID_VALUE);
  add(sides[0], 20);
  add(sides[1], 21);
  add(made, 3, {either});
  const CUgraphExec exec = instantiate(made);
  for (const std::uint64_t turns : {3, 1}) {
    ASSERT_EQ(cuMemsetD8(cursor_, 0, 8), CUDA_SUCCESS);
    ASSERT_EQ(cuMemcpyHtoD(counter, &turns, 8), CUDA_SUCCESS);
    launch(exec);
    Values wanted{1};
    wanted.insert(wanted.end(), turns, 2);
    wanted.insert(wanted.end(), {12, 20, 3});
    EXPECT_EQ(log(), wanted);
  }
}

TEST_F(GraphNodesTest, CopiesAndFillsOfRows) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  ASSERT_EQ(cuMemsetD8(memory, 0, 64), CUDA_SUCCESS);
  const CUgraph made = graph();
  const CUDA_MEMSET_NODE_PARAMS fill{memory, 16, 0x0102, 2, 2, 2};  // two elements in each of two rows
  CUgraphNode filled = nullptr;
  ASSERT_EQ(cuGraphAddMemsetNode(&filled, made, nullptr, 0, &fill, context_), CUDA_SUCCESS);
  std::uint8_t host[64] = {};
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.srcPitch = 16;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = host;
  copy.dstPitch = 8;
  copy.WidthInBytes = 4;
  copy.Height = 2;
  copy.Depth = 1;
  CUgraphNode copied = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&copied, made, &filled, 1, &copy, context_), CUDA_SUCCESS);
  CUDA_MEMCPY3D seen{};
  ASSERT_EQ(cuGraphMemcpyNodeGetParams(copied, &seen), CUDA_SUCCESS);
  EXPECT_EQ(seen.srcDevice, memory);
  EXPECT_EQ(seen.dstHost, host);
  EXPECT_EQ(seen.WidthInBytes * seen.Height * seen.Depth, 8U);
  CUDA_MEMSET_NODE_PARAMS seen_fill{};
  ASSERT_EQ(cuGraphMemsetNodeGetParams(filled, &seen_fill), CUDA_SUCCESS);
  EXPECT_EQ(seen_fill.height, 2U);
  launch(instantiate(made));
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(std::vector<std::uint8_t>(host, host + 12),
            (std::vector<std::uint8_t>{2, 1, 2, 1, 0, 0, 0, 0, 2, 1, 2, 1}));
}

TEST_F(GraphNodesTest, EventNodesRecordAndWait) {
  const CUevent mark = event();
  const CUgraph recording = graph();
  CUgraphNode node = nullptr;
  const CUgraphNode slow = add(recording, 1, {}, 500);
  ASSERT_EQ(cuGraphAddEventRecordNode(&node, recording, &slow, 1, mark), CUDA_SUCCESS);
  CUevent found = nullptr;
  EXPECT_EQ(cuGraphEventRecordNodeGetEvent(node, &found), CUDA_SUCCESS);
  EXPECT_EQ(found, mark);
  const CUgraph waiting = graph();
  ASSERT_EQ(cuGraphAddEventWaitNode(&node, waiting, nullptr, 0, mark), CUDA_SUCCESS);
  add(waiting, 2, {node});
  const CUgraphExec records = instantiate(recording);
  const CUgraphExec waits = instantiate(waiting);
  ASSERT_EQ(cuGraphLaunch(records, stream()), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(waits, stream()), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 2}));
  EXPECT_EQ(cuEventQuery(mark), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, CapturesGoIntoAGraphThatIsThere) {
  const CUgraph made = graph();
  const CUgraphNode first = add(made, 1, {}, 300);
  const CUstream a = stream();
  ASSERT_EQ(cuStreamBeginCaptureToGraph(a, made, &first, nullptr, 1, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 2), CUDA_SUCCESS);
  // The next node shall wait for the first alone.
  CUgraphNode only = first;
  ASSERT_EQ(cuStreamUpdateCaptureDependencies(a, &only, nullptr, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 3), CUDA_SUCCESS);
  const std::vector<CUgraphNode> all = nodes(made);
  ASSERT_EQ(all.size(), 3U);
  CUgraphNode second = all[1];
  ASSERT_EQ(cuStreamUpdateCaptureDependencies(a, &second, nullptr, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES),
            CUDA_SUCCESS);
  CUgraph ended = nullptr;
  ASSERT_EQ(cuStreamEndCapture(a, &ended), CUDA_SUCCESS);
  EXPECT_EQ(ended, made);
  EXPECT_EQ(edges(made).from, (std::vector{first, first}));
  EXPECT_EQ(cuGraphDestroy(made), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, ProgrammaticLaunchesAreCapturedAsSuch) {
  const CUstream a = stream();
  ASSERT_EQ(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 1), CUDA_SUCCESS);
  std::uint64_t value = 2;
  std::uint32_t block_us = 1;
  void* params[] = {&log_, &cursor_, &value, &block_us};
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.hStream = a;
  config.attrs = &attribute;
  config.numAttrs = 1;
  ASSERT_EQ(cuLaunchKernelEx(&config, append_, params, nullptr), CUDA_SUCCESS);
  CUgraph made = nullptr;
  ASSERT_EQ(cuStreamEndCapture(a, &made), CUDA_SUCCESS);
  const Edges captured = edges(made);
  ASSERT_EQ(captured.data.size(), 1U);
  EXPECT_EQ(captured.data[0].type, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
  launch(instantiate(made));
  EXPECT_EQ(log(), (Values{1, 2}));
}

TEST_F(GraphNodesTest, InstantiationNeedsRoomOnTheDevice) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  ASSERT_EQ(cuMemGetInfo(&free_bytes, &total_bytes), CUDA_SUCCESS);
  const CUgraph made = graph();
  add(made, 1);
  const CUgraphExec exec = instantiate(made);
  std::size_t left = 0;
  ASSERT_EQ(cuMemGetInfo(&left, &total_bytes), CUDA_SUCCESS);
  EXPECT_LT(left, free_bytes);
  CUdeviceptr rest = 0;
  ASSERT_EQ(cuMemAlloc(&rest, left), CUDA_SUCCESS);
  CUgraphExec another = nullptr;
  EXPECT_EQ(cuGraphInstantiate(&another, made, 0), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(cuMemFree(rest), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  ASSERT_EQ(cuMemGetInfo(&left, &total_bytes), CUDA_SUCCESS);
  EXPECT_EQ(left, free_bytes);
}

// ---- user objects

struct Destroyed {
  int count = 0;
  CUresult call_inside = CUDA_SUCCESS;
};

void CUDA_CB destroy(void* data) {
  auto* const destroyed = static_cast<Destroyed*>(data);
  ++destroyed->count;
  int devices = 0;
  destroyed->call_inside = cuDeviceGetCount(&devices);
}

class UserObjectTest : public GraphTest {
 protected:
  CUuserObject object(unsigned references = 1) {
    CUuserObject made = nullptr;
    EXPECT_EQ(cuUserObjectCreate(&made, &destroyed_, destroy, references, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
              CUDA_SUCCESS);
    return made;
  }

  Destroyed destroyed_;
};

TEST_F(UserObjectTest, TheLastReferenceDestroys) {
  CUuserObject made = nullptr;
  EXPECT_EQ(cuUserObjectCreate(&made, nullptr, destroy, 1, 0), CUDA_ERROR_INVALID_VALUE) << "the flag is required";
  made = object(2);
  EXPECT_EQ(cuUserObjectRetain(made, 1), CUDA_SUCCESS);
  EXPECT_EQ(cuUserObjectRelease(made, 2), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 0);
  EXPECT_EQ(cuUserObjectRelease(made, 1), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 1);
  EXPECT_EQ(destroyed_.call_inside, CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(cuUserObjectRetain(made, 1), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(UserObjectTest, GraphsClonesAndExecutablesEachHoldIt) {
  const CUgraph made = graph();
  add(made, 1);
  ASSERT_EQ(cuGraphRetainUserObject(made, object(), 1, CU_GRAPH_USER_OBJECT_MOVE), CUDA_SUCCESS);
  const CUgraph copy = cloned(made);
  const CUgraphExec exec = instantiate(made);
  EXPECT_EQ(cuGraphDestroy(made), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 0);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 0) << "the clone has it";
  EXPECT_EQ(cuGraphDestroy(copy), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 1);
}

TEST_F(UserObjectTest, ALaunchInFlightHoldsIt) {
  const CUgraph made = graph();
  add(made, 1, {}, 20'000);
  const CUuserObject held = object();
  ASSERT_EQ(cuGraphRetainUserObject(made, held, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuUserObjectRelease(held, 1), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(made);
  ASSERT_EQ(cuGraphDestroy(made), CUDA_SUCCESS);
  launch(exec);
  ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 0);
  EXPECT_EQ(log(), (Values{1}));
  EXPECT_EQ(destroyed_.count, 1);
}

TEST_F(UserObjectTest, AGraphGivesBackWhatItHolds) {
  const CUgraph made = graph();
  const CUuserObject held = object();
  ASSERT_EQ(cuGraphRetainUserObject(made, held, 2, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphReleaseUserObject(made, held, 3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphReleaseUserObject(made, held, 2), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 0);
  EXPECT_EQ(cuUserObjectRelease(held, 1), CUDA_SUCCESS);
  EXPECT_EQ(destroyed_.count, 1);
}

// As in driver 580: what a graph shares with its clones is not synchronised.
TEST_F(GraphNodesTest, TwoThreadsThatCloneAndDestroyOneGraphsClonesCrash) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto crashes = [&] {
    const CUgraph original = graph();
    add(original, 1);
    const auto clone_and_destroy = [&] {
      for (int i = 0; i < 100'000; ++i) cuGraphDestroy(cloned(original));
    };
    std::thread other(clone_and_destroy);
    clone_and_destroy();
    other.join();
    _exit(0);
  };
  EXPECT_EXIT(crashes(), testing::KilledBySignal(SIGABRT), "two threads clone or destroy a graph and its clones");
}

TEST_F(GraphNodesTest, ACloneOfACloneAndOneWhoseOriginalIsGoneAreFree) {
  const CUgraph original = graph();
  add(original, 1);
  const CUgraph between = cloned(original);
  const auto clone_and_destroy = [](CUgraph of) {
    for (int i = 0; i < 2'000; ++i) EXPECT_EQ(cuGraphDestroy(cloned(of)), CUDA_SUCCESS);
  };
  std::thread other([&] { clone_and_destroy(between); });
  clone_and_destroy(original);
  other.join();
  const CUgraph clones[] = {cloned(original), cloned(original)};
  EXPECT_EQ(cuGraphDestroy(original), CUDA_SUCCESS);
  std::thread last([&] { EXPECT_EQ(cuGraphDestroy(clones[0]), CUDA_SUCCESS); });
  EXPECT_EQ(cuGraphDestroy(clones[1]), CUDA_SUCCESS);
  last.join();
}

}  // namespace
}  // namespace cudasched::simulated_driver
