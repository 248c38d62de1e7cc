// What the tests of the trees share: the committed models, the rows that their margins are of, and random models.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "predict/trees/model.hpp"

namespace cudasched::predict::trees {

inline const std::vector<std::string> kVersions = {"2.1", "3.2", "3.4"};

inline std::string model_path(const std::string& version, const std::string& file) {
  return std::string(CUDASCHED_TEST_MODELS) + "/" + version + "/" + file;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// The generator of training/make_fixtures.py.
inline float fixture_value(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  const std::uint64_t kind = z & 63;
  const std::uint32_t sign = static_cast<std::uint32_t>(z >> 6 & 1) << 31;
  switch (kind) {
    case 0:
      return std::numeric_limits<float>::quiet_NaN();
    case 1:
      return std::bit_cast<float>(sign | 0x7F800000U);
    case 2:
      return std::bit_cast<float>(sign | static_cast<std::uint32_t>(z >> 41));
    case 3:
      return std::bit_cast<float>(sign);
    case 4:
      return std::bit_cast<float>(sign | 0x7F7FFFFFU);
    default:
      break;
  }
  const float value = static_cast<float>(z >> 40) * 0x1p-21F - 4.0F;
  return kind >= 40 ? std::floor(value * 16.0F) / 16.0F : value;
}

inline std::vector<float> fixture_rows(std::uint64_t seed, std::size_t count, std::size_t features) {
  std::vector<float> rows(count * features);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = fixture_value(seed, i);
  return rows;
}

struct Shape {
  int trees = 10;
  int depth = 6;
  std::uint32_t features = 20;
  int thresholds = 200;   // of a feature, at most
  double stop = 0.1;      // chance that a node above the last level is a leaf
  int missing_left = 50;  // per cent of splits
};

inline std::int32_t grow(Tree& tree, int depth, const Shape& shape, std::mt19937_64& random) {
  const auto at = static_cast<std::int32_t>(tree.nodes.size());
  tree.nodes.emplace_back();
  std::uniform_real_distribution<double> chance(0, 1);
  if (depth == shape.depth || chance(random) < shape.stop) {
    // Magnitudes apart, so that the order of the sum shows in its bits.
    tree.nodes.back().value = static_cast<float>((chance(random) - 0.5) * std::exp2(random() % 12));
    return at;
  }
  Node node;
  node.feature = static_cast<std::uint32_t>(random() % shape.features);
  node.value = static_cast<float>(static_cast<int>(random() % static_cast<unsigned>(shape.thresholds)) - 30) / 8.0F;
  node.default_left = static_cast<int>(random() % 100) < shape.missing_left;
  tree.depth = std::max(tree.depth, depth + 1);
  node.left = grow(tree, depth + 1, shape, random);
  node.right = grow(tree, depth + 1, shape, random);
  tree.nodes[static_cast<std::size_t>(at)] = node;
  return at;
}

inline Model random_model(const Shape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Model model;
  model.features = shape.features;
  model.base_score = 0.1F + static_cast<float>(seed);
  for (int i = 0; i < shape.trees; ++i) {
    Tree tree;
    grow(tree, 0, shape, random);
    model.trees.push_back(std::move(tree));
  }
  return model;
}

// As the format defines it, one comparison after the other.
inline float reference_margin(const Model& model, const float* row) {
  float sum = model.base_score;
  for (const Tree& tree : model.trees) {
    std::size_t at = 0;
    while (!tree.nodes[at].is_leaf()) {
      const Node& node = tree.nodes[at];
      const float value = row[node.feature];
      const bool is_left = value != value ? node.default_left : value < node.value;
      at = static_cast<std::size_t>(is_left ? node.left : node.right);
    }
    sum += tree.nodes[at].value;
  }
  return sum;
}

}  // namespace cudasched::predict::trees
