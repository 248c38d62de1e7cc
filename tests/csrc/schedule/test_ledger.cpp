#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "schedule/admission.hpp"
#include "schedule/estimates.hpp"
#include "schedule/hold_limit.hpp"
#include "schedule/ledger.hpp"
#include "schedule/sleep_plan.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kUs = 1'000;
constexpr std::int64_t kMs = 1'000'000;

// At the time 1, with the GPU for itself.
Ledger begun() {
  Ledger ledger;
  ledger.look(1, true);
  return ledger;
}

// A launch with a marker, recorded at once.
int launch(Ledger& ledger, std::uint64_t stream, std::int64_t predicted_ns) {
  const Ledger::Entry entry = ledger.submit(stream, predicted_ns, true);
  EXPECT_TRUE(entry.marks);
  ledger.submitted(entry.segment, true);
  return entry.segment;
}

TEST(Ledger, ShrinksWithTheClock) {
  Ledger ledger;
  ledger.look(1 * kUs, true);
  launch(ledger, 1, 100 * kUs);
  EXPECT_EQ(ledger.remaining_ns(), 100 * kUs);
  ledger.look(41 * kUs, true);
  EXPECT_EQ(ledger.remaining_ns(), 60 * kUs);
  ledger.look(101 * kUs, true);
  EXPECT_EQ(ledger.remaining_ns(), 0);
  EXPECT_FALSE(ledger.any_late());
}

TEST(Ledger, WaitingLaunchesDoNotShrinkWhileTheFirstIsLate) {
  Ledger ledger = begun();
  const int first = launch(ledger, 1, 10 * kUs);
  launch(ledger, 1, 50 * kUs);
  ledger.look(30 * kUs + 1, true);
  EXPECT_EQ(ledger.remaining_ns(1), 50 * kUs);
  ledger.look(30 * kUs + 1, true);
  ledger.complete(first);
  EXPECT_EQ(ledger.remaining_ns(1), 50 * kUs);
  ledger.look(50 * kUs + 1, true);
  EXPECT_EQ(ledger.remaining_ns(1), 30 * kUs);
}

// What is behind a kernel that was predicted far too short stays counted, and it is taken to run for as long again.
TEST(Ledger, WhatIsBehindALateSegmentOnItsStreamStaysCounted) {
  Ledger ledger = begun();
  launch(ledger, 1, 60 * kUs);
  launch(ledger, 1, 500 * kUs);
  for (std::int64_t now = 1; now < 20 * kMs; now += 100 * kUs) ledger.look(now, true);
  EXPECT_GT(ledger.remaining_ns(1), 19 * kMs);
  EXPECT_GT(ledger.late_ns(1), 19 * kMs);
  EXPECT_TRUE(ledger.any_late());
  // To launches of other streams, which may be what it waits for, it counts for nothing.
  EXPECT_EQ(ledger.remaining_ns(2), 0);
  EXPECT_EQ(ledger.late_ns(2), 0);
}

TEST(Ledger, ALittleLateIsNotLate) {
  Ledger ledger = begun();
  const int segment = launch(ledger, 1, 20 * kMs);
  for (std::int64_t now = 1; now <= 24 * kMs; now += kMs) ledger.look(now, true);
  EXPECT_EQ(ledger.segment_late_ns(segment), 0);
  EXPECT_EQ(ledger.remaining_ns(1), 0);
  for (std::int64_t now = 24 * kMs; now <= 26 * kMs; now += kMs) ledger.look(now, true);
  EXPECT_GT(ledger.segment_late_ns(segment), 5 * kMs);
}

TEST(Ledger, TimeInWhichTheGpuIsAnothersDoesNotCount) {
  Ledger ledger = begun();
  launch(ledger, 1, 100 * kUs);
  ledger.look(20 * kUs + 1, true);
  ledger.look(5 * kMs, false);  // latency work, or another client's turn
  EXPECT_EQ(ledger.remaining_ns(1), 80 * kUs);
  EXPECT_EQ(ledger.late_ns(1), 0);
  ledger.look(5 * kMs + 80 * kUs, true);
  EXPECT_EQ(ledger.remaining_ns(1), 0);
}

// What a launch let in beside latency work has had of the GPU is not known, and not held against it.
TEST(Ledger, TheClockStartsAnewAfterLatencyWorkThatLetLaunchesIn) {
  Ledger ledger = begun();
  launch(ledger, 1, 400 * kUs);
  for (std::int64_t now = 1; now <= 300 * kUs + 1; now += 100 * kUs) ledger.look(now, Ledger::Gpu::kShared);
  EXPECT_EQ(ledger.remaining_ns(1), 100 * kUs);
  EXPECT_EQ(ledger.observed_ns(), 0);
  ledger.look(300 * kUs + 1, Ledger::Gpu::kOwn);
  EXPECT_EQ(ledger.remaining_ns(1), 400 * kUs);
  EXPECT_EQ(ledger.late_ns(1), 0);
}

// A launcher that lost its core looks late; how long a kernel ran it cannot say.
TEST(Ledger, AGapBetweenTwoLooksIsNotObservedTime) {
  Ledger ledger = begun();
  launch(ledger, 1, 100 * kUs);
  launch(ledger, 1, 50 * kUs);
  ledger.look(60 * kMs, true);
  EXPECT_LE(ledger.observed_ns(), Ledger::kMostGapNs);
  EXPECT_LE(ledger.late_ns(1), Ledger::kMostGapNs);
  EXPECT_LE(ledger.remaining_ns(1), Ledger::kMostGapNs + 50 * kUs);
}

