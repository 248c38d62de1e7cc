#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "schedule/in_flight.hpp"

namespace cudasched::schedule {
namespace {

TEST(InFlight, ShrinksWithTheClock) {
  InFlight in_flight;
  in_flight.submit(1, 100'000, 1'000);
  EXPECT_EQ(in_flight.remaining_ns(1'000), 100'000);
  EXPECT_EQ(in_flight.remaining_ns(41'000), 60'000);
  EXPECT_EQ(in_flight.remaining_ns(101'000), 0);
  EXPECT_EQ(in_flight.remaining_ns(500'000), 0);
}

TEST(InFlight, WaitingLaunchesDoNotShrinkWhileTheFirstIsLate) {
  InFlight in_flight;
  const int first = in_flight.submit(1, 10'000, 0);
  in_flight.submit(1, 50'000, 0);
  EXPECT_EQ(in_flight.remaining_ns(30'000), 50'000);
  in_flight.complete(first, 30'000, 30'000);
  EXPECT_EQ(in_flight.remaining_ns(30'000), 50'000);
  EXPECT_EQ(in_flight.remaining_ns(50'000), 30'000);
}

TEST(InFlight, AStragglerCountsForNothing) {
  InFlight in_flight;
  in_flight.submit(1, 10'000, 0);
  in_flight.submit(1, 500'000, 0);
  EXPECT_EQ(in_flight.remaining_ns(InFlight::kStragglerNs), 500'000);
  EXPECT_EQ(in_flight.remaining_ns(InFlight::kStragglerNs + 10'001), 0);
}

TEST(InFlight, WhatTheGpuDidForOthersIsNotHeldAgainstALaunch) {
  InFlight in_flight;
  in_flight.submit(1, 10'000, 0);
  in_flight.submit(1, 500'000, 0);
  in_flight.restart(5'000'000);
  EXPECT_EQ(in_flight.remaining_ns(5'000'000), 510'000);
  EXPECT_EQ(in_flight.remaining_ns(5'004'000), 506'000);
}

TEST(InFlight, CompletingALaterLaunchCompletesTheEarlierOnes) {
  InFlight in_flight;
  in_flight.submit(1, 10'000, 0);
  const int second = in_flight.submit(1, 10'000, 0);
  in_flight.submit(2, 7'000, 0);
  in_flight.complete(second, 5'000, 5'000);
  EXPECT_EQ(in_flight.count(), 1);
  EXPECT_EQ(in_flight.remaining_ns(5'000), 2'000);
}

TEST(InFlight, ALateLookDoesNotGiveTheNextLaunchItsWholeTimeAnew) {
  InFlight in_flight;
  const int first = in_flight.submit(1, 100'000, 0);
  const int second = in_flight.submit(1, 500'000, 90'000);
  const int third = in_flight.submit(1, 50'000, 90'000);
  InFlight late = in_flight;
  // It ended when it was predicted to, or that is as good a guess as any.
  in_flight.complete(first, 90'000, 400'000);
  EXPECT_EQ(in_flight.remaining_ns(400'000), 250'000);
  // It was seen running beyond that.
  late.complete(first, 130'000, 400'000);
  EXPECT_EQ(late.remaining_ns(400'000), 280'000);
  // It was predicted to run still.
  InFlight early = late;
  early.complete(second, 400'000, 450'000);
  EXPECT_EQ(early.remaining_ns(450'000), 50'000);
  // Several at once, each where the one before it ended.
  late.complete(third, 400'000, 2'000'000);
  EXPECT_EQ(late.count(), 0);
  const int fourth = late.submit(1, 10'000, 2'000'000);
  late.complete(fourth, 0, 2'000'000);  // looked at before it was there
  EXPECT_EQ(late.count(), 0);
}

TEST(InFlight, KnowsItsNextEnd) {
  InFlight in_flight;
  EXPECT_EQ(in_flight.next_end_ns(0), InFlight::kNothingNs);
  in_flight.submit(1, 500'000, 0);
  in_flight.submit(1, 10'000, 0);
  EXPECT_EQ(in_flight.next_end_ns(0), 500'000);
  in_flight.submit(2, 300'000, 0);
  EXPECT_EQ(in_flight.next_end_ns(100'000), 200'000);
  EXPECT_EQ(in_flight.next_end_ns(400'000), 0);
  // A straggler's end is nobody's to wait for.
  EXPECT_EQ(in_flight.next_end_ns(300'001 + InFlight::kStragglerNs), 0);
  EXPECT_EQ(in_flight.next_end_ns(500'001 + InFlight::kStragglerNs), InFlight::kNothingNs);
}

TEST(InFlight, SleepsOverNeitherTheEndOfAWaitNorThatOfALaunch) {
  EXPECT_EQ(sleep_ns(399'999, InFlight::kNothingNs), 0);
  EXPECT_EQ(sleep_ns(700'000, InFlight::kNothingNs), 500'000);
  EXPECT_EQ(sleep_ns(700'000, 600'000), 400'000);
  EXPECT_EQ(sleep_ns(700'000, 0), 0);
  EXPECT_EQ(sleep_ns(5'000'000, InFlight::kNothingNs), 1'000'000);
}

// A gate that feeds long kernels, sleeps where it may and wakes late. However wrong predictions are, by a constant too,
// it submits each launch while the one before it runs, and not long before that one ends.
TEST(InFlight, LongKernelsAreFedInTimeWhateverPredictionsAreWrongBy) {
  constexpr std::int64_t kKernelNs = 1'600'000;
  constexpr std::int64_t kLeadNs = 20'000;
  constexpr std::int64_t kLateNs = 100'000;  // a sleeper wakes
  constexpr std::int64_t kPollNs = 4'000;
  for (const std::int64_t wrong_ns : {-150'000, -20'000, 0, 20'000, 150'000}) {
    InFlight in_flight;
    std::deque<std::pair<int, std::int64_t>> running;  // and when each ends
    std::int64_t now = 0;
    std::int64_t looked = 0;
    for (int launch = 0; launch < 1'000; ++launch) {
      while (true) {
        while (!running.empty() && running.front().second <= now) {
          in_flight.complete(running.front().first, looked, now);
          running.pop_front();
        }
        looked = now;
        const std::int64_t wait = in_flight.remaining_ns(now) - kLeadNs;
        if (wait <= 0) break;
        const std::int64_t asleep = sleep_ns(wait, in_flight.next_end_ns(now));
        now += asleep > 0 ? asleep + kLateNs : std::min(wait, kPollNs);
      }
      if (launch > 0) {
        ASSERT_LE(running.size(), 1U) << wrong_ns << " " << launch;
        const std::int64_t left = running.empty() ? 0 : running.front().second - now;
        ASSERT_LE(left, kLeadNs + kPollNs - std::min<std::int64_t>(wrong_ns, 0)) << launch;
        if (wrong_ns <= 0) {
          ASSERT_FALSE(running.empty()) << launch;
        }
      }
      const std::int64_t start = running.empty() ? now : running.back().second;
      running.emplace_back(in_flight.submit(1, kKernelNs + wrong_ns, now), start + kKernelNs);
      now += kPollNs;
    }
  }
}

TEST(InFlight, RefusesWhatItHasNoRoomForAndRecovers) {
  InFlight in_flight;
  for (int i = 0; i < InFlight::kEntries; ++i) ASSERT_NE(in_flight.submit(1, 1'000, 0), InFlight::kNone);
  EXPECT_EQ(in_flight.submit(1, 1'000, 0), InFlight::kNone);
  in_flight.clear();
  for (int i = 0; i < InFlight::kStreams; ++i) {
    ASSERT_NE(in_flight.submit(static_cast<std::uint64_t>(i), 1'000, 0), InFlight::kNone);
  }
  EXPECT_EQ(in_flight.submit(99, 1'000, 0), InFlight::kNone);
  EXPECT_NE(in_flight.submit(3, 1'000, 0), InFlight::kNone);
}

TEST(InFlight, NonsenseEntriesAreIgnored) {
  InFlight in_flight;
  in_flight.complete(-1, 0, 0);
  in_flight.complete(5, 0, 0);
  in_flight.complete(InFlight::kEntries, 0, 0);
  in_flight.withdraw(5, 0);
  EXPECT_EQ(in_flight.submit(1, -7, 0), 0);
  EXPECT_EQ(in_flight.remaining_ns(0), 0);
}

// Against a plain model: random submits, completions, withdrawals and looks on several streams.
TEST(InFlight, AgreesWithAPlainModel) {
  struct Launch {
    int entry;
    std::int64_t predicted_ns;
  };
  struct Model {
    std::deque<Launch> queue;
    std::int64_t started_ns = 0;
  };
  std::mt19937_64 random(7);
  InFlight in_flight;
  std::map<std::uint64_t, Model> streams;
  std::int64_t now = 0;
  int held = 0;
  for (int step = 0; step < 1'000'000; ++step) {
    now += static_cast<std::int64_t>(random() % 20'000);
    const std::uint64_t id = random() % 6 + 1;
    Model& model = streams[id];
    switch (random() % 5) {
      case 0:
      case 1: {
        const auto predicted = static_cast<std::int64_t>(random() % 100'000);
        const int entry = in_flight.submit(id, predicted, now);
        ASSERT_EQ(entry == InFlight::kNone, held == InFlight::kEntries);
        if (entry == InFlight::kNone) break;
        if (model.queue.empty()) model.started_ns = now;
        model.queue.push_back({entry, predicted});
        ++held;
        break;
      }
      case 2: {
        if (model.queue.empty()) break;
        const std::size_t which = random() % model.queue.size();
        in_flight.complete(model.queue[which].entry, now, now);
        held -= static_cast<int>(which) + 1;
        model.queue.erase(model.queue.begin(), model.queue.begin() + static_cast<std::ptrdiff_t>(which) + 1);
        model.started_ns = now;
        break;
      }
      case 3: {
        if (model.queue.empty() || random() % 4 != 0) break;
        const std::size_t which = random() % model.queue.size();
        in_flight.withdraw(model.queue[which].entry, now);
        model.queue.erase(model.queue.begin() + static_cast<std::ptrdiff_t>(which));
        if (which == 0) model.started_ns = now;
        --held;
        break;
      }
      default: {
        std::vector<int> visited;
        in_flight.for_each([&](int entry) {
          visited.push_back(entry);
          return true;
        });
        ASSERT_EQ(static_cast<int>(visited.size()), held);
      }
    }
    std::int64_t expected = 0;
    for (const auto& [_, stream] : streams) {
      if (stream.queue.empty()) continue;
      const std::int64_t ran = now - stream.started_ns;
      if (ran > stream.queue.front().predicted_ns + InFlight::kStragglerNs) continue;
      expected += std::max<std::int64_t>(0, stream.queue.front().predicted_ns - ran);
      for (std::size_t i = 1; i < stream.queue.size(); ++i) expected += stream.queue[i].predicted_ns;
    }
    ASSERT_EQ(in_flight.remaining_ns(now), expected) << "step " << step;
    ASSERT_EQ(in_flight.count(), held);
  }
}

// What is behind a long launch does not all go because its prediction was wrong by a tenth.
TEST(InFlight, ALongLaunchMayBeLateByAQuarter) {
  InFlight in_flight;
  in_flight.submit(1, 20 * InFlight::kStragglerNs, 0);
  in_flight.submit(1, 10'000, 0);
  EXPECT_EQ(in_flight.remaining_ns(25 * InFlight::kStragglerNs), 10'000);
  EXPECT_EQ(in_flight.remaining_ns(25 * InFlight::kStragglerNs + 1), 0);
}

// Requests so dense that the GPU is never free for long must not hold back for ever what a straggler waits for.
TEST(InFlight, AStragglerIsKnownWhereTheClocksStartAnewAgainAndAgain) {
  InFlight in_flight;
  const int collective = in_flight.submit(1, 50'000, 0);
  in_flight.submit(1, 200'000, 0);
  std::int64_t now = 0;
  for (int request = 1; request < InFlight::kMostRestarts; ++request) {
    in_flight.restart(now += 500'000);
    ASSERT_GT(in_flight.remaining_ns(now), 0) << request;
  }
  in_flight.restart(now += 500'000);
  EXPECT_EQ(in_flight.remaining_ns(now), 0);
  EXPECT_EQ(in_flight.next_end_ns(now), InFlight::kNothingNs);
  // What is behind it is not one for that.
  in_flight.complete(collective, now, now);
  EXPECT_EQ(in_flight.remaining_ns(now), 200'000);
}

// The promise of docs/order.md: nothing holds the next launch longer than the predicted time in flight plus 1 ms.
TEST(InFlight, NoLaunchIsHeldLongerThanPredictedPlusAMillisecond) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 20'000; ++round) {
    InFlight in_flight;
    std::int64_t predicted_total = 0;
    const int launches = static_cast<int>(random() % 20) + 1;
    for (int i = 0; i < launches; ++i) {
      const auto predicted = static_cast<std::int64_t>(random() % 300'000);
      if (in_flight.submit(random() % 3, predicted, 0) != InFlight::kNone) predicted_total += predicted;
    }
    // Nothing ever completes.
    ASSERT_EQ(in_flight.remaining_ns(predicted_total + InFlight::kStragglerNs + 1), 0);
  }
}

}  // namespace
}  // namespace cudasched::schedule
