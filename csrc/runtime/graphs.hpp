// Facts of an executable graph until its destruction. The predicted time: at instantiation, note() walks the nodes once
// for the longest path through their predicted times. And the priority that the kernel nodes were given for the
// caller's class, if any.
//
// find() is a few loads, from any thread; the rest locks, allocates and may call the driver. The process's registry
// (driver/registry.hpp) keeps the predicted time.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "driver/registry.hpp"
#include "predict/launch.hpp"

namespace cudasched::runtime {

using GraphFacts = driver::ExecFacts;

// A node's predicted time, with the gap until the next node begins. Reads this node alone.
std::int64_t predicted_node_ns(CUgraphNode node, const std::function<std::int64_t(const predict::Query&)>& estimate);

// To the kernel nodes of an executable graph, by its caller's class.
struct GivenPriority {
  int priority = 0;
  bool flag_is_ours = false;  // its caller did not ask for node priorities
};

class Graphs {
 public:
  using Estimate = std::function<std::int64_t(const predict::Query&)>;  // of one kernel, in ns

  // `exec` was made of `graph`, or updated to it.
  void note(CUgraphExec exec, CUgraph graph, const Estimate& estimate) noexcept;
  // The graph was updated: is it to be noted again? Of a graph that is updated at nearly each launch, the measured
  // times say more than the nodes. A walk of the nodes may also take longer than the update.
  bool wants_note(CUgraphExec exec) noexcept;
  void forget(CUgraphExec exec) noexcept;

  // None where it is not known.
  static std::optional<GraphFacts> find(const void* exec) noexcept {
    GraphFacts facts;
    const bool known = driver::registry().find(static_cast<CUgraphExec>(const_cast<void*>(exec)), facts);
    return known ? std::optional(facts) : std::nullopt;
  }

  // The kernel nodes of `exec` have this priority, though those of its graph have not. False without memory.
  bool note_priority(CUgraphExec exec, GivenPriority priority) noexcept;
  std::optional<GivenPriority> priority(CUgraphExec exec) const noexcept;

  void reset_in_child() noexcept;

 private:
  static constexpr std::uint32_t kFirstUpdates = 4;  // each of which is noted,
  static constexpr std::uint32_t kUpdates = 16;      // and one of so many

  mutable std::mutex mutex_;
  std::unordered_map<CUgraphExec, GivenPriority> priorities_;
  std::unordered_map<CUgraphExec, std::uint32_t> updates_;
};

}  // namespace cudasched::runtime
