// The planner: what any plan must keep, over random graphs, and where particular graphs are cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "graph/plan.hpp"

namespace cudasched::graph {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using Random = std::mt19937_64;

struct Graph {
  std::vector<Node> nodes;
  std::vector<Edge> edges;

  std::uint32_t add(std::int64_t ns, const std::vector<std::uint32_t>& after = {}, bool may_wait = false) {
    nodes.push_back({.predicted_ns = ns, .may_wait = may_wait});
    const auto node = static_cast<std::uint32_t>(nodes.size() - 1);
    for (const std::uint32_t before : after) edges.push_back({before, node});
    return node;
  }

  Plan plan(const Limits& limits = {}) const { return graph::plan(nodes, edges, limits); }
};

Graph chain(int count, std::int64_t ns) {
  Graph graph;
  for (int i = 0; i < count; ++i) graph.add(ns);
  for (std::uint32_t i = 1; i < graph.nodes.size(); ++i) graph.edges.push_back({i - 1, i});
  return graph;
}

std::uint64_t below(Random& random, std::uint64_t most) { return random() % std::max<std::uint64_t>(1, most); }

// Nodes in any order of their numbers: an edge may lead from a higher to a lower one.
Graph shuffled(Random& random, const Graph& graph) {
  std::vector<std::uint32_t> to(graph.nodes.size());
  std::iota(to.begin(), to.end(), 0U);
  std::shuffle(to.begin(), to.end(), random);
  Graph result;
  result.nodes.resize(graph.nodes.size());
  for (std::size_t i = 0; i < to.size(); ++i) result.nodes[to[i]] = graph.nodes[i];
  for (const Edge& edge : graph.edges) result.edges.push_back({to[edge.from], to[edge.to], edge.programmatic});
  std::shuffle(result.edges.begin(), result.edges.end(), random);
  return result;
}

std::int64_t random_ns(Random& random) {
  switch (below(random, 5)) {
    case 0:
      return 0;
    case 1:
      return static_cast<std::int64_t>(below(random, 2'000));
    case 2:
      return static_cast<std::int64_t>(below(random, 400'000));
    default:
      return static_cast<std::int64_t>(below(random, 30'000));
  }
}

// Branches that fork and join, layers, and edges at random.
Graph random_graph(Random& random) {
  Graph graph;
  const std::uint64_t count = below(random, 4) == 0 ? below(random, 6) : below(random, 80);
  const std::uint64_t shape = below(random, 4);
  const std::uint64_t width = 1 + below(random, 6);
  const bool waits = below(random, 3) == 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::vector<std::uint32_t> after;
    if (shape == 0 && i > 0) {  // mostly a chain
      after.push_back(static_cast<std::uint32_t>(below(random, 8) == 0 ? below(random, i) : i - 1));
    } else if (shape == 1) {  // layers
      const std::uint64_t layer = i / width;
      for (std::uint64_t j = layer == 0 ? i : (layer - 1) * width; j < layer * width; ++j) {
        if (below(random, 2) == 0) after.push_back(static_cast<std::uint32_t>(j));
      }
    } else if (shape == 2) {  // parallel chains that join at times
      if (i >= width) after.push_back(static_cast<std::uint32_t>(i - width));
      if (i >= width && below(random, 5) == 0) {
        for (std::uint64_t j = i - width + 1; j < i; ++j) after.push_back(static_cast<std::uint32_t>(j));
      }
    } else {
      for (std::uint64_t j = 0; j < i; ++j) {
        if (below(random, 10) == 0) after.push_back(static_cast<std::uint32_t>(j));
      }
    }
    graph.add(random_ns(random), after, waits && below(random, 12) == 0);
  }
  for (Edge& edge : graph.edges) edge.programmatic = below(random, 6) == 0;
  return shuffled(random, graph);
}

// The longest path through the nodes that `in` says true of.
template <typename In>
std::int64_t critical_ns(const Graph& graph, In&& in) {
  std::vector<std::vector<std::uint32_t>> next(graph.nodes.size());
  std::vector<std::size_t> open(graph.nodes.size(), 0);
  for (const Edge& edge : graph.edges) {
    next[edge.from].push_back(edge.to);
    ++open[edge.to];
  }
  std::queue<std::uint32_t> ready;
  std::vector<std::int64_t> start(graph.nodes.size(), 0);
  for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
    if (open[i] == 0) ready.push(i);
  }
  std::int64_t longest = 0;
  for (; !ready.empty(); ready.pop()) {
    const std::uint32_t node = ready.front();
    const std::int64_t end = in(node) ? start[node] + graph.nodes[node].predicted_ns : 0;
    longest = std::max(longest, end);
    for (const std::uint32_t to : next[node]) {
      if (in(node) && in(to)) start[to] = std::max(start[to], end);
      if (--open[to] == 0) ready.push(to);
    }
  }
  return longest;
}

// ordered[a][b]: b is behind a.
std::vector<std::vector<bool>> reach(const Graph& graph) {
  const std::size_t count = graph.nodes.size();
  std::vector<std::vector<bool>> ordered(count, std::vector<bool>(count, false));
  for (const Edge& edge : graph.edges) ordered[edge.from][edge.to] = true;
  for (std::size_t via = 0; via < count; ++via) {
    for (std::size_t a = 0; a < count; ++a) {
      if (!ordered[a][via]) continue;
      for (std::size_t b = 0; b < count; ++b) ordered[a][b] = ordered[a][b] || ordered[via][b];
    }
  }
  return ordered;
}

std::size_t slices_of(const Plan& plan) { return plan.slices.size(); }

// Everything that a plan promises.
void check(const Graph& graph, const Plan& plan, const Limits& limits) {
  ASSERT_EQ(plan.critical_ns, critical_ns(graph, [](std::uint32_t) { return true; }));
  if (!plan.cut()) {
    ASSERT_TRUE(plan.slices.empty());
    ASSERT_TRUE(plan.slice_of.empty());
    if (plan.whole == WholeReason::kShort) {
      ASSERT_LE(9 * plan.critical_ns, 10 * limits.slice_ns);
    } else if (plan.whole == WholeReason::kOneNode) {
      const bool one = std::any_of(graph.nodes.begin(), graph.nodes.end(),
                                   [&](const Node& node) { return 10 * node.predicted_ns >= 9 * plan.critical_ns; });
      ASSERT_TRUE(one || graph.nodes.size() <= 1);
    } else if (plan.whole == WholeReason::kWaits) {
      ASSERT_TRUE(std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) { return node.may_wait; }));
    } else {
      ASSERT_EQ(plan.whole, WholeReason::kBranches);
      ASSERT_GT(plan.critical_ns, limits.slice_ns);
    }
    return;
  }
  ASSERT_GE(plan.slices.size(), 2U);
  ASSERT_LE(plan.slices.size(), limits.most_slices);
  // Nothing lost, nothing twice.
  ASSERT_EQ(plan.slice_of.size(), graph.nodes.size());
  std::vector<std::uint32_t> nodes(plan.slices.size(), 0);
  for (const std::uint32_t slice : plan.slice_of) {
    ASSERT_LT(slice, plan.slices.size());
    ++nodes[slice];
  }
  // Whatever order the nodes of a slice run in that its own edges allow, the whole graph's edges allow it.
  for (const Edge& edge : graph.edges) ASSERT_LE(plan.slice_of[edge.from], plan.slice_of[edge.to]);
  std::int64_t together = 0;
  for (std::uint32_t i = 0; i < plan.slices.size(); ++i) {
    const Slice& slice = plan.slices[i];
    ASSERT_EQ(slice.nodes, nodes[i]);
    ASSERT_GT(slice.nodes, 0U);
    ASSERT_EQ(slice.critical_ns, critical_ns(graph, [&](std::uint32_t node) { return plan.slice_of[node] == i; }));
    ASSERT_EQ(slice.critical_ns > limits.slice_ns, slice.over != WholeReason::kNone);
    ASSERT_TRUE(slice.over != WholeReason::kOneNode || slice.nodes == 1);
    together += slice.critical_ns;
  }
  ASSERT_LE(static_cast<double>(together), limits.most_growth * static_cast<double>(plan.critical_ns) + 1);
  const bool waits =
      std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) { return node.may_wait; });
  if (!waits) return;
  const auto ordered = reach(graph);
  for (std::size_t a = 0; a < graph.nodes.size(); ++a) {
    if (!graph.nodes[a].may_wait) continue;
    for (std::size_t b = 0; b < graph.nodes.size(); ++b) {
      if (ordered[a][b] || ordered[b][a]) continue;
      ASSERT_EQ(plan.slice_of[a], plan.slice_of[b]) << "may wait for one another";
    }
  }
}

TEST(Plan, KeepsWhatItPromisesOverRandomGraphs) {
  Random random(14);
  std::map<WholeReason, int> seen;
  std::map<WholeReason, int> over;
  for (int round = 0; round < 6'000; ++round) {
    const Graph graph = random_graph(random);
    Limits limits;
    limits.slice_ns = 1'000 + static_cast<std::int64_t>(below(random, 300'000));
    limits.most_growth = below(random, 4) == 0 ? 1.2 : 1.03;
    const Plan plan = graph.plan(limits);
    ++seen[plan.whole];
    for (const Slice& slice : plan.slices) ++over[slice.over];
    ASSERT_NO_FATAL_FAILURE(check(graph, plan, limits)) << "round " << round;
  }
  // The graphs were of all sorts.
  for (const WholeReason each :
       {WholeReason::kNone, WholeReason::kShort, WholeReason::kOneNode, WholeReason::kBranches, WholeReason::kWaits}) {
    EXPECT_GT(seen[each], 20) << name(each);
  }
  for (const WholeReason each :
       {WholeReason::kNone, WholeReason::kOneNode, WholeReason::kBranches, WholeReason::kWaits}) {
    EXPECT_GT(over[each], 20) << name(each);
  }
}

