// Graphs made by hand, whose kernels write down that they ran.
#pragma once

#include "simulated_driver/fixture.hpp"

namespace cudasched::simulated_driver {

using Values = std::vector<std::uint64_t>;

class GraphTest : public DoubleTest {
 protected:
  static CUgraph graph() {
    CUgraph made = nullptr;
    EXPECT_EQ(cuGraphCreate(&made, 0), CUDA_SUCCESS);
    return made;
  }

  // Calls use(params) with what makes a kernel append `value` to the log.
  template <class Use>
  CUresult with_kernel(std::uint64_t value, Use use, std::uint32_t block_us = 20) {
    void* params[] = {&log_, &cursor_, &value, &block_us};
    CUDA_KERNEL_NODE_PARAMS node{};
    node.func = append_;
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1;
    node.kernelParams = params;
    return use(node);
  }

  CUgraphNode add(CUgraph to, std::uint64_t value, std::vector<CUgraphNode> after = {}, std::uint32_t block_us = 20) {
    CUgraphNode made = nullptr;
    const auto use = [&](const CUDA_KERNEL_NODE_PARAMS& node) {
      return cuGraphAddKernelNode(&made, to, after.data(), after.size(), &node);
    };
    EXPECT_EQ(with_kernel(value, use, block_us), CUDA_SUCCESS);
    return made;
  }

  static CUgraphNode add_child(CUgraph to, CUgraph child, std::vector<CUgraphNode> after = {}) {
    CUgraphNode made = nullptr;
    EXPECT_EQ(cuGraphAddChildGraphNode(&made, to, after.data(), after.size(), child), CUDA_SUCCESS);
    return made;
  }

  static CUgraphNode add_host(CUgraph to, CUhostFn call, void* data, std::vector<CUgraphNode> after = {}) {
    const CUDA_HOST_NODE_PARAMS params{call, data};
    CUgraphNode made = nullptr;
    EXPECT_EQ(cuGraphAddHostNode(&made, to, after.data(), after.size(), &params), CUDA_SUCCESS);
    return made;
  }

  static CUgraphExec instantiate(CUgraph from, unsigned long long flags = 0) {
    CUgraphExec exec = nullptr;
    EXPECT_EQ(cuGraphInstantiate(&exec, from, flags), CUDA_SUCCESS);
    return exec;
  }

  static CUgraph cloned(CUgraph from) {
    CUgraph made = nullptr;
    EXPECT_EQ(cuGraphClone(&made, from), CUDA_SUCCESS);
    return made;
  }

  static CUgraphNode in_clone(CUgraphNode node, CUgraph of) {
    CUgraphNode found = nullptr;
    EXPECT_EQ(cuGraphNodeFindInClone(&found, node, of), CUDA_SUCCESS);
    return found;
  }

  static std::vector<CUgraphNode> nodes(CUgraph of) {
    std::size_t count = 0;
    EXPECT_EQ(cuGraphGetNodes(of, nullptr, &count), CUDA_SUCCESS);
    std::vector<CUgraphNode> found(count);
    if (count > 0) {
      EXPECT_EQ(cuGraphGetNodes(of, found.data(), &count), CUDA_SUCCESS);
    }
    return found;
  }

  static CUgraphExecUpdateResultInfo update(CUgraphExec exec, CUgraph with) {
    CUgraphExecUpdateResultInfo info{};
    const CUresult status = cuGraphExecUpdate(exec, with, &info);
    EXPECT_EQ(status == CUDA_SUCCESS, info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
    return info;
  }

  void launch(CUgraphExec exec) { ASSERT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS); }
};

}  // namespace cudasched::simulated_driver
