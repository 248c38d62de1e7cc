// Each feature's contribution to a row's margin: exact Shapley values of the trees, path-dependent (TreeSHAP), in
// double.
//
// A coalition of features knows its members' values. At a split of any other feature, both ways count, by the share of
// training weight (cover) that went each way. A leaf's value under coalition S is a product over the features of its
// path. The factor is one where the feature is in S and the row stays on the path, and `share` where the feature is not
// in S. A Shapley value is the mean over t in [0, 1] of the feature's change when every other one is in S with chance
// t. Each product is then a polynomial in t of the path's length less one, which Gauss-Legendre quadrature integrates
// without error.
//
// The contributions and the bias, which is the mean over the training rows, add up to the margin.
//
// Immutable: any number of threads may ask one. For people who ask why, not for the launch path: a fraction of a
// millisecond.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "predict/trees/model.hpp"

namespace cudasched::predict::trees {

class Explainer {
 public:
  // Of all leaves' paths; 24 bytes each.
  static constexpr std::size_t kMaxConditions = std::size_t{4} << 20;

  // Throws ModelError where the trees' paths are longer than kMaxConditions in sum.
  explicit Explainer(const Model& model);

  std::uint32_t features() const noexcept { return features_; }

  // `row` has features() values, NaN is a missing one; `out` gets features() contributions, then the bias.
  void contributions(const float* row, double* out) const;

 private:
  // A path's condition on one feature: the row stays on it iff first <= order_key(value) < last, or stays_missing.
  struct Condition {
    double share = 1;
    std::uint32_t first = 0;
    std::uint32_t last = ~std::uint32_t{0};
    std::uint16_t feature = 0;
    bool stays_missing = true;
  };

  struct Leaf {
    double value = 0;
    std::uint32_t conditions = 0;  // how many of conditions_, after those of the leaves before
  };

  struct Point {
    double at = 0;
    double weight = 0;
  };

  // Exact for polynomials of a degree below 2 * count.
  static std::vector<Point> quadrature(std::size_t count);

  void add_tree(const Tree& tree);

  std::uint32_t features_;
  double bias_;
  std::vector<Leaf> leaves_;
  std::vector<Condition> conditions_;
  std::vector<std::vector<Point>> quadratures_;  // by the number of a leaf's conditions
};

}  // namespace cudasched::predict::trees
