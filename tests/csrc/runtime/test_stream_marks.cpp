// Which class a call has by the stream that it is on: the table of marks by itself, and through the entry points of the
// simulated driver.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "runtime/engine.hpp"
#include "runtime/stream_marks.hpp"

namespace cudasched::test {
namespace {

using runtime::kBoundOrigin;
using runtime::kNoOrigin;
using runtime::Origin;
using runtime::StreamMarks;

CUstream stream_of(std::uint64_t number) { return reinterpret_cast<CUstream>(0x1000 + number * 64); }
std::uint64_t key_of(std::uint64_t number) { return StreamMarks::key(stream_of(number), nullptr); }
const auto kContext = reinterpret_cast<CUcontext>(0x7000);

TEST(StreamMarks, TheLegacyStreamIsAnotherOneInEachContext) {
  const auto other = reinterpret_cast<CUcontext>(0x8000);
  EXPECT_NE(StreamMarks::key(CU_STREAM_LEGACY, kContext), StreamMarks::key(CU_STREAM_LEGACY, other));
  EXPECT_EQ(StreamMarks::key(CU_STREAM_LEGACY, nullptr), 0U);
  EXPECT_EQ(StreamMarks::key(CU_STREAM_PER_THREAD, kContext), 0U);
  EXPECT_EQ(StreamMarks::key(nullptr, kContext), 0U);
  EXPECT_EQ(StreamMarks::key(stream_of(1), kContext), StreamMarks::key(stream_of(1), other));
}

TEST(StreamMarks, AMarkLastsUntilItsRegionIsLeftAndItsWorkIsDone) {
  auto marks = std::make_unique<StreamMarks>();
  marks->entered(5);
  EXPECT_FALSE(marks->in_use());
  marks->mark(key_of(1), stream_of(1), kContext, 5);
  EXPECT_TRUE(marks->in_use());
  EXPECT_EQ(marks->find(key_of(1)), 5U);
  EXPECT_EQ(marks->find(key_of(2)), kNoOrigin);

  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(1)), 5U) << "its region is open";
  EXPECT_FALSE(marks->needs_sweep());
  marks->left(5);
  EXPECT_TRUE(marks->needs_sweep());
  marks->sweep([](CUstream stream, CUcontext context) {
    EXPECT_EQ(stream, stream_of(1));
    EXPECT_EQ(context, kContext);
    return false;
  });
  EXPECT_EQ(marks->find(key_of(1)), 5U) << "its work is not done";
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(1)), kNoOrigin);
  EXPECT_FALSE(marks->in_use());
}

TEST(StreamMarks, ALaterRegionTakesTheMarkOver) {
  auto marks = std::make_unique<StreamMarks>();
  marks->entered(5);
  marks->mark(key_of(1), stream_of(1), kContext, 5);
  marks->left(5);
  marks->entered(6);
  // A sweep that had found the first region left comes too late.
  marks->sweep([&](CUstream, CUcontext) {
    marks->mark(key_of(1), stream_of(1), kContext, 6);
    return true;
  });
  EXPECT_EQ(marks->find(key_of(1)), 6U);
  EXPECT_TRUE(marks->in_use());
}

TEST(StreamMarks, LatencyWorkContestsAMarkForOneRegion) {
  auto marks = std::make_unique<StreamMarks>();
  EXPECT_FALSE(marks->contest(key_of(1)));
  marks->entered(5);
  marks->mark(key_of(1), stream_of(1), kContext, 5);
  EXPECT_TRUE(marks->contest(key_of(1)));
  EXPECT_FALSE(marks->contest(key_of(1))) << "counted once";
  EXPECT_EQ(marks->find(key_of(1)), kNoOrigin);
  EXPECT_TRUE(marks->marked(key_of(1)));
  marks->mark(key_of(1), stream_of(1), kContext, 5);
  EXPECT_EQ(marks->find(key_of(1)), kNoOrigin);
  marks->mark(key_of(1), stream_of(1), kContext, 6);
  EXPECT_EQ(marks->find(key_of(1)), 6U);
}

