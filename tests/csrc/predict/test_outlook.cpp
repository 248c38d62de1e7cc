#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "predict/outlook.hpp"

namespace cudasched::predict {
namespace {

struct Asked {
  Launch launch;
  Function function;
  std::vector<std::uint32_t> words;
  Residency residency{4, 132, 2048};

  Query query() const { return {launch, &function, words, residency, false}; }
};

Asked of(std::uint32_t blocks, std::uint32_t threads, int blocks_per_sm = 4) {
  Asked asked;
  asked.launch.grid[0] = blocks;
  asked.launch.block[0] = threads;
  asked.residency.blocks_per_sm = blocks_per_sm;
  return asked;
}

TEST(Outlook, BelowAWaveTheMultiprocessorsWithABlockCount) {
  const Outlook outlook = outlook_of(of(66, 256).query(), 5'000);
  EXPECT_FLOAT_EQ(outlook.occupancy, 0.5F);
  EXPECT_FLOAT_EQ(outlook.waves, 66.0F / 528);
  EXPECT_FLOAT_EQ(outlook.sm_utilisation, 0.5F);
  EXPECT_FLOAT_EQ(outlook.block_efficiency, 1.0F);
  EXPECT_EQ(outlook_of(of(132, 256).query(), 5'000).sm_utilisation, 1.0F);
}

TEST(Outlook, AboveAWaveTheLastOneCounts) {
  EXPECT_FLOAT_EQ(outlook_of(of(528 + 264, 256).query(), 5'000).sm_utilisation, 0.75F);
  EXPECT_FLOAT_EQ(outlook_of(of(528 * 3, 256).query(), 5'000).sm_utilisation, 1.0F);
}

TEST(Outlook, APartOfAWarpIsAWarp) {
  const Outlook outlook = outlook_of(of(100, 48, 32).query(), 5'000);
  EXPECT_FLOAT_EQ(outlook.block_efficiency, 0.75F);
  EXPECT_FLOAT_EQ(outlook.occupancy, 1.0F);
  EXPECT_FLOAT_EQ(outlook_of(of(1, ~0U, 32).query(), 5'000).block_efficiency, 1.0F) << "a damaged recording's";
}

TEST(Outlook, RatesAreOfTheWorkThatIsKnown) {
  Asked asked = of(32, 128);
  asked.function.traits = traits_of("_ZN7cutlass7Kernel2I42cutlass_80_simt_sgemm_128x32_8x5_nn_align1EEvNT_6ParamsE");
  asked.words.assign(90, 12'345'678);
  asked.words[0] = 256;
  asked.words[1] = 64;
  asked.words[2] = 4096;
  const Outlook outlook = outlook_of(asked.query(), 10'000);
  EXPECT_FLOAT_EQ(outlook.flops_per_s, 2.0F * 256 * 64 * 4096 / 10e-6F);
  asked.words.pop_back();  // of another version
  EXPECT_EQ(outlook_of(asked.query(), 10'000).flops_per_s, 0);
  asked.words.clear();
  EXPECT_EQ(outlook_of(asked.query(), 10'000).bytes_per_s, 0);
}

TEST(Outlook, WhatIsNotKnownIsZero) {
  const Outlook outlook = outlook_of(of(100, 128, 0).query(), 0);
  EXPECT_EQ(outlook.occupancy, 0);
  EXPECT_EQ(outlook.sm_utilisation, 0);
  EXPECT_EQ(outlook.bytes_per_s, 0);
  Asked graph = of(1, 1);
  graph.launch.is_graph = true;
  EXPECT_EQ(outlook_of(graph.query(), 1'000).block_efficiency, 0);
}

Level level(const Asked& asked, std::int64_t duration_ns) { return level_of(asked.query(), duration_ns); }

TEST(Level, PartialWarpsFewBlocksAndATailAreJudgedByWhatTheyLose) {
  EXPECT_EQ(level(of(528, 256), 1'000'000), Level::kGood);
  EXPECT_EQ(level(of(528, 48), 1'000'000), Level::kCritical);  // a quarter of the lanes
  EXPECT_EQ(level(of(528, 250), 1'000'000), Level::kGood);     // 2%
  EXPECT_EQ(level(of(33, 256), 1'000'000), Level::kCritical);  // half of three quarters
  EXPECT_EQ(level(of(110, 256), 1'000'000), Level::kWarning);
  EXPECT_EQ(level(of(131, 256), 1'000'000), Level::kGood);
  EXPECT_EQ(level(of(528 + 132, 256), 1'000'000), Level::kWarning);  // half of 37%
  EXPECT_EQ(level(of(528 * 20 + 132, 256), 1'000'000), Level::kGood);
  Asked spills = of(528, 256);
  spills.function.local_bytes = 32;
  EXPECT_EQ(level(spills, 1'000'000), Level::kWarning);
}

// What an empty kernel takes is no gain.
TEST(Level, AShortKernelHasLittleToGain) {
  EXPECT_EQ(level(of(33, 256), 1'500), Level::kGood);
  EXPECT_EQ(level(of(33, 256), 3'000), Level::kWarning);
  EXPECT_EQ(level(of(33, 256), 0), Level::kCritical) << "no time is known";
}

TEST(Level, ALibrarysKernelIsNotJudged) {
  Asked asked = of(1, 1);
  asked.function.traits.is_library = true;
  EXPECT_EQ(level(asked, 1'000'000), Level::kNotJudged);
  Asked graph = of(1, 1);
  graph.launch.is_graph = true;
  EXPECT_EQ(level(graph, 1'000'000), Level::kNotJudged);
}

TEST(Outlooks, AKernelCountsOnceInEachLaunchShape) {
  const auto outlooks = std::make_unique<Outlooks>();
  const auto add = [&](std::uint64_t shape, const Asked& asked) { outlooks->add(shape, asked.query(), 1'000'000); };
  add(1, of(528, 512));
  add(1, of(528, 512));
  add(2, of(66, 48));
  Asked library = of(528, 256);
  library.function.traits.is_library = true;
  add(3, library);
  add(4, of(66, 48, 0));  // the driver did not say how many blocks fit
  const Outlooks::Sums sums = outlooks->sums();
  EXPECT_EQ(sums.kernels, (std::array<std::uint64_t, kLevels>{1, 0, 1, 1}));
  EXPECT_NEAR(static_cast<double>(sums.occupancy), 1e6 * (1 + 0.125 + 0.5), 3);
  EXPECT_NEAR(static_cast<double>(sums.sm_utilisation), 1e6 * (1 + 0.5 + 1), 3);
  EXPECT_NEAR(static_cast<double>(sums.block_efficiency), 1e6 * (1 + 0.75 + 1), 3);
}

TEST(Outlooks, WhatFindsNoRoomIsNotCounted) {
  const auto outlooks = std::make_unique<Outlooks>();
  const Asked asked = of(528, 256);
  for (std::uint64_t shape = 0; shape < 3 * Outlooks::kMostShapes; ++shape) outlooks->add(shape, asked.query(), 1);
  EXPECT_EQ(outlooks->sums().kernels[static_cast<std::size_t>(Level::kGood)], Outlooks::kMostShapes);
}

}  // namespace
}  // namespace cudasched::predict
