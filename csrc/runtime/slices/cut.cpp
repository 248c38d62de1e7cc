#include "runtime/slices/cut.hpp"

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <utility>

#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/node_priorities.hpp"
#include "driver/registry.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;
using graph::WholeReason;

constexpr int kDeepest = 8;  // of child graphs
constexpr std::size_t kMostNodes = std::size_t{1} << 20;

bool is_updatable(CUgraphNode node) noexcept {
  CUkernelNodeAttrValue value{};
  return table().graph_kernel_node_get_attribute != nullptr &&
         table().graph_kernel_node_get_attribute(node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) ==
             CUDA_SUCCESS &&
         value.deviceUpdatableKernelNode.deviceUpdatable != 0;
}

WholeReason why_whole(CUgraph graph, int depth);

WholeReason why_whole(CUgraphNode node, CUgraphNodeType type, int depth) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return is_updatable(node) ? WholeReason::kDeviceUpdatable : WholeReason::kNone;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return WholeReason::kNone;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      CUgraph child = nullptr;
      if (depth == kDeepest) return WholeReason::kChildTooDeep;
      if (table().graph_child_node_get == nullptr || table().graph_child_node_get(node, &child) != CUDA_SUCCESS) {
        return WholeReason::kUnknownNode;
      }
      return why_whole(child, depth + 1);
    }
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return WholeReason::kMemoryNode;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return WholeReason::kEventNode;
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
      return WholeReason::kSemaphoreNode;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return WholeReason::kBatchMemoryNode;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return WholeReason::kConditionalNode;
    default:
      return WholeReason::kUnknownNode;
  }
}

WholeReason why_whole(CUgraph graph, int depth) {
  std::vector<CUgraphNode> nodes;
  if (!get_nodes(graph, nodes)) return WholeReason::kTooLarge;
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    if (table().graph_node_get_type(node, &type) != CUDA_SUCCESS) return WholeReason::kUnknownNode;
    if (const WholeReason why = why_whole(node, type, depth); why != WholeReason::kNone) return why;
  }
  return WholeReason::kNone;
}

// What a kernel node says of a cut, those of child graphs too.
void look_at_kernels(CUgraphNode node, CUgraphNodeType type, CUcontext context, graph::Node& planned, int depth) {
  if (type == CU_GRAPH_NODE_TYPE_GRAPH) {
    CUgraph child = nullptr;
    std::vector<CUgraphNode> nodes;
    if (depth == kDeepest || table().graph_child_node_get(node, &child) != CUDA_SUCCESS || !get_nodes(child, nodes)) {
      planned.keeps_whole = WholeReason::kUnknownNode;
      return;
    }
    for (CUgraphNode each : nodes) {
      CUgraphNodeType inner = CU_GRAPH_NODE_TYPE_EMPTY;
      if (table().graph_node_get_type(each, &inner) == CUDA_SUCCESS) {
        look_at_kernels(each, inner, context, planned, depth + 1);
      }
    }
    return;
  }
  if (type != CU_GRAPH_NODE_TYPE_KERNEL) return;
  CUDA_KERNEL_NODE_PARAMS parameters{};
  if (table().graph_kernel_node_get == nullptr || table().graph_kernel_node_get(node, &parameters) != CUDA_SUCCESS) {
    planned.keeps_whole = WholeReason::kUnknownNode;
    return;
  }
  if (parameters.ctx != nullptr && parameters.ctx != context) planned.keeps_whole = WholeReason::kSeveralDevices;
  const void* const function = parameters.func != nullptr ? static_cast<const void*>(parameters.func)
                                                          : static_cast<const void*>(parameters.kern);
  // Without a name it may be anything.
  const driver::KernelFacts* const known = driver::functions().find(function);
  if (known == nullptr || known->name.empty() || known->facts.traits.is_collective || graph::may_wait(known->name))
    planned.may_wait = true;
}

