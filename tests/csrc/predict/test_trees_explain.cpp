// Contributions: XGBoost's own, Shapley's definition written out, and the sum that they must have.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "base/error.hpp"
#include "predict/trees/document.hpp"
#include "predict/trees/explain.hpp"
#include "predict/trees_support.hpp"

namespace cudasched::predict::trees {
namespace {

// Covers as training leaves them: a parent's is the sum of its children's.
void add_covers(Model& model, std::uint64_t seed, bool with_zeroes) {
  std::mt19937_64 random(seed);
  for (Tree& tree : model.trees) {
    tree.covers.assign(tree.nodes.size(), 0);
    for (std::size_t i = tree.nodes.size(); i-- > 0;) {
      const Node& node = tree.nodes[i];
      const auto cover = [&](std::int32_t child) { return tree.covers[static_cast<std::size_t>(child)]; };
      if (!node.is_leaf()) {
        tree.covers[i] = cover(node.left) + cover(node.right);
      } else if (!with_zeroes || random() % 3 != 0) {
        tree.covers[i] = static_cast<float>(1 + random() % 100);
      }
    }
  }
}

// What the model answers where only the features of `known` have their values: both ways by cover at other splits.
double value_of(const Model& model, const float* row, const std::set<std::uint32_t>& known) {
  double sum = model.base_score;
  for (const Tree& tree : model.trees) {
    const auto walk = [&](const auto& self, std::size_t at) -> double {
      const Node& node = tree.nodes[at];
      if (node.is_leaf()) return node.value;
      const auto left = static_cast<std::size_t>(node.left);
      const auto right = static_cast<std::size_t>(node.right);
      if (known.contains(node.feature)) {
        const float value = row[node.feature];
        return self(self, (value != value ? node.default_left : value < node.value) ? left : right);
      }
      const double both = double{tree.covers[left]} + double{tree.covers[right]};
      const double share = both == 0 ? 0.5 : tree.covers[left] / both;
      return share * self(self, left) + (1 - share) * self(self, right);
    };
    sum += walk(walk, 0);
  }
  return sum;
}

// Shapley's definition: the mean over all orders, as a sum over all coalitions.
std::vector<double> shapley(const Model& model, const float* row) {
  const std::uint32_t n = model.features;
  std::vector<double> values(std::size_t{1} << n);
  for (std::size_t set = 0; set < values.size(); ++set) {
    std::set<std::uint32_t> known;
    for (std::uint32_t f = 0; f < n; ++f) {
      if ((set >> f & 1) != 0) known.insert(f);
    }
    values[set] = value_of(model, row, known);
  }
  std::vector<double> out(n + 1, 0.0);
  for (std::uint32_t f = 0; f < n; ++f) {
    for (std::size_t set = 0; set < values.size(); ++set) {
      if ((set >> f & 1) != 0) continue;
      const double size = std::popcount(set);
      const double weight = std::exp(std::lgamma(size + 1) + std::lgamma(n - size) - std::lgamma(n + 1.0));
      out[f] += weight * (values[set | std::size_t{1} << f] - values[set]);
    }
  }
  out[n] = values[0];
  return out;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

TEST(Explainer, IsShapleysDefinition) {
  for (const bool with_zeroes : {false, true}) {
    for (std::uint64_t seed = 0; seed < 24; ++seed) {
      Shape shape;
      shape.features = 1 + static_cast<std::uint32_t>(seed % 7);
      shape.depth = static_cast<int>(seed % 9);
      shape.trees = 4;
      shape.thresholds = 60;
      Model model = random_model(shape, seed);
      add_covers(model, seed, with_zeroes);
      const Explainer explainer(model);
      ASSERT_EQ(explainer.features(), shape.features);
      const std::vector<float> rows = fixture_rows(seed, 5, shape.features);
      for (std::size_t i = 0; i < 5; ++i) {
        const float* row = &rows[i * shape.features];
        std::vector<double> found(shape.features + 1, std::nan(""));
        explainer.contributions(row, found.data());
        const std::vector<double> expected = shapley(model, row);
        for (std::size_t f = 0; f <= shape.features; ++f) {
          ASSERT_NEAR(found[f], expected[f], 1e-9 * (1 + largest(expected))) << "seed " << seed << ", feature " << f;
        }
      }
    }
  }
}

// The paths' polynomials have every degree up to the depth; a quadrature of a point too few would show here.
TEST(Explainer, SumsUpToTheMargin) {
  for (const int depth : {1, 2, 3, 6, 9, 14}) {
    Shape shape;
    shape.depth = depth;
    shape.features = 40;
    shape.stop = depth > 9 ? 0.25 : 0.05;
    Model model = random_model(shape, static_cast<std::uint64_t>(depth));
    add_covers(model, 3, true);
    const Explainer explainer(model);
    const std::vector<float> rows = fixture_rows(4, 20, shape.features);
    std::vector<double> found(shape.features + 1);
    for (std::size_t i = 0; i < 20; ++i) {
      const float* row = &rows[i * shape.features];
      explainer.contributions(row, found.data());
      double sum = 0;
      for (const double one : found) sum += one;
      std::set<std::uint32_t> all;
      for (std::uint32_t f = 0; f < shape.features; ++f) all.insert(f);
      ASSERT_NEAR(sum, value_of(model, row, all), 1e-10 * (1 + largest(found))) << "depth " << depth;
    }
  }
}

TEST(Explainer, ALoneSplitByHand) {
  Model model;
  model.features = 2;
  model.base_score = 10;
  model.trees.push_back({{{1, 2, 1, 0.5F, true}, {-1, -1, 0, 4, false}, {-1, -1, 0, 8, false}}, 1, {4, 3, 1}});
  const Explainer explainer(model);
  double out[3];
  for (const auto& [value, expected] : {std::pair{0.0F, -1.0}, {0.5F, 3.0}, {std::nanf(""), -1.0}}) {
    const float row[] = {7, value};
    explainer.contributions(row, out);
    EXPECT_EQ(out[0], 0);
    EXPECT_DOUBLE_EQ(out[1], expected) << value;
    EXPECT_DOUBLE_EQ(out[2], 15);
  }
}

TEST(Explainer, RefusesPathsBeyondItsBound) {
  Shape shape;
  shape.depth = 12;
  shape.trees = 100;
  shape.features = 500;
  shape.stop = 0;
  Model model = random_model(shape, 1);
  add_covers(model, 1, false);
  try {
    const Explainer explainer(model);
    FAIL() << "accepted";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("too deep to explain"), std::string::npos) << error.what();
  }
}

const Value& at(const Value& object, const std::string& key) {
  for (const Member& member : std::get<Object>(object.content)) {
    if (member.key == key) return member.value;
  }
  throw std::runtime_error("no " + key);
}

// XGBoost computes them in float32, and by other sums in each version.
TEST(Explainer, AgreesWithXgboost) {
  for (const std::string& version : kVersions) {
    const Value stored = read_json(read_file(model_path(version, "contributions.json")));
    const Numbers& rows = std::get<Numbers>(at(stored, "rows").content);
    const auto seed = static_cast<std::uint64_t>(std::get<Number>(at(stored, "seed").content).value);
    ASSERT_GE(rows.size(), 5U);
    const Object& models = std::get<Object>(at(stored, "contributions").content);
    ASSERT_EQ(models.size(), 9U);
    for (const auto& [name, answers] : models) {
      const Model model = import_model_file(model_path(version, name + ".ubj")).model;
      const Explainer explainer(model);
      std::vector<double> found(model.features + 1);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto first = static_cast<std::size_t>(rows[i].value) * model.features;
        std::vector<float> row(model.features);
        for (std::size_t f = 0; f < row.size(); ++f) row[f] = fixture_value(seed, first + f);
        explainer.contributions(row.data(), found.data());
        const Numbers& expected = std::get<Numbers>(std::get<Array>(answers.content)[i].content);
        ASSERT_EQ(expected.size(), found.size());
        for (std::size_t f = 0; f < found.size(); ++f) {
          ASSERT_NEAR(found[f], expected[f].value, 2e-5 * (1 + largest(found)))
              << version << " " << name << ", row " << i << ", feature " << f;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cudasched::predict::trees
