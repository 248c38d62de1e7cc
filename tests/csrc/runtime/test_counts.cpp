// What the process counts, through the C boundary, over the simulated driver.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "runtime/hot.hpp"

namespace cudasched::test {
namespace {

std::uint64_t count(const cudasched_times& times) {
  return std::accumulate(std::begin(times.buckets), std::end(times.buckets), std::uint64_t{0});
}

std::unique_ptr<cudasched_counts> counts() {
  auto read = std::make_unique<cudasched_counts>();
  EXPECT_EQ(cudasched_get_counts(read.get()), CUDASCHED_OK);
  return read;
}

cudasched_region_counts region(const std::string& name) {
  const auto read = counts();
  for (const cudasched_region_counts& each : read->regions) {
    if (name == each.name) return each;
  }
  return {};
}

class Counts : public ::testing::Test {
 protected:
  void request(const char* name, double slo_ms, std::uint32_t us, bool waits) {
    std::uint64_t token = 0;
    ASSERT_EQ(cudasched_region_enter_named(CUDASCHED_LATENCY, 0, slo_ms, name, &token), CUDASCHED_OK);
    Program::check(program_.launch(1, program_.stream(), us));
    if (waits) Program::check(program_.synchronize());
    ASSERT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
  }

  Program program_;
};

TEST_F(Counts, RequestsOfARegionKeepOrMissItsTarget) {
  request("keeps", 3'600'000, 10, true);
  request("misses", 0.001, 3'000, true);
  request("aimless", 0, 10, true);
  EXPECT_EQ(region("keeps").met, 1U);
  EXPECT_EQ(region("keeps").slo_ns, 3'600'000'000'000U);
  EXPECT_EQ(region("misses").missed, 1U);
  EXPECT_EQ(region("misses").met, 0U);
  EXPECT_GE(region("misses").times.sum_ns, 3'000'000U);
  EXPECT_EQ(region("aimless").met + region("aimless").missed, 0U);
  EXPECT_EQ(count(region("aimless").times), 1U);
}

// Its work is not over when the region is left.
TEST_F(Counts, ARequestThatIsLeftWithWorkOnTheGpuEndsWithThat) {
  request("leaves", 1, 50'000, false);
  EXPECT_EQ(count(region("leaves").times), 0U);
  Program::check(program_.synchronize());
  EXPECT_TRUE(eventually([] { return region("leaves").missed == 1; }));
  EXPECT_GE(region("leaves").times.sum_ns, 50'000'000U);
}

TEST_F(Counts, AStepOfARequestIsNoRequest) {
  const std::uint64_t before = count(region("").times);
  std::uint64_t token = 0;
  ASSERT_EQ(cudasched_region_enter_until(CUDASCHED_LATENCY, 0, now_ns() + kNsPerSecond, &token), CUDASCHED_OK);
  Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  ASSERT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
  EXPECT_EQ(count(region("").times), before);
}

TEST_F(Counts, ALatencyProgramWithoutRegionsHasRequests) {
  const std::uint64_t met = region("").met;
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 60'000), CUDASCHED_OK);
  Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  EXPECT_TRUE(eventually([&] { return region("").met > met; }));
  cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0);
}

TEST_F(Counts, NamesThatCannotBeShownAreRefused) {
  std::uint64_t token = 0;
  for (const std::string& name :
       {std::string(), std::string("two\nlines"), std::string(10'000, 'x'), std::string(64, 'x')}) {
    EXPECT_EQ(cudasched_region_enter_named(CUDASCHED_LATENCY, 0, 0, name.c_str(), &token), CUDASCHED_CONFIG_ERROR);
    EXPECT_NE(std::string(cudasched_last_error()).find("63 bytes"), std::string::npos);
  }
  ASSERT_EQ(cudasched_region_enter_named(CUDASCHED_LATENCY, 0, 0, std::string(63, 'x').c_str(), &token), CUDASCHED_OK);
  EXPECT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
}

TEST_F(Counts, BestEffortBesideLatencyWorkWaitsAndIsTimed) {
  const auto before = counts();
  auto other = std::make_unique<OtherClient>(/*active=*/true);
  std::thread program([&] {
    program_.use_on_this_thread();
    const InRegion best_effort(CUDASCHED_BEST_EFFORT);
    Program::check(program_.launch(1));  // the first of its kind is not deferred: it waits on this thread
    Program::check(program_.synchronize());
  });
  EXPECT_TRUE(eventually(someone_waits));
  other.reset();
  program.join();
  EXPECT_EQ(count(counts()->gate_waits) - count(before->gate_waits), 1U);
  const InRegion best_effort(CUDASCHED_BEST_EFFORT);
  for (int i = 0; i < 400; ++i) Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  const auto after = counts();
  EXPECT_EQ(after->best_effort_launches - before->best_effort_launches, 401U);
  EXPECT_GT(after->offloaded_launches, before->offloaded_launches);
  EXPECT_GT(count(after->queue_waits), count(before->queue_waits));
  EXPECT_TRUE(eventually([&] { return counts()->best_effort_gpu_ns > before->best_effort_gpu_ns; }));
}

TEST_F(Counts, WhatANewKernelMakesOfTheGpuIsCountedOnceAShape) {
  const auto kernels = [] {
    const auto read = counts();
    return std::accumulate(std::begin(read->kernels), std::end(read->kernels), std::uint64_t{0});
  };
  // Every shape that another test may have launched is counted by now.
  const OtherClient idle(/*active=*/false);
  const InRegion best_effort(CUDASCHED_BEST_EFFORT);
  Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  const std::uint64_t before = kernels();
  EXPECT_GE(before, 1U);
  const auto had = counts();
  for (int i = 0; i < 50; ++i) Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  EXPECT_EQ(kernels(), before);
  EXPECT_EQ(counts()->kernel_occupancy, had->kernel_occupancy);
  EXPECT_GT(had->kernel_occupancy, 0U);
  EXPECT_LE(had->kernel_occupancy, 1'000'000 * before);
  EXPECT_GT(had->kernel_sm_utilisation, 0U);
  EXPECT_GT(had->kernel_block_efficiency, 0U);
}

TEST_F(Counts, AnyProcessReadsThemFromTheTable) {
  request("read elsewhere", 1'000, 10, true);
  const std::string path = HookedDriver::instance().table().path();
  std::vector<cudasched_client> clients(64);
  std::vector<cudasched_counts> read(64);
  const std::uint64_t self = counts()->process;
  ASSERT_NE(self, 0U);
  const auto found = [&] {
    std::int32_t number = 0;
    char name[64];
    if (cudasched_read_counts(path.c_str(), clients.data(), read.data(), 64, &number, name) != CUDASCHED_OK)
      return false;
    for (std::int32_t i = 0; i < number; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (read[at].process != self || clients[at].process != self) continue;
      for (const cudasched_region_counts& each : read[at].regions) {
        if (std::string(each.name) == "read elsewhere" && each.met == 1) return true;
      }
    }
    return false;
  };
  EXPECT_TRUE(eventually(found));
}

}  // namespace
}  // namespace cudasched::test
