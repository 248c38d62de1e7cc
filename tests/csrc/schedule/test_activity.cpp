#include <gtest/gtest.h>

#include "schedule/activity.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kMs = 1'000'000;

// A client that launched at 100 ms, was active since then, and is asked after at `now_ns` by the ticker.
ActivityView at_tick(std::int64_t now_ns) {
  ActivityView view;
  view.by_ticker = true;
  view.now_ns = now_ns;
  view.last_launch_ns = view.active_since_ns = 100 * kMs;
  view.max_idle_hold_ns = 5 * kMs;
  return view;
}

TEST(Activity, AThreadThatHasSynchronisedMayEndIt) {
  ActivityView view;
  EXPECT_TRUE(may_have_ended(view));
  EXPECT_TRUE(has_ended(view, Work::kDone));
  EXPECT_FALSE(has_ended(view, Work::kRunning));
  EXPECT_FALSE(has_ended(view, Work::kUnknown));
}

TEST(Activity, AnOpenRegionIsEndedByNobodyButTheTickerAfterALongSilence) {
  ActivityView view;
  view.in_region = true;
  EXPECT_FALSE(may_have_ended(view));
  view = at_tick(105 * kMs);
  view.in_region = true;
  EXPECT_FALSE(may_have_ended(view));
  view.now_ns += 1;
  EXPECT_TRUE(may_have_ended(view));
  EXPECT_FALSE(has_ended(view, Work::kRunning)) << "it has work on the GPU";
}

TEST(Activity, TheTickerLeavesAloneWhatWasLaunchedSinceItsLastTickWhereTheProgramEndsItsRequests) {
  ActivityView view = at_tick(101 * kMs);
  view.launched_since_last_tick = view.ends_itself = true;
  EXPECT_FALSE(may_have_ended(view));
  view.launched_since_last_tick = false;
  EXPECT_TRUE(may_have_ended(view));
  view.launched_since_last_tick = true;
  view.ends_itself = false;
  EXPECT_TRUE(may_have_ended(view));
}

TEST(Activity, AProgramThatGoesOnLaunchingIsLeftAloneForAWhileOnly) {
  ActivityView view = at_tick(100 * kMs + kActivityGraceNs - 1);
  view.launched_since_last_tick = view.ends_itself = true;
  EXPECT_FALSE(may_have_ended(view));
  view.now_ns += 1;
  EXPECT_TRUE(may_have_ended(view));
}

TEST(Activity, UnknownWorkIsTakenForDoneAfterALongSilence) {
  EXPECT_FALSE(has_ended(at_tick(105 * kMs), Work::kUnknown));
  EXPECT_TRUE(has_ended(at_tick(105 * kMs + 1), Work::kUnknown));
}

TEST(Activity, ALaunchThatNeverReturnsHangsAfterALongTime) {
  ActivityView view = at_tick(110 * kMs);
  EXPECT_FALSE(launch_hangs(view)) << "none is under way";
  view.launching_since_ns = 105 * kMs;
  EXPECT_FALSE(launch_hangs(view));
  view.now_ns += 1;
  EXPECT_TRUE(launch_hangs(view));
  view.by_ticker = false;
  EXPECT_FALSE(launch_hangs(view));
}

}  // namespace
}  // namespace cudasched::schedule
