// What is in flight, over the simulated driver: the cases in which it is not what was predicted, and programs that
// launch far ahead before a latency client is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "runtime/engine.hpp"
#include "runtime/gate.hpp"
#include "runtime/gate/sampler.hpp"

namespace cudasched::test {
namespace {

class GateTest : public ::testing::Test {
 protected:
  static runtime::Engine& engine() { return runtime::engine(); }
  static runtime::Gate& gate() {
    runtime::Gate* found = nullptr;
    engine().for_each_device([&](runtime::Device& device) { found = &device.gate; });
    return *found;
  }

  // Launches that the driver has. They are offloaded, so the program's calls return before.
  std::uint64_t submitted() const { return state().best_effort_launches - before_; }
  // At least so many: a thread that stops between two looks sees fewer, never more.
  std::uint64_t ahead() const {
    const std::uint64_t had = submitted();
    // The simulated driver runs what is due when it is called, and what went without a marker is not asked for.
    driver::table().cuStreamQuery.legacy(program_.stream());
    const std::uint64_t ran = program_.ran();
    return had > ran ? had - ran : 0;
  }

  // Looks until the driver has so many launches: the most that were there and had not run.
  std::uint64_t most_ahead(std::uint64_t count) {
    std::uint64_t most = 0;
    EXPECT_TRUE(eventually([&] {
      most = std::max(most, ahead());
      return submitted() >= count;
    })) << submitted()
        << " of " << count << ", " << program_.ran() << " ran";
    return std::max(most, ahead());
  }

  // Another one, on which a launch has run.
  CUstream known_stream() const {
    CUstream const stream = Program::new_stream();
    Program::check(program_.launch(0, stream));
    Program::check(program_.synchronize(stream));
    return stream;
  }

  // Times are the program's; the simulated driver's are a twentieth.
  void launch_all(std::uint64_t count, std::uint32_t ms) {
    for (std::uint64_t i = 0; i < count; ++i) Program::check(program_.launch(i, program_.stream(), ms * 50));
  }

  static std::uint64_t predictions() {
    cudasched_counts counts{};
    EXPECT_EQ(cudasched_get_counts(&counts), 0);
    return counts.predictions;
  }

  // What the kernel that launch_all() launches is predicted to take.
  std::int64_t estimated_ns(std::uint32_t ms) const {
    std::uint64_t* values = program_.log() + 1;
    std::uint64_t* count = program_.log();
    std::uint64_t value = 0;
    std::uint32_t us = ms * 50;
    void* parameters[] = {&values, &count, &value, &us};
    const predict::Launch launch{.function = program_.timed_function(),
                                 .grid = {132, 1, 1},
                                 .block = {64, 1, 1},
                                 .dynamic_shared_bytes = 0,
                                 .parameters = parameters,
                                 .extra = nullptr};
    runtime::Sampler::Question question(launch, {});  // refers to it
    question.find_residency();
    return gate().estimate_ns(question.query);
  }

