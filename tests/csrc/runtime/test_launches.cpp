// The way of a launch, over the simulated driver: who waits at the gate, for what, and what lets it go.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "driver/registry.hpp"
#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "python.hpp"
#include "runtime/engine.hpp"
#include "schedule/quiet.hpp"

namespace cudasched::test {
namespace {

class Launches : public ::testing::Test {
 protected:
  // A best-effort launch on a thread of its own.
  std::thread best_effort_launch(std::uint64_t value, std::atomic<bool>& launched) {
    return std::thread([this, value, &launched] {
      program_.use_on_this_thread();
      const InRegion region(CUDASCHED_BEST_EFFORT);
      Program::check(program_.launch(value));
      launched.store(true);
    });
  }

  static runtime::Engine& engine() { return runtime::engine(); }
  static runtime::Gate& gate() {
    runtime::Gate* found = nullptr;
    engine().for_each_device([&](runtime::Device& device) { found = &device.gate; });
    return *found;
  }

  HookedDriver& driver_ = HookedDriver::instance();
  Program program_;
};

TEST_F(Launches, NormalOnesPassAndAreCounted) {
  const std::uint64_t before = state().launches;
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 50U);
  EXPECT_EQ(state().launches - before, 50U);
}

TEST_F(Launches, HandlesThatFindNoPlaceAreCounted) {
  const std::uint64_t before = state().unknown_handles;
  for (std::uintptr_t handle = 1; handle <= HandleTable<4>::kMost + 3; ++handle) {
    driver::registry().made(reinterpret_cast<CUgraphExec>(handle * 64), {.identity = 1});
  }
  EXPECT_GE(state().unknown_handles - before, 3U);
  driver::registry().clear();
}

TEST_F(Launches, StreamsThatFindNoPlaceForTheirMarkAreCounted) {
  constexpr runtime::Origin kRegion = 5;
  const std::uint64_t before = state().unknown_handles;
  runtime::StreamMarks& marks = runtime::hot().marks;
  marks.entered(kRegion);
  for (std::uintptr_t handle = 1; handle <= 3 * runtime::StreamMarks::kSlots; ++handle) {
    auto* const stream = reinterpret_cast<CUstream>(handle * 64);
    marks.mark(runtime::StreamMarks::key(stream, nullptr), stream, nullptr, kRegion);
  }
  EXPECT_GT(state().unknown_handles, before);
  marks.left(kRegion);
  marks.sweep([](CUstream, CUcontext) { return true; });
  EXPECT_FALSE(marks.in_use());
}

TEST_F(Launches, FailedOnesAreNotCountedAndTheErrorIsTheDrivers) {
  const std::uint64_t before = state().launches;
  auto* const launch = call<decltype(cuLaunchKernel)>("cuLaunchKernel");
  EXPECT_NE(launch(nullptr, 1, 1, 1, 1, 1, 1, 0, program_.stream(), nullptr, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(state().launches, before);
}

TEST_F(Launches, BestEffortWaitsWhileALatencyRegionIsOpen) {
  std::atomic<bool> launched{false};
  std::thread other;
  {
    const InRegion region(CUDASCHED_LATENCY, 50);
    ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
    other = best_effort_launch(2, launched);
    ASSERT_TRUE(eventually(someone_waits));
    EXPECT_FALSE(launched.load());
    ASSERT_EQ(program_.launch(3), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  other.join();
  EXPECT_TRUE(launched.load());
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  ASSERT_EQ(program_.ran(), 3U);
  EXPECT_EQ(program_.value(0), 1U);
  EXPECT_EQ(program_.value(1), 3U);
  EXPECT_EQ(program_.value(2), 2U);
}

TEST_F(Launches, WithoutRegionsTheGateOpensWhenTheLatencyProgramSynchronises) {
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  std::atomic<bool> launched{false};
  ASSERT_EQ(program_.launch(1, program_.stream(), 100'000), CUDA_SUCCESS);  // two seconds
  std::thread other = best_effort_launch(2, launched);
  ASSERT_TRUE(eventually(someone_waits));
  EXPECT_FALSE(launched.load());
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  other.join();
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0), CUDASCHED_OK);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.value(0), 1U);
}

TEST_F(Launches, WorkThatNobodyWaitsForIsFoundCompleteByTheTicker) {
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return driver_.table().active() == 0; }));
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0), CUDASCHED_OK);
}

TEST_F(Launches, AnOpenRegionWithNothingOnTheGpuLapsesUntilItsNextLaunch) {
  const InRegion region(CUDASCHED_LATENCY);
  ASSERT_NE(driver_.table().active(), 0U);
  std::atomic<bool> launched{false};
  std::thread other = best_effort_launch(1, launched);
  other.join();
  EXPECT_EQ(driver_.table().active(), 0U);
  ASSERT_EQ(program_.launch(2), CUDA_SUCCESS);
  EXPECT_NE(driver_.table().active(), 0U);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

TEST_F(Launches, RegionsNestAndMayBeLeftInAnyOrder) {
  std::uint64_t outer = 0;
  std::uint64_t inner = 0;
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 0, 0, &outer), CUDASCHED_OK);
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 0, 5, &inner), CUDASCHED_OK);
  EXPECT_EQ(cudasched_region_exit(outer), CUDASCHED_OK);
  EXPECT_NE(driver_.table().active(), 0U);
  EXPECT_EQ(cudasched_region_exit(inner), CUDASCHED_OK);
  EXPECT_EQ(driver_.table().active(), 0U);
  EXPECT_EQ(cudasched_region_exit(inner), CUDASCHED_INTERNAL_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("left already"), std::string::npos);
}

