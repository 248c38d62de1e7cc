#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "predict/features.hpp"
#include "predict/predictor.hpp"
#include "predict/trees_support.hpp"

namespace cudasched::predict {
namespace {

constexpr Residency kResidency{4, 132};

Function function(std::uint32_t index) {
  Function result;
  result.index = index;
  result.identity = 1'000 + index;
  return result;
}

Launch kernel(std::uint32_t blocks) {
  Launch launch;
  launch.grid[0] = blocks;
  launch.block[0] = 256;
  return launch;
}

class PredictorTest : public ::testing::Test {
 protected:
  Prediction predict(std::uint32_t index, std::uint32_t blocks, bool busy = false) {
    const Launch launch = kernel(blocks);
    const Function facts = function(index);
    return predictor_->predict({launch, &facts, {}, kResidency, busy});
  }

  bool wants_residency(std::uint32_t index, std::uint32_t blocks) {
    const Launch launch = kernel(blocks);
    const Function facts = function(index);
    return predictor_
        ->predict({.launch = launch, .function = &facts, .words = {}, .residency = {}, .lacks_residency = true})
        .wants_residency;
  }

  std::unique_ptr<Predictor> predictor_ = std::make_unique<Predictor>();
};

TEST_F(PredictorTest, GuessGrowsWithWavesAndNeverOverflows) {
  std::int64_t before = 0;
  for (const std::uint32_t blocks : {1U, 528U, 529U, 5'280U, 1'000'000U, 0xffff'ffffU}) {
    const std::int64_t guess = Predictor::guess_ns(kernel(blocks), kResidency);
    EXPECT_GE(guess, before);
    EXPECT_GT(guess, 0);
    before = guess;
  }
  EXPECT_EQ(Predictor::guess_ns(kernel(528), kResidency), Predictor::guess_ns(kernel(1), kResidency));
  EXPECT_GT(Predictor::guess_ns(kernel(529), kResidency), Predictor::guess_ns(kernel(528), kResidency));
  EXPECT_GT(Predictor::guess_ns(kernel(100), Residency{0, 0}), 0);
}

TEST_F(PredictorTest, AKnownKeyIsItsHistory) {
  EXPECT_TRUE(wants_residency(1, 1'000));
  EXPECT_TRUE(wants_residency(1, 1'000));  // the question is no launch
  const Prediction first = predict(1, 1'000);
  EXPECT_FALSE(first.hit);
  EXPECT_NEAR(static_cast<double>(first.base_ns), static_cast<double>(Predictor::guess_ns(kernel(1'000), kResidency)),
              10);
  EXPECT_FALSE(wants_residency(1, 1'000));
  predictor_->observe(first, 90'000, false);
  const Prediction second = predict(1, 1'000);
  EXPECT_TRUE(second.hit);
  EXPECT_EQ(second.key, first.key);
  EXPECT_NEAR(static_cast<double>(second.duration_ns), 90'000, 900);
}

TEST_F(PredictorTest, TheOutlookOfANewKernelIsCountedAndThatOfARepeatIsNot) {
  const auto kernels = [&] {
    const auto sums = predictor_->outlooks().sums();
    return std::accumulate(sums.kernels.begin(), sums.kernels.end(), std::uint64_t{0});
  };
  for (int i = 0; i < 3; ++i) predict(1, 1'000);
  EXPECT_EQ(kernels(), 1U);
  predict(1, 2'000);
  predict(2, 1'000);
  EXPECT_EQ(kernels(), 3U);
  // Another size of the same kernel in the same shape is another key, and no other outlook.
  const Launch launch = kernel(1'000);
  const Function facts = function(1);
  for (std::uint32_t size = 100; size < 110; ++size) {
    const std::vector<std::uint32_t> words{size, 0};
    EXPECT_FALSE(predictor_->predict({launch, &facts, words, kResidency, false}).hit);
  }
  EXPECT_EQ(kernels(), 3U);
  predictor_->predict_graph(&launch, 0, false);
  EXPECT_EQ(kernels(), 3U);
}

// A kernel that takes four times its guess where it is short, and a quarter where it is long.
TEST_F(PredictorTest, AFirstLaunchIsCorrectedByThoseOfItsKernelThatWerePredictedAlike) {
  const auto took = [](const Prediction& said) { return said.base_ns < 100'000 ? 4 * said.base_ns : said.base_ns / 4; };
  const auto launch = [&](std::uint32_t blocks) {
    const Prediction said = predict(1, blocks);
    if (said.wants_sample) predictor_->observe(said, took(said), false);
    return static_cast<double>(said.duration_ns) / static_cast<double>(took(said));
  };
  for (std::uint32_t i = 0; i < 12; ++i) {
    launch(4'000 + i);
    launch(400'000 + i);
  }
  EXPECT_NEAR(launch(4'100), 1, 0.25);
  EXPECT_NEAR(launch(400'100), 1, 0.25);
}

// What is known of launches as long as it has turned out to be does not take it back.
TEST_F(PredictorTest, ALaunchThatRunsForLongIsNotPredictedShorter) {
  for (std::uint32_t i = 0; i < 12; ++i) {
    const Prediction brief = predict(1, 4'000 + i);
    predictor_->observe(brief, 4 * brief.base_ns, false);
    const Prediction lengthy = predict(1, 400'000 + i);
    predictor_->observe(lengthy, lengthy.base_ns / 4, false);
  }
  const Prediction said = predict(1, 4'200);
  for (const std::int64_t times : {4, 1, 8}) {
    const std::int64_t ran_ns = times * Predictor::guess_ns(kernel(400'000), kResidency);
    predictor_->observe_at_least(said, ran_ns);
    EXPECT_GE(static_cast<double>(predict(1, 4'200).duration_ns), 0.99 * static_cast<double>(ran_ns)) << times;
  }
}

// The bound would know old keys alone if the turn were the key's.
TEST_F(PredictorTest, TimesKeysThatAreLaunchedTenTimesAsOftenAsOthers) {
  int timed = 0;
  for (std::uint32_t shape = 1; shape <= 2'000; ++shape) {
    for (int i = 0; i < 10; ++i) {
      const Prediction prediction = predict(1, 1'000 * shape);
      if (prediction.wants_sample) predictor_->observe(prediction, 50'000, false);
      timed += i >= 3 && prediction.wants_sample ? 1 : 0;
    }
  }
  EXPECT_NEAR(timed, 14'000 / static_cast<int>(Sampling::kPeriod), 150);
}

TEST_F(PredictorTest, ASampleThatMovesTheEstimateMovesTheBoundOfTheNextLaunch) {
  for (int i = 0; i < 3; ++i) predictor_->observe(predict(1, 1'000), 50'000, false);
  const Prediction known = predict(1, 1'000);
  const Prediction again = predict(1, 1'000);
  EXPECT_EQ(again.bound_ns, known.bound_ns);
  EXPECT_GT(known.bound_ns, known.duration_ns);
  EXPECT_NE(known.margin, 0);  // looked at for this launch, not kept from when the key was young
}

TEST_F(PredictorTest, NewFunctionsLearnFromTheirLibraryAndNewShapesFromTheirFunction) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    const Prediction guess = predict(i, 1'000);
    predictor_->observe(guess, guess.base_ns * 5, false);
  }
  const Prediction other = predict(1'000, 1'000);
  EXPECT_NEAR(static_cast<double>(other.duration_ns) / static_cast<double>(other.base_ns), 5.0, 0.1);
  for (std::uint32_t blocks = 1; blocks <= 50; ++blocks) {
    const Prediction guess = predict(1'000, blocks);
    predictor_->observe(guess, guess.base_ns / 2, false);
  }
  const Prediction own = predict(1'000, 9'999);
  EXPECT_NEAR(static_cast<double>(own.duration_ns) / static_cast<double>(own.base_ns), 0.5, 0.06);
}

// The first launches of a library whose estimates err in both directions are best left alone.
TEST_F(PredictorTest, AFirstLaunchIsNotMadeWorseByALibraryThatErrsBothWays) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  double with = 0;
  double without = 0;
  for (std::uint32_t i = 0; i < 400; ++i) {
    const Prediction first = predict(i, 1'000);
    const double actual = static_cast<double>(first.base_ns) * std::exp(normal(random));
    with += std::abs(std::log(static_cast<double>(first.duration_ns) / actual));
    without += std::abs(std::log(static_cast<double>(first.base_ns) / actual));
    predictor_->observe(first, static_cast<std::int64_t>(actual), false);
  }
  EXPECT_LE(with, 1.02 * without);
}

TEST_F(PredictorTest, OneLibrarySaysNothingOfAnother) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    const Prediction guess = predict(i, 1'000);
    predictor_->observe(guess, guess.base_ns * 5, false);
  }
  const Launch launch = kernel(1'000);
  Function other = function(500);
  other.traits = traits_of("cupy_add__float_float");
  ASSERT_NE(other.traits.library, function(1).traits.library);
  const Prediction first = predictor_->predict({launch, &other, {}, kResidency, false});
  EXPECT_NEAR(static_cast<double>(first.duration_ns), static_cast<double>(first.base_ns), 10);
}

TEST_F(PredictorTest, EventsAreTakenLessWhatTheyAddToAKernel) {
  predictor_->observe_elapsed(predict(1, 1'000), {90'000 + kQueuedEventsNs, 0}, false);
  EXPECT_NEAR(static_cast<double>(predict(1, 1'000).duration_ns), 90'000, 900);
  // The GPU waited for its launch call.
  predictor_->observe_elapsed(predict(2, 1'000), {90'000 + 40'000 + kEventsBesideCallNs, 40'000}, false);
  EXPECT_NEAR(static_cast<double>(predict(2, 1'000).duration_ns), 90'000, 900);
  predictor_->observe_elapsed(predict(3, 1'000), {0, 0}, false);  // the driver had no time: nothing is learned
  EXPECT_EQ(predict(3, 1'000).base_ns, 0);
}

// What the bound learns from events has their noise in it, which the launches' own times have not.
TEST_F(PredictorTest, ABoundLearnedFromEventsIsLessTheirNoise) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> noise(0, kCallNoiseNs);
  const auto mean_margin = [&](std::uint32_t index, std::int64_t duration_ns) {
    constexpr int kLaunches = 6'000;
    double sum = 0;
    for (int i = 0; i < 2 * kLaunches; ++i) {
      const Prediction prediction = predict(index, 1'000);
      if (prediction.wants_sample) {
        const auto elapsed = static_cast<std::int64_t>(static_cast<double>(duration_ns) + noise(random));
        predictor_->observe_elapsed(prediction, {elapsed + 3'000 + kEventsBesideCallNs, 3'000}, false);
      }
      if (i >= kLaunches) sum += static_cast<double>(prediction.bound_ns) / static_cast<double>(duration_ns) - 1;
    }
    return sum / kLaunches;
  };
  const double of_samples = 1.35 * kCallNoiseNs;  // of which 90% of the samples are within
  EXPECT_LT(mean_margin(1, 5'000), 1.1 * of_samples / 5'000);
  EXPECT_GT(mean_margin(1, 5'000), 0.3 * of_samples / 5'000);
  EXPECT_GT(mean_margin(2, 450), 0.75 * of_samples / 450) << "of what is short beside the noise all of it stays";
}

TEST_F(PredictorTest, OverlappedSamplesLeaveTheIdleEstimateAndBound) {
  for (int i = 0; i < 500; ++i) {
    const Prediction prediction = predict(1, 1'000);
    if (prediction.wants_sample) predictor_->observe(prediction, 50'000, false);
  }
  const Prediction idle = predict(1, 1'000);
  for (int i = 0; i < 100; ++i) predictor_->observe(predict(1, 1'000, true), 100'000, true);
  EXPECT_EQ(predict(1, 1'000).duration_ns, idle.duration_ns);
  EXPECT_LT(predict(1, 1'000).bound_ns, 60'000);
  const Prediction busy = predict(1, 1'000, true);
  EXPECT_TRUE(busy.busy);
  EXPECT_GE(busy.bound_ns, 99'000);
}

TEST_F(PredictorTest, ImpossibleDurationsAreIgnored) {
  const Prediction first = predict(1, 1'000);
  predictor_->observe(first, 0, false);
  predictor_->observe(first, -5, false);
  predictor_->observe(Prediction{}, 1'000'000, false);
  EXPECT_EQ(predict(1, 1'000).duration_ns, first.duration_ns);
}

TEST_F(PredictorTest, HugeDurationsStayInRange) {
  predictor_->observe(predict(1, 1'000), std::int64_t{1} << 62, false);
  const Prediction prediction = predict(1, 1'000);
  EXPECT_GT(prediction.duration_ns, 0);
  EXPECT_GE(prediction.bound_ns, prediction.duration_ns);
}

TEST_F(PredictorTest, GraphsAreLaunchesOfTheirOwn) {
  const auto* const graph = reinterpret_cast<const void*>(0x77);
  const Prediction unknown = predictor_->predict_graph(graph, 0, false);
  EXPECT_NEAR(static_cast<double>(unknown.duration_ns), static_cast<double>(Predictor::kUnknownGraphNs), 100);
  predictor_->observe(unknown, 700'000, false);
  EXPECT_NEAR(static_cast<double>(predictor_->predict_graph(graph, 0, false).duration_ns), 700'000, 7'000);
  // What one graph without a critical path lasted says nothing of another.
  const auto* const other = reinterpret_cast<const void*>(0x99);
  EXPECT_EQ(predictor_->predict_graph(other, 0, false).duration_ns, unknown.duration_ns);
}

TEST_F(PredictorTest, CriticalPathsAreCorrectedByThoseOfOtherGraphs) {
  for (std::uintptr_t i = 1; i <= 50; ++i) {
    const Prediction prediction = predictor_->predict_graph(reinterpret_cast<const void*>(i * 64), 100'000, false);
    EXPECT_NEAR(static_cast<double>(prediction.base_ns), 100'000, 50);
    predictor_->observe(prediction, 130'000, false);
  }
  const Prediction next = predictor_->predict_graph(reinterpret_cast<const void*>(0x9999), 200'000, false);
  EXPECT_NEAR(static_cast<double>(next.duration_ns), 260'000, 5'000);
}

TEST_F(PredictorTest, TreesPredictNewKeys) {
  trees::Model model;
  model.features = kFeatureCount;
  model.base_score = 0;
  trees::Tree tree;
  tree.nodes.resize(3);
  tree.nodes[0].left = 1;
  tree.nodes[0].right = 2;
  tree.nodes[0].value = 8;  // log_blocks
  tree.nodes[1].value = std::log(5'000.0F);
  tree.nodes[2].value = std::log(70'000.0F);
  tree.depth = 1;
  model.trees.push_back(tree);
  const auto evaluator = trees::make_evaluator(model);
  predictor_->use_trees(evaluator.get());
  EXPECT_NEAR(static_cast<double>(predict(1, 100).duration_ns), 5'000, 10);
  EXPECT_NEAR(static_cast<double>(predict(1, 1'000).duration_ns), 70'000, 100);
  model.features = kFeatureCount + 1;
  const auto foreign = trees::make_evaluator(model);
  predictor_->use_trees(foreign.get());
  const Prediction guess = predict(1, 101);
  EXPECT_NEAR(static_cast<double>(guess.base_ns), static_cast<double>(Predictor::guess_ns(kernel(101), kResidency)),
              10);
}

TEST_F(PredictorTest, KernelsOfDriversThatDescribeNoneGoByHandleAndShape) {
  Launch launch = kernel(100);
  launch.function = reinterpret_cast<const void*>(0x1000);
  const std::uint64_t key = predictor_->predict({launch, nullptr, {}, kResidency, false}).key;
  EXPECT_EQ(predictor_->predict({launch, nullptr, {}, kResidency, false}).key, key);
  launch.function = reinterpret_cast<const void*>(0x2000);
  EXPECT_NE(predictor_->predict({launch, nullptr, {}, kResidency, false}).key, key);
}

// A graph has thousands of nodes of few keys, and its instantiation waits for their estimates.
TEST_F(PredictorTest, EstimatesOfANewKeyAskTheTreesOnce) {
  class Counting final : public trees::Evaluator {
   public:
    explicit Counting(float said) : Evaluator(model(), trees::Isa::kNodes), said_(said) {}
    float margin(const float*) const noexcept override {
      ++asked;
      return said_;
    }
    mutable int asked = 0;

   private:
    static trees::Model model() {
      trees::Model model;
      model.features = kFeatureCount;
      return model;
    }
    float said_;
  };
  const Counting first(std::log(50'000.0F));
  predictor_->use_trees(&first);
  const Function facts = function(1);
  const auto estimate_ns = [&](std::uint32_t blocks) {
    const Launch launch = kernel(blocks);
    return static_cast<double>(predictor_->estimate_ns({launch, &facts, {}, kResidency, false}));
  };
  for (int repeat = 0; repeat < 10; ++repeat) {
    EXPECT_NEAR(estimate_ns(100), 50'000, 100);
    EXPECT_NEAR(estimate_ns(200), 50'000, 100);
  }
  EXPECT_EQ(first.asked, 2);

  // What is learned of the function since then counts.
  for (std::uint32_t i = 0; i < 20; ++i) predictor_->observe(predict(1, 1'000 + i), 100'000, false);
  EXPECT_GT(estimate_ns(100), 80'000);
  EXPECT_EQ(static_cast<double>(predict(1, 300).duration_ns), estimate_ns(100));

  const Counting second(std::log(7'000.0F));
  predictor_ = std::make_unique<Predictor>();
  predictor_->use_trees(&first);
  EXPECT_NEAR(estimate_ns(100), 50'000, 100);
  predictor_->use_trees(&second);
  EXPECT_NEAR(estimate_ns(100), 7'000, 100);
}

TEST_F(PredictorTest, AnEstimateIsWhatPredictWouldSayAndCountsForNothing) {
  const Launch launch = kernel(1'000);
  const Function facts = function(1);
  const Query query{launch, &facts, {}, kResidency, false};
  const std::int64_t unknown_ns = predictor_->estimate_ns(query);
  const Prediction first = predict(1, 1'000);
  EXPECT_FALSE(first.hit);
  EXPECT_EQ(unknown_ns, first.duration_ns);
  predictor_->observe(first, 90'000, false);
  EXPECT_EQ(predictor_->estimate_ns(query), predict(1, 1'000).duration_ns);
}

// One row in, whatever comes: nothing out of range, nothing that stops.
TEST_F(PredictorTest, SurvivesAnything) {
  std::mt19937_64 random(9);
  std::vector<Prediction> open;
  for (int i = 0; i < 30'000; ++i) {
    Function facts = function(static_cast<std::uint32_t>(random() % 5'000));
    if (random() % 100 == 0) facts.identity = random();
    Launch launch = kernel(static_cast<std::uint32_t>(random() >> (random() % 60)));
    std::vector<std::uint32_t> words(random() % 3 == 0 ? random() % 2'000 : random() % 40);
    for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random() >> (32 + random() % 32));
    const Prediction prediction =
        random() % 20 == 0
            ? predictor_->predict_graph(&open, static_cast<std::int64_t>(random() % 1'000'000), random() % 2 == 0)
            : predictor_->predict({launch, &facts, words, kResidency, random() % 5 == 0});
    ASSERT_GT(prediction.duration_ns, 0);
    ASSERT_GE(prediction.bound_ns, prediction.duration_ns);
    ASSERT_NE(prediction.key, 0U);
    open.push_back(prediction);
    if (random() % 2 == 0) {
      predictor_->observe(open[random() % open.size()], static_cast<std::int64_t>(random() >> (random() % 64)),
                          random() % 4 == 0);
    }
  }
  EXPECT_LE(predictor_->save().size(), std::size_t{2} << 20);
}

}  // namespace
}  // namespace cudasched::predict