TEST(StreamMarks, AStreamInheritsUntilItWaitsForAnother) {
  auto marks = std::make_unique<StreamMarks>();
  marks->entered(5);
  marks->mark(key_of(1), stream_of(1), kContext, 5);
  marks->inherit(key_of(2), stream_of(2), kContext, 5);
  EXPECT_EQ(marks->find(key_of(2)), 5U);
  marks->inherit(key_of(2), stream_of(2), kContext, kNoOrigin);
  EXPECT_EQ(marks->find(key_of(2)), kNoOrigin);
  marks->inherit(key_of(1), stream_of(1), kContext, kNoOrigin);
  EXPECT_EQ(marks->find(key_of(1)), 5U) << "a region's own mark is not lost by waiting";
}

TEST(StreamMarks, WhatABoundStreamPassesOnEndsWithTheLastBoundStream) {
  auto marks = std::make_unique<StreamMarks>();
  marks->bound(true);
  marks->inherit(key_of(2), stream_of(2), kContext, kBoundOrigin);
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(2)), kBoundOrigin);
  marks->bound(false);
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(2)), kNoOrigin);
}

TEST(StreamMarks, AFullTableIsCountedAndSweptPlacesAreHadAgain) {
  auto marks = std::make_unique<StreamMarks>();
  marks->entered(5);
  for (std::uint64_t i = 0; i < 3 * StreamMarks::kSlots; ++i) marks->mark(key_of(i), stream_of(i), kContext, 5);
  EXPECT_GT(marks->overflows(), 0U);
  marks->left(5);
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_FALSE(marks->in_use());
  const std::uint64_t before = marks->overflows();
  marks->entered(6);
  for (std::uint64_t i = 0; i < 100; ++i) {
    marks->mark(key_of(100'000 + i), stream_of(100'000 + i), kContext, 6);
    EXPECT_EQ(marks->find(key_of(100'000 + i)), 6U);
  }
  EXPECT_EQ(marks->overflows(), before);
}

TEST(StreamMarks, MoreOpenRegionsThanThePlacesForThemKeepEveryMark) {
  auto marks = std::make_unique<StreamMarks>();
  for (Origin origin = 1; origin <= StreamMarks::kOpenRegions + 1; ++origin) marks->entered(origin);
  marks->mark(key_of(1), stream_of(1), kContext, 1);
  marks->left(1);
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(1)), 1U);
  marks->left(StreamMarks::kOpenRegions + 1);
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_EQ(marks->find(key_of(1)), kNoOrigin);
}

// Streams come and go for days.
TEST(StreamMarks, AgreesWithAMapUnderChurn) {
  auto marks = std::make_unique<StreamMarks>();
  std::unordered_map<std::uint64_t, Origin> model;
  std::mt19937_64 random(7);
  for (Origin origin = 1; origin <= 20; ++origin) marks->entered(origin);
  for (int step = 0; step < 200'000; ++step) {
    const std::uint64_t stream = random() % 300;
    if (random() % 2 == 0) {
      const Origin origin = random() % 20 + 1;
      marks->mark(key_of(stream), stream_of(stream), kContext, origin);
      model[stream] = origin;
    } else {
      marks->forget(key_of(stream));
      model.erase(stream);
    }
    const std::uint64_t asked = random() % 300;
    ASSERT_EQ(marks->find(key_of(asked)), model.contains(asked) ? model[asked] : kNoOrigin);
    ASSERT_EQ(marks->in_use(), !model.empty());
  }
}

TEST(StreamMarks, ThreadsThatMarkWhileOthersSweepLoseNoMarkOfAnOpenRegion) {
  auto marks = std::make_unique<StreamMarks>();
  std::atomic<bool> over{false};
  std::thread sweeper([&] {
    while (!over.load()) marks->sweep([](CUstream, CUcontext) { return true; });
  });
  std::vector<std::thread> markers;
  for (std::uint64_t id = 0; id < 3; ++id) {
    markers.emplace_back([&, id] {
      for (std::uint64_t step = 0; step < 2'000; ++step) {
        const Origin origin = (id + 1) * 1'000'000 + step;
        const std::uint64_t stream = id * 100 + step % 5;
        marks->entered(origin);
        marks->mark(key_of(stream), stream_of(stream), kContext, origin);
        ASSERT_EQ(marks->find(key_of(stream)), origin);
        marks->left(origin);
      }
    });
  }
  for (std::thread& marker : markers) marker.join();
  over.store(true);
  sweeper.join();
  marks->sweep([](CUstream, CUcontext) { return true; });
  EXPECT_FALSE(marks->in_use());
}

TEST(EventOrigins, RemembersTheLastRecordAndForgetsWhatItHasNoPlaceFor) {
  auto origins = std::make_unique<runtime::EventOrigins>();
  const auto event = [](std::uint64_t number) { return reinterpret_cast<CUevent>(0x9000 + number * 32); };
  EXPECT_EQ(origins->find(event(1)), kNoOrigin);
  origins->set(event(1), 5);
  EXPECT_EQ(origins->find(event(1)), 5U);
  origins->set(event(1), kNoOrigin);
  EXPECT_EQ(origins->find(event(1)), kNoOrigin);
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    origins->set(event(i), i + 1);
    ASSERT_EQ(origins->find(event(i)), i + 1);
  }
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    const Origin found = origins->find(event(i));
    ASSERT_TRUE(found == kNoOrigin || found == i + 1) << "another event's";
  }
}

