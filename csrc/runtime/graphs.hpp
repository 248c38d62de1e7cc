// What an executable graph is predicted to take: its nodes are walked once, when it is instantiated, and the longest
// path through their predicted times is kept until the graph is destroyed.
//
// note() and forget() lock, allocate and call the driver; find() is a few loads, from any thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "base/handle_table.hpp"
#include "predict/launch.hpp"

namespace cudasched::runtime {

struct GraphFacts {
  std::uint64_t identity = 0;  // of the graph's kernels, shapes and order: the same in every run; never 0
  std::int64_t critical_path_ns = 0;
  std::uint32_t nodes = 0;
};

class Graphs {
 public:
  using Estimate = std::function<std::int64_t(const predict::Query&)>;  // of one kernel, in ns

  // `exec` was made of `graph`, or updated to it.
  void note(CUgraphExec exec, CUgraph graph, const Estimate& estimate) noexcept;
  void forget(CUgraphExec exec) noexcept;

  // Null where it is not known.
  const GraphFacts* find(const void* exec) const noexcept { return by_handle_.find(exec); }

  void reset_in_child() noexcept;

 private:
  HandleTable<GraphFacts, 4096> by_handle_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::unique_ptr<const GraphFacts>> by_identity_;
};

}  // namespace cudasched::runtime
