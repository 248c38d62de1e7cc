// The C++ face, over the engine and the simulated driver. There is one engine a process: tests that need a program
// which has not made its first CUDA call are a process of their own (EXPECT_EXIT).
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>

#include "cudasched/scheduler.hpp"
#include "gpu.hpp"
#include "private_directory.hpp"

namespace cudasched::test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A compiled program has these sizes in it, on x86-64 and arm64 alike: another size is another boundary. Counts grow:
// arbiter/table.hpp has their size.
static_assert(sizeof(cudasched_override) == 16 && sizeof(cudasched_ahead) == 16 && sizeof(cudasched_snapshot) == 128);
static_assert(sizeof(cudasched_state) == 1'056 && sizeof(cudasched_client) == 352);
static_assert(sizeof(cudasched_collected) == 4'112 && sizeof(cudasched_traced) == 4'120);

// Simulated devices, tables and what the predictor learned, of this process alone and those that it starts; removed at
// its end.
class PrivateMachine : public ::testing::Environment {
 public:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    if (const char* const parents = std::getenv(kVariable)) {
      directory_ = parents;
      return;
    }
    directory_ = made_.emplace().path();
    setenv(kVariable, directory_.c_str(), 1);
    setenv("CUDASCHED_DRIVER", CUDASCHED_SIMULATED_DRIVER, 1);
    setenv("CUDASCHED_SIM_DIR", (directory_ / "simulated").c_str(), 1);
    setenv("CUDASCHED_RUN_DIR", (directory_ / "run").c_str(), 1);
    setenv("CUDASCHED_CACHE_DIR", "off", 1);
    // A latency region holds best effort back until it is left, however slow the machine.
    setenv("CUDASCHED_MAX_IDLE_HOLD_MS", "3600000", 1);
    setenv("CUDASCHED_STALE_HEARTBEAT_MS", "60000", 1);
  }
  void TearDown() override { made_.reset(); }
  const std::filesystem::path& directory() const { return directory_; }

 private:
  static constexpr const char* kVariable = "CUDASCHED_SCHEDULER_TEST_DIRECTORY";
  std::filesystem::path directory_;
  std::optional<PrivateDirectory> made_;  // empty in a process that a test starts: it has its parent's
};

auto* const machine =
    static_cast<PrivateMachine*>(::testing::AddGlobalTestEnvironment(new PrivateMachine));  // gtest owns it

// A program: cudasched first, then the GPU, once a process.
struct Program {
  Scheduler scheduler = Scheduler::create({.policy = Policy::kStrict});
  Gpu gpu;
  Gpu::Stream stream = gpu.new_stream();

  static Program& instance() {
    static Program program;
    return program;
  }

  // Launches in a best-effort region of another thread, and waits there until the kernel has run.
  void run_best_effort() {
    std::thread([this] {
      gpu.use();
      const Region region(Class::kBestEffort);
      const Gpu::Stream own = gpu.new_stream();
      gpu.launch(own, 20us);
      gpu.synchronize(own);
    }).join();
  }
};

class SchedulerTest : public ::testing::Test {
 protected:
  Program& program = Program::instance();
  Scheduler& scheduler = program.scheduler;
};

// What the example has no use for, looked up as it does.
template <typename Signature, typename... Arguments>
int driver_call(const char* name, Arguments... arguments) {
  void* const found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
  return reinterpret_cast<Signature*>(found)(arguments...);
}

// Ends a process of its own: 0 if `body` throws `Kind`, whose message goes to standard error.
template <typename Kind, typename Body>
[[noreturn]] void exit_with_refusal(Body&& body) {
  try {
    body();
  } catch (const Kind& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(0);
  }
  std::_Exit(1);
}

static_assert(std::is_base_of_v<Error, HookError> && std::is_base_of_v<Error, ConfigError>);
static_assert(std::is_base_of_v<Error, ArbiterError> && std::is_base_of_v<Error, DriverError>);
static_assert(!std::is_copy_constructible_v<Region> && !std::is_default_constructible_v<Scheduler>);

// ---- launches

