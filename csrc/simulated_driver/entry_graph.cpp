// Entry points: graphs, their nodes and edges.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <algorithm>
#include <thread>

#include "simulated_driver/driver.hpp"
#include "simulated_driver/node_params.hpp"

namespace cudasched::simulated_driver {
namespace {

CUresult find_graph(CUgraph handle, Graph*& graph) {
  graph = known_graph(handle);
  return graph == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult find_node(CUgraphNode handle, CUgraphNodeType type, Node*& node) {
  node = known_node(handle);
  return node == nullptr || node->type != type ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// For calls about a node of one type.
template <class F>
CUresult with_node(CUgraphNode handle, CUgraphNodeType type, F call) {
  return with_driver([&](Lock&) {
    Node* node = nullptr;
    const CUresult result = find_node(handle, type, node);
    return result == CUDA_SUCCESS ? call(*node) : result;
  });
}

CUgraph adopt(std::unique_ptr<Graph> graph) {
  Graph* const handle = graph.get();
  driver().graphs.emplace(handle, std::move(graph));
  return reinterpret_cast<CUgraph>(handle);
}

// Before a graph and its clones are used: other threads may call meanwhile, which shows concurrent use.
void give_way(Lock& lock) {
  lock.unlock();
  std::this_thread::yield();
  lock.lock();
}

struct Dependencies {
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* data = nullptr;
  std::size_t count = 0;
};

CUresult add_node(CUgraphNode* handle, Graph& graph, const Dependencies& after, std::unique_ptr<Node> node) {
  Node& added = graph.add(std::move(node));
  const CUresult result = add_edges(added, after.nodes, after.data, after.count);
  if (result == CUDA_SUCCESS) {
    *handle = reinterpret_cast<CUgraphNode>(&added);
  } else {
    graph.remove(added);
  }
  return result;
}

// read(Command&) fills in the node's command.
template <class Read>
CUresult add_read_node(CUgraphNode* handle, CUgraph graph_handle, const Dependencies& after, CUgraphNodeType type,
                       Read read) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    auto node = std::make_unique<Node>(type);
    result = read(node->command);
    return result == CUDA_SUCCESS ? add_node(handle, *graph, after, std::move(node)) : result;
  });
}

CUresult add_child(CUgraphNode* handle, Graph& graph, const Dependencies& after, CUgraph child_handle, bool move) {
  Graph* child = nullptr;
  if (const CUresult result = find_graph(child_handle, child); result != CUDA_SUCCESS) return result;
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_GRAPH);
  if (has_conditional_nodes(*child)) return CUDA_ERROR_NOT_SUPPORTED;
  if (move) {
    const auto owned = driver().graphs.find(child);
    if (owned == driver().graphs.end() || child == &graph) return CUDA_ERROR_INVALID_VALUE;
    node->bodies.push_back(std::move(owned->second));
    driver().graphs.erase(owned);
  } else {
    std::unique_ptr<Graph> copy;
    if (const CUresult result = clone(*child, copy); result != CUDA_SUCCESS) return result;
    node->bodies.push_back(std::move(copy));
  }
  node->bodies.front()->owner = node.get();
  return add_node(handle, graph, after, std::move(node));
}

CUresult add_allocation(CUgraphNode* handle, Graph& graph, const Dependencies& after,
                        const std::shared_ptr<Context>& context, std::size_t bytes, CUdeviceptr* address) {
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  CUresult result = make_graph_memory(context, bytes, *node);
  if (result != CUDA_SUCCESS) return result;
  const CUdeviceptr made = std::get<GraphMemoryCommand>(node->command).memory->address;
  result = add_node(handle, graph, after, std::move(node));
  if (result == CUDA_SUCCESS) *address = made;
  return result;
}

CUresult add_free(CUgraphNode* handle, Graph& graph, const Dependencies& after, CUdeviceptr address) {
  const auto found = driver().allocations.find(address);
  if (found == driver().allocations.end() || found->second.graph_memory == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool twice = std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const auto& other) {
    return other->type == CU_GRAPH_NODE_TYPE_MEM_FREE &&
           std::get<GraphMemoryCommand>(other->command).memory.get() == found->second.graph_memory;
  });
  if (twice) return CUDA_ERROR_INVALID_VALUE;
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_MEM_FREE);
  node->command = GraphMemoryCommand{found->second.graph_memory->shared_from_this()};
  return add_node(handle, graph, after, std::move(node));
}

