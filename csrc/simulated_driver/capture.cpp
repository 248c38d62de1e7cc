#include "simulated_driver/capture.hpp"

#include <algorithm>
#include <unordered_set>

namespace cudasched::simulated_driver {
namespace {

thread_local CUstreamCaptureMode t_capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void add_front(std::vector<Edge>& front, const std::vector<Edge>& edges) {
  for (const Edge& edge : edges) {
    const bool there = std::any_of(front.begin(), front.end(), [&](const Edge& has) { return has.from == edge.from; });
    if (!there) front.push_back(edge);
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
  std::vector<const Node*> stack;
  for (const Edge& edge : capture.origin->capture_front) stack.push_back(edge.from);
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    if (!reached.insert(node).second) continue;
    for (const Edge& edge : node->dependencies) stack.push_back(edge.from);
  }
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const auto& stream) {
    return std::all_of(stream->capture_front.begin(), stream->capture_front.end(),
                       [&](const Edge& edge) { return reached.contains(edge.from); });
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

CUresult begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode, Graph* into) {
  if (stream->kind == StreamKind::kLegacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = driver().next_id++;
  capture->mode = mode;
  capture->thread = thread_id();
  capture->origin = stream.get();
  if (into == nullptr) capture->own = std::make_unique<Graph>();
  capture->graph = into == nullptr ? capture->own.get() : into;
  capture->streams.push_back(stream);
  driver().captures.push_back(capture);
  stream->capture = std::move(capture);
  return CUDA_SUCCESS;
}

CUresult end_capture(const std::shared_ptr<Stream>& stream, CUgraph* graph) {
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
  if (capture->invalidated || !driver().graph_index.contains(capture->graph)) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (!joined(*capture)) {
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  leave(*capture);
  if (result != CUDA_SUCCESS) return result;
  *graph = reinterpret_cast<CUgraph>(capture->graph);
  if (capture->own) driver().graphs.emplace(capture->graph, std::move(capture->own));
  return CUDA_SUCCESS;
}

Node* capture_node(Stream& stream, std::unique_ptr<Node> node, CUresult& result) {
  Capture& capture = *stream.capture;
  result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (capture.invalidated || !driver().graph_index.contains(capture.graph)) return nullptr;
  result = CUDA_SUCCESS;
  Node& added = capture.graph->add(std::move(node));
  // A node that the program has destroyed since orders nothing.
  std::erase_if(stream.capture_front, [](const Edge& edge) { return !driver().node_index.contains(edge.from); });
  added.dependencies = std::exchange(stream.capture_front, {{&added, {}}});
  for (const Edge& edge : added.dependencies) edge.from->dependents.push_back(&added);
  return &added;
}

CUresult capture_command(Stream& stream, CUgraphNodeType type, Command command, int priority) {
  auto node = std::make_unique<Node>(type);
  node->command = std::move(command);
  node->priority = priority;
  CUresult result = CUDA_SUCCESS;
  capture_node(stream, std::move(node), result);
  return result;
}

CUresult change_front(Stream& stream, const CUgraphNode* nodes, const CUgraphEdgeData* data, std::size_t count,
                      bool set) {
  if (count != 0 && nodes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < count; ++i) {
    Node* const node = known_node(nodes[i]);
    if (node == nullptr || node->graph != stream.capture->graph) return CUDA_ERROR_INVALID_VALUE;
    edges.push_back({node, data == nullptr ? CUgraphEdgeData{} : data[i]});
  }
  if (set) stream.capture_front.clear();
  add_front(stream.capture_front, edges);
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

}  // namespace cudasched::simulated_driver
