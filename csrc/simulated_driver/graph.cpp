#include "simulated_driver/graph.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <queue>
#include <utility>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::size_t kLanesMax = 16;

bool is_special(const Node& node) {
  return node.type == CU_GRAPH_NODE_TYPE_GRAPH || node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL ||
         node.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node.type == CU_GRAPH_NODE_TYPE_MEM_FREE;
}

// Of a special node.
bool any_node(const Graph& graph, const std::function<bool(const Node&)>& is) {
  if (graph.special == 0) return false;
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const auto& node) {
    return is(*node) ||
           std::any_of(node->bodies.begin(), node->bodies.end(), [&](const auto& body) { return any_node(*body, is); });
  });
}

bool same(const CUgraphEdgeData& a, const CUgraphEdgeData& b) {
  return a.from_port == b.from_port && a.to_port == b.to_port && a.type == b.type;
}

// Programmatic edges go from kernel to kernel.
bool valid_edge(const Node& from, const Node& to, const CUgraphEdgeData& data) {
  const bool reserved = std::any_of(std::begin(data.reserved), std::end(data.reserved), [](auto byte) { return byte; });
  if (reserved || data.to_port != 0 || data.type > CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) return false;
  if (is_plain(data)) return true;
  return data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC && from.type == CU_GRAPH_NODE_TYPE_KERNEL &&
         to.type == CU_GRAPH_NODE_TYPE_KERNEL &&
         (data.from_port == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC ||
          data.from_port == CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER);
}

// The nodes in an order that the edges allow, the first added first; fewer than there are if the edges go in a circle.
std::vector<const Node*> ordered(const Graph& graph) {
  std::vector<const Node*> nodes;
  nodes.reserve(graph.nodes.size());
  std::unordered_map<const Node*, std::size_t> place;
  for (const auto& node : graph.nodes) {
    place.emplace(node.get(), nodes.size());
    nodes.push_back(node.get());
  }
  const bool as_added = std::all_of(nodes.begin(), nodes.end(), [&](const Node* node) {
    return std::all_of(node->dependencies.begin(), node->dependencies.end(),
                       [&](const Edge& edge) { return place.at(edge.from) < place.at(node); });
  });
  if (as_added) return nodes;
  std::vector<std::size_t> waits(nodes.size());
  std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    waits[i] = nodes[i]->dependencies.size();
    if (waits[i] == 0) ready.push(i);
  }
  std::vector<const Node*> order;
  while (!ready.empty()) {
    const Node* const node = nodes[ready.top()];
    ready.pop();
    order.push_back(node);
    for (const Node* const dependent : node->dependents) {
      if (--waits[place.at(dependent)] == 0) ready.push(place.at(dependent));
    }
  }
  return order;
}

bool flatten_into(const Graph& graph, const std::vector<std::size_t>& after, std::vector<FlatNode>& flat) {
  const std::vector<const Node*> order = ordered(graph);
  if (order.size() != graph.nodes.size()) return false;
  std::unordered_map<const Node*, std::size_t> place;
  for (const Node* const node : order) {
    FlatNode made{.node = node, .dependencies = {}, .child_first = 0};
    for (const Edge& edge : node->dependencies) made.dependencies.push_back(place.at(edge.from));
    if (made.dependencies.empty()) made.dependencies = after;
    made.child_first = flat.size();
    if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) {
      const std::size_t first = flat.size();
      if (!flatten_into(*node->bodies.front(), made.dependencies, flat)) return false;
      std::vector<bool> is_last(flat.size() - first, true);
      for (std::size_t i = first; i < flat.size(); ++i) {
        for (const std::size_t before : flat[i].dependencies) {
          if (before >= first) is_last[before - first] = false;
        }
      }
      if (!is_last.empty()) made.dependencies.clear();
      for (std::size_t i = 0; i < is_last.size(); ++i) {
        if (is_last[i]) made.dependencies.push_back(first + i);
      }
    }
    place.emplace(node, flat.size());
    flat.push_back(std::move(made));
  }
  return true;
}

