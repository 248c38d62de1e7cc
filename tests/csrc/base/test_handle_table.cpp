#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/handle_table.hpp"

namespace cudasched {
namespace {

constexpr std::uint64_t handle(std::uint64_t number) { return number * 64 + 64; }

TEST(HandleTable, FindsWhatWasSetUntilItIsErased) {
  HandleTable<2> table;
  HandleTable<2>::Words words{};
  EXPECT_FALSE(table.find(handle(1), words));
  EXPECT_TRUE(table.set(handle(1), {10, 11}));
  EXPECT_TRUE(table.set(handle(2), {20, 21}));
  ASSERT_TRUE(table.find(handle(1), words));
  EXPECT_EQ(words[1], 11U);
  EXPECT_TRUE(table.set(handle(1), {12, 13}));
  EXPECT_TRUE(table.set_word(handle(1), 1, 14));
  ASSERT_TRUE(table.find(handle(1), words));
  EXPECT_EQ(words[0], 12U);
  EXPECT_EQ(words[1], 14U);
  EXPECT_TRUE(table.erase(handle(1)));
  EXPECT_FALSE(table.erase(handle(1)));
  EXPECT_FALSE(table.set_word(handle(1), 0, 1));
  EXPECT_FALSE(table.find(handle(1), words));
  EXPECT_TRUE(table.find(handle(2), words));
  table.clear();
  EXPECT_FALSE(table.find(handle(2), words));
  EXPECT_EQ(table.size(), 0U);
  EXPECT_FALSE(table.set(0, {1, 1}));
  EXPECT_FALSE(table.find(0, words));
}

TEST(HandleTable, GrowsToItsBoundAndLosesNothing) {
  constexpr std::size_t kMost = 20'000;
  HandleTable<1> table(kMost);
  for (std::uint64_t i = 0; i < kMost; ++i) ASSERT_TRUE(table.set(handle(i), {i}));
  EXPECT_FALSE(table.set(handle(kMost), {1}));
  EXPECT_TRUE(table.set(handle(7), {7}));  // it has its place
  HandleTable<1>::Words words{};
  for (std::uint64_t i = 0; i < kMost; ++i) {
    ASSERT_TRUE(table.find(handle(i), words));
    ASSERT_EQ(words[0], i);
  }
  EXPECT_FALSE(table.contains(handle(kMost)));
  EXPECT_TRUE(table.erase(handle(3)));
  EXPECT_TRUE(table.set(handle(kMost), {1}));
}

TEST(HandleTable, HandlesThatNeverComeAgainTakeNoMoreMemory) {
  HandleTable<1> table;
  for (std::uint64_t i = 0; i < 1000; ++i) ASSERT_TRUE(table.set(handle(i), {i}));
  std::size_t bytes = 0;
  for (std::uint64_t i = 1000; i < 500'000; ++i) {
    ASSERT_TRUE(table.set(handle(i), {i}));
    ASSERT_TRUE(table.erase(handle(i - 1000)));
    if (i == 50'000) bytes = table.bytes();
  }
  EXPECT_EQ(table.bytes(), bytes);
  EXPECT_EQ(table.size(), 1000U);
}

TEST(HandleTable, BehavesAsAMapUnderRandomUse) {
  HandleTable<1> table(700);
  std::map<std::uint64_t, std::uint64_t> model;
  std::mt19937 random(7);
  for (std::uint64_t step = 0; step < 300'000; ++step) {
    const std::uint64_t which = handle(random() % 1000);
    switch (random() % 4) {
      case 0:
      case 1:
        if (table.set(which, {step})) {
          model[which] = step;
        } else {
          ASSERT_EQ(model.size(), 700U);
          ASSERT_FALSE(model.contains(which));
        }
        break;
      case 2:
        if (step % 5000 == 0) {
          const auto odd = [](std::uint64_t value) { return value % 2 == 1; };
          table.erase_if([&](std::uint64_t, const auto& words) { return odd(words[0]); });
          std::erase_if(model, [&](const auto& entry) { return odd(entry.second); });
        } else {
          ASSERT_EQ(table.erase(which), model.erase(which) == 1);
        }
        break;
      default: {
        HandleTable<1>::Words words{};
        const auto found = model.find(which);
        ASSERT_EQ(table.find(which, words), found != model.end());
        if (found != model.end()) {
          ASSERT_EQ(words[0], found->second);
        }
      }
    }
    ASSERT_EQ(table.size(), model.size());
  }
}

// Beside a writer that sets, changes, erases and grows: words that belong together, of this handle.
TEST(HandleTable, AReaderSeesTheWordsOfOneWriteAndOfItsHandle) {
  HandleTable<3> table;
  constexpr std::uint64_t kHandles = 400;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (unsigned seed = 1; seed <= 2; ++seed) {
    readers.emplace_back([&, seed] {
      std::mt19937 random(seed);
      while (!stop.load()) {
        const std::uint64_t which = handle(random() % kHandles);
        HandleTable<3>::Words words{};
        if (table.find(which, words) && (words[0] != which || words[2] != words[1] * 3)) wrong.fetch_add(1);
      }
    });
  }
  std::mt19937 random(5);
  for (std::uint64_t step = 0; step < 200'000; ++step) {
    const std::uint64_t which = handle(random() % kHandles);
    // Handles beside them that never come again make the table move its blocks all the time.
    table.set(handle(kHandles + step), {0, 0, 0});
    table.erase(handle(kHandles + step));
    if (random() % 3 != 0) {
      table.set(which, {which, step, step * 3});
    } else {
      table.erase(which);
    }
  }
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(HandleTable, WhatIsKnownStaysKnownWhileItIsWrittenAnew) {
  HandleTable<2> table;
  table.set(handle(1), {0, 0});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> lookups{0};
  std::uint64_t missed = 0;
  std::uint64_t wrong = 0;
  std::thread reader([&] {
    while (!stop.load()) {
      HandleTable<2>::Words words{};
      const bool known = table.find(handle(1), words);
      if (!known) ++missed;
      if (known && words[1] != words[0] * 3) ++wrong;
      lookups.fetch_add(1, std::memory_order_relaxed);
    }
  });
  // On one core, too, lookups fall between writes.
  for (std::uint64_t step = 0; step < 500'000 || lookups.load(std::memory_order_relaxed) < 10'000; ++step) {
    table.set(handle(1), {step, step * 3});
  }
  stop.store(true);
  reader.join();
  EXPECT_EQ(missed, 0U);
  EXPECT_EQ(wrong, 0U);
}

}  // namespace
}  // namespace cudasched