CUresult add_conditional(CUgraphNode* handle, Graph& graph, const Dependencies& after,
                         CUDA_CONDITIONAL_NODE_PARAMS& params) {
  const unsigned most = params.type == CU_GRAPH_COND_TYPE_IF ? 2 : params.type == CU_GRAPH_COND_TYPE_WHILE ? 1 : 64;
  const bool newer = params.type == CU_GRAPH_COND_TYPE_SWITCH || params.size == 2;
  if (params.type > CU_GRAPH_COND_TYPE_SWITCH || params.size == 0 || params.size > most ||
      (newer && driver_version() < 12080)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto condition = driver().conditions.find(params.handle);
  if (condition == driver().conditions.end() || condition->second.decides) return CUDA_ERROR_INVALID_VALUE;
  condition->second.decides = true;
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_CONDITIONAL);
  for (unsigned i = 0; i < params.size; ++i) {
    node->bodies.push_back(std::make_unique<Graph>());
    node->bodies.back()->owner = node.get();
    node->body_handles.push_back(reinterpret_cast<CUgraph>(node->bodies.back().get()));
  }
  params.phGraph_out = node->body_handles.data();
  node->conditional = params;
  return add_node(handle, graph, after, std::move(node));
}

CUresult add_any_node(CUgraphNode* handle, CUgraph graph_handle, const Dependencies& after, CUgraphNodeParams* params) {
  if (handle == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Graph* graph = nullptr;
    CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    switch (params->type) {
      case CU_GRAPH_NODE_TYPE_GRAPH:
        return add_child(handle, *graph, after, params->graph.graph,
                         params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
      case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return add_allocation(handle, *graph, after, context, params->alloc.bytesize, &params->alloc.dptr);
      case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return add_free(handle, *graph, after, params->free.dptr);
      case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return add_conditional(handle, *graph, after, params->conditional);
      default: {
        auto node = std::make_unique<Node>(params->type);
        result = read_params(*params, context, node->command);
        return result == CUDA_SUCCESS ? add_node(handle, *graph, after, std::move(node)) : result;
      }
    }
  });
}

// Changes a node's command for later instantiations and clones.
CUresult set_command(Node& node, Command command) {
  if (auto* const kernel = std::get_if<KernelCommand>(&command)) {
    kernel->cooperative = std::get<KernelCommand>(node.command).cooperative;
  }
  node.command = std::move(command);
  return CUDA_SUCCESS;
}

template <class Read>
CUresult set_read_node(CUgraphNode handle, CUgraphNodeType type, Read read) {
  return with_node(handle, type, [&](Node& node) {
    Command command;
    const CUresult result = read(command);
    return result == CUDA_SUCCESS ? set_command(node, std::move(command)) : result;
  });
}

bool is_node_attribute(CUkernelNodeAttrID attribute) {
  return attribute > CU_LAUNCH_ATTRIBUTE_IGNORE && attribute <= CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING;
}

// Copies as many as fit, and counts the existing or copied ones; the rest of the room becomes null.
template <class Items, class Get>
CUresult give_nodes(const Items& items, CUgraphNode* to, std::size_t* count, Get get) {
  if (to == nullptr) {
    *count = items.size();
    return CUDA_SUCCESS;
  }
  std::size_t given = 0;
  for (const auto& item : items) {
    if (given == *count) break;
    to[given++] = reinterpret_cast<CUgraphNode>(get(item));
  }
  std::fill(to + given, to + *count, nullptr);
  *count = given;
  return CUDA_SUCCESS;
}

bool is_plain(const CUgraphEdgeData& data) { return data.from_port == 0 && data.to_port == 0 && data.type == 0; }

CUresult get_edges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (from == nullptr) != (to == nullptr) || (from == nullptr && data != nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    std::size_t edges = 0;
    bool lossy = false;
    for (const auto& node : graph->nodes) {
      for (const Edge& edge : node->dependencies) {
        if (from != nullptr && edges < *count) {
          from[edges] = reinterpret_cast<CUgraphNode>(edge.from);
          to[edges] = reinterpret_cast<CUgraphNode>(node.get());
          if (data != nullptr) data[edges] = edge.data;
          lossy = lossy || (data == nullptr && !is_plain(edge.data));
        }
        ++edges;
      }
    }
    if (lossy) return CUDA_ERROR_LOSSY_QUERY;
    *count = from == nullptr ? edges : std::min(*count, edges);
    return CUDA_SUCCESS;
  });
}

