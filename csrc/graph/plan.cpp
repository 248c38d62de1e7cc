#include "graph/plan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string_view>

namespace cudasched::graph {
namespace {

using Index = std::uint32_t;

constexpr Index kNowhere = ~Index{0};
constexpr double kWorthwhile = 0.9;  // the longest slice in terms of the graph, beyond which cutting is not

// Lists of neighbours, by node.
struct Neighbours {
  std::vector<Index> begin;  // n + 1
  std::vector<Index> list;

  Neighbours(std::size_t nodes, std::span<const Edge> edges, bool forward) : begin(nodes + 1, 0), list(edges.size()) {
    for (const Edge& edge : edges) ++begin[(forward ? edge.from : edge.to) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<Index> at(begin.begin(), begin.end() - 1);
    for (const Edge& edge : edges) {
      list[at[forward ? edge.from : edge.to]++] = forward ? edge.to : edge.from;
    }
  }

  std::span<const Index> of(Index node) const noexcept {
    return {list.data() + begin[node], list.data() + begin[node + 1]};
  }
};

class Planner {
 public:
  Planner(std::span<const Node> nodes, std::span<const Edge> edges, const Limits& limits)
      : nodes_(nodes),
        edges_(edges),
        limits_(limits),
        count_(static_cast<Index>(nodes.size())),
        after_(nodes.size(), edges, true),
        before_(nodes.size(), edges, false) {}

  Plan make();

 private:
  std::int64_t ns(Index node) const noexcept { return nodes_[node].predicted_ns; }
  bool find_order();
  void find_tails();
  void find_glue();
  void find_programmatic();
  void choose(Plan& plan);
  Index choose_end(Index begin);
  bool may_cut(Index cut) const noexcept { return glued_[cut] == 0; }

  std::span<const Node> nodes_;
  std::span<const Edge> edges_;
  const Limits& limits_;
  const Index count_;
  const Neighbours after_;
  const Neighbours before_;