// ---- through the entry points

class ClassOfAStream : public ::testing::Test {
 protected:
  static std::uint64_t best_effort() { return state().best_effort_launches; }

  // Did this launch go as best effort?
  bool goes_as_best_effort(CUstream stream) {
    const std::uint64_t before = best_effort();
    const std::uint64_t all = state().launches;
    Program::check(program_.launch(1, stream));
    Program::check(program_.synchronize(stream));
    EXPECT_EQ(state().launches - all, 1U);
    return best_effort() != before;
  }

  // What `act` does on a thread of its own, which is in no region.
  template <typename Act>
  void on_another_thread(Act&& act) {
    std::thread([&] {
      program_.use_on_this_thread();
      act();
    }).join();
  }

  static void record(CUevent event, CUstream stream) {
    Program::check(call<CUresult(CUevent, CUstream)>("cuEventRecord")(event, stream));
  }
  static void wait(CUstream stream, CUevent event) {
    Program::check(call<CUresult(CUstream, CUevent, unsigned)>("cuStreamWaitEvent")(stream, event, 0));
  }
  static CUevent new_event() {
    CUevent event = nullptr;
    Program::check(call<CUresult(CUevent*, unsigned)>("cuEventCreate")(&event, CU_EVENT_DISABLE_TIMING));
    return event;
  }

  Program program_;
};

// What autograd's threads are to a training step.
TEST_F(ClassOfAStream, ReachesTheThreadsThatWorkForARegion) {
  CUstream const stream = program_.stream();
  CUstream const another = Program::new_stream();
  on_another_thread([&] { EXPECT_FALSE(goes_as_best_effort(stream)); });
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    EXPECT_TRUE(goes_as_best_effort(stream));
    on_another_thread([&] {
      EXPECT_TRUE(goes_as_best_effort(stream));
      EXPECT_FALSE(goes_as_best_effort(another));
    });
  }
  EXPECT_TRUE(eventually([&] {
    bool normal = false;
    on_another_thread([&] { normal = !goes_as_best_effort(stream); });
    return normal;
  }));
}

TEST_F(ClassOfAStream, IsKeptWhileTheRegionsWorkRuns) {
  CUstream const stream = program_.stream();
  const std::uint64_t before = best_effort();
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    EXPECT_TRUE(goes_as_best_effort(stream));
    Program::check(program_.launch(2, stream, 10'000));
  }
  on_another_thread([&] { Program::check(program_.launch(3, stream)); });
  Program::check(program_.synchronize(stream));
  EXPECT_EQ(best_effort() - before, 3U);
}

TEST_F(ClassOfAStream, IsTheLegacyStreamsOwnToo) {
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(nullptr));
  on_another_thread([&] {
    EXPECT_TRUE(goes_as_best_effort(nullptr));
    EXPECT_TRUE(goes_as_best_effort(CU_STREAM_LEGACY));
    EXPECT_FALSE(goes_as_best_effort(CU_STREAM_PER_THREAD));
  });
}

