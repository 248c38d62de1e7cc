// Entry points: graphs, their nodes and edges.
#include <cuda.h>

#include <algorithm>
#include <thread>

#include "simulated_driver/driver.hpp"
#include "simulated_driver/node_params.hpp"

namespace cudasched::simulated_driver {
namespace {

Node& node_of_type(CUgraphNode handle, CUgraphNodeType type) {
  Node& node = find_node(handle);
  require(node.type == type);
  return node;
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

// ---- additions: each returns the new node's handle

CUgraphNode add_node(Graph& graph, const Dependencies& after, std::unique_ptr<Node> node) {
  Node& added = graph.add(std::move(node));
  try {
    add_edges(added, after.nodes, after.data, after.count);
  } catch (const Refused&) {
    graph.remove(added);
    throw;
  }
  return reinterpret_cast<CUgraphNode>(&added);
}

CUgraphNode add_command(Graph& graph, const Dependencies& after, CUgraphNodeType type, Command command) {
  auto node = std::make_unique<Node>(type);
  node->command = std::move(command);
  return add_node(graph, after, std::move(node));
}

CUgraphNode add_child(Graph& graph, const Dependencies& after, CUgraph child_handle, bool move) {
  Graph& child = find_graph(child_handle);
  require(!has_conditional_nodes(child), CUDA_ERROR_NOT_SUPPORTED);
  const auto owned = driver().graphs.find(&child);
  require(!move || (owned != driver().graphs.end() && &child != &graph));
  std::unique_ptr<Graph> body = move ? nullptr : clone(child);
  const CUgraphNode added = add_command(graph, after, CU_GRAPH_NODE_TYPE_GRAPH, {});
  if (move) {
    body = std::move(owned->second);
    driver().graphs.erase(owned);
  }
  Node& node = find_node(added);
  body->owner = &node;
  node.bodies.push_back(std::move(body));
  return added;
}

CUgraphNode add_allocation(Graph& graph, const Dependencies& after, std::size_t bytes, CUdeviceptr& address) {
  auto node = make_allocation_node(current_context(), bytes);
  const CUdeviceptr made = std::get<GraphMemoryCommand>(node->command).memory->address;
  const CUgraphNode added = add_node(graph, after, std::move(node));
  address = made;
  return added;
}

CUgraphNode add_free(Graph& graph, const Dependencies& after, CUdeviceptr address) {
  GraphMemory* const memory = find(driver().allocations, address, CUDA_ERROR_INVALID_VALUE).graph_memory;
  require(memory != nullptr);
  const bool twice = std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const auto& other) {
    return other->type == CU_GRAPH_NODE_TYPE_MEM_FREE &&
           std::get<GraphMemoryCommand>(other->command).memory.get() == memory;
  });
  require(!twice);
  return add_command(graph, after, CU_GRAPH_NODE_TYPE_MEM_FREE, GraphMemoryCommand{memory->shared_from_this()});
}

CUgraphNode add_conditional(Graph& graph, const Dependencies& after, CUDA_CONDITIONAL_NODE_PARAMS& params) {
  const unsigned most = params.type == CU_GRAPH_COND_TYPE_IF ? 2 : params.type == CU_GRAPH_COND_TYPE_WHILE ? 1 : 64;
  const bool newer = params.type == CU_GRAPH_COND_TYPE_SWITCH || params.size == 2;
  require(params.type <= CU_GRAPH_COND_TYPE_SWITCH && params.size != 0 && params.size <= most &&
          (!newer || driver_version() >= 12080));
  Condition& condition = find(driver().conditions, params.handle, CUDA_ERROR_INVALID_VALUE);
  require(!condition.decides);
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_CONDITIONAL);
  for (unsigned i = 0; i < params.size; ++i) {
    node->bodies.push_back(std::make_unique<Graph>());
    node->bodies.back()->owner = node.get();
    node->body_handles.push_back(reinterpret_cast<CUgraph>(node->bodies.back().get()));
  }
  node->conditional = params;
  node->conditional.phGraph_out = node->body_handles.data();
  const CUgraphNode added = add_node(graph, after, std::move(node));
  condition.decides = true;
  params.phGraph_out = find_node(added).body_handles.data();
  return added;
}