// The half of a graph that holds the slices from `first` to before `end`.
struct Half {
  CUgraph graph = nullptr;
  std::vector<std::pair<std::uint32_t, CUgraphNode>> nodes;  // by place in the graph that is cut
  std::uint32_t first = 0;
  std::uint32_t end = 0;

  Half() = default;
  Half(Half&& other) noexcept
      : graph(std::exchange(other.graph, nullptr)), nodes(std::move(other.nodes)), first(other.first), end(other.end) {}
  Half& operator=(Half&& other) noexcept {
    std::swap(graph, other.graph);
    nodes.swap(other.nodes);
    std::swap(first, other.first);
    std::swap(end, other.end);
    return *this;
  }
  ~Half() {
    if (graph != nullptr) table().graph_clone_destroy(graph);
  }
};

// Splits `half` in two; `other` is the later one.
WholeReason split(const graph::Plan& plan, Half& half, Half& other) {
  other.first = half.first + (half.end - half.first) / 2;
  other.end = half.end;
  half.end = other.first;
  if (table().graph_clone(&other.graph, half.graph) != CUDA_SUCCESS) {
    other.graph = nullptr;
    return WholeReason::kNotCloned;
  }
  ReadGraph original;
  ReadGraph clone;
  if (!read_graph(half.graph, original) || !read_graph(other.graph, clone) || !is_alike(original, clone)) {
    return WholeReason::kCloneDiffers;
  }
  std::unordered_map<CUgraphNode, CUgraphNode> twin;
  twin.reserve(original.handles.size());
  for (std::size_t i = 0; i < original.handles.size(); ++i) twin.emplace(original.handles[i], clone.handles[i]);
  std::vector<std::pair<std::uint32_t, CUgraphNode>> kept;
  for (const auto& [place, node] : half.nodes) {
    const auto found = twin.find(node);
    if (found == twin.end()) return WholeReason::kCloneDiffers;
    const bool stays = plan.slice_of[place] < other.first;
    if (stays) {
      kept.emplace_back(place, node);
    } else {
      other.nodes.emplace_back(place, found->second);
    }
    if (table().graph_node_destroy(stays ? found->second : node) != CUDA_SUCCESS) return WholeReason::kNotBuilt;
  }
  half.nodes = std::move(kept);
  return WholeReason::kNone;
}

WholeReason make_executable(const Instantiation& how, Pieces::Piece& piece) {
  if (how.priority) {
    driver::NodePriorities priorities(piece.graph);
    // A slice without kernels has none to set.
    if (priorities.complete() && !priorities.set_for_good(*how.priority)) return WholeReason::kNotBuilt;
  }
  const CUresult status = table().graph_instantiate(&piece.exec, piece.graph, how.flags);
  if (status != CUDA_SUCCESS) {
    piece.exec = nullptr;
    return status == CUDA_ERROR_OUT_OF_MEMORY ? WholeReason::kNoMemory : WholeReason::kNotBuilt;
  }
  if (how.upload != nullptr && table().graph_upload != nullptr &&
      table().graph_upload(piece.exec, how.upload) != CUDA_SUCCESS) {
    return WholeReason::kNotBuilt;
  }
  return WholeReason::kNone;
}

}  // namespace

bool get_nodes(CUgraph graph, std::vector<CUgraphNode>& nodes) {
  std::size_t count = 0;
  if (table().graph_get_nodes(graph, nullptr, &count) != CUDA_SUCCESS || count > kMostNodes) return false;
  nodes.resize(count);
  return count == 0 || table().graph_get_nodes(graph, nodes.data(), &count) == CUDA_SUCCESS;
}

