// Cutting a private clone of a graph into executable slices: the planner's view of a graph's nodes, and the slices,
// made by halving. Each step clones a graph and destroys the other half's nodes in each of the two, until each has one
// slice. So each node is copied log2(slices) times, and nothing of a node has to be read and written anew. A child
// graph is in each slice that has nodes of it, without the others.
//
// The graphs are ours: no program knows them. Called by the thread that builds slices, with the graph's context
// current. Every call of the driver's is made inside a step (below), so that the program's threads can have building
// stopped. Throws std::bad_alloc; Pieces frees the slices made until then.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "graph/plan.hpp"
#include "runtime/graphs.hpp"

namespace cudasched::runtime {

// A graph as the planner wants it. The nodes are in the order of cuGraphGetNodes. With `children`, child graphs are
// cut, too. Three entries in a row stand for a child graph: its node, which is the end; its beginning, which has no
// handle; then the nodes inside.
struct ReadGraph {
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};

  std::vector<CUgraphNode> handles;
  std::vector<CUgraphNodeType> types;
  std::vector<std::uint32_t> parents;  // by node: the child graph's node that it is inside of; else kNowhere
  std::vector<graph::Edge> edges;
  bool children = false;

  // Takes no time by itself.
  bool is_mark(std::size_t place) const noexcept {
    return handles[place] == nullptr || (children && types[place] == CU_GRAPH_NODE_TYPE_GRAPH);
  }
};

// False where the driver does not answer, and of more than a million nodes.
bool get_nodes(CUgraph graph, std::vector<CUgraphNode>& nodes);
// Nodes of a graph and of its clone are paired by their order, which is documented nowhere: a look at some of them.
bool are_paired(const std::vector<CUgraphNode>& nodes, const std::vector<CUgraphNode>& clones, CUgraph clone) noexcept;
bool read_graph(CUgraph graph, bool children, ReadGraph& read);

// Why a graph is not cut, as far as its nodes say by themselves; kNone: it may be. Reads it alone, so that it may be
// the program's own graph, on the program's thread.
graph::WholeReason why_whole(CUgraph graph) noexcept;

// The planner's nodes, predicted now.
std::vector<graph::Node> planned_nodes(const ReadGraph& read, CUcontext context, const Graphs::Estimate& estimate);

// The executable slices of a graph.
class Pieces {
 public:
  struct Piece {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    std::int64_t critical_ns = 0;
    std::uint32_t nodes = 0;
    bool has_inner = false;         // nodes inside of child graphs: a change there updates `exec` by the graph
    mutable bool is_ahead = false;  // the executable was told of changes that the graph does not have
  };

  Pieces() = default;
  ~Pieces() { clear(); }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  void clear() noexcept;

  // Where a node of the graph that was cut, by its place there, is now.
  CUgraphExec exec_of(std::uint32_t node) const noexcept { return pieces[piece_of[node]].exec; }

  std::vector<Piece> pieces;
  std::vector<std::uint32_t> piece_of;  // by node
  bool children = false;                // see ReadGraph
  bool child_refused = false;           // the driver would not destroy a node inside of a child graph
  std::vector<CUgraphNode> handles;     // by node: in its piece's graph; null: see ReadGraph
};

// Calls the driver, unless building is to stop; returns whether building goes on. `always`: in either case, to give
// something of ours back.
using Step = std::function<bool(const std::function<void()>& what, bool always)>;

inline constexpr unsigned long long kUseNodePriority = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

// How slices are made executable.
struct Instantiation {
  unsigned long long flags = 0;
  std::optional<int> priority;  // that kernel nodes get, as those of the whole graph have got
  CUstream upload = nullptr;    // null: slices are not uploaded
};

// Gives a node of a graph of ours the parameters that `from` has, another one's of the same type; a kernel node's
// attributes, too. False where the driver refuses.
bool copy_node(CUgraphNode to, CUgraphNode from) noexcept;

// Do they have the same nodes and edges, in the same order?
bool is_alike(const ReadGraph& read, const ReadGraph& other);
// The nodes get the parameters of those of another graph that is alike. False where it is not, or the driver refuses.
bool copy_nodes(const ReadGraph& to, const ReadGraph& from);

// Updates an executable slice to its graph. False where the driver refuses.
bool refresh(const Pieces::Piece& piece, std::optional<int> priority) noexcept;

// Cuts `clone`, which `read` was read of and which is used up, by `plan`. Not kNone: why there are no slices.
graph::WholeReason cut(CUgraph clone, const ReadGraph& read, const graph::Plan& plan, const Instantiation& how,
                       const Step& step, Pieces& pieces);

}  // namespace cudasched::runtime
