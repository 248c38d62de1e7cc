#include "runtime/offload.hpp"

#include "runtime/hot.hpp"

namespace cudasched::runtime {

using queue::Operation;

void GateAdmission::admit(const Operation& operation, queue::Position position,
                          const queue::Opening& opening) noexcept {
  predict::Launch launch;
  std::size_t packed_bytes = 0;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, nullptr, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_bytes,
                   CU_LAUNCH_PARAM_END};
  if (operation.kind == Operation::Kind::kGraph) {
    launch.function = operation.graph.graph;
    launch.is_graph = true;
  } else {
    const Operation::Kernel& kernel = operation.kernel;
    launch.function = kernel.function;
    for (int i = 0; i < 3; ++i) {
      launch.grid[i] = kernel.grid[i];
      launch.block[i] = kernel.block[i];
    }
    launch.dynamic_shared_bytes = kernel.shared_bytes;
    for (unsigned i = 0; i < kernel.attribute_count; ++i) {
      const CUlaunchAttribute& attribute = kernel.attributes[i];
      if (attribute.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
      launch.cluster[0] = attribute.value.clusterDim.x;
      launch.cluster[1] = attribute.value.clusterDim.y;
      launch.cluster[2] = attribute.value.clusterDim.z;
    }
    launch.parameters = kernel.parameters;
    if (kernel.packed != nullptr) {
      extra[1] = kernel.packed;
      packed_bytes = kernel.packed_bytes;
      launch.extra = extra;
    }
  }
  const Gate::Waiver waiver{&opening, position};
  pass_ = gate_.admit(launch, operation.stream, !operation.overlaps_predecessor(),
                      hot().counters.shard(this_thread().index), &waiver);
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
