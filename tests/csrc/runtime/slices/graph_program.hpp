// A program with graphs, over the simulated driver: each kernel node leaves its number in a log, in the order in which
// the device ran them.
#pragma once

#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/other_client.hpp"

namespace cudasched::test {

class GraphProgram : public ::testing::Test {
 public:
  using When = runtime::SliceSettings::When;

  GraphProgram() { configure(When::kAlways); }
  ~GraphProgram() override {
    for (CUgraphExec exec : execs_) call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
    for (CUgraph graph : graphs_) call<CUresult(CUgraph)>("cuGraphDestroy")(graph);
    runtime::engine().slices().configure({});
  }

  static void configure(When when, std::int64_t slice_ns = 30'000,
                        std::uint64_t most_bytes = runtime::SliceSettings{}.most_bytes) {
    slices().configure({.when = when,
                        .slice_ns = slice_ns,
                        .most_bytes = most_bytes,
                        .most_build_ns = 60 * kNsPerSecond});  // against a hang alone: sanitizers take their time
  }
  static void configure_looks(int idle_looks, std::int64_t look_ns) {
    slices().configure({.when = When::kAlways,
                        .slice_ns = 30'000,
                        .most_build_ns = 60 * kNsPerSecond,
                        .look_ns = look_ns,
                        .idle_looks = idle_looks});
  }
  static runtime::Slices& slices() { return runtime::engine().slices(); }

  CUgraph new_graph() {
    CUgraph graph = nullptr;
    Program::check(call<CUresult(CUgraph*, unsigned)>("cuGraphCreate")(&graph, 0));
    return graphs_.emplace_back(graph);
  }

  // What a kernel node is given: it appends `value`.
  struct Parameters {
    std::uint64_t* values;
    std::uint64_t* count;
    std::uint64_t value;
    void* list[3] = {&values, &count, &value};
    CUDA_KERNEL_NODE_PARAMS node{};

    Parameters(const Program& program, std::uint64_t number, CUfunction function = nullptr)
        : values(program.log() + 1), count(program.log()), value(number) {
      node.func = function != nullptr ? function : program.function();
      node.gridDimX = 132;
      node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1;
      node.blockDimX = 64;
      node.kernelParams = list;
    }
    Parameters(const Parameters&) = delete;
    Parameters& operator=(const Parameters&) = delete;

    CUDA_KERNEL_NODE_PARAMS_v1 first_version() const {
      return {node.func,      node.gridDimX,  node.gridDimY,       node.gridDimZ,     node.blockDimX,
              node.blockDimY, node.blockDimZ, node.sharedMemBytes, node.kernelParams, nullptr};
    }
    CUgraphNodeParams of_any_node() const {
      CUgraphNodeParams any{};
      any.type = CU_GRAPH_NODE_TYPE_KERNEL;
      any.kernel.func = node.func;
      any.kernel.gridDimX = node.gridDimX;
      any.kernel.gridDimY = any.kernel.gridDimZ = any.kernel.blockDimY = any.kernel.blockDimZ = 1;
      any.kernel.blockDimX = node.blockDimX;
      any.kernel.kernelParams = node.kernelParams;
      return any;
    }
  };

  // The kernel `name` of a module made of this line of an image.
  static CUfunction load(const std::string& line, const char* name) {
    return Program::find(Program::load(("cudasched-sim 1\n" + line + "\n").c_str()), name);
  }

