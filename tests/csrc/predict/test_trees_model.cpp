// What the importer reads, and what it refuses with which words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <tuple>

#include "predict/trees/document.hpp"
#include "predict/trees/model.hpp"
#include "predict/trees_support.hpp"
#include "private_directory.hpp"

namespace cudasched::predict::trees {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& bytes) {
  try {
    import_model(bytes, "model");
  } catch (const ModelError& error) {
    return error.what();
  }
  return "accepted";
}

bool is_same(const Node& a, const Node& b) {
  return std::tie(a.left, a.right, a.feature, a.default_left) == std::tie(b.left, b.right, b.feature, b.default_left) &&
         bits_of(a.value) == bits_of(b.value);
}

TEST(ImportModel, BothFormatsAreOneModel) {
  for (const std::string& version : kVersions) {
    for (const char* name : {"absolute", "huber", "quantile", "pruned", "forest", "leaves"}) {
      const Model json = import_model_file(model_path(version, std::string(name) + ".json")).model;
      const Model ubjson = import_model_file(model_path(version, std::string(name) + ".ubj")).model;
      EXPECT_EQ(json.features, 24U);
      EXPECT_EQ(json.features, ubjson.features);
      EXPECT_EQ(json.objective, ubjson.objective);
      EXPECT_EQ(bits_of(json.base_score), bits_of(ubjson.base_score));
      ASSERT_GT(json.trees.size(), 0U);
      ASSERT_EQ(json.trees.size(), ubjson.trees.size());
      for (std::size_t i = 0; i < json.trees.size(); ++i) {
        EXPECT_EQ(json.trees[i].depth, ubjson.trees[i].depth);
        ASSERT_EQ(json.trees[i].nodes.size(), ubjson.trees[i].nodes.size());
        for (std::size_t at = 0; at < json.trees[i].nodes.size(); ++at) {
          EXPECT_TRUE(is_same(json.trees[i].nodes[at], ubjson.trees[i].nodes[at])) << name << " " << i << " " << at;
        }
      }
    }
  }
}

TEST(ImportModel, ReadsWhatTheFileSays) {
  const Model model = import_model_file(model_path("3.4", "replay.json")).model;
  ASSERT_EQ(model.feature_names.size(), 24U);
  EXPECT_EQ(model.feature_names[3], "feature 3");
  EXPECT_EQ(model.objective, "reg:squarederror");
  EXPECT_EQ(model.depth(), 3);
  EXPECT_EQ(import_model_file(model_path("2.1", "leaves.json")).model.depth(), 0);
}

TEST(ImportModel, SaysWhichFileCannotBeRead) {
  const test::PrivateDirectory directory;
  const std::string pipe = directory.path() + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  alarm(20);  // a hang ends
  for (const std::string& path :
       {std::string("/nowhere/model.json"), std::string("/"), pipe, std::string("/dev/zero")}) {
    EXPECT_THAT([&] { import_model_file(path); },
                ::testing::ThrowsMessage<ModelError>(HasSubstr(path + ": cannot be read; check that it exists")));
  }
  alarm(0);
}

// Kinds of models as XGBoost itself saves them, in both formats.
class RefusedKind : public ::testing::TestWithParam<std::tuple<std::string, std::pair<std::string, std::string>>> {};

INSTANTIATE_TEST_SUITE_P(Saved, RefusedKind,
                         ::testing::Combine(::testing::ValuesIn(kVersions),
                                            ::testing::Values(std::pair{"dart", "dart"},
                                                              std::pair{"gblinear", "booster 'gblinear'"},
                                                              std::pair{"logistic", "objective 'binary:logistic'"},
                                                              std::pair{"gamma", "objective 'reg:gamma'"},
                                                              std::pair{"classes", "objective 'multi:softprob'"},
                                                              std::pair{"targets", "several targets"},
                                                              std::pair{"vector_leaves", "several targets"},
                                                              std::pair{"quantiles", "several quantiles"},
                                                              std::pair{"categorical", "categorical features"})),
                         [](const auto& kind) {
                           std::string version = std::get<0>(kind.param);
                           version[1] = '_';
                           return std::get<1>(kind.param).first + "_" + version;
                         });

