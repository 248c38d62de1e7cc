// Whether all thread blocks are short.
#include <gtest/gtest.h>

#include <cstdint>

#include "schedule/block_length.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

TEST(BlockLength, OfAKernelIsItsTimeOverTheTurnsOfItsBlocks) {
  constexpr std::uint64_t kAtOnce = 132 * 2048;
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 60 * kAtOnce, kAtOnce), 50'000);
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 132 * 384, kAtOnce), 3'000'000);  // all blocks at once
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 0, kAtOnce), 3'000'000);
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, kAtOnce, 0), 11);  // a device that does not say
}

TEST(BlockLength, ShortBlocksAreBelievedAfterASecond) {
  BlockLength length;
  EXPECT_FALSE(length.are_short(100 * kSecond, false, 0));
  EXPECT_FALSE(length.are_short(102 * kSecond, true, 0));
  EXPECT_FALSE(length.are_short(103 * kSecond - 1, true, 0));
  EXPECT_TRUE(length.are_short(103 * kSecond, true, 0));
  EXPECT_TRUE(length.are_short(500 * kSecond, true, 0));
}

TEST(BlockLength, ALongBlockEndsItAtOnceAndForLongerEachTime) {
  BlockLength length;
  std::int64_t now = 100 * kSecond;
  std::int64_t calm_ns = BlockLength::kCalmNs;
  std::int64_t long_ns = 0;
  for (int times = 0; times < 8; ++times) {
    length.are_short(now, true, long_ns);
    EXPECT_FALSE(length.are_short(now + calm_ns - 1, true, long_ns)) << times;
    EXPECT_TRUE(length.are_short(now += calm_ns, true, long_ns)) << times;
    long_ns = now += kSecond;
    EXPECT_FALSE(length.are_short(now, true, long_ns));
    calm_ns = std::min(4 * calm_ns, BlockLength::kMostCalmNs);
  }
}

TEST(BlockLength, AProgramOfLongBlocksIsNeverShort) {
  BlockLength length;
  for (std::int64_t now = 100 * kSecond; now < 130 * kSecond; now += kSecond / 2) {
    EXPECT_FALSE(length.are_short(now, true, now - 1000));
  }
}

}  // namespace
}  // namespace cudasched::schedule
