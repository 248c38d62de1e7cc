#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "schedule/host_bound.hpp"
#include "schedule/segments.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kUs = 1'000;
constexpr std::int64_t kMs = 1'000'000;

TEST(TimeLeft, IsOneWordThatErrsToTheSafeSide) {
  const TimeLeft left{1'000'001, 5'000'063};
  const std::optional<TimeLeft> back = unpack(pack(left));
  ASSERT_TRUE(back);
  EXPECT_GE(back->gpu_ns, left.gpu_ns);
  EXPECT_LE(back->gpu_ns, left.gpu_ns + 64);
  EXPECT_LE(back->host_ns, left.host_ns);
  EXPECT_GE(back->host_ns, left.host_ns - 64);
  EXPECT_FALSE(unpack(kNothingKnown));
  // The largest times are not taken for an unknown one.
  EXPECT_TRUE(unpack(pack({INT64_MAX / 2, INT64_MAX / 2})));
  EXPECT_EQ(unpack(pack({0, -5})), TimeLeft{});
}

// A program that launches `launches` kernels of `gpu_ns` each `gap_ns` on the host, and then waits.
struct Program {
  std::size_t launches = 100;
  std::int64_t gpu_ns = 5 * kUs;
  std::int64_t gap_ns = 20 * kUs;
  std::int64_t blocked_ns = 10 * kUs;
};

// One request of so many segments, each of which takes `beside_ns` longer where best effort may be in it; what was told
// when each began. The deadline of a target counts from the request's begin.
std::vector<Segments::SegmentNews> request(Segments& segments, const Program& program, std::int64_t& now, int parts = 1,
                                           std::uint64_t key = 0, std::int64_t beside_ns = 0,
                                           std::optional<Segments::Target> target = std::nullopt) {
  if (target) target->deadline_ns += now;
  std::vector<Segments::SegmentNews> told{segments.begin(key, now, false, target)};
  for (int part = 0; part < parts; ++part) {
    for (std::size_t i = 0; i < program.launches; ++i) {
      now += program.gap_ns;
      const Segments::Launch launch = segments.launch([&] { return now; });
      EXPECT_EQ(launch.number, i);
      if (launch.is_timed) segments.took(launch.number, program.gpu_ns);
    }
    segments.waits(now);
    now += program.blocked_ns + (told.back().late_ns > 0 ? beside_ns : 0);
    if (part + 1 == parts) break;
    told.emplace_back();
    EXPECT_TRUE(segments.next(now, told.back()));
  }
  segments.end(now);
  now += kMs;
  return told;
}

// Of the target, what requests of one segment may lose now. One that is kept clean may lose nothing: the most of
// several.
double share(Segments& segments, double inflation, const Program& program, std::int64_t& now,
             std::int64_t beside_ns = 0) {
  double most = 0;
  for (int i = 0; i < 4; ++i) {
    const Segments::SegmentNews told = request(segments, program, now, 1, 0, beside_ns).front();
    EXPECT_GT(told.median_ns, 0);
    most = std::max(most, static_cast<double>(told.late_ns) / (inflation * static_cast<double>(told.median_ns)));
  }
  return most;
}

