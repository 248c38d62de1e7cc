#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "predict/function.hpp"
#include "predict/work.hpp"

namespace cudasched::predict {
namespace {

WorkSizes of(std::string_view name, const std::vector<std::uint32_t>& words, std::uint64_t blocks = 1) {
  return work_sizes(traits_of(name).layout, words, blocks);
}

// Full of what is no size of the work.
std::vector<std::uint32_t> block(std::size_t words) { return std::vector<std::uint32_t>(words, 12'345'678); }

TEST(Work, OfAMatrixProductIsItsThreeSizes) {
  std::vector<std::uint32_t> words = block(90);
  words[0] = 256;
  words[1] = 64;
  words[2] = 4096;
  const WorkSizes cutlass = of("_ZN7cutlass7Kernel2I42cutlass_80_simt_sgemm_128x32_8x5_nn_align1EEvNT_6ParamsE", words);
  EXPECT_EQ(cutlass.log_m, 8);
  EXPECT_EQ(cutlass.log_n, 6);
  EXPECT_EQ(cutlass.log_k, 12);
  EXPECT_TRUE(cutlass.is_all);
}

// Maps have extents less one, the inner one first, and the inner one of a factor may be k or not.
TEST(Work, OfTensorMapsDoesNotDependOnHowTheFactorsLie) {
  for (const bool first_turned : {false, true}) {
    for (const bool second_turned : {false, true}) {
      std::vector<std::uint32_t> words = block(430);
      words[52 + (first_turned ? 1 : 0)] = 512 - 1;
      words[53 - (first_turned ? 1 : 0)] = 2048 - 1;
      words[68 + (second_turned ? 1 : 0)] = 512 - 1;
      words[69 - (second_turned ? 1 : 0)] = 128 - 1;
      words[104] = 2048 - 1;
      words[105] = 128 - 1;
      const WorkSizes sizes = of("nvjet_sm90_hsh_128x8_64x12_2x1_v_bz_TNT", words);
      EXPECT_EQ(sizes.log_m, 11);
      EXPECT_EQ(sizes.log_n, 7);
      EXPECT_EQ(sizes.log_k, 9);
    }
  }
}

TEST(Work, OfAConvolutionIsThatOfItsMatrixProduct) {
  std::vector<std::uint32_t> words = block(732);
  const std::vector<std::uint32_t> extents{8, 1, 32, 32, 64, 1, 16, 16, 128, 1, 4, 4};
  std::copy(extents.begin(), extents.end(), words.begin() + 26);
  const WorkSizes sizes = of("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", words);
  EXPECT_EQ(sizes.log_m, 11);  // 8 x 16 x 16
  EXPECT_EQ(sizes.log_n, 7);
  EXPECT_EQ(sizes.log_k, 10);  // 64 x 4 x 4
}

// Blocks say which tensors are this launch's; behind them lies what earlier ones left.
TEST(Work, OfAListIsThatOfTheTensorsThatTheBlocksWorkOn) {
  constexpr std::string_view kName =
      "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
      "namespace)::TensorListMetadata<2>, int>(int)";
  std::vector<std::uint32_t> words = block(788);
  const std::size_t first = std::size_t{2} * 2 * 64;
  words[first] = 24;
  words[first + 2] = 40;
  const std::size_t map = first + std::size_t{2} * 64;
  words[map] = 0x0701'0100;  // tensor 0, twice tensor 1, and one more block of an earlier launch
  const WorkSizes sizes = of(kName, words, 3);
  EXPECT_EQ(sizes.log_m, 6);
  EXPECT_NEAR(sizes.log_k, 5.25, 1e-6);
  EXPECT_EQ(of(kName, words, 1'000).log_m, 0);
}

// The same reduction's block is longer where its operation carries something.
TEST(Work, OfAReductionGoesByTheBlocksLength) {
  constexpr std::string_view kName = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)";
  for (const std::size_t shift : {0, 1, 3, 5}) {
    const std::size_t length[] = {260, 262, 0, 264, 0, 266};
    std::vector<std::uint32_t> words = block(length[shift]);
    words[2 + shift] = 1024;
    words[3 + shift] = 16;
    EXPECT_EQ(of(kName, words).log_k, 10);
    EXPECT_EQ(of(kName, words).log_m, 4);
    EXPECT_TRUE(of(kName, words).is_all);
  }
}

// Sizes and strides beyond the dimensions that a reduction has are what the stack held.
TEST(Work, AReductionsKeyHasWhatItIsMadeOf) {
  constexpr std::string_view kName = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)";
  const auto key = [&](const std::vector<std::uint32_t>& words) { return work_key(traits_of(kName).layout, words, 1); };
  std::vector<std::uint32_t> words = block(262);
  const std::size_t dimensions = 2 + 16;
  const std::size_t strides = dimensions + 1 + 75;
  words[dimensions] = 2;
  const std::uint64_t first = key(words);
  EXPECT_NE(first, 0U);
  for (const std::size_t garbage : {std::size_t{0}, dimensions + 2, dimensions + 7, strides + 2, std::size_t{261}}) {
    std::vector<std::uint32_t> other = words;
    other[garbage] = 7;
    EXPECT_EQ(key(other), first) << garbage;
  }
  for (const std::size_t counted : {std::size_t{2}, std::size_t{4}, std::size_t{15}, dimensions, dimensions + 1,
                                    dimensions + 4, strides, strides + 1}) {
    std::vector<std::uint32_t> other = words;
    other[counted] = 1;
    EXPECT_NE(key(other), first) << counted;
  }
  words[dimensions] = 26;  // it has 25 at most: this is another block
  EXPECT_EQ(key(words), 0U);
  EXPECT_EQ(key(block(700)), 0U);
  EXPECT_EQ(work_key(0, words, 1), 0U);
  EXPECT_EQ(work_key(255, words, 1), 0U);
}

TEST(Work, OfAnotherVersionsBlockIsNotRead) {
  for (const std::size_t words : {0, 4, 89, 91, 429, 700, 1'024}) {
    for (const std::string_view name :
         {"_ZN7cutlass7Kernel2I42cutlass_80_simt_sgemm_128x32_8x5_nn_align1EEvNT_6ParamsE",
          "nvjet_sm90_hsh_128x8_64x12", "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n",
          "void at::native::reduce_kernel<512>(int)"}) {
      const WorkSizes sizes = of(name, block(words));
      EXPECT_EQ(sizes.log_m + sizes.log_n + sizes.log_k, 0) << name << " " << words;
      EXPECT_FALSE(sizes.is_all);
    }
  }
  EXPECT_EQ(traits_of("my_kernel").layout, 0);
}

Work done(std::string_view name, const std::vector<std::uint32_t>& words, std::uint64_t blocks = 1) {
  const NameTraits traits = traits_of(name);
  return work_of(traits.layout, words, blocks, 2);
}

TEST(Work, OfAProductIsEachFactorOnceAndTwiceItsSizes) {
  std::vector<std::uint32_t> words = block(430);
  words[52] = 500 - 1;
  words[53] = 2000 - 1;
  words[68] = 500 - 1;
  words[69] = 100 - 1;
  words[104] = 2000 - 1;
  words[105] = 100 - 1;
  const Work work = done("nvjet_sm90_hsh_128x8_64x12_2x1_v_bz_TNT", words);
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * 2000 * 100 * 500);
  EXPECT_DOUBLE_EQ(work.bytes, 2.0 * (2000 * 500 + 500 * 100 + 2000 * 100));
}

TEST(Work, OfAConvolutionOnlyTheOperationsAreKnown) {
  std::vector<std::uint32_t> words = block(732);
  const std::vector<std::uint32_t> extents{8, 1, 32, 32, 60, 1, 17, 16, 120, 1, 3, 3};
  std::copy(extents.begin(), extents.end(), words.begin() + 26);
  const Work work = done("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", words);
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * (8 * 17 * 16) * 120 * (60 * 9));
  EXPECT_EQ(work.bytes, 0);
}

TEST(Work, OfUnknownBlocksOrAbsurdSizesIsNone) {
  EXPECT_EQ(done("some_kernel", block(90)).flops, 0);
  EXPECT_EQ(done("sgemm_largek_lds64", block(24)).flops, 0) << "12,345,678 three times is no product";
}

}  // namespace
}  // namespace cudasched::predict