// What NCCL's streams are to data-parallel training.
TEST_F(ClassOfAStream, IsInheritedByAStreamThatWaits) {
  CUstream const stream = program_.stream();
  CUstream const waiting = Program::new_stream();
  CUstream const foreign = Program::new_stream();
  CUevent const event = new_event();
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(stream));
  on_another_thread([&] {
    record(event, stream);
    wait(waiting, event);
    EXPECT_TRUE(goes_as_best_effort(waiting));
    record(event, foreign);
    wait(waiting, event);
    EXPECT_FALSE(goes_as_best_effort(waiting));
  });
}

TEST_F(ClassOfAStream, IsInheritedFromAStreamThatIsBound) {
  CUstream const stream = program_.stream();
  CUstream const waiting = Program::new_stream();
  CUevent const event = new_event();
  ASSERT_EQ(cudasched_bind_stream(reinterpret_cast<std::uint64_t>(stream), CUDASCHED_BEST_EFFORT), CUDASCHED_OK);
  record(event, stream);
  wait(waiting, event);
  EXPECT_TRUE(goes_as_best_effort(waiting));
  ASSERT_EQ(cudasched_unbind_stream(reinterpret_cast<std::uint64_t>(stream)), CUDASCHED_OK);
  EXPECT_TRUE(eventually([&] { return !goes_as_best_effort(waiting); }));
}

TEST_F(ClassOfAStream, OfLatencyIsNeverCarried) {
  CUstream const stream = program_.stream();
  CUstream const waiting = Program::new_stream();
  CUevent const event = new_event();
  const InRegion region(CUDASCHED_LATENCY);
  Program::check(program_.launch(1, stream));
  const std::uint64_t before = state().latency_launches;
  on_another_thread([&] {
    Program::check(program_.launch(2, stream));
    record(event, stream);
    wait(waiting, event);
    Program::check(program_.launch(3, waiting));
  });
  EXPECT_EQ(state().latency_launches, before);
}

TEST_F(ClassOfAStream, GoesToLatencyWorkWhereBothAreOnOneStream) {
  CUstream const stream = program_.stream();
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(stream));
  const auto before = state();
  on_another_thread([&] {
    {
      const InRegion inner(CUDASCHED_LATENCY);
      Program::check(program_.launch(2, stream));
      Program::check(program_.launch(3, stream));
      Program::check(program_.synchronize(stream));
    }
    EXPECT_FALSE(goes_as_best_effort(stream));
  });
  EXPECT_EQ(state().contested_streams - before.contested_streams, 1U);
  EXPECT_EQ(state().normal_beside_best_effort - before.normal_beside_best_effort, 1U);
  const InRegion later(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(stream));
  on_another_thread([&] { EXPECT_TRUE(goes_as_best_effort(stream)); });
}

TEST_F(ClassOfAStream, IsNotItsHandlesNextOwners) {
  CUstream const stream = Program::new_stream();
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(stream));
  Program::check(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream));
  on_another_thread([&] {
    // The driver may give the same handle again; another one has no mark in any case.
    for (int i = 0; i < 8; ++i) EXPECT_FALSE(goes_as_best_effort(Program::new_stream()));
  });
}

TEST_F(ClassOfAStream, DoesNotOutliveTheContextThatItWasBoundIn) {
  CUcontext context = nullptr;
  Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&context, 0, 0));
  CUstream const stream = Program::new_stream();
  const auto number = reinterpret_cast<std::uint64_t>(stream);
  ASSERT_EQ(cudasched_bind_stream(number, CUDASCHED_BEST_EFFORT), CUDASCHED_OK);
  program_.use_on_this_thread();
  CUstream const elsewhere = program_.stream();
  const auto other = reinterpret_cast<std::uint64_t>(elsewhere);
  ASSERT_EQ(cudasched_bind_stream(other, CUDASCHED_BEST_EFFORT), CUDASCHED_OK);
  Class found = Class::kNormal;
  EXPECT_TRUE(runtime::hot().streams.find(number, found));
  Program::check(call<CUresult(CUcontext)>("cuCtxDestroy_v2")(context));
  EXPECT_FALSE(runtime::hot().streams.find(number, found));
  EXPECT_TRUE(runtime::hot().streams.find(other, found)) << "of another context";
  cudasched_unbind_stream(other);
}