  // A cut is numbered by the count of nodes of `order_` ahead of it.
  std::vector<Index> order_;  // of the nodes: each behind all its dependencies
  std::vector<Index> place_;  // by node, in `order_`
  std::int64_t critical_ns_ = 0;
  std::vector<std::int64_t> tail_ns_;       // by cut: the critical path of the nodes behind it
  std::vector<std::int64_t> local_ns_;      // by node: the longest path to its end, within this slice
  std::vector<std::int32_t> glued_;         // by cut: other than 0, not allowed
  std::vector<std::int32_t> programmatic_;  // by cut: the number of programmatic edges across
  std::int64_t slice_ns_ = 0;               // as limits_, or more where there would be too many slices
  std::int64_t growth_ns_ = 0;              // by the cuts so far
  std::size_t looks_ = 0;
  WholeReason over_ = WholeReason::kNone;  // of the slice that choose_end() ended
};

// Topological, by the middle of each node where every node begins as early as possible. Of a node that runs across a
// cut, at most half is then on the wrong side. False where the edges make no order.
bool Planner::find_order() {
  std::vector<Index> open(count_);
  std::vector<Index> ready;
  ready.reserve(count_);
  for (Index node = 0; node < count_; ++node) {
    open[node] = static_cast<Index>(before_.of(node).size());
    if (open[node] == 0) ready.push_back(node);
  }
  std::vector<std::int64_t> start_ns(count_, 0);
  std::vector<Index> rank(count_);
  for (Index i = 0; i < ready.size(); ++i) {  // grows
    const Index node = ready[i];
    rank[node] = i;
    const std::int64_t end_ns = start_ns[node] + ns(node);
    critical_ns_ = std::max(critical_ns_, end_ns);
    for (const Index next : after_.of(node)) {
      start_ns[next] = std::max(start_ns[next], end_ns);
      if (--open[next] == 0) ready.push_back(next);
    }
  }
  if (ready.size() != count_) return false;
  order_ = std::move(ready);
  std::sort(order_.begin(), order_.end(), [&](Index a, Index b) {
    const std::int64_t middle_a = 2 * start_ns[a] + ns(a);
    const std::int64_t middle_b = 2 * start_ns[b] + ns(b);
    return middle_a != middle_b ? middle_a < middle_b : rank[a] < rank[b];
  });
  place_.resize(count_);
  for (Index i = 0; i < count_; ++i) place_[order_[i]] = i;
  return true;
}

void Planner::find_tails() {
  tail_ns_.assign(count_ + 1, 0);
  std::vector<std::int64_t> from_ns(count_);
  for (Index i = count_; i-- > 0;) {
    const Index node = order_[i];
    std::int64_t longest = 0;
    for (const Index next : after_.of(node)) longest = std::max(longest, from_ns[next]);
    from_ns[node] = longest + ns(node);
    tail_ns_[i] = std::max(tail_ns_[i + 1], from_ns[node]);
  }
}

// Forbids each cut between a node that may wait and one that is not ordered to it. Takes 64 of these at a time: each
// node's bits tell those ahead of the node and those behind.
void Planner::find_glue() {
  glued_.assign(count_ + 2, 0);
  std::vector<Index> waits;
  for (const Index node : order_) {
    if (nodes_[node].may_wait) waits.push_back(node);
  }
  std::vector<Index> ordinal(count_, 0);
  for (Index i = 0; i < waits.size(); ++i) ordinal[waits[i]] = i;
  std::vector<std::uint64_t> ordered(count_);
  for (Index first = 0; first < waits.size(); first += 64) {
    const Index some = std::min<Index>(64, static_cast<Index>(waits.size()) - first);
    std::array<Index, 64> lowest{};
    std::array<Index, 64> highest{};
    for (Index i = 0; i < some; ++i) lowest[i] = highest[i] = place_[waits[first + i]];
    const auto own_bit = [&](Index node) {
      const bool is_one = nodes_[node].may_wait && ordinal[node] >= first && ordinal[node] < first + some;
      return is_one ? std::uint64_t{1} << (ordinal[node] - first) : 0;
    };
    const auto at = [&](Index step, bool forward) { return forward ? step : count_ - 1 - step; };
    // Which ones each node is behind (forward), or ahead of.
    const auto spread = [&](const Neighbours& towards, bool forward) {
      for (Index step = 0; step < count_; ++step) {
        const Index node = order_[at(step, forward)];
        std::uint64_t bits = own_bit(node);
        for (const Index neighbour : towards.of(node)) bits |= ordered[neighbour];
        ordered[node] = bits;
      }
    };
    // From the end towards each one's own place: the first node that is not ordered to that one.
    const auto furthest = [&](bool forward, std::array<Index, 64>& found) {
      std::uint64_t open = some == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << some) - 1;
      for (Index step = 0; step < count_ && open != 0; ++step) {
        const Index node = order_[at(step, forward)];
        for (std::uint64_t bits = ~ordered[node] & open; bits != 0; bits &= bits - 1) {
          found[static_cast<std::size_t>(std::countr_zero(bits))] = at(step, forward);
        }
        open &= ordered[node] & ~own_bit(node);
      }
    };
    spread(before_, true);
    furthest(false, highest);
    spread(after_, false);
    furthest(true, lowest);
    for (Index i = 0; i < some; ++i) {
      ++glued_[lowest[i] + 1];
      --glued_[highest[i] + 1];
    }
  }
  std::partial_sum(glued_.begin(), glued_.end(), glued_.begin());
}

void Planner::find_programmatic() {
  programmatic_.assign(count_ + 2, 0);
  for (const Edge& edge : edges_) {
    if (!edge.programmatic) continue;
    ++programmatic_[place_[edge.from] + 1];
    --programmatic_[place_[edge.to] + 1];
  }
  std::partial_sum(programmatic_.begin(), programmatic_.end(), programmatic_.begin());
}

// The best cut behind `begin`, count_ where there is none. As the slice grows node by node, its critical path is known
// exactly. So is the cost of a cut here, because the costs of all cuts add up to the growth of the whole.
Index Planner::choose_end(Index begin) {
  // Slices of equal length, rather than full ones and a rest.
  const std::int64_t left = tail_ns_[begin];
  const std::int64_t slices = std::max<std::int64_t>(1, (left + slice_ns_ - 1) / slice_ns_);
  const std::int64_t wanted_ns = left / slices;
  const double allowed = limits_.most_growth - 1;
  Index best = kNowhere;
  double best_cost = 0;
  std::int64_t best_growth = 0;
  std::int64_t longest = 0;
  bool costly = false;
  bool glued = false;
  // Beyond this, each slice ends at its first allowed cut: a graph for which windows overlap without end.
  const bool hurried = looks_ > 64 * (std::size_t{count_} + edges_.size());
  over_ = WholeReason::kNone;
  for (Index cut = begin + 1; cut <= count_; ++cut) {
    const Index node = order_[cut - 1];
    std::int64_t start_ns = 0;
    for (const Index earlier : before_.of(node)) {
      if (place_[earlier] >= begin) start_ns = std::max(start_ns, local_ns_[earlier]);
      ++looks_;
    }
    ++looks_;
    local_ns_[node] = start_ns + ns(node);
    const std::int64_t with = std::max(longest, local_ns_[node]);
    const bool over = with > slice_ns_;
    if (over && best != kNowhere) break;  // full, and there is a place to end
    longest = with;
    if (cut == count_) {
      if (over) over_ = cut == begin + 1 ? WholeReason::kOneNode : glued ? WholeReason::kWaits : WholeReason::kBranches;
      best = count_;
      best_growth = 0;
      break;
    }
    if (!may_cut(cut)) {
      glued = true;
      continue;
    }
    const std::int64_t growth = longest + tail_ns_[cut] - tail_ns_[begin];
    const auto budget = static_cast<std::int64_t>(allowed * static_cast<double>(critical_ns_ - tail_ns_[cut]));
    if (growth_ns_ + growth > budget) {
      costly = true;
      continue;
    }
    if (over) {  // the slice had to grow: no further than here
      over_ = cut == begin + 1   ? WholeReason::kOneNode
              : glued && !costly ? WholeReason::kWaits
                                 : WholeReason::kBranches;
      best = cut;
      best_growth = growth;
      break;
    }
    const auto off = static_cast<double>(longest > wanted_ns ? longest - wanted_ns : wanted_ns - longest);
    const double cost = static_cast<double>(growth) + off / 8 +
                        (programmatic_[cut] > 0 ? static_cast<double>(limits_.programmatic_ns) : 0.0);
    // A slice of less than half the length is worth its launch only where nothing else may be.
    const double small = 2 * longest < wanted_ns ? static_cast<double>(slice_ns_) : 0.0;
    if (best == kNowhere || cost + small <= best_cost) {
      best = cut;
      best_cost = cost + small;
      best_growth = growth;
    }
    if (hurried) break;
  }
  growth_ns_ += best_growth;
  return best;
}

void Planner::choose(Plan& plan) {
  // A slice is at least a third full, but where a single node follows that is too long for any.
  slice_ns_ = std::max(limits_.slice_ns, 3 * (critical_ns_ / std::max<std::int64_t>(1, limits_.most_slices)));
  local_ns_.assign(count_, 0);
  plan.slice_of.resize(count_);
  for (Index begin = 0; begin < count_;) {
    const Index end = choose_end(begin);
    Slice slice;
    slice.nodes = end - begin;
    slice.over = over_;
    for (Index i = begin; i < end; ++i) {
      plan.slice_of[order_[i]] = static_cast<Index>(plan.slices.size());
      slice.critical_ns = std::max(slice.critical_ns, local_ns_[order_[i]]);
    }
    if (slice.over == WholeReason::kNone && slice.critical_ns > limits_.slice_ns) slice.over = WholeReason::kTooLarge;
    plan.slices.push_back(slice);
    begin = end;
  }
}

Plan Planner::make() {
  Plan plan;
  const auto whole = [&](WholeReason reason) {
    plan.whole = reason;
    plan.slices.clear();
    plan.slice_of.clear();
    return plan;
  };
  if (!find_order()) return whole(WholeReason::kMalformed);
  plan.critical_ns = critical_ns_;
  for (const Node& node : nodes_) {
    if (node.keeps_whole != WholeReason::kNone) return whole(node.keeps_whole);
  }
  if (count_ <= 1) return whole(WholeReason::kOneNode);
  if (critical_ns_ <= limits_.slice_ns) return whole(WholeReason::kShort);
  find_tails();
  find_glue();
  find_programmatic();
  choose(plan);
  if (plan.slices.size() > limits_.most_slices) return whole(WholeReason::kTooLarge);
  const Slice& longest = *std::max_element(plan.slices.begin(), plan.slices.end(), [](const Slice& a, const Slice& b) {
    return a.critical_ns < b.critical_ns;
  });
  // Else a request that waits for that one waits for about as long as for the whole graph.
  if (static_cast<double>(longest.critical_ns) < kWorthwhile * static_cast<double>(critical_ns_)) return plan;
  const WholeReason over = longest.over;
  return whole(over == WholeReason::kNone ? WholeReason::kShort : over);
}

}  // namespace

Plan plan(std::span<const Node> nodes, std::span<const Edge> edges, const Limits& limits) {
  Plan whole;
  constexpr std::int64_t kLongest = std::numeric_limits<std::int64_t>::max() / 8;
  std::int64_t sum = 0;
  for (const Node& node : nodes) {
    if (node.predicted_ns < 0 || node.predicted_ns > kLongest - sum) whole.whole = WholeReason::kMalformed;
    if (whole.whole == WholeReason::kNone) sum += node.predicted_ns;
  }
  for (const Edge& edge : edges) {
    if (edge.from >= nodes.size() || edge.to >= nodes.size()) whole.whole = WholeReason::kMalformed;
  }
  if (nodes.size() >= kNowhere || edges.size() >= kNowhere) whole.whole = WholeReason::kTooLarge;
  if (!whole.cut()) return whole;
  return Planner(nodes, edges, limits).make();
}

std::vector<double> corrections(std::span<const Measured> slices, std::int64_t slice_ns) {
  constexpr double kShort = 2.0 / 3;  // of the predicted time, all in all
  const auto is_known = [](const Measured& slice) { return slice.predicted_ns > 0 && slice.measured_ns > 0; };
  const auto factor = [](std::int64_t measured_ns, std::int64_t predicted_ns) {
    return static_cast<double>(measured_ns) / static_cast<double>(predicted_ns);
  };
  std::int64_t all_ns = 0;  // as predicted,
  Measured known;           // of which slices that were measured
  for (const Measured& slice : slices) {
    all_ns += slice.predicted_ns;
    if (!is_known(slice)) continue;
    known.predicted_ns += slice.predicted_ns;
    known.measured_ns += slice.measured_ns;
  }
  const double usual = is_known(known) ? factor(known.measured_ns, known.predicted_ns) : 1.0;
  // A graph that takes no longer than a slice cannot be cut better.
  const bool are_short = 2 * known.predicted_ns >= all_ns && usual < kShort && known.measured_ns > slice_ns;
  bool is_long = false;
  std::vector<double> factors;
  for (const Measured& slice : slices) {
    const bool cuts = is_known(slice) && slice.nodes > 1 && slice.measured_ns > 2 * slice_ns;
    is_long = is_long || cuts;
    factors.push_back(is_known(slice) && (cuts || are_short) ? factor(slice.measured_ns, slice.predicted_ns)
                      : are_short                            ? usual
                                                             : 1.0);
  }
  if (!is_long && !are_short) factors.clear();
  return factors;
}

bool may_wait(std::string_view kernel_name) noexcept {
  // Lower case. Those of libraries, then other names of such kernels: one too many costs a cut.
  constexpr std::array<std::string_view, 16> kSigns{
      "nccl",      "nvshmem",    "symm_mem",  "deep_ep",     "multimem",      "cross_device",
      "allreduce", "all_reduce", "allgather", "all_gather",  "reducescatter", "reduce_scatter",
      "alltoall",  "all_to_all", "barrier",   "wait_signal",
  };
  const auto same = [](char sign, char letter) {
    return sign == static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  };
  return std::any_of(kSigns.begin(), kSigns.end(), [&](std::string_view sign) {
    return std::search(kernel_name.begin(), kernel_name.end(), sign.begin(), sign.end(),
                       [&](char letter, char of_sign) { return same(of_sign, letter); }) != kernel_name.end();
  });
}

}  // namespace cudasched::graph