TEST_P(RefusedKind, ByName) {
  const auto& [version, kind] = GetParam();
  for (const char* format : {".json", ".ubj"}) {
    const std::string why = refusal(read_file(model_path(version, "refused/" + kind.first + format)));
    EXPECT_THAT(why, AllOf(HasSubstr("model: "), HasSubstr(kind.second))) << format;
  }
}

// One thing changed in a model that is accepted.
struct Change {
  std::string from;
  std::string to;
  std::string why;

  friend void PrintTo(const Change& change, std::ostream* out) { *out << change.from << " -> " << change.to; }
};

// Three nodes: x0 < 1.5 (missing: right) gives 10, else 20; on top of 0.5.
const std::string kSmall =
    R"({"learner":{"attributes":{},"feature_names":[],"feature_types":[],"gradient_booster":{"model":{)"
    R"("cats":{"enc":[],"feature_segments":[],"sorted_idx":[]},)"
    R"("gbtree_model_param":{"num_parallel_tree":"1","num_trees":"1"},"iteration_indptr":[0,1],"tree_info":[0],)"
    R"("trees":[{"base_weights":[0,1E0,2],"categories":[],"categories_nodes":[],"categories_segments":[],)"
    R"("categories_sizes":[],"default_left":[0,0,0],"id":0,"left_children":[1,-1,-1],"loss_changes":[5E0,0,0],)"
    R"("parents":[2147483647,0,0],"right_children":[2,-1,-1],"split_conditions":[1.5E0,1E1,2E1],)"
    R"("split_indices":[0,0,0],"split_type":[0,0,0],"sum_hessian":[2,1,1],)"
    R"("tree_param":{"num_deleted":"0","num_feature":"2","num_nodes":"3","size_leaf_vector":"1"}}]},"name":"gbtree"},)"
    R"("learner_model_param":{"base_score":"[5E-1]","boost_from_average":"1","num_class":"0","num_feature":"2",)"
    R"("num_target":"1"},"objective":{"name":"reg:squarederror","reg_loss_param":{"scale_pos_weight":"1"}}},)"
    R"("version":[3,4,1]})";

TEST(ImportModel, SmallModelIsAccepted) {
  const Model model = import_model(kSmall, "model").model;
  const float left[] = {1, 0};
  const float right[] = {1.5F, 0};
  const float missing[] = {std::nanf(""), 0};
  EXPECT_EQ(reference_margin(model, left), 10.5F);
  EXPECT_EQ(reference_margin(model, right), 20.5F);
  EXPECT_EQ(reference_margin(model, missing), 20.5F);
}

class RefusedChange : public ::testing::TestWithParam<Change> {};

