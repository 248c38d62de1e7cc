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
  return table().cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) ==
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
      if (table().cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS) return WholeReason::kUnknownNode;
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
    if (table().cuGraphNodeGetType(node, &type) != CUDA_SUCCESS) return WholeReason::kUnknownNode;
    if (const WholeReason why = why_whole(node, type, depth); why != WholeReason::kNone) return why;
  }
  return WholeReason::kNone;
}

// Notes in `planned` how a kernel node, or one in a child graph, limits a cut.
void look_at_kernels(CUgraphNode node, CUgraphNodeType type, CUcontext context, graph::Node& planned, int depth) {
  if (type == CU_GRAPH_NODE_TYPE_GRAPH) {
    CUgraph child = nullptr;
    std::vector<CUgraphNode> nodes;
    if (depth == kDeepest || table().cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS ||
        !get_nodes(child, nodes)) {
      planned.keeps_whole = WholeReason::kUnknownNode;
      return;
    }
    for (CUgraphNode each : nodes) {
      CUgraphNodeType inner = CU_GRAPH_NODE_TYPE_EMPTY;
      if (table().cuGraphNodeGetType(each, &inner) == CUDA_SUCCESS) {
        look_at_kernels(each, inner, context, planned, depth + 1);
      }
    }
    return;
  }
  if (type != CU_GRAPH_NODE_TYPE_KERNEL) return;
  CUDA_KERNEL_NODE_PARAMS parameters{};
  if (table().cuGraphKernelNodeGetParams(node, &parameters) != CUDA_SUCCESS) {
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
  std::vector<std::pair<std::uint32_t, CUgraphNode>> nodes;  // by place in the graph that is cut, in that order
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
  // Of one of its nodes.
  std::size_t index_of(std::uint32_t place) const noexcept {
    const auto found = std::lower_bound(nodes.begin(), nodes.end(), place,
                                        [](const auto& node, std::uint32_t wanted) { return node.first < wanted; });
    return static_cast<std::size_t>(found - nodes.begin());
  }

  ~Half() {
    if (graph != nullptr) table().cuGraphDestroy(graph);
  }
};

// Which of the two halves of a split has which of the nodes; a child graph's node is in both where the nodes inside
// are.
enum Side : unsigned { kEarlier = 1, kLater = 2 };

std::vector<unsigned> sides_of(const ReadGraph& read, const graph::Plan& plan, const Half& half, std::uint32_t later) {
  std::vector<unsigned> sides(half.nodes.size(), 0);
  for (std::size_t i = half.nodes.size(); i-- > 0;) {
    const std::uint32_t place = half.nodes[i].first;
    if (sides[i] == 0) sides[i] = plan.slice_of[place] < later ? kEarlier : kLater;  // a node with nothing inside
    const std::uint32_t parent = read.parents[place];
    if (parent != ReadGraph::kNowhere) sides[half.index_of(parent)] |= sides[i];
  }
  return sides;
}

// Splits `half` in two; `other` is the later one.
WholeReason split(const ReadGraph& read, const graph::Plan& plan, Half& half, Half& other, bool& child_refused) {
  other.first = half.first + (half.end - half.first) / 2;
  other.end = half.end;
  half.end = other.first;
  if (table().cuGraphClone(&other.graph, half.graph) != CUDA_SUCCESS) {
    other.graph = nullptr;
    return WholeReason::kNotCloned;
  }
  ReadGraph original;
  ReadGraph clone;
  if (!read_graph(half.graph, read.children, original) || !read_graph(other.graph, read.children, clone) ||
      !is_alike(original, clone)) {
    return WholeReason::kCloneDiffers;
  }
  std::unordered_map<CUgraphNode, CUgraphNode> twin;
  twin.reserve(original.handles.size());
  for (std::size_t i = 0; i < original.handles.size(); ++i) twin.emplace(original.handles[i], clone.handles[i]);
  const std::vector<unsigned> sides = sides_of(read, plan, half, other.first);
  // The nodes inside of a child graph go with the child graph's node.
  const auto goes = [&](std::size_t i, Side side) {
    const std::uint32_t parent = read.parents[half.nodes[i].first];
    return (sides[i] & side) == 0 && (parent == ReadGraph::kNowhere || (sides[half.index_of(parent)] & side) != 0);
  };
  std::vector<std::pair<std::uint32_t, CUgraphNode>> kept;
  for (std::size_t i = 0; i < half.nodes.size(); ++i) {
    const auto& [place, node] = half.nodes[i];
    const auto found = twin.find(node);
    if (found == twin.end()) return WholeReason::kCloneDiffers;
    if ((sides[i] & kEarlier) != 0) kept.emplace_back(place, node);
    if ((sides[i] & kLater) != 0) other.nodes.emplace_back(place, found->second);
    if ((goes(i, kEarlier) && table().cuGraphDestroyNode(node) != CUDA_SUCCESS) ||
        (goes(i, kLater) && table().cuGraphDestroyNode(found->second) != CUDA_SUCCESS)) {
      child_refused = read.parents[place] != ReadGraph::kNowhere;
      return WholeReason::kNotBuilt;
    }
  }
  half.nodes = std::move(kept);
  return WholeReason::kNone;
}

// Appends `graph` to `read`, inside of `parent`.
bool add_graph(CUgraph graph, std::uint32_t parent, int depth, ReadGraph& read) {
  const auto& driver = table();
  std::vector<CUgraphNode> nodes;
  if (depth > kDeepest || !get_nodes(graph, nodes)) return false;
  const auto here = [&] { return static_cast<std::uint32_t>(read.handles.size()); };
  const auto add = [&](CUgraphNode handle, CUgraphNodeType type, std::uint32_t of) {
    read.handles.push_back(handle);
    read.types.push_back(type);
    read.parents.push_back(of);
  };
  struct Ends {
    std::uint32_t begin = 0;  // where edges to it go,
    std::uint32_t end = 0;    // and where those from it come from
    bool is_first = true;
    bool is_last = true;
  };
  std::unordered_map<CUgraphNode, Ends> known;
  known.reserve(nodes.size());
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    if (driver.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS) return false;
    const std::uint32_t place = here();
    Ends ends{.begin = place, .end = place};
    add(node, type, parent);
    if (read.children && type == CU_GRAPH_NODE_TYPE_GRAPH) {
      CUgraph child = nullptr;
      if (driver.cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS) return false;
      ends.begin = here();
      add(nullptr, CU_GRAPH_NODE_TYPE_EMPTY, place);
      if (!add_graph(child, place, depth + 1, read)) return false;
      if (here() == ends.begin + 1) read.edges.push_back({ends.begin, place, false});
    }
    known.emplace(node, ends);
  }
  std::size_t count = 0;
  if (driver.cuGraphGetEdges(graph, nullptr, nullptr, nullptr, &count) != CUDA_SUCCESS) return false;
  std::vector<CUgraphNode> from(count);
  std::vector<CUgraphNode> to(count);
  std::vector<CUgraphEdgeData> data(count);
  if (count > 0 && driver.cuGraphGetEdges(graph, from.data(), to.data(), data.data(), &count) != CUDA_SUCCESS) {
    return false;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = known.find(from[i]);
    const auto end = known.find(to[i]);
    if (begin == known.end() || end == known.end()) return false;
    begin->second.is_last = end->second.is_first = false;
    const bool programmatic = data[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC || data[i].from_port != 0;
    read.edges.push_back({begin->second.end, end->second.begin, programmatic});
  }
  if (parent == ReadGraph::kNowhere) return true;
  for (CUgraphNode node : nodes) {
    const Ends& ends = known.at(node);
    if (ends.is_first) read.edges.push_back({parent + 1, ends.begin, false});
    if (ends.is_last) read.edges.push_back({ends.end, parent, false});
  }
  return true;
}

WholeReason make_executable(const Instantiation& how, Pieces::Piece& piece) {
  if (how.priority) {
    driver::NodePriorities priorities(piece.graph);
    // A slice without kernels has none to set.
    if (priorities.complete() && !priorities.set_for_good(*how.priority)) return WholeReason::kNotBuilt;
  }
  const auto refused = [](CUresult status) {
    return status == CUDA_ERROR_OUT_OF_MEMORY ? WholeReason::kNoMemory : WholeReason::kNotBuilt;
  };
  if (const CUresult status = table().cuGraphInstantiateWithFlags(&piece.exec, piece.graph, how.flags);
      status != CUDA_SUCCESS) {
    piece.exec = nullptr;
    return refused(status);
  }
  if (how.upload != nullptr) {
    const CUresult status = table().cuGraphUpload(piece.exec, how.upload);
    if (status != CUDA_SUCCESS) return refused(status);
  }
  return WholeReason::kNone;
}

}  // namespace