TEST(Ledger, TimeInWhichOtherStreamsCompletedWorkDoesNotMakeASegmentLate) {
  Ledger ledger = begun();
  const int waits = launch(ledger, 1, 50 * kUs);
  std::int64_t now = 1;
  for (int i = 0; i < 100; ++i) {
    const int other = launch(ledger, 2, 200 * kUs);
    for (int look = 0; look < 4; ++look) ledger.look(now += 50 * kUs, true);
    ledger.complete(other);
    ASSERT_EQ(ledger.segment_late_ns(waits), 0) << i;
  }
  for (int look = 0; look < 20; ++look) ledger.look(now += 50 * kUs, true);
  EXPECT_GT(ledger.segment_late_ns(waits), 0);
}

TEST(Ledger, CompletingALaterSegmentCompletesTheEarlierOnes) {
  Ledger ledger = begun();
  launch(ledger, 1, 10 * kUs);
  const int second = launch(ledger, 1, 10 * kUs);
  launch(ledger, 2, 7 * kUs);
  ledger.look(5 * kUs, true);
  ledger.complete(second);
  EXPECT_EQ(ledger.launches(), 1U);
}

TEST(Ledger, ALateLookDoesNotGiveTheNextLaunchItsWholeTimeAnew) {
  Ledger ledger = begun();
  const int first = launch(ledger, 1, 100 * kUs);
  ledger.look(90 * kUs + 1, true);
  launch(ledger, 1, 500 * kUs);
  launch(ledger, 1, 50 * kUs);
  Ledger late = ledger;
  // It ended when it was predicted to, or that is as good a guess as any.
  ledger.look(400 * kUs + 1, true);
  const Ledger::Completed took = ledger.complete(first);
  EXPECT_EQ(ledger.remaining_ns(1), 250 * kUs);
  EXPECT_EQ(took.least_ns, 90 * kUs);
  EXPECT_EQ(took.most_ns, 400 * kUs);
  // It was seen running beyond that.
  late.look(130 * kUs + 1, true);
  late.look(400 * kUs + 1, true);
  late.complete(first);
  EXPECT_EQ(late.remaining_ns(1), 280 * kUs);
}

TEST(Ledger, KnowsItsNextEnd) {
  Ledger ledger;
  EXPECT_EQ(ledger.next_end_ns(), Ledger::kNothingNs);
  ledger.look(1, true);
  launch(ledger, 1, 500 * kUs);
  launch(ledger, 1, 10 * kUs);
  EXPECT_EQ(ledger.next_end_ns(), 500 * kUs);
  launch(ledger, 2, 300 * kUs);
  ledger.look(100 * kUs + 1, true);
  EXPECT_EQ(ledger.next_end_ns(), 200 * kUs);
  ledger.look(400 * kUs + 1, true);
  EXPECT_EQ(ledger.next_end_ns(), 0);
}

TEST(Ledger, WithoutAMarkerForEachLaunchOneIsWantedSeldom) {
  Ledger ledger = begun();
  for (std::uint32_t i = 1; i < 10 * Ledger::kSeldom; ++i) {
    const Ledger::Entry entry = ledger.submit(1, 5 * kUs, false);
    ASSERT_EQ(entry.marks, i % Ledger::kSeldom == 0) << i;
    if (entry.marks) ledger.submitted(entry.segment, true);
  }
  EXPECT_EQ(ledger.launches(), 10 * Ledger::kSeldom - 1);
  EXPECT_EQ(ledger.segments(), 10);
  // The last launches have none: the next one's speaks for them, else their time ends them.
  EXPECT_TRUE(ledger.submit(2, Ledger::kLongSegmentNs, false).marks);
}

TEST(Ledger, AMarkerThatCouldNotBeRecordedIsMadeUpForByTheNext) {
  Ledger ledger = begun();
  const Ledger::Entry first = ledger.submit(1, 10 * kUs, true);
  ledger.submitted(first.segment, false);
  EXPECT_EQ(ledger.state(first.segment), Ledger::State::kOpen);
  EXPECT_FALSE(ledger.has_run_out(first.segment));
  const Ledger::Entry second = ledger.submit(1, 10 * kUs, true);
  EXPECT_EQ(second.segment, first.segment);
  ledger.submitted(second.segment, true);
  EXPECT_EQ(ledger.state(second.segment), Ledger::State::kMarked);
  EXPECT_EQ(ledger.launches(), 2U);
}

TEST(Ledger, ALaunchThatWasRefusedIsNotInFlight) {
  Ledger ledger = begun();
  launch(ledger, 1, 10 * kUs);
  const Ledger::Entry refused = ledger.submit(1, 40 * kUs, true);
  EXPECT_EQ(ledger.state(refused.segment), Ledger::State::kPending);
  ledger.withdraw(refused.segment, 40 * kUs);
  EXPECT_EQ(ledger.remaining_ns(), 10 * kUs);
  EXPECT_EQ(ledger.launches(), 1U);
  // Nonsense changes nothing.
  ledger.withdraw(refused.segment, 40 * kUs);
  ledger.withdraw(-1, 0);
  ledger.submitted(Ledger::kMarkers, true);
  ledger.complete(-1);
  ledger.complete(refused.segment);
  EXPECT_EQ(ledger.launches(), 1U);
}

