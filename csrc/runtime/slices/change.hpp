// A change of an executable graph, as the bytes that make it known to its slices: what the program changed in the whole
// executable is done to the slice that has the node. It can wait in the ring behind launches that are queued, because
// all that it needs is in it, or held by it.
//
// of_node() and of_graph() are called on the program's thread, make() there or on the launcher thread. Throws
// std::bad_alloc alone.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/slices/cut.hpp"

namespace cudasched::runtime {

// A graph of ours, destroyed with its last owner.
using OwnedGraph = std::shared_ptr<CUgraph_st>;
OwnedGraph own(CUgraph graph);

class Change {
 public:
  static constexpr std::uint32_t kWhole = ~std::uint32_t{0};

  // The node at `place` gets the parameters that `from`, a node of a graph of ours, has now.
  static Change of_node(CUgraphNode from, std::uint32_t place);
  static Change of_switch(std::uint32_t place, bool enabled);
  // The nodes get the parameters of those of `graph`; at `place`: those inside of the child graph there.
  static Change of_graph(OwnedGraph graph, std::uint32_t place = kWhole);

  Change() = default;
  Change(Change&& other) noexcept = default;
  Change& operator=(Change&& other) noexcept = default;
  ~Change();

  // All that it needs is in it, or held by it: it may be copied, and made later. Else it is made before `from` changes.
  bool can_wait() const noexcept { return can_wait_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  // A copy of the bytes is made in its place.
  void release() noexcept { bytes_.clear(); }

  // Does it to slices that no other thread uses; once. `bytes` are changed. False where the driver refuses.
  static bool make(std::byte* bytes, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;
  bool make(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;

  // Does it hold a graph? Then it is made while no other thread is at graphs of ours.
  static bool has_graph(const std::byte* bytes) noexcept;

 private:
  std::vector<std::byte> bytes_;
  bool can_wait_ = true;
};

}  // namespace cudasched::runtime