INSTANTIATE_TEST_SUITE_P(
    Fields, RefusedChange,
    ::testing::Values(
        Change{R"("version":[3,4,1])", R"("version":[2,0,3])", "saved by XGBoost 2.0"},
        Change{R"("version":[3,4,1])", R"("version":[4,0,0])", "saved by XGBoost 4.0"},
        Change{R"("version":[3,4,1])", R"("version":[3])", "version: expected three numbers"},
        Change{R"(,"version":[3,4,1])", "", "'version' is missing"},
        Change{R"({"learner")", R"({"Config":{},"learner")", "pickled"},
        Change{R"({"learner")", R"({"extra":1,"learner")", "'extra' is not supported"},
        Change{R"("attributes":{})", R"("extra":{})", "learner: 'extra' is not supported"},
        Change{R"("[5E-1]")", R"("[5E-1,5E-1]")", "several base scores"},
        Change{R"("[5E-1]")", R"("[]")", "learner.learner_model_param.base_score: '[]' is no finite number"},
        Change{R"("[5E-1]")", R"("nan")", "'nan' is no finite number"},
        Change{R"("[5E-1]")", R"("[inf]")", "no finite number"}, Change{R"("[5E-1]")", R"("1e99")", "no finite number"},
        Change{R"("[5E-1]")", R"(0.5)", "base_score: expected a string"},
        Change{R"("num_class":"0")", R"("num_class":"3")", "several classes"},
        Change{R"("num_target":"1")", R"("num_target":"2")", "several targets"},
        Change{R"("num_class":"0","num_feature":"2")", R"("num_class":"0","num_feature":"3")", "differs from"},
        Change{R"("num_class":"0","num_feature":"2")", R"("num_class":"0","num_feature":"0")", "outside 1 to"},
        Change{R"("num_class":"0","num_feature":"2")", R"("num_class":"0","num_feature":"99999999")", "outside 1 to"},
        Change{R"("num_class":"0")", R"("num_class":"x")", "'x' is no integer"},
        Change{R"("feature_names":[])", R"("feature_names":["a"])", "feature_names: expected one a feature"},
        Change{R"("feature_types":[])", R"("feature_types":["q","c"])", "feature_types[1]: categorical features"},
        Change{R"("feature_types":[])", R"("feature_types":["q","z"])", "feature type 'z'"},
        Change{R"("name":"gbtree")", R"("name":"dart")", "booster 'dart' is not supported"},
        Change{R"("name":"gbtree")", R"("name":"gbtree","weight_drop":[1])", "'weight_drop' is not supported"},
        Change{R"("reg:squarederror")", R"("reg:tweedie")", "objective 'reg:tweedie' is not supported; these are"},
        Change{R"("enc":[])", R"("enc":[{}])", "cats.enc: categorical features"},
        Change{R"("num_trees":"1")", R"("num_trees":"2")", "trees: num_trees is 2"},
        Change{R"("num_trees":"1")", R"("num_trees":"999999999999")", "num_trees: 999999999999 is outside"},
        Change{R"("tree_info":[0])", R"("tree_info":[1])", "several classes or targets"},
        Change{R"("tree_info":[0])", R"("tree_info":[])", "tree_info: num_trees is 1"},
        Change{R"("iteration_indptr":[0,1])", R"("iteration_indptr":[0,2])", "does not end at num_trees"},
        Change{R"("iteration_indptr":[0,1])", R"("iteration_indptr":[2,1])", "does not ascend"},
        Change{R"("id":0)", R"("id":1)", "trees[0].id: the trees are not in order"},
        Change{R"("id":0)", R"("id":0,"leaf_weights":[1])", "trees[0]: 'leaf_weights' is not supported"},
        Change{R"("size_leaf_vector":"1")", R"("size_leaf_vector":"2")", "vector leaves"},
        Change{R"("num_nodes":"3")", R"("num_nodes":"4")", "3 values for 4 nodes"},
        Change{R"("num_nodes":"3")", R"("num_nodes":"-3")", "outside 1 to"},
        Change{R"("num_nodes":"3")", R"("num_nodes":"99999999999999999999")", "is no integer"},
        Change{R"("num_deleted":"0")", R"("num_deleted":"1")", "3 nodes are reached from the root, 2 should be"},
        Change{R"("num_deleted":"0")", R"("num_deleted":"3")", "outside 0 to 2"},
        Change{R"("categories":[])", R"("categories":[1])", "categories: categorical splits"},
        Change{R"("categories_sizes":[])", R"("categories_sizes":[1])", "categorical splits"},
        Change{R"("split_type":[0,0,0])", R"("split_type":[1,0,0])", "split_type: node 0: categorical splits"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[0,-1,-1])", "node 0: 0 is no integer from 1 to 2"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[3,-1,-1])", "node 0: 3 is no integer from 1 to 2"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[1.5,-1,-1])", "1.5 is no integer"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[-2,-1,-1])", "-2 is no integer"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[2,-1,-1])", "node 2 is reached twice"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[1,2,-1])", "node 1: node 2 is reached twice"},
        Change{R"("right_children":[2,-1,-1])", R"("right_children":[-1,-1,-1])", "right_children: node 0: -1 is no"},
        Change{R"("left_children":[1,-1,-1],)", "", "trees[0]: 'left_children' is missing"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":[-1,-1,-1])", "right_children: node 0: a leaf has"},
        Change{R"("left_children":[1,-1,-1])", R"("left_children":["a"])",
               "left_children: expected an array of numbers"},
        Change{R"("parents":[2147483647,0,0])", R"("parents":[2147483647,0,1])", "parents: node 2: differs"},
        Change{R"("parents":[2147483647,0,0])", R"("parents":[1,0,0])", "the root has a parent"},
        Change{R"("split_indices":[0,0,0])", R"("split_indices":[2,0,0])", "split_indices: node 0: 2 is no integer"},
        Change{R"("split_indices":[0,0,0])", R"("split_indices":[-1,0,0])", "split_indices: node 0: -1 is no integer"},
        Change{R"("default_left":[0,0,0])", R"("default_left":[2,0,0])", "default_left: node 0: 2 is no integer"},
        Change{"[1.5E0,", "[NaN,", "split_conditions: node 0: a number that is not finite"},
        Change{"1E1,2E1]", "1E1,Infinity]", "split_conditions: node 2: a number that is not finite"},
        Change{"[1.5E0,", "[-Infinity,", "not finite"}, Change{"[5E0,", "[NaN,", "loss_changes: node 0: a number that"},
        Change{R"("id":0)", R"("id":NaN)", "the trees are not in order"},
        Change{R"("version":[3,4,1])", R"("version":[NaN,4,1])", "saved by XGBoost nan"},
        Change{R"("tree_info":[0])", R"("tree_info":[NaN])", "several classes or targets"},
        Change{R"("iteration_indptr":[0,1])", R"("iteration_indptr":[0,NaN])", "does not ascend"},
        Change{"[1.5E0,", "[1E39,", "1E39 is out of float32's range"},
        Change{"[1.5E0,", "[null,", "a number in an array of other things"},
        Change{"[1.5E0,", "[1.5E0,null,", "something else in an array of numbers"},
        Change{R"("id":0)", R"("id":0,"id":0)", "key 'id' comes twice"},
        Change{R"("name":"reg:squarederror")",
               R"("name":"reg:quantileerror","quantile_loss_param":{"quantile_alpha":"[1E-1,9E-1]"})",
               "several quantiles"}));

