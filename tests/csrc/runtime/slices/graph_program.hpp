// A program with graphs, over the simulated driver: each kernel node leaves its number in a log, in the order in which
// the device ran them.
#pragma once

#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/other_client.hpp"

namespace cudasched::test {

template <typename Function>
Function* call(const char* name) {
  return HookedDriver::instance().function<Function>(name);
}

class GraphProgram : public ::testing::Test {
 protected:
  using When = runtime::SliceSettings::When;

  GraphProgram() { configure(When::kAlways); }
  ~GraphProgram() override {
    for (CUgraphExec exec : execs_) call<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec);
    for (CUgraph graph : graphs_) call<CUresult(CUgraph)>("cuGraphDestroy")(graph);
    runtime::engine().slices().configure({});
  }

  static void configure(When when, std::int64_t slice_ns = 30'000,
                        std::uint64_t most_bytes = runtime::SliceSettings{}.most_bytes) {
    runtime::SliceSettings settings;
    settings.when = when;
    settings.slice_ns = slice_ns;
    settings.most_bytes = most_bytes;
    settings.most_build_ns = 60 * kNsPerSecond;  // against a hang alone: sanitizers take their time
    runtime::engine().slices().configure(settings);
  }
  // The builder looks every 20 ms.
  static void configure_looks(int idle_looks, std::int64_t look_ns = 20 * kNsPerMs) {
    runtime::SliceSettings settings;
    settings.when = When::kAlways;
    settings.slice_ns = 30'000;
    settings.most_build_ns = 60 * kNsPerSecond;
    settings.look_ns = look_ns;
    settings.idle_looks = idle_looks;
    runtime::engine().slices().configure(settings);
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

    Parameters(const Program& program, std::uint64_t number)
        : values(program.log() + 1), count(program.log()), value(number) {
      node.func = program.function();
      node.gridDimX = 132;
      node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1;
      node.blockDimX = 64;
      node.kernelParams = list;
    }
    Parameters(const Parameters&) = delete;
    Parameters& operator=(const Parameters&) = delete;
  };

  CUgraphNode kernel(CUgraph graph, std::uint64_t value, const std::vector<CUgraphNode>& after = {}) {
    Parameters parameters(program_, value);
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddKernelNode)>("cuGraphAddKernelNode_v2")(&node, graph, after.data(),
                                                                                   after.size(), &parameters.node));
    return node;
  }

  // Kernels one behind another, with values from `first` on.
  std::vector<CUgraphNode> chain(CUgraph graph, std::uint64_t first, std::uint64_t count) {
    std::vector<CUgraphNode> nodes;
    for (std::uint64_t i = 0; i < count; ++i) {
      nodes.push_back(kernel(graph, first + i, nodes.empty() ? nodes : std::vector{nodes.back()}));
    }
    return nodes;
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
  // Of graphs of 40 kernels in a row, whose values begin there.
  std::vector<CUgraphExec> chains(const std::vector<std::uint64_t>& firsts) {
    std::vector<CUgraphExec> made;
    for (const std::uint64_t first : firsts) {
      CUgraph graph = new_graph();
      chain(graph, first, 40);
      made.push_back(instantiate(graph));
    }
    return made;
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

  void clear_log() { std::fill_n(program_.log(), Program::kLogCapacity + 1, 0); }

  // The values in the order in which the device ran them.
  std::vector<std::uint64_t> ran() {
    Program::check(call<CUresult()>("cuCtxSynchronize")());
    std::vector<std::uint64_t> values;
    for (std::uint64_t i = 0; i < program_.ran(); ++i) values.push_back(program_.value(i));
    return values;
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
