// Changes of this process through the C boundary, as another process asks for them: over the simulated driver.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "runtime/counts.hpp"
#include "runtime/engine.hpp"

namespace cudasched::test {
namespace {

constexpr std::int64_t kForEverNs = 60 * kNsPerSecond;

class Control : public ::testing::Test {
 protected:
  // A client of class normal, unless the process has others.
  Control() {
    Program::check(program_.launch(1));
    Program::check(program_.synchronize());
    auto counts = std::make_unique<cudasched_counts>();
    EXPECT_EQ(cudasched_get_counts(counts.get()), CUDASCHED_OK);
    process_ = counts->process;
    EXPECT_TRUE(eventually([&] { return self().process == process_; }));
  }

  std::int32_t change(const char* setting, const std::string& value) const {
    std::int32_t outcome = 0;
    EXPECT_EQ(cudasched_change(path().c_str(), process_, setting, value.c_str(), kForEverNs, &outcome), CUDASCHED_OK)
        << cudasched_last_error();
    return outcome;
  }
  std::string refusal(const char* setting, const std::string& value) const {
    std::int32_t outcome = 0;
    EXPECT_EQ(cudasched_change(path().c_str(), process_, setting, value.c_str(), kForEverNs, &outcome),
              CUDASCHED_CONFIG_ERROR);
    return cudasched_last_error();
  }
  static const std::string& path() { return HookedDriver::instance().table().path(); }

  // As another process reads it.
  cudasched_client self() const {
    std::vector<cudasched_client> clients(64);
    std::int32_t count = 0;
    char name[64];
    EXPECT_EQ(cudasched_read_table(path().c_str(), clients.data(), 64, &count, name), CUDASCHED_OK);
    for (std::int32_t i = 0; i < count; ++i) {
      if (clients[static_cast<std::size_t>(i)].process == process_) return clients[static_cast<std::size_t>(i)];
    }
    return {};
  }