bool read_graph(CUgraph graph, ReadGraph& read) {
  const auto& driver = table();
  if (!get_nodes(graph, read.handles)) return false;
  read.types.resize(read.handles.size());
  std::unordered_map<CUgraphNode, std::uint32_t> place;
  place.reserve(read.handles.size());
  for (std::uint32_t i = 0; i < read.handles.size(); ++i) {
    place.emplace(read.handles[i], i);
    if (driver.graph_node_get_type(read.handles[i], &read.types[i]) != CUDA_SUCCESS) return false;
  }
  std::size_t count = 0;
  if (driver.graph_get_edges(graph, nullptr, nullptr, nullptr, &count) != CUDA_SUCCESS) return false;
  std::vector<CUgraphNode> from(count);
  std::vector<CUgraphNode> to(count);
  std::vector<CUgraphEdgeData> data(count);
  if (count > 0 && driver.graph_get_edges(graph, from.data(), to.data(), data.data(), &count) != CUDA_SUCCESS) {
    return false;
  }
  read.edges.clear();
  read.edges.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = place.find(from[i]);
    const auto end = place.find(to[i]);
    if (begin == place.end() || end == place.end()) return false;
    const bool programmatic = data[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC || data[i].from_port != 0;
    read.edges.push_back({begin->second, end->second, programmatic});
  }
  return true;
}

WholeReason why_whole(CUgraph graph) noexcept {
  try {
    return why_whole(graph, 0);
  } catch (const std::exception&) {
    return WholeReason::kNoMemory;
  }
}

std::vector<graph::Node> planned_nodes(const ReadGraph& read, CUcontext context, const Graphs::Estimate& estimate) {
  std::vector<graph::Node> nodes(read.handles.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].predicted_ns = predicted_node_ns(read.handles[i], estimate);
    look_at_kernels(read.handles[i], read.types[i], context, nodes[i], 0);
  }
  return nodes;
}

bool is_alike(const ReadGraph& read, const ReadGraph& other) {
  const auto same = [](const graph::Edge& a, const graph::Edge& b) {
    return a.from == b.from && a.to == b.to && a.programmatic == b.programmatic;
  };
  const auto sorted = [](std::vector<graph::Edge> edges) {
    std::sort(edges.begin(), edges.end(), [](const graph::Edge& a, const graph::Edge& b) {
      return a.from != b.from ? a.from < b.from : a.to < b.to;
    });
    return edges;
  };
  if (read.types != other.types || read.edges.size() != other.edges.size()) return false;
  if (std::equal(read.edges.begin(), read.edges.end(), other.edges.begin(), same)) return true;
  const auto left = sorted(read.edges);
  const auto right = sorted(other.edges);
  return std::equal(left.begin(), left.end(), right.begin(), same);
}

bool is_alike(const ReadGraph& read, CUgraph other) {
  ReadGraph found;
  return read_graph(other, found) && is_alike(read, found);
}

bool set_like(CUgraphExec exec, CUgraphNode node, CUgraphNode from, CUcontext context) noexcept {
  const driver::Driver& driver = table();
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  if (driver.graph_node_get_type(from, &type) != CUDA_SUCCESS) return false;
  const auto set = [&](auto parameters, auto* get, auto&& with) {
    return get != nullptr && get(from, &parameters) == CUDA_SUCCESS && with(&parameters) == CUDA_SUCCESS;
  };
  constexpr CUresult kNone = CUDA_ERROR_NOT_SUPPORTED;
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return set(CUDA_KERNEL_NODE_PARAMS{}, driver.graph_kernel_node_get, [&](const auto* parameters) {
        return driver.graph_exec_kernel_set == nullptr ? kNone : driver.graph_exec_kernel_set(exec, node, parameters);
      });
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return set(CUDA_MEMCPY3D{}, driver.graph_copy_node_get, [&](const auto* parameters) {
        return driver.graph_exec_copy_set == nullptr ? kNone
                                                     : driver.graph_exec_copy_set(exec, node, parameters, context);
      });
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return set(CUDA_MEMSET_NODE_PARAMS{}, driver.graph_set_node_get, [&](const auto* parameters) {
        return driver.graph_exec_fill_set == nullptr ? kNone
                                                     : driver.graph_exec_fill_set(exec, node, parameters, context);
      });
    case CU_GRAPH_NODE_TYPE_HOST:
      return set(CUDA_HOST_NODE_PARAMS{}, driver.graph_host_node_get, [&](const auto* parameters) {
        return driver.graph_exec_host_set == nullptr ? kNone : driver.graph_exec_host_set(exec, node, parameters);
      });
    default:
      return false;
  }
}

