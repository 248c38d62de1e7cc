#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "schedule/deadline.hpp"

namespace cudasched::schedule {
namespace {

Decision enter(const Entrant& self, const std::vector<Entrant>& others, std::int64_t waited_ns = 0) {
  EntryView view;
  view.self = self;
  view.others = others;
  view.waited_ns = waited_ns;
  return earliest_deadline_first(view);
}

TEST(EarliestDeadlineFirst, PriorityThenDeadlineThenSlot) {
  EXPECT_TRUE(more_urgent({0, 0, 100}, {1, 0, 200}));
  EXPECT_TRUE(more_urgent({1, 1, 200}, {0, 0, 100}));
  EXPECT_TRUE(more_urgent({1, 0, 200}, {0, 0, 0}));
  EXPECT_TRUE(more_urgent({0, 0, 200}, {1, 0, 200}));
  EXPECT_FALSE(more_urgent({0, 0, 0}, {0, 0, 0}));
}

TEST(EarliestDeadlineFirst, WaitsForABoundedTime) {
  const std::vector<Entrant> others{{1, 0, 100}};
  EXPECT_EQ(enter({0, 0, 200}, others).answer, Answer::kWaitForLatency);
  EXPECT_EQ(enter({0, 0, 200}, others, EntryView::kMaxWaitNs - 1).answer, Answer::kWaitForLatency);
  EXPECT_EQ(enter({0, 0, 200}, others, EntryView::kMaxWaitNs).answer, Answer::kSubmit);
  EXPECT_EQ(enter({0, 0, 50}, others).answer, Answer::kSubmit);
  EXPECT_EQ(enter({0, 0, 200}, {}).answer, Answer::kSubmit);
}

// Clients that all wait to enter: exactly one may at any time, and they enter in the order of urgency.
TEST(EarliestDeadlineFirst, TheyEnterOneByOneInOrder) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<Entrant> there(random() % 8 + 1);
    for (std::size_t i = 0; i < there.size(); ++i) {
      there[i] = {static_cast<int>(i), static_cast<std::int32_t>(random() % 3),
                  static_cast<std::int64_t>(random() % 5) * 1'000};
    }
    std::shuffle(there.begin(), there.end(), random);
    std::vector<Entrant> entered;
    while (!there.empty()) {
      std::vector<std::size_t> may;
      for (std::size_t i = 0; i < there.size(); ++i) {
        std::vector<Entrant> others = there;
        others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
        if (enter(there[i], others).answer == Answer::kSubmit) may.push_back(i);
      }
      ASSERT_EQ(may.size(), 1U);
      entered.push_back(there[may[0]]);
      there.erase(there.begin() + static_cast<std::ptrdiff_t>(may[0]));
    }
    ASSERT_TRUE(std::is_sorted(entered.begin(), entered.end(), more_urgent));
  }
}

}  // namespace
}  // namespace cudasched::schedule
