#include "runtime/offload.hpp"

#include "base/clock.hpp"
#include "driver/barrier.hpp"
#include "runtime/hot.hpp"
#include "runtime/tracing.hpp"

namespace cudasched::runtime {

using queue::Operation;

std::int64_t GateAdmission::admit(const Operation& operation, queue::Position position,
                                  const queue::Opening& opening) noexcept {
  driver::barrier().wait();
  queue::Call call{operation.launch.what, operation.stream};
  call.meaning.overlaps_predecessor = operation.launch.overlaps_predecessor;
  call.site.caller.context = operation.context;
  call.site.caller.region = operation.region;
  const Gate::Waiver waiver{&opening, position};
  pass_ = gate_.admit(call, hot().counters.shard(this_thread().index), &waiver);
  traced_ns_ = telemetry::traced_now();
  return pass_.predicted_ns;
}

void GateAdmission::submitted(const Operation& operation, CUresult status, bool overlap_follows) noexcept {
  if (traced_ns_ != 0) [[unlikely]]
    trace(operation, status);
  if (overlap_follows && pass_.may_go_unmarked) pass_.completion = nullptr;
  if (pass_.entry >= 0) gate_.submitted(pass_, operation.stream, status);
  const bool is_part = graph_.parts > 0;
  if (is_part && status != CUDA_SUCCESS) refused_ = refused_ || (part_ == 0 && operation.graph() != whole_);
  if (status != CUDA_SUCCESS) return;
  telemetry::Shard& count = hot().counters.shard(this_thread().index);
  count.offloaded_launches.fetch_add(1, std::memory_order_relaxed);
  if (is_part) count.slice_launches.fetch_add(1, std::memory_order_relaxed);
}

void GateAdmission::trace(const Operation& operation, CUresult status) const noexcept {
  Submission what{.begin_ns = traced_ns_, .end_ns = now_ns(), .predicted_ns = pass_.predicted_ns};
  if (operation.kind == Operation::Kind::kGraph) {
    what.graph = whole_;
    if (operation.graph() != whole_) {
      what.part = part_;
      what.parts = graph_.parts;
    }
  }
  trace_submission(operation, gate_.ordinal(), what, status);
}

std::uint32_t GateAdmission::begin_graph(const Operation& launch) noexcept {
  refused_ = false;
  whole_ = launch.graph();
  hot().counters.shard(this_thread().index).graph_launches.fetch_add(1, std::memory_order_relaxed);
  if (slices_ == nullptr || !slices_->on()) return 0;
  graph_ = slices_->begin(launch.graph(), launch.stream, launch.context, gate_.beside_latency());
  if (graph_.parts > 0) {
    hot().counters.shard(this_thread().index).sliced_launches.fetch_add(1, std::memory_order_relaxed);
  }
  return graph_.parts;
}

CUgraphExec GateAdmission::part(std::uint32_t index) noexcept {
  part_ = index;
  // An upload is work for the GPU: none while latency work has it.
  return slices_->part(graph_, index, /*may_upload=*/!gate_.latency_active());
}

bool GateAdmission::may_go_whole() noexcept { return graph_.sliced == nullptr || slices_->may_go_whole(graph_); }

void GateAdmission::change_graph(const Operation& change) noexcept {
  slices_->make_change(change.change.exec, change.change.bytes);
}

void GateAdmission::end_graph(const Operation& launch, CUresult status) noexcept {
  if (graph_.sliced == nullptr) return;
  slices_->end(graph_, launch.stream, launch.context, status, refused_);
  graph_ = {};
}

void GateAdmission::piece_submitted(const Operation& piece, Operation::Direction direction, CUresult status) noexcept {
  if (status != CUDA_SUCCESS) return;
  hot().counters.shard(this_thread().index).copy_pieces.fetch_add(1, std::memory_order_relaxed);
  gate_.piece_submitted(direction, piece.stream);
}

void GateAdmission::wake() noexcept { gate_.wake(); }

}  // namespace cudasched::runtime