  HookedDriver& driver_ = HookedDriver::instance();
  Program program_;
  std::uint64_t before_ = state().best_effort_launches;
};

// The driver alone would take all of them.
TEST_F(GateTest, WithoutALatencyClientABoundedTimeIsInFlight) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  launch_all(300, 1);
  // 30, and more where the machine had stopped the device.
  EXPECT_LE(most_ahead(300), 100U);
  EXPECT_EQ(state().gated_launches, 0U);
  EXPECT_EQ(state().untracked_launches, 0U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 300U);
  EXPECT_TRUE(eventually([&] { return gate().in_flight_ns() == 0; }));
}

TEST_F(GateTest, TwoLaunchesMayAlwaysBeInFlight) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  launch_all(4, 80);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  launch_all(8, 80);
  const std::uint64_t most = most_ahead(12);
  EXPECT_GE(most, 2U);
  EXPECT_LE(most, 4U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

// A trainer that never synchronises was there first: what it has in flight is bounded and known, and none of it is
// untracked, then or later.
TEST_F(GateTest, AClientThatJoinsMeetsAShortBacklogAndAllOfItIsCounted) {
  std::jthread trainer([this](const std::stop_token& stop) {
    program_.use_on_this_thread();
    const InRegion region(CUDASCHED_BEST_EFFORT);
    for (std::uint64_t i = 0; i < Program::kLogCapacity && !stop.stop_requested(); ++i) {
      Program::check(program_.launch(i, program_.stream(), 50));
      while (i > submitted() + 300 && !stop.stop_requested()) std::this_thread::sleep_for(1ms);
    }
  });
  ASSERT_TRUE(eventually([&] { return submitted() >= 100; }));
  OtherClient active(/*active=*/true);
  ASSERT_TRUE(eventually(someone_waits));
  // As above; not the 300 that are there to be launched.
  EXPECT_LE(ahead(), 100U);
  EXPECT_TRUE(eventually([&] { return gate().in_flight_ns() == 0 && ahead() == 0; }));
  const OtherClient idle(/*active=*/false);
  const std::uint64_t before = submitted();
  active.kill();
  HookedDriver::instance().table().reap();
  EXPECT_LE(most_ahead(before + 100), 10U);
  EXPECT_EQ(state().untracked_launches, 0U);
  trainer.request_stop();
  trainer.join();
  engine().configure("policy", "open");
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

// Nothing is known of the kernel, which takes thousands of times longer than such kernels do. All 400 behind it used to
// be let go.
TEST_F(GateTest, AKernelPredictedFarTooShortLetsFewPass) {
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  launch_all(1, 40);
  for (std::uint64_t i = 1; i <= 400; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  EXPECT_LE(most_ahead(401), 20U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(state().untracked_launches, 0U);
}

// What is late on one stream may wait for another one's work: that goes at its pace, and so does, one launch for each
// 10 ms, what is before it in the program.
TEST_F(GateTest, WhatALateKernelMayWaitForGoes) {
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const CUstream other = known_stream();
  launch_all(1, 2'000);
  for (std::uint64_t i = 1; i <= 8; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  for (std::uint64_t i = 9; i <= 28; ++i) ASSERT_EQ(program_.launch(i, other), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(other), CUDA_SUCCESS);
  EXPECT_EQ(submitted(), 30U);
  EXPECT_LE(program_.ran(), 21U);  // the late kernel still runs
  EXPECT_GT(state().gate_exceptions, 0U);
  EXPECT_LE(state().gate_exceptions, 8U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 30U);
  EXPECT_EQ(state().untracked_launches, 0U);
}

// It is half a second long, which nobody would think, and the launch behind it is held meanwhile.
TEST_F(GateTest, AKernelThatRunsLateIsPredictedToTakeAtLeastAsLongWhileItRuns) {
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(0), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  launch_all(1, 500);
  for (std::uint64_t i = 1; i <= 40; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return estimated_ns(500) >= 40 * kNsPerMs || program_.ran() > 1; }));
  EXPECT_EQ(program_.ran(), 1U);
  EXPECT_LE(estimated_ns(500), 700 * kNsPerMs);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

// From when an exception has passed a launch for which it may have waited.
TEST_F(GateTest, AnExceptionEndsWhatIsLearnedOfTheLateKernel) {
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const CUstream other = known_stream();
  const std::uint64_t exceptions = state().gate_exceptions;
  launch_all(1, 600);
  for (std::uint64_t i = 1; i <= 8; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(program_.launch(9, other), CUDA_SUCCESS);
  ASSERT_TRUE(eventually([&] { return state().gate_exceptions > exceptions; }));
  const std::int64_t learned_ns = estimated_ns(600);
  ASSERT_EQ(program_.synchronize(other), CUDA_SUCCESS);
  for (std::uint64_t i = 10; i <= 20; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);  // look at it
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(program_.ran(), 2U);  // it still runs
  EXPECT_LT(estimated_ns(600), learned_ns + learned_ns / 2);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

// Nothing completes for 100 ms, and nothing else is queued that it may wait for.
TEST_F(GateTest, TheBackstopIsWarnedOfOnce) {
  const std::string path = driver_.run_directory() + "/log";
  log::set_file(path);
  const auto warnings = [&] {
    std::ifstream file(path);
    int count = 0;
    for (std::string line; std::getline(file, line);) count += line.find("was held for 100 ms") != line.npos ? 1 : 0;
    return count;
  };
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t exceptions = state().gate_exceptions;
  launch_all(1, 600);
  for (std::uint64_t i = 1; i <= 10; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return warnings() == 1; }));
  EXPECT_TRUE(eventually([&] { return state().gate_exceptions >= exceptions + 3; }));
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 11U);
  EXPECT_EQ(warnings(), 1);
  log::set_file("");
}

// A program in which each launch may overlap the one before it: no event used to go between them, so nothing was timed,
// and what was in flight was what had been predicted. All 60 were let go.
TEST_F(GateTest, LaunchesThatMayOverlapAreCountedAndTimedBesideALatencyClient) {
  const OtherClient idle(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t timed = predictions();
  for (std::uint64_t i = 0; i < 60; ++i) {
    ASSERT_EQ(program_.launch_overlapping(i, program_.stream(), 250), CUDA_SUCCESS);
  }
  EXPECT_LE(most_ahead(60), 20U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return gate().in_flight_ns() == 0; }));
  EXPECT_GE(predictions() - timed, 3U);
  EXPECT_EQ(state().untracked_launches, 0U);
}

// The launch call is between the events then, however long it takes: lazy loading, a host that is busy.
TEST_F(GateTest, OfALaunchThatTheGpuWaitedForTheCallIsNoPartOfWhatItTook) {
  const OtherClient idle(/*active=*/false);
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    launch_all(1, 1);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  std::uint64_t value = 1;
  std::uint64_t* values = program_.log() + 1;
  std::uint64_t* count = program_.log();
  void* parameters[] = {&values, &count, &value};
  queue::Call call({.function = program_.function(), .grid = {77, 1, 1}, .block = {64, 1, 1}, .parameters = parameters},
                   program_.stream());
  call.site.caller.context = program_.context();
  std::int64_t predicted_ns = 0;
  for (int i = 0; i < 4; ++i) {
    const runtime::Gate::Pass pass = gate().admit(call, runtime::hot().counters.shard(1));
    predicted_ns = pass.predicted_ns;
    if (i < 3) {
      ASSERT_NE(pass.start, nullptr);
      std::this_thread::sleep_for(200ms);
    }
    const CUresult launched = driver::table().cuLaunchKernel.legacy(program_.function(), 77, 1, 1, 64, 1, 1, 0,
                                                                    program_.stream(), parameters, nullptr);
    gate().submitted(pass, program_.stream(), launched);
    ASSERT_EQ(launched, CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
    ASSERT_TRUE(eventually([&] { return gate().in_flight_ns() == 0; }));
  }
  EXPECT_LT(predicted_ns, 100'000'000);
}

// The launcher thread is in relaxed capture mode for good.
TEST_F(GateTest, TheLauncherSetsTheCaptureModeForNoLaunch) {
  static std::atomic<int> exchanges{0};
  exchanges = 0;
  static auto* const real = driver::table().cuThreadExchangeStreamCaptureMode;
  const Replaced count(
      driver::table().cuThreadExchangeStreamCaptureMode, +[](CUstreamCaptureMode* mode) {
        char name[16]{};
        pthread_getname_np(pthread_self(), name, sizeof name);
        if (std::string_view(name) == "cudasched-queue") ++exchanges;
        return real(mode);
      });
  const InRegion region(CUDASCHED_BEST_EFFORT);
  launch_all(1, 1);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  const std::uint64_t offloaded = state().offloaded_launches;
  const int begun = exchanges;  // at the start of the thread
  launch_all(40, 1);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  {
    const OtherClient idle(/*active=*/false);
    launch_all(40, 1);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(state().offloaded_launches - offloaded, 80U);
  EXPECT_EQ(exchanges, begun);
}

TEST_F(GateTest, LaunchesThatMayOverlapAreBoundedWithoutALatencyClient) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (std::uint64_t i = 0; i < 120; ++i) {
    ASSERT_EQ(program_.launch_overlapping(i, program_.stream(), 500), CUDA_SUCCESS);
  }
  EXPECT_LE(most_ahead(120), 40U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(state().untracked_launches, 0U);
}

// More streams than the ledger has queues, deeper than it has markers.
TEST_F(GateTest, AnyNumberOfStreamsIsCounted) {
  const OtherClient active(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  std::vector<CUstream> streams;
  for (int i = 0; i < 100; ++i) streams.push_back(Program::new_stream());
  for (std::uint64_t round = 0; round < 5; ++round) {
    for (std::uint64_t i = 0; i < 100; ++i) {
      ASSERT_EQ(program_.launch(round * 100 + i, streams[i]), CUDA_SUCCESS);
    }
  }
  for (const CUstream stream : streams) ASSERT_EQ(program_.synchronize(stream), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 500U);
  EXPECT_EQ(state().untracked_launches, 0U);
}

}  // namespace
}  // namespace cudasched::test