TEST_F(SchedulerTest, LaunchesHaveTheClassOfTheInnermostRegion) {
  const Metrics before = scheduler.metrics();
  {
    const Region outer(Class::kLatency, 5ms, 1);
    program.gpu.launch(program.stream, 20us);
    {
      const Region inner(Class::kBestEffort);
      program.gpu.launch(program.stream, 20us);
      program.gpu.launch(program.stream, 20us);
    }
    program.gpu.launch(program.stream, 20us);
  }
  program.gpu.launch(program.stream, 20us);
  program.gpu.synchronize(program.stream);
  const Metrics after = scheduler.metrics();
  EXPECT_EQ(after.latency_launches - before.latency_launches, 2u);
  EXPECT_EQ(after.best_effort_launches - before.best_effort_launches, 2u);
  EXPECT_EQ(after.launches - before.launches, 5u);
  EXPECT_TRUE(after.attached);
  EXPECT_TRUE(after.scheduling) << after.off_reason;
  EXPECT_EQ(after.driver_path, CUDASCHED_SIMULATED_DRIVER);
}

TEST_F(SchedulerTest, RequestsAreCountedByTheNameOfTheirRegion) {
  for (int i = 0; i < 3; ++i) {
    const Region region(Class::kLatency, 60s, 0, "search");
    program.gpu.launch(program.stream, 20us);
    program.gpu.synchronize(program.stream);
  }
  const Metrics metrics = scheduler.metrics();
  const auto found = std::find_if(metrics.regions.begin(), metrics.regions.end(),
                                  [](const RegionMetrics& region) { return region.name == "search"; });
  ASSERT_NE(found, metrics.regions.end());
  EXPECT_EQ(found->met, 3u);
  EXPECT_EQ(found->missed, 0u);
  EXPECT_EQ(found->slo, 60s);
  EXPECT_EQ(found->times.count(), 3u);
  EXPECT_GE(found->times.quantile(0.5), 20us);
  EXPECT_GE(found->times.quantile(0.99), found->times.quantile(0.5));
  EXPECT_GT(metrics.latency_active, 0ns);
  EXPECT_EQ(Times().quantile(0.99), 0ns);
  EXPECT_THROW(Region(Class::kLatency, 0ms, 0, "two\nlines"), ConfigError);
}

TEST_F(SchedulerTest, AStreamsClassGoesBeforeTheRegions) {
  const Gpu::Stream stream = program.gpu.new_stream();
  scheduler.bind_stream(stream, Class::kBestEffort);
  const Metrics before = scheduler.metrics();
  {
    const Region region(Class::kLatency);
    program.gpu.launch(stream, 20us);
    scheduler.unbind_stream(stream);
    program.gpu.launch(stream, 20us);
    program.gpu.synchronize(stream);
  }
  const Metrics after = scheduler.metrics();
  EXPECT_EQ(after.latency_launches - before.latency_launches, 1u);
  EXPECT_EQ(after.best_effort_launches - before.best_effort_launches, 1u);
  EXPECT_THROW(scheduler.bind_stream(nullptr, Class::kLatency), Error);
}

