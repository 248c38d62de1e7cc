#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "predict/predictor.hpp"

namespace cudasched::predict {
namespace {

TEST(ScoreWindow, QuantileIsThatOfTheLastScores) {
  ScoreWindow window;
  std::mt19937 random(1);
  std::vector<float> scores;
  for (int i = 0; i < 1'000; ++i) {
    scores.push_back(static_cast<float>(random() % 1'000));
    window.add(scores.back(), false, 0.9F);
    window.set_shift(0);
    ASSERT_EQ(window.score(0), scores.back());
    std::vector<float> last(scores.end() - std::min<std::ptrdiff_t>(i + 1, ScoreWindow::kWindow), scores.end());
    ASSERT_EQ(window.size(), last.size());
    std::sort(last.begin(), last.end());
    const double rank = std::clamp(0.9 * static_cast<double>(last.size() + 1) - 1, 0.0, last.size() - 1.0);
    const auto below = static_cast<std::size_t>(rank);
    const double above = last[std::min(below + 1, last.size() - 1)];
    ASSERT_NEAR(window.quantile(0.9F), last[below] + (rank - std::floor(rank)) * (above - last[below]), 0.2);
  }
}

TEST(ScoreWindow, LevelRisesWithEveryMissAndFallsOtherwise) {
  ScoreWindow window;
  window.add(0, true, 0.9F);
  EXPECT_GT(window.shift(), 0);
  const float risen = window.shift();
  window.add(0, false, 0.9F);
  EXPECT_LT(window.shift(), risen);
}

TEST(Bound, BinsRiseWithTheDuration) {
  EXPECT_EQ(Bound::bin_of(0), 0);
  std::uint8_t before = 0;
  for (double ns = 1; ns < 1e12; ns *= 1.1) {
    const std::uint8_t bin = Bound::bin_of(static_cast<float>(std::log(ns)));
    EXPECT_GE(bin, before);
    EXPECT_LT(bin, Bound::kBins);
    before = bin;
  }
  EXPECT_EQ(before, Bound::kBins - 1);
}

TEST(Bound, IsNeverBelowThePredictionAndAlwaysFinite) {
  const auto bound = std::make_unique<Bound>();
  for (int i = 0; i < 300; ++i) bound->add(Knowledge::kKnown, false, 3, 0.004F, -20, 0);
  EXPECT_EQ(bound->margin(Knowledge::kKnown, false, 3, 0.004F), 0);
  for (int i = 0; i < 300; ++i) bound->add(Knowledge::kKnown, false, 3, 0.004F, 20, 0);
  EXPECT_LE(bound->margin(Knowledge::kKnown, false, 3, 0.5F), 5);
}

TEST(Bound, BusyLaunchesDoNotTouchTheIdle) {
  const auto bound = std::make_unique<Bound>();
  for (int i = 0; i < 300; ++i) bound->add(Knowledge::kYoung, false, 3, 1, 0.01F, 0.02F);
  const float idle = bound->margin(Knowledge::kYoung, false, 3, 1);
  for (int i = 0; i < 300; ++i) bound->add(Knowledge::kYoung, true, 3, 1, 1.0F, 0.5F);
  EXPECT_EQ(bound->margin(Knowledge::kYoung, false, 3, 1), idle);
  EXPECT_GT(bound->margin(Knowledge::kYoung, true, 3, 1), 0.9F);
}

TEST(Bound, NeitherScoresNorTheLevelOfNewKeysAreThoseOfAnotherBase) {
  const auto bound = std::make_unique<Bound>();
  for (int i = 0; i < 300; ++i) bound->add(Knowledge::kNew, false, 3, 1, 0.5F, true);
  StateWriter out;
  bound->save(out);
  const std::vector<std::byte> state = std::move(out).finish();
  for (const bool same_base : {true, false}) {
    const auto next = std::make_unique<Bound>();
    const auto fresh = std::make_unique<Bound>();
    StateReader in(state);
    next->restore(in, same_base);
    in.finish();
    for (int i = 0; i < 20; ++i) {
      for (Bound* const each : {next.get(), fresh.get()}) each->add(Knowledge::kNew, false, 3, 1, 0.01F * i, false);
    }
    const auto margin = [](const Bound& of) { return of.margin(Knowledge::kNew, false, 3, 1); };
    EXPECT_EQ(margin(*next) == margin(*fresh), !same_base);
  }
}

struct Seen {
  double predicted_ns;
  bool within;
};

// A program of kernels of 1.5 to 600 us, some steady, some noisy, some interrupted now and then; part of them change
// their work from time to time. Launches are timed only where the predictor asks.
void run_program(std::uint64_t seed, float coverage, std::vector<Seen>& seen) {
  struct Kernel {
    Function function;
    Launch launch;
    std::vector<std::uint32_t> words;
    double duration_ns;
    double noise;
    double interruptions;
  };
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const auto predictor = std::make_unique<Predictor>(coverage);
  std::vector<Kernel> kernels(150);
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    Kernel& kernel = kernels[i];
    kernel.function.index = static_cast<std::uint32_t>(i % 50);
    kernel.function.identity = 100 + i % 50;
    kernel.launch.grid[0] = 1 + static_cast<std::uint32_t>(random() % 4'000);
    kernel.launch.block[0] = 256;
    kernel.words.assign(16, static_cast<std::uint32_t>(i));
    kernel.duration_ns = 1'500 * std::exp(uniform(random) * std::log(400.0));
    kernel.noise = 0.005 * std::exp(uniform(random) * 2);
    kernel.interruptions = uniform(random) < 0.3 ? 0.03 : 0;
  }
  int launches = 0;
  for (int step = 0; step < 500; ++step) {
    for (Kernel& kernel : kernels) {
      if (seed % 2 == 0 && uniform(random) < 0.01) {
        kernel.words[3] = static_cast<std::uint32_t>(random() % 100'000);
        kernel.duration_ns *= std::exp(0.3 * normal(random));
        kernel.duration_ns = std::clamp(kernel.duration_ns, 1'500.0, 600'000.0);
      }
      const Prediction prediction =
          predictor->predict({kernel.launch, &kernel.function, kernel.words, {4, 132}, false});
      double duration_ns = kernel.duration_ns * std::exp(kernel.noise * normal(random));
      if (uniform(random) < kernel.interruptions) duration_ns *= std::exp(0.4 * std::abs(normal(random)));
      ASSERT_GE(prediction.bound_ns, prediction.duration_ns);
      if (++launches > 1'000) {
        seen.push_back(
            {static_cast<double>(prediction.duration_ns), duration_ns <= static_cast<double>(prediction.bound_ns)});
      }
      if (prediction.wants_sample) predictor->observe(prediction, std::llround(duration_ns), false);
    }
  }
}

class Coverage : public ::testing::TestWithParam<float> {};

TEST_P(Coverage, HoldsOnEveryDecileOfThePrediction) {
  std::vector<Seen> seen;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) run_program(seed, GetParam(), seen);
  std::sort(seen.begin(), seen.end(), [](const Seen& a, const Seen& b) { return a.predicted_ns < b.predicted_ns; });
  for (std::size_t decile = 0; decile < 10; ++decile) {
    const std::size_t begin = seen.size() * decile / 10;
    const std::size_t end = seen.size() * (decile + 1) / 10;
    double within = 0;
    for (std::size_t i = begin; i < end; ++i) within += seen[i].within ? 1 : 0;
    // A decile has about 75 keys, each more or less like the others.
    const double tolerance = 0.01 + 0.25 * (1 - static_cast<double>(GetParam()));
    EXPECT_NEAR(within / static_cast<double>(end - begin), GetParam(), tolerance) << "decile " << decile;
  }
}

INSTANTIATE_TEST_SUITE_P(Shares, Coverage, ::testing::Values(0.8F, 0.9F));

}  // namespace
}  // namespace cudasched::predict