TEST_F(ClassOfAStream, ByPriorityDoesNotOutliveTheContext) {
  CUcontext context = nullptr;
  Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&context, 0, 0));
  CUstream const stream = Program::new_stream();
  runtime::engine().class_by_priority(reinterpret_cast<std::uint64_t>(stream), Class::kBestEffort);
  EXPECT_FALSE(runtime::hot().by_priority.empty());
  program_.use_on_this_thread();
  Program::check(call<CUresult(CUcontext)>("cuCtxDestroy_v2")(context));
  EXPECT_TRUE(runtime::hot().by_priority.empty());
}

// A program that only copies, as NumPy-like libraries and those for images do, ends its requests by its copies.
TEST_F(ClassOfAStream, OfARequestThatEndsByACopyEndsWithIt) {
  CUdeviceptr memory = 0;
  std::array<std::uint64_t, 4> words{};
  Program::check(call<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(&memory, sizeof words));
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  rows.srcDevice = memory;
  rows.dstMemoryType = CU_MEMORYTYPE_HOST;
  rows.dstHost = words.data();
  rows.srcPitch = rows.dstPitch = 16;
  rows.WidthInBytes = 8;
  rows.Height = 2;
  CUDA_MEMCPY3D slices{};
  slices.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  slices.srcDevice = memory;
  slices.dstMemoryType = CU_MEMORYTYPE_HOST;
  slices.dstHost = words.data();
  slices.srcPitch = slices.dstPitch = 16;
  slices.WidthInBytes = 8;
  slices.Height = slices.srcHeight = slices.dstHeight = 2;
  slices.Depth = 1;
  const auto of_rows = [&](const char* name) { return call<CUresult(const CUDA_MEMCPY2D*)>(name)(&rows); };
  const auto of_slices = [&](const char* name) { return call<CUresult(const CUDA_MEMCPY3D*)>(name)(&slices); };
  const std::vector<std::function<CUresult()>> copies{
      [&] { return call<CUresult(void*, CUdeviceptr, std::size_t)>("cuMemcpyDtoH_v2")(&words, memory, 8); },
      [&] { return of_rows("cuMemcpy2D_v2"); },
      [&] { return of_rows("cuMemcpy2D_v2_ptds"); },
      [&] { return of_rows("cuMemcpy2DUnaligned_v2"); },
      [&] { return of_slices("cuMemcpy3D_v2"); },
      [&] { return of_slices("cuMemcpy3D_v2_ptds"); },
  };
  ASSERT_EQ(cudasched_set_process_class(CUDASCHED_LATENCY, 0, 0), CUDASCHED_OK);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    Program::check(program_.launch(1, nullptr));
    const bool began = HookedDriver::instance().table().active() != 0;
    EXPECT_EQ(copies[i](), CUDA_SUCCESS) << i;
    const bool ended = HookedDriver::instance().table().active() == 0;
    EXPECT_TRUE(began && ended) << i;
  }
  cudasched_set_process_class(CUDASCHED_NORMAL, 0, 0);
}

TEST_F(ClassOfAStream, CountsWhatGoesAsNormalBesideBestEffort) {
  CUstream const stream = program_.stream();
  const InRegion region(CUDASCHED_BEST_EFFORT);
  EXPECT_TRUE(goes_as_best_effort(stream));
  const std::uint64_t before = state().normal_beside_best_effort;
  on_another_thread([&] {
    const InRegion inner(CUDASCHED_NORMAL);
    EXPECT_FALSE(goes_as_best_effort(stream));
  });
  EXPECT_EQ(state().normal_beside_best_effort - before, 1U);
}

}  // namespace
}  // namespace cudasched::test
