// One contract for every walk: the same bits as XGBoost, and as a naive walk of random trees.
#include <gtest/gtest.h>

#include <tuple>

#include "predict/trees/document.hpp"
#include "predict/trees/evaluator.hpp"
#include "predict/trees_support.hpp"

namespace cudasched::predict::trees {
namespace {

// Null where this model cannot be walked so; every other reason is a failure.
std::unique_ptr<const Evaluator> make_if_possible(const Model& model, Isa isa) {
  try {
    return make_evaluator(model, isa);
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("cannot be had"), std::string::npos);
    return nullptr;
  }
}

const Value& at(const Value& object, const std::string& key) {
  for (const Member& member : std::get<Object>(object.content)) {
    if (member.key == key) return member.value;
  }
  throw std::runtime_error("no " + key);
}

double number_at(const Value& object, const std::string& key) {
  return std::get<Number>(at(object, key).content).value;
}

class WalkTest : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!can_run(GetParam())) GTEST_SKIP() << "this processor has no " << name_of(GetParam());
  }

  void expect_reference(const Model& model, std::uint64_t seed, std::size_t count) {
    const auto evaluator = make_evaluator(model, GetParam());
    EXPECT_EQ(evaluator->isa(), GetParam());
    EXPECT_EQ(evaluator->features(), model.features);
    const std::vector<float> rows = fixture_rows(seed, count, model.features);
    std::vector<float> margins(count);
    evaluator->margins(rows.data(), count, margins.data());
    for (std::size_t i = 0; i < count; ++i) {
      const float* row = &rows[i * model.features];
      ASSERT_EQ(bits_of(margins[i]), bits_of(reference_margin(model, row))) << "row " << i;
      ASSERT_EQ(bits_of(evaluator->margin(row)), bits_of(margins[i])) << "row " << i;
    }
  }

  bool is_nodes() const { return GetParam() == Isa::kNodes; }
};

INSTANTIATE_TEST_SUITE_P(Walks, WalkTest, ::testing::ValuesIn(kIsas),
                         [](const auto& walk) { return std::string(name_of(walk.param)); });

TEST_P(WalkTest, AgreesWithTheReferenceAtEveryDepth) {
  for (int depth = 1; depth <= 8; ++depth) {
    Shape shape;
    shape.depth = depth;
    expect_reference(random_model(shape, static_cast<std::uint64_t>(depth)), 5, 300);
  }
}

// Around the sizes of a group, of a register's lanes and of what is walked at once.
TEST_P(WalkTest, AgreesWithTheReferenceForEveryNumberOfTrees) {
  for (const int trees : {0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 300}) {
    Shape shape;
    shape.trees = trees;
    shape.depth = 3;
    expect_reference(random_model(shape, static_cast<std::uint64_t>(trees)), 6, 100);
  }
}

TEST_P(WalkTest, AgreesWithTheReferenceForEveryNumberOfSlots) {
  for (const std::uint32_t features : {1U, 2U, 16U, 17U, 31U, 32U, 33U, 48U, 49U, 63U, 64U}) {
    Shape shape;
    shape.features = features;
    shape.trees = 80;
    shape.stop = 0;
    expect_reference(random_model(shape, features), 7, 200);
  }
}

TEST_P(WalkTest, AgreesWithTheReferenceForEveryNumberOfThresholds) {
  for (const int thresholds : {1, 2, 15, 16, 17, 32, 33, 240, 241, 254, 255}) {
    Shape shape;
    shape.features = 2;
    shape.trees = 40;
    shape.thresholds = thresholds;
    shape.stop = 0;
    expect_reference(random_model(shape, static_cast<std::uint64_t>(thresholds)), 8, 300);
  }
}

TEST_P(WalkTest, AgreesWithTheReferenceWhereMissingValuesAllGoOneWay) {
  for (const int missing_left : {0, 100}) {
    Shape shape;
    shape.missing_left = missing_left;
    shape.features = 100;
    shape.trees = 60;
    expect_reference(random_model(shape, 9), 9, 300);
  }
}

TEST_P(WalkTest, ValuesAtAndBesideEveryThreshold) {
  Shape shape;
  shape.features = 5;
  const Model model = random_model(shape, 11);
  const auto evaluator = make_evaluator(model, GetParam());
  for (const Tree& tree : model.trees) {
    for (const Node& node : tree.nodes) {
      if (node.is_leaf()) continue;
      for (const float value : {node.value, std::nextafter(node.value, -1e9F), std::nextafter(node.value, 1e9F)}) {
        const std::vector<float> row(model.features, value);
        ASSERT_EQ(bits_of(evaluator->margin(row.data())), bits_of(reference_margin(model, row.data()))) << value;
      }
    }
  }
}

TEST_P(WalkTest, ZeroesAndTinyAndHugeThresholds) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {-infinity, -huge, -1, -tiny, -0.0F, 0.0F, tiny, 1, huge, infinity, std::nanf("")};
  for (const bool default_left : {false, true}) {
    Model model;
    model.features = 1;
    for (const float threshold : values) {
      if (!std::isfinite(threshold)) continue;
      const auto leaf = static_cast<float>(1 << model.trees.size());
      model.trees.push_back({{{1, 2, 0, threshold, default_left}, {-1, -1, 0, leaf, false}, {-1, -1, 0, 0, false}}, 1});
    }
    const auto evaluator = make_evaluator(model, GetParam());
    for (const float value : values) {
      ASSERT_EQ(evaluator->margin(&value), reference_margin(model, &value)) << value << " " << default_left;
    }
  }
}

