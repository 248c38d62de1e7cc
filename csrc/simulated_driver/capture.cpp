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

[[noreturn]] void invalidate(Capture& capture, CUresult why) {
  capture.invalidated = true;
  throw Refused(why);
}

// The captures of these streams of the context.
template <class Wanted>
void invalidate_all(const Context& context, Wanted wanted, CUresult why) {
  bool any = false;
  for (const auto& [key, stream] : context.streams) {
    if (!stream->capture || !wanted(*stream)) continue;
    stream->capture->invalidated = true;
    any = true;
  }
  require(!any, why);
}

}  // namespace

CUstreamCaptureMode& thread_capture_mode() { return t_capture_mode; }

void refuse_in_capture() {
  if (t_capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return;
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
  require(!refused, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void refuse_capturing(const Stream& stream) {
  if (stream.capture) invalidate(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void refuse_captured_event(const Event& event) {
  if (event.capture) invalidate(*event.capture, CUDA_ERROR_CAPTURED_EVENT);
}

void refuse_implicit(const Stream& stream) {
  if (stream.kind == StreamKind::kLegacy) {
    invalidate_all(
        *stream.context, [](const Stream& other) { return other.blocking(); }, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
}

void refuse_capturing_context(const Context& context) {
  invalidate_all(context, [](const Stream&) { return true; }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode, Graph* into) {
  require(stream->kind != StreamKind::kLegacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  require(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
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
}

CUgraph end_capture(const std::shared_ptr<Stream>& stream) {
  require(stream->capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream.get()) invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  require(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == thread_id(),
          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  const bool is_valid = !capture->invalidated && driver().graph_index.contains(capture->graph);
  const bool is_joined = is_valid && joined(*capture);
  leave(*capture);
  require(is_valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  require(is_joined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  if (capture->own) driver().graphs.emplace(capture->graph, std::move(capture->own));
  return reinterpret_cast<CUgraph>(capture->graph);
}

Node& capture_node(Stream& stream, std::unique_ptr<Node> node) {
  Capture& capture = *stream.capture;
  require(!capture.invalidated && driver().graph_index.contains(capture.graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  Node& added = capture.graph->add(std::move(node));
  // A node that the program has destroyed since orders nothing.
  std::erase_if(stream.capture_front, [](const Edge& edge) { return !driver().node_index.contains(edge.from); });
  added.dependencies = std::exchange(stream.capture_front, {{&added, {}}});
  for (const Edge& edge : added.dependencies) edge.from->dependents.push_back(&added);
  return added;
}

void capture_command(Stream& stream, CUgraphNodeType type, Command command, int priority) {
  auto node = std::make_unique<Node>(type);
  node->command = std::move(command);
  node->priority = priority;
  capture_node(stream, std::move(node));
}

void change_front(Stream& stream, const CUgraphNode* nodes, const CUgraphEdgeData* data, std::size_t count, bool set) {
  require(count == 0 || nodes != nullptr);
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < count; ++i) {
    Node& node = find_node(nodes[i]);
    require(node.graph == stream.capture->graph);
    edges.push_back({&node, data == nullptr ? CUgraphEdgeData{} : data[i]});
  }
  if (set) stream.capture_front.clear();
  add_front(stream.capture_front, edges);
}

void capture_record(Stream& stream, Event& event) {
  require(!stream.capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  event.capture = stream.capture;
  event.captured = stream.capture_front;
  event.record = nullptr;
}

void capture_wait(const std::shared_ptr<Stream>& stream, const Event& event) {
  const bool event_captured = event.capture && !event.capture->streams.empty();
  if (!event_captured) {
    require(stream->capture || !event.capture, CUDA_ERROR_CAPTURED_EVENT);
    if (stream->capture && (event.record || event.capture)) {
      invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    return;
  }
  require(!event.capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  if (stream->kind == StreamKind::kLegacy) invalidate(*event.capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  if (stream->capture && stream->capture != event.capture) {
    stream->capture->invalidated = true;
    invalidate(*event.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  if (!stream->capture) {
    stream->capture = event.capture;
    event.capture->streams.push_back(stream);
  }
  add_front(stream->capture_front, event.captured);
}

}  // namespace cudasched::simulated_driver
