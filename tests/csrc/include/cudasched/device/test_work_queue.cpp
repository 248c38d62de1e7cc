// Every item exactly once, whatever the sizes, batches and grids; the queue is ready for the next launch after each.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "cudasched/device/threads.hpp"
// After what it is compiled with.
#include "cudasched/device/work_queue.cuh"

namespace cudasched::device {
namespace {

using device_threads::Index;

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 2;
#else
constexpr int kRounds = 6;
#endif

enum class Way { kThread, kLanes, kWarp, kBlock, kSharedWarp, kMixed };
constexpr Way kWays[] = {Way::kThread, Way::kLanes, Way::kWarp, Way::kBlock, Way::kSharedWarp, Way::kMixed};

struct Case {
  Way way = Way::kThread;
  Index grid{1, 1, 1};
  Index block{32, 1, 1};
  Item items = 0;
  unsigned batch = 1;        // that comes from the queue at once
  unsigned warp_batch = 32;  // that comes from a block's batch at once; for lanes, how many wait for one another

  std::string text() const {
    const auto size = [](const Index& of) {
      return std::to_string(of.x) + "x" + std::to_string(of.y) + "x" + std::to_string(of.z);
    };
    return "way " + std::to_string(static_cast<int>(way)) + ", grid " + size(grid) + ", block " + size(block) + ", " +
           std::to_string(items) + " items, batch " + std::to_string(batch) + "/" + std::to_string(warp_batch);
  }
};

union Shared {
  SharedBatch batch;
  BlockBatch of_block;
};

struct Memory {
  WorkQueue queue{};
  std::vector<std::atomic<unsigned>> seen;
  explicit Memory(Item items) : seen(items) {}

