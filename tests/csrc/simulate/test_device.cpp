#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "simulate/device.hpp"

namespace cudasched::simulate {
namespace {

constexpr std::int64_t kUs = 1000;

std::unique_ptr<Device> make_device() {
  auto device = std::make_unique<Device>();
  device->initialize(0);
  return device;
}

int make_context(Device& device) {
  int context = -1;
  EXPECT_EQ(device.create_context(&context), Status::kOk);
  return context;
}

int make_stream(Device& device, int context) {
  int stream = -1;
  EXPECT_EQ(device.create_stream(context, &stream), Status::kOk);
  return stream;
}

Work kernel(std::uint64_t blocks, std::uint32_t per_sm, std::int64_t block_us, int priority = 0) {
  return {.kind = OpKind::kKernel,
          .priority = priority,
          .blocks = blocks,
          .blocks_per_sm = per_sm,
          .block_ns = block_us * kUs};
}

Ticket submit(Device& device, int context, int stream, const Work& work) {
  Ticket ticket = 0;
  EXPECT_EQ(device.submit(context, stream, work, &ticket), Status::kOk);
  return ticket;
}

std::map<Ticket, std::int64_t> take_all(Device& device, int context) {
  std::map<Ticket, std::int64_t> finished;
  for (Completion done; device.take_completed(context, &done);) {
    EXPECT_TRUE(finished.emplace(done.ticket, done.finish_ns).second);
  }
  return finished;
}

class OneContext : public ::testing::Test {
 protected:
  // On a stream of its own.
  Ticket submit_alone(const Work& work) { return submit(*device_, context_, make_stream(*device_, context_), work); }
  std::map<Ticket, std::int64_t> run_all() {
    device_->advance(1'000'000);
    return take_all(*device_, context_);
  }

