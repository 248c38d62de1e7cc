#include "driver/node_priorities.hpp"

#include <algorithm>
#include <exception>

#include "driver/driver.hpp"

namespace cudasched::driver {
namespace {

constexpr int kDeepest = 8;  // of child graphs

bool set_priority(CUgraphNode node, int priority) noexcept {
  CUkernelNodeAttrValue value{};
  value.priority = priority;
  return table().cuGraphKernelNodeSetAttribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value) == CUDA_SUCCESS;
}

}  // namespace

NodePriorities::NodePriorities(CUgraph graph) noexcept {
  try {
    complete_ = find(graph, 0);
  } catch (const std::exception&) {
    complete_ = false;  // no memory
  }
}

NodePriorities::~NodePriorities() { restore(); }

bool NodePriorities::find(CUgraph graph, int depth) {
  const Driver& driver = table();
  std::size_t count = 0;
  if (driver.cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS) return false;
  std::vector<CUgraphNode> nodes(count);
  if (count > 0 && driver.cuGraphGetNodes(graph, nodes.data(), &count) != CUDA_SUCCESS) return false;
  for (const CUgraphNode node : nodes) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    if (driver.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS || type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return false;
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
      CUkernelNodeAttrValue value{};
      if (driver.cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value) != CUDA_SUCCESS) {
        return false;
      }
      nodes_.push_back({node, value.priority, false});
    } else if (type == CU_GRAPH_NODE_TYPE_GRAPH) {
      CUgraph child = nullptr;
      if (depth == kDeepest || driver.cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS ||
          !find(child, depth + 1)) {
        return false;
      }
    }
  }
  return true;
}

bool NodePriorities::chosen() const noexcept {
  return std::any_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.priority != 0; });
}

bool NodePriorities::set(int priority) noexcept {
  for (Node& node : nodes_) {
    if (node.priority == priority) continue;
    node.changed = set_priority(node.handle, priority);
    if (node.changed) continue;
    restore();
    return false;
  }
  return true;
}

bool NodePriorities::set_for_good(int priority) noexcept {
  if (!set(priority)) return false;
  nodes_.clear();
  return true;
}

void NodePriorities::restore() noexcept {
  for (Node& node : nodes_) {
    if (node.changed) set_priority(node.handle, node.priority);
    node.changed = false;
  }
}

}  // namespace cudasched::driver