bool get_nodes(CUgraph graph, std::vector<CUgraphNode>& nodes) {
  std::size_t count = 0;
  if (table().cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS || count > kMostNodes) return false;
  nodes.resize(count);
  return count == 0 || table().cuGraphGetNodes(graph, nodes.data(), &count) == CUDA_SUCCESS;
}

bool are_paired(const std::vector<CUgraphNode>& nodes, const std::vector<CUgraphNode>& clones, CUgraph clone) noexcept {
  if (nodes.size() != clones.size()) return false;
  if (nodes.empty()) return true;
  for (const std::size_t place : {std::size_t{0}, nodes.size() / 2, nodes.size() - 1}) {
    CUgraphNode found = nullptr;
    if (table().cuGraphNodeFindInClone(&found, nodes[place], clone) != CUDA_SUCCESS || found != clones[place])
      return false;
  }
  return true;
}

bool read_graph(CUgraph graph, bool children, ReadGraph& read) {
  read = {};
  read.children = children;
  return add_graph(graph, ReadGraph::kNowhere, 0, read);
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
    if (read.is_mark(i)) continue;
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
  if (read.types != other.types || read.parents != other.parents || read.edges.size() != other.edges.size()) {
    return false;
  }
  if (std::equal(read.edges.begin(), read.edges.end(), other.edges.begin(), same)) return true;
  const auto left = sorted(read.edges);
  const auto right = sorted(other.edges);
  return std::equal(left.begin(), left.end(), right.begin(), same);
}

