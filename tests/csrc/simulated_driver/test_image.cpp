#include <gtest/gtest.h>

#include <random>
#include <string>

#include "simulated_driver/image.hpp"

namespace cudasched::simulated_driver {
namespace {

const std::string kHeader = "cudasched-sim 1\n";

TEST(Image, ReadsEveryAttribute) {
  const auto kernels = parse_image(kHeader +
                                   "# a comment\n\n"
                                   "kernel add params=8,8,8,4 regs=40 shared=1024 threads_max=256 block_us=param:3 "
                                   "blocks_per_sm=2 effect=append\n"
                                   "kernel $plain_1\n");
  ASSERT_TRUE(kernels.has_value());
  ASSERT_EQ(kernels->size(), 2U);
  const KernelSpec& add = kernels->front();
  EXPECT_EQ(add.name, "add");
  EXPECT_EQ(add.param_bytes, (std::vector<std::uint32_t>{8, 8, 8, 4}));
  EXPECT_EQ(add.param_offsets, (std::vector<std::uint32_t>{0, 8, 16, 24}));
  EXPECT_EQ(add.params_total_bytes, 28U);
  EXPECT_EQ(add.regs, 40U);
  EXPECT_EQ(add.shared_bytes, 1024U);
  EXPECT_EQ(add.threads_max, 256U);
  EXPECT_EQ(add.block_us_param, 3);
  EXPECT_EQ(add.blocks_per_sm, 2U);
  EXPECT_EQ(add.effect, Effect::kAppend);
  const KernelSpec& plain = kernels->back();
  EXPECT_TRUE(plain.param_bytes.empty());
  EXPECT_EQ(plain.block_us, 20U);
  EXPECT_EQ(plain.block_us_param, -1);
}

TEST(Image, AlignsParametersToTheirSize) {
  const auto kernels = parse_image(kHeader + "kernel k params=4,8,1,2,24,16\n");
  ASSERT_TRUE(kernels.has_value());
  EXPECT_EQ(kernels->front().param_offsets, (std::vector<std::uint32_t>{0, 8, 16, 18, 24, 48}));
}

class BadImage : public ::testing::TestWithParam<const char*> {};

TEST_P(BadImage, IsRefused) { EXPECT_FALSE(parse_image(GetParam()).has_value()); }

INSTANTIATE_TEST_SUITE_P(
    All, BadImage,
    ::testing::Values("", "cudasched-sim 1", "cudasched-sim 2\nkernel a\n", "cudasched-sim 1\nkernel a",
                      "cudasched-sim 1\nkernel\n", "cudasched-sim 1\nkernel a-b\n", "cudasched-sim 1\nkernel a b\n",
                      "cudasched-sim 1\nkernel a  regs=3\n", "cudasched-sim 1\nkernel a regs=\n",
                      "cudasched-sim 1\nkernel a regs=0\n", "cudasched-sim 1\nkernel a regs=256\n",
                      "cudasched-sim 1\nkernel a regs=3x\n", "cudasched-sim 1\nkernel a regs=-3\n",
                      "cudasched-sim 1\nkernel a regs=3 regs=3\n", "cudasched-sim 1\nkernel a color=red\n",
                      "cudasched-sim 1\nkernel a params=8,\n", "cudasched-sim 1\nkernel a params=0\n",
                      "cudasched-sim 1\nkernel a params=,8\n", "cudasched-sim 1\nkernel a params=4096,1\n",
                      "cudasched-sim 1\nkernel a params=99999999999999\n", "cudasched-sim 1\nkernel a block_us=0\n",
                      "cudasched-sim 1\nkernel a block_us=param:0\n",
                      "cudasched-sim 1\nkernel a params=8 block_us=param:0\n",
                      "cudasched-sim 1\nkernel a params=4 block_us=param:1\n",
                      "cudasched-sim 1\nkernel a blocks_per_sm=33\n", "cudasched-sim 1\nkernel a effect=burn\n",
                      "cudasched-sim 1\nkernel a params=8,8 effect=append\n",
                      "cudasched-sim 1\nkernel a params=8,8,8,4 effect=axpy\n", "cudasched-sim 1\nkernel a\nkernel a\n",
                      "cudasched-sim 1\nvoid a\n",
                      "\x7f"
                      "ELF",
                      "cudasched-sim 1\r\nkernel a\r\n"));

// Mutations of a good image: the parser never reads outside the text (the sanitizers watch) and what it accepts is
// sound.
TEST(Image, SurvivesMutations) {
  const std::string good =
      kHeader +
      "kernel add params=8,8,8,4 regs=40 shared=1024 threads_max=256 block_us=param:3 effect=append\n"
      "kernel axpy params=8,8,4,4 effect=axpy blocks_per_sm=2 block_us=100\n";
  const std::string alphabet = "cudasched-sim 1\nkernel=,:0123456789paramseffect\0\xff";
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int round = 0; round < 200'000; ++round) {
    std::string text = good;
    for (std::uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        case 2:
          text.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        default:
          text.resize(at);
          break;
      }
      if (text.empty()) text = "x";
    }
    const std::vector<char> exact(text.begin(), text.end());
    const auto kernels = parse_image({exact.data(), exact.size()});
    if (!kernels) continue;
    ++accepted;
    for (const KernelSpec& spec : *kernels) {
      ASSERT_FALSE(spec.name.empty());
      ASSERT_EQ(spec.param_bytes.size(), spec.param_offsets.size());
      for (std::size_t i = 0; i < spec.param_bytes.size(); ++i) {
        ASSERT_LE(spec.param_offsets[i] + spec.param_bytes[i], spec.params_total_bytes);
      }
      ASSERT_LE(spec.params_total_bytes, kParamsBytesMax);
      ASSERT_LT(spec.block_us_param, static_cast<int>(spec.param_bytes.size()));
    }
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace cudasched::simulated_driver
