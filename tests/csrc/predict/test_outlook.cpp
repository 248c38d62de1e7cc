#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cudasched::predict