TEST_P(RefusedChange, SaysWhatAndWhere) {
  const Change& change = GetParam();
  const std::size_t at = kSmall.find(change.from);
  ASSERT_NE(at, std::string::npos);
  std::string changed = kSmall;
  changed.replace(at, change.from.size(), change.to);
  EXPECT_THAT(refusal(changed), AllOf(HasSubstr("model: "), HasSubstr(change.why)));
}

TEST(ImportModel, EveryTruncationIsRefused) {
  const std::string ubjson = read_file(model_path("3.4", "leaves.ubj"));
  for (const std::string& whole : {kSmall, ubjson}) {
    for (std::size_t size = 0; size < whole.size(); ++size) {
      EXPECT_NE(refusal(whole.substr(0, size)), "accepted") << size;
    }
    EXPECT_EQ(refusal(whole), "accepted");
    EXPECT_THAT(refusal(whole + "x"), HasSubstr("something follows"));
  }
}

// Rows and margins beside the model, as {"cudasched": 1, ...}.
std::string carrying(const std::string& rows, const std::string& margins, const std::string& version = "1") {
  return R"({"cudasched":)" + version + R"(,"model":)" + kSmall + R"(,"rows":)" + rows + R"(,"margins":)" + margins +
         "}";
}

TEST(CarriedRows, AreRead) {
  const SavedModel saved =
      import_model(carrying("[[0,2143289344],[1065353216,2147483648]]", "[1093140480,3]"), "model");
  ASSERT_EQ(saved.rows.size(), 4U);
  EXPECT_TRUE(std::isnan(saved.rows[1]));
  EXPECT_EQ(saved.rows[2], 1.0F);
  EXPECT_EQ(bits_of(saved.rows[3]), 0x80000000U);
  EXPECT_EQ(saved.margins[0], 10.5F);
  EXPECT_EQ(import_model(carrying("[]", "[]"), "model").margins.size(), 0U);
}

TEST(CarriedRows, AreRefusedWhereTheyDoNotFit) {
  EXPECT_THAT(refusal(carrying("[[0]]", "[0]")), HasSubstr("rows[0]: expected a value a feature"));
  EXPECT_THAT(refusal(carrying("[[0,0]]", "[]")), HasSubstr("margins: expected one a row"));
  EXPECT_THAT(refusal(carrying("[[0,4294967296]]", "[0]")), HasSubstr("rows[0]: "));
  EXPECT_THAT(refusal(carrying("[[0,0.5]]", "[0]")), HasSubstr("0.5 is no integer"));
  EXPECT_THAT(refusal(carrying("[]", "[]", "2")), HasSubstr("cudasched: version 2"));
}

}  // namespace
}  // namespace cudasched::predict::trees