CUresult get_dependencies(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node* const node = known_node(handle);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::vector<Edge>& edges = node->dependencies;
    for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, edges.size()); ++i) {
      if (data == nullptr && !is_plain(edges[i].data)) return CUDA_ERROR_LOSSY_QUERY;
      if (data != nullptr) data[i] = edges[i].data;
    }
    return give_nodes(edges, nodes, count, [](const Edge& edge) { return edge.from; });
  });
}

CUresult get_dependents(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node* const node = known_node(handle);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, node->dependents.size()); ++i) {
      const std::vector<Edge>& edges = node->dependents[i]->dependencies;
      const auto edge = std::find_if(edges.begin(), edges.end(), [&](const Edge& e) { return e.from == node; });
      if (data == nullptr && !is_plain(edge->data)) return CUDA_ERROR_LOSSY_QUERY;
      if (data != nullptr) data[i] = edge->data;
    }
    return give_nodes(node->dependents, nodes, count, [](Node* dependent) { return dependent; });
  });
}

CUresult add_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* data,
                          std::size_t count) {
  if (count != 0 && (from == nullptr || to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    for (std::size_t i = 0; i < count; ++i) {
      Node* const node = known_node(to[i]);
      if (node == nullptr || node->graph != graph) return CUDA_ERROR_INVALID_VALUE;
      const CUresult result = add_edges(*node, from + i, data == nullptr ? nullptr : data + i, 1);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

CUresult remove_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                             const CUgraphEdgeData* data, std::size_t count) {
  if (count != 0 && (from == nullptr || to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    if (count != 0 && has_memory_nodes(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
    for (std::size_t i = 0; i < count; ++i) {
      Node* const before = known_node(from[i]);
      Node* const after = known_node(to[i]);
      if (before == nullptr || after == nullptr || before->graph != graph) return CUDA_ERROR_INVALID_VALUE;
      const CUgraphEdgeData wanted = data == nullptr ? CUgraphEdgeData{} : data[i];
      const auto removed = std::erase_if(after->dependencies, [&](const Edge& edge) {
        return edge.from == before && edge.data.type == wanted.type && edge.data.from_port == wanted.from_port;
      });
      if (removed == 0) return CUDA_ERROR_INVALID_VALUE;
      std::erase(before->dependents, after);
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- graphs

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
  if (graph == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *graph = adopt(std::make_unique<Graph>());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphDestroy(CUgraph handle) {
  return with_driver([&](Lock& lock) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    const Kin::Use own(graph->kin);
    const Kin::Use originals(graph->kin_of_original.lock());
    give_way(lock);
    return driver().graphs.erase(graph) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  });
}

CUresult cuGraphClone(CUgraph* made, CUgraph handle) {
  if (made == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    Graph* graph = nullptr;
    CUresult result = find_graph(handle, graph);
    if (result != CUDA_SUCCESS) return result;
    const Kin::Use own(graph->kin);
    give_way(lock);
    std::unique_ptr<Graph> copy;
    result = clone(*graph, copy);
    if (result != CUDA_SUCCESS) return result;
    copy->kin_of_original = graph->kin;
    *made = adopt(std::move(copy));
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeFindInClone(CUgraphNode* made, CUgraphNode original, CUgraph handle) {
  if (made == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    const Node* const node = known_node(original);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto found = graph->clones.find(node->id);
    if (found == graph->clones.end()) return CUDA_ERROR_INVALID_VALUE;
    *made = reinterpret_cast<CUgraphNode>(found->second);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    return give_nodes(graph->nodes, nodes, count, [](const auto& node) { return node.get(); });
  });
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    if (const CUresult result = find_graph(handle, graph); result != CUDA_SUCCESS) return result;
    std::vector<Node*> roots;
    for (const auto& node : graph->nodes) {
      if (node->dependencies.empty()) roots.push_back(node.get());
    }
    return give_nodes(roots, nodes, count, [](Node* node) { return node; });
  });
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
  return get_edges(graph, from, to, nullptr, count);
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
  return get_edges(graph, from, to, data, count);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* dependencies, size_t* count) {
  return get_dependencies(node, dependencies, nullptr, count);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* dependencies, CUgraphEdgeData* data,
                                       size_t* count) {
  return get_dependencies(node, dependencies, data, count);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode* dependents, size_t* count) {
  return get_dependents(node, dependents, nullptr, count);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode* dependents, CUgraphEdgeData* data,
                                         size_t* count) {
  return get_dependents(node, dependents, data, count);
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return add_dependencies(graph, from, to, nullptr, count);
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* data, size_t count) {
  return add_dependencies(graph, from, to, data, count);
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return remove_dependencies(graph, from, to, nullptr, count);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* data, size_t count) {
  return remove_dependencies(graph, from, to, data, count);
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
  return with_driver([&](Lock&) {
    Node* const node = known_node(handle);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (has_memory_nodes(*node->graph)) return CUDA_ERROR_NOT_SUPPORTED;
    node->graph->remove(*node);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  if (type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node* const node = known_node(handle);
    if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
  });
}

// ---- nodes of any type

CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                        CUgraphNodeParams* params) {
  return add_any_node(node, graph, {dependencies, nullptr, count}, params);
}

CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* data, size_t count, CUgraphNodeParams* params) {
  return add_any_node(node, graph, {dependencies, data, count}, params);
}

CUresult cuGraphNodeSetParams(CUgraphNode handle, CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Node* node = nullptr;
    CUresult result = find_node(handle, params->type, node);
    if (result != CUDA_SUCCESS) return result;
    Command command;
    result = read_params(*params, context, command);
    return result == CUDA_SUCCESS ? set_command(*node, std::move(command)) : result;
  });
}

CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_EMPTY,
                       [](Command&) { return CUDA_SUCCESS; });
}

// ---- kernel nodes

CUresult cuGraphAddKernelNode_v2(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                 size_t count, const CUDA_KERNEL_NODE_PARAMS* params) {
  if (handle == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Graph* graph = nullptr;
    CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_KERNEL);
    result = read_params(*params, context, node->command);
    if (result != CUDA_SUCCESS) return result;
    return add_node(handle, *graph, {dependencies, nullptr, count}, std::move(node));
  });
}

CUresult cuGraphAddKernelNode(CUgraphNode* handle, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS with = newer(*params);
  return cuGraphAddKernelNode_v2(handle, graph, dependencies, count, &with);
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    write_params(node, *params);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_KERNEL_NODE_PARAMS found{};
  const CUresult result = cuGraphKernelNodeGetParams_v2(handle, &found);
  if (result != CUDA_SUCCESS) return result;
  *params = {found.func,      found.gridDimX,  found.gridDimY,       found.gridDimZ,     found.blockDimX,
             found.blockDimY, found.blockDimZ, found.sharedMemBytes, found.kernelParams, found.extra};
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Node* node = nullptr;
    CUresult result = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node);
    if (result != CUDA_SUCCESS) return result;
    Command command;
    result = read_params(*params, context, command);
    return result == CUDA_SUCCESS ? set_command(*node, std::move(command)) : result;
  });
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS with = newer(*params);
  return cuGraphKernelNodeSetParams_v2(handle, &with);
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue* value) {
  if (value == nullptr || !is_node_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    const auto found = node.attributes.find(attribute);
    *value = found == node.attributes.end() ? CUkernelNodeAttrValue{} : found->second;
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) value->priority = node.priority;
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      value->cooperative = std::get<KernelCommand>(node.command).cooperative ? 1 : 0;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue* value) {
  if (value == nullptr || !is_node_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
      node.priority = value->priority;
    } else if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      std::get<KernelCommand>(node.command).cooperative = value->cooperative != 0;
    } else {
      node.attributes[attribute] = *value;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  return with_node(to, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    Node* source = nullptr;
    const CUresult result = find_node(from, CU_GRAPH_NODE_TYPE_KERNEL, source);
    if (result != CUDA_SUCCESS) return result;
    node.priority = source->priority;
    node.attributes = source->attributes;
    std::get<KernelCommand>(node.command).cooperative = std::get<KernelCommand>(source->command).cooperative;
    return CUDA_SUCCESS;
  });
}

