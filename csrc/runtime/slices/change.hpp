// A change of an executable graph, as bytes for the graph's slices: the slice that has the node gets the program's
// change of the whole executable. A change can wait in the ring behind queued launches, because the bytes have, or
// hold, all its parts.
//
// A slice need not know of a change before it is launched. So changes that come through the ring are kept (Awaited),
// and the launcher makes them slice by slice, while the GPU is at the slice before. Changes of a graph of 2,000 nodes
// take milliseconds.
//
// of_node() and of_graph() are called on the program's thread, the rest there or on the launcher thread.
// Throws std::bad_alloc alone.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/spin_lock.hpp"
#include "runtime/slices/cut.hpp"

namespace cudasched::runtime {

// A graph of ours, or none.
using OwnedGraph = std::shared_ptr<CUgraph_st>;

// Graphs that their last owner, which may be the launcher thread, has given back. The program's thread destroys such a
// graph, or uses it again: each clone changes the driver's state beside the cloned graph.
class GivenBack {
 public:
  static constexpr std::uint32_t kOnce = ~std::uint32_t{0};

  GivenBack() = default;
  GivenBack(const GivenBack&) = delete;
  GivenBack& operator=(const GivenBack&) = delete;
  ~GivenBack() { destroy_all(); }

  // `graph` is given back to `to` when it has no owner any more. `of`: the later use of the graph.
  static OwnedGraph own(CUgraph graph, const std::shared_ptr<GivenBack>& to, std::uint32_t of = kOnce);
  // One of these that was given back, or none.
  static OwnedGraph take(const std::shared_ptr<GivenBack>& from, std::uint32_t of);

  // On the program's thread: those that nobody can use again, or all of them.
  void destroy() noexcept { destroy(once_); }
  void destroy_all() noexcept {
    destroy(once_);
    destroy(again_);
  }

 private:
  // The memory for giving back, made beforehand.
  struct Place {
    CUgraph graph = nullptr;
    std::uint32_t of = kOnce;
    Place* next = nullptr;
  };

  static OwnedGraph own(std::unique_ptr<Place> place, const std::shared_ptr<GivenBack>& to);
  void add(Place* place) noexcept;
  void destroy(Place*& first) noexcept;

  SpinLock lock_;
  Place* once_ = nullptr;
  Place* again_ = nullptr;
};

class Change {
 public:
  static constexpr std::uint32_t kWhole = ~std::uint32_t{0};

  // The node at `place` gets the parameters that `from`, a node of a graph of ours, has now.
  static Change of_node(CUgraphNode from, std::uint32_t place);
  static Change of_switch(std::uint32_t place, bool enabled);
  // The nodes get the parameters of those of `graph`, which `read` was read of; at `place`: those inside of the child
  // graph there. Where slices keep child graphs, `read` is empty.
  static Change of_graph(OwnedGraph graph, ReadGraph read, std::uint32_t place = kWhole);

  Change() = default;
  Change(Change&& other) noexcept = default;
  Change& operator=(Change&& other) noexcept = default;
  ~Change();

  // Do the bytes have, or hold, all parts of the change? Then the change may be copied, and made later. Else the change
  // is made before `from` changes.
  bool can_wait() const noexcept { return can_wait_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  // A copy of the bytes is made in its place.
  void release() noexcept { bytes_.clear(); }

  // Does it to slices that no other thread uses; once. `bytes` are changed. False where the driver refuses.
  static bool make(std::byte* bytes, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;
  bool make(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;

  // Gives back the graph that a change holds, where the change is not made.
  static void discard(const std::byte* bytes) noexcept;

  // Does it hold a graph? Then it is made while no other thread is at graphs of ours, unless it is awaited.
  static bool has_graph(const std::byte* bytes) noexcept;
  // May slices get it one by one (Awaited)? The others are made at once.
  static bool is_awaited(const std::byte* bytes) noexcept;

 private:
  std::vector<std::byte> bytes_;
  bool can_wait_ = true;
};

// The changes that a graph's slices have not had yet, by slice. Of one set of slices: clear() before use with another
// set.
class Awaited {
 public:
  // Of a change that is_awaited(). The bytes are copied.
  void add(const std::byte* bytes, const Pieces& pieces);
  bool by(std::uint32_t piece) const noexcept {
    return piece < pieces_.size() &&
           (pieces_[piece].update || !pieces_[piece].inside.empty() || !pieces_[piece].begins.empty());
  }
  // Tells a slice, or all of them. False where the driver refuses.
  bool make(std::uint32_t piece, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;
  bool make_all(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept;
  void clear() noexcept;

 private:
  // A node that gets the parameters of one of another graph.
  struct Like {
    std::uint32_t place = 0;
    CUgraphNode from = nullptr;
  };

  struct Piece {
    bool update = false;              // comes first,
    std::vector<Like> inside;         // then nodes inside of child graphs,
    std::vector<OwnedGraph> graphs;   // by those of these,
    std::vector<std::byte> nodes;     // then changes of nodes, one behind another,
    std::vector<std::size_t> begins;  // each of which begins there

    void clear() noexcept;
  };

  void index(const Pieces& pieces);
  void add_inside(OwnedGraph graph, const ReadGraph& read, std::uint32_t first, const Pieces& pieces);

  std::vector<Piece> pieces_;
  std::vector<std::uint32_t> places_;  // of the nodes, piece by piece,
  std::vector<std::uint32_t> first_;   // those of each piece from there on
  OwnedGraph graph_;                   // of the last update, until all have been told
  ReadGraph read_;
  std::size_t updates_ = 0;  // pieces that await it
};

}  // namespace cudasched::runtime
