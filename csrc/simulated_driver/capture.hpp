// Stream capture: submitted work becomes nodes of a graph. All functions are called with the driver's mutex held.
#pragma once

#include <cstdint>
#include <memory>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {

struct Capture {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint64_t thread = 0;
  Stream* origin = nullptr;
  std::unique_ptr<Graph> own;  // none for a capture into the program's graph
  Graph* graph = nullptr;
  bool invalidated = false;
  std::vector<CUgraphNode> told;  // as cuStreamGetCaptureInfo last gave them
  std::vector<CUgraphEdgeData> told_edges;
  std::vector<std::shared_ptr<Stream>> streams;  // that take part
};

// The calling thread's interaction mode (cuThreadExchangeStreamCaptureMode).
CUstreamCaptureMode& thread_capture_mode();

// For calls that capture forbids to this thread now: STREAM_CAPTURE_UNSUPPORTED. These all invalidate the captures
// concerned where they throw.
void refuse_in_capture();
// For calls on a stream: an error if the stream is capturing.
void refuse_capturing(const Stream& stream);
// For calls that look at an event: CAPTURED_EVENT.
void refuse_captured_event(const Event& event);
// For work in the legacy default stream: an error if a blocking stream of its context is capturing.
void refuse_implicit(const Stream& stream);
// For calls that synchronise a context.
void refuse_capturing_context(const Context& context);

// `into`: the program's graph that takes the nodes; null: a new one.
void begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode, Graph* into = nullptr);
// The graph is the program's from now on.
CUgraph end_capture(const std::shared_ptr<Stream>& stream);
// The captured node, which the caller may still fill in.
Node& capture_node(Stream& stream, std::unique_ptr<Node> node);
void capture_command(Stream& stream, CUgraphNodeType type, Command command, int priority);
// The nodes become the next captured one's only dependencies (`set`), or additional ones.
void change_front(Stream& stream, const CUgraphNode* nodes, const CUgraphEdgeData* data, std::size_t count, bool set);
void capture_record(Stream& stream, Event& event);
void capture_wait(const std::shared_ptr<Stream>& stream, const Event& event);

}  // namespace cudasched::simulated_driver