bool fits_device_launch(const FlatNode& of) {
  switch (of.node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<const ExecBody> make_body(const Graph& graph);

std::shared_ptr<const ExecStructure> make_structure(const std::vector<FlatNode>& flat, std::size_t top_level) {
  auto made = std::make_shared<ExecStructure>();
  made->top_level = top_level;
  made->nodes.reserve(flat.size());
  std::vector<bool> ends_lane;
  for (const FlatNode& of : flat) {
    ExecNode node{.source = of.node->id,
                  .type = of.node->type,
                  .dependencies = of.dependencies,
                  .edges = {},
                  .child_first = of.child_first,
                  .lane = 0,
                  .condition = of.node->conditional.handle,
                  .decides = of.node->conditional.type,
                  .bodies = {}};
    if (node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
      for (const auto& body : of.node->bodies) node.bodies.push_back(make_body(*body));
    }
    for (const Edge& edge : of.node->dependencies) node.edges.push_back(edge.data);
    // A node goes on in the lane of a dependency that no other node has gone on from, else it opens a lane of its own.
    bool placed = node.dependencies.empty() && made->nodes.empty();
    for (const std::size_t index : node.dependencies) {
      if (placed || !ends_lane[index]) continue;
      ends_lane[index] = false;
      node.lane = made->nodes[index].lane;
      placed = true;
    }
    if (!placed) node.lane = made->lane_count++ % kLanesMax;
    ends_lane.push_back(true);
    made->op_count += 1 + node.dependencies.size();
    made->by_source.emplace(node.source, made->nodes.size());
    made->nodes.push_back(std::move(node));
  }
  made->lane_count = std::min(made->lane_count, kLanesMax);
  made->op_count += 3 + 2 * made->lane_count;
  return made;
}

// A fill keeps its instantiated size.
std::vector<ExecState> make_states(const std::vector<FlatNode>& flat) {
  std::vector<ExecState> states;
  states.reserve(flat.size());
  for (const FlatNode& of : flat) {
    ExecState& made = states.emplace_back(ExecState{.command = of.node->command, .priority = of.node->priority});
    if (auto* const set = std::get_if<SetCommand>(&made.command)) set->bytes_max = set->count * set->width_bytes;
  }
  return states;
}

// `graph` has been checked for use as a body.
std::shared_ptr<const ExecBody> make_body(const Graph& graph) {
  const std::vector<FlatNode> flat = flatten(graph).value();
  auto made = std::make_shared<ExecBody>();
  made->structure = make_structure(flat, graph.nodes.size());
  made->states = make_states(flat);
  return made;
}

bool fits_body(const Graph& graph);

// Nothing else, where the node is conditional, than fits a body.
bool fits_bodies(const FlatNode& of) {
  return of.node->type != CU_GRAPH_NODE_TYPE_CONDITIONAL ||
         std::all_of(of.node->bodies.begin(), of.node->bodies.end(), [](const auto& body) { return fits_body(*body); });
}

// Kernels, copies, fills, child graphs, conditional nodes and none: nothing else may be in a body, at any depth.
bool fits_body(const Graph& graph) {
  const std::optional<std::vector<FlatNode>> flat = flatten(graph);
  return flat && std::all_of(flat->begin(), flat->end(), [](const FlatNode& of) {
           return fits_device_launch(of) || of.node->type == CU_GRAPH_NODE_TYPE_EMPTY ||
                  (of.node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL && fits_bodies(of));
         });
}

void take_over(ExecState& state, const Node& node) {
  std::size_t bytes_max = 0;
  if (const auto* const set = std::get_if<SetCommand>(&state.command)) bytes_max = set->bytes_max;
  state.command = node.command;
  state.priority = node.priority;
  if (auto* const set = std::get_if<SetCommand>(&state.command)) set->bytes_max = bytes_max;
}

}  // namespace

// ---- user objects

Holds::Holds(const Holds& other) : counts_(other.counts_) {
  for (const auto& [object, count] : counts_) object->references += count;
}

Holds& Holds::operator=(const Holds& other) {
  Holds copy(other);
  std::swap(counts_, copy.counts_);
  return *this;
}

Holds::~Holds() {
  for (const auto& [object, count] : counts_) release_references(*object, count);
}

void Holds::add(UserObject& object, unsigned count, bool move) {
  counts_[&object] += count;
  if (!move) object.references += count;
}

bool Holds::remove(UserObject& object, unsigned count) {
  const auto found = counts_.find(&object);
  if (found == counts_.end() || found->second < count) return false;
  if ((found->second -= count) == 0) counts_.erase(found);
  release_references(object, count);
  return true;
}

void release_references(UserObject& object, std::uint64_t count) {
  object.references -= std::min(object.references, count);
  if (object.references != 0) return;
  Driver& state = driver();
  state.destructors.push_back({object.destroy, object.data});
  state.destructors_due.store(true, std::memory_order_release);
  state.user_objects.erase(&object);
}

GraphMemory::~GraphMemory() {
  const auto found = driver().allocations.find(address);
  if (found != driver().allocations.end() && found->second.graph_memory == this) release_memory(address);
}

std::unique_ptr<Node> make_allocation_node(const std::shared_ptr<Context>& context, std::size_t bytes) {
  auto memory = std::make_shared<GraphMemory>();
  memory->address = allocate(context, bytes, CU_MEMORYTYPE_DEVICE, 0);
  memory->bytes = bytes;
  driver().allocations.at(memory->address).graph_memory = memory.get();
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  node->command = GraphMemoryCommand{std::move(memory)};
  return node;
}

void describe_side(CopySide& side) {
  const Allocation* const allocation = find_allocation(side.address, 1);
  const bool on_device = allocation != nullptr && allocation->type == CU_MEMORYTYPE_DEVICE;
  side.type = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  side.context = on_device ? allocation->context.get() : nullptr;
}

// ---- graphs

Node::Node(CUgraphNodeType of_type) : id(driver().next_id++), type(of_type) { driver().node_index.insert(this); }

Node::~Node() { driver().node_index.erase(this); }

Kin::Use::Use(std::shared_ptr<Kin> of) : of_(std::move(of)) {
  if (of_ == nullptr) return;
  if (std::exchange(of_->used_, true)) {
    std::fputs("simulated driver: two threads clone or destroy a graph and its clones at the same time\n", stderr);
    std::abort();
  }
}

Kin::Use::~Use() {
  if (of_ != nullptr) of_->used_ = false;
}

Graph::Graph() { driver().graph_index.insert(this); }

Graph::~Graph() {
  driver().graph_index.erase(this);
  // Executable graphs of this graph go on using their conditions.
  for (auto& [handle, condition] : driver().conditions) {
    if (condition.graph == this) condition.graph = nullptr;
  }
}

Node& Graph::add(std::unique_ptr<Node> node) {
  node->graph = this;
  special += is_special(*node) ? 1 : 0;
  Node& added = *node;
  nodes.push_back(std::move(node));
  added.place = std::prev(nodes.end());
  return added;
}

void Graph::remove(Node& node) {
  for (const Edge& edge : node.dependencies) std::erase(edge.from->dependents, &node);
  for (Node* const dependent : node.dependents) {
    std::erase_if(dependent->dependencies, [&](const Edge& edge) { return edge.from == &node; });
  }
  clones.erase(node.clone_of);
  special -= is_special(node) ? 1 : 0;
  nodes.erase(node.place);
}

bool has_memory_nodes(const Graph& graph) {
  return any_node(graph, [](const Node& node) {
    return node.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node.type == CU_GRAPH_NODE_TYPE_MEM_FREE;
  });
}

bool has_conditional_nodes(const Graph& graph) {
  return any_node(graph, [](const Node& node) { return node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL; });
}

std::unique_ptr<Graph> clone(const Graph& graph) {
  require(!has_memory_nodes(graph) && !has_conditional_nodes(graph), CUDA_ERROR_NOT_SUPPORTED);
  auto copy = std::make_unique<Graph>();
  copy->holds = graph.holds;
  std::unordered_map<const Node*, Node*> copies;
  for (const auto& node : graph.nodes) {
    auto twin = std::make_unique<Node>(node->type);
    twin->command = node->command;
    twin->priority = node->priority;
    twin->attributes = node->attributes;
    twin->clone_of = node->id;
    for (const auto& body : node->bodies) {
      twin->bodies.push_back(clone(*body));
      twin->bodies.back()->owner = twin.get();
    }
    copies.emplace(node.get(), twin.get());
    copy->clones.emplace(node->id, twin.get());
    copy->add(std::move(twin));
  }
  for (const auto& node : graph.nodes) {
    Node* const twin = copies.at(node.get());
    for (const Edge& edge : node->dependencies) twin->dependencies.push_back({copies.at(edge.from), edge.data});
    for (const Node* const dependent : node->dependents) twin->dependents.push_back(copies.at(dependent));
  }
  return copy;
}

Graph& find_graph(CUgraph handle) {
  auto* const graph = reinterpret_cast<Graph*>(handle);
  require(driver().graph_index.contains(graph));
  return *graph;
}

Node& find_node(CUgraphNode handle) {
  auto* const node = reinterpret_cast<Node*>(handle);
  require(driver().node_index.contains(node));
  return *node;
}

void add_edges(Node& to, const CUgraphNode* from, const CUgraphEdgeData* data, std::size_t count) {
  require(count == 0 || from != nullptr);
  std::vector<Edge> edges;
  std::unordered_set<const Node*> chosen;
  for (const Edge& edge : to.dependencies) chosen.insert(edge.from);
  for (std::size_t i = 0; i < count; ++i) {
    Node& node = find_node(from[i]);
    const CUgraphEdgeData with = data == nullptr ? CUgraphEdgeData{} : data[i];
    require(&node != &to && node.graph == to.graph && chosen.insert(&node).second && valid_edge(node, to, with));
    edges.push_back({&node, with});
  }
  for (const Edge& edge : edges) {
    to.dependencies.push_back(edge);
    edge.from->dependents.push_back(&to);
  }
}

std::optional<std::vector<FlatNode>> flatten(const Graph& graph) {
  std::vector<FlatNode> flat;
  if (!flatten_into(graph, {}, flat)) return std::nullopt;
  return flat;
}

// ---- executable graphs

Exec::~Exec() {
  if (counted) --*counted;
  if (memory_of) give_device_memory_back(*memory_of, device_bytes);
}

std::vector<ExecState>& Exec::writable() {
  if (states.use_count() > 1) states = std::make_shared<std::vector<ExecState>>(*states);
  return *states;
}

std::shared_ptr<Exec> instantiate(Graph& graph, unsigned long long flags, InstantiateError& error) {
  const bool for_device = (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0;
  const auto refuse = [&](CUresult result, const Node* node, CUgraphInstantiateResult why) {
    error = {node, why};
    throw Refused(result);
  };
  error.why = CUDA_GRAPH_INSTANTIATE_ERROR;
  require(!for_device || (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) == 0);
  // Only one at a time.
  require((!has_memory_nodes(graph) && !has_conditional_nodes(graph)) || *graph.executables == 0);
  const std::optional<std::vector<FlatNode>> flat = flatten(graph);
  if (!flat) {
    refuse(CUDA_ERROR_INVALID_VALUE, graph.nodes.front().get(), CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
  }
  const auto unfit = std::find_if_not(flat->begin(), flat->end(), fits_bodies);
  if (unfit != flat->end()) {
    refuse(CUDA_ERROR_NOT_SUPPORTED, unfit->node, CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED);
  }
  if (for_device) {
    const auto misfit = std::find_if_not(flat->begin(), flat->end(), fits_device_launch);
    if (flat->empty() || misfit != flat->end()) {
      refuse(CUDA_ERROR_NOT_SUPPORTED, flat->empty() ? nullptr : misfit->node,
             CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED);
    }
  }
  const std::size_t bytes = kExecBytes + kExecNodeBytes * flat->size();
  std::shared_ptr<Context> context = current_context();
  take_device_memory(*context, bytes);
  auto made = std::make_shared<Exec>();
  made->structure = make_structure(*flat, graph.nodes.size());
  made->states = std::make_shared<std::vector<ExecState>>(make_states(*flat));
  made->holds = std::make_shared<Holds>(graph.holds);
  made->flags = flags;
  made->device_bytes = bytes;
  made->memory_of = std::move(context);
  for (const auto& [handle, condition] : driver().conditions) {
    if (condition.graph == &graph && condition.assigns_default) made->defaults.push_back(handle);
  }
  made->counted = graph.executables;
  ++*made->counted;
  error.why = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return made;
}

CUgraphExecUpdateResult check_change(const Command& was, const Command& now, bool whole_graph) {
  if (const auto* const to = std::get_if<KernelCommand>(&now)) {
    const auto& from = std::get<KernelCommand>(was);
    if (from.context != to->context) return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
    if (whole_graph && from.cooperative != to->cooperative) return CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
  }
  if (const auto* const to = std::get_if<CopyCommand>(&now)) {
    const auto& from = std::get<CopyCommand>(was);
    const bool several_rows = from.height * from.depth > 1 || to->height * to->depth > 1;
    const auto moved = [](const CopySide& a, const CopySide& b) { return a.type != b.type || a.context != b.context; };
    if (moved(from.source, to->source) || moved(from.destination, to->destination) || (several_rows && !whole_graph) ||
        to->bytes * to->height * to->depth == 0) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
  }
  if (const auto* const to = std::get_if<SetCommand>(&now)) {
    const auto& from = std::get<SetCommand>(was);
    const bool same_shape = from.count == to->count && from.width_bytes == to->width_bytes && from.pitch == to->pitch;
    const std::size_t bytes = to->count * to->width_bytes;
    if (from.context != to->context || from.height != to->height || (from.height > 1 && !same_shape) || bytes == 0 ||
        bytes > from.bytes_max) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

UpdateOutcome update(Exec& exec, const Graph& graph, std::optional<std::size_t> child) {
  const bool fixed_priorities = (exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) != 0;
  const std::vector<ExecNode>& made = exec.structure->nodes;
  const std::size_t first = child ? made[*child].child_first : 0;
  const std::size_t count = child ? *child - first : made.size();
  if (has_memory_nodes(graph)) return {CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, nullptr, nullptr};
  if (!child && graph.nodes.size() != exec.structure->top_level) {
    return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr, nullptr};
  }
  const std::optional<std::vector<FlatNode>> flat = flatten(graph);
  if (!flat) return {CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
  for (std::size_t i = 0; i < std::min(flat->size(), count); ++i) {
    const Node& node = *(*flat)[i].node;
    const ExecNode& was = made[first + i];
    if (was.type != node.type) return {CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, &node, nullptr};
    // A child graph's node without dependencies depends on those of the child's own node.
    std::vector<std::size_t> before;
    for (const std::size_t dependency : was.dependencies) {
      if (dependency >= first) before.push_back(dependency - first);
    }
    const std::vector<std::size_t>& now = (*flat)[i].dependencies;
    if (before != now) {
      const auto [wanted, found] = std::mismatch(before.begin(), before.end(), now.begin(), now.end());
      const bool counts_differ = before.size() != now.size();
      const Node* const from = counts_differ || found == now.end() ? nullptr : (*flat)[*found].node;
      return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, &node, from};
    }
    if (was.edges.size() != node.dependencies.size()) {
      return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, &node, nullptr};
    }
    for (std::size_t e = 0; e < was.edges.size(); ++e) {
      if (!same(was.edges[e], node.dependencies[e].data)) {
        return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, &node, node.dependencies[e].from};
      }
    }
  }
  if (flat->size() != count) return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr, nullptr};
  for (std::size_t i = 0; i < count; ++i) {
    const Node& node = *(*flat)[i].node;
    const ExecState& was = (*exec.states)[first + i];
    const bool updatable = node.attributes.contains(CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE);
    if (updatable) return {CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, &node, nullptr};
    CUgraphExecUpdateResult result = check_change(was.command, node.command, true);
    if (fixed_priorities && node.priority != was.priority) result = CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return {result, &node, nullptr};
  }
  std::vector<ExecState>& states = exec.writable();
  for (std::size_t i = 0; i < count; ++i) take_over(states[first + i], *(*flat)[i].node);
  // The graph's user objects go along; launches in flight keep those of their submission.
  if (!child) exec.holds = std::make_shared<Holds>(graph.holds);
  return {};
}

}  // namespace cudasched::simulated_driver