  void process(Item item) {
    ASSERT_LT(item, seen.size());
    seen[item].fetch_add(1);
  }
};

// Lanes that diverge: each has its own number of steps for an item.
void work_a_little(Item item) {
  if (item % 7 == 0) __nanosleep(1);
}

void kernel(const Case& of, Memory& memory) {
  auto& shared = device_threads::shared<Shared>();
  WorkQueue& queue = memory.queue;
  Item item = 0;
  switch (of.way) {
    case Way::kThread: {
      ThreadWork work(queue, of.items, of.batch);
      while (work.next(item)) {
        memory.process(item);
        work_a_little(item);
      }
      break;
    }
    case Way::kLanes: {
      LaneWork work(queue, of.items, of.batch, of.warp_batch);
      unsigned left = 0;
      bool taken = false;
      while (work.next(left == 0, item, taken)) {
        if (taken) {
          memory.process(item);
          left = static_cast<unsigned>(item % 5);
        } else if (left != 0) {
          --left;
        }
      }
      EXPECT_FALSE(taken);
      break;
    }
    case Way::kWarp: {
      WarpWork work(queue, of.items, of.batch);
      for (Batch batch{}; work.next(batch);) {
        const unsigned lanes = static_cast<unsigned>(__popc(detail::lanes_of_warp()));
        for (unsigned i = detail::lane(); i < batch.count; i += lanes) memory.process(batch.first + i);
      }
      break;
    }
    case Way::kBlock: {
      BlockWork work(queue, of.items, of.batch, shared.of_block);
      for (Batch batch{}; work.next(batch);) {
        for (unsigned i = thread_in_block(); i < batch.count; i += threads_of_block()) memory.process(batch.first + i);
      }
      break;
    }
    case Way::kSharedWarp: {
      SharedWork work(queue, of.items, of.batch, shared.batch);
      for (Batch batch{}; work.next(batch, of.warp_batch);) {
        const unsigned lanes = static_cast<unsigned>(__popc(detail::lanes_of_warp()));
        for (unsigned i = detail::lane(); i < batch.count; i += lanes) memory.process(batch.first + i);
      }
      break;
    }
    case Way::kMixed: {  // half of the warps take for their lanes, the others for single threads
      bool taken = false;
      if (thread_in_block() / 32 % 2 == 0) {
        LaneWork work(queue, of.items, of.batch);
        while (work.next(true, item, taken)) {
          if (taken) memory.process(item);
        }
      } else {
        ThreadWork work(queue, of.items, of.warp_batch);
        while (work.next(item)) memory.process(item);
      }
      break;
    }
  }
  finish(queue);
}

void check(const Case& of, int launches = 2) {
  SCOPED_TRACE(of.text());
  Memory memory(of.items);
  for (int launch = 1; launch <= launches; ++launch) {
    device_threads::launch(of.grid, of.block, sizeof(Shared), [&] { kernel(of, memory); });
    for (Item i = 0; i < of.items; ++i) ASSERT_EQ(memory.seen[i].load(), static_cast<unsigned>(launch)) << "item " << i;
    ASSERT_EQ(memory.queue.next, 0U);
    ASSERT_EQ(memory.queue.blocks_done, 0U);
  }
}

TEST(WorkQueue, GivesEachItemOnce) {
  std::mt19937 random(20261123);
  const auto up_to = [&](unsigned most) { return std::uniform_int_distribution<unsigned>(0, most)(random); };
  for (int round = 0; round < kRounds; ++round) {
    for (const Way way : kWays) {
      Case of{.way = way};
      of.grid = {1 + up_to(2), 1 + up_to(1), 1};
      of.block = {1 + up_to(47), 1, 1 + up_to(1)};
      of.items = up_to(1) == 0 ? up_to(40) : up_to(700);
      of.batch = 1 + up_to(up_to(1) == 0 ? 3 : 150);
      of.warp_batch = 1 + up_to(70);
      check(of);
    }
  }
}

TEST(WorkQueue, EdgesOfSizes) {
  for (const Way way : kWays) {
    check({.way = way, .items = 0});
    check({.way = way, .items = 1, .batch = 64});
    check({.way = way, .grid = {3, 1, 1}, .block = {33, 1, 1}, .items = 32, .batch = 32});
    check({.way = way, .grid = {2, 1, 1}, .block = {64, 1, 1}, .items = 65, .batch = 1, .warp_batch = 1});
    check({.way = way, .block = {40, 1, 1}, .items = 100, .batch = 0, .warp_batch = 0});
    check({.way = way, .items = 100, .batch = 0xffffffffu, .warp_batch = 0xffffffffu});
  }
}

TEST(WorkQueue, ManyLaunchesNeedNoFill) {
  for (const Way way : kWays) check({.way = way, .grid = {4, 1, 1}, .items = 50, .batch = 3}, 4);
}

// The word of a block's batch holds the largest items that the header promises.
TEST(WorkQueue, LargeItems) {
  Memory memory(0);
  constexpr Item kItems = Item{1} << 40;
  constexpr Item kFirst = kItems - 100;
  memory.queue.next = kFirst;
  std::vector<std::atomic<unsigned>> seen(100);
  device_threads::launch({2, 1, 1}, {64, 1, 1}, sizeof(Shared), [&] {
    SharedWork work(memory.queue, kItems, detail::kLargestBatch, device_threads::shared<Shared>().batch);
    for (Batch batch{}; work.next(batch, 32);) {
      if (detail::lane() < batch.count) seen.at(batch.first + detail::lane() - kFirst).fetch_add(1);
    }
    finish(memory.queue);
  });
  for (const auto& count : seen) EXPECT_EQ(count.load(), 1U);
  memory.queue.next = kFirst;
  device_threads::launch({2, 1, 1}, {64, 1, 1}, sizeof(Shared), [&] {
    LaneWork work(memory.queue, kItems, detail::kLargestBatch);
    bool taken = false;
    for (Item item = 0; work.next(true, item, taken);) {
      if (taken) seen.at(item - kFirst).fetch_add(1);
    }
    finish(memory.queue);
  });
  for (const auto& count : seen) EXPECT_EQ(count.load(), 2U);
}

// What a warp takes for its lanes is a share of what is left: no warp has items at the end for which others wait.
TEST(WorkQueue, WarpsTakeFewerForTheirLanesTowardsTheEnd) {
  WorkQueue queue{};
  std::vector<Item> sizes;
  device_threads::launch({1, 1, 1}, {32, 1, 1}, sizeof(Shared), [&] {
    LaneWork work(queue, 10'000, 4096);
    bool taken = false;
    Item before = 0;
    for (Item item = 0; work.next(true, item, taken);) {
      if (detail::lane() == 0 && queue.next != before) {
        sizes.push_back(queue.next - before);
        before = queue.next;
      }
    }
    finish(queue);
  });
  ASSERT_FALSE(sizes.empty());
  EXPECT_EQ(sizes.front(), 2496U);  // a quarter, in whole warps
  EXPECT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
  EXPECT_LE(sizes.back(), 32U);
}

// Few items, which may be long, are no one warp's.
TEST(WorkQueue, LanesOfAWarpLeaveItemsToOtherWarps) {
  for (const unsigned items : {12u, 3u}) {
    WorkQueue queue{};
    std::atomic<unsigned> taken_in_all{0}, turns_with_more{0};
    device_threads::launch({4, 1, 1}, {64, 1, 1}, sizeof(Shared), [&] {
      LaneWork work(queue, items);  // for 8 warps
      bool taken = false;
      for (Item item = 0; work.next(true, item, taken);) {
        if (__popc(__ballot_sync(0xffffffffu, taken)) > 1) turns_with_more.fetch_add(1);
        if (taken) taken_in_all.fetch_add(1);
      }
      finish(queue);
    });
    EXPECT_EQ(taken_in_all.load(), items);
    EXPECT_EQ(turns_with_more.load(), 0U);
  }
}

// Of the lanes that want an item none gets one before enough of them do.
TEST(WorkQueue, LanesWaitForOneAnother) {
  WorkQueue queue{};
  std::atomic<unsigned> turns_with_few{0}, took_with_few{0};
  constexpr unsigned kTogether = 8;
  device_threads::launch({1, 1, 1}, {40, 1, 1}, sizeof(Shared), [&] {
    LaneWork work(queue, 500, 64, kTogether);
    bool taken = false;
    Item item = 0;
    unsigned left = 0;
    while (true) {
      const bool few = __popc(__ballot_sync(0xffffffffu, left == 0)) < static_cast<int>(kTogether);
      if (!work.next(left == 0, item, taken)) break;
      if (few) turns_with_few.fetch_add(1);
      if (few && taken) took_with_few.fetch_add(1);
      if (taken) left = 1 + static_cast<unsigned>(item * 7919 % 97);
      if (left != 0) --left;
    }
    finish(queue);
  });
  EXPECT_GT(turns_with_few.load(), 0U);
  EXPECT_EQ(took_with_few.load(), 0U);
}

// A lane with a long item does not keep the others of its warp from all the rest.
TEST(WorkQueue, ALongItemHoldsNoLaneBack) {
  WorkQueue queue{};
  std::atomic<unsigned> others{0};
  constexpr Item kItems = 300;
  device_threads::launch({1, 1, 1}, {32, 1, 1}, sizeof(Shared), [&] {
    LaneWork work(queue, kItems);
    bool taken = false;
    bool idle = true;
    for (Item item = 0; work.next(idle, item, taken);) {
      if (taken) idle = item != 0;
      if (taken && item != 0) others.fetch_add(1);
      if (!idle && item == 0) idle = others.load() == kItems - 1;
    }
    finish(queue);
  });
  EXPECT_EQ(others.load(), kItems - 1);
}

// One warp that works on a long item does not keep the other of its block from what the block has.
TEST(WorkQueue, ALongItemHoldsNobodyBack) {
  WorkQueue queue{};
  std::atomic<unsigned> others{0};
  constexpr Item kItems = 64;
  device_threads::launch({1, 1, 1}, {64, 1, 1}, sizeof(Shared), [&] {
    SharedWork work(queue, kItems, 16, device_threads::shared<Shared>().batch);
    for (Batch batch{}; work.next(batch, 1);) {
      if (batch.first == 0) {
        while (others.load() < kItems - 1) std::this_thread::yield();
      } else if (detail::lane() == 0) {
        others.fetch_add(1);
      }
    }
    finish(queue);
  });
  EXPECT_EQ(others.load(), kItems - 1);
}

}  // namespace
}  // namespace cudasched::device