TEST_F(SchedulerTest, GraphsThatGetThePriorityOfTheirCallersClassAreCounted) {
  const Gpu::Stream stream = program.gpu.new_stream();
  program.gpu.launch(stream, 20us);  // loads the code
  program.gpu.synchronize(stream);
  void* graph = nullptr;
  constexpr int kThreadLocal = 1;
  ASSERT_EQ(driver_call<int(void*, int)>("cuStreamBeginCapture_v2", stream, kThreadLocal), 0);
  program.gpu.launch(stream, 20us);
  ASSERT_EQ(driver_call<int(void*, void**)>("cuStreamEndCapture", stream, &graph), 0);

  const Metrics before = scheduler.metrics();
  for (const Class caller : {Class::kLatency, Class::kNormal}) {
    const Region region(caller);
    void* executable = nullptr;
    ASSERT_EQ(
        (driver_call<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags", &executable, graph, 0ULL)),
        0);
    EXPECT_EQ(scheduler.metrics().prioritised_graphs - before.prioritised_graphs, 1u);
    driver_call<int(void*)>("cuGraphExecDestroy", executable);
  }
  driver_call<int(void*)>("cuGraphDestroy", graph);
}

TEST_F(SchedulerTest, TheClassOfTheProcessIsThatOfLaunchesWithoutARegion) {
  const Metrics before = scheduler.metrics();
  scheduler.configure({.process_class = Class::kLatency, .slo = 5ms, .priority = 2});
  program.gpu.launch(program.stream, 20us);
  program.gpu.synchronize(program.stream);
  scheduler.configure({.process_class = Class::kNormal});
  EXPECT_EQ(scheduler.metrics().latency_launches - before.latency_launches, 1u);
}

// ---- what holds best effort back

TEST_F(SchedulerTest, ALatencyRegionHoldsBestEffortBackUntilItIsLeft) {
  scheduler.configure({.preference = Preference::kLatency});
  std::atomic<bool> through{false};
  std::thread best_effort;
  {
    const Region region(Class::kLatency);
    best_effort = std::thread([&] {
      program.run_best_effort();
      through = true;
    });
    std::this_thread::sleep_for(100ms);
    EXPECT_FALSE(through);
  }
  best_effort.join();
}

TEST_F(SchedulerTest, WithoutPreemptionNothingIsHeldBack) {
  scheduler.configure({.preemption = false});
  {
    const Region region(Class::kLatency);
    program.run_best_effort();
  }
  scheduler.configure({.policy = Policy::kStrict});
}

TEST_F(SchedulerTest, ExpectedLatencyWorkHoldsBestEffortBack) {
  const auto before = std::chrono::steady_clock::now();
  scheduler.expect(300ms);
  program.run_best_effort();
  EXPECT_GE(std::chrono::steady_clock::now() - before, 300ms);
}

// ---- arguments without meaning

TEST_F(SchedulerTest, HintsWithoutMeaningAreRefused) {
  for (const double within_ms : {0.0, -1.0, 1000.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT([&] { scheduler.expect(Milliseconds(within_ms)); },
                ThrowsMessage<ConfigError>(HasSubstr("over 0 and at most 1000")))
        << within_ms;
  }
}

TEST_F(SchedulerTest, OptionsWithoutMeaningAreRefusedByName) {
  const auto refused = [&](const Options& options, const std::string& said) {
    EXPECT_THAT([&] { scheduler.configure(options); }, ThrowsMessage<ConfigError>(HasSubstr(said)));
  };
  refused({.policy = Policy::kStrict, .preemption = false}, "preemption");
  refused({.lead = -5us}, "LEAD_US=-5");
  refused({.margin = -5us}, "MARGIN_US=-5");
  refused({.long_kernel = Microseconds(std::nan(""))}, "LONG_US=");
  refused({.max_inflation = 0.5}, "MAX_INFLATION=0.5");
  refused({.process_class = Class::kLatency, .slo = -5ms}, "SLO");
  refused({.slo = 5ms}, "process_class");
  refused({.priority = 1}, "process_class");
  EXPECT_THROW(scheduler.configure("no_such_setting", "1"), ConfigError);
  EXPECT_THROW(scheduler.configure("policy", "fast"), ConfigError);
  // Were taken for strict, for warning and, as far as the zero, for their names.
  refused({.policy = static_cast<Policy>(9)}, "POLICY=9");
  refused({.log_level = static_cast<LogLevel>(9)}, "log=9");
  using namespace std::string_literals;
  EXPECT_THROW(scheduler.configure("policy", "strict\0er"s), ConfigError);
  EXPECT_THROW(Region(Class::kNormal, 0ms, 0, "search\0er"s), ConfigError);
}

TEST(SchedulerVersionTest, ALibraryOfAnotherMinorVersionIsRefused) {
  EXPECT_NO_THROW(detail::check_version(cudasched_version()));
  EXPECT_NO_THROW(detail::check_version(CUDASCHED_API ".99"));
  for (const char* const other : {"0.2.0", "0.11.0", "1.1.0", "0.1"}) {
    EXPECT_THAT([&] { detail::check_version(other); }, ThrowsMessage<HookError>(HasSubstr(other))) << other;
  }
}

TEST(TimesTest, AShareIsTakenWithin0And1) {
  Times times;
  times.buckets[1] = 10;  // 1,024 to 1,279 ns
  EXPECT_EQ(times.quantile(-1), 1024ns);
  EXPECT_EQ(times.quantile(99), times.quantile(1));
  EXPECT_EQ(times.quantile(1), 1280ns);
}

TEST_F(SchedulerTest, ADirectoryThatHasNoRoomIsNotCutOff) {
  std::array<char, 4> path{};
  EXPECT_EQ(cudasched_run_directory(path.data(), path.size()), CUDASCHED_CONFIG_ERROR);
  EXPECT_THAT(cudasched_last_error(), HasSubstr("room for 4"));
}

TEST_F(SchedulerTest, ADeadlineBeforeTheClocksBeginningIsRefused) {
  // The time until it overflowed.
  std::uint64_t token = 0;
  EXPECT_EQ(cudasched_region_enter_until(CUDASCHED_LATENCY, 0, std::numeric_limits<std::int64_t>::min(), &token),
            CUDASCHED_CONFIG_ERROR);
  EXPECT_THAT(cudasched_last_error(), HasSubstr("CLOCK_MONOTONIC"));
}

TEST_F(SchedulerTest, EveryOptionIsTaken) {
  for (const Preference preference : {Preference::kLatency, Preference::kThroughput}) {
    EXPECT_NO_THROW(scheduler.configure({.preference = preference}));
  }
  for (const Policy policy : {Policy::kSlack, Policy::kOpen, Policy::kStrict}) {
    EXPECT_NO_THROW(scheduler.configure({.policy = policy}));
  }
  for (const LogLevel level : {LogLevel::kError, LogLevel::kInfo, LogLevel::kDebug, LogLevel::kWarning}) {
    EXPECT_NO_THROW(scheduler.configure({.log_level = level}));
  }
  EXPECT_NO_THROW(scheduler.configure({.lead = 12.5us, .margin = 100us, .long_kernel = 300us, .max_inflation = 1.2}));
  EXPECT_NO_THROW(scheduler.configure({.lead = kAdaptiveLead}));
}

TEST_F(SchedulerTest, WhatTheFirstCallHasDecidedCannotBeChanged) {
  EXPECT_THAT([&] { scheduler.configure({.offload = false}); },
              ThrowsMessage<ConfigError>(HasSubstr("first CUDA call")));
}

TEST_F(SchedulerTest, ARegionThatCannotBeEnteredIsNotOpen) {
  EXPECT_THROW(Region(Class::kLatency, -1ms), ConfigError);
  std::deque<Region> regions;
  EXPECT_THROW(while (true) regions.emplace_back(Class::kBestEffort), Error);
  EXPECT_FALSE(regions.empty());
  while (!regions.empty()) regions.pop_back();
  const Region region(Class::kLatency);
}

// ---- profiling

TEST_F(SchedulerTest, LaunchesAreCollected) {
  const std::filesystem::path directory = machine->directory() / "collected";
  std::filesystem::create_directory(directory);
  EXPECT_THROW(scheduler.start_collecting(directory, "by hand"), ConfigError);
  scheduler.start_collecting(directory, "events");
  for (int i = 0; i < 3; ++i) program.gpu.launch(program.stream, 20us);
  program.gpu.synchronize(program.stream);
  const Collected collected = scheduler.stop_collecting();
  EXPECT_EQ(collected.rows, 3u);
  EXPECT_EQ(collected.lost, 0u);
  EXPECT_TRUE(std::filesystem::exists(collected.journal));
  EXPECT_EQ(scheduler.stop_collecting().journal, "");
}

// ---- before the first CUDA call

TEST(SchedulerDeathTest, OptionsHoldThatAreSetBeforeTheFirstCall) {
  EXPECT_EXIT(
      {
        setenv("CUDASCHED_OFFLOAD", "1", 1);
        auto scheduler = Scheduler::create({.offload = false, .process_class = Class::kBestEffort});
        if (scheduler.metrics().attached) std::_Exit(2);
        const Gpu gpu;
        const Gpu::Stream stream = gpu.new_stream();
        for (int i = 0; i < 5; ++i) gpu.launch(stream, 20us);
        gpu.synchronize(stream);
        const Metrics metrics = scheduler.metrics();
        std::_Exit(metrics.best_effort_launches == 5 && metrics.offloaded_launches == 0 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// A best-effort graph of many kernels, launched until it goes in slices: 0 if all is counted.
[[noreturn]] void launch_graphs_in_slices() {
  setenv("CUDASCHED_GRAPH_SLICES", "always", 1);
  setenv("CUDASCHED_GRAPH_SLICE_US", "100", 1);
  Program& program = Program::instance();
  const Region region(Class::kBestEffort);
  const Gpu::Stream stream = program.gpu.new_stream();
  program.gpu.launch(stream, 20us);  // loads the code
  program.gpu.synchronize(stream);
  void* graph = nullptr;
  void* executable = nullptr;
  constexpr int kThreadLocal = 1;
  driver_call<int(void*, int)>("cuStreamBeginCapture_v2", stream, kThreadLocal);
  for (int i = 0; i < 64; ++i) program.gpu.launch(stream, 20us);
  driver_call<int(void*, void**)>("cuStreamEndCapture", stream, &graph);
  driver_call<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags", &executable, graph, 0ULL);
  std::uint64_t launched = 0;
  for (const auto limit = std::chrono::steady_clock::now() + 60s; std::chrono::steady_clock::now() < limit;) {
    driver_call<int(void*, void*)>("cuGraphLaunch", executable, stream);
    program.gpu.synchronize(stream);
    ++launched;
    const Metrics metrics = program.scheduler.metrics();
    if (metrics.sliced_launches == 0) continue;
    const bool right = metrics.graph_launches == launched && metrics.sliced_launches <= launched &&
                       metrics.slice_launches > metrics.sliced_launches;
    std::_Exit(right ? 0 : 1);
  }
  std::_Exit(2);
}

TEST(SchedulerDeathTest, GraphsAreCountedWholeAndInSlices) {
  EXPECT_EXIT(launch_graphs_in_slices(), testing::ExitedWithCode(0), "");
}

TEST(SchedulerDeathTest, CudaThatWasLoadedFirstIsNamed) {
  EXPECT_EXIT(exit_with_refusal<HookError>([] {
                dlopen(CUDASCHED_SIMULATED_DRIVER, RTLD_NOW | RTLD_GLOBAL);
                Scheduler::create();
              }),
              ::testing::ExitedWithCode(0), "CUDA is loaded already .*libcuda.so.1.*cudasched::driver.*cudasched run");
}

TEST(SchedulerDeathTest, AnotherInstallationsShimIsNamedAndLeftAlone) {
  const std::filesystem::path other = machine->directory() / "libcuda.so.1";
  EXPECT_EXIT(exit_with_refusal<HookError>([&] {
                std::filesystem::copy_file(CUDASCHED_TEST_SHIM, other,
                                           std::filesystem::copy_options::overwrite_existing);
                dlopen(other.c_str(), RTLD_NOW | RTLD_GLOBAL);
                Scheduler::create();
              }),
              ::testing::ExitedWithCode(0), "two installations of cudasched meet.*libcuda.so.1 is loaded");
}

TEST(SchedulerDeathTest, AMissingDriverIsSaid) {
  EXPECT_EXIT(exit_with_refusal<HookError>([] {
                setenv("CUDASCHED_DRIVER", "/nowhere/libcuda.so.1", 1);
                Scheduler::create();
              }),
              ::testing::ExitedWithCode(0), "/nowhere/libcuda.so.1");
}

TEST(SchedulerDeathTest, SwitchedOffNothingIsHooked) {
  EXPECT_EXIT(
      {
        setenv("CUDASCHED_OFF", "1", 1);
        Scheduler::create();
        std::_Exit(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW) == nullptr ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(SchedulerDeathTest, CoverageIsForAfterTheFirstCall) {
  EXPECT_EXIT(exit_with_refusal<HookError>([] { Scheduler::create().start_coverage(); }), ::testing::ExitedWithCode(0),
              "make a CUDA call first");
}

}  // namespace
}  // namespace cudasched::test
