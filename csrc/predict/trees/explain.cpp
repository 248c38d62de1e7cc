#include "predict/trees/explain.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/error.hpp"
#include "predict/trees/layout.hpp"

namespace cudasched::predict::trees {
namespace {

// How much of a split's training weight went to that child. Subtracted sums can be a little below nothing.
double share_of(const Tree& tree, const Node& split, bool is_left) {
  const double left = std::max(tree.covers[static_cast<std::size_t>(split.left)], 0.0F);
  const double right = std::max(tree.covers[static_cast<std::size_t>(split.right)], 0.0F);
  if (left + right == 0) return 0.5;
  return (is_left ? left : right) / (left + right);
}

}  // namespace

Explainer::Explainer(const Model& model) : features_(model.features), bias_(model.base_score) {
  for (const Tree& tree : model.trees) add_tree(tree);
}

void Explainer::add_tree(const Tree& tree) {
  constexpr std::size_t kNone = ~std::size_t{0};
  std::vector<std::size_t> parent(tree.nodes.size(), kNone);
  std::vector<std::size_t> depth(tree.nodes.size(), 0);
  std::vector<std::size_t> condition_of(features_, kNone);  // of this leaf's path
  for (std::size_t at = 0; at < tree.nodes.size(); ++at) {
    const Node& node = tree.nodes[at];
    if (!node.is_leaf()) {
      for (const std::int32_t child : {node.left, node.right}) {
        parent[static_cast<std::size_t>(child)] = at;
        depth[static_cast<std::size_t>(child)] = depth[at] + 1;
      }
      continue;
    }
    if (conditions_.size() + depth[at] > kMaxConditions) {
      throw ModelError("the trees are too deep to explain: their paths have more than " +
                       std::to_string(kMaxConditions) + " splits in sum; train shallower or fewer trees");
    }
    const std::size_t first = conditions_.size();
    double share = 1;
    for (std::size_t child = at; parent[child] != kNone; child = parent[child]) {
      const Node& split = tree.nodes[parent[child]];
      const bool is_left = static_cast<std::size_t>(split.left) == child;
      std::size_t& index = condition_of[split.feature];
      if (index == kNone) {
        index = conditions_.size();
        conditions_.emplace_back().feature = static_cast<std::uint16_t>(split.feature);
      }
      Condition& condition = conditions_[index];
      const double taken = share_of(tree, split, is_left);
      share *= taken;
      condition.share *= taken;
      condition.stays_missing &= split.default_left == is_left;
      const std::uint32_t threshold = order_key(split.value);
      if (is_left) {
        condition.last = std::min(condition.last, threshold);
      } else {
        condition.first = std::max(condition.first, threshold);
      }
    }
    for (std::size_t i = first; i < conditions_.size(); ++i) condition_of[conditions_[i].feature] = kNone;
    const std::size_t count = conditions_.size() - first;
    if (quadratures_.size() <= count) quadratures_.resize(count + 1);
    if (quadratures_[count].empty()) quadratures_[count] = quadrature((count + 1) / 2);
    leaves_.push_back({node.value, static_cast<std::uint32_t>(count)});
    bias_ += node.value * share;
  }
}

void Explainer::contributions(const float* row, double* out) const {
  std::fill_n(out, features_, 0.0);
  out[features_] = bias_;
  std::vector<double> stays(quadratures_.size());  // 1 where the row meets the condition, else 0
  const Condition* conditions = conditions_.data();
  for (const Leaf& leaf : leaves_) {
    const Condition* const own = conditions;
    conditions += leaf.conditions;
    bool is_reachable = true;
    for (std::uint32_t i = 0; i < leaf.conditions; ++i) {
      const float value = row[own[i].feature];
      const std::uint32_t key = order_key(value);
      const bool is_met = std::isnan(value) ? own[i].stays_missing : own[i].first <= key && key < own[i].last;
      stays[i] = is_met ? 1 : 0;
      is_reachable &= is_met || own[i].share > 0;
    }
    if (!is_reachable) continue;
    for (const auto& [at, weight] : quadratures_[leaf.conditions]) {
      double product = leaf.value * weight;
      for (std::uint32_t i = 0; i < leaf.conditions; ++i) product *= own[i].share * (1 - at) + stays[i] * at;
      for (std::uint32_t i = 0; i < leaf.conditions; ++i) {
        out[own[i].feature] += product * (stays[i] - own[i].share) / (own[i].share * (1 - at) + stays[i] * at);
      }
    }
  }
}

// The roots of Legendre's polynomial by Newton's method, moved from [-1, 1] to [0, 1].
std::vector<Explainer::Point> Explainer::quadrature(std::size_t count) {
  std::vector<Point> points(count);
  const auto n = static_cast<double>(count);
  for (std::size_t i = 0; i < count; ++i) {
    double root = std::cos(std::numbers::pi * (static_cast<double>(i) + 0.75) / (n + 0.5));
    double slope = 1;
    double step = 1;
    for (int round = 0; round < 10 && std::abs(step) > 1e-15; ++round) {
      double value = root;
      double before = 1;
      for (double degree = 2; degree <= n; ++degree) {
        const double next = ((2 * degree - 1) * root * value - (degree - 1) * before) / degree;
        before = value;
        value = next;
      }
      slope = n * (root * value - before) / (root * root - 1);
      step = value / slope;
      root -= step;
    }
    points[i] = {(1 + root) / 2, 1 / ((1 - root * root) * slope * slope)};
  }
  return points;
}

}  // namespace cudasched::predict::trees
