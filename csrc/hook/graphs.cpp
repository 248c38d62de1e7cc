#include "hook/graphs.hpp"

#include <cuda.h>

#include <array>

#include "driver/driver.hpp"
#include "hook/offload.hpp"
#include "runtime/engine.hpp"

namespace cudasched::hook {
namespace {

using driver::table;

void note(CUgraphExec exec, CUgraph graph) noexcept {
  runtime::engine().note_graph(exec, graph);
  const runtime::GraphFacts* const facts = runtime::engine().graphs().find(exec);
  Offload::instantiated(exec, facts != nullptr && facts->plain);
}

CUresult instantiate(CUgraphExec* exec, CUgraph graph, unsigned long long flags) noexcept {
  const CUresult status = table().graph_instantiate(exec, graph, flags);
  if (status == CUDA_SUCCESS && exec != nullptr) note(*exec, graph);
  return status;
}

template <bool kPerThread>
CUresult instantiate_with_parameters(CUgraphExec* exec, CUgraph graph,
                                     CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) noexcept {
  const CUresult status = table().graph_instantiate_with_parameters.get<kPerThread>()(exec, graph, parameters);
  if (status == CUDA_SUCCESS && exec != nullptr) note(*exec, graph);
  return status;
}

CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* result) noexcept {
  const CUresult status = table().graph_update(exec, graph, result);
  if (status == CUDA_SUCCESS) runtime::engine().note_graph(exec, graph);
  return status;
}

CUresult destroy(CUgraphExec exec) noexcept {
  runtime::engine().forget_graph(exec);
  return table().graph_destroy(exec);
}

}  // namespace

std::span<const EntryPoint> graph_entry_points() noexcept {
  static const std::array points{
      EntryPoint{"cuGraphInstantiate", 12000, address(&instantiate), nullptr, "cuGraphInstantiateWithFlags"},
      EntryPoint{"cuGraphInstantiateWithFlags", 11040, address(&instantiate), nullptr, "cuGraphInstantiateWithFlags"},
      EntryPoint{"cuGraphInstantiateWithParams", 12000, address(&instantiate_with_parameters<false>),
                 address(&instantiate_with_parameters<true>), "cuGraphInstantiateWithParams"},
      EntryPoint{"cuGraphExecUpdate", 12000, address(&update), nullptr, "cuGraphExecUpdate_v2"},
      EntryPoint{"cuGraphExecDestroy", 10000, address(&destroy), nullptr, "cuGraphExecDestroy"},
  };
  return points;
}

}  // namespace cudasched::hook