// ---- copy, fill and host nodes

CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_MEMCPY3D* params, CUcontext) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_MEMCPY,
                       [&](Command& command) { return read_params(*params, command); });
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_MEMCPY, [&](Node& node) {
    write_params(std::get<CopyCommand>(node.command), *params);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_read_node(handle, CU_GRAPH_NODE_TYPE_MEMCPY,
                       [&](Command& command) { return read_params(*params, command); });
}

CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_MEMSET,
                       [&](Command& command) { return read_params(*params, command); });
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_MEMSET, [&](Node& node) {
    write_params(std::get<SetCommand>(node.command), *params);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode handle, const CUDA_MEMSET_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_read_node(handle, CU_GRAPH_NODE_TYPE_MEMSET,
                       [&](Command& command) { return read_params(*params, command); });
}

CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                            const CUDA_HOST_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_HOST,
                       [&](Command& command) { return read_params(*params, command); });
}

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_HOST, [&](Node& node) {
    const auto& host = std::get<HostCommand>(node.command);
    *params = {host.function, host.data};
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphHostNodeSetParams(CUgraphNode handle, const CUDA_HOST_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_read_node(handle, CU_GRAPH_NODE_TYPE_HOST,
                       [&](Command& command) { return read_params(*params, command); });
}

// ---- child graph nodes

CUresult cuGraphAddChildGraphNode(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                  size_t count, CUgraph child) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    const CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    return add_child(handle, *graph, {dependencies, nullptr, count}, child, false);
  });
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_GRAPH, [&](Node& node) {
    *graph = reinterpret_cast<CUgraph>(node.bodies.front().get());
    return CUDA_SUCCESS;
  });
}

