#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "telemetry/window.hpp"

namespace cudasched::telemetry {
namespace {

using ::testing::ElementsAre;

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr std::int64_t kFarNs = 1'000 * kSecondNs;

Pending launch(std::uint64_t number, std::uint64_t stream = 1, std::uint32_t grid = 8) {
  Pending made;
  made.row.launch = number;
  made.row.submitted_ns = static_cast<std::int64_t>(number) * 10'000'000;
  made.row.grid[0] = grid;
  made.stream = stream;
  return made;
}

cupti::DeviceRecord record(std::uint32_t correlation, std::uint64_t start, std::uint64_t end, std::uint32_t grid = 8,
                           std::uint32_t stream = 70) {
  cupti::DeviceRecord made;
  made.correlation = correlation;
  made.start = start;
  made.end = end;
  made.grid[0] = grid;
  made.stream = stream;
  return made;
}

std::vector<std::uint64_t> numbers(const std::vector<Pending>& taken) {
  std::vector<std::uint64_t> found;
  for (const Pending& pending : taken) found.push_back(pending.row.launch);
  return found;
}

TEST(Window, JoinsALaunchWithItsRecordWhicheverComesFirst) {
  // Launch, record and correlation, in every order.
  const std::vector<std::vector<int>> orders{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    Window window;
    for (const int step : order) {
      if (step == 0) window.add(launch(0));
      if (step == 1) window.observe(record(5, 100, 300), 1'000);
      if (step == 2) window.correlate({5, 0});
    }
    const auto taken = window.take(0, false);
    ASSERT_EQ(taken.size(), 1U);
    EXPECT_EQ(taken[0].row.start_ns, 1'100);
    EXPECT_EQ(taken[0].row.duration_ns, 200);
    EXPECT_EQ(window.counts().exact, 1U);
  }
}

TEST(Window, GivesLaunchesOutInTheirOrder) {
  Window window;
  window.add(launch(2));
  window.add(launch(0));
  for (std::uint32_t i = 0; i < 3; ++i) {
    window.correlate({i + 1, i});
    window.observe(record(i + 1, 100 + 10 * i, 105 + 10 * i), 0);
  }
  EXPECT_THAT(numbers(window.take(0, false)), ElementsAre()) << "1 may have run beside 0";
  window.add(launch(1));
  EXPECT_THAT(numbers(window.take(0, false)), ElementsAre(0, 1, 2));
}

TEST(Window, ALaunchThatFailedHasNoRow) {
  Window window;
  window.failed(0);
  window.add(launch(1));
  window.correlate({1, 1});
  window.observe(record(1, 100, 200), 0);
  EXPECT_THAT(numbers(window.take(0, false)), ElementsAre(1));
}

TEST(Window, ALaunchWaitsForAllThatMayHaveRunBesideIt) {
  Window window;
  window.add(launch(0));
  window.add(launch(1, 2));  // submitted at 10 ms
  window.correlate({1, 0});
  window.observe(record(1, 100, 50'000'000), 0);
  EXPECT_THAT(numbers(window.take(0, false)), ElementsAre());
  window.correlate({2, 1});
  window.observe(record(2, 20'000'000, 30'000'000), 0);
  const auto taken = window.take(0, false);
  ASSERT_THAT(numbers(taken), ElementsAre(0, 1));
  EXPECT_EQ(taken[0].row.overlapped, 1);
  EXPECT_EQ(taken[1].row.overlapped, 1);
}

TEST(Window, OneAfterTheOtherIsNoOverlap) {
  Window window;
  for (std::uint32_t i = 0; i < 4; ++i) {
    window.add(launch(i, i));
    window.correlate({i + 1, i});
    window.observe(record(i + 1, 100 * i, 100 * (i + 1)), 1);
  }
  for (const Pending& taken : window.take(0, true)) EXPECT_EQ(taken.row.overlapped, 0) << taken.row.launch;
}

// Overlap of each launch with any other, the plain way.
TEST(Window, OverlapsAreThoseOfAllPairs) {
  std::uint64_t seed = 7;
  const auto random = [&seed](std::uint64_t below) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (seed >> 33) % below;
  };
  for (int round = 0; round < 50; ++round) {
    Window window;
    struct Span {
      std::int64_t start;
      std::int64_t end;
      std::uint8_t device;
    };
    std::vector<Span> spans;
    std::vector<Pending> taken;
    for (std::uint32_t i = 0; i < 60; ++i) {
      Pending made = launch(i, i % 3);
      made.row.device = static_cast<std::uint8_t>(random(2));
      const std::int64_t start = made.row.submitted_ns + static_cast<std::int64_t>(1 + random(60'000'000));
      const std::int64_t end = start + static_cast<std::int64_t>(1 + random(20'000'000));
      spans.push_back({start, end, made.row.device});
      window.add(std::move(made));
      window.correlate({i + 1, i});
    }
    // Their records come in any order, and rows are taken on the way.
    std::vector<std::uint32_t> order(spans.size());
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random(i)]);
    for (const std::uint32_t i : order) {
      window.observe(
          record(i + 1, static_cast<std::uint64_t>(spans[i].start), static_cast<std::uint64_t>(spans[i].end)), 0);
      for (Pending& pending : window.take(0, false)) taken.push_back(std::move(pending));
    }
    for (Pending& pending : window.take(0, true)) taken.push_back(std::move(pending));
    ASSERT_EQ(taken.size(), spans.size());
    for (std::size_t i = 0; i < spans.size(); ++i) {
      bool overlapped = false;
      for (std::size_t j = 0; j < spans.size(); ++j) {
        overlapped = overlapped || (j != i && spans[i].device == spans[j].device && spans[i].start < spans[j].end &&
                                    spans[j].start < spans[i].end);
      }
      EXPECT_EQ(taken[i].row.overlapped != 0, overlapped) << "round " << round << ", launch " << i;
    }
  }
}

TEST(Window, ARecordOfAnotherShapeGivesNoTime) {
  Window window;
  window.add(launch(0));
  window.correlate({1, 0});
  window.observe(record(1, 100, 200, /*grid=*/9), 0);
  const auto taken = window.take(0, false);
  ASSERT_EQ(taken.size(), 1U);
  EXPECT_EQ(taken[0].row.duration_ns, -1);
  EXPECT_EQ(window.counts().mismatched, 1U);
}

TEST(Window, WithoutCorrelationsOrderAndStreamJoin) {
  Window window;
  window.add(launch(0, 1));
  window.add(launch(1, 2, 9));
  window.add(launch(2, 1));
  window.add(launch(3, 2));
  // The second stream's record of the same shape as the first's comes first.
  window.observe(record(14, 900, 950, 8, 72), 0);
  window.observe(record(12, 300, 400, 9, 72), 0);
  window.observe(record(11, 100, 200, 8, 71), 0);
  window.observe(record(13, 500, 700, 8, 71), 0);
  window.flushed(false);
  EXPECT_EQ(window.counts().by_order, 0U) << "a correlation may still come";
  window.flushed(true);
  const auto taken = window.take(0, false);
  ASSERT_THAT(numbers(taken), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(taken[0].row.duration_ns, 100);
  EXPECT_EQ(taken[1].row.start_ns, 300);
  EXPECT_EQ(taken[2].row.duration_ns, 200);
  EXPECT_EQ(taken[3].row.start_ns, 900);
  EXPECT_EQ(window.counts().by_order, 4U);
}

TEST(Window, WithCorrelationsARecordWithoutOneIsNotOurs) {
  Window window;
  window.add(launch(0));
  window.add(launch(1));
  window.correlate({1, 0});
  window.observe(record(1, 100, 200), 0);
  window.observe(record(2, 300, 400), 0);
  window.flushed(true);
  const auto taken = window.take(0, true);
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_EQ(taken[1].row.duration_ns, -1);
  EXPECT_EQ(window.counts().foreign, 1U);
}

TEST(Window, ALostRecordIsGivenUpOnceItsStreamHasGoneOn) {
  Window window;
  window.add(launch(0));
  window.add(launch(1));
  window.correlate({2, 1});
  window.observe(record(2, 100, 200), 0);
  EXPECT_THAT(numbers(window.take(kSecondNs, false)), ElementsAre());
  const auto taken = window.take(kFarNs, false);
  ASSERT_THAT(numbers(taken), ElementsAre(0, 1));
  EXPECT_EQ(taken[0].row.duration_ns, -1);
  EXPECT_EQ(taken[1].row.duration_ns, 100);
}

TEST(Window, HoldsNoMoreThanItMay) {
  Window window;
  std::size_t taken = 0;
  for (std::uint64_t i = 0; i < 2 * Window::kMostPending; ++i) {
    window.add(launch(i));
    if (i % 1024 == 0) {
      taken += window.take(0, false).size();
      EXPECT_LE(window.size(), Window::kMostPending + 1024);
    }
  }
  EXPECT_FALSE(window.add(launch(0))) << "it was given up";
  taken += window.take(0, true).size();
  EXPECT_EQ(taken, 2 * Window::kMostPending);
}

TEST(Window, KeepsNoRecordOfALaunchThatWasDropped) {
  Window window;
  for (std::uint32_t i = 0; i < 10; ++i) {
    if (i % 2 == 0) window.failed(i);
    window.correlate({i, i});
    window.observe(record(i, 100, 300), 0);
    window.failed(i);
  }
  EXPECT_TRUE(window.take(0, false).empty());
  EXPECT_EQ(window.size(), 0U);
}

TEST(Window, TakesTimesFromEvents) {
  Window window;
  for (std::uint64_t i = 0; i < 3; ++i) {
    Pending made = launch(i);
    made.events = &window;
    window.add(std::move(made));
  }
  std::vector<std::uint64_t> open;
  window.for_each_open([&](const Pending& pending) {
    open.push_back(pending.row.launch);
    return open.size() < 2;
  });
  EXPECT_THAT(open, ElementsAre(0, 1));
  window.timed(0, 100, 50);
  window.timed(1, 0, -1);
  const auto taken = window.take(0, false);
  ASSERT_THAT(numbers(taken), ElementsAre(0, 1));
  EXPECT_EQ(taken[0].row.duration_ns, 50);
  EXPECT_EQ(taken[1].row.duration_ns, -1);
}

}  // namespace
}  // namespace cudasched::telemetry
