// Cutting a private clone of a graph into executable slices: what a graph's nodes are to the planner, and the slices
// made by halving: a clone, and in each of the two the nodes of the other half destroyed, until each has one slice. So
// each node is copied log2(slices) times, and nothing of a node has to be read and written anew.
//
// The graphs are ours: no program knows them. Called by the thread that builds slices, with the graph's context
// current. Every call of the driver's is made inside a step (below), so that the program's threads can have it stopped.
// Throws std::bad_alloc; what was made until then is freed by Pieces.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "graph/plan.hpp"
#include "runtime/graphs.hpp"

namespace cudasched::runtime {

// A graph as the planner wants it. The nodes are in the order of cuGraphGetNodes.
struct ReadGraph {
  std::vector<CUgraphNode> handles;
  std::vector<CUgraphNodeType> types;
  std::vector<graph::Edge> edges;
};

// False where the driver does not answer, and of more than a million nodes.
bool get_nodes(CUgraph graph, std::vector<CUgraphNode>& nodes);
bool read_graph(CUgraph graph, ReadGraph& read);

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
  };

  Pieces() = default;
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  // A context went, and what it had.
  void abandon() noexcept { pieces.clear(); }

  // Where a node of the graph that was cut, by its place there, is now.
  CUgraphExec exec_of(std::uint32_t node) const noexcept { return pieces[piece_of[node]].exec; }

  std::vector<Piece> pieces;
  std::vector<std::uint32_t> piece_of;  // by node
  std::vector<CUgraphNode> handles;     // by node: in its piece's graph
};

// Does something with the driver, unless building is not to go on; says whether it is. `always`: whether or not it is,
// because something of ours is to be given back.
using Step = std::function<bool(const std::function<void()>& what, bool always)>;

// How slices are made executable.
struct Instantiation {
  unsigned long long flags = 0;
  std::optional<int> priority;  // that kernel nodes get, as those of the whole graph have got
  CUstream upload = nullptr;    // null: slices are not uploaded
};

// Gives a node of an executable slice the parameters that `from` has: a node of the same type, of a graph of ours.
// False where the driver refuses.
bool set_like(CUgraphExec exec, CUgraphNode node, CUgraphNode from, CUcontext context) noexcept;

// The same for a node of a graph of ours; a kernel node's attributes, too.
bool copy_node(CUgraphNode to, CUgraphNode from) noexcept;

// Does `other` have the nodes and edges of `read`, in the same order?
bool is_alike(const ReadGraph& read, const ReadGraph& other);
bool is_alike(const ReadGraph& read, CUgraph other);

// Cuts `clone`, which is used up, by `plan`. Not kNone: why there are no slices.
graph::WholeReason cut(CUgraph clone, const graph::Plan& plan, const Instantiation& how, const Step& step,
                       Pieces& pieces);

}  // namespace cudasched::runtime
