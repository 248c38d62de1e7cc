// Graphs, their nodes and edges, user objects, and executable graphs. All are made, changed and dropped with the
// driver's mutex held. Every graph and node enters itself into the driver's index, so that a handle is known or refused
// at once.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "simulated_driver/commands.hpp"

namespace cudasched::simulated_driver {

struct Context;
struct Event;
struct Graph;
struct Node;

struct UserObject {
  void* data = nullptr;
  CUhostFn destroy = nullptr;
  std::uint64_t references = 0;
};

// References to user objects that a graph holds. A copy holds as many references; the end gives these back.
class Holds {
 public:
  Holds() = default;
  Holds(const Holds& other);
  Holds& operator=(const Holds& other);
  ~Holds();
  // `move`: the caller's references become the graph's.
  void add(UserObject& object, unsigned count, bool move);
  // False: too few references.
  bool remove(UserObject& object, unsigned count);

 private:
  std::map<UserObject*, std::uint64_t> counts_;
};

// Gives references back; the last one makes the destructor due (run_destructors).
void release_references(UserObject& object, std::uint64_t count);

// Memory of an allocation node, at a fixed address for as long as the graph or an executable graph of the graph lives.
struct GraphMemory : std::enable_shared_from_this<GraphMemory> {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  bool live = false;  // allocated by the last launch, in the order of submission, and not freed since

  GraphMemory() = default;
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  ~GraphMemory();
};

// A node that allocates that memory, which is reserved from now on.
std::unique_ptr<Node> make_allocation_node(const std::shared_ptr<Context>& context, std::size_t bytes);

// Fills in the kind of memory.
void describe_side(CopySide& side);

struct Edge {
  Node* from = nullptr;
  CUgraphEdgeData data{};
};

inline bool is_plain(const CUgraphEdgeData& data) { return data.from_port == 0 && data.to_port == 0 && data.type == 0; }

struct Node {
  explicit Node(CUgraphNodeType of_type);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node();

  std::uint64_t id = 0;        // of the process, never again
  std::uint64_t clone_of = 0;  // the id of the original node; 0: no clone
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Graph* graph = nullptr;
  std::list<std::unique_ptr<Node>>::iterator place;  // there
  Command command;
  int priority = 0;                                  // of a kernel, as requested
  std::map<int, CUlaunchAttributeValue> attributes;  // of a kernel, as set; less the priority
  std::vector<Edge> dependencies;                    // in the order in which they were added
  std::vector<Node*> dependents;                     // likewise
  std::vector<void*> parameters;                     // of a kernel, as cuGraphKernelNodeGetParams last gave them
  std::vector<std::unique_ptr<Graph>> bodies;        // the child graph, or the graphs that a conditional node may run
  CUDA_CONDITIONAL_NODE_PARAMS conditional{};        // of a conditional node
  std::vector<CUgraph> body_handles;                 // likewise
};

// The state that a graph shares with its clones. As in driver 580, this state is not synchronised. Where two threads
// make or destroy a graph's clones, or one of them the graph, at the same time, the process crashes.
class Kin {
 public:
  // For the length of a call. Ends the process where another thread uses the state.
  class Use {
   public:
    explicit Use(std::shared_ptr<Kin> of);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();

   private:
    std::shared_ptr<Kin> of_;
  };

 private:
  bool used_ = false;  // under the driver's lock, which a using call gives up meanwhile
};

struct Graph {
  Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  std::list<std::unique_ptr<Node>> nodes;  // in the order in which they were added
  std::size_t special = 0;                 // of these, memory and conditional nodes and child graphs
  Node* owner = nullptr;                   // the owner of this child graph
  Holds holds;
  std::unordered_map<std::uint64_t, Node*> clones;  // by the id of the node that each is a clone of
  std::shared_ptr<Kin> kin = std::make_shared<Kin>();
  std::weak_ptr<Kin> kin_of_original;  // of a clone
  // The live executable graphs of this graph.
  std::shared_ptr<std::uint64_t> executables = std::make_shared<std::uint64_t>(0);

