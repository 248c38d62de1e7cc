// Plans of pools: what overlaps in time never overlaps in memory, and places are used again.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "cudasched/graphs.hpp"

namespace cudasched::graphs {
namespace {

bool at_once(const Use& a, const Use& b) { return a.first_step <= b.last_step && b.first_step <= a.last_step; }

std::size_t peak(const std::vector<Use>& uses) {
  std::size_t most = 0;
  for (const Use& at : uses) {
    std::size_t now = 0;
    for (const Use& use : uses)
      now += use.first_step <= at.first_step && at.first_step <= use.last_step ? use.bytes : 0;
    most = std::max(most, now);
  }
  return most;
}

TEST(PlanMemory, NothingOverlapsInTimeAndMemory) {
  std::mt19937 random(7);
  const auto up_to = [&](unsigned most) { return std::uniform_int_distribution<unsigned>(0, most)(random); };
  for (int round = 0; round < 300; ++round) {
    const std::size_t alignment = std::size_t{1} << up_to(9);
    std::vector<Use> uses(up_to(24));
    std::size_t sum = 0;
    for (Use& use : uses) {
      use.first_step = up_to(12);
      use.last_step = use.first_step + up_to(5);
      use.bytes = up_to(9) == 0 ? 0 : 1 + up_to(5000);
      sum += use.bytes + alignment;
    }
    const Plan plan = plan_memory(uses, alignment);
    ASSERT_EQ(plan.offsets.size(), uses.size());
    EXPECT_GE(plan.bytes, peak(uses));
    EXPECT_LE(plan.bytes, sum);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      EXPECT_EQ(plan.offsets[i] % alignment, 0U);
      EXPECT_LE(plan.offsets[i] + uses[i].bytes, plan.bytes);
      for (std::size_t j = 0; j < i; ++j) {
        const bool apart = plan.offsets[i] + uses[i].bytes <= plan.offsets[j] ||
                           plan.offsets[j] + uses[j].bytes <= plan.offsets[i] || uses[i].bytes == 0 ||
                           uses[j].bytes == 0;
        EXPECT_TRUE(apart || !at_once(uses[i], uses[j])) << i << " and " << j;
      }
    }
  }
}

TEST(PlanMemory, UsesThatFollowOneAnotherShare) {
  const std::vector<Use> uses{{1024, 0, 1}, {1024, 2, 3}, {512, 4, 4}, {256, 0, 4}};
  const Plan plan = plan_memory(uses);
  EXPECT_EQ(plan.bytes, 1024U + 256U);
  EXPECT_EQ(plan.offsets[0], plan.offsets[1]);
}

TEST(PlanMemory, RefusesWhatMakesNoSense) {
  EXPECT_THROW(plan_memory(std::vector<Use>{{1, 2, 1}}), std::invalid_argument);
  EXPECT_THROW(plan_memory({}, 3), std::invalid_argument);
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  EXPECT_THROW(plan_memory(std::vector<Use>{{kMost, 0, 0}, {2, 0, 0}}), std::invalid_argument);
  EXPECT_THROW(plan_memory(std::vector<Use>{{kMost / 2 + 1, 0, 0}, {kMost / 2 + 1, 0, 0}}), std::invalid_argument);
  EXPECT_THROW(plan_memory(std::vector<Use>{{1, 0, 0}, {1, 0, 0}, {1, 0, 0}}, kMost / 2 + 1), std::invalid_argument);
  EXPECT_EQ(plan_memory({}).bytes, 0U);
}

}  // namespace
}  // namespace cudasched::graphs