// More launches are in flight than there are markers, and each that ends is followed by another one.
TEST(Ledger, TheFirstSegmentOfADeepQueueIsSeenComplete) {
  constexpr int kDeep = 8 * Ledger::kMarkers;
  Ledger ledger;
  std::array<int, Ledger::kMarkers> marked{};  // the launch behind which the marker is
  for (int launch = 0; launch < 100 * kDeep; ++launch) {
    ledger.look(1 + launch * kUs, true);
    const Ledger::Entry entry = ledger.submit(1, 1000 * kUs, /*mark=*/true);
    ASSERT_GE(entry.segment, 0);
    marked.at(static_cast<std::size_t>(entry.segment)) = launch;
    ledger.submitted(entry.segment, true);
    ledger.for_each([&](int segment) {
      if (marked.at(static_cast<std::size_t>(segment)) > launch - kDeep) return false;
      ledger.complete(segment);
      return true;
    });
    ASSERT_LE(ledger.launches(), 2U * kDeep) << launch;
  }
}

// Any depth, on any number of streams, with whatever is being timed or on its way: every launch is counted, and what is
// complete is.
TEST(Ledger, AnyDepthOnAnyNumberOfStreamsIsCounted) {
  std::mt19937_64 random(9);
  for (const std::uint64_t streams : {1, 2, 7, 63, 64, 100, 500}) {
    Ledger ledger = begun();
    std::int64_t submitted_ns = 0;
    std::uint64_t submitted = 0;
    std::vector<int> pinned;
    for (int i = 0; i < 20'000; ++i) {
      const auto predicted = static_cast<std::int64_t>(random() % (50 * kUs));
      const Ledger::Entry entry = ledger.submit(random() % streams + 1, predicted, random() % 2 == 0);
      ASSERT_GE(entry.segment, 0) << streams << " " << i;
      submitted_ns += predicted;
      ++submitted;
      if (entry.marks) ledger.submitted(entry.segment, true);
      if (entry.marks && pinned.size() < 16 && ledger.segment_launches(entry.segment) == 1) {
        ledger.pin(entry.segment, true);
        pinned.push_back(entry.segment);
      }
    }
    ASSERT_EQ(ledger.launches(), submitted);
    ASSERT_EQ(ledger.remaining_ns(), submitted_ns);
    ASSERT_LE(ledger.segments(), Ledger::kMarkers);
    ledger.for_each([&](int segment) {
      ledger.complete(segment);
      return true;
    });
    ASSERT_EQ(ledger.launches(), 0U);
    ASSERT_EQ(ledger.remaining_ns(), 0);
    ASSERT_EQ(ledger.segments(), 0);
  }
}

// More streams than have a queue of their own, but no more than there are markers.
TEST(Ledger, NoStreamsMarkerEndsWhatAnotherStreamHas) {
  constexpr std::uint64_t kStreams = 100;
  constexpr std::uint64_t kEach = 50;
  Ledger ledger = begun();
  std::map<int, std::uint64_t> whose;
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> order(kStreams);
  std::iota(order.begin(), order.end(), 1);
  for (std::uint64_t i = 0; i < kEach; ++i) {
    for (const std::uint64_t stream : order) whose[launch(ledger, stream, kUs)] = stream;
    std::shuffle(order.begin(), order.end(), random);
  }
  for (std::uint64_t ended = 1; ended <= kStreams; ++ended) {
    ledger.for_each([&](int segment) {
      if (whose[segment] == order[ended - 1]) ledger.complete(segment);
      return true;
    });
    ASSERT_EQ(ledger.launches(), kEach * (kStreams - ended)) << order[ended - 1];
  }
}

// Against a plain model that keeps every launch: random submissions, with and without markers, refusals, completions of
// what the GPU ran in order, and looks, on several streams.
TEST(Ledger, CountsWhatAPlainModelCounts) {
  struct Launch {
    std::int64_t predicted_ns;
    int segment;
    bool marks;
  };
  std::mt19937_64 random(7);
  Ledger ledger;
  std::map<std::uint64_t, std::deque<Launch>> model;
  std::map<int, std::uint64_t> behind;  // the number of the launch that a segment's marker is behind
  std::map<std::uint64_t, std::uint64_t> passed;
  std::map<std::uint64_t, std::uint64_t> numbers;
  std::int64_t now = 1;
  for (int step = 0; step < 300'000; ++step) {
    ledger.look(now += static_cast<std::int64_t>(random() % (20 * kUs)), random() % 8 != 0);
    const std::uint64_t id = random() % 6 + 1;
    auto& queue = model[id];
    switch (random() % 4) {
      case 0:
      case 1: {
        const auto predicted = static_cast<std::int64_t>(random() % (100 * kUs));
        const Ledger::Entry entry = ledger.submit(id, predicted, random() % 3 == 0);
        ASSERT_GE(entry.segment, 0);
        if (entry.marks && random() % 10 == 0) {
          ledger.withdraw(entry.segment, predicted);
          // What it had joined is as it was before, or open once more.
          break;
        }
        queue.push_back({predicted, entry.segment, entry.marks});
        const std::uint64_t number = numbers[id]++;
        if (entry.marks) {
          ledger.submitted(entry.segment, true);
          behind[entry.segment] = number;
        }
        break;
      }
      case 2: {  // the GPU runs the oldest ones, and the gate looks
        std::uint64_t ran = random() % 20;
        while (ran-- > 0 && !queue.empty()) {
          const Launch gone = queue.front();
          queue.pop_front();
          const std::uint64_t number = passed[id]++;
          const bool said = gone.marks && behind[gone.segment] == number &&
                            ledger.state(gone.segment) == Ledger::State::kMarked && ledger.stream(gone.segment) == id;
          if (said) ledger.complete(gone.segment);
        }
        break;
      }
      default:
        break;
    }
    std::uint64_t in_model = 0;
    for (const auto& [_, launches] : model) in_model += launches.size();
    // It may count launches that are complete and whose marker is not, never fewer than there are.
    ASSERT_GE(ledger.launches(), in_model) << step;
  }
  for (auto& [id, queue] : model) launch(ledger, id, 0);
  ledger.for_each([&](int segment) {
    ledger.complete(segment);
    return true;
  });
  EXPECT_EQ(ledger.launches(), 0U);
  EXPECT_EQ(ledger.submitted_ns(), 0);
}