TEST_F(Launches, ARegionsPriorityEndsWithItAndTheProgramsOwnMayChange) {
  std::uint64_t token = 0;
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 7, 0, &token), CUDASCHED_OK);
  const arbiter::Slot& client = driver_.table().slot(__builtin_ctzll(driver_.table().latency_clients()));
  EXPECT_EQ(client.priority, 7);
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 3, 0), CUDASCHED_OK);
  ASSERT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
  EXPECT_EQ(client.priority, 3);
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  EXPECT_EQ(client.priority, 0);
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0), CUDASCHED_OK);
}

TEST_F(Launches, AStepOfARequestKeepsTheDeadlineOfTheWhole) {
  std::uint64_t token = 0;
  const std::int64_t deadline = now_ns() - kNsPerMs;  // it may have passed
  ASSERT_EQ(cudasched_region_enter_until(CUDASCHED_LATENCY, 0, deadline, &token), CUDASCHED_OK);
  ASSERT_NE(driver_.table().latency_clients(), 0U);
  const arbiter::Slot& client = driver_.table().slot(__builtin_ctzll(driver_.table().latency_clients()));
  EXPECT_EQ(client.deadline_ns, deadline);
  EXPECT_EQ(client.expected_ns, 0);
  EXPECT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
  EXPECT_EQ(client.deadline_ns, 0);
}

TEST_F(Launches, ARegionIsLeftOnItsOwnThreadOnly) {
  std::uint64_t token = 0;
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_NORMAL, 0, 0, &token), CUDASCHED_OK);
  std::thread([&] { EXPECT_NE(cudasched_region_exit(token), CUDASCHED_OK); }).join();
  EXPECT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
}

TEST_F(Launches, ARegionThatMayMoveEndsOnAnotherThread) {
  std::uint64_t fixed = 0;
  std::uint64_t moving = 0;
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_NORMAL, 0, 0, &fixed), CUDASCHED_OK);
  ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 0, 5, &moving), CUDASCHED_OK);
  ASSERT_EQ(cudasched_region_may_move(moving), CUDASCHED_OK);
  const auto latency_launches = [] { return cudasched::runtime::hot().counters.launches(Class::kLatency); };
  const std::uint64_t before = latency_launches();
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  EXPECT_EQ(latency_launches(), before + 1);
  std::thread([&] {
    EXPECT_NE(cudasched_region_end_elsewhere(fixed), CUDASCHED_OK);
    EXPECT_EQ(cudasched_region_end_elsewhere(moving), CUDASCHED_OK);
    EXPECT_NE(cudasched_region_end_elsewhere(moving), CUDASCHED_OK);
  }).join();
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  EXPECT_EQ(latency_launches(), before + 1);
  EXPECT_EQ(cudasched_region_exit(fixed), CUDASCHED_OK);  // and leaves the other one
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(driver_.table().active(), 0U);
  EXPECT_EQ(cudasched::runtime::this_thread().depth, 0);
}

TEST_F(Launches, AThreadThatEndsLeavesItsRegions) {
  std::thread([&] {
    program_.use_on_this_thread();
    std::uint64_t token = 0;
    ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 0, 5, &token), CUDASCHED_OK);
    ASSERT_NE(driver_.table().active(), 0U);
  }).join();
  EXPECT_EQ(driver_.table().active(), 0U);
}

TEST_F(Launches, TheStreamsClassGoesBeforeTheThreadsRegion) {
  const CUstream stream = Program::new_stream();
  const auto key = reinterpret_cast<std::uintptr_t>(stream);
  ASSERT_EQ(cudasched_bind_stream(key, CUDASCHED_LATENCY), CUDASCHED_OK);
  const std::uint64_t before = state().latency_launches;
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    ASSERT_EQ(program_.launch(1, stream), CUDA_SUCCESS);
  }
  ASSERT_EQ(program_.synchronize(stream), CUDA_SUCCESS);
  EXPECT_EQ(state().latency_launches - before, 1U);
  // Destroying the stream forgets its class: the handle may come again for another stream.
  ASSERT_EQ(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream), CUDA_SUCCESS);
  ASSERT_EQ(cudasched_bind_stream(0, CUDASCHED_LATENCY), CUDASCHED_INTERNAL_ERROR);
}

TEST_F(Launches, TheClassByPriorityHoldsWhereNothingElseSaysOne) {
  const CUstream stream = Program::new_stream();
  const auto key = reinterpret_cast<std::uintptr_t>(stream);
  const auto is_latency = [&] {
    const std::uint64_t before = state().latency_launches;
    Program::check(program_.launch(1, stream));
    Program::check(program_.synchronize(stream));
    return state().latency_launches != before;
  };
  cudasched::runtime::engine().class_by_priority(key, Class::kLatency);
  EXPECT_TRUE(is_latency());
  {
    const InRegion region(CUDASCHED_NORMAL);
    EXPECT_FALSE(is_latency());
  }
  ASSERT_EQ(cudasched_bind_stream(key, CUDASCHED_NORMAL), CUDASCHED_OK);
  EXPECT_FALSE(is_latency());
  ASSERT_EQ(cudasched_unbind_stream(key), CUDASCHED_OK);
  EXPECT_TRUE(is_latency());
  ASSERT_EQ(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream), CUDA_SUCCESS);
  EXPECT_TRUE(cudasched::runtime::hot().by_priority.empty());
}

