// A model of gradient-boosted trees, and the strict importer of models saved by XGBoost 2.1 to 3.x (JSON and UBJSON).
//
// Meaning. margin(row) = base_score + the trees' leaves, added one after the other in the model's order in float32;
// another order is another number. At a split, a row goes left iff row[feature] < threshold in float32; where the value
// is missing (NaN), by default_left. The links of the supported objectives are the identity: the margin is the
// prediction.
//
// The file. Numbers in tree_param, gbtree_model_param and learner_model_param are strings; base_score is in output
// space, from 3.1 in brackets, and a list of one. A node is a leaf iff left_children is -1, and its value stands in
// split_conditions. Nodes that pruning deleted stay in the arrays; num_deleted counts them and no child names them.
// best_iteration among the attributes is ignored, as XGBoost's Booster does.
//
// Refused by name: boosters other than gbtree, objectives other than the four below (quantiles: one alone), several
// classes or targets. Also categorical features and splits, vector leaves, other versions, unknown fields. Refused as
// inconsistent: sizes that differ, children out of range, nodes reached twice or never, features that do not exist,
// numbers that are not finite.
//
// Of the attributes `cudasched_architecture` and `cudasched_gpu` are read (training/train.py), all others ignored.
//
// A model may carry rows and their margins, which prove at load that this machine computes the trainer's margins:
//   {"cudasched": 1, "model": <XGBoost's file>, "rows": [[bits, ...], ...], "margins": [bits, ...]}
// Each value is the integer that has the float32's bits, so NaN and the last digit survive.
//
// Cold: loading throws ModelError (and std::bad_alloc); nothing here is on the launch path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cudasched::predict::trees {

inline constexpr std::size_t kMaxFeatures = 1024;
inline constexpr std::size_t kMaxTrees = 16'384;
inline constexpr std::size_t kMaxNodes = std::size_t{4} << 20;  // of all trees

struct Node {
  std::int32_t left = -1;  // -1: a leaf
  std::int32_t right = -1;
  std::uint32_t feature = 0;
  float value = 0;  // a split's threshold, a leaf's value
  bool default_left = false;

  bool is_leaf() const noexcept { return left < 0; }
};

// Nodes in an order in which children come after their parent; the first is the root.
struct Tree {
  std::vector<Node> nodes;
  int depth = 0;                   // splits on the longest way
  std::vector<float> covers = {};  // a node's weight of training rows (sum_hessian); only explanations ask
};

struct Model {
  std::uint32_t features = 0;
  float base_score = 0;
  std::vector<Tree> trees;
  std::vector<std::string> feature_names;  // none, or one a feature
  std::string objective;
  std::string architecture;  // of the training, "sm_90", and its GPU; empty: the model does not say
  std::string gpu;

  int depth() const noexcept;
};

// A hash of all that the margin depends on; never 0.
std::uint64_t identity_of(const Model& model) noexcept;

struct SavedModel {
  Model model;
  std::vector<float> rows;     // row after row, `model.features` values each
  std::vector<float> margins;  // one a row
};

// `name` is the file's name in messages.
SavedModel import_model(std::string_view bytes, const std::string& name);

// Reads the file; does not replay its rows (load_evaluator in evaluator.hpp does).
SavedModel import_model_file(const std::string& path);

}  // namespace cudasched::predict::trees
