// Entry points: stream capture and graphs.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <algorithm>
#include <unordered_map>

#include "simulate/double/capture.hpp"
#include "simulate/double/driver.hpp"

namespace cudasched::simulate {
namespace {

// Visits a graph and the child graphs in it; the first that visit() says true of.
template <class Visit>
Graph* search(Graph& graph, const Visit& visit) {
  if (visit(graph)) return &graph;
  for (const auto& node : graph.nodes) {
    if (!node->child) continue;
    if (Graph* const found = search(*node->child, visit)) return found;
  }
  return nullptr;
}

CUresult find_graph(CUgraph handle, Graph*& graph) {
  if (const auto found = driver().graphs.find(reinterpret_cast<Graph*>(handle)); found != driver().graphs.end()) {
    graph = found->second.get();
    return CUDA_SUCCESS;
  }
  for (const auto& [key, known] : driver().graphs) {
    graph = search(*known, [&](const Graph& each) { return &each == reinterpret_cast<Graph*>(handle); });
    if (graph != nullptr) return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult find_exec(CUgraphExec handle, Exec*& exec) {
  const auto found = driver().execs.find(reinterpret_cast<Exec*>(handle));
  if (found == driver().execs.end()) return CUDA_ERROR_INVALID_VALUE;
  exec = found->second.get();
  return CUDA_SUCCESS;
}

Node* find_node(CUgraphNode handle) {
  Node* found = nullptr;
  for (const auto& [key, graph] : driver().graphs) {
    search(*graph, [&](const Graph& each) {
      for (const auto& node : each.nodes) {
        if (node.get() == reinterpret_cast<Node*>(handle)) found = node.get();
      }
      return found != nullptr;
    });
  }
  return found;
}

CUgraph adopt(std::unique_ptr<Graph> graph) {
  Graph* const handle = graph.get();
  driver().graphs.emplace(handle, std::move(graph));
  return reinterpret_cast<CUgraph>(handle);
}

CUresult add_node(CUgraphNode* handle, Graph& graph, const CUgraphNode* dependencies, std::size_t count,
                  std::unique_ptr<Node> node) {
  if (count != 0 && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) {
    auto* const dependency = reinterpret_cast<Node*>(dependencies[i]);
    const bool known = std::any_of(graph.nodes.begin(), graph.nodes.end(),
                                   [&](const auto& candidate) { return candidate.get() == dependency; });
    const auto& chosen = node->dependencies;
    if (!known || std::find(chosen.begin(), chosen.end(), dependency) != chosen.end()) return CUDA_ERROR_INVALID_VALUE;
    node->dependencies.push_back(dependency);
  }
  *handle = reinterpret_cast<CUgraphNode>(node.get());
  graph.nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult instantiate_graph(CUgraphExec* handle, CUgraph graph_handle, unsigned long long flags) {
  constexpr unsigned long long kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  if (handle == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(graph_handle, graph); result != CUDA_SUCCESS) return result;
    std::unique_ptr<Exec> exec = instantiate(*graph);
    if (!exec) return CUDA_ERROR_OUT_OF_MEMORY;
    exec->flags = flags;
    *handle = reinterpret_cast<CUgraphExec>(exec.get());
    driver().execs.emplace(exec.get(), std::move(exec));
    return CUDA_SUCCESS;
  });
}

CUresult capture_info(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                      const CUgraphNode** dependencies, std::size_t* count) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::shared_ptr<Stream> stream;
    CUresult result = find_stream(handle, stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->kind == StreamKind::kLegacy) {
      for (const auto& [key, other] : stream->context->streams) {
        if (other->capture && other->blocking()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      }
    }
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!stream->capture) return CUDA_SUCCESS;
    const Capture& capture = *stream->capture;
    *status = capture.invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (capture.invalidated) return CUDA_SUCCESS;
    if (id != nullptr) *id = capture.id;
    if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(capture.graph.get());
    if (dependencies != nullptr) *dependencies = reinterpret_cast<const CUgraphNode*>(stream->capture_front.data());
    if (count != nullptr) *count = stream->capture_front.size();
    return CUDA_SUCCESS;
  });
}

CUresult said(CUgraphExecUpdateResult what, CUgraphExecUpdateResult* outcome) {
  if (outcome != nullptr) *outcome = what;
  return what == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

CUresult update_exec(CUgraphExec exec_handle, CUgraph graph_handle, CUgraphExecUpdateResult* outcome) {
  return with_driver([&](Lock&) {
    Exec* exec = nullptr;
    Graph* graph = nullptr;
    CUresult result = find_exec(exec_handle, exec);
    if (result == CUDA_SUCCESS) result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    const std::vector<FlatNode> nodes = flatten(*graph);
    if (nodes.size() != exec->nodes.size()) return said(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, outcome);
    return said(update(*exec, 0, nodes), outcome);
  });
}

std::unique_ptr<Graph> clone(const Graph& graph) {
  auto made = std::make_unique<Graph>();
  std::unordered_map<const Node*, Node*> copies;
  for (const auto& node : graph.nodes) {
    auto copy = std::make_unique<Node>();
    copy->type = node->type;
    copy->command = node->command;
    copy->priority = node->priority;
    for (const Node* dependency : node->dependencies) copy->dependencies.push_back(copies.at(dependency));
    if (node->child) copy->child = clone(*node->child);
    copies.emplace(node.get(), copy.get());
    made->nodes.push_back(std::move(copy));
  }
  return made;
}

CUresult find_kernel_node(CUgraphNode handle, CUkernelNodeAttrID attribute, Node*& node) {
  node = find_node(handle);
  if (node == nullptr || node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  return attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace
}  // namespace cudasched::simulate

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulate;

// ---- capture

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::shared_ptr<Stream> stream;
    const CUresult result = find_stream(handle, stream);
    return result == CUDA_SUCCESS ? begin_capture(stream, mode) : result;
  });
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return cuStreamBeginCapture_v2(per_thread(stream), mode);
}