  Program program_;
  std::uint64_t process_ = 0;
};

TEST_F(Control, TheClassOfARunningProgramChanges) {
  if (runtime::engine().regions().used()) GTEST_SKIP() << "an earlier test of this process used regions";
  EXPECT_EQ(self().process_class, CUDASCHED_NORMAL);
  const std::uint64_t before = state().best_effort_launches;
  ASSERT_EQ(change("class", "best_effort"), CUDASCHED_APPLIED);
  EXPECT_EQ(state().process_class, CUDASCHED_BEST_EFFORT);
  for (std::uint64_t i = 0; i < 50; ++i) Program::check(program_.launch(i));
  Program::check(program_.synchronize());
  EXPECT_EQ(state().best_effort_launches, before + 50);
  EXPECT_TRUE(eventually([&] { return self().process_class == CUDASCHED_BEST_EFFORT; }));
  ASSERT_EQ(change("class", "latency"), CUDASCHED_APPLIED);
  for (std::uint64_t i = 50; i < 60; ++i) Program::check(program_.launch(i));
  Program::check(program_.synchronize());
  EXPECT_EQ(state().latency_launches, 10U);
  ASSERT_EQ(change("class", "normal"), CUDASCHED_APPLIED);
  // In the program's order, whatever the classes.
  for (std::uint64_t i = 0; i < 60; ++i) EXPECT_EQ(program_.value(i + 1), i);
}

TEST_F(Control, AProgramThatEnteredARegionKeepsTheClassOfItsRegions) {
  { const InRegion region(CUDASCHED_LATENCY); }
  EXPECT_EQ(change("class", "best_effort"), CUDASCHED_HAS_REGIONS);
  EXPECT_EQ(state().process_class, CUDASCHED_NORMAL);
}

TEST_F(Control, PriorityAndWeightHoldForEveryClientOfTheProcess) {
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    Program::check(program_.launch(1));
    Program::check(program_.synchronize());
  }
  auto& table = HookedDriver::instance().table();
  std::vector<int> slots;
  ASSERT_TRUE(eventually([&] {  // both have said whose they are
    slots.clear();
    for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
      if (table.slot(slot).occupied.load() != 0 && table.counts(slot).process() == process_) slots.push_back(slot);
    }
    return slots.size() == 2;
  }));
  ASSERT_EQ(change("priority", "-5"), CUDASCHED_APPLIED);
  ASSERT_EQ(change("weight", "2.5"), CUDASCHED_APPLIED);
  for (const int slot : slots) {
    EXPECT_EQ(table.slot(slot).priority.load(), -5);
    EXPECT_EQ(table.slot(slot).weight_milli.load(), 2'500U);
  }
  EXPECT_EQ(change("priority", "0"), CUDASCHED_APPLIED);
  EXPECT_EQ(change("weight", "1"), CUDASCHED_APPLIED);
}

// A client that registers later has what was changed before.
TEST_F(Control, AClientThatRegistersLaterHasTheNewWeight) {
  ASSERT_EQ(change("weight", "0.5"), CUDASCHED_APPLIED);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  const std::uint64_t best_effort = HookedDriver::instance().table().layout().best_effort.load();
  ASSERT_NE(best_effort, 0U);
  EXPECT_EQ(HookedDriver::instance().table().slot(__builtin_ctzll(best_effort)).weight_milli.load(), 500U);
  EXPECT_EQ(change("weight", "1"), CUDASCHED_APPLIED);
}

TEST_F(Control, ALimitOfMemoryIsNotBelowWhatIsHeld) {
  CUdeviceptr memory = 0;
  const auto allocate = call<decltype(cuMemAlloc)>("cuMemAlloc_v2");
  Program::check(allocate(&memory, 8 << 20));
  EXPECT_EQ(change("memory_limit", "4MiB"), CUDASCHED_HOLDS_MORE);
  EXPECT_EQ(self().memory_limit_bytes, 0U);
  ASSERT_EQ(change("memory_limit", "16.5MiB"), CUDASCHED_APPLIED);
  EXPECT_EQ(self().memory_limit_bytes, 16U << 20);  // in whole MiB
  CUdeviceptr more = 0;
  EXPECT_EQ(allocate(&more, 32 << 20), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(change("memory_limit", "none"), CUDASCHED_APPLIED);
  EXPECT_EQ(self().memory_limit_bytes, 0U);
  Program::check(allocate(&more, 32 << 20));
  const auto free_memory = call<decltype(cuMemFree)>("cuMemFree_v2");
  Program::check(free_memory(memory));
  Program::check(free_memory(more));
}

TEST_F(Control, ATraceIsMadeAndEndsByItself) {
  namespace fs = std::filesystem;
  std::array<char, 17> process{};
  std::snprintf(process.data(), process.size(), "%016llx", static_cast<unsigned long long>(process_));
  const fs::path traces = fs::path(path()).parent_path() / "traces" / process.data();
  ASSERT_EQ(change("trace", "60000"), CUDASCHED_APPLIED);
  EXPECT_EQ(change("trace", "60000"), CUDASCHED_TRACED);
  for (int i = 0; i < 100; ++i) Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  ASSERT_EQ(change("trace", "0"), CUDASCHED_APPLIED);
  std::uintmax_t bytes = 0;
  for (const auto& file : fs::directory_iterator(traces)) bytes += fs::file_size(file);
  EXPECT_GT(bytes, 100U * 16);
  ASSERT_EQ(change("trace", "1"), CUDASCHED_APPLIED);
  EXPECT_TRUE(eventually([&] { return change("trace", "1") == CUDASCHED_APPLIED; }));  // the last one has ended
  EXPECT_EQ(change("trace", "0"), CUDASCHED_APPLIED);
  EXPECT_NE(refusal("trace", "60001").find("1 to 60000"), std::string::npos);
  EXPECT_NE(refusal("trace", "-1").find("1 to 60000"), std::string::npos);
}

TEST_F(Control, ThePolicyChangesWhileLaunchesWait) {
  OtherClient other(/*active=*/true);
  std::thread waiting([&] {
    program_.use_on_this_thread();
    const InRegion best_effort(CUDASCHED_BEST_EFFORT);
    Program::check(program_.launch(1));
    Program::check(program_.synchronize());
  });
  EXPECT_TRUE(eventually(someone_waits));
  EXPECT_EQ(change("policy", "open"), CUDASCHED_APPLIED);
  waiting.join();  // `open` lets it go beside active latency work
  EXPECT_TRUE(eventually([&] { return std::string(self().policy) == "open"; }));
  EXPECT_EQ(change("policy", "strict"), CUDASCHED_APPLIED);
}

TEST_F(Control, APolicyOfTheProgramsOwnIsNamedAndReplaced) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  Program::check(program_.launch(1));
  const auto submit = [](const cudasched_snapshot*, void*, std::int64_t*) -> std::int32_t { return CUDASCHED_SUBMIT; };
  ASSERT_EQ(cudasched_use_policy(submit, nullptr), CUDASCHED_OK);
  EXPECT_TRUE(eventually([&] { return std::string(self().policy) == "own"; }));
  EXPECT_EQ(change("policy", "slack"), CUDASCHED_APPLIED);
  EXPECT_TRUE(eventually([&] { return std::string(self().policy) == "slack"; }));
  EXPECT_EQ(change("policy", "strict"), CUDASCHED_APPLIED);
}

TEST_F(Control, WhatHasNoMeaningIsRefusedBeforeTheClientIsAsked) {
  EXPECT_NE(refusal("class", "urgent").find("'latency' or 'best_effort'"), std::string::npos);
  EXPECT_NE(refusal("priority", "9").find("from -8 to 8"), std::string::npos);
  EXPECT_NE(refusal("weight", "0").find("from 0.01 to 100"), std::string::npos);
  EXPECT_NE(refusal("weight", "nan").find("from 0.01 to 100"), std::string::npos);
  EXPECT_NE(refusal("policy", "fast").find("strict"), std::string::npos);
  EXPECT_NE(refusal("memory_limit", "4 elephants").find("such as 20GiB"), std::string::npos);
  EXPECT_NE(refusal("slo_ms", "5").find("cannot be changed"), std::string::npos);
}

// Of another version of cudasched, or a damaged word.
TEST_F(Control, TheClientRefusesWhatItDoesNotKnow) {
  auto& table = HookedDriver::instance().table();
  using arbiter::Outcome;
  using arbiter::Setting;
  for (const arbiter::Change& unknown : {arbiter::Change{static_cast<Setting>(77), 1},
                                         {Setting::kClass, 3},
                                         {Setting::kClass, -1},
                                         {Setting::kPriority, 9},
                                         {Setting::kWeight, 0},
                                         {Setting::kWeight, -1},
                                         {Setting::kPolicy, 1'000},
                                         {Setting::kMemoryLimit, -1},
                                         {Setting::kTrace, -1}}) {
    Program::check(program_.launch(1));  // while it works, it answers soon
    EXPECT_EQ(arbiter::change(table, process_, unknown, kForEverNs), Outcome::kUnknown);
  }
}

TEST_F(Control, ATableThatIsNotThereIsNamed) {
  std::int32_t outcome = 0;
  EXPECT_EQ(cudasched_change("/nowhere/x.arbiter", 1, "weight", "1", 0, &outcome), CUDASCHED_ARBITER_ERROR);
  EXPECT_EQ(cudasched_change(path().c_str(), 1, "weight", "1", 0, &outcome), CUDASCHED_OK);
  EXPECT_EQ(outcome, CUDASCHED_NO_CLIENT);
}

}  // namespace
}  // namespace cudasched::test