// ---- limits of a hold ----------------------------------------------------------------------------------------------

TEST(HoldLimit, OneLaunchForEachTenMillisecondsWhereOthersAreQueuedBehindALateSegment) {
  HoldLimit limit;
  limit.begin(1 * kMs);
  int passed = 0;
  for (std::int64_t observed = 1 * kMs; observed <= 61 * kMs; observed += kMs) {
    if (limit.look({observed, 5, true, true, true}) == Exception::kWaitedFor) ++passed;
  }
  EXPECT_EQ(passed, 6);
}

TEST(HoldLimit, WhatIsNotLateOrHasNothingOfOthersBehindItWaits) {
  HoldLimit limit;
  limit.begin(0);
  for (std::int64_t observed = 0; observed < 99 * kMs; observed += kMs) {
    ASSERT_EQ(limit.look({observed, 5, true, true, false}), Exception::kNone) << observed;
    ASSERT_EQ(limit.look({observed, 5, true, false, true}), Exception::kNone) << observed;
  }
}

TEST(HoldLimit, ACompletionStartsTheTimeAnew) {
  HoldLimit limit;
  limit.begin(0);
  std::uint64_t completions = 0;
  for (std::int64_t observed = 0; observed < 1'000 * kMs; observed += kMs) {
    if (observed % (9 * kMs) == 0) ++completions;
    ASSERT_EQ(limit.look({observed, completions, true, true, true}), Exception::kNone) << observed;
  }
}

TEST(HoldLimit, TheBackstopLetsOneGoForEachTenMilliseconds) {
  HoldLimit limit;
  limit.begin(0);
  std::vector<std::int64_t> passed;
  for (std::int64_t observed = 0; observed < 150 * kMs; observed += kMs) {
    if (limit.look({observed, 5, true, false, false}) == Exception::kBackstop) passed.push_back(observed / kMs);
  }
  EXPECT_EQ(passed, (std::vector<std::int64_t>{100, 110, 120, 130, 140}));
  // Another launch is held from a later moment on.
  limit.begin(400 * kMs);
  EXPECT_EQ(limit.look({400 * kMs, 5, true, false, false}), Exception::kNone);
  EXPECT_EQ(limit.look({499 * kMs, 5, true, false, false}), Exception::kNone);
  EXPECT_EQ(limit.look({500 * kMs, 5, true, false, false}), Exception::kBackstop);
}

// A kernel that takes long and was predicted to is nothing to be wondered at.
TEST(HoldLimit, WhereNothingIsLateTheBackstopWaitsLonger) {
  HoldLimit limit;
  limit.begin(0);
  std::int64_t observed = 0;
  for (; observed < 1'000 * kMs; observed += kMs) {
    ASSERT_EQ(limit.look({observed, 5, false, false, false}), Exception::kNone) << observed;
  }
  EXPECT_EQ(limit.look({observed, 5, false, false, false}), Exception::kBackstop);
}

// ---- a GPU, a ledger and a gate ------------------------------------------------------------------------------------

// A GPU with streams in order, and a launcher that feeds it from one queue, as the gate does: looks every `look_ns`,
// submits the head where no more than the lead is in flight, or the hold limit says so.
class Machine {
 public:
  struct Kernel {
    std::uint64_t stream = 1;
    std::int64_t predicted_ns = 0;
    std::int64_t duration_ns = 0;
    int waits_for = -1;  // it does not end before this kernel has begun
  };

  std::int64_t look_ns = 50 * kUs;
  std::int64_t lead_ns = 20 * kUs;
  std::deque<Kernel> queue;
  std::int64_t stalls_at_ns = -1;  // the GPU, or the launcher, does nothing for stalls_for_ns
  std::int64_t stalls_for_ns = 0;
  bool launcher_stalls = false;

  // Runs for so long, or until everything is complete.
  void run(std::int64_t for_ns) {
    const std::int64_t end = now_ + for_ns;
    while (now_ < end && !(queue.empty() && running_ == 0)) {
      const bool stalls = stalls_at_ns >= 0 && now_ >= stalls_at_ns && now_ < stalls_at_ns + stalls_for_ns;
      if (!stalls || launcher_stalls) advance_gpu();
      if (!stalls || !launcher_stalls) look();
      now_ += look_ns;
    }
  }