// A sum of nothing keeps its sign, and leaves of nothing do not change it.
TEST_P(WalkTest, NegativeZeroSurvives) {
  Model model;
  model.features = 1;
  model.base_score = -0.0F;
  for (int i = 0; i < 3; ++i) model.trees.push_back({{{-1, -1, 0, -0.0F, false}}, 0});
  const float row = 1;
  EXPECT_EQ(bits_of(make_evaluator(model, GetParam())->margin(&row)), bits_of(-0.0F));
}

TEST_P(WalkTest, SaysWhyItCannotBeHad) {
  Shape deep;
  deep.depth = 9;
  deep.trees = 1;
  deep.stop = 0;
  const Model model = random_model(deep, 1);
  if (is_nodes()) {
    expect_reference(model, 3, 100);
    return;
  }
  try {
    make_evaluator(model, GetParam());
    FAIL() << "a heap of depth 9";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("9 deep"), std::string::npos) << error.what();
  }
}

TEST_P(WalkTest, TooManyThresholdsOrSlotsForBytes) {
  Shape fine;
  fine.features = 1;
  fine.thresholds = 5000;
  fine.trees = 40;
  Shape wide;
  wide.features = 120;
  wide.trees = 100;
  for (const Shape& shape : {fine, wide}) {
    const Model model = random_model(shape, 2);
    if (GetParam() == Isa::kNodes || GetParam() == Isa::kPortable) {
      expect_reference(model, 4, 100);
    } else {
      EXPECT_THROW(make_evaluator(model, GetParam()), ModelError);
    }
    EXPECT_EQ(make_evaluator(model)->isa(), Isa::kPortable);
  }
}

TEST_P(WalkTest, ReplayNoticesOneBit) {
  SavedModel saved = import_model_file(model_path("3.4", "replay.json"));
  const auto evaluator = make_evaluator(saved.model, GetParam());
  ASSERT_EQ(saved.margins.size(), 50U);
  EXPECT_NO_THROW(replay(*evaluator, saved, "model"));
  saved.margins[7] = std::bit_cast<float>(bits_of(saved.margins[7]) ^ 1);
  try {
    replay(*evaluator, saved, "model");
    FAIL() << "another margin";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("model: stored row 7"), std::string::npos) << error.what();
  }
}

TEST(MakeEvaluator, TakesTheFastestThatRuns) {
  const Isa best = *std::find_if(std::rbegin(kIsas), std::rend(kIsas), can_run);
  EXPECT_EQ(make_evaluator(random_model({}, 1))->isa(), best);
  Shape deep;
  deep.depth = 12;
  EXPECT_EQ(make_evaluator(random_model(deep, 1))->isa(), Isa::kNodes);
}

TEST(MakeEvaluator, LoadReplays) {
  for (const std::string& version : kVersions) {
    EXPECT_EQ(load_evaluator(model_path(version, "replay.json"))->features(), 24U);
  }
}

// 100,000 rows with missing values, infinities, denormal numbers and values at thresholds, against what XGBoost said.
class XgboostTest : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

INSTANTIATE_TEST_SUITE_P(Saved, XgboostTest,
                         ::testing::Combine(::testing::ValuesIn(kVersions),
                                            ::testing::Values("squared", "absolute", "huber", "quantile", "pruned",
                                                              "deep", "fine", "forest", "leaves")),
                         [](const auto& saved) {
                           std::string version = std::get<0>(saved.param);
                           version[1] = '_';
                           return std::get<1>(saved.param) + "_" + version;
                         });

TEST_P(XgboostTest, MarginsAreTheSameBits) {
  const auto& [version, name] = GetParam();
  const Model model = import_model_file(model_path(version, name + ".ubj")).model;
  const Value expected = read_json(read_file(model_path(version, name + ".margins.json")));
  const auto count = static_cast<std::size_t>(number_at(expected, "rows"));
  const auto every = static_cast<std::size_t>(number_at(expected, "sample_every"));
  const std::string& hash = std::get<std::string>(at(expected, "hash").content);
  const Numbers& sample = std::get<Numbers>(at(expected, "sample").content);
  ASSERT_EQ(count, 100'000U);
  ASSERT_EQ(sample.size(), count / every);
  const std::vector<float> rows =
      fixture_rows(static_cast<std::uint64_t>(number_at(expected, "seed")), count, model.features);

  int walked = 0;
  for (const Isa isa : kIsas) {
    const auto evaluator = make_if_possible(model, isa);
    if (!evaluator) continue;
    ++walked;
    std::vector<float> margins(count);
    evaluator->margins(rows.data(), count, margins.data());
    std::uint64_t state = 0xCBF29CE484222325ULL;
    for (const float margin : margins) state = (state ^ bits_of(margin)) * 0x100000001B3ULL;
    for (std::size_t i = 0; i < sample.size(); ++i) {
      ASSERT_EQ(bits_of(margins[i * every]), static_cast<std::uint32_t>(sample[i].value))
          << name_of(isa) << ", row " << i * every;
    }
    EXPECT_EQ(state, std::stoull(hash, nullptr, 16)) << name_of(isa);
  }
  const int byte_walks = static_cast<int>(std::count_if(std::begin(kIsas), std::end(kIsas), can_run)) - 2;
  EXPECT_EQ(walked, name == "deep" ? 1 : name == "fine" ? 2 : 2 + byte_walks);
}

}  // namespace
}  // namespace cudasched::predict::trees