CUresult add_any_node(CUgraphNode* handle, CUgraph graph_handle, const Dependencies& after, CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give(handle, [&] {
    current_context();
    Graph& graph = find_graph(graph_handle);
    switch (params->type) {
      case CU_GRAPH_NODE_TYPE_GRAPH:
        return add_child(graph, after, params->graph.graph,
                         params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
      case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return add_allocation(graph, after, params->alloc.bytesize, params->alloc.dptr);
      case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return add_free(graph, after, params->free.dptr);
      case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return add_conditional(graph, after, params->conditional);
      default:
        return add_command(graph, after, params->type, read_params(*params));
    }
  });
}

// Entry points for nodes of one type, each with the driver's structure for that.

template <class Params>
CUresult add_one(CUgraphNode* handle, CUgraph graph, const Dependencies& after, CUgraphNodeType type,
                 const Params* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give(handle, [&] { return add_command(find_graph(graph), after, type, read_params(*params)); });
}

// Changes a node's command for later instantiations and clones.
template <class Params>
CUresult set_one(CUgraphNode handle, CUgraphNodeType type, const Params* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Node& node = node_of_type(handle, type);
    Command command = read_params(*params);
    if (auto* const kernel = std::get_if<KernelCommand>(&command)) {
      kernel->cooperative = std::get<KernelCommand>(node.command).cooperative;
    }
    node.command = std::move(command);
  });
}

template <class Of, class Params>
CUresult get_one(CUgraphNode handle, CUgraphNodeType type, Params* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { write_params(std::get<Of>(node_of_type(handle, type).command), *params); });
}

template <class Params>
CUresult get_kernel(CUgraphNode handle, Params* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { write_params(node_of_type(handle, CU_GRAPH_NODE_TYPE_KERNEL), *params); });
}

bool is_node_attribute(CUkernelNodeAttrID attribute) {
  return attribute > CU_LAUNCH_ATTRIBUTE_IGNORE && attribute <= CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING;
}

// Copies as many as fit, and counts the existing or copied ones; the rest of the room becomes null.
template <class Items, class Get>
void give_nodes(const Items& items, CUgraphNode* to, std::size_t* count, Get get) {
  if (to == nullptr) {
    *count = items.size();
    return;
  }
  std::size_t given = 0;
  for (const auto& item : items) {
    if (given == *count) break;
    to[given++] = reinterpret_cast<CUgraphNode>(get(item));
  }
  std::fill(to + given, to + *count, nullptr);
  *count = given;
}

CUresult get_edges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (from == nullptr) != (to == nullptr) || (from == nullptr && data != nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return with_driver([&](Lock&) {
    std::size_t edges = 0;
    bool lossy = false;
    for (const auto& node : find_graph(handle).nodes) {
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
    require(!lossy, CUDA_ERROR_LOSSY_QUERY);
    *count = from == nullptr ? edges : std::min(*count, edges);
  });
}

// One end of each of a node's edges.
CUresult give_edges(const std::vector<Edge>& edges, CUgraphNode* nodes, CUgraphEdgeData* data, std::size_t* count) {
  for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, edges.size()); ++i) {
    if (data == nullptr && !is_plain(edges[i].data)) return CUDA_ERROR_LOSSY_QUERY;
    if (data != nullptr) data[i] = edges[i].data;
  }
  give_nodes(edges, nodes, count, [](const Edge& edge) { return edge.from; });
  return CUDA_SUCCESS;
}

CUresult get_dependencies(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { return give_edges(find_node(handle).dependencies, nodes, data, count); });
}