  std::uint64_t most_on_gpu = 0;  // launches submitted and not complete
  std::uint64_t submitted = 0;
  std::uint64_t exceptions = 0;
  Ledger ledger;

 private:
  struct Submitted {
    Kernel kernel;
    int number;
    int segment;
    std::int64_t begun_ns = -1;
    std::int64_t ran_ns = 0;
  };

  // One stream's head at a time runs, those that wait for others beside it.
  void advance_gpu() {
    bool busy = false;
    for (auto& [stream, launches] : streams_) {
      if (launches.empty()) continue;
      Submitted& head = launches.front();
      const bool waits = head.kernel.waits_for >= 0;
      if (busy && !waits) continue;
      if (head.begun_ns < 0) {
        head.begun_ns = now_;
        begun_.push_back(head.number);
      }
      const bool may_end = !waits || std::find(begun_.begin(), begun_.end(), head.kernel.waits_for) != begun_.end();
      head.ran_ns += look_ns;
      busy = busy || !waits;
      if (head.ran_ns >= head.kernel.duration_ns && may_end) {
        complete_.push_back(head.segment);
        launches.pop_front();
        --running_;
      }
    }
  }

  void look() {
    ledger.look(now_, true);
    ledger.for_each([&](int segment) {
      const auto done = std::find(complete_.begin(), complete_.end(), segment);
      if (done == complete_.end()) return false;
      complete_.erase(done);
      ledger.complete(segment);
      return true;
    });
    bool first = true;
    while (!queue.empty()) {
      const Kernel& head = queue.front();
      if (ledger.remaining_ns(head.stream) > lead_ns) {
        if (first && !held_) limit_.begin(ledger.observed_ns());
        held_ = true;
        const bool others = std::any_of(queue.begin() + 1, queue.end(),
                                        [&](const Kernel& other) { return other.stream != head.stream; });
        const HoldLimit::View view{ledger.observed_ns(), ledger.completions(), ledger.any_late(),
                                   ledger.late_ns(head.stream) > 0, others};
        if (limit_.look(view) == Exception::kNone) return;
        ++exceptions;
      }
      held_ = false;
      first = false;
      streams_[head.stream].push_back(
          {head, static_cast<int>(submitted), launch(ledger, head.stream, head.predicted_ns)});
      ++submitted;
      most_on_gpu = std::max(most_on_gpu, ++running_);
      queue.pop_front();
    }
  }

  std::int64_t now_ = 1;
  HoldLimit limit_;
  bool held_ = false;
  std::map<std::uint64_t, std::deque<Submitted>> streams_;
  std::vector<int> begun_;
  std::vector<int> complete_;
  std::uint64_t running_ = 0;
};

