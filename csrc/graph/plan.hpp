// Where a graph of kernels is cut, so that a best-effort graph launch can be submitted in slices and the gate may close
// between two of them.
//
// A slice is closed under "before" with all slices ahead of it: every node that a node of it depends on is in it or in
// an earlier slice. Submitted in their order to one stream, each a graph of its nodes and of the edges among them, the
// slices keep every order that the graph's edges ask for.
//
// The price of a cut is the overlap of branches that it ends: the slices' critical paths add up to more than the
// graph's. Cuts are chosen so that the sum is at most `most_growth` times the graph's; where that cannot be had, slices
// are longer than `slice_ns`, and the plan says why. Kernels that may wait for one another (collectives: the peer that
// one waits for may itself wait for another one, in any order) share a slice with every node that is not ordered to
// them. A cut through a programmatic edge is legal, because such an edge allows overlap and promises none, and is
// avoided where another cut is nearly as good. Where one slice would take nine tenths of the graph, it stays whole.
//
// Pure, and thread-safe by that. plan() takes O((n + e) (log n + w / 64)) for n nodes, e edges and w nodes that may
// wait, and throws std::bad_alloc alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "graph/reason.hpp"

namespace cudasched::graph {

struct Node {
  std::int64_t predicted_ns = 0;                 // with what passes until a node behind it begins; at least 0
  bool may_wait = false;                         // for another kernel, which may have to run at the same time
  WholeReason keeps_whole = WholeReason::kNone;  // the graph is not cut at all, for this reason
};

// `to` depends on `from`.
struct Edge {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  bool programmatic = false;  // the one may begin before the other has ended
};

struct Limits {
  std::int64_t slice_ns = 200'000;  // of a slice's critical path
  double most_growth = 1.03;        // all slices' critical paths together, in terms of the graph's
  // What a cut through a programmatic edge may cost more in overlap before it is taken.
  std::int64_t programmatic_ns = 5'000;
  std::uint32_t most_slices = 4096;  // slices grow where more were needed
};

struct Slice {
  std::int64_t critical_ns = 0;  // its critical path
  std::uint32_t nodes = 0;
  // Why it is longer than `slice_ns`: kNone (it is not), kOneNode (a single node is), kBranches, kWaits, kTooLarge
  // (most_slices).
  WholeReason over = WholeReason::kNone;
};

struct Plan {
  WholeReason whole = WholeReason::kNone;  // other than kNone: it is not cut, and `slices` is empty
  std::int64_t critical_ns = 0;            // of the whole graph
  std::vector<Slice> slices;               // two or more, in the order in which they are submitted
  std::vector<std::uint32_t> slice_of;     // by node

  bool cut() const noexcept { return whole == WholeReason::kNone; }
};

Plan plan(std::span<const Node> nodes, std::span<const Edge> edges, const Limits& limits = {});

// A slice of a plan, or a graph that went whole, and what it took.
struct Measured {
  std::int64_t predicted_ns = 0;
  std::int64_t measured_ns = 0;  // 0: it was not measured
  std::uint32_t nodes = 0;
};

// Is a graph to be cut again, because its predictions turned out wrong? By what those of each slice's nodes are to be
// multiplied; empty: it is not. Slices over twice as long as they were to be are cut. Where slices are short all in
// all, there are more of them than it takes, each of which costs a launch: all are cut anew, by what they took.
std::vector<double> corrections(std::span<const Measured> slices, std::int64_t slice_ns);

// Is this the name of a kernel that may wait for another one (NCCL's, NVSHMEM's and the like)?
bool may_wait(std::string_view kernel_name) noexcept;

}  // namespace cudasched::graph