TEST(Segments, AreKnownAfterAFewRequestsAndTellWhatIsLeft) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  const Program program;
  // The first request of a key finds no place, and eight more are seen.
  for (int i = 0; i < 1 + SegmentProfile::kFewest; ++i) {
    EXPECT_EQ(request(segments, program, now).front().left, kNothingKnown) << i;
  }
  const Segments::SegmentNews told = request(segments, program, now).front();
  ASSERT_NE(told.left, kNothingKnown);
  const TimeLeft left = *unpack(told.left);
  EXPECT_NEAR(static_cast<double>(left.gpu_ns), 500e3, 64);
  EXPECT_NEAR(static_cast<double>(left.host_ns), 99 * 20e3, 64);  // from the first launch to the last
  EXPECT_EQ(told.median_ns, 2'010 * kUs);
  EXPECT_EQ(told.late_ns, static_cast<std::int64_t>(0.03 * Segments::kMostShare * 2'010 * kUs));
  // After each launch less is left, and after the last nothing.
  segments.begin(0, now);
  std::int64_t gpu_ns = left.gpu_ns + 64;
  for (std::size_t i = 0; i < program.launches; ++i) {
    const Segments::Launch launch = segments.launch([&] { return now; });
    EXPECT_EQ(launch.gpu_ns, program.gpu_ns);
    const TimeLeft now_left = *unpack(launch.left);
    EXPECT_LT(now_left.gpu_ns, gpu_ns);
    gpu_ns = now_left.gpu_ns;
    EXPECT_NEAR(static_cast<double>(now_left.host_ns), static_cast<double>(98 - static_cast<std::int64_t>(i)) * 20e3,
                i + 1 < program.launches ? 64 : 20'064);
  }
  EXPECT_EQ(gpu_ns, 0);
  EXPECT_EQ(segments.launch([&] { return now; }).left, kNothingKnown) << "more than such a segment has";
}

TEST(Segments, WhatAFirstRequestWaitedForInItsMiddleIsNotExpectedOfLaterOnes) {
  Segments segments(1.03);
  const Program program;
  std::int64_t now = kMs;
  // Libraries that are set up at the first launches wait for the GPU there.
  for (int cold = 0; cold < 3; ++cold) {
    Program first = program;
    first.launches = 3;
    request(segments, first, now, 2);
  }
  std::optional<TimeLeft> left;
  for (int i = 0; i < 40; ++i) {
    const Segments::SegmentNews told = request(segments, program, now)[0];
    if (told.late_ns > 0) left = unpack(told.left);
  }
  ASSERT_TRUE(left);
  const auto host_ns = static_cast<std::int64_t>(program.launches - 1) * program.gap_ns;
  EXPECT_NEAR(static_cast<double>(left->host_ns), static_cast<double>(host_ns), 200 * kUs);
}

TEST(Segments, AProgramThatHasBecomeSlowerIsBelievedAndOnePauseIsNot) {
  Segments segments(1.03);
  Program program;
  std::int64_t now = kMs;
  const auto serve = [&](int requests) {
    std::int64_t host_ns = 0;
    for (int i = 0; i < requests; ++i) {
      const Segments::SegmentNews told = request(segments, program, now)[0];
      if (told.late_ns > 0) host_ns = unpack(told.left)->host_ns;
    }
    return host_ns;
  };
  const std::int64_t before = serve(200);
  const std::int64_t usual_ns = std::exchange(program.gap_ns, 1'000 * kMs);
  request(segments, program, now);
  program.gap_ns = usual_ns;
  EXPECT_NEAR(static_cast<double>(serve(64)), static_cast<double>(before), 0.05 * static_cast<double>(before));
  program.gap_ns = 2 * usual_ns;
  EXPECT_GT(serve(2'000), before * 3 / 2);
}

TEST(Segments, OfARequestAreToldApartByTheirNumberUpToTheNinth) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (int i = 0; i < 10; ++i) request(segments, {}, now, 12);
  const auto told = request(segments, {}, now, 12);
  const auto next = request(segments, {}, now, 12);
  ASSERT_EQ(told.size(), 12u);
  for (std::size_t i = 1; i < told.size(); ++i) {
    EXPECT_TRUE(told[i].left != kNothingKnown || next[i].left != kNothingKnown) << i;  // one is kept clean now and then
    EXPECT_EQ(told[i].segment, told[i - 1].segment + 1);
  }
}

TEST(Segments, OfEachNumberAreKeptCleanAndHaveAllTheirLaunchesMeasured) {
  for (const int parts : {1, 2, 4, 8, 12}) {
    Segments segments(1.03);
    std::int64_t now = kMs;
    std::vector<int> clean(static_cast<std::size_t>(parts));
    for (int i = 0; i < 400; ++i) {
      const auto told = request(segments, {}, now, parts);
      for (std::size_t part = 0; part < told.size(); ++part) {
        clean[part] += i >= 32 && told[part].late_ns == 0 ? 1 : 0;
      }
    }
    for (std::size_t part = 0; part < clean.size(); ++part) {
      EXPECT_GE(clean[part], 4) << parts << " " << part;
      EXPECT_LE(clean[part], 100) << parts << " " << part << ": never known";
    }
  }
}

TEST(Segments, OneOf61IsKeptCleanOnceItIsKnownWhatBestEffortCosts) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  const auto clean = [&](int requests) {
    int found = 0;
    for (int i = 0; i < requests; ++i) found += request(segments, {}, now).front().late_ns == 0 ? 1 : 0;
    return found;
  };
  clean(20);
  EXPECT_GE(clean(68), 4) << "one of 17 at first";
  clean(100);
  EXPECT_EQ(clean(610), 10);
  EXPECT_GE(segments.counts().clean, 10u);
}

TEST(Segments, KeysAreBoundedAndTheOldestMakesRoom) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (int i = 0; i < 12; ++i) request(segments, {}, now, 1, 1);
  EXPECT_NE(request(segments, {}, now, 1, 1).front().left, kNothingKnown);
  for (std::uint64_t key = 2; key < 2 + Segments::kKeys; ++key) {
    for (int i = 0; i < 12; ++i) request(segments, {}, now, 1, key);
  }
  EXPECT_EQ(request(segments, {}, now, 1, 1).front().left, kNothingKnown);
}

TEST(Segments, WhatRequestsMayLoseIsHalvedUntilTheyKeepTheTarget) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  // Beside best effort, requests take a tenth longer, whatever was foretold.
  for (int i = 0; i < 20; ++i) request(segments, {}, now);
  for (int i = 0; i < 2'000; ++i) {
    request(segments, {}, now, 1, 0, 200 * kUs);
    if (i == 200) {
      EXPECT_GE(segments.counts().halved, 1u);
    }
  }
  EXPECT_EQ(share(segments, 0.03, {}, now, 200 * kUs), 0) << "nothing is let in any more";
  EXPECT_EQ(segments.counts().fallbacks, 0u);
  // And comes back, slowly, once they keep it.
  for (int i = 0; i < 20'000; ++i) request(segments, {}, now, 1, 0, 10 * kUs);
  EXPECT_GT(share(segments, 0.03, {}, now, 10 * kUs), 0.4);
}

// A host that is 1.7 times slower for seconds, as those of shared machines are, and slower whenever it has slept: its
// first requests, one behind the other, are not what later ones are measured by.
TEST(Segments, AHostThatIsSlowerByTurnsIsNotTakenForSlowedByBestEffort) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> noise(0.0, 0.08);
    Segments segments(1.03);
    std::int64_t now = kMs;
    for (int i = 0; i < 40; ++i) request(segments, {}, now);
    std::uint64_t let_in = 0;
    for (int i = 0; i < 3'000; ++i) {
      Program program;
      const double slower = i / 250 % 2 == 0 ? 1.7 : 1.0;
      program.gap_ns =
          static_cast<std::int64_t>(static_cast<double>(program.gap_ns) * slower * std::exp(noise(random)));
      let_in += request(segments, program, now).front().late_ns > 0 ? 1 : 0;
    }
    EXPECT_GE(share(segments, 0.03, {}, now), 0.249) << seed;  // of a whole number of ns
    EXPECT_GT(let_in, 2'500u) << seed;
  }
}

TEST(Segments, AnotherModelUnderTheSameKeyIsUnknownWithinAFewRequests) {
  std::mt19937_64 random(1);
  for (int repeat = 0; repeat < 50; ++repeat) {
    Segments segments(1.03);
    std::int64_t now = kMs;
    const auto any = [&] {
      Program program;
      program.launches = std::uniform_int_distribution<std::size_t>(10, 500)(random);
      program.gap_ns = std::uniform_int_distribution<std::int64_t>(5 * kUs, 40 * kUs)(random);
      return program;
    };
    Program before = any();
    Program after = any();
    before.launches = 2 * after.launches + 10;
    if (repeat % 2 == 1) std::swap(before, after);
    before.launches = std::min(before.launches, SegmentProfile::kLaunches);
    after.launches = std::min(after.launches, SegmentProfile::kLaunches - 1);
    for (int i = 0; i < 20; ++i) request(segments, before, now);
    int foretold = 0;
    for (int i = 0; i < 8; ++i) foretold += request(segments, after, now).front().left != kNothingKnown ? 1 : 0;
    EXPECT_LE(foretold, SegmentProfile::kMostSurprises + 1);
    EXPECT_EQ(segments.counts().fallbacks, 1u);
  }
}

TEST(SegmentProfile, ThatIsClearedKnowsNothing) {
  SegmentProfile profile;
  profile.clear();
  EXPECT_EQ(profile.left(0), kNothingKnown);
  EXPECT_EQ(profile.left(3), kNothingKnown);
}

TEST(Segments, ALiarIsBelievedLessAndLessOften) {
  // Its requests change as soon as they are believed.
  Segments segments(1.03);
  std::int64_t now = kMs;
  std::uint64_t foretold = 0;
  constexpr int kRequests = 4'000;
  Program program;
  for (int i = 0; i < kRequests; ++i) {
    const std::optional<TimeLeft> left = unpack(request(segments, program, now).front().left);
    const bool believed = left && left->host_ns > 0;
    foretold += believed ? 1 : 0;
    if (believed) program.launches = program.launches == 100 ? 50 : 100;
  }
  EXPECT_GE(segments.counts().fallbacks, 4u);
  EXPECT_LT(foretold, kRequests / 20u);
}

TEST(Segments, TwoServersOfOneProcessKeepTheirOwnProfilesUnderTheirOwnTargets) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  const Program slow{250, 5 * kUs, 20 * kUs, 10 * kUs};
  const Program quick{60, 12 * kUs, 15 * kUs, 10 * kUs};
  const auto host_ns = [](const Segments::SegmentNews& told) {
    const std::optional<TimeLeft> left = unpack(told.left);
    return left ? left->host_ns : -1;
  };
  int known = 0;
  for (int i = 0; i < 200; ++i) {
    const std::int64_t of_slow = host_ns(request(segments, slow, now, 1, 5 * kMs).front());
    const std::int64_t of_quick = host_ns(request(segments, quick, now, 1, 2 * kMs).front());
    if (i < 20) continue;
    if (of_slow >= 0) {
      EXPECT_NEAR(static_cast<double>(of_slow), 5e6, 1e5);
    }
    if (of_quick >= 0) {
      EXPECT_NEAR(static_cast<double>(of_quick), 9e5, 5e4);
    }
    known += of_slow >= 0 && of_quick >= 0 ? 1 : 0;
  }
  EXPECT_EQ(segments.counts().fallbacks, 0u);
  EXPECT_GE(known, 170);
}

TEST(Segments, AClientThatNamesAnotherTargetForEachRequestIsNeverBelieved) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (std::uint64_t i = 0; i < 500; ++i) {
    const Segments::SegmentNews told = request(segments, {}, now, 1, 1 + i % (Segments::kKeys + 1)).front();
    EXPECT_EQ(told.left, kNothingKnown);
    EXPECT_EQ(told.late_ns, 0);
  }
}