  Node& add(std::unique_ptr<Node> node);
  void remove(Node& node);
};

// Cannot be cloned, changed by deletion, or instantiated twice: memory nodes, here or in child graphs.
bool has_memory_nodes(const Graph& graph);
bool has_conditional_nodes(const Graph& graph);

// CUDA_ERROR_NOT_SUPPORTED for a graph with memory or conditional nodes.
std::unique_ptr<Graph> clone(const Graph& graph);

// INVALID_VALUE: not a graph, or no longer.
Graph& find_graph(CUgraph handle);
Node& find_node(CUgraphNode handle);

// An edge from each of `from`, none of them twice, all of them in the node's graph.
void add_edges(Node& to, const CUgraphNode* from, const CUgraphEdgeData* data, std::size_t count);

// A graph's nodes, with those of its child graphs in their place, ahead of the node that stands for the child's end.
// The order is that of insertion where the edges allow that. None: the edges go in a circle.
struct FlatNode {
  const Node* node = nullptr;
  std::vector<std::size_t> dependencies;
  std::size_t child_first = 0;  // of a child graph node: where the nodes inside begin
};
std::optional<std::vector<FlatNode>> flatten(const Graph& graph);

struct ExecBody;

// The fixed part of an executable graph.
struct ExecNode {
  std::uint64_t source = 0;  // id of the original node
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::vector<std::size_t> dependencies;
  std::vector<CUgraphEdgeData> edges;  // of its node in the node's own graph
  std::size_t child_first = 0;
  std::size_t lane = 0;
  // Of a conditional node: the condition, its kind, and the graphs that may run.
  CUgraphConditionalHandle condition = 0;
  CUgraphConditionalNodeType decides = CU_GRAPH_COND_TYPE_IF;
  std::vector<std::shared_ptr<const ExecBody>> bodies;
};

struct ExecStructure {
  std::vector<ExecNode> nodes;
  std::unordered_map<std::uint64_t, std::size_t> by_source;
  std::size_t top_level = 0;  // nodes that are in no child graph
  std::size_t lane_count = 1;
  std::uint64_t op_count = 0;  // that one launch submits at most
};

// The part that updates change.
struct ExecState {
  Command command;
  int priority = 0;
  bool enabled = true;
};

// A conditional node's graph, which updates do not change.
struct ExecBody {
  std::shared_ptr<const ExecStructure> structure;
  std::vector<ExecState> states;
};

struct Exec {
  std::shared_ptr<const ExecStructure> structure;
  std::shared_ptr<std::vector<ExecState>> states;  // as many; shared with a launch that is being submitted
  std::shared_ptr<Holds> holds;                    // shared with launches in flight
  std::shared_ptr<std::uint64_t> counted;          // among its graph's executables
  std::vector<CUgraphConditionalHandle> defaults;  // conditions that each launch sets
  unsigned long long flags = 0;
  std::size_t device_bytes = 0;
  std::shared_ptr<Context> memory_of;  // the owner of these
  std::shared_ptr<Context> context;    // where it was launched last
  Ticket last = 0;                     // operation of that launch

  Exec() = default;
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;
  ~Exec();

  std::vector<ExecState>& writable();
};

// OUT_OF_MEMORY: the device has no room. INVALID_VALUE: see `error_node` and `why`.
struct InstantiateError {
  const Node* node = nullptr;
  CUgraphInstantiateResult why = CUDA_GRAPH_INSTANTIATE_SUCCESS;
};
std::shared_ptr<Exec> instantiate(Graph& graph, unsigned long long flags, InstantiateError& error);

struct UpdateOutcome {
  CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  const Node* node = nullptr;
  const Node* from = nullptr;
};
// Takes a graph over, as a whole or into the child graph whose end is at `child`; all of it or nothing.
UpdateOutcome update(Exec& exec, const Graph& graph, std::optional<std::size_t> child = {});
// May `now` take the place of `was`? A change of one node's command.
CUgraphExecUpdateResult check_change(const Command& was, const Command& now, bool whole_graph);

}  // namespace cudasched::simulated_driver
