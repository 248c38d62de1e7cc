// What is known of an executable graph until it is destroyed. What it is predicted to take: its nodes are walked once,
// when it is instantiated, for the longest path through their predicted times. And which priority its kernel nodes were
// given for its caller's class, where they were.
//
// find() is a few loads, from any thread; the rest locks, allocates and may call the driver.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/handle_table.hpp"
#include "predict/launch.hpp"

namespace cudasched::runtime {

struct GraphFacts {
  std::uint64_t identity = 0;  // of the graph's kernels, shapes and order: the same in every run; never 0
  std::int64_t critical_path_ns = 0;
  std::uint32_t nodes = 0;
  bool plain = false;  // kernels, copies, fills, host functions and child graphs of these alone: nothing in it is seen
                       // from outside its stream
};

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
  void forget(CUgraphExec exec) noexcept;

  // Null where it is not known.
  const GraphFacts* find(const void* exec) const noexcept { return by_handle_.find(exec); }

  // The kernel nodes of `exec` have this priority, though those of its graph have not. False without memory.
  bool note_priority(CUgraphExec exec, GivenPriority priority) noexcept;
  std::optional<GivenPriority> priority(CUgraphExec exec) const noexcept;

  void reset_in_child() noexcept;

 private:
  HandleTable<GraphFacts, 4096> by_handle_;
  mutable std::mutex mutex_;
  std::unordered_map<CUgraphExec, GivenPriority> priorities_;
  // Graphs of the same kernels may differ in what these are given, and so in how long they take.
  std::map<std::pair<std::uint64_t, std::int64_t>, std::unique_ptr<const GraphFacts>> known_;
};

}  // namespace cudasched::runtime
