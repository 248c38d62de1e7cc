// Stream capture and graphs.
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "simulated_driver/fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

using Values = std::vector<std::uint64_t>;

class CaptureTest : public DoubleTest {
 protected:
  static void begin(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) {
    ASSERT_EQ(cuStreamBeginCapture(stream, mode), CUDA_SUCCESS);
  }

  static CUgraph end(CUstream stream) {
    CUgraph graph = nullptr;
    EXPECT_EQ(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    return graph;
  }

  static void end_invalidated(CUstream stream) {
    CUgraph graph = reinterpret_cast<CUgraph>(1);
    EXPECT_EQ(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(status(stream), CU_STREAM_CAPTURE_STATUS_NONE);
  }

  static CUstreamCaptureStatus status(CUstream stream) {
    CUstreamCaptureStatus found{};
    EXPECT_EQ(cuStreamIsCapturing(stream, &found), CUDA_SUCCESS);
    return found;
  }

  static CUgraphExec instantiate(CUgraph graph) {
    CUgraphExec exec = nullptr;
    EXPECT_EQ(cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
    return exec;
  }

  static std::size_t node_count(CUgraph graph) {
    std::size_t count = 0;
    EXPECT_EQ(cuGraphGetNodes(graph, nullptr, &count), CUDA_SUCCESS);
    return count;
  }
};

TEST_F(CaptureTest, RecordsInsteadOfRunningAndReplays) {
  const CUstream a = stream();
  begin(a);
  EXPECT_EQ(status(a), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_EQ(append(a, i), CUDA_SUCCESS);
  const CUgraph graph = end(a);
  EXPECT_TRUE(log().empty());
  EXPECT_EQ(node_count(graph), 5U);
  const CUgraphExec exec = instantiate(graph);
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  Values expected;
  for (int round = 0; round < 300; ++round) {
    ASSERT_EQ(cuGraphLaunch(exec, a), CUDA_SUCCESS);
    for (std::uint64_t i = 0; i < 5; ++i) expected.push_back(i);
  }
  EXPECT_EQ(log(), expected);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphLaunch(exec, a), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(CaptureTest, OneExecutableRunsOneAfterAnotherAcrossStreams) {
  const CUstream a = stream();
  const CUstream b = stream();
  begin(a);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(append(a, i, 50), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(end(a));
  for (int round = 0; round < 50; ++round) ASSERT_EQ(cuGraphLaunch(exec, round % 2 == 0 ? a : b), CUDA_SUCCESS);
  const Values entries = log();
  ASSERT_EQ(entries.size(), 150U);
  for (std::size_t i = 0; i < entries.size(); ++i) ASSERT_EQ(entries[i], i % 3);
}

TEST_F(CaptureTest, ForksAndJoinsByEvents) {
  const CUstream a = stream();
  const CUstream b = stream();
  const CUevent fork_event = event();
  const CUevent join_event = event();
  begin(a);
  ASSERT_EQ(append(a, 0, 100), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(fork_event, a), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(b, fork_event, 0), CUDA_SUCCESS);
  EXPECT_EQ(status(b), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  ASSERT_EQ(append(b, 1, 10), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 2, 1000), CUDA_SUCCESS);
  ASSERT_EQ(cuEventRecord(join_event, b), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamWaitEvent(a, join_event, 0), CUDA_SUCCESS);
  ASSERT_EQ(append(a, 3, 10), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(end(a));
  EXPECT_EQ(status(b), CU_STREAM_CAPTURE_STATUS_NONE);
  for (int round = 0; round < 3; ++round) ASSERT_EQ(cuGraphLaunch(exec, a), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3})) << "the branches run side by side";
}

TEST_F(CaptureTest, CopiesMemsetsAndHostFunctionsAreNodes) {
  const CUstream a = stream();
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  void* pinned = nullptr;
  ASSERT_EQ(cuMemAllocHost(&pinned, 64), CUDA_SUCCESS);
  int calls = 0;
  begin(a);
  ASSERT_EQ(cuMemsetD8Async(memory, 5, 64, a), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoHAsync(pinned, memory, 64, a), CUDA_SUCCESS);
  ASSERT_EQ(cuLaunchHostFunc(a, [](void* count) { ++*static_cast<int*>(count); }, &calls), CUDA_SUCCESS);
  const CUgraph graph = end(a);
  std::vector<CUgraphNode> nodes(3);
  std::size_t count = nodes.size();
  ASSERT_EQ(cuGraphGetNodes(graph, nodes.data(), &count), CUDA_SUCCESS);
  std::vector<CUgraphNodeType> types(3);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(cuGraphNodeGetType(nodes[i], &types[i]), CUDA_SUCCESS);
  EXPECT_EQ(types, (std::vector{CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_HOST}));
  const CUgraphExec exec = instantiate(graph);
  ASSERT_EQ(cuGraphUpload(exec, a), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(exec, a), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamSynchronize(a), CUDA_SUCCESS);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(static_cast<unsigned char*>(pinned)[63], 5);
}

TEST_F(CaptureTest, LookingAtACapturingStreamInvalidates) {
  const CUstream a = stream();
  const CUevent mark = event();
  const auto attempt = [&](auto call, CUresult expected) {
    begin(a);
    ASSERT_EQ(cuEventRecord(mark, a), CUDA_SUCCESS);
    EXPECT_EQ(call(), expected);
    EXPECT_EQ(status(a), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EXPECT_EQ(append(a, 1), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    end_invalidated(a);
  };
  attempt([&] { return cuStreamSynchronize(a); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  attempt([&] { return cuStreamQuery(a); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  attempt([&] { return cuCtxSynchronize(); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  attempt([&] { return cuEventQuery(mark); }, CUDA_ERROR_CAPTURED_EVENT);
  attempt([&] { return cuEventSynchronize(mark); }, CUDA_ERROR_CAPTURED_EVENT);
  CUdeviceptr memory = 0;
  attempt([&] { return cuMemAlloc(&memory, 16); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_TRUE(log().empty());
}

TEST_F(CaptureTest, LegacyStreamBesideABlockingCaptureIsImplicit) {
  const CUstream a = stream(CU_STREAM_DEFAULT);
  begin(a, CU_STREAM_CAPTURE_MODE_RELAXED);
  CUstreamCaptureStatus found{};
  EXPECT_EQ(cuStreamIsCapturing(nullptr, &found), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(status(a), CU_STREAM_CAPTURE_STATUS_ACTIVE) << "asking is safe";
  EXPECT_EQ(append(nullptr, 1), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  end_invalidated(a);
  const CUstream free_stream = stream(CU_STREAM_NON_BLOCKING);
  begin(free_stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(append(nullptr, 2), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  end(free_stream);
}

TEST_F(CaptureTest, ModesSayWhoMayAllocate) {
  const CUstream a = stream();
  CUdeviceptr memory = 0;
  const auto elsewhere = [&](CUstreamCaptureMode mode) {
    CUresult result = CUDA_SUCCESS;
    std::thread([&] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      EXPECT_EQ(cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
      result = cuMemAlloc(&memory, 16);
    }).join();
    return result;
  };
  begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_EQ(elsewhere(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  EXPECT_EQ(elsewhere(CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  EXPECT_EQ(elsewhere(CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_invalidated(a);
  begin(a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  EXPECT_EQ(elsewhere(CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  ASSERT_EQ(cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_EQ(cuMemAlloc(&memory, 16), CUDA_SUCCESS) << "this thread asked for it";
  ASSERT_EQ(cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAlloc(&memory, 16), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  end_invalidated(a);
  begin(a, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(cuMemAlloc(&memory, 16), CUDA_SUCCESS);
  end(a);
}

TEST_F(CaptureTest, EndErrors) {
  const CUstream a = stream();
  const CUstream b = stream();
  const CUevent mark = event();
  CUgraph graph = nullptr;
  EXPECT_EQ(cuStreamEndCapture(a, &graph), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  begin(a);
  EXPECT_EQ(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_ILLEGAL_STATE);
  std::thread([&] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  }).join();
  end(a);

  const auto fork_to_b = [&] {
    begin(a);
    ASSERT_EQ(append(a, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuEventRecord(mark, a), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamWaitEvent(b, mark, 0), CUDA_SUCCESS);
    ASSERT_EQ(append(b, 1), CUDA_SUCCESS);
  };
  fork_to_b();
  EXPECT_EQ(cuStreamEndCapture(a, &graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  EXPECT_EQ(status(b), CU_STREAM_CAPTURE_STATUS_NONE);
  fork_to_b();
  EXPECT_EQ(cuStreamEndCapture(b, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  end_invalidated(a);
}

TEST_F(CaptureTest, IsolationAndMerge) {
  const CUstream a = stream();
  const CUstream b = stream();
  const CUevent outside = event();
  const CUevent inside = event();
  ASSERT_EQ(cuEventRecord(outside, b), CUDA_SUCCESS);
  begin(a);
  EXPECT_EQ(cuStreamWaitEvent(a, outside, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  end_invalidated(a);
  begin(a);
  begin(b);
  ASSERT_EQ(cuEventRecord(inside, a), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamWaitEvent(b, inside, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  end_invalidated(a);
  end_invalidated(b);
}

TEST_F(CaptureTest, GraphsByHandAndUpdates) {
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  std::uint64_t value = 1;
  std::uint32_t block_us = 5;
  void* params[] = {&log_, &cursor_, &value, &block_us};
  CUDA_KERNEL_NODE_PARAMS node{};
  node.func = append_;
  node.gridDimX = node.gridDimY = node.gridDimZ = 1;
  node.blockDimX = node.blockDimY = node.blockDimZ = 1;
  node.kernelParams = params;
  CUgraphNode first = nullptr;
  CUgraphNode empty = nullptr;
  CUgraphNode second = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&first, graph, nullptr, 0, &node), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphAddEmptyNode(&empty, graph, &first, 1), CUDA_SUCCESS);
  value = 2;
  ASSERT_EQ(cuGraphAddKernelNode(&second, graph, &empty, 1, &node), CUDA_SUCCESS);
  const CUgraphNode twice[] = {first, first};
  EXPECT_EQ(cuGraphAddKernelNode(&second, graph, twice, 2, &node), CUDA_ERROR_INVALID_VALUE);
  const CUgraphExec exec = instantiate(graph);
  ASSERT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 2}));

  CUgraph changed = nullptr;
  ASSERT_EQ(cuGraphCreate(&changed, 0), CUDA_SUCCESS);
  CUgraphNode nodes[3];
  value = 8;
  ASSERT_EQ(cuGraphAddKernelNode(&nodes[0], changed, nullptr, 0, &node), CUDA_SUCCESS);
  CUgraphExecUpdateResultInfo info{};
  EXPECT_EQ(cuGraphExecUpdate(exec, changed, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  ASSERT_EQ(cuGraphAddEmptyNode(&nodes[1], changed, &nodes[0], 1), CUDA_SUCCESS);
  value = 9;
  ASSERT_EQ(cuGraphAddKernelNode(&nodes[2], changed, &nodes[1], 1, &node), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecUpdate(exec, changed, &info), CUDA_SUCCESS);
  EXPECT_EQ(info.result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(log(), (Values{1, 2, 8, 9}));
}

// More operations than a context's table holds: the launch goes in as room comes.
TEST_F(CaptureTest, GraphsMayBeLargerThanTheTable) {
  constexpr std::uint64_t kNodes = 5000;
  const CUstream a = stream();
  begin(a);
  for (std::uint64_t i = 0; i < kNodes; ++i) ASSERT_EQ(append(a, i, 1), CUDA_SUCCESS);
  const CUgraphExec exec = instantiate(end(a));
  ASSERT_EQ(cuGraphLaunch(exec, a), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphLaunch(exec, a), CUDA_SUCCESS);
  const Values entries = log();
  ASSERT_EQ(entries.size(), 2 * kNodes);
  for (std::uint64_t i = 0; i < entries.size(); ++i) ASSERT_EQ(entries[i], i % kNodes);
}

// Random graphs: every edge holds in every replay, every node runs once a launch.
TEST_F(CaptureTest, RandomGraphsKeepTheirEdges) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 25; ++round) {
    CUgraph graph = nullptr;
    ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
    const std::size_t count = 2 + random() % 60;
    std::vector<CUgraphNode> nodes(count);
    std::vector<std::set<std::size_t>> edges(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      for (std::uint64_t e = 0; i > 0 && e < random() % 4; ++e) edges[i].insert(random() % i);
      std::vector<CUgraphNode> dependencies;
      for (const std::size_t from : edges[i]) dependencies.push_back(nodes[from]);
      auto block_us = static_cast<std::uint32_t>(1 + random() % 100);
      void* params[] = {&log_, &cursor_, &i, &block_us};
      CUDA_KERNEL_NODE_PARAMS node{};
      node.func = append_;
      node.gridDimX = node.gridDimY = node.gridDimZ = 1;
      node.blockDimX = node.blockDimY = node.blockDimZ = 1;
      node.kernelParams = params;
      ASSERT_EQ(cuGraphAddKernelNode(&nodes[i], graph, dependencies.data(), dependencies.size(), &node), CUDA_SUCCESS);
    }
    CUgraphExec exec = nullptr;
    ASSERT_EQ(cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
    const std::size_t before = log().size();
    ASSERT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
    ASSERT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
    const Values entries = log();
    ASSERT_EQ(entries.size(), before + 2 * count);
    for (std::size_t launch = 0; launch < 2; ++launch) {
      std::set<std::uint64_t> seen;
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t node = entries[before + launch * count + i];
        for (const std::size_t from : edges[node]) ASSERT_TRUE(seen.contains(from)) << from << " before " << node;
        ASSERT_TRUE(seen.insert(node).second);
      }
    }
    ASSERT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    ASSERT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  }
}

}  // namespace
}  // namespace cudasched::simulated_driver