// ---- event nodes

CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   CUevent event) {
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                       [&](Command& command) { return read_event(event, command); });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 CUevent event) {
  return add_read_node(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                       [&](Command& command) { return read_event(event, command); });
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode handle, CUevent* event) {
  if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, [&](Node& node) {
    *event = reinterpret_cast<CUevent>(std::get<EventCommand>(node.command).event.get());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode handle, CUevent* event) {
  if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, [&](Node& node) {
    *event = reinterpret_cast<CUevent>(std::get<EventCommand>(node.command).event.get());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode handle, CUevent event) {
  return set_read_node(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                       [&](Command& command) { return read_event(event, command); });
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode handle, CUevent event) {
  return set_read_node(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                       [&](Command& command) { return read_event(event, command); });
}

// ---- memory nodes

CUresult cuGraphAddMemAllocNode(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                size_t count, CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  if (handle == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Graph* graph = nullptr;
    const CUresult result = find_graph(graph_handle, graph);
    if (result != CUDA_SUCCESS) return result;
    return add_allocation(handle, *graph, {dependencies, nullptr, count}, context, params->bytesize, &params->dptr);
  });
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_MEM_ALLOC, [&](Node& node) {
    const GraphMemory& memory = *std::get<GraphMemoryCommand>(node.command).memory;
    *params = {};
    params->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    params->bytesize = memory.bytes;
    params->dptr = memory.address;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* dependencies, size_t count,
                               CUdeviceptr address) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    const CUresult result = find_graph(graph_handle, graph);
    return result == CUDA_SUCCESS ? add_free(handle, *graph, {dependencies, nullptr, count}, address) : result;
  });
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr* address) {
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, CU_GRAPH_NODE_TYPE_MEM_FREE, [&](Node& node) {
    *address = std::get<GraphMemoryCommand>(node.command).memory->address;
    return CUDA_SUCCESS;
  });
}

// ---- conditional nodes

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* made, CUgraph handle, CUcontext,
                                        unsigned default_value, unsigned flags) {
  if (made == nullptr || flags > CU_GRAPH_COND_ASSIGN_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* graph = nullptr;
    const CUresult result = find_graph(handle, graph);
    if (result != CUDA_SUCCESS) return result;
    *made = driver().next_id++;
    const bool assigns = (flags & CU_GRAPH_COND_ASSIGN_DEFAULT) != 0;
    driver().conditions.emplace(*made, Condition{graph, default_value, default_value, assigns, false});
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
#pragma GCC visibility pop
