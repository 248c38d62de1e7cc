// Stream capture: what would have been submitted becomes nodes of a graph; and graphs made executable. All functions
// are called with the driver's mutex held.
#pragma once

#include <cstdint>
#include <memory>

#include "simulate/double/driver.hpp"

namespace cudasched::simulate {

struct Capture {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint64_t thread = 0;
  Stream* origin = nullptr;
  std::unique_ptr<Graph> graph;
  bool invalidated = false;
  std::vector<std::shared_ptr<Stream>> streams;  // that take part
};

// The calling thread's interaction mode (cuThreadExchangeStreamCaptureMode).
CUstreamCaptureMode& thread_capture_mode();

// For calls that capture forbids to this thread now: invalidates the captures concerned and says
// STREAM_CAPTURE_UNSUPPORTED.
CUresult refuse_in_capture();
// For calls on a stream: an error, and the capture is invalidated, if the stream is capturing.
CUresult refuse_capturing(const Stream& stream);
// For calls that look at an event: CAPTURED_EVENT, and its capture is invalidated.
CUresult refuse_captured_event(const Event& event);
// For work in the legacy default stream: an error if a blocking stream of its context is capturing.
CUresult refuse_implicit(const Stream& stream);
// For calls that synchronise a context.
CUresult refuse_capturing_context(const Context& context);

CUresult begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode);
CUresult end_capture(const std::shared_ptr<Stream>& stream, std::unique_ptr<Graph>& graph);
CUresult capture_command(Stream& stream, CUgraphNodeType type, Command command, int priority);
CUresult capture_record(Stream& stream, Event& event);
CUresult capture_wait(const std::shared_ptr<Stream>& stream, const Event& event);

// A graph's nodes with those of its child graphs in their place, ahead of the node that stands for the child's end.
struct FlatNode {
  const Node* node = nullptr;
  std::vector<std::size_t> dependencies;
  const Node* within = nullptr;  // the graph's own child graph node that it comes from
};
std::vector<FlatNode> flatten(const Graph& graph);

// Null: the graph needs more operations than a launch may have.
std::unique_ptr<Exec> instantiate(const Graph& graph);
// Takes `nodes` over in the place of as many nodes of `exec` from `first` on, or says why not.
CUgraphExecUpdateResult update(Exec& exec, std::size_t first, const std::vector<FlatNode>& nodes);

}  // namespace cudasched::simulate
