// Why an executable graph is launched whole, as the program made it, and not in slices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cudasched::graph {

enum class WholeReason : std::uint8_t {
  kNone,  // not whole: cut
  // the graph's size and shape
  kShort,      // fits into one slice, or nearly
  kOneNode,    // one node, or none, or one that takes nearly all of the time
  kTooLarge,   // more nodes than are looked at
  kBranches,   // each cut would cost its branches their overlap
  kWaits,      // kernels that may wait for one another are not ordered to the rest
  kMalformed,  // the edges make no order
  // the graph's nodes
  kMemoryNode,
  kConditionalNode,
  kEventNode,
  kBatchMemoryNode,
  kSemaphoreNode,
  kDeviceUpdatable,
  kUnknownNode,
  kChildTooDeep,
  // the way it was made or is used
  kDeviceLaunch,
  kSeveralDevices,
  kGreenContext,
  kNotCloned,     // the driver refused a clone,
  kCloneDiffers,  // or a clone did not have the nodes and edges of its original
  kNotBuilt,      // the driver refused a slice
  kNoMemory,
  kTooSlow,     // building took too long
  kOverBudget,  // the slices of other graphs have all the memory that slices may have
  kUpdated,     // changed in a way that slices do not follow
  kRefused,     // the driver refused to launch its first slice
};

inline constexpr std::size_t kWholeReasons = 26;

// As `cudasched.state()` has it.
constexpr std::string_view name(WholeReason reason) noexcept {
  constexpr std::array<std::string_view, kWholeReasons> kNames{
      "none",        "short",         "one_node",    "too_large",     "branches",   "waits",          "malformed",
      "memory_node", "conditional",   "event_node",  "batch_memory",  "semaphore",  "device_updated", "unknown_node",
      "deep_child",  "device_launch", "devices",     "green_context", "not_cloned", "clone_differs",  "not_built",
      "no_memory",   "too_slow",      "over_budget", "updated",       "refused",
  };
  const auto place = static_cast<std::size_t>(reason);
  return place < kNames.size() ? kNames[place] : "unknown";
}
static_assert(static_cast<std::size_t>(WholeReason::kRefused) + 1 == kWholeReasons);

}  // namespace cudasched::graph