  const std::unique_ptr<Device> device_ = make_device();
  const int context_ = make_context(*device_);
};

TEST_F(OneContext, KernelRunsInWaves) {
  const int stream = make_stream(*device_, context_);
  const Ticket one = submit(*device_, context_, stream, kernel(kSmCount * 4, 4, 20));
  const Ticket tail = submit(*device_, context_, stream, kernel(kSmCount * 4 + 1, 4, 20));
  const auto finished = run_all();
  EXPECT_EQ(finished.at(one), 20 * kUs);
  EXPECT_EQ(finished.at(tail), 60 * kUs);
  EXPECT_EQ(device_->next_event_ns(), kNever);
}

TEST_F(OneContext, KernelsOfTwoStreamsShareTheSms) {
  const Ticket a = submit_alone(kernel(kSmCount, 2, 30));
  const Ticket b = submit_alone(kernel(kSmCount, 2, 30));
  const Ticket c = submit_alone(kernel(kSmCount, 2, 30));
  EXPECT_EQ(device_->resident_blocks(a), 132U);
  EXPECT_EQ(device_->resident_blocks(b), 132U);
  EXPECT_EQ(device_->resident_blocks(c), 0U);
  const auto finished = run_all();
  EXPECT_EQ(finished.at(a), 30 * kUs);
  EXPECT_EQ(finished.at(b), 30 * kUs);
  EXPECT_EQ(finished.at(c), 60 * kUs);
}

TEST_F(OneContext, HigherPriorityTakesTheSlotsThatFree) {
  const Ticket low = submit_alone(kernel(kSmCount * 10, 1, 10, 0));
  device_->advance(5 * kUs);
  const Ticket high = submit_alone(kernel(kSmCount * 2, 1, 10, -5));
  EXPECT_EQ(device_->resident_blocks(high), 0U) << "resident blocks are not pushed out";
  device_->advance(10 * kUs);
  EXPECT_EQ(device_->resident_blocks(high), 132U);
  EXPECT_EQ(device_->resident_blocks(low), 0U);
  const auto finished = run_all();
  EXPECT_EQ(finished.at(high), 30 * kUs);
  EXPECT_EQ(finished.at(low), 120 * kUs);
}

TEST_F(OneContext, WaitHoldsAStreamUntilTheOtherIsThere) {
  const int a = make_stream(*device_, context_);
  const int b = make_stream(*device_, context_);
  submit(*device_, context_, a, kernel(1, 1, 50));
  const Ticket record = submit(*device_, context_, a, {});
  submit(*device_, context_, b, {.kind = OpKind::kWait, .wait_for = record});
  const Ticket after = submit(*device_, context_, b, kernel(1, 1, 10));
  const auto finished = run_all();
  EXPECT_EQ(finished.at(record), 50 * kUs);
  EXPECT_EQ(finished.at(after), 60 * kUs);
}

TEST_F(OneContext, CopiesGoOneAtATimeOldestFirst) {
  const Work copy{.kind = OpKind::kCopy, .bytes = 50'000};
  const Ticket first = submit_alone(copy);
  const Ticket second = submit_alone(copy);
  const auto finished = run_all();
  EXPECT_EQ(finished.at(first), kCopyLatencyNs + 1000);
  EXPECT_EQ(finished.at(second), 2 * (kCopyLatencyNs + 1000));
}

class TwoContexts : public ::testing::Test {
 protected:
  const std::unique_ptr<Device> device_ = make_device();
  const int a_ = make_context(*device_);
  const int b_ = make_context(*device_);
};

TEST_F(TwoContexts, AContextWithAShortSliceGivesWayAtOnceAndLosesNothingAlone) {
  device_->set_slice(a_, 1 * kUs);
  const Ticket long_a = submit(*device_, a_, make_stream(*device_, a_), kernel(kSmCount, 1, 3000));
  device_->advance(500 * kUs);
  const Ticket short_b = submit(*device_, b_, make_stream(*device_, b_), kernel(kSmCount, 1, 100));
  device_->advance(100'000'000);
  const std::int64_t b_done = take_all(*device_, b_).at(short_b);
  EXPECT_EQ(b_done, 500 * kUs + kSwitchNs + 100 * kUs);
  EXPECT_EQ(take_all(*device_, a_).at(long_a), b_done + kSwitchNs + 2500 * kUs);
  const Ticket alone = submit(*device_, a_, make_stream(*device_, a_), kernel(kSmCount, 1, 3000));
  const std::int64_t began = device_->now_ns();
  device_->advance(200'000'000);
  EXPECT_EQ(take_all(*device_, a_).at(alone), began + 3000 * kUs);
}

// It has a slice of the other's each time that it has had its own.
TEST_F(TwoContexts, AShortSliceBesideOneThatNeverYieldsGetsNextToNothing) {
  device_->set_slice(a_, 1 * kUs);
  const Ticket starved = submit(*device_, a_, make_stream(*device_, a_), kernel(kSmCount, 1, 100));
  submit(*device_, b_, make_stream(*device_, b_), kernel(kSmCount, 1, 1'000'000));
  device_->advance(200'000'000);  // 99 us of its 100 take 99 rounds of 2.3 ms
  EXPECT_FALSE(device_->is_complete(starved));
  device_->advance(300'000'000);
  EXPECT_TRUE(device_->is_complete(starved));
}

TEST_F(TwoContexts, ContextsTakeTurnsAndAnIdleOneYields) {
  // Blocks far longer than a slice freeze and go on.
  const Ticket long_a = submit(*device_, a_, make_stream(*device_, a_), kernel(kSmCount, 1, 3000));
  const Ticket short_b = submit(*device_, b_, make_stream(*device_, b_), kernel(kSmCount, 1, 100));
  device_->advance(100'000'000);
  const std::int64_t b_done = take_all(*device_, b_).at(short_b);
  EXPECT_EQ(b_done, kSliceNs + kSwitchNs + 100 * kUs);
  EXPECT_EQ(take_all(*device_, a_).at(long_a), b_done + kSwitchNs + (3000 * kUs - kSliceNs))
      << "b had nothing more and yielded";
}

TEST(Device, BusyContextsGetEqualTime) {
  auto device = make_device();
  constexpr int kContexts = 4;
  std::vector<std::pair<int, int>> clients;
  for (int i = 0; i < kContexts; ++i) {
    const int context = make_context(*device);
    clients.emplace_back(context, make_stream(*device, context));
  }
  std::map<int, int> done;
  for (std::int64_t now = 0; now < 400'000'000; now += 50'000) {
    device->advance(now);
    for (const auto& [context, stream] : clients) {
      for (Completion completion; device->take_completed(context, &completion);) ++done[context];
      while (device->op_count(context) < 8) submit(*device, context, stream, kernel(kSmCount * 4, 4, 40));
    }
  }
  const auto [least, most] =
      std::minmax_element(done.begin(), done.end(), [](auto a, auto b) { return a.second < b.second; });
  EXPECT_GT(least->second, 1000);
  EXPECT_LT(most->second - least->second, 120) << "at most about two slices apart";
}

TEST(Device, KilledContextLeavesNothing) {
  auto device = make_device();
  const int a = make_context(*device);
  const int b = make_context(*device);
  const int stream = make_stream(*device, a);
  Ticket last = 0;
  for (int i = 0; i < kOpsPerContext; ++i) last = submit(*device, a, stream, kernel(100, 1, 1000));
  const int other = make_stream(*device, b);
  submit(*device, b, other, {.kind = OpKind::kWait, .wait_for = last});
  const Ticket waiting = submit(*device, b, other, kernel(1, 1, 10));
  device->advance(3'000'000);
  device->destroy_context(a);
  EXPECT_TRUE(device->consistent());
  EXPECT_TRUE(device->is_complete(last));
  device->advance(10'000'000);
  EXPECT_EQ(take_all(*device, b).count(waiting), 1U) << "a wait for work that is gone is over";
  EXPECT_EQ(device->next_event_ns(), kNever);
  const int again = make_context(*device);
  EXPECT_EQ(again, a);
  EXPECT_EQ(device->op_count(again), 0);
  Completion completion;
  EXPECT_FALSE(device->take_completed(again, &completion));
}

TEST(Device, LimitsAreErrors) {
  auto device = make_device();
  std::vector<int> contexts;
  for (int i = 0; i < kContextCount; ++i) contexts.push_back(make_context(*device));
  int more = 0;
  EXPECT_EQ(device->create_context(&more), Status::kFull);
  for (int i = 0; i < kStreamsPerContext; ++i) make_stream(*device, contexts[3]);
  EXPECT_EQ(device->create_stream(contexts[3], &more), Status::kFull);
  Ticket ticket = 0;
  for (int i = 0; i < kOpsPerContext; ++i) submit(*device, contexts[3], 0, kernel(1, 1, 1));
  EXPECT_EQ(device->submit(contexts[3], 0, {}, &ticket), Status::kFull);
  device->advance(1'000'000'000);
  EXPECT_EQ(device->submit(contexts[3], 0, {}, &ticket), Status::kFull) << "complete, but not taken";
  Completion completion;
  EXPECT_TRUE(device->take_completed(contexts[3], &completion));
  EXPECT_EQ(device->submit(contexts[3], 0, {}, &ticket), Status::kOk);
  EXPECT_EQ(device->submit(contexts[4], 0, {}, &ticket), Status::kInvalid) << "no such stream";
  EXPECT_EQ(device->submit(-1, 0, {}, &ticket), Status::kInvalid);
  EXPECT_EQ(device->submit(contexts[3], 0, kernel(0, 1, 1), &ticket), Status::kInvalid);
  EXPECT_EQ(device->submit(contexts[3], 0, kernel(1, 0, 1), &ticket), Status::kInvalid);
  EXPECT_EQ(device->submit(contexts[3], 0, kernel(1, kMaxBlocksPerSm + 1, 1), &ticket), Status::kInvalid);
  EXPECT_EQ(device->submit(contexts[3], 0, kernel(1, 1, 0), &ticket), Status::kInvalid);
  EXPECT_TRUE(device->consistent());
}

TEST_F(OneContext, ManyCohortsNeverOverflow) {
  for (int i = 0; i < 200; ++i) {
    const int stream = make_stream(*device_, context_);
    for (int k = 0; k < 5; ++k) submit(*device_, context_, stream, kernel(40 + i, 32, 100 + i * 7 + k));
    device_->advance(device_->now_ns() + 1000);
  }
  EXPECT_TRUE(device_->consistent());
  device_->advance(10'000'000'000);
  EXPECT_EQ(take_all(*device_, context_).size(), 1000U);
  EXPECT_TRUE(device_->consistent());
}

// ---- random schedules

struct Step {
  std::int64_t at_ns = 0;
  int context = 0;
  int stream = 0;
  Work work;
  int wait_for = -1;  // an earlier step
  bool kill = false;  // the context of this step, which is made anew
};

std::vector<Step> random_steps(std::mt19937_64& random, int count, int contexts, int streams) {
  std::vector<Step> steps;
  std::int64_t now = 0;
  const auto pick = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int i = 0; i < count; ++i) {
    Step step;
    if (pick(0, 3) == 0) now += pick(0, 200'000);
    step.at_ns = now;
    step.context = static_cast<int>(pick(0, contexts - 1));
    step.stream = static_cast<int>(pick(0, streams - 1));
    switch (pick(0, 9)) {
      case 0:
        step.work = {.kind = OpKind::kCopy, .bytes = static_cast<std::uint64_t>(pick(0, 1'000'000))};
        break;
      case 1:
        break;
      case 2:
      case 3:
        if (i > 0) {
          step.work.kind = OpKind::kWait;
          step.wait_for = static_cast<int>(pick(std::max(0, i - 50), i - 1));
        }
        break;
      default:
        step.work = kernel(static_cast<std::uint64_t>(pick(1, 600)), static_cast<std::uint32_t>(pick(1, 32)),
                           pick(1, 60), static_cast<int>(pick(-5, 0)));
        break;
    }
    step.kill = pick(0, 999) == 0;
    steps.push_back(step);
  }
  return steps;
}

struct Outcome {
  std::vector<std::int64_t> finish_ns;  // of each step; -1: gone with its context
  std::vector<std::uint64_t> order;
};

enum class Advance { kOnce, kManySmall, kWithRebuilds };

// Runs the steps and checks, all the time, what must hold: consistent, streams in order, each done exactly once.
Outcome run(const std::vector<Step>& steps, int contexts, int streams, Advance how, std::uint64_t seed) {
  auto device = make_device();
  std::mt19937_64 random(seed);
  Outcome outcome{std::vector<std::int64_t>(steps.size(), -1), std::vector<std::uint64_t>(steps.size(), 0)};
  std::vector<Ticket> tickets(steps.size(), 0);
  std::map<Ticket, std::size_t> open;
  std::vector<std::vector<std::size_t>> in_stream(static_cast<std::size_t>(contexts * streams));
  std::vector<std::size_t> next_in_stream(in_stream.size(), 0);
  std::vector<int> slots;
  const auto add_context = [&] {
    const int slot = make_context(*device);
    for (int i = 0; i < streams; ++i) EXPECT_EQ(make_stream(*device, slot), i);
    return slot;
  };
  for (int i = 0; i < contexts; ++i) slots.push_back(add_context());
  std::uint64_t last_order = 0;
  const auto take = [&] {
    for (std::size_t c = 0; c < slots.size(); ++c) {
      std::uint64_t order_in_context = 0;
      for (Completion done; device->take_completed(slots[c], &done);) {
        const auto found = open.find(done.ticket);
        ASSERT_NE(found, open.end()) << "completed twice, or never submitted";
        const std::size_t step = found->second;
        open.erase(found);
        outcome.finish_ns[step] = done.finish_ns;
        outcome.order[step] = done.order;
        EXPECT_GT(done.order, order_in_context);
        order_in_context = done.order;
        last_order = std::max(last_order, done.order);
        const auto stream = c * static_cast<std::size_t>(streams) + static_cast<std::size_t>(steps[step].stream);
        ASSERT_EQ(in_stream[stream][next_in_stream[stream]++], step) << "out of stream order";
        if (steps[step].wait_for >= 0) {
          EXPECT_TRUE(device->is_complete(tickets[static_cast<std::size_t>(steps[step].wait_for)]));
        }
      }
    }
  };
  const auto advance_to = [&](std::int64_t now) {
    if (how != Advance::kOnce) {
      for (int i = 0; i < 3 && device->now_ns() < now; ++i) {
        device->advance(std::uniform_int_distribution<std::int64_t>(device->now_ns(), now)(random));
        if (how == Advance::kWithRebuilds) device->rebuild();
        if (random() % 8 == 0) take();
      }
    }
    device->advance(now);
  };
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    advance_to(step.at_ns);
    const auto c = static_cast<std::size_t>(step.context);
    if (step.kill) {
      take();
      device->destroy_context(slots[c]);
      std::erase_if(open, [&](const auto& entry) { return steps[entry.second].context == step.context; });
      for (int s = 0; s < streams; ++s) {
        in_stream[c * static_cast<std::size_t>(streams) + static_cast<std::size_t>(s)].clear();
        next_in_stream[c * static_cast<std::size_t>(streams) + static_cast<std::size_t>(s)] = 0;
      }
      slots[c] = add_context();
    }
    Work work = step.work;
    if (step.wait_for >= 0) work.wait_for = tickets[static_cast<std::size_t>(step.wait_for)];
    // Full: let the model run on by what is due, which is the same however it was advanced before.
    while (device->submit(slots[c], step.stream, work, &tickets[i]) == Status::kFull) {
      take();
      if (device->op_count(slots[c]) == kOpsPerContext) device->advance(device->next_event_ns());
    }
    open.emplace(tickets[i], i);
    in_stream[c * static_cast<std::size_t>(streams) + static_cast<std::size_t>(step.stream)].push_back(i);
    if (i % 64 == 0) {
      EXPECT_TRUE(device->consistent()) << "step " << i;
      take();
    }
    if (::testing::Test::HasFatalFailure()) return outcome;
  }
  for (int round = 0; !open.empty() && round < 10'000'000; ++round) {
    const std::int64_t next = device->next_event_ns();
    if (next == kNever) break;
    advance_to(how == Advance::kOnce ? next + 1'000'000'000 : next + 100'000);
    take();
  }
  EXPECT_TRUE(open.empty()) << open.size() << " operations never completed";
  EXPECT_TRUE(device->consistent());
  return outcome;
}

class RandomSchedule : public ::testing::TestWithParam<int> {};

TEST_P(RandomSchedule, KeepsItsPromisesHoweverItIsAdvanced) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  std::mt19937_64 random(seed);
  const int contexts = 1 + GetParam() % 5;
  const int streams = 1 + GetParam() * 7 % 13;
  const std::vector<Step> steps = random_steps(random, 6000, contexts, streams);
  const Outcome once = run(steps, contexts, streams, Advance::kOnce, seed);
  ASSERT_FALSE(HasFailure());
  const Outcome small = run(steps, contexts, streams, Advance::kManySmall, seed + 1);
  ASSERT_FALSE(HasFailure());
  const Outcome rebuilt = run(steps, contexts, streams, Advance::kWithRebuilds, seed + 2);
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(once.finish_ns, small.finish_ns);
  EXPECT_EQ(once.order, small.order);
  EXPECT_EQ(once.finish_ns, rebuilt.finish_ns) << "rebuild must change nothing in a whole model";
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSchedule, ::testing::Range(0, 16));

}  // namespace
}  // namespace cudasched::simulate
