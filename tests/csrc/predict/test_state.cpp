#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "predict/features.hpp"
#include "predict/predictor.hpp"
#include "predict/state.hpp"

namespace cudasched::predict {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 250;  // sanitizers slow them down sixty times
#else
constexpr int kRounds = 5'000;
#endif

using State = std::vector<std::byte>;

Prediction predict(Predictor& predictor, std::uint32_t index, std::uint32_t size, std::uint32_t free_word) {
  Function function;
  function.index = index;
  function.identity = 1 + index * 77;
  Launch launch;
  launch.grid[0] = size;
  const std::vector<std::uint32_t> words{size, 0, 3, 0, free_word | 1U << 28, 9};
  return predictor.predict({launch, &function, words, {4, 132}, false});
}

void teach(Predictor& predictor, int launches) {
  std::mt19937 random(1);
  for (int i = 0; i < launches; ++i) {
    const std::uint32_t size = 100 + static_cast<std::uint32_t>(i) % 5;
    const Prediction prediction = predict(predictor, static_cast<std::uint32_t>(i / 5 % 4), size, random());
    if (prediction.wants_sample) predictor.observe(prediction, 50 * size + random() % 20, false);
  }
}

// Its launches are hits from the first one on, and its outlook is asked for all the same.
TEST(State, TheOutlookOfAKernelFromAnEarlierRunIsCountedAtItsFirstLaunch) {
  const auto first = std::make_unique<Predictor>();
  teach(*first, 100);
  const auto second = std::make_unique<Predictor>();
  second->restore(first->save());
  Function function;
  function.identity = 1;
  Launch launch;
  launch.grid[0] = 100;
  const std::vector<std::uint32_t> words{100, 0, 3, 0, 1U << 28, 9};
  const Query asks{.launch = launch, .function = &function, .words = words, .residency = {}, .lacks_residency = true};
  EXPECT_TRUE(second->predict(asks).wants_residency);
  EXPECT_EQ(second->outlooks().sums().kernels, (std::array<std::uint64_t, kLevels>{}));
  EXPECT_TRUE(predict(*second, 0, 100, 7).hit);
  EXPECT_NE(second->outlooks().sums().kernels, (std::array<std::uint64_t, kLevels>{}));
  EXPECT_FALSE(second->predict(asks).wants_residency);
}

TEST(State, WhatWasLearnedIsKnownInTheNextRun) {
  const auto first = std::make_unique<Predictor>();
  teach(*first, 2'000);
  const State state = first->save();
  const auto second = std::make_unique<Predictor>();
  second->restore(state);
  for (std::uint32_t size = 100; size < 105; ++size) {
    // Another number in this run, another value of the free word.
    Function function;
    function.index = 50;
    function.identity = 1;
    Launch launch;
    launch.grid[0] = size;
    const std::vector<std::uint32_t> words{size, 0, 3, 0, 0x3f80'0000, 9};
    const Prediction prediction = second->predict({launch, &function, words, {4, 132}, false});
    EXPECT_TRUE(prediction.hit);
    EXPECT_NEAR(static_cast<double>(prediction.duration_ns), 50.0 * size, 100);
    EXPECT_FALSE(prediction.wants_sample);
  }
  EXPECT_EQ(std::make_unique<Predictor>()->save().size() < state.size(), true);
}

TEST(State, SavesWhatItRestored) {
  const auto first = std::make_unique<Predictor>();
  teach(*first, 2'000);
  const State state = first->save();
  const auto second = std::make_unique<Predictor>();
  second->restore(state);
  const State again = second->save();
  EXPECT_EQ(again.size(), state.size());
  const auto third = std::make_unique<Predictor>();
  third->restore(again);
  EXPECT_EQ(third->save(), again);
}

// What one model was wrong by says nothing of another; what was measured stays.
TEST(State, OfAnotherModelKeepsWhatWasMeasuredAndNoCorrection) {
  const auto first = std::make_unique<Predictor>();
  teach(*first, 2'000);
  trees::Model model;
  model.features = kFeatureCount;
  trees::Tree tree;
  tree.nodes.resize(1);
  tree.nodes[0].value = std::log(5'000.0F);
  model.trees.push_back(tree);
  const auto trees = trees::make_evaluator(model);
  const auto second = std::make_unique<Predictor>();
  second->use_trees(trees.get());
  second->restore(first->save());
  EXPECT_TRUE(predict(*second, 0, 100, 0).hit);
  const Prediction unknown = predict(*second, 0, 7, 0);
  EXPECT_FALSE(unknown.hit);
  EXPECT_NEAR(static_cast<double>(unknown.duration_ns), 5'000, 10);

  model.trees[0].nodes[0].value = std::log(6'000.0F);
  EXPECT_NE(trees::make_evaluator(model)->identity(), trees->identity());
}

TEST(State, ADifferentByteIsRefusedAndChangesNothing) {
  const auto taught = std::make_unique<Predictor>();
  teach(*taught, 100);
  State state = taught->save();
  const auto predictor = std::make_unique<Predictor>();
  const State before = predictor->save();
  std::mt19937 random(2);
  for (std::size_t at = 0; at < state.size(); ++at) {
    const std::byte right = state[at];
    state[at] ^= static_cast<std::byte>(1 + random() % 255);
    ASSERT_THROW(predictor->restore(state), StateError) << at;
    state[at] = right;
  }
  EXPECT_EQ(predictor->save(), before);
  predictor->restore(state);
  EXPECT_NE(predictor->save(), before);
}

TEST(State, AnEndTooEarlyOrTooLateIsRefused) {
  const auto taught = std::make_unique<Predictor>();
  teach(*taught, 100);
  const State state = taught->save();
  const auto predictor = std::make_unique<Predictor>();
  for (std::size_t size = 0; size < state.size(); ++size) {
    ASSERT_THROW(predictor->restore(std::span(state).first(size)), StateError) << size;
  }
  State longer = state;
  longer.push_back(std::byte{0});
  EXPECT_THROW(predictor->restore(longer), StateError);
  EXPECT_THROW(predictor->restore(State(kMaxStateBytes + 1)), StateError);
}

// A frame whose checksum is right, as a careful liar would make it: each value is held against its bounds.
TEST(State, ValuesOutOfRangeAreRefused) {
  const auto predictor = std::make_unique<Predictor>();
  const auto taught = std::make_unique<Predictor>();
  teach(*taught, 100);
  const State honest = taught->save();
  std::mt19937 random(4);
  int refused = 0;
  for (int i = 0; i < kRounds; ++i) {
    StateWriter writer;
    State body(honest.begin() + 16, honest.end() - 8);
    const std::size_t at = random() % std::min<std::size_t>(body.size(), 2'000);
    body[at] = static_cast<std::byte>(random());
    for (const std::byte byte : body) writer.put(static_cast<std::uint8_t>(byte));
    try {
      predictor->restore(std::move(writer).finish());
    } catch (const StateError&) {
      ++refused;
    }
    const Prediction prediction = predict(*predictor, 0, 100, 1);
    ASSERT_GT(prediction.duration_ns, 0);
    ASSERT_GE(prediction.bound_ns, prediction.duration_ns);
  }
  EXPECT_GT(refused, 0);
}

TEST(State, StaysWithinItsBound) {
  const auto predictor = std::make_unique<Predictor>();
  std::mt19937_64 random(5);
  for (int i = 0; i < 200'000; ++i) {
    Function function;
    function.index = static_cast<std::uint32_t>(i) % kMaxFunctions;
    function.identity = 1 + function.index;
    Launch launch;
    launch.grid[0] = static_cast<std::uint32_t>(random());
    const Prediction prediction = predictor->predict({launch, &function, {}, {4, 132}, false});
    predictor->observe(prediction, 1'000 + static_cast<std::int64_t>(random() % 1'000'000), i % 3 == 0);
  }
  const State state = predictor->save();
  EXPECT_LE(state.size(), kMaxStateBytes);
  const auto other = std::make_unique<Predictor>();
  other->restore(state);
}

}  // namespace
}  // namespace cudasched::predict