// ---- with a target -------------------------------------------------------------------------------------------------

// What a request of so many parts of the default program takes by itself: 2.01 ms each.
constexpr std::int64_t kPartNs = 2'010 * kUs;

Segments::Target clean() { return {100 * kMs, Snapshot::kUnknownNs, 100 * kUs}; }
Segments::Target within(std::int64_t deadline_ns, int parts) { return {deadline_ns, parts * kPartNs, 100 * kUs}; }

TEST(SegmentsWithATarget, LearnFromCleanRequestsAlone) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  const auto serve = [&](const Segments::Target& target, std::int64_t beside_ns) {
    return request(segments, {}, now, 1, 0, beside_ns, target).front();
  };
  // Another rule lets best effort into these, which says nothing of what they take.
  for (int i = 0; i < 100; ++i) EXPECT_EQ(serve(within(10 * kMs, 1), 0).left, kNothingKnown);
  for (int i = 0; i < SegmentProfile::kFewest; ++i) EXPECT_EQ(serve(clean(), 0).late_ns, 0);
  const Segments::SegmentNews told = serve(within(10 * kMs, 1), 0);
  EXPECT_NE(told.left, kNothingKnown);
  EXPECT_EQ(told.median_ns, kPartNs);
  EXPECT_EQ(told.late_ns, static_cast<std::int64_t>(0.03 * Segments::kMostShare * kPartNs)) << "as without a target";
  EXPECT_EQ(segments.counts().clean, 0u);
  EXPECT_EQ(serve(clean(), 0).late_ns, 0);
  EXPECT_EQ(segments.counts().clean, 1u);
}