CUresult get_dependents(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, std::size_t* count) {
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Node& node = find_node(handle);
    std::vector<Edge> edges;
    for (Node* const dependent : node.dependents) {
      const auto edge = std::find_if(dependent->dependencies.begin(), dependent->dependencies.end(),
                                     [&](const Edge& e) { return e.from == &node; });
      edges.push_back({dependent, edge->data});
    }
    return give_edges(edges, nodes, data, count);
  });
}

CUresult add_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* data,
                          std::size_t count) {
  if (count != 0 && (from == nullptr || to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Graph& graph = find_graph(handle);
    for (std::size_t i = 0; i < count; ++i) {
      Node& node = find_node(to[i]);
      require(node.graph == &graph);
      add_edges(node, from + i, data == nullptr ? nullptr : data + i, 1);
    }
  });
}

CUresult remove_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                             const CUgraphEdgeData* data, std::size_t count) {
  if (count != 0 && (from == nullptr || to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const Graph& graph = find_graph(handle);
    require(count == 0 || !has_memory_nodes(graph), CUDA_ERROR_NOT_SUPPORTED);
    for (std::size_t i = 0; i < count; ++i) {
      Node& before = find_node(from[i]);
      Node& after = find_node(to[i]);
      require(before.graph == &graph);
      const CUgraphEdgeData wanted = data == nullptr ? CUgraphEdgeData{} : data[i];
      const auto removed = std::erase_if(after.dependencies, [&](const Edge& edge) {
        return edge.from == &before && edge.data.type == wanted.type && edge.data.from_port == wanted.from_port;
      });
      require(removed != 0);
      std::erase(before.dependents, &after);
    }
  });
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- graphs

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(graph, [] { return adopt(std::make_unique<Graph>()); });
}

CUresult cuGraphDestroy(CUgraph handle) {
  return with_driver([&](Lock& lock) {
    Graph& graph = find_graph(handle);
    const Kin::Use own(graph.kin);
    const Kin::Use originals(graph.kin_of_original.lock());
    give_way(lock);
    require(driver().graphs.erase(&graph) != 0);
  });
}

CUresult cuGraphClone(CUgraph* made, CUgraph handle) {
  if (made == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    const Graph& graph = find_graph(handle);
    const Kin::Use own(graph.kin);
    give_way(lock);
    std::unique_ptr<Graph> copy = clone(graph);
    copy->kin_of_original = graph.kin;
    *made = adopt(std::move(copy));
  });
}

CUresult cuGraphNodeFindInClone(CUgraphNode* made, CUgraphNode original, CUgraph handle) {
  return give(made, [&] {
    const Graph& graph = find_graph(handle);
    return reinterpret_cast<CUgraphNode>(find(graph.clones, find_node(original).id, CUDA_ERROR_INVALID_VALUE));
  });
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver(
      [&](Lock&) { give_nodes(find_graph(handle).nodes, nodes, count, [](const auto& node) { return node.get(); }); });
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::vector<Node*> roots;
    for (const auto& node : find_graph(handle).nodes) {
      if (node->dependencies.empty()) roots.push_back(node.get());
    }
    give_nodes(roots, nodes, count, [](Node* node) { return node; });
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
    Node& node = find_node(handle);
    require(!has_memory_nodes(*node.graph), CUDA_ERROR_NOT_SUPPORTED);
    node.graph->remove(node);
  });
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  return give(type, [&] { return find_node(handle).type; });
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
  return set_one(handle, params->type, params);
}

CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  return give(node, [&] {
    return add_command(find_graph(graph), {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_EMPTY, {});
  });
}

// ---- kernel nodes