TEST(Plan, CutsAChainIntoSlicesOfEqualLength) {
  const Graph graph = chain(100, 10'000);
  const Plan plan = graph.plan();
  ASSERT_TRUE(plan.cut());
  ASSERT_EQ(slices_of(plan), 5U);
  for (const Slice& slice : plan.slices) EXPECT_EQ(slice.critical_ns, 200'000);
  const Plan uneven = chain(21, 10'000).plan();  // 11 and 10, not 20 and a rest of 1
  ASSERT_EQ(slices_of(uneven), 2U);
  EXPECT_LE(uneven.slices.front().nodes, 12U);
}

TEST(Plan, CutsBranchesWhereTheyMeet) {
  Graph graph;
  std::uint32_t last = graph.add(1'000);
  for (int i = 0; i < 6; ++i) {  // branches of 150 us and of 3 times 50, that join
    const std::uint32_t left = graph.add(150'000, {last});
    const std::uint32_t right = graph.add(50'000, {graph.add(50'000, {graph.add(50'000, {last})})});
    last = graph.add(1'000, {left, right});
  }
  const Plan plan = graph.plan();
  ASSERT_NO_FATAL_FAILURE(check(graph, plan, {}));
  ASSERT_EQ(slices_of(plan), 6U);
}

TEST(Plan, LeavesBranchesWholeThatNoCutMayPart) {
  Graph graph;
  const std::uint32_t root = graph.add(1'000);
  std::uint32_t left = root;
  std::vector<std::uint32_t> ends{graph.add(1'000'000, {root})};  // beside ten of 100 us
  for (int i = 0; i < 10; ++i) left = graph.add(100'000, {left});
  ends.push_back(left);
  graph.add(1'000, ends);
  EXPECT_EQ(graph.plan().whole, WholeReason::kBranches);
}

TEST(Plan, GivesANodeThatIsTooLongASliceOfItsOwn) {
  Graph graph = chain(9, 100'000);
  graph.nodes[4].predicted_ns = 900'000;
  const Plan plan = graph.plan();
  ASSERT_NO_FATAL_FAILURE(check(graph, plan, {}));
  ASSERT_TRUE(plan.cut());
  const Slice& longest = plan.slices[plan.slice_of[4]];
  EXPECT_EQ(longest.nodes, 1U);
  EXPECT_EQ(longest.over, WholeReason::kOneNode);
}

TEST(Plan, CutsBesideProgrammaticEdgesWhereItCan) {
  Graph graph = chain(60, 10'000);
  for (std::size_t i = 0; i < graph.edges.size(); ++i) graph.edges[i].programmatic = i % 4 != 3;
  const Plan plan = graph.plan();
  ASSERT_TRUE(plan.cut());
  for (const Edge& edge : graph.edges) {
    EXPECT_TRUE(!edge.programmatic || plan.slice_of[edge.from] == plan.slice_of[edge.to]) << edge.from;
  }
  for (Edge& edge : graph.edges) edge.programmatic = true;
  EXPECT_TRUE(graph.plan().cut());  // legal
}

TEST(Plan, KeepsKernelsThatMayWaitWithWhatIsNotOrderedToThem) {
  Graph graph;
  std::uint32_t last = graph.add(100'000);
  for (int i = 0; i < 3; ++i) last = graph.add(100'000, {last});
  const std::uint32_t wait = graph.add(50'000, {last}, true);
  std::vector<std::uint32_t> beside;
  for (int i = 0; i < 5; ++i) beside.push_back(last = graph.add(100'000, {last}));
  last = graph.add(100'000, {last, wait});
  for (int i = 0; i < 4; ++i) last = graph.add(100'000, {last});
  const Plan plan = graph.plan();
  ASSERT_NO_FATAL_FAILURE(check(graph, plan, {}));
  ASSERT_TRUE(plan.cut());
  for (const std::uint32_t node : beside) EXPECT_EQ(plan.slice_of[node], plan.slice_of[wait]);
  EXPECT_EQ(plan.slices[plan.slice_of[wait]].over, WholeReason::kWaits);
  EXPECT_GE(slices_of(plan), 4U);
}

TEST(Plan, OfAWaitingRootBesideEverythingIsWhole) {
  Graph graph = chain(50, 20'000);
  graph.add(10'000, {}, true);
  EXPECT_EQ(graph.plan().whole, WholeReason::kWaits);
}

TEST(Plan, SaysWhyAGraphStaysWhole) {
  EXPECT_EQ(Graph{}.plan().whole, WholeReason::kOneNode);
  EXPECT_EQ(chain(1, 900'000).plan().whole, WholeReason::kOneNode);
  EXPECT_EQ(chain(10, 20'000).plan().whole, WholeReason::kShort);
  Graph memory = chain(50, 20'000);
  memory.nodes[7].keeps_whole = WholeReason::kMemoryNode;
  EXPECT_EQ(memory.plan().whole, WholeReason::kMemoryNode);
  Graph circle = chain(50, 20'000);
  circle.edges.push_back({40, 3});
  EXPECT_EQ(circle.plan().whole, WholeReason::kMalformed);
  Graph self = chain(50, 20'000);
  self.edges.push_back({3, 3});
  EXPECT_EQ(self.plan().whole, WholeReason::kMalformed);
  Graph beyond = chain(50, 20'000);
  beyond.edges.push_back({3, 50});
  EXPECT_EQ(beyond.plan().whole, WholeReason::kMalformed);
  Graph negative = chain(50, 20'000);
  negative.nodes[1].predicted_ns = -1;
  EXPECT_EQ(negative.plan().whole, WholeReason::kMalformed);
  Graph endless = chain(50, INT64_MAX / 10);
  EXPECT_EQ(endless.plan().whole, WholeReason::kMalformed);
}

TEST(Plan, TakesEdgesThatAreThereTwice) {
  Graph graph = chain(50, 20'000);
  graph.edges.insert(graph.edges.end(), graph.edges.begin(), graph.edges.end());
  ASSERT_NO_FATAL_FAILURE(check(graph, graph.plan(), {}));
}

TEST(Plan, MakesNoMoreSlicesThanItMay) {
  Limits limits;
  limits.most_slices = 10;
  const Plan plan = chain(5'000, 20'000).plan(limits);
  ASSERT_TRUE(plan.cut());
  EXPECT_LE(slices_of(plan), 10U);
  for (const Slice& slice : plan.slices) EXPECT_EQ(slice.over, WholeReason::kTooLarge);
}

// A hundred thousand nodes, of the shapes that would take longest. What ends a hang is the test's time limit.
TEST(Plan, OfAHundredThousandNodes) {
  constexpr std::uint32_t kCount = 100'000;
  Graph side_by_side;  // nothing ordered to anything
  Graph chains;        // of different steps, side by side
  Graph collectives = chain(kCount, 3'000);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    side_by_side.add(150'000 + i % 100);
    chains.add(1'000 + 700 * (i % 50), i < 50 ? std::vector<std::uint32_t>{} : std::vector{i - 50});
    collectives.nodes[i].may_wait = i % 50 == 0;
  }
  EXPECT_EQ(side_by_side.plan().whole, WholeReason::kShort);
  Limits limits;
  limits.slice_ns = 100'000;
  EXPECT_EQ(side_by_side.plan(limits).whole, WholeReason::kBranches);
  EXPECT_TRUE(collectives.plan().cut());
  ASSERT_NO_FATAL_FAILURE(chains.plan());
}

TEST(MayWait, KnowsCollectivesByName) {
  for (const char* const each :
       {"ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nvshmemi_proxy_quiet",
        "void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)", "one_shot_all_reduce_kernel",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)", "OneShotAllReduceKernel"}) {
    EXPECT_TRUE(may_wait(each)) << each;
  }
  for (const char* const each : {"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "vectorized_elementwise_kernel", "",
                                 "void at::native::reduce_kernel<512, 1>", "softmax_warp_forward", "n"}) {
    EXPECT_FALSE(may_wait(each)) << each;
  }
}

TEST(WholeReason, HasANameEach) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kWholeReasons; ++i) names.emplace_back(name(static_cast<WholeReason>(i)));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
  EXPECT_FALSE(names.front().empty());
  EXPECT_EQ(name(WholeReason::kMemoryNode), "memory_node");
  EXPECT_EQ(name(WholeReason::kRefused), "refused");
}

constexpr std::int64_t kSlice = 200'000;

TEST(Corrections, NoneWhereSlicesAreAsPredictedOrNotMeasured) {
  EXPECT_TRUE(corrections({}, kSlice).empty());
  EXPECT_TRUE(corrections(std::vector<Measured>(5, {kSlice, 0, 10}), kSlice).empty());
  EXPECT_TRUE(corrections(std::vector<Measured>(5, {kSlice, kSlice * 7 / 10, 10}), kSlice).empty());
  EXPECT_TRUE(corrections(std::vector<Measured>(5, {kSlice, 2 * kSlice, 10}), kSlice).empty());
  EXPECT_TRUE(corrections(std::vector<Measured>(5, {0, kSlice, 10}), kSlice).empty());
}

TEST(Corrections, OfSlicesThatAreFarTooLongAlone) {
  const std::vector<Measured> slices{
      {kSlice, kSlice, 10}, {kSlice, 3 * kSlice, 10}, {kSlice, 0, 10}, {kSlice / 2, kSlice, 10}};
  EXPECT_THAT(corrections(slices, kSlice), ElementsAre(1, 3, 1, 1));
}

TEST(Corrections, NotOfASingleNodeThatIsLong) {
  const std::vector<Measured> slices{{kSlice, kSlice, 10}, {kSlice, 9 * kSlice, 1}};
  EXPECT_TRUE(corrections(slices, kSlice).empty());
}

TEST(Corrections, OfAllSlicesWhereTheyAreShortAllInAll) {
  const std::vector<Measured> slices{
      {kSlice, kSlice / 4, 10}, {kSlice, kSlice / 2, 10}, {kSlice, 0, 10}, {kSlice, kSlice / 2, 1}};
  const std::vector<double> factors = corrections(slices, kSlice);
  EXPECT_THAT(factors, ElementsAre(0.25, 0.5, DoubleNear(1.25 / 3, 1e-9), 0.5));
}

TEST(Corrections, NotWhereFewOfTheShortOnesWereMeasured) {
  const std::vector<Measured> slices{{kSlice, kSlice / 4, 10}, {kSlice, 0, 10}, {kSlice, 0, 10}};
  EXPECT_TRUE(corrections(slices, kSlice / 8).empty());
}

TEST(Corrections, NotWhereAllOfThemFitIntoOneSlice) {
  EXPECT_TRUE(corrections(std::vector<Measured>(5, {kSlice, kSlice / 5, 10}), kSlice).empty());
}

}  // namespace
}  // namespace cudasched::graph