TEST_F(Launches, PrioritiesSayNoClassUnlessTheyAreAskedTo) {
  CUstream stream = nullptr;
  Program::check(call<decltype(cuStreamCreateWithPriority)>("cuStreamCreateWithPriority")(&stream, 0, 0));
  EXPECT_TRUE(cudasched::runtime::hot().by_priority.empty());
  Program::check(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream));
}

TEST_F(Launches, AnotherProcessHoldsTheGateAndItsDeathOpensIt) {
  OtherClient other(/*active=*/true);
  std::atomic<bool> launched{false};
  std::thread thread = best_effort_launch(1, launched);
  ASSERT_TRUE(eventually(someone_waits));
  EXPECT_FALSE(launched.load());
  other.kill();
  thread.join();
  EXPECT_EQ(driver_.table().active(), 0U);
}

TEST_F(Launches, AStoppedProcessHoldsTheGateNoLongerThanItsHeartbeatIsFresh) {
  OtherClient other(/*active=*/true);
  std::atomic<bool> launched{false};
  std::thread thread = best_effort_launch(1, launched);
  ASSERT_TRUE(eventually(someone_waits));
  other.stop();
  thread.join();
  EXPECT_TRUE(driver_.table().alive(other.slot()));
  EXPECT_NE(driver_.table().active(), 0U);  // still its word, only not heard
}

TEST_F(Launches, BesideAnIdleLatencyClientOnlyALittleIsInFlight) {
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t gated_before = state().gated_launches;
  const std::uint64_t submitted_before = state().best_effort_launches;
  for (std::uint64_t i = 0; i < 150; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  std::uint64_t most_ahead = 0;
  for (std::uint64_t submitted = 0; submitted < 150;) {
    submitted = state().best_effort_launches - submitted_before;
    const std::uint64_t ran = program_.ran();
    if (submitted >= 30 && submitted > ran) most_ahead = std::max(most_ahead, submitted - ran);  // its time is known
    std::this_thread::yield();
  }
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(state().gated_launches - gated_before, 150U);
  EXPECT_GT(state().gate_waits, 0U);
  // Without the gate all 150 would be: the host is that much faster. With it, two or three, and some more where the
  // machine is so busy that kernels seem short.
  EXPECT_LE(most_ahead, 50U);
  for (std::uint64_t i = 0; i < 150; ++i) ASSERT_EQ(program_.value(i), i);
}

TEST_F(Launches, WithoutLatencyClientsThereIsNoGate) {
  ASSERT_TRUE(eventually([&] {
    // This process's own latency client counts; other tests of this process may have made one.
    return driver_.table().active() == 0;
  }));
  if (driver_.table().latency_clients() != 0) GTEST_SKIP() << "a latency client of an earlier test is in this process";
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t before = state().gated_launches;
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  EXPECT_EQ(state().gated_launches, before);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
}

TEST_F(Launches, ARefusedGatedLaunchGivesItsPlaceBack) {
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  auto* const launch = call<decltype(cuLaunchKernel)>("cuLaunchKernel");
  for (int i = 0; i < 500; ++i) {
    ASSERT_NE(launch(nullptr, 1, 1, 1, 1, 1, 1, 0, program_.stream(), nullptr, nullptr), CUDA_SUCCESS);
  }
  const std::uint64_t untracked = state().untracked_launches;
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 20U);
  EXPECT_EQ(state().untracked_launches, untracked);
}