TEST(SegmentsWithATarget, LearnFromAllRequestsWhereNoBestEffortIsThere) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  Segments::Target target = within(10 * kMs, 1);
  target.alone = true;
  for (int i = 0; i < 10; ++i) request(segments, {}, now, 1, 0, 0, target);
  EXPECT_GT(request(segments, {}, now, 1, 0, 0, within(10 * kMs, 1)).front().late_ns, 0);
}

// A request that has lost its slack, to whatever it was, is left alone; one that has caught up is not.
TEST(SegmentsWithATarget, AreToldOfNoMoreThanTheSlackThatIsLeftWhenTheyBegin) {
  constexpr int kParts = 4;
  std::mt19937_64 random(7);
  int told_all = 0;
  int told_none = 0;
  int told_part = 0;
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (int i = 0; i < 10; ++i) request(segments, {}, now, kParts, 0, 0, clean());
  for (int i = 0; i < 2'000; ++i) {
    const auto spare_ns = static_cast<std::int64_t>(random() % 600'000);
    const Segments::Target target = within(kParts * kPartNs + spare_ns, kParts);
    const auto beside_ns = static_cast<std::int64_t>(random() % 100'000);
    const std::int64_t begin_ns = now;
    const auto told = request(segments, {}, now, kParts, 0, beside_ns, target);
    for (std::size_t part = 0; part < told.size(); ++part) {
      const std::int64_t late_ns = told[part].late_ns;
      if (told[part].median_ns == 0) continue;
      // Its slack: the deadline, less now, less what it takes by itself from here on.
      const std::int64_t rest_ns = (kParts - static_cast<std::int64_t>(part)) * kPartNs;
      const std::int64_t slack_ns = begin_ns + target.deadline_ns - told[part].since_ns - rest_ns - target.margin_ns;
      const auto budget_ns = static_cast<std::int64_t>(0.03 * Segments::kMostShare * kPartNs);
      ASSERT_LE(late_ns, std::max<std::int64_t>(slack_ns, 0));
      ASSERT_LE(late_ns, budget_ns);
      told_none += late_ns == 0 ? 1 : 0;
      told_part += late_ns > 0 && late_ns == slack_ns ? 1 : 0;
      told_all += late_ns > 0 && late_ns < slack_ns ? 1 : 0;
    }
  }
  EXPECT_GT(told_all, 100);
  EXPECT_GT(told_part, 100);
  EXPECT_GT(told_none, 100);
}

// A segment whose GPU is never idle for long has no gaps: what the policy knows without a profile decides.
TEST(SegmentsWithATarget, ThatLeaveTheGpuNoTimeAreNotToldOf) {
  for (const bool sliced : {false, true}) {
    for (const std::int64_t idle_ns : {100 * kUs, 700 * kUs, 1'800 * kUs}) {
      Segments segments(1.03);
      std::int64_t now = kMs;
      Program program;
      program.gpu_ns = program.gap_ns - idle_ns / static_cast<std::int64_t>(program.launches);
      for (int i = 0; i < 10; ++i) request(segments, program, now, 1, 0, 0, clean());
      Segments::Target target = within(now + 100 * kMs, 1);
      const std::int64_t least_ns = sliced ? kWorthSwitchingNs : kWorthWakingNs;
      EXPECT_EQ(segments.begin(0, now, sliced, target).late_ns > 0, idle_ns > least_ns) << sliced << idle_ns;
      segments.end(now);
    }
  }
}

TEST(SegmentsWithATarget, WordsThatMayHoldAnythingTellOfNoMoreThanTheBudget) {
  std::mt19937_64 random(9);
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (int i = 0; i < 10; ++i) request(segments, {}, now, 1, 0, 0, clean());
  const auto anything = [&] {
    return static_cast<std::int64_t>(random() >> random() % 64) * (random() % 2 == 0 ? 1 : -1);
  };
  for (int i = 0; i < 100'000; ++i) {
    const Segments::Target target{anything(), anything(), static_cast<std::int64_t>(random() % 1'000'000), false};
    const Segments::SegmentNews told = segments.begin(0, now, random() % 2 == 0, target);
    ASSERT_GE(told.late_ns, 0);
    ASSERT_LE(told.late_ns, static_cast<std::int64_t>(0.03 * Segments::kMostShare * kPartNs));
    segments.end(now);
  }
  EXPECT_GT(segments.begin(0, now, false, within(now + 100 * kMs, 1)).late_ns, 0);
}

TEST(Segments, OfOverlappingRequestsNothingIsLearned) {
  Segments segments(1.03);
  std::int64_t now = kMs;
  for (int i = 0; i < 20; ++i) {
    segments.begin(0, now);
    segments.launch([&] { return now += 20 * kUs; });
    segments.lose();
    segments.end(now);
  }
  EXPECT_EQ(segments.begin(0, now).left, kNothingKnown);
}

TEST(SegmentReader, TakesTheLeastHostTimeAndTheSumOfWhatTheGpuOwes) {
  SegmentReader reader;
  const auto told = [&](std::int64_t gpu_ns, std::int64_t host_ns, std::int64_t late_ns) {
    return Segments::SegmentNews{1, 10 * kMs, late_ns, 5 * kMs, pack({gpu_ns, host_ns})};
  };
  reader.begin(11 * kMs);
  reader.add(0, told(640 * kUs, 3'200 * kUs, 100 * kUs));
  reader.add(5, told(64 * kUs, 1'600 * kUs, 150 * kUs));
  const HostBound& seen = reader.requests();
  EXPECT_TRUE(seen.known);
  EXPECT_EQ(seen.left_gpu_ns, 704 * kUs);
  EXPECT_EQ(seen.left_host_ns, 1'600 * kUs);
  EXPECT_EQ(seen.late_ns, 100 * kUs);
  // What was said is true of the moment when it was first seen.
  reader.begin(12 * kMs);
  reader.add(0, told(640 * kUs, 3'200 * kUs, 100 * kUs));
  EXPECT_EQ(reader.requests().left_host_ns, 2'200 * kUs);
}

TEST(SegmentReader, KnowsNothingOfWhatSaysNothingOrGoesOnForEver) {
  SegmentReader reader;
  const Segments::SegmentNews sound{1, 10 * kMs, 100 * kUs, 5 * kMs, pack({kUs, kMs})};
  const auto known = [&](std::int64_t now, const Segments::SegmentNews& told) {
    reader.begin(now);
    reader.add(0, told);
    return reader.requests().known;
  };
  EXPECT_TRUE(known(11 * kMs, sound));
  EXPECT_TRUE(known(30 * kMs, sound));
  EXPECT_FALSE(known(31 * kMs, sound)) << "four times as long as such segments take";
  EXPECT_FALSE(known(5 * kMs, sound)) << "it begins in the future";
  for (const auto& damaged :
       {Segments::SegmentNews{1, 10 * kMs, 0, 5 * kMs, pack({})}, Segments::SegmentNews{1, 10 * kMs, kMs, 0, pack({})},
        Segments::SegmentNews{1, 10 * kMs, 6 * kMs, 5 * kMs, pack({})},
        Segments::SegmentNews{1, 10 * kMs, kMs, INT64_MAX, pack({})},
        Segments::SegmentNews{1, INT64_MIN, kMs, 5 * kMs, pack({})},
        Segments::SegmentNews{1, 10 * kMs, kMs, 5 * kMs, kNothingKnown}}) {
    EXPECT_FALSE(known(11 * kMs, damaged));
  }
}

TEST(LatencyClock, SharesTheGpuWithBestEffort) {
  LatencyClock clock;
  LatencyClock::View view;
  view.now_ns = kMs;
  clock.look(view);
  // 100 us of latency work come within 20 us while best effort is on the GPU: none is done.
  view.now_ns += 20 * kUs;
  view.latency.submitted_ns += 100 * kUs;
  view.best_effort_ns = 30 * kUs;
  view.best_effort_submitted_ns += 50 * kUs;
  view.best_effort_launches = view.best_effort_in_flight = 1;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 100 * kUs);
  EXPECT_EQ(clock.most_ns(), 100 * kUs);
  // 30 us later best effort should be done, and is not: it is not known what is.
  view.now_ns += 60 * kUs;
  view.best_effort_ns = 0;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 70 * kUs);
  EXPECT_EQ(clock.most_ns(), 100 * kUs);
  // It is, and from then on the GPU works on what came.
  view.best_effort_in_flight = 0;
  clock.look(view);
  view.now_ns += 40 * kUs;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 30 * kUs);
  EXPECT_EQ(clock.most_ns(), 60 * kUs);
  // The program has waited for it.
  view.latency.done_ns = view.latency.not_done_ns = view.latency.submitted_ns;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 0);
  EXPECT_EQ(clock.most_ns(), 0);
}

TEST(LatencyClock, GoesByTheMarksWhereBestEffortIsPredictedWrong) {
  LatencyClock clock;
  LatencyClock::View view;
  view.now_ns = kMs;
  view.best_effort_launches = view.best_effort_in_flight = 1;
  clock.look(view);
  // Best effort is on the GPU all the while, and predicted to be over: so latency work seems to be done.
  view.now_ns += 200 * kUs;
  view.latency.submitted_ns += 160 * kUs;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 0);
  EXPECT_EQ(clock.most_ns(), 160 * kUs);
  // A mark says that it was not.
  view.now_ns += 20 * kUs;
  view.latency.submitted_ns += 10 * kUs;
  view.latency.not_done_ns = 80 * kUs;
  clock.look(view);
  EXPECT_EQ(clock.likely_ns(), 70 * kUs) << "90 us were not done, and it has had 20 us since then at most";
  // And then, that what came before it is.
  view.now_ns += 10 * kUs;
  view.latency.done_ns = 80 * kUs;
  view.latency.not_done_ns = view.latency.submitted_ns;
  clock.look(view);
  EXPECT_EQ(clock.most_ns(), 90 * kUs);
  EXPECT_EQ(clock.likely_ns(), 60 * kUs);
}

// A device that is done with launches in order, and asked at random: what is on it is never more, or less, than is
// said.
TEST(SegmentProgress, NeverSaysMoreOrLessThanIsTrue) {
  std::mt19937_64 random(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    SegmentProgress progress;
    std::int64_t submitted_ns = 1'000 * (repeat % 3);
    std::int64_t complete_ns = submitted_ns;
    std::int64_t mark_ns = 0;
    progress.begin(submitted_ns);
    for (std::size_t number = 0; number < 500; ++number) {
      submitted_ns += std::uniform_int_distribution<std::int64_t>(0, 10'000)(random);
      complete_ns += std::uniform_int_distribution<std::int64_t>(0, submitted_ns - complete_ns)(random);
      if (!SegmentProgress::asks(number)) continue;
      if (progress.ask(submitted_ns, [&] { return complete_ns >= mark_ns; })) {
        progress.marked(submitted_ns);
        mark_ns = submitted_ns;
      }
      EXPECT_LE(progress.done_ns(), complete_ns);
      EXPECT_TRUE(progress.not_done_ns() > complete_ns || progress.not_done_ns() == submitted_ns);
      EXPECT_LE(progress.not_done_ns(), submitted_ns);
    }
  }
}

TEST(SegmentGate, ClosesOnceASegmentAndOpensForOneThatLeavesEnough) {
  SegmentGate gate(1.03);
  HostBound requests;
  requests.late_share = 0.03 * Segments::kMostShare;
  requests.left_gpu_ns = kMs;
  requests.left_host_ns = 5 * kMs;
  EXPECT_FALSE(gate.closed(1, requests, 100 * kUs));
  requests.left_host_ns = 1'200 * kUs;
  EXPECT_TRUE(gate.closed(1, requests, 100 * kUs)) << "the change of contexts has no room";
  requests.left_host_ns = 2'200 * kUs;
  EXPECT_TRUE(gate.closed(1, requests, 100 * kUs)) << "what is left is not worth another change";
  requests.left_host_ns = 5 * kMs;
  EXPECT_FALSE(gate.closed(1, requests, 100 * kUs)) << "it is again";
  EXPECT_FALSE(gate.closed(2, requests, 100 * kUs));
  requests.left_host_ns = 2 * kMs;
  EXPECT_TRUE(gate.closed(3, requests, 0)) << "less than 1.1 ms";
}

TEST(SegmentGate, ClosesTheEarlierTheLessSegmentsMayLose) {
  std::int64_t before_ns = 0;
  for (double share = Segments::kMostShare; share >= Segments::kLeastShare; share /= 2) {
    HostBound requests;
    requests.late_share = 0.03 * share;
    requests.left_host_ns = 100 * kMs;
    SegmentGate gate(1.03);
    EXPECT_FALSE(gate.closed(1, requests, 0));
    while (!gate.closed(1, requests, 0)) requests.left_host_ns -= 10 * kUs;
    EXPECT_NEAR(static_cast<double>(requests.left_host_ns),
                static_cast<double>(kContextSwitchNs) * Segments::kMostShare / share, 11e3);
    EXPECT_GT(requests.left_host_ns, before_ns);
    before_ns = requests.left_host_ns;
  }
}

Snapshot active() {
  Snapshot seen;
  seen.latency_clients = seen.latency_active = true;
  seen.predicted_ns = 50 * kUs;
  seen.bound_ns = 60 * kUs;
  seen.lead_ns = 20 * kUs;
  seen.host_bound.known = true;
  seen.host_bound.left_gpu_ns = 500 * kUs;
  seen.host_bound.left_host_ns = 3 * kMs;
  seen.host_bound.late_ns = 100 * kUs;
  return seen;
}

TEST(Harvest, IsStrictWhereNothingIsKnownOrNobodyIsActive) {
  Snapshot seen = active();
  EXPECT_EQ(harvest(seen).answer, Answer::kSubmit);
  seen.host_bound.known = false;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForLatency);
  seen.latency_active = false;
  seen.since_latency_ns = 0;
  seen.linger_ns = 100 * kUs;
  EXPECT_EQ(harvest(seen).answer, strict(seen).answer);
  EXPECT_EQ(harvest(seen).wait_ns, strict(seen).wait_ns);
}

TEST(Harvest, SubmitsWhatTheGpuIsDoneWithByTheWaitOrLateByNoMoreThanIsAllowed) {
  Snapshot seen = active();
  seen.host_bound.left_host_ns = 460 * kUs;  // 60 + 500 - 460 = 100
  EXPECT_EQ(harvest(seen).answer, Answer::kSubmit);
  seen.host_bound.left_host_ns -= 1;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForLatency);
  seen = active();
  seen.host_bound.gpu_ns = 10 * kUs;
  seen.in_flight_ns = 30 * kUs;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForTime);
  EXPECT_EQ(harvest(seen).wait_ns, 20 * kUs);
  seen.host_bound.gpu_most_ns = 3 * kMs;  // it may turn out to be less
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForTime);
  EXPECT_EQ(harvest(seen).wait_ns, 200 * kUs);
  seen = active();
  seen.my_turn = false;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForTurn);
  seen = active();
  seen.hint_ns = kMs;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForTime);
}

TEST(Harvest, WhereContextsTakeTurnsTheSegmentsGateDecides) {
  Snapshot seen = active();
  seen.host_bound.sliced = true;
  EXPECT_EQ(harvest(seen).answer, Answer::kSubmit);
  // Deeper than elsewhere: where it runs dry, the GPU changes to the other context.
  seen.in_flight_ns = 150 * kUs;
  EXPECT_EQ(harvest(seen).answer, Answer::kSubmit);
  seen.in_flight_ns = 250 * kUs;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForTime);
  seen.host_bound.closed = true;
  EXPECT_EQ(harvest(seen).answer, Answer::kWaitForLatency);
}

}  // namespace
}  // namespace cudasched::schedule
