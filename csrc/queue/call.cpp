#include "queue/call.hpp"

#include <cstring>

#include "base/hash.hpp"

namespace cudasched::queue {

void Call::read_attributes(const CUlaunchAttribute* given, unsigned count) noexcept {
  attributes = given;
  attribute_count = count;
  meaning = {};
  meaning.known = attribute_count <= Attributes::kMost && (attribute_count == 0 || attributes != nullptr);
  if (attributes == nullptr) return;
  const auto add = [&](auto number) { meaning.hash = mix(meaning.hash, static_cast<std::uint64_t>(number)); };
  const auto records = [&](CUevent event, int flags) {
    meaning.known = meaning.known && event != nullptr && flags == 0 && meaning.event_count < Attributes::kMostEvents;
    if (meaning.known) meaning.events[meaning.event_count++] = event;
  };
  for (unsigned i = 0; i < attribute_count; ++i) {
    const CUlaunchAttributeValue& value = attributes[i].value;
    // As a number: a newer CUDA has values that the enumeration does not.
    unsigned id = 0;
    std::memcpy(&id, &attributes[i].id, sizeof id);
    add(id);
    switch (id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        meaning.cooperative = value.cooperative != 0;
        add(value.cooperative);
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        cluster[0] = value.clusterDim.x;
        cluster[1] = value.clusterDim.y;
        cluster[2] = value.clusterDim.z;
        for (const unsigned size : cluster) add(size);
        break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
        add(value.preferredClusterDim.x);
        add(value.preferredClusterDim.y);
        add(value.preferredClusterDim.z);
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        add(value.clusterSchedulingPolicyPreference);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        meaning.overlaps_predecessor = value.programmaticStreamSerializationAllowed != 0;
        add(value.programmaticStreamSerializationAllowed);
        break;
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        add(value.priority);
        break;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        add(value.memSyncDomain);
        break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        add(value.sharedMemCarveout);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        records(value.programmaticEvent.event, value.programmaticEvent.flags);
        break;
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        records(value.launchCompletionEvent.event, value.launchCompletionEvent.flags);
        break;
      default:  // unknown, or an attribute with an output
        meaning.known = false;
        break;
    }
  }
}

}  // namespace cudasched::queue