bool copy_node(CUgraphNode to, CUgraphNode from) noexcept {
  const driver::Driver& driver = table();
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  if (driver.cuGraphNodeGetType(from, &type) != CUDA_SUCCESS) return false;
  const auto copy = [&](auto parameters, auto* get, auto* set) {
    return get(from, &parameters) == CUDA_SUCCESS && set(to, &parameters) == CUDA_SUCCESS;
  };
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return copy(CUDA_KERNEL_NODE_PARAMS{}, driver.cuGraphKernelNodeGetParams, driver.cuGraphKernelNodeSetParams) &&
             driver.cuGraphKernelNodeCopyAttributes(to, from) == CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return copy(CUDA_MEMCPY3D{}, driver.cuGraphMemcpyNodeGetParams, driver.cuGraphMemcpyNodeSetParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return copy(CUDA_MEMSET_NODE_PARAMS{}, driver.cuGraphMemsetNodeGetParams, driver.cuGraphMemsetNodeSetParams);
    case CU_GRAPH_NODE_TYPE_HOST:
      return copy(CUDA_HOST_NODE_PARAMS{}, driver.cuGraphHostNodeGetParams, driver.cuGraphHostNodeSetParams);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return true;
    default:
      return false;
  }
}

bool copy_nodes(const ReadGraph& to, const ReadGraph& from) {
  bool copied = is_alike(to, from);
  for (std::size_t i = 0; i < to.handles.size() && copied; ++i) {
    copied = to.is_mark(i) || copy_node(to.handles[i], from.handles[i]);
  }
  return copied;
}

void Pieces::clear() noexcept {
  for (const Piece& piece : pieces) {
    if (piece.exec != nullptr) {
      driver::registry().forget(piece.exec);
      table().cuGraphExecDestroy(piece.exec);
    }
    if (piece.graph != nullptr) table().cuGraphDestroy(piece.graph);
  }
  pieces.clear();
  piece_of.clear();
  handles.clear();
}

bool refresh(const Pieces::Piece& piece, std::optional<int> priority) noexcept {
  if (priority) {
    driver::NodePriorities priorities(piece.graph);
    if (priorities.complete() && !priorities.set_for_good(*priority)) return false;
  }
  CUgraphExecUpdateResultInfo info{};
  return table().cuGraphExecUpdate(piece.exec, piece.graph, &info) == CUDA_SUCCESS;
}

WholeReason cut(CUgraph clone, const ReadGraph& read, const graph::Plan& plan, const Instantiation& how,
                const Step& step, Pieces& pieces) {
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
  pieces.children = read.children;
  pieces.handles.resize(plan.slice_of.size());
  for (std::uint32_t i = 0; i < read.handles.size(); ++i) {
    if (read.handles[i] != nullptr) open.front().nodes.emplace_back(i, read.handles[i]);
    if (read.parents[i] != ReadGraph::kNowhere) pieces.pieces[pieces.piece_of[i]].has_inner = true;
  }
  while (!open.empty() && !stopped()) {
    if (open.back().end - open.back().first > 1) {
      open.emplace_back();  // the earlier half comes first, so it is the one behind
      Half& other = open[open.size() - 2];
      std::swap(other, open.back());
      in_step([&] { result = split(read, plan, open.back(), other, pieces.child_refused); });
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
