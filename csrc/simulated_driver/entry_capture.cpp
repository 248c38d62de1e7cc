// Entry points: stream capture.
#include <cuda.h>

#include <algorithm>
#include <utility>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

CUresult capture_info(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                      const CUgraphNode** dependencies, const CUgraphEdgeData** edges, std::size_t* count) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (stream->kind == StreamKind::kLegacy) {
      for (const auto& [key, other] : stream->context->streams) {
        require(!other->capture || !other->blocking(), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
      }
    }
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!stream->capture) return;
    Capture& capture = *stream->capture;
    *status = capture.invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (capture.invalidated) return;
    if (id != nullptr) *id = capture.id;
    if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(capture.graph);
    capture.told.clear();
    capture.told_edges.clear();
    bool plain = true;
    for (const Edge& edge : stream->capture_front) {
      capture.told.push_back(reinterpret_cast<CUgraphNode>(edge.from));
      capture.told_edges.push_back(edge.data);
      plain = plain && is_plain(edge.data);
    }
    require(dependencies == nullptr || edges != nullptr || plain, CUDA_ERROR_LOSSY_QUERY);
    if (dependencies != nullptr) *dependencies = capture.told.data();
    if (edges != nullptr) *edges = plain ? nullptr : capture.told_edges.data();
    if (count != nullptr) *count = stream->capture_front.size();
  });
}

bool is_mode(CUstreamCaptureMode mode) {
  return mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED;
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  if (!is_mode(mode)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { begin_capture(find_stream(handle), mode); });
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return cuStreamBeginCapture_v2(per_thread(stream), mode);
}

CUresult cuStreamBeginCapture(CUstream stream) {
  return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
  return cuStreamBeginCapture_v2(per_thread(stream), CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *graph = nullptr;
    *graph = end_capture(find_stream(handle));
  });
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  return cuStreamEndCapture(per_thread(stream), graph);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus* status) {
  return cuStreamIsCapturing(per_thread(stream), status);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return capture_info(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return capture_info(per_thread(stream), status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, nullptr, count);
}

CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** dependencies, size_t* count) {
  return capture_info(per_thread(stream), status, id, graph, dependencies, nullptr, count);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}

CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                        size_t* count) {
  return cuStreamGetCaptureInfo_v3(per_thread(stream), status, id, graph, dependencies, edges, count);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || !is_mode(*mode)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { std::swap(*mode, thread_capture_mode()); });
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData* data, size_t count, CUstreamCaptureMode mode) {
  if (!is_mode(mode) || (count != 0 && dependencies == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    Graph& graph = find_graph(graph_handle);
    for (std::size_t i = 0; i < count; ++i) require(find_node(dependencies[i]).graph == &graph);
    begin_capture(stream, mode, &graph);
    change_front(*stream, dependencies, data, count, true);
  });
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* dependencies,
                                          const CUgraphEdgeData* data, size_t count, CUstreamCaptureMode mode) {
  return cuStreamBeginCaptureToGraph(per_thread(stream), graph, dependencies, data, count, mode);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData* data,
                                              size_t count, unsigned flags) {
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    require(stream->capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    require(!stream->capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    change_front(*stream, dependencies, data, count, flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
  });
}

CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream stream, CUgraphNode* dependencies,
                                                   const CUgraphEdgeData* data, size_t count, unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(per_thread(stream), dependencies, data, count, flags);
}

CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* dependencies, size_t count, unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, dependencies, nullptr, count, flags);
}

CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream stream, CUgraphNode* dependencies, size_t count,
                                                unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(per_thread(stream), dependencies, nullptr, count, flags);
}

}  // extern "C"
#pragma GCC visibility pop
