// The cuts of a graph of kernels: a best-effort graph launch is submitted in slices, and the gate may close between two
// of them.
//
// Every node that a node of a slice depends on is in that slice or an earlier one. Each slice is a graph of its nodes
// and the edges among them. Submitted in order to one stream, the slices keep every order that the graph's edges
// require.
//
// A cut costs the overlap of branches across the cut: the slices' critical paths add up to more than the graph's. Cuts
// are chosen so that the sum is at most `most_growth` times the graph's. Where no such cuts exist, slices are longer
// than `slice_ns`, and the plan gives the reason. Kernels that may wait for one another share a slice with every node
// that is not ordered to them. Collectives are such kernels: one waits for a peer, which may itself wait for another,
// in any order. A cut through a programmatic edge is legal, because such an edge allows overlap and promises none. The
// plan avoids such a cut where another is nearly as good. Where one slice would take nine tenths of the graph, the
// graph stays whole.
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
  std::int64_t predicted_ns = 0;                 // with the time until a node behind it begins; at least 0
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
  // The additional overlap that a cut through a programmatic edge may cost and still be taken.
  std::int64_t programmatic_ns = 5'000;
  std::uint32_t most_slices = 4096;  // slices grow where more were needed
};

struct Slice {
  std::int64_t critical_ns = 0;  // its critical path
  std::uint32_t nodes = 0;
  // Why the slice is longer than `slice_ns`: kNone (not longer), kOneNode (a single node is), kBranches, kWaits,
  // kTooLarge (most_slices).
  WholeReason over = WholeReason::kNone;
};

struct Plan {
  WholeReason whole = WholeReason::kNone;  // other than kNone: the graph is not cut, and `slices` is empty
  std::int64_t critical_ns = 0;            // of the whole graph
  std::vector<Slice> slices;               // two or more, in the order in which they are submitted
  std::vector<std::uint32_t> slice_of;     // by node

  bool cut() const noexcept { return whole == WholeReason::kNone; }
};

Plan plan(std::span<const Node> nodes, std::span<const Edge> edges, const Limits& limits = {});

// A slice of a plan, or a graph that was launched whole, and its times.
struct Measured {
  std::int64_t predicted_ns = 0;
  std::int64_t measured_ns = 0;  // 0: not measured
  std::uint32_t nodes = 0;
};

// Is a graph to be cut again, because its predictions were wrong? The factor for each slice's predictions; empty: the
// cuts stay. Slices over twice their intended length are cut. Where slices are short overall, a plan has more slices
// than necessary, and each costs a launch: all are cut anew, by their measured times.
std::vector<double> corrections(std::span<const Measured> slices, std::int64_t slice_ns);

// Is this the name of a kernel that may wait for another one (NCCL's, NVSHMEM's and the like)?
bool may_wait(std::string_view kernel_name) noexcept;

}  // namespace cudasched::graph
