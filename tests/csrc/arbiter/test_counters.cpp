#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "arbiter/counters.hpp"
#include "arbiter/processes.hpp"
#include "arbiter/table.hpp"

namespace cudasched::arbiter::testing {
namespace {

// Every word says the same, so that a record of two moments is seen.
Counts all(std::uint64_t value) {
  Counts counts;
  auto* const words = reinterpret_cast<std::uint64_t*>(&counts);
  std::fill_n(words, sizeof counts / sizeof value, value);
  return counts;
}

bool is_all(const Counts& counts, std::uint64_t value) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(&counts);
  return std::all_of(words, words + sizeof counts / sizeof value, [&](std::uint64_t word) { return word == value; });
}

TEST(SharedCounts, NothingIsReadBeforeSomethingIsPublished) {
  const auto shared = std::make_unique<SharedCounts>();
  Counts read{};
  EXPECT_FALSE(shared->read(read));
  std::uint64_t version = 0;
  shared->publish(all(7), version);
  ASSERT_TRUE(shared->read(read));
  EXPECT_TRUE(is_all(read, 7));
  shared->clear();
  EXPECT_FALSE(shared->read(read));
}

TEST(SharedCounts, WhatIsReadIsOfOneMoment) {
  const auto shared = std::make_unique<SharedCounts>();
  std::atomic<bool> done{false};
  std::uint64_t version = 0;
  shared->publish(all(1), version);
  std::thread writer([&] {
    for (std::uint64_t value = 2; value < 5'000; ++value) shared->publish(all(value), version);
    done = true;
  });
  std::uint64_t last = 0;
  int reads = 0;
  do {
    Counts read{};
    if (!shared->read(read)) continue;  // the writer came a hundred times; this one sleeps between two
    ++reads;
    EXPECT_TRUE(is_all(read, read.process));
    EXPECT_GE(read.process, last);
    last = read.process;
  } while (!done || reads == 0);
  writer.join();
}

// The first half of a publication is all that another process ever sees of it.
TEST(SharedCounts, AWriterThatStopsInTheMiddleLeavesTheLastWholeRecord) {
  const auto shared = std::make_unique<SharedCounts>();
  std::uint64_t version = 0;
  shared->publish(all(1), version);
  shared->publish(all(2), version);
  // Into the copy that is not the current one.
  auto* const words = reinterpret_cast<std::atomic<std::uint64_t>*>(shared.get());
  const std::size_t copy_words = sizeof(Counts) / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < copy_words / 2; ++i) words[2 + copy_words + i].store(3);
  Counts read{};
  ASSERT_TRUE(shared->read(read));
  EXPECT_TRUE(is_all(read, 2));
  shared->publish(all(4), version);
  ASSERT_TRUE(shared->read(read));
  EXPECT_TRUE(is_all(read, 4));
}

using CountsInTable = TableTest;

TEST_F(CountsInTable, AnotherProcessReadsThemAndANewOwnerHasNone) {
  Process other([&](const Link& link) {
    const auto table = open();
    const int slot = table->claim(client(Class::kBestEffort));
    std::uint64_t version = 0;
    table->counts(slot).set_process(5);
    table->counts(slot).publish(all(5), version);
    link.send(slot);
    link.receive();
  });
  const int slot = other.receive();
  const auto table = open();
  Counts read{};
  ASSERT_TRUE(table->counts(slot).read(read));
  EXPECT_TRUE(is_all(read, 5));
  EXPECT_EQ(table->counts(slot).process(), 5U);
  other.kill();
  ASSERT_EQ(table->claim(client(Class::kNormal)), slot);
  EXPECT_FALSE(table->counts(slot).read(read));
  EXPECT_EQ(table->counts(slot).process(), 0U);
}

}  // namespace
}  // namespace cudasched::arbiter::testing