// The four cases of launches in flight that are not as predicted.
TEST(InFlightCases, AKernelPredictedThreeHundredTimesTooShortLetsNoFloodPass) {
  Machine machine;
  machine.queue.push_back({1, 66 * kUs, 20 * kMs});
  for (int i = 0; i < 900; ++i) machine.queue.push_back({1, 66 * kUs, 66 * kUs});
  machine.run(18 * kMs);
  EXPECT_LE(machine.submitted, 4U);
  machine.run(1'000 * kMs);
  EXPECT_EQ(machine.submitted, 901U);
  EXPECT_LE(machine.most_on_gpu, 4U);
  EXPECT_EQ(machine.exceptions, 0U);
}

TEST(InFlightCases, ManyOfThemNeither) {
  Machine machine;
  for (int i = 0; i < 20; ++i) machine.queue.push_back({1, 66 * kUs, 20 * kMs});
  machine.run(1'000 * kMs);
  EXPECT_EQ(machine.submitted, 20U);
  EXPECT_LE(machine.most_on_gpu, 4U);
}

// A collective on one stream waits for a kernel that is queued behind many of its own stream's.
TEST(InFlightCases, ACollectiveGetsWhatItWaitsFor) {
  Machine machine;
  constexpr int kBetween = 20;
  machine.queue.push_back({1, 100 * kUs, 100 * kUs, kBetween + 1});
  for (int i = 0; i < kBetween; ++i) machine.queue.push_back({1, 300 * kUs, 300 * kUs});
  machine.queue.push_back({2, 100 * kUs, 100 * kUs});
  machine.run(10'000 * kMs);
  EXPECT_EQ(machine.submitted, kBetween + 2U);
  EXPECT_TRUE(machine.queue.empty());
  EXPECT_GE(machine.exceptions, static_cast<std::uint64_t>(kBetween) - 4);
}

// Work of another stream goes on at its pace while a collective waits, without an exception.
TEST(InFlightCases, OtherStreamsGoOnWhileACollectiveWaits) {
  Machine machine;
  constexpr int kBetween = 200;
  machine.queue.push_back({1, 100 * kUs, 100 * kUs, kBetween + 1});
  for (int i = 0; i <= kBetween; ++i) machine.queue.push_back({2, 100 * kUs, 100 * kUs});
  machine.run(40 * kMs);
  EXPECT_EQ(machine.submitted, kBetween + 2U);
  EXPECT_EQ(machine.exceptions, 0U);
  EXPECT_LE(machine.most_on_gpu, 4U);
}

// What it waits for is not of this process: nothing of this stream goes meanwhile but by the backstop.
TEST(InFlightCases, WhatWaitsForAnotherProcessHoldsItsOwnStream) {
  Machine machine;
  machine.queue.push_back({1, 100 * kUs, 90 * kMs});
  for (int i = 0; i < 100; ++i) machine.queue.push_back({1, 100 * kUs, 100 * kUs});
  machine.run(85 * kMs);
  EXPECT_LE(machine.submitted, 3U);
  EXPECT_EQ(machine.exceptions, 0U);
}

TEST(InFlightCases, ADeviceThatLostItsCoreLetsNoFloodPass) {
  Machine machine;
  for (int i = 0; i < 2'000; ++i) machine.queue.push_back({1, 100 * kUs, 100 * kUs});
  machine.stalls_at_ns = 5 * kMs;
  machine.stalls_for_ns = 60 * kMs;
  machine.run(1'000 * kMs);
  EXPECT_EQ(machine.submitted, 2'000U);
  EXPECT_LE(machine.most_on_gpu, 4U);
}

TEST(InFlightCases, ALauncherThatLostItsCoreNeither) {
  Machine machine;
  for (int i = 0; i < 2'000; ++i) machine.queue.push_back({1, 100 * kUs, 100 * kUs});
  machine.stalls_at_ns = 5 * kMs;
  machine.stalls_for_ns = 60 * kMs;
  machine.launcher_stalls = true;
  machine.run(1'000 * kMs);
  EXPECT_EQ(machine.submitted, 2'000U);
  EXPECT_LE(machine.most_on_gpu, 4U);
  EXPECT_EQ(machine.exceptions, 0U);
}

// Whatever waits for whatever of another stream behind it, everything runs in the end.
TEST(InFlightCases, NothingWaitsForEver) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 60; ++round) {
    Machine machine;
    const int count = static_cast<int>(random() % 30) + 5;
    for (int i = 0; i < count; ++i) {
      Machine::Kernel kernel;
      kernel.stream = random() % 3 + 1;
      kernel.duration_ns = static_cast<std::int64_t>(random() % (2 * kMs)) + 1;
      kernel.predicted_ns = random() % 3 == 0 ? kernel.duration_ns / 100 : kernel.duration_ns;
      machine.queue.push_back(kernel);
    }
    for (int i = 0; i < count; ++i) {
      const int other = i + static_cast<int>(random() % 10);
      // On a GPU alone it would end: nothing on its own stream is waited for.
      if (random() % 4 != 0 || other >= count) continue;
      const auto& waits = machine.queue[static_cast<std::size_t>(i)];
      const auto& for_it = machine.queue[static_cast<std::size_t>(other)];
      if (waits.stream < for_it.stream) machine.queue[static_cast<std::size_t>(i)].waits_for = other;
    }
    machine.run(60'000 * kMs);
    ASSERT_TRUE(machine.queue.empty()) << round;
  }
}

// ---- sleeping ------------------------------------------------------------------------------------------------------

TEST(SleepPlan, WakesBeforeTheEndOfAWaitAndSoonAfterThatOfALaunch) {
  SleepPlan plan;
  const std::int64_t ahead = plan.lateness_ns() + SleepPlan::kAwakeNs;
  EXPECT_EQ(plan.sleep_ns(500 * kUs, Ledger::kNothingNs, 0), 500 * kUs - ahead);
  EXPECT_EQ(plan.sleep_ns(500 * kUs, Ledger::kNothingNs, 10 * kUs), 490 * kUs - ahead + 20 * kUs);
  EXPECT_EQ(plan.sleep_ns(500 * kUs, Ledger::kNothingNs, kMs), 500 * kUs);
  EXPECT_EQ(plan.sleep_ns(500 * kUs, 60 * kUs, 0), 60 * kUs);
  EXPECT_EQ(plan.sleep_ns(ahead + SleepPlan::kShortestNs - 1, Ledger::kNothingNs, 0), 0);
  EXPECT_EQ(plan.sleep_ns(50 * kMs, Ledger::kNothingNs, 0), SleepPlan::kLongestNs);
}

TEST(SleepPlan, SkipsSomeEndsShortlyBeforeThatOfTheWait) {
  SleepPlan plan;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < SleepPlan::kMostSkipped; ++i) EXPECT_GT(plan.sleep_ns(100 * kUs, 20 * kUs, kMs), 20 * kUs) << i;
    EXPECT_EQ(plan.sleep_ns(100 * kUs, 20 * kUs, kMs), 20 * kUs);
  }
}

TEST(SleepPlan, PollsAnEndThatIsDueAwakeAndThenInShortSleeps) {
  SleepPlan plan;
  for (int i = 0; i < SleepPlan::kAwakePolls; ++i) EXPECT_EQ(plan.sleep_ns(kMs, 0, 0), 0) << i;
  EXPECT_EQ(plan.sleep_ns(kMs, 0, 0), SleepPlan::kPolledNs);
  EXPECT_GT(plan.sleep_ns(kMs, 100 * kUs, 0), SleepPlan::kPolledNs);
  EXPECT_EQ(plan.sleep_ns(kMs, 0, 0), 0);
}

TEST(SleepPlan, OneThatSpinsNeverSleeps) {
  SleepPlan plan(/*spins=*/true);
  for (const std::int64_t next_end : {std::int64_t{0}, 60 * kUs, Ledger::kNothingNs}) {
    for (const std::int64_t wait : {10 * kUs, kMs, 50 * kMs}) EXPECT_EQ(plan.sleep_ns(wait, next_end, 0), 0);
  }
}

TEST(SleepPlan, LearnsHowLateItWakes) {
  for (const std::int64_t late : {2 * kUs, 60 * kUs}) {
    SleepPlan plan;
    std::mt19937_64 random(3);
    for (int i = 0; i < 5'000; ++i) plan.woke(random() % 100 < 95 ? late : 3 * kMs);
    EXPECT_NEAR(static_cast<double>(plan.lateness_ns()), static_cast<double>(late), 8'000.0);
  }
}

// A gate that feeds long kernels, sleeps where it may and wakes late. However wrong predictions are, by a constant too,
// it submits each launch while the one before it runs, and not long before that one ends.
TEST(SleepPlan, LongKernelsAreFedInTimeWhateverPredictionsAreWrongBy) {
  constexpr std::int64_t kKernelNs = 1'600 * kUs;
  constexpr std::int64_t kLeadNs = 20 * kUs;
  constexpr std::int64_t kLateNs = 15 * kUs;  // a sleeper wakes
  constexpr std::int64_t kPollNs = 4 * kUs;
  for (const std::int64_t wrong_ns : {-150 * kUs, -20 * kUs, std::int64_t{0}, 20 * kUs, 150 * kUs}) {
    Ledger ledger;
    SleepPlan plan;
    for (int i = 0; i < 100; ++i) plan.woke(kLateNs);
    std::deque<std::pair<int, std::int64_t>> running;  // and when each ends
    std::int64_t now = 1;
    std::int64_t awake = 0;
    for (int number = 0; number < 1'000; ++number) {
      while (true) {
        ledger.look(now, true);
        while (!running.empty() && running.front().second <= now) {
          ledger.complete(running.front().first);
          running.pop_front();
        }
        const std::int64_t wait = ledger.remaining_ns(1) - kLeadNs;
        if (wait <= 0) break;
        const std::int64_t asleep = plan.sleep_ns(wait, ledger.next_end_ns(), kLeadNs / 2);
        if (asleep == 0) awake += std::min(wait, kPollNs);
        now += asleep > 0 ? asleep + kLateNs : std::min(wait, kPollNs);
      }
      if (number > 0) {
        ASSERT_LE(running.size(), 1U) << wrong_ns << " " << number;
        const std::int64_t left = running.empty() ? 0 : running.front().second - now;
        ASSERT_LE(left, kLeadNs + kLateNs + SleepPlan::kPolledNs - std::min<std::int64_t>(wrong_ns, 0)) << number;
        if (wrong_ns <= 0) {
          ASSERT_FALSE(running.empty()) << number;
        }
      }
      const std::int64_t start = running.empty() ? now : running.back().second;
      running.emplace_back(launch(ledger, 1, kKernelNs + wrong_ns), start + kKernelNs);
      now += kPollNs;
    }
    // Awake for a twentieth of the time.
    EXPECT_LT(awake, now / 20) << wrong_ns;
  }
}

// ---- while no latency client is there ------------------------------------------------------------------------------

TEST(Estimates, AnUnprovenOneCountsMuchUntilACompletionTells) {
  const unsigned grid[3] = {1, 2, 3};
  const unsigned block[3] = {4, 5, 6};
  const std::uint64_t key = Estimates::key_of(&grid, grid, block);
  EXPECT_NE(key, Estimates::key_of(&block, grid, block));
  EXPECT_NE(key, Estimates::key_of(&grid, block, block));
  Estimates estimates;
  EXPECT_FALSE(estimates.find(key).known);
  estimates.note(key, 60 * kUs);
  EXPECT_TRUE(estimates.find(key).known);
  EXPECT_FALSE(estimates.find(key).proven);
  EXPECT_FALSE(estimates.find(key).is_collective);
  estimates.note(key + 1, 60 * kUs, /*is_collective=*/true);
  EXPECT_TRUE(estimates.find(key + 1).is_collective);
  EXPECT_EQ(estimates.find(key).duration_ns, Estimates::kUnprovenNs);
  std::int64_t now = 7 * kMs;
  const auto observe = [&](std::int64_t least_ns, std::int64_t most_ns) {
    estimates.look(now += Estimates::kSettleNs);
    estimates.observe(key, least_ns, most_ns);
  };
  observe(0, 10 * kMs);  // which says little
  observe(0, 10 * kMs);
  EXPECT_FALSE(estimates.find(key).proven);
  observe(10 * kUs, 100 * kUs);
  EXPECT_FALSE(estimates.find(key).proven);
  estimates.observe(key, 10 * kUs, 100 * kUs);  // at the same moment
  EXPECT_FALSE(estimates.find(key).proven);
  observe(10 * kUs, 100 * kUs);
  EXPECT_TRUE(estimates.find(key).proven);
  EXPECT_EQ(estimates.find(key).duration_ns, 60 * kUs);
  observe(18 * kMs, 21 * kMs);  // it may have been interrupted
  EXPECT_EQ(estimates.find(key).duration_ns, 60 * kUs);
  observe(18 * kMs, 21 * kMs);
  EXPECT_EQ(estimates.find(key).duration_ns, 18 * kMs);
  estimates.observe(key + Estimates::kPlaces, 1, 2);  // another key of the same place
  EXPECT_EQ(estimates.find(key).duration_ns, 18 * kMs);
  const auto observe_together = [&](std::int64_t least_ns, std::int64_t most_ns) {
    estimates.look(now += 3 * kMs);
    estimates.observe_together(100 * kUs, least_ns, most_ns);
  };
  for (int i = 0; i < 4; ++i) observe_together(300 * kUs, 500 * kUs);
  EXPECT_TRUE(estimates.find(key).proven);
  for (int i = 0; i < 2; ++i) observe_together(500 * kUs, 700 * kUs);
  EXPECT_TRUE(estimates.find(key).proven) << "3 ms are too short to doubt";
  observe_together(500 * kUs, 700 * kUs);
  EXPECT_FALSE(estimates.find(key).proven);
  observe(18 * kMs, 21 * kMs);
  EXPECT_FALSE(estimates.find(key).proven);
  observe(18 * kMs, 21 * kMs);
  EXPECT_TRUE(estimates.find(key).proven);
  estimates.clear();
  EXPECT_FALSE(estimates.find(key).known);
}

TEST(Estimates, LaunchesThatAreInterruptedNowAndThenStayProven) {
  const unsigned size[3] = {1, 1, 1};
  const std::uint64_t key = Estimates::key_of(&size, size, size);
  Estimates estimates;
  std::int64_t now = 7 * kMs;
  estimates.note(key, 10 * kUs);
  std::int64_t unproven = 0;
  for (int segment = 0; segment < 10'000; ++segment) {
    // 16 launches of 10 us; two streams' segments in each 8 ms meet a request of another process.
    const std::int64_t interrupted_ns = segment % 50 < 2 ? 800 * kUs : 0;
    estimates.look(now += 160 * kUs + interrupted_ns);
    if (!estimates.find(key).proven) {
      ++unproven;
      estimates.observe(key, 10 * kUs + interrupted_ns, 20 * kUs + interrupted_ns);
    } else {
      estimates.observe_together(160 * kUs, 150 * kUs + interrupted_ns, 200 * kUs + interrupted_ns);
    }
  }
  EXPECT_LT(unproven, 500);
  EXPECT_LE(estimates.find(key).duration_ns, 40 * kUs);
}

TEST(Estimates, AreProvenAtNothingThatLaunchesFallFarShortOf) {
  const unsigned size[3] = {1, 1, 1};
  const std::uint64_t key = Estimates::key_of(&size, size, size);
  Estimates estimates;
  estimates.note(key, 10 * kUs);
  estimates.look(7 * kMs);
  estimates.observe(key, 800 * kUs, 810 * kUs);  // interrupted
  for (std::int64_t now = 8 * kMs; now < 60 * kMs; now += 1 * kMs) {
    estimates.look(now);
    estimates.observe(key, 9 * kUs, 15 * kUs);
    if (estimates.find(key).proven) {
      EXPECT_LE(estimates.find(key).duration_ns, 60 * kUs) << now;
    }
  }
  EXPECT_TRUE(estimates.find(key).proven);
}

TEST(Estimates, ADeviceThatWasStoppedDoesNotMakeLaunchesShort) {
  const unsigned size[3] = {1, 1, 1};
  const std::uint64_t key = Estimates::key_of(&size, size, size);
  Estimates estimates;
  std::int64_t now = 7 * kMs;
  const auto observe_many = [&](std::int64_t apart_ns, std::int64_t least_ns, std::int64_t most_ns) {
    for (int i = 0; i < 50; ++i) {
      estimates.look(now += apart_ns);
      estimates.observe(key, least_ns, most_ns);
    }
  };
  // A kernel of 2 ms that is predicted at 4 us: what ends all at once proves nothing, and makes nothing shorter.
  estimates.note(key, 4 * kUs);
  observe_many(90 * kUs, 0, 1 * kUs);
  EXPECT_EQ(estimates.find(key).duration_ns, Estimates::kUnprovenNs);
  observe_many(2 * kMs, 2 * kMs, 3 * kMs);
  EXPECT_EQ(estimates.find(key).duration_ns, 2 * kMs);
  EXPECT_TRUE(estimates.find(key).proven);
  observe_many(90 * kUs, 0, 1 * kUs);
  EXPECT_EQ(estimates.find(key).duration_ns, 1 * kMs);
  observe_many(2 * kMs, 2 * kMs, 3 * kMs);
  EXPECT_EQ(estimates.find(key).duration_ns, 2 * kMs);
  observe_many(Estimates::kSettleNs, 0, 1 * kUs);  // launches that are as short as that
  EXPECT_EQ(estimates.find(key).duration_ns, 1 * kUs);
}

TEST(Bounded, TwoLaunchesAlwaysAndThirtyMillisecondsElse) {
  Snapshot seen;
  seen.predicted_ns = 500 * kMs;
  EXPECT_EQ(bounded(seen).answer, Answer::kSubmit);
  seen.launches_in_flight = 1;
  seen.in_flight_ns = 500 * kMs;
  EXPECT_EQ(bounded(seen).answer, Answer::kSubmit);
  seen.launches_in_flight = 2;
  EXPECT_EQ(bounded(seen).answer, Answer::kWaitForTime);
  seen.predicted_ns = 1 * kMs;
  seen.in_flight_ns = 29 * kMs;
  EXPECT_EQ(bounded(seen).answer, Answer::kSubmit);
  seen.in_flight_ns += 1;
  EXPECT_EQ(bounded(seen).answer, Answer::kWaitForTime);
  EXPECT_EQ(bounded(seen).wait_ns, 1);
}

}  // namespace
}  // namespace cudasched::schedule
