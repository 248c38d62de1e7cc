#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "base/handle_table.hpp"

namespace cudasched {
namespace {

const void* handle(std::uintptr_t number) { return reinterpret_cast<const void*>(number * 64 + 64); }

TEST(HandleTable, FindsWhatWasInsertedUntilItIsErased) {
  HandleTable<int, 1024> table;
  const int one = 1;
  const int two = 2;
  EXPECT_EQ(table.find(handle(1)), nullptr);
  EXPECT_TRUE(table.insert(handle(1), &one));
  EXPECT_TRUE(table.insert(handle(2), &two));
  EXPECT_EQ(table.find(handle(1)), &one);
  EXPECT_EQ(table.find(handle(2)), &two);
  table.erase(handle(1));
  EXPECT_EQ(table.find(handle(1)), nullptr);
  EXPECT_EQ(table.find(handle(2)), &two);
  table.clear();
  EXPECT_EQ(table.find(handle(2)), nullptr);
}

TEST(HandleTable, AHandleInsertedAgainLeadsToItsNewValue) {
  HandleTable<int, 1024> table;
  const int one = 1;
  const int two = 2;
  EXPECT_TRUE(table.insert(handle(1), &one));
  EXPECT_TRUE(table.insert(handle(1), &two));
  EXPECT_EQ(table.find(handle(1)), &two);
}

TEST(HandleTable, SaysSoWhenThereIsNoRoomAndLosesNothing) {
  HandleTable<std::uintptr_t, 64> table;
  std::array<std::uintptr_t, 200> values{};
  std::size_t kept = 0;
  std::map<std::uintptr_t, bool> inserted;
  for (std::uintptr_t i = 0; i < values.size(); ++i) {
    values[i] = i;
    inserted[i] = table.insert(handle(i), &values[i]);
    kept += inserted[i] ? 1 : 0;
  }
  EXPECT_LE(kept, 64U);
  EXPECT_GE(kept, 32U);
  for (const auto& [number, was_inserted] : inserted) {
    EXPECT_EQ(table.find(handle(number)), was_inserted ? &values[number] : nullptr);
  }
}

TEST(HandleTable, BehavesAsAMapUnderRandomUse) {
  HandleTable<int, 4096> table;
  std::map<const void*, const int*> model;
  std::array<int, 16> values{};
  std::mt19937 random(7);
  for (int step = 0; step < 200'000; ++step) {
    const void* const which = handle(random() % 600);
    switch (random() % 4) {
      case 0:
      case 1: {
        const int* const value = &values[random() % values.size()];
        ASSERT_TRUE(table.insert(which, value));
        model[which] = value;
        break;
      }
      case 2:
        table.erase(which);
        model.erase(which);
        break;
      default: {
        const auto found = model.find(which);
        ASSERT_EQ(table.find(which), found == model.end() ? nullptr : found->second);
      }
    }
  }
}

TEST(HandleTable, AReaderNeverSeesAnotherHandlesValue) {
  HandleTable<std::uintptr_t, 64> table;
  std::array<std::uintptr_t, 96> values{};
  for (std::uintptr_t i = 0; i < values.size(); ++i) values[i] = i;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread reader([&] {
    std::mt19937 random(3);
    while (!stop.load()) {
      const std::uintptr_t number = random() % values.size();
      const std::uintptr_t* const found = table.find(handle(number));
      if (found != nullptr && *found != number) wrong.fetch_add(1);
    }
  });
  std::mt19937 random(5);
  for (int step = 0; step < 200'000; ++step) {
    const std::uintptr_t number = random() % values.size();
    if (random() % 2 == 0) {
      table.insert(handle(number), &values[number]);
    } else {
      table.erase(handle(number));
    }
  }
  stop.store(true);
  reader.join();
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace cudasched
