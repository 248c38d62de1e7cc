#include "runtime/offload.hpp"

#include "runtime/hot.hpp"

namespace cudasched::runtime {

using queue::Operation;

void GateAdmission::admit(const Operation& operation, queue::Position position,
                          const queue::Opening& opening) noexcept {
  queue::Call call{operation.launch.what, operation.stream};
  call.meaning.overlaps_predecessor = operation.launch.overlaps_predecessor;
  call.site.caller.context = operation.context;
  const Gate::Waiver waiver{&opening, position};
  pass_ = gate_.admit(call, hot().counters.shard(this_thread().index), &waiver);
}

void GateAdmission::submitted(const Operation& operation, CUresult status, bool overlap_follows) noexcept {
  // An event between the two would end their overlap; this one goes by the clock then.
  if (overlap_follows) pass_.completion = nullptr;
  if (pass_.entry >= 0) gate_.submitted(pass_, operation.stream, status);
  if (status != CUDA_SUCCESS) return;
  telemetry::Shard& count = hot().counters.shard(this_thread().index);
  count.launches[static_cast<std::size_t>(Class::kBestEffort)].fetch_add(1, std::memory_order_relaxed);
  count.offloaded.fetch_add(1, std::memory_order_relaxed);
}

void GateAdmission::wake() noexcept { gate_.wake(); }

}  // namespace cudasched::runtime