TEST_F(Launches, CapturingStreamsNeverWaitAndAreNotCounted) {
  const OtherClient other(/*active=*/true);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t before = state().launches;
  auto* const begin = call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2");
  auto* const end = call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture");
  ASSERT_EQ(begin(program_.stream(), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  ASSERT_EQ(end(program_.stream(), &graph), CUDA_SUCCESS);
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(state().launches, before);
  // Nothing of ours is in the graph.
  std::size_t nodes = 0;
  ASSERT_EQ(call<CUresult(CUgraph, CUgraphNode*, std::size_t*)>("cuGraphGetNodes")(graph, nullptr, &nodes),
            CUDA_SUCCESS);
  EXPECT_EQ(nodes, 10U);
}

// Found: up to four times, at the door, at the gate and once more when it was learned that the launch had succeeded.
TEST_F(Launches, EachAsksTheDriverOnceWhetherItsStreamCaptures) {
  static decltype(cuStreamIsCapturing)* ask = nullptr;
  static thread_local int asked = 0;
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(0), CUDA_SUCCESS);  // the queue has started
  ask = std::exchange(driver::table().cuStreamIsCapturing, [](CUstream stream, CUstreamCaptureStatus* status) {
    ++asked;
    return ask(stream, status);
  });
  const CUstream stream = Program::new_stream();
  for (std::uint64_t i = 1; i <= 4; ++i) {
    asked = 0;
    EXPECT_EQ(program_.launch(i, stream, 1), CUDA_SUCCESS);  // the first goes directly
    // The first that is deferred asks whose the stream is, too, which may be asked of none that captures.
    EXPECT_EQ(asked, i == 2 ? 2 : 1) << i;
  }
  driver::table().cuStreamIsCapturing = ask;
  ASSERT_EQ(program_.synchronize(stream), CUDA_SUCCESS);
}

// A capture in global mode elsewhere forbids other threads' queries; ours must not break it.
TEST_F(Launches, GatedLaunchesBesideACaptureLeaveItValid) {
  const OtherClient other(/*active=*/false);
  auto* const begin = call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2");
  auto* const end = call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture");
  const CUstream captured = Program::new_stream();
  ASSERT_EQ(begin(captured, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  std::thread([&] {
    program_.use_on_this_thread();
    const InRegion region(CUDASCHED_BEST_EFFORT);
    for (std::uint64_t i = 0; i < 40; ++i) Program::check(program_.launch(i));
    for (unsigned i = 0; i < 40; ++i) Program::check(program_.launch_directly(i));
  }).join();
  std::thread([&] {
    program_.use_on_this_thread();
    const InRegion region(CUDASCHED_LATENCY);
    for (std::uint64_t i = 0; i < 40; ++i) Program::check(program_.launch(i, Program::new_stream()));
  }).join();
  std::this_thread::sleep_for(50ms);  // some ticks
  ASSERT_EQ(program_.launch(7, captured), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  EXPECT_EQ(end(captured, &graph), CUDA_SUCCESS);
  EXPECT_NE(graph, nullptr);
}

TEST_F(Launches, AThreadThatHoldsTheGilNeverWaitsBesideALatencyRegionOfItsOwnProcess) {
  const InRegion latency(CUDASCHED_LATENCY);
  ASSERT_EQ(program_.launch(1, program_.stream(), 100'000), CUDA_SUCCESS);
  std::thread([&] {
    program_.use_on_this_thread();
    gil_held() = true;
    const InRegion region(CUDASCHED_BEST_EFFORT);
    Program::check(program_.launch(2, Program::new_stream()));
    gil_held() = false;
  }).join();
  EXPECT_NE(driver_.table().active(), 0U);
}

TEST_F(Launches, AResetContextTakesItsEventsWithItAndTheNextOneWorks) {
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(call<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(0), CUDA_SUCCESS);
  const Program again;
  const std::uint64_t untracked = state().untracked_launches;
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(again.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(again.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(again.ran(), 10U);
  EXPECT_EQ(state().untracked_launches, untracked);
}

// ThreadSanitizer's own allocator may be locked by another thread at the fork: then the child cannot exit.
#if !defined(__SANITIZE_THREAD__)
TEST_F(Launches, AForkedChildThatExitsLeavesTheParentsClientsAlone) {
  const InRegion region(CUDASCHED_LATENCY);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  const std::uint64_t clients = driver_.table().latency_clients();
  ASSERT_NE(clients, 0U);
  const pid_t child = fork();
  if (child == 0) {
    const bool off = state().scheduling == 0 && state().launches == 0;
    exit(off ? 0 : 1);  // with its exit handlers
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(driver_.table().latency_clients(), clients);
  EXPECT_EQ(program_.launch(2), CUDA_SUCCESS);
  EXPECT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 2U);
}

TEST_F(Launches, AChildThatIsForkedWhileRegionsMoveHasRegionsThatMove) {
  const auto move = [] {
    std::uint64_t token = 0;
    cudasched_region_enter(CUDASCHED_NORMAL, 0, 0, &token);
    cudasched_region_may_move(token);
    return cudasched_region_exit(token);
  };
  const std::jthread moves([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) move();
  });
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(move());
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, CUDASCHED_OK);
  }
}
#endif

TEST_F(Launches, EveryRouteOfGetProcAddressGivesOurFunctions) {
  auto* const get =
      call<CUresult(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*)>("cuGetProcAddress_v2");
  const auto found = [&](const char* name, int version, cuuint64_t flags) {
    void* function = nullptr;
    EXPECT_EQ(get(name, &function, version, flags, nullptr), CUDA_SUCCESS) << name;
    return function;
  };
  const auto ours = [&](const char* name) { return reinterpret_cast<void*>(call<void()>(name)); };
  EXPECT_EQ(found("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_DEFAULT), ours("cuLaunchKernel"));
  EXPECT_EQ(found("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_LEGACY_STREAM), ours("cuLaunchKernel"));
  EXPECT_EQ(found("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM), ours("cuLaunchKernel_ptsz"));
  EXPECT_EQ(found("cuLaunchKernelEx", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM),
            ours("cuLaunchKernelEx_ptsz"));
  EXPECT_EQ(found("cuGraphLaunch", 12000, 0), ours("cuGraphLaunch"));
  EXPECT_EQ(found("cuGetProcAddress", 12000, 0), ours("cuGetProcAddress_v2"));
  EXPECT_EQ(found("cuGetProcAddress", 11030, 0), ours("cuGetProcAddress"));
}

// The waiting bit is the process's: while one of its threads waits, wake-ups must find it.
TEST_F(Launches, OneThreadThatLeavesTheGateDoesNotTakeTheOthersWakeUpAway) {
  const std::uint64_t gated = state().gated_launches;
  std::atomic<bool> launched{false};
  std::atomic<std::atomic<bool>*> gil_of_first{nullptr};
  std::thread first;
  std::thread second;
  {
    const InRegion latency(CUDASCHED_LATENCY);
    ASSERT_EQ(program_.launch(1, program_.stream(), 100'000), CUDA_SUCCESS);
    first = std::thread([&] {
      program_.use_on_this_thread();
      gil_of_first.store(&gil_held());
      const InRegion region(CUDASCHED_BEST_EFFORT);
      Program::check(program_.launch(2, Program::new_stream()));
    });
    ASSERT_TRUE(eventually([&] { return gil_of_first.load() != nullptr && someone_waits(); }));
    second = best_effort_launch(3, launched);
    ASSERT_TRUE(eventually([&] { return state().gated_launches == gated + 2; })) << "both are at the gate";
    gil_of_first.load()->store(true);  // which never waits in a process with a latency client
    first.join();
    EXPECT_FALSE(launched.load());
    EXPECT_TRUE(eventually([&] { return launched.load() || someone_waits(); }));
    EXPECT_FALSE(launched.load());
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  second.join();
}

TEST_F(Launches, OneThatIsRefusedLeavesTheClientIdle) {
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  queue::Call call({}, program_.stream());
  runtime::find_site(call.stream, nullptr, call.site);
  const runtime::Ticket ticket = runtime::begin_launch(call);
  EXPECT_NE(driver_.table().active(), 0U);
  runtime::end_launch(ticket, call, CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(eventually([&] { return driver_.table().active() == 0; }));
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0), CUDASCHED_OK);
}

// The per-thread default stream of the thread that synchronises says nothing of another thread's.
TEST_F(Launches, AnotherThreadsDefaultStreamIsNotTakenForTheLaunchingThreads) {
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  ASSERT_EQ(program_.launch(1, CU_STREAM_PER_THREAD, 100'000), CUDA_SUCCESS);
  std::thread([&] {
    program_.use_on_this_thread();
    Program::check(program_.synchronize(Program::new_stream()));
    EXPECT_NE(driver_.table().active(), 0U);
  }).join();
  ASSERT_EQ(program_.synchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
  EXPECT_EQ(driver_.table().active(), 0U);
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0), CUDASCHED_OK);
}

TEST_F(Launches, AThreadInALatencyRegionNeverWaitsWhateverItLaunches) {
  const InRegion latency(CUDASCHED_LATENCY);
  ASSERT_EQ(program_.launch(1, program_.stream(), 100'000), CUDA_SUCCESS);
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    const std::uint64_t waits = state().gate_waits;
    ASSERT_EQ(program_.launch(2, Program::new_stream()), CUDA_SUCCESS);
    EXPECT_EQ(state().gate_waits, waits);
  }
}

TEST_F(Launches, ABitThatNoLatencyClientSetHoldsNobody) {
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  auto& layout = driver_.table().layout();
  const std::uint64_t damaged = layout.best_effort.load();
  ASSERT_NE(damaged, 0U);
  layout.active.fetch_or(damaged);
  std::atomic<bool> launched{false};
  std::thread thread = best_effort_launch(2, launched);
  EXPECT_TRUE(eventually([&] { return launched.load(); }));
  layout.active.fetch_and(~damaged);
  thread.join();
}

TEST_F(Launches, AnEndThatEndsNoCaptureIsNotTakenForOne) {
  auto* const begin = call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2");
  auto* const end = call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture");
  ASSERT_EQ(begin(program_.stream(), CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  EXPECT_NE(end(Program::new_stream(), &graph), CUDA_SUCCESS);
  EXPECT_EQ(runtime::hot().captures.load(), 1);
  EXPECT_EQ(end(program_.stream(), &graph), CUDA_SUCCESS);
  EXPECT_EQ(runtime::hot().captures.load(), 0);
}

namespace events {
std::atomic<int> alive{0};
decltype(cuEventCreate)* real_create = nullptr;
decltype(cuEventDestroy)* real_destroy = nullptr;
CUresult create(CUevent* event, unsigned flags) {
  const CUresult status = real_create(event, flags);
  if (status == CUDA_SUCCESS) alive.fetch_add(1);
  return status;
}
CUresult destroy(CUevent event) {
  alive.fetch_sub(1);
  return real_destroy(event);
}
}  // namespace events

// Some libraries retain and release the primary context all the time; it lives on, and so would the events.
TEST_F(Launches, AReleasedPrimaryContextThatLivesOnKeepsNoEventsOfOurs) {
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  events::real_create = std::exchange(driver::table().cuEventCreate, &events::create);
  events::real_destroy = std::exchange(driver::table().cuEventDestroy, &events::destroy);
  int after_one = 0;
  for (std::uint64_t round = 0; round < 4; ++round) {
    const Program again;  // retains
    ASSERT_EQ(again.launch(round), CUDA_SUCCESS);
    if (round == 0) after_one = events::alive.load();
    ASSERT_EQ(call<CUresult(CUdevice)>("cuDevicePrimaryCtxRelease_v2")(0), CUDA_SUCCESS);
  }
  EXPECT_LE(events::alive.load(), after_one);
  driver::table().cuEventCreate = events::real_create;
  driver::table().cuEventDestroy = events::real_destroy;
}

// Regions come and go on one thread while another finds the client idle again and again: in a region it is active.
TEST_F(Launches, InARegionTheClientIsActiveHoweverOftenOthersFindItIdle) {
  std::atomic<bool> done{false};
  const CUstream idle = Program::new_stream();
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      program_.use_on_this_thread();
      while (!done.load()) Program::check(program_.synchronize(idle));
    });
  }
  auto& table = driver_.table();
  for (int i = 0; i < 3'000; ++i) {
    const InRegion region(CUDASCHED_LATENCY);
    // By the time it has been looked at so often, nobody is half-way through saying otherwise.
    bool active = false;
    for (int look = 0; look < 50 && !active; ++look) {
      active = table.active() != 0;
      if (!active) std::this_thread::sleep_for(1ms);
    }
    EXPECT_TRUE(active) << i;
    if (!active) break;
  }
  done.store(true);
  for (std::thread& thread : others) thread.join();
  EXPECT_TRUE(eventually([&] { return table.active() == 0; }));
}

// ---- policies ------------------------------------------------------------------------------------------------------

TEST_F(Launches, APolicyThatReturnsNonsenseIsRefusedAndEveryLaunchGoes) {
  const OtherClient other(/*active=*/true);
  engine().use_policy({[](const schedule::Snapshot&, void*) noexcept {
                         return schedule::Decision{static_cast<schedule::Answer>(42), 0};
                       },
                       nullptr});
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(program_.launch(i), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return gate().refused_policy() == "its answer does not exist"; }));
  EXPECT_NE(driver_.table().active(), 0U);
  // What is configured later is heard again.
  engine().configure("policy", "strict");
  EXPECT_EQ(gate().refused_policy(), "");
  std::atomic<bool> launched{false};
  std::thread waits = best_effort_launch(20, launched);
  ASSERT_TRUE(eventually(someone_waits));
  engine().configure("policy", "open");
  waits.join();
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(program_.ran(), 21U);
  engine().configure("policy", "strict");
}

TEST_F(Launches, APolicyThatNeverLetsGoIsRefusedToo) {
  const OtherClient other(/*active=*/false);
  engine().use_policy({[](const schedule::Snapshot&, void*) noexcept {
                         return schedule::Decision{schedule::Answer::kWaitForTime, kNsPerMs};
                       },
                       nullptr});
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return gate().refused_policy() == "it held a launch for over a second"; }));
  engine().configure("policy", "strict");
}

TEST_F(Launches, APolicyThatSleepsIsRefusedTheSecondTime) {
  const OtherClient other(/*active=*/false);
  const auto sleeps = [](const cudasched_snapshot*, void*, std::int64_t*) -> std::int32_t {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return CUDASCHED_SUBMIT;
  };
  ASSERT_EQ(cudasched_use_policy(sleeps, nullptr), CUDASCHED_OK);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  EXPECT_EQ(gate().refused_policy(), "");  // a busy machine may have taken its core away
  ASSERT_EQ(program_.launch(2), CUDA_SUCCESS);
  EXPECT_TRUE(eventually(
      [] { return gate().refused_policy() == "it sleeps or computes for over a millisecond before it answers"; }));
  ASSERT_EQ(program_.launch(3), CUDA_SUCCESS);
  engine().configure("policy", "strict");
}

TEST_F(Launches, APolicyThatComputesIsRefusedTheSecondTime) {
  const OtherClient other(/*active=*/false);
  const auto computes = [](const cudasched_snapshot*, void*, std::int64_t*) -> std::int32_t {
    timespec before{};
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    do {
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((now.tv_sec - before.tv_sec) * kNsPerSecond + now.tv_nsec - before.tv_nsec < 2 * kNsPerMs);
    return CUDASCHED_SUBMIT;
  };
  ASSERT_EQ(cudasched_use_policy(computes, nullptr), CUDASCHED_OK);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
  ASSERT_EQ(program_.launch(2), CUDA_SUCCESS);
  EXPECT_TRUE(eventually(
      [] { return gate().refused_policy() == "it sleeps or computes for over a millisecond before it answers"; }));
  engine().configure("policy", "strict");
}

TEST_F(Launches, APolicyThatDoesNotReturnIsNamedAndTheProcessLives) {
  const OtherClient other(/*active=*/false);
  std::atomic<bool> returns{false};
  const auto hangs = [](const cudasched_snapshot*, void* may_return, std::int64_t*) -> std::int32_t {
    while (!static_cast<std::atomic<bool>*>(may_return)->load()) std::this_thread::yield();
    return CUDASCHED_SUBMIT;
  };
  ASSERT_EQ(cudasched_use_policy(hangs, &returns), CUDASCHED_OK);
  std::atomic<bool> launched{false};
  std::thread waits = best_effort_launch(1, launched);
  const arbiter::Slot* client = nullptr;
  const auto find_client = [&] {
    for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
      const arbiter::Slot& entry = driver_.table().slot(slot);
      if (entry.occupied == 1 && entry.pid == getpid() &&
          entry.client_class == static_cast<std::uint32_t>(Class::kBestEffort)) {
        client = &entry;
      }
    }
    return client != nullptr;
  };
  ASSERT_TRUE(eventually(find_client));
  EXPECT_TRUE(eventually([&] { return client->policy_since_ns != 0; }));
  const std::int64_t beat = client->heartbeat_ns;
  EXPECT_TRUE(eventually([&] { return client->heartbeat_ns != beat; }));  // the ticker does not wait for the policy
  EXPECT_FALSE(launched);
  returns = true;
  waits.join();
  EXPECT_TRUE(eventually([&] { return client->policy_since_ns == 0; }));
  engine().configure("policy", "strict");
}

TEST_F(Launches, APolicyOfTheUsersDecidesAndOtherSettingsLeaveItInPlace) {
  const OtherClient other(/*active=*/true);
  std::atomic<int> asked{0};
  engine().use_policy({[](const schedule::Snapshot& seen, void* count) noexcept {
                         if (seen.latency_active) static_cast<std::atomic<int>*>(count)->fetch_add(1);
                         return schedule::Decision{};
                       },
                       &asked});
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    ASSERT_EQ(program_.launch(1), CUDA_SUCCESS);
    engine().configure("lead_us", "33");
    EXPECT_EQ(gate().lead_ns(), 33'000);
    ASSERT_EQ(program_.launch(2), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(asked.load(), 2);
  EXPECT_THROW(engine().configure("lead_us", "soon"), ConfigError);
  EXPECT_THROW(engine().configure("turn_ms", "2"), ConfigError);  // decided by the first call
  EXPECT_THROW(engine().configure("lead_ms", "2"), ConfigError);
  EXPECT_EQ(gate().lead_ns(), 33'000);
  engine().configure("lead_us", "auto");
  engine().configure("policy", "strict");
}

TEST_F(Launches, TheLeadIsFoundOnLineWithinItsBounds) {
  const OtherClient other(/*active=*/false);
  engine().configure("lead_us", "auto");
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(0), CUDA_SUCCESS);
  const std::int64_t first = gate().lead_ns();
  std::uint64_t next = 1;
  EXPECT_TRUE(eventually([&] {
    for (int i = 0; i < 10; ++i) Program::check(program_.launch(next++, program_.stream(), 20));
    const std::int64_t lead = gate().lead_ns();
    EXPECT_TRUE(lead >= 10'000 && lead <= 40'000) << lead;
    return lead != first;
  }));
  engine().configure("lead_us", "50");
  for (int i = 0; i < 50; ++i) ASSERT_EQ(program_.launch(next++, program_.stream(), 20), CUDA_SUCCESS);
  ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(gate().lead_ns(), 50'000);
  engine().configure("lead_us", "auto");
}

// A program that waits for its work and then pauses has a GPU without work, and no lead helps.
TEST_F(Launches, PausesOfTheProgramDoNotRaiseTheLead) {
  const OtherClient other(/*active=*/false);
  engine().configure("lead_us", "auto");
  const InRegion region(CUDASCHED_BEST_EFFORT);
  ASSERT_EQ(program_.launch(0), CUDA_SUCCESS);
  const std::uint64_t waits = state().gate_waits;
  std::uint64_t next = 1;
  for (int step = 0; step < 40; ++step) {
    // The second one is held by the first, so that the lead may be taken for what the GPU runs dry of next.
    ASSERT_EQ(program_.launch(next++, program_.stream(), 20), CUDA_SUCCESS);
    ASSERT_EQ(program_.launch(next++, program_.stream(), 20), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
    const std::int64_t before = gate().lead_ns();
    std::this_thread::sleep_for(2ms);
    ASSERT_EQ(program_.launch(next++, program_.stream(), 20), CUDA_SUCCESS);
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
    EXPECT_LE(gate().lead_ns(), before);
  }
  EXPECT_GT(state().gate_waits, waits);
}

TEST_F(Launches, ALatencyRegionTakesTheHintOver) {
  ASSERT_EQ(cudasched_expect(1000), CUDASCHED_OK);
  const int slot = __builtin_ctzll(driver_.table().latency_clients());
  EXPECT_NE(driver_.table().slot(slot).hint_until_ns.load(), 0);
  { const InRegion region(CUDASCHED_LATENCY); }
  EXPECT_EQ(driver_.table().slot(slot).hint_until_ns.load(), 0);
  EXPECT_EQ(cudasched_expect(0), CUDASCHED_CONFIG_ERROR);
  EXPECT_EQ(cudasched_expect(1001), CUDASCHED_CONFIG_ERROR);
}

TEST_F(Launches, AHintDiesWithTheClientThatGaveIt) {
  OtherClient other(/*active=*/false);
  // Said anew without end, so that only the client's death ends it.
  std::atomic<bool> done{false};
  arbiter::Slot& slot = driver_.table().slot(other.slot());
  slot.hint_until_ns.store(now_ns() + kNsPerSecond);
  std::thread expects([&] {
    while (!done.load()) {
      slot.hint_until_ns.store(now_ns() + kNsPerSecond);
      std::this_thread::sleep_for(5ms);
    }
  });
  const std::uint64_t gated = state().gated_launches;
  std::atomic<bool> launched{false};
  std::thread thread = best_effort_launch(1, launched);
  EXPECT_TRUE(eventually([&] { return state().gated_launches > gated; }));
  std::this_thread::sleep_for(50ms);  // so that it has seen the hint; if it has not yet, this test only sees less
  EXPECT_FALSE(launched.load());
  other.kill();
  thread.join();
  done.store(true);
  expects.join();
}

// A client that times its kernels; no latency client is there.
TEST_F(Launches, BestEffortPausesForAClientThatMeasures) {
  {
    std::atomic<bool> launched{false};
    best_effort_launch(1, launched).join();  // so that the gate is there
    ASSERT_EQ(program_.synchronize(), CUDA_SUCCESS);
  }
  arbiter::ClientInfo tuner;
  tuner.client_class = Class::kBestEffort;
  const int place = driver_.table().claim(tuner);
  arbiter::Slot& slot = driver_.table().slot(place);
  ASSERT_TRUE(eventually([&] {
    slot.hint_until_ns.store(now_ns());
    return gate().beside_latency();
  }));
  std::atomic<bool> done{false};
  std::atomic<bool> paused{false};
  std::atomic<bool> lapsed{false};  // this thread got no processor for the length of a pause
  std::thread pauses([&] {
    while (!done.load()) {
      const std::int64_t now = now_ns();
      if (slot.hint_until_ns.exchange(now + schedule::kLongestPauseNs) < now && paused.exchange(true)) lapsed = true;
      std::this_thread::sleep_for(1ms);
    }
  });
  ASSERT_TRUE(eventually([&] { return paused.load(); }));
  const std::uint64_t gated = state().gated_launches;
  std::atomic<bool> launched{false};
  std::thread thread = best_effort_launch(2, launched);
  EXPECT_TRUE(eventually([&] { return state().gated_launches > gated; }));
  std::this_thread::sleep_for(100ms);  // longer than any pause that is not said anew
  const std::uint64_t ran = program_.ran();
  done.store(true);
  pauses.join();
  thread.join();
  EXPECT_TRUE(eventually([&] { return program_.ran() == 2; }));  // the last pause ends by itself
  driver_.table().release(place);
  EXPECT_TRUE(eventually([&] { return !gate().beside_latency(); }));
  if (lapsed.load()) GTEST_SKIP() << "the machine was too busy";
  EXPECT_EQ(ran, 1U);
}

TEST_F(Launches, AMeasuringClientLearnsWhatOthersDo) {
  const auto measure = [](double ms) {
    cudasched_measuring found{};
    EXPECT_EQ(cudasched_measure(ms, &found), CUDASCHED_OK);
    return found;
  };
  measure(0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(measure(50).wait_ns, 0);  // nobody is there to pause
    EXPECT_EQ(measure(-1).busy_ns, 0);
  }
  arbiter::ClientInfo other;
  other.client_class = Class::kBestEffort;
  const int place = driver_.table().claim(other);
  arbiter::Slot& slot = driver_.table().slot(place);
  slot.in_flight_until_ns.store(INT64_MAX);
  EXPECT_EQ(measure(-1).busy_ns, kNsPerSecond);
  slot.in_flight_until_ns.store(INT64_MIN);
  EXPECT_EQ(measure(-1).busy_ns, 0);
  // A pause of 50 ms, and as much time behind it, however slow this machine is.
  EXPECT_TRUE(eventually([&] { return measure(50).wait_ns == 0 && measure(50).wait_ns > 0; }));
  // While another client measures, a pause begins neither in its pause nor soon after it.
  slot.hint_until_ns.store(now_ns());
  EXPECT_GT(measure(50).wait_ns, 0);
  EXPECT_FALSE(measure(-1).latency_active);
  {
    const InRegion region(CUDASCHED_LATENCY);
    EXPECT_TRUE(measure(-1).latency_active);
    EXPECT_GT(measure(-1).latency_since_ns, 0);
  }
  driver_.table().release(place);
  cudasched_measuring found{};
  EXPECT_EQ(cudasched_measure(51, &found), CUDASCHED_CONFIG_ERROR);
  EXPECT_EQ(cudasched_measure(std::nan(""), &found), CUDASCHED_CONFIG_ERROR);
}

// Many threads do all of it at once. What each stream ran must be what was launched on it, in order, once.
TEST_F(Launches, RandomProgramsKeepTheirOrderAndEnd) {
  constexpr int kThreads = 4;
  constexpr std::uint64_t kLaunches = 150;
  std::vector<Program> programs(kThreads);
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      const Program& program = programs[static_cast<std::size_t>(index)];
      program.use_on_this_thread();
      std::uint64_t next = 0;
      while (next < kLaunches) {
        const InRegion region(static_cast<cudasched_class>(random() % 3), random() % 2 == 0 ? 0.0 : 5.0);
        const std::uint64_t burst = std::min<std::uint64_t>(kLaunches - next, random() % 12 + 1);
        for (std::uint64_t i = 0; i < burst; ++i) Program::check(program.launch(next++));
        if (random() % 3 == 0) Program::check(program.synchronize());
        if (random() % 5 == 0) {
          const CUstream brief = Program::new_stream();
          call<CUresult(CUstream)>("cuStreamQuery")(brief);
          Program::check(call<CUresult(CUstream)>("cuStreamDestroy_v2")(brief));
        }
      }
      Program::check(program.synchronize());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Program& program : programs) {
    ASSERT_EQ(program.ran(), kLaunches);
    for (std::uint64_t i = 0; i < kLaunches; ++i) ASSERT_EQ(program.value(i), i);
  }
  EXPECT_TRUE(eventually([&] { return driver_.table().active() == 0; }));
}

}  // namespace
}  // namespace cudasched::test
