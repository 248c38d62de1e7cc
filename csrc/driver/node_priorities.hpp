// The priorities of a graph's kernel nodes, changed for the length of a scope: the user's graph reads afterwards as
// before. Not on the launch path: allocates, and calls the driver once or twice a node. No other thread may use the
// graph meanwhile, as CUDA demands of its caller.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

namespace cudasched::driver {

class NodePriorities {
 public:
  // Finds the kernel nodes, child graphs' included.
  explicit NodePriorities(CUgraph graph) noexcept;
  ~NodePriorities();
  NodePriorities(const NodePriorities&) = delete;
  NodePriorities& operator=(const NodePriorities&) = delete;

  // There are some, and none can have been missed. The bodies of conditional nodes cannot be read.
  bool complete() const noexcept { return complete_ && !nodes_.empty(); }

  // A node has another priority than the default, 0: it was set, or captured on a stream with a priority.
  bool chosen() const noexcept;

  // False where the driver refuses; nothing is changed then.
  bool set(int priority) noexcept;

  // The same beyond the scope: of a graph of ours.
  bool set_for_good(int priority) noexcept;

 private:
  struct Node {
    CUgraphNode handle;
    int priority;  // its own
    bool changed;
  };

  bool find(CUgraph graph, int depth);
  void restore() noexcept;

  std::vector<Node> nodes_;
  bool complete_ = false;
};

}  // namespace cudasched::driver