CUresult cuStreamBeginCapture(CUstream stream) {
  return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
  return cuStreamBeginCapture_v2(per_thread(stream), CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *graph = nullptr;
    std::shared_ptr<Stream> stream;
    CUresult result = find_stream(handle, stream);
    if (result != CUDA_SUCCESS) return result;
    std::unique_ptr<Graph> captured;
    result = end_capture(stream, captured);
    if (result == CUDA_SUCCESS) *graph = adopt(std::move(captured));
    return result;
  });
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  return cuStreamEndCapture(per_thread(stream), graph);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus* status) {
  return cuStreamIsCapturing(per_thread(stream), status);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return capture_info(stream, status, id, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return capture_info(per_thread(stream), status, id, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** dependencies, size_t* count) {
  return capture_info(per_thread(stream), status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  if (edges != nullptr) *edges = nullptr;
  return capture_info(stream, status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                        size_t* count) {
  return cuStreamGetCaptureInfo_v3(per_thread(stream), status, id, graph, dependencies, edges, count);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return with_driver([&](Lock&) {
    std::swap(*mode, thread_capture_mode());
    return CUDA_SUCCESS;
  });
}

// ---- graphs

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
  if (graph == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *graph = adopt(std::make_unique<Graph>());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return with_driver([&](Lock&) {
    return driver().graphs.erase(reinterpret_cast<Graph*>(graph)) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  });
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                 size_t count, const CUDA_KERNEL_NODE_PARAMS* params) {
  if (handle == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Graph* graph = nullptr;
    CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    CUlaunchConfig config{};
    config.gridDimX = params->gridDimX;
    config.gridDimY = params->gridDimY;
    config.gridDimZ = params->gridDimZ;
    config.blockDimX = params->blockDimX;
    config.blockDimY = params->blockDimY;
    config.blockDimZ = params->blockDimZ;
    config.sharedMemBytes = params->sharedMemBytes;
    const CUfunction function = params->func != nullptr ? params->func : reinterpret_cast<CUfunction>(params->kern);
    KernelCommand kernel;
    result = make_kernel_command(function, context, config, params->kernelParams, params->extra, false, kernel);
    if (result != CUDA_SUCCESS) return result;
    auto node = std::make_unique<Node>();
    node->type = CU_GRAPH_NODE_TYPE_KERNEL;
    node->command = std::move(kernel);
    return add_node(handle, *graph, dependencies, count, std::move(node));
  });
}

CUresult cuGraphAddKernelNode(CUgraphNode* handle, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_KERNEL_NODE_PARAMS newer{};
  newer.func = params->func;
  newer.gridDimX = params->gridDimX;
  newer.gridDimY = params->gridDimY;
  newer.gridDimZ = params->gridDimZ;
  newer.blockDimX = params->blockDimX;
  newer.blockDimY = params->blockDimY;
  newer.blockDimZ = params->blockDimZ;
  newer.sharedMemBytes = params->sharedMemBytes;
  newer.kernelParams = params->kernelParams;
  newer.extra = params->extra;
  return cuGraphAddKernelNode_v2(handle, graph, dependencies, count, &newer);
}

CUresult cuGraphAddEmptyNode(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies, size_t count) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(graph_handle, graph); result != CUDA_SUCCESS) return result;
    return add_node(handle, *graph, dependencies, count, std::make_unique<Node>());
  });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                  size_t count, CUgraph child_handle) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    Graph* child = nullptr;
    CUresult result = find_graph(graph_handle, graph);
    if (result == CUDA_SUCCESS) result = find_graph(child_handle, child);
    if (result != CUDA_SUCCESS) return result;
    auto node = std::make_unique<Node>();
    node->type = CU_GRAPH_NODE_TYPE_GRAPH;
    node->child = clone(*child);
    return add_node(handle, *graph, dependencies, count, std::move(node));
  });
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node* const node = find_node(handle);
    if (node == nullptr || !node->child) return CUDA_ERROR_INVALID_VALUE;
    *graph = reinterpret_cast<CUgraph>(node->child.get());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue* value) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Node* node = nullptr;
    const CUresult result = find_kernel_node(handle, attribute, node);
    if (result == CUDA_SUCCESS) value->priority = node->priority;
    return result;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue* value) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Node* node = nullptr;
    const CUresult result = find_kernel_node(handle, attribute, node);
    if (result == CUDA_SUCCESS) node->priority = value->priority;
    return result;
  });
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    if (nodes != nullptr) {
      for (std::size_t i = 0; i < *count; ++i) {
        nodes[i] = i < graph->nodes.size() ? reinterpret_cast<CUgraphNode>(graph->nodes[i].get()) : nullptr;
      }
    }
    *count = nodes == nullptr ? graph->nodes.size() : std::min(*count, graph->nodes.size());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  if (type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node* const node = find_node(handle);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Node* const node = find_node(handle);
    if (node == nullptr || node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
    auto& kernel = std::get<KernelCommand>(node->command);
    node->parameters.clear();
    for (const std::uint32_t offset : kernel.spec->param_offsets) {
      node->parameters.push_back(kernel.params.data() + offset);
    }
    *params = {};
    params->func = kernel.function;
    params->gridDimX = kernel.config.gridDimX;
    params->gridDimY = kernel.config.gridDimY;
    params->gridDimZ = kernel.config.gridDimZ;
    params->blockDimX = kernel.config.blockDimX;
    params->blockDimY = kernel.config.blockDimY;
    params->blockDimZ = kernel.config.blockDimZ;
    params->sharedMemBytes = kernel.config.sharedMemBytes;
    params->kernelParams = node->parameters.data();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetEdges_v2(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
  if (count == nullptr || (from == nullptr) != (to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    std::size_t edges = 0;
    for (const auto& node : graph->nodes) {
      for (Node* const dependency : node->dependencies) {
        if (from != nullptr && edges < *count) {
          from[edges] = reinterpret_cast<CUgraphNode>(dependency);
          to[edges] = reinterpret_cast<CUgraphNode>(node.get());
          if (data != nullptr) data[edges] = {};
        }
        ++edges;
      }
    }
    *count = from == nullptr ? edges : std::min(*count, edges);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_bytes > 0) *log = '\0';
  return instantiate_graph(exec, graph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  return cuGraphInstantiate(exec, graph, error_node, log, log_bytes);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return instantiate_graph(exec, graph, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  params->hErrNode_out = nullptr;
  const CUresult result = instantiate_graph(exec, graph, params->flags);
  params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
  return result;
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  return cuGraphInstantiateWithParams(exec, graph, params);
}

CUresult cuGraphLaunch(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_driver([&](Lock& lock) {
    Exec* exec = nullptr;
    std::shared_ptr<Stream> stream;
    CUresult result = find_exec(exec_handle, exec);
    if (result == CUDA_SUCCESS) result = find_stream(stream_handle, stream);
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result == CUDA_SUCCESS) result = refuse_capturing(*stream);
    return result == CUDA_SUCCESS ? submit_exec(lock, stream, *exec) : result;
  });
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphLaunch(exec, per_thread(stream)); }

CUresult cuGraphUpload(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_driver([&](Lock& lock) {
    Exec* exec = nullptr;
    std::shared_ptr<Stream> stream;
    CUresult result = find_exec(exec_handle, exec);
    if (result == CUDA_SUCCESS) result = find_stream(stream_handle, stream);
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result == CUDA_SUCCESS) result = refuse_capturing(*stream);
    return result == CUDA_SUCCESS ? submit_command(lock, stream, {}) : result;
  });
}

CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphUpload(exec, per_thread(stream)); }

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return with_driver([&](Lock&) {
    const auto found = driver().execs.find(reinterpret_cast<Exec*>(handle));
    if (found == driver().execs.end()) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& lane : found->second->lanes) close_stream(lane);
    driver().execs.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Exec* exec = nullptr;
    const CUresult result = find_exec(handle, exec);
    if (result == CUDA_SUCCESS) *flags = exec->flags;
    return result;
  });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec_handle, CUgraphNode node_handle, CUgraph child_handle) {
  return with_driver([&](Lock&) {
    Exec* exec = nullptr;
    Graph* child = nullptr;
    CUresult result = find_exec(exec_handle, exec);
    if (result == CUDA_SUCCESS) result = find_graph(child_handle, child);
    if (result != CUDA_SUCCESS) return result;
    const auto inside = [&](const ExecNode& node) { return node.within == reinterpret_cast<Node*>(node_handle); };
    const auto first = std::find_if(exec->nodes.begin(), exec->nodes.end(), inside);
    const std::vector<FlatNode> nodes = flatten(*child);
    if (std::count_if(exec->nodes.begin(), exec->nodes.end(), inside) != static_cast<std::ptrdiff_t>(nodes.size())) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return said(update(*exec, static_cast<std::size_t>(first - exec->nodes.begin()), nodes), nullptr);
  });
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  if (info == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *info = {};
  return update_exec(exec, graph, &info->result);
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node, CUgraphExecUpdateResult* outcome) {
  if (error_node != nullptr) *error_node = nullptr;
  return update_exec(exec, graph, outcome);
}

}  // extern "C"
#pragma GCC visibility pop