  // Of the program's function, unless another one is given.
  CUgraphNode kernel(CUgraph graph, std::uint64_t value, const std::vector<CUgraphNode>& after = {},
                     CUfunction function = nullptr) {
    const Parameters parameters(program_, value, function);
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&node, graph, after.data(),
                                                                                   after.size(), &parameters.node));
    return node;
  }

  // Kernels one behind another, with values from `first` on.
  std::vector<CUgraphNode> chain(CUgraph graph, std::uint64_t first, std::uint64_t count,
                                 CUfunction function = nullptr) {
    std::vector<CUgraphNode> nodes;
    for (std::uint64_t i = 0; i < count; ++i) {
      nodes.push_back(kernel(graph, first + i, nodes.empty() ? nodes : std::vector{nodes.back()}, function));
    }
    return nodes;
  }
  CUgraph chain_graph(std::uint64_t first, std::uint64_t count, CUfunction function = nullptr) {
    CUgraph graph = new_graph();
    chain(graph, first, count, function);
    return graph;
  }

  CUgraphNode child(CUgraph graph, CUgraph of, const std::vector<CUgraphNode>& after = {}) {
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddChildGraphNode)>("cuGraphAddChildGraphNode")(&node, graph, after.data(),
                                                                                        after.size(), of));
    return node;
  }

  // A fill, a copy, or a function of the host.
  CUgraphNode add(CUgraph graph, const CUDA_MEMSET_NODE_PARAMS& fill, CUgraphNode after) {
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddMemsetNode)>("cuGraphAddMemsetNode")(&node, graph, &after, 1, &fill,
                                                                                program_.context()));
    return node;
  }
  CUgraphNode add(CUgraph graph, const CUDA_MEMCPY3D& copy, CUgraphNode after) {
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddMemcpyNode)>("cuGraphAddMemcpyNode")(&node, graph, &after, 1, &copy,
                                                                                program_.context()));
    return node;
  }
  CUgraphNode add(CUgraph graph, const CUDA_HOST_NODE_PARAMS& function, CUgraphNode after) {
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddHostNode)>("cuGraphAddHostNode")(&node, graph, &after, 1, &function));
    return node;
  }

  CUgraphExec instantiate(CUgraph graph, unsigned long long flags = 0) {
    CUgraphExec exec = nullptr;
    Program::check(call<decltype(cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags")(&exec, graph, flags));
    return execs_.emplace_back(exec);
  }
  // A graph of 40 kernels in a row, whose values begin at `first`.
  struct Chain {
    std::vector<CUgraphNode> nodes;
    CUgraphExec exec;
  };
  Chain new_chain(std::uint64_t first = 1) {
    CUgraph graph = new_graph();
    std::vector<CUgraphNode> nodes = chain(graph, first, 40);
    return {std::move(nodes), instantiate(graph)};
  }
  void destroy(CUgraphExec exec) {
    std::erase(execs_, exec);
    Program::check(call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec));
  }
  void destroy(CUgraph graph) {
    std::erase(graphs_, graph);
    Program::check(call<CUresult(CUgraph)>("cuGraphDestroy")(graph));
  }

  static CUresult launch(CUgraphExec exec, CUstream stream) {
    return call<decltype(cuGraphLaunch)>("cuGraphLaunch")(exec, stream);
  }
  CUresult launch(CUgraphExec exec) const { return launch(exec, program_.stream()); }

  // Launches it until it has slices. Best effort.
  ::testing::AssertionResult has_slices(CUgraphExec exec, std::uint64_t graphs = 1) {
    const bool came = eventually([&] {
      Program::check(launch(exec));
      Program::check(program_.synchronize());
      clear_log();
      return slices().counts().graphs_sliced >= graphs;
    });
    return came ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << "no slices";
  }

  // Fills four words, and copies them.
  static CUDA_MEMSET_NODE_PARAMS fill_of(CUdeviceptr memory) {
    CUDA_MEMSET_NODE_PARAMS fill{};
    fill.dst = memory;
    fill.elementSize = 4;
    fill.width = 4;
    fill.height = 1;
    return fill;
  }
  static CUDA_MEMCPY3D copy_of(CUdeviceptr memory) {
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    copy.WidthInBytes = 16;
    copy.Height = copy.Depth = 1;
    return copy;
  }

  // Changes of executable graphs.
  static CUresult update(CUgraphExec exec, CUgraph graph) {
    CUgraphExecUpdateResultInfo info{};
    return call<decltype(cuGraphExecUpdate)>("cuGraphExecUpdate_v2")(exec, graph, &info);
  }
  void set_value(CUgraphExec exec, CUgraphNode node, std::uint64_t value) {
    const Parameters parameters(program_, value);
    Program::check(call<decltype(cuGraphExecKernelNodeSetParams)>("cuGraphExecKernelNodeSetParams_v2")(
        exec, node, &parameters.node));
  }
  static void enable(CUgraphExec exec, CUgraphNode node, bool enabled) {
    Program::check(call<decltype(cuGraphNodeSetEnabled)>("cuGraphNodeSetEnabled")(exec, node, enabled ? 1 : 0));
  }
  // The child graph becomes another chain.
  void set_child(CUgraphExec exec, CUgraphNode node, std::uint64_t first, std::uint64_t count = 10) {
    Program::check(call<decltype(cuGraphExecChildGraphNodeSetParams)>("cuGraphExecChildGraphNodeSetParams")(
        exec, node, chain_graph(first, count)));
  }

  void clear_log() { std::fill_n(program_.log(), Program::kLogCapacity + 1, 0); }

  // The values in the order in which the device ran them.
  std::vector<std::uint64_t> ran() {
    Program::check(call<CUresult()>("cuCtxSynchronize")());
    std::vector<std::uint64_t> values;
    for (std::uint64_t i = 0; i < program_.ran(); ++i) values.push_back(program_.value(i));
    return values;
  }
  // And forgets them.
  std::vector<std::uint64_t> take_log() {
    std::vector<std::uint64_t> values = ran();
    clear_log();
    return values;
  }
  static void append(std::vector<std::uint64_t>& values, const std::vector<std::uint64_t>& more) {
    values.insert(values.end(), more.begin(), more.end());
  }
  static std::vector<std::uint64_t> numbers(std::uint64_t first, std::uint64_t count, int times = 1) {
    std::vector<std::uint64_t> values;
    for (int round = 0; round < times; ++round) {
      for (std::uint64_t i = 0; i < count; ++i) values.push_back(first + i);
    }
    return values;
  }

  Program program_;
  std::vector<CUgraph> graphs_;
  std::vector<CUgraphExec> execs_;
};

}  // namespace cudasched::test
