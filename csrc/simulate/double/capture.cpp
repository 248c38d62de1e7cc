#include "simulate/double/capture.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace cudasched::simulate {
namespace {

constexpr std::size_t kLanesMax = 16;

thread_local CUstreamCaptureMode t_capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void add_front(std::vector<Node*>& front, const std::vector<Node*>& nodes) {
  for (Node* node : nodes) {
    if (std::find(front.begin(), front.end(), node) == front.end()) front.push_back(node);
  }
}

void leave(Capture& capture) {
  for (const auto& stream : capture.streams) {
    stream->capture = nullptr;
    stream->capture_front.clear();
  }
  capture.streams.clear();
}

bool joined(const Capture& capture) {
  std::unordered_set<const Node*> reached;
  std::vector<const Node*> stack(capture.origin->capture_front.begin(), capture.origin->capture_front.end());
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    if (!reached.insert(node).second) continue;
    stack.insert(stack.end(), node->dependencies.begin(), node->dependencies.end());
  }
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const auto& stream) {
    return std::all_of(stream->capture_front.begin(), stream->capture_front.end(),
                       [&](const Node* node) { return reached.contains(node); });
  });
}

}  // namespace

CUstreamCaptureMode& thread_capture_mode() { return t_capture_mode; }

CUresult refuse_in_capture() {
  if (t_capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  auto& captures = driver().captures;
  std::erase_if(captures, [](const auto& capture) { return capture.expired(); });
  bool refused = false;
  for (const auto& weak : captures) {
    const std::shared_ptr<Capture> capture = weak.lock();
    if (capture->streams.empty()) continue;
    const bool own = capture->thread == thread_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool global =
        capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && t_capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !global) continue;
    capture->invalidated = true;
    refused = true;
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult refuse_capturing(const Stream& stream) {
  if (!stream.capture) return CUDA_SUCCESS;
  stream.capture->invalidated = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_captured_event(const Event& event) {
  if (!event.capture) return CUDA_SUCCESS;
  event.capture->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult refuse_implicit(const Stream& stream) {
  if (stream.kind != StreamKind::kLegacy) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  for (const auto& [key, other] : stream.context->streams) {
    if (!other->capture || !other->blocking()) continue;
    other->capture->invalidated = true;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return result;
}

CUresult refuse_capturing_context(const Context& context) {
  CUresult result = CUDA_SUCCESS;
  for (const auto& [key, stream] : context.streams) {
    if (refuse_capturing(*stream) != CUDA_SUCCESS) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode) {
  if (stream->kind == StreamKind::kLegacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = driver().next_id++;
  capture->mode = mode;
  capture->thread = thread_id();
  capture->origin = stream.get();
  capture->graph = std::make_unique<Graph>();
  capture->streams.push_back(stream);
  driver().captures.push_back(capture);
  stream->capture = std::move(capture);
  return CUDA_SUCCESS;
}

CUresult end_capture(const std::shared_ptr<Stream>& stream, std::unique_ptr<Graph>& graph) {
  if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream.get()) {
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != thread_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  CUresult result = CUDA_SUCCESS;
  if (capture->invalidated) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (!joined(*capture)) {
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  leave(*capture);
  if (result == CUDA_SUCCESS) graph = std::move(capture->graph);
  return result;
}

CUresult capture_command(Stream& stream, CUgraphNodeType type, Command command, int priority) {
  Capture& capture = *stream.capture;
  if (capture.invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto node = std::make_unique<Node>();
  node->type = type;
  node->command = std::move(command);
  node->priority = priority;
  node->dependencies = stream.capture_front;
  stream.capture_front = {node.get()};
  capture.graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult capture_record(Stream& stream, Event& event) {
  if (stream.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  event.capture = stream.capture;
  event.captured = stream.capture_front;
  event.record = nullptr;
  return CUDA_SUCCESS;
}

CUresult capture_wait(const std::shared_ptr<Stream>& stream, const Event& event) {
  const bool event_captured = event.capture && !event.capture->streams.empty();
  if (!event_captured) {
    if (!stream->capture) return event.capture ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
    if (!event.record && !event.capture) return CUDA_SUCCESS;
    stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (event.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->kind == StreamKind::kLegacy) {
    event.capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture && stream->capture != event.capture) {
    stream->capture->invalidated = true;
    event.capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (!stream->capture) {
    stream->capture = event.capture;
    event.capture->streams.push_back(stream);
  }
  add_front(stream->capture_front, event.captured);
  return CUDA_SUCCESS;
}

namespace {

void flatten_into(const Graph& graph, const std::vector<std::size_t>& after, const Node* within,
                  std::vector<FlatNode>& flat) {
  std::unordered_map<const Node*, std::size_t> place;
  for (const auto& node : graph.nodes) {
    FlatNode made{.node = node.get(), .dependencies = {}, .within = within};
    for (const Node* dependency : node->dependencies) made.dependencies.push_back(place.at(dependency));
    if (made.dependencies.empty()) made.dependencies = after;
    if (node->child) {
      const std::size_t first = flat.size();
      flatten_into(*node->child, made.dependencies, within != nullptr ? within : node.get(), flat);
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
    place.emplace(node.get(), flat.size());
    flat.push_back(std::move(made));
  }
}

}  // namespace

std::vector<FlatNode> flatten(const Graph& graph) {
  std::vector<FlatNode> flat;
  flatten_into(graph, {}, nullptr, flat);
  return flat;
}

std::unique_ptr<Exec> instantiate(const Graph& graph) {
  auto exec = std::make_unique<Exec>();
  for (const auto& [node, dependencies, within] : flatten(graph)) {
    ExecNode made{.type = node->type,
                  .command = node->command,
                  .priority = node->priority,
                  .dependencies = dependencies,
                  .within = within};
    made.ends_lane = true;
    // A node goes on in the lane of a dependency that nobody has gone on from, else it opens a lane of its own.
    bool placed = dependencies.empty() && exec->nodes.empty();
    for (const std::size_t index : dependencies) {
      if (placed || !exec->nodes[index].ends_lane) continue;
      exec->nodes[index].ends_lane = false;
      made.lane = exec->nodes[index].lane;
      placed = true;
    }
    if (!placed) made.lane = exec->lane_count++ % kLanesMax;
    exec->op_count += 1 + made.dependencies.size();
    exec->nodes.push_back(std::move(made));
  }
  exec->lane_count = std::min(exec->lane_count, kLanesMax);
  exec->op_count += 3 + 2 * exec->lane_count;
  return exec->op_count <= kGraphOpsMax ? std::move(exec) : nullptr;
}

CUgraphExecUpdateResult update(Exec& exec, std::size_t first, const std::vector<FlatNode>& nodes) {
  const bool fixed_priorities = (exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) != 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = *nodes[i].node;
    const ExecNode& made = exec.nodes[first + i];
    if (made.type != node.type) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    // What depends on nothing in a child graph depends on what its node did.
    const std::vector<std::size_t>& dependencies = nodes[i].dependencies;
    const bool is_root = first != 0 && dependencies.empty();
    const bool same = is_root || std::equal(dependencies.begin(), dependencies.end(), made.dependencies.begin(),
                                            made.dependencies.end(),
                                            [&](std::size_t is, std::size_t was) { return is + first == was; });
    if (!same) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    if (fixed_priorities && node.priority != made.priority) return CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    exec.nodes[first + i].command = nodes[i].node->command;
    exec.nodes[first + i].priority = nodes[i].node->priority;
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

}  // namespace cudasched::simulate