CUresult cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS* params) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphAddKernelNode(CUgraphNode* handle, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  return add_one(handle, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
  return get_kernel(handle, params);
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1* params) {
  return get_kernel(handle, params);
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS* params) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue* value) {
  if (!is_node_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  return give(value, [&] {
    const Node& node = node_of_type(handle, CU_GRAPH_NODE_TYPE_KERNEL);
    const auto set = node.attributes.find(attribute);
    CUkernelNodeAttrValue found = set == node.attributes.end() ? CUkernelNodeAttrValue{} : set->second;
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) found.priority = node.priority;
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      found.cooperative = std::get<KernelCommand>(node.command).cooperative ? 1 : 0;
    }
    return found;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue* value) {
  if (value == nullptr || !is_node_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Node& node = node_of_type(handle, CU_GRAPH_NODE_TYPE_KERNEL);
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
      node.priority = value->priority;
    } else if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      std::get<KernelCommand>(node.command).cooperative = value->cooperative != 0;
    } else {
      node.attributes[attribute] = *value;
    }
  });
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  return with_driver([&](Lock&) {
    Node& node = node_of_type(to, CU_GRAPH_NODE_TYPE_KERNEL);
    const Node& source = node_of_type(from, CU_GRAPH_NODE_TYPE_KERNEL);
    node.priority = source.priority;
    node.attributes = source.attributes;
    std::get<KernelCommand>(node.command).cooperative = std::get<KernelCommand>(source.command).cooperative;
  });
}

// ---- copy, fill and host nodes

CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_MEMCPY3D* params, CUcontext) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_MEMCPY, params);
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* params) {
  return get_one<CopyCommand>(handle, CU_GRAPH_NODE_TYPE_MEMCPY, params);
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D* params) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_MEMCPY, params);
}

CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_MEMSET, params);
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* params) {
  return get_one<SetCommand>(handle, CU_GRAPH_NODE_TYPE_MEMSET, params);
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode handle, const CUDA_MEMSET_NODE_PARAMS* params) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_MEMSET, params);
}

CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                            const CUDA_HOST_NODE_PARAMS* params) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_HOST, params);
}

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* params) {
  return get_one<HostCommand>(handle, CU_GRAPH_NODE_TYPE_HOST, params);
}

CUresult cuGraphHostNodeSetParams(CUgraphNode handle, const CUDA_HOST_NODE_PARAMS* params) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_HOST, params);
}

// ---- child graph nodes

CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                  CUgraph child) {
  return give(node, [&] { return add_child(find_graph(graph), {dependencies, nullptr, count}, child, false); });
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  return give(graph, [&] {
    return reinterpret_cast<CUgraph>(node_of_type(handle, CU_GRAPH_NODE_TYPE_GRAPH).bodies.front().get());
  });
}

// ---- event nodes

CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   CUevent event) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &event);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 CUevent event) {
  return add_one(node, graph, {dependencies, nullptr, count}, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &event);
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode handle, CUevent* event) {
  return get_one<EventCommand>(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode handle, CUevent* event) {
  return get_one<EventCommand>(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode handle, CUevent event) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &event);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode handle, CUevent event) {
  return set_one(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &event);
}

// ---- memory nodes

CUresult cuGraphAddMemAllocNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give(node, [&] {
    return add_allocation(find_graph(graph), {dependencies, nullptr, count}, params->bytesize, params->dptr);
  });
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  return get_one<GraphMemoryCommand>(handle, CU_GRAPH_NODE_TYPE_MEM_ALLOC, params);
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               CUdeviceptr address) {
  return give(node, [&] { return add_free(find_graph(graph), {dependencies, nullptr, count}, address); });
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr* address) {
  return get_one<GraphMemoryCommand>(handle, CU_GRAPH_NODE_TYPE_MEM_FREE, address);
}

// ---- conditional nodes

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* made, CUgraph handle, CUcontext,
                                        unsigned default_value, unsigned flags) {
  if (flags > CU_GRAPH_COND_ASSIGN_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  return give(made, [&] {
    const Graph& graph = find_graph(handle);
    const bool assigns = (flags & CU_GRAPH_COND_ASSIGN_DEFAULT) != 0;
    driver().conditions.emplace(driver().next_id, Condition{&graph, default_value, default_value, assigns, false});
    return driver().next_id++;
  });
}

}  // extern "C"
#pragma GCC visibility pop
