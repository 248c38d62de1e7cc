#include <gtest/gtest.h>

#include <memory>

#include "predict/predictor.hpp"

namespace cudasched::predict {
namespace {

Launch kernel(int id, std::uint32_t blocks) {
  Launch launch;
  launch.function = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(0x1000 + id * 64));
  launch.grid[0] = blocks;
  launch.block[0] = 256;
  return launch;
}

class PredictorTest : public ::testing::Test {
 protected:
  Prediction predict(const Launch& launch) {
    return predictor_->predict(launch, [&] {
      ++residency_calls_;
      return Residency{4, 132};
    });
  }

  std::unique_ptr<Predictor> predictor_ = std::make_unique<Predictor>();
  int residency_calls_ = 0;
};

TEST_F(PredictorTest, GuessGrowsWithWavesAndNeverOverflows) {
  const Residency residency{4, 132};
  std::int64_t before = 0;
  for (const std::uint32_t blocks : {1U, 528U, 529U, 5'280U, 1'000'000U, 0xffff'ffffU}) {
    const std::int64_t guess = Predictor::guess_ns(kernel(1, blocks), residency);
    EXPECT_GE(guess, before);
    EXPECT_GT(guess, 0);
    before = guess;
  }
  EXPECT_EQ(Predictor::guess_ns(kernel(1, 528), residency), Predictor::guess_ns(kernel(1, 1), residency));
  EXPECT_GT(Predictor::guess_ns(kernel(1, 529), residency), Predictor::guess_ns(kernel(1, 528), residency));
  EXPECT_GT(Predictor::guess_ns(kernel(1, 100), Residency{0, 0}), 0);
}

TEST_F(PredictorTest, AsksForResidencyOnlyWithoutSamples) {
  const Launch launch = kernel(1, 1000);
  const Prediction guess = predict(launch);
  EXPECT_EQ(residency_calls_, 1);
  EXPECT_GT(guess.raw_guess_ns, 0);
  predictor_->observe(launch.key(), guess, 90'000);
  const Prediction known = predict(launch);
  EXPECT_EQ(residency_calls_, 1);
  EXPECT_EQ(known.raw_guess_ns, 0);
  EXPECT_NEAR(static_cast<double>(known.duration_ns), 90'000, 100);
}

TEST_F(PredictorTest, TimesTheFirstThreeLaunchesThenAFewOfMany) {
  const Launch launch = kernel(1, 1000);
  int timed = 0;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(predict(launch).wants_sample);
  for (int i = 3; i < 6403; ++i) timed += predict(launch).wants_sample ? 1 : 0;
  EXPECT_EQ(timed, 6400 / static_cast<int>(Predictor::kSamplePeriod));
}

TEST_F(PredictorTest, GuessesLearnFromWhatEarlierGuessesWereWrongBy) {
  for (int i = 0; i < 100; ++i) {
    const Launch launch = kernel(i, 1000);
    const Prediction guess = predict(launch);
    predictor_->observe(launch.key(), guess, guess.raw_guess_ns * 5);
  }
  const Prediction next = predict(kernel(1000, 1000));
  EXPECT_NEAR(static_cast<double>(next.duration_ns) / static_cast<double>(next.raw_guess_ns), 5.0, 0.1);
}

TEST_F(PredictorTest, GraphsAreNotGuessedFromResidency) {
  Launch graph;
  graph.function = reinterpret_cast<const void*>(0x77);
  graph.is_graph = true;
  EXPECT_EQ(predict(graph).duration_ns, Predictor::kUnknownGraphNs);
  EXPECT_EQ(residency_calls_, 0);
}

TEST(LaunchKey, SeparatesWhatChangesTheWork) {
  const Launch base = kernel(1, 1000);
  std::vector<Launch> others(8, base);
  others[0].function = reinterpret_cast<const void*>(0x9000);
  others[1].grid[0] = 1001;
  others[2].grid[1] = 2;
  others[3].grid[2] = 2;
  others[4].block[0] = 128;
  others[5].block[1] = 2;
  others[6].block[2] = 2;
  others[7].dynamic_shared_bytes = 1024;
  for (const Launch& other : others) EXPECT_NE(other.key(), base.key());
  EXPECT_EQ(kernel(1, 1000).key(), base.key());
  EXPECT_NE(base.key(), 0U);
}

}  // namespace
}  // namespace cudasched::predict