bool copy_node(CUgraphNode to, CUgraphNode from) noexcept {
  const driver::Driver& driver = table();
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  if (driver.graph_node_get_type(from, &type) != CUDA_SUCCESS) return false;
  const auto copy = [&](auto parameters, auto* get, auto* set) {
    return get != nullptr && set != nullptr && get(from, &parameters) == CUDA_SUCCESS &&
           set(to, &parameters) == CUDA_SUCCESS;
  };
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return copy(CUDA_KERNEL_NODE_PARAMS{}, driver.graph_kernel_node_get, driver.graph_kernel_node_set) &&
             driver.graph_kernel_node_copy_attributes != nullptr &&
             driver.graph_kernel_node_copy_attributes(to, from) == CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return copy(CUDA_MEMCPY3D{}, driver.graph_copy_node_get, driver.graph_copy_node_set);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return copy(CUDA_MEMSET_NODE_PARAMS{}, driver.graph_set_node_get, driver.graph_fill_node_set);
    case CU_GRAPH_NODE_TYPE_HOST:
      return copy(CUDA_HOST_NODE_PARAMS{}, driver.graph_host_node_get, driver.graph_host_node_set);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return true;
    default:
      return false;
  }
}

Pieces::~Pieces() {
  for (const Piece& piece : pieces) {
    if (piece.exec != nullptr) {
      driver::registry().forget(piece.exec);
      table().graph_destroy(piece.exec);
    }
    if (piece.graph != nullptr) table().graph_clone_destroy(piece.graph);
  }
}

WholeReason cut(CUgraph clone, const graph::Plan& plan, const Instantiation& how, const Step& step, Pieces& pieces) {
  WholeReason result = WholeReason::kNone;
  std::vector<Half> open(1);
  open.front().graph = clone;
  open.front().end = static_cast<std::uint32_t>(plan.slices.size());
  const auto stopped = [&] { return result != WholeReason::kNone; };
  const auto in_step = [&](const std::function<void()>& what) {
    if (!stopped() && !step(what, false)) result = WholeReason::kTooSlow;
  };
  pieces.pieces.resize(plan.slices.size());
  pieces.piece_of = plan.slice_of;
  pieces.handles.resize(plan.slice_of.size());
  in_step([&] {
    std::vector<CUgraphNode> nodes;
    if (!get_nodes(clone, nodes) || nodes.size() != plan.slice_of.size()) {
      result = WholeReason::kCloneDiffers;
      return;
    }
    for (std::uint32_t i = 0; i < nodes.size(); ++i) open.front().nodes.emplace_back(i, nodes[i]);
  });
  while (!open.empty() && !stopped()) {
    if (open.back().end - open.back().first > 1) {
      open.emplace_back();  // the earlier half comes first, so it is the one behind
      Half& other = open[open.size() - 2];
      std::swap(other, open.back());
      in_step([&] { result = split(plan, open.back(), other); });
      continue;
    }
    Half half = std::move(open.back());
    open.pop_back();
    Pieces::Piece& piece = pieces.pieces[half.first];
    piece.graph = std::exchange(half.graph, nullptr);
    piece.critical_ns = plan.slices[half.first].critical_ns;
    piece.nodes = plan.slices[half.first].nodes;
    for (const auto& [place, node] : half.nodes) pieces.handles[place] = node;
    in_step([&] { result = make_executable(how, piece); });
  }
  if (stopped()) step([&] { open.clear(); }, true);
  return result;
}

}  // namespace cudasched::runtime
