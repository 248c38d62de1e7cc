// Driver calls that may be deferred: what is pushed, and what is drained and called.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "hooked_queue.hpp"

namespace cudasched::hook {
namespace {

using testing::ElementsAre;

TEST_F(HookedQueue, WithoutQueuesEverythingIsTheDrivers) {
  router().forget_queues();
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_EQ(driver_.made().at(0).thread, static_cast<pid_t>(syscall(SYS_gettid)));
}

TEST_F(HookedQueue, PageableCopiesAreDrainedAndDirect) {
  memory_type = 0;
  ASSERT_TRUE(launch());
  EXPECT_EQ(entry<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2")(0x1000, &memory_type, 4, kStream), CUDA_SUCCESS);
  EXPECT_EQ(entry<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2")(&memory_type, 0x1000, 4, kStream), CUDA_SUCCESS);
  const auto made = driver_.made();
  ASSERT_EQ(made.size(), 3U);
  EXPECT_EQ(made[0].name, "kernel");
  for (const std::size_t i : {1U, 2U}) EXPECT_EQ(made[i].thread, static_cast<pid_t>(syscall(SYS_gettid)));
}

TEST_F(HookedQueue, ALatencyCallBypassesWhatItDoesNotDependOnAndDrainsTheRestWithTheGateOpen) {
  block(kStream);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  here = site_at(nullptr, latency_);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kOtherEvent, kNonBlocking), CUDA_SUCCESS);
  EXPECT_THAT(driver_.story(), ElementsAre("record e2"));
  EXPECT_EQ(entry<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent")(kNonBlocking, kEvent, 0), CUDA_SUCCESS);
  EXPECT_THAT(driver_.story(), ElementsAre("record e2", "kernel f2", "record e1", "wait e1"));
  EXPECT_EQ(gate_.forced(), 1);
}

TEST_F(HookedQueue, ADirectRecordOnACapturingStreamMarksTheEvent) {
  auto* const idle = driver::table().cuStreamIsCapturing;
  driver::table().cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  };
  here.queue = nullptr;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
  driver::table().cuStreamIsCapturing = idle;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
}

TEST_F(HookedQueue, InterprocessEventsAreTold) {
  CUevent event = nullptr;
  EXPECT_EQ(entry<decltype(cuEventCreate)>("cuEventCreate")(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  EXPECT_TRUE(queue().push_call(caller_, record_of(event, kStream, 0)));
  EXPECT_EQ(entry<decltype(cuEventCreate)>("cuEventCreate")(&event, CU_EVENT_INTERPROCESS), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_call(caller_, record_of(event, kStream, 0)));
  driver::registry().forget(event);
  EXPECT_EQ(entry<decltype(cuIpcOpenEventHandle)>("cuIpcOpenEventHandle")(&event, {}), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_call(caller_, record_of(event, kStream, 0)));
}

TEST_F(HookedQueue, ADeferredCallsErrorComesAtTheNextCall) {
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_VALUE; };
  ASSERT_TRUE(launch());
  finish();
  driver_.on_call = nullptr;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
}

TEST_F(HookedQueue, TheFirstLaunchGoesDirectlyAndIsLearned) {
  Call call = plain();
  CUresult status = CUDA_SUCCESS;
  EXPECT_FALSE(offer(call, status));
  queue().kernel_launched(call);
  EXPECT_TRUE(offer(call, status));
  // A graph with event nodes depends on more than its stream.
  EXPECT_FALSE(offer(graph_call(kGraph, kNonBlocking), status));
  EXPECT_TRUE(queue().empty());
  driver::registry().made(kGraph, {.identity = 1, .plain = true});
  driver::registry().launched(kGraph);
  EXPECT_TRUE(offer(graph_call(kGraph, kStream), status));
}

// The gate would hold it anyway; what it waits for is let through for other calls alone.
TEST_F(HookedQueue, BesideLatencyRegionsALaunchThatIsNotDeferredLeavesTheGateClosed) {
  queue().latency_came();
  block();
  std::atomic<bool> done{false};
  std::thread thread([&] {
    here = site_at(&queue(), caller_);
    Call call = plain();
    call.function = kFunction;  // not launched before
    CUresult status = CUDA_SUCCESS;
    EXPECT_FALSE(offer(call, status));
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(done);
  EXPECT_EQ(gate_.forced(), 0);
  gate_.open();
  thread.join();
}

// Launches and changes of graphs are in tests/csrc/hook and tests/csrc/runtime/slices.
TEST_F(EachLine, ThatIsDeferredIsPushedOrDrainsWhatItsScopeSays) {
  const std::map<std::string_view, std::function<CUresult(void*)>> calls{
      {"cuMemcpyAsync", [&](void* f) { return as<decltype(cuMemcpyAsync)>(f)(0x1000, 0x2000, 8, kStream); }},
      {"cuMemcpyHtoDAsync_v2", [&](void* f) { return as<decltype(cuMemcpyHtoDAsync)>(f)(0x1000, &here, 8, kStream); }},
      {"cuMemcpyDtoHAsync_v2", [&](void* f) { return as<decltype(cuMemcpyDtoHAsync)>(f)(&here, 0x1000, 8, kStream); }},
      {"cuMemcpyDtoDAsync_v2", [&](void* f) { return as<decltype(cuMemcpyDtoDAsync)>(f)(0x1000, 0x2000, 8, kStream); }},
      {"cuMemsetD8Async", [&](void* f) { return as<decltype(cuMemsetD8Async)>(f)(0x1000, 5, 6, kStream); }},
      {"cuMemsetD16Async", [&](void* f) { return as<decltype(cuMemsetD16Async)>(f)(0x1000, 5, 6, kStream); }},
      {"cuMemsetD32Async", [&](void* f) { return as<decltype(cuMemsetD32Async)>(f)(0x1000, 5, 6, kStream); }},
      {"cuMemsetD2D8Async", [&](void* f) { return as<decltype(cuMemsetD2D8Async)>(f)(0x1000, 64, 5, 6, 2, kStream); }},
      {"cuMemsetD2D16Async",
       [&](void* f) { return as<decltype(cuMemsetD2D16Async)>(f)(0x1000, 64, 5, 6, 2, kStream); }},
      {"cuMemsetD2D32Async",
       [&](void* f) { return as<decltype(cuMemsetD2D32Async)>(f)(0x1000, 64, 5, 6, 2, kStream); }},
      {"cuEventRecord", [&](void* f) { return as<decltype(cuEventRecord)>(f)(kEvent, kStream); }},
      {"cuEventRecordWithFlags", [&](void* f) { return as<decltype(cuEventRecordWithFlags)>(f)(kEvent, kStream, 0); }},
      {"cuStreamWaitEvent", [&](void* f) { return as<decltype(cuStreamWaitEvent)>(f)(kStream, kEvent, 0); }},
      {"cuLaunchHostFunc", [&](void* f) { return as<decltype(cuLaunchHostFunc)>(f)(kStream, [](void*) {}, nullptr); }},
      {"cuMemFreeAsync", [&](void* f) { return as<decltype(cuMemFreeAsync)>(f)(0x1000, kStream); }},
      {"cuEventDestroy", [&](void* f) { return as<decltype(cuEventDestroy)>(f)(kEvent); }},
      {"cuEventDestroy_v2", [&](void* f) { return as<decltype(cuEventDestroy)>(f)(kEvent); }},
  };
  std::set<std::string_view> asked;
  for_each(Treatment::kDefer, [&](const EntryPoint& point, bool per_thread) {
    if (point.meaning == Meaning::kLaunch || point.meaning == Meaning::kChangeExec) return;
    const auto how = calls.find(point.symbol);
    ASSERT_NE(how, calls.end()) << point.symbol << " is deferred, and no call of it is here";
    asked.insert(point.symbol);
    const auto functions = deferred_functions();
    const auto ours = std::ranges::find(functions, point.symbol, [](const TakenOver& each) { return each.symbol; });
    ASSERT_NE(ours, functions.end()) << point.symbol;
    void* const function = per_thread ? ours->per_thread : ours->legacy;

    fill();
    here = site_at(&queue(), caller_);
    EXPECT_EQ(how->second(function), CUDA_SUCCESS) << point.symbol;
    EXPECT_EQ(queue().pushed() - before_, Position{kLast} + 1) << point.symbol;
    EXPECT_EQ(passed(), 0U) << point.symbol;
    driver::EventFacts facts;
    EXPECT_EQ(driver::registry().find(kEvent, facts), point.meaning != Meaning::kDestroyEvent) << point.symbol;
    finish();

    fill();
    here = site_at(nullptr, latency_);
    // What the registry does not know is for the driver to destroy.
    if (point.meaning == Meaning::kDestroyEvent) driver::registry().forget(kEvent);
    EXPECT_EQ(how->second(function), CUDA_SUCCESS) << point.symbol;
    EXPECT_EQ(queue().pushed() - before_, Position{kLast}) << point.symbol;
    EXPECT_EQ(passed(), end_of(point.scope)) << point.symbol;
    finish();
  });
  for (const auto& [symbol, how] : calls)
    EXPECT_TRUE(asked.contains(symbol)) << symbol << " is not said to be deferred";
}

TEST_F(EachLine, ThatMakesAnEventTellsTheRegistry) {
  for (const EntryPoint& point : entry_points()) {
    if (point.meaning != Meaning::kCreateEvent) continue;
    driver::registry().forget(kOtherEvent);
    CUevent event = nullptr;
    if (point.symbol == "cuEventCreate") {
      EXPECT_EQ(entry<decltype(cuEventCreate)>(point.symbol)(&event, 0), CUDA_SUCCESS);
    } else if (point.symbol == "cuIpcOpenEventHandle") {
      EXPECT_EQ(entry<decltype(cuIpcOpenEventHandle)>(point.symbol)(&event, {}), CUDA_SUCCESS);
    } else {
      ADD_FAILURE() << point.symbol << " makes an event, and no call of it is here";
    }
    driver::EventFacts facts;
    EXPECT_TRUE(driver::registry().find(kOtherEvent, facts)) << point.symbol;
  }
}

// Found: an event destroy behind gated launches waited for the gate, and opened it beside latency work.
TEST_F(HookedQueue, AnEventIsDestroyedBehindItsRecordsWithoutWaiting) {
  queue().latency_came();
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  block();
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(destroy(kOtherEvent), CUDA_SUCCESS);  // nothing of it is queued
  EXPECT_THAT(driver_.story(), ElementsAre("destroy e2"));
  EXPECT_EQ(gate_.forced(), 0);
  // The handle may come back once the driver has ended the event, and then is another's.
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("destroy e2", "kernel f2", "record e1", "destroy e1"));
  EXPECT_EQ(driver_.made().back().context, kContext);  // which was current when it was created
  driver::registry().created(kEvent, CU_EVENT_DEFAULT);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
}

TEST_F(HookedQueue, OfAnEventThatIsNotKnownOrSharedTheDriverAnswers) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  driver_.on_call = [](const DriverCall& call) {
    return call.name == "destroy" ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  };
  for (const CUevent event : {kEvent, kOtherEvent}) {
    ASSERT_TRUE(queue().push_call(caller_, record_of(event, kStream, 0)));
    if (event == kEvent) driver::registry().shared(event);
    if (event == kOtherEvent) driver::registry().forget(event);
    EXPECT_EQ(destroy(event), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_TRUE(queue().empty());
    EXPECT_EQ(driver_.made().back().thread, static_cast<pid_t>(syscall(SYS_gettid)));
  }
}

// Destroyed twice: the second time the driver says so, after it has done the first.
TEST_F(HookedQueue, AnEventThatIsDestroyedTwiceIsDestroyedOnceForTheProgram) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  driver_.on_call = [ended = false](const DriverCall& call) mutable {
    if (call.name != "destroy") return CUDA_SUCCESS;
    return std::exchange(ended, true) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  };
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(destroy(kEvent), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(HookedQueue, AStreamOrderedFreeIsQueuedInItsStreamsOrder) {
  queue().latency_came();
  auto* const free_async = entry<decltype(cuMemFreeAsync)>("cuMemFreeAsync");
  block();
  EXPECT_EQ(free_async(0x4000, kStream), CUDA_SUCCESS);
  EXPECT_EQ(queue().before(queue::Scope::kStream, kStream), 2U);
  EXPECT_EQ(driver_.count(), 0U);
  EXPECT_EQ(gate_.forced(), 0);
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "free 4000"));
  // An earlier call's error is not due here: the memory is freed, and the next call hears of it.
  driver_.on_call = [](const DriverCall& call) {
    return call.name == "kernel" ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(free_async(0x5000, kStream), CUDA_SUCCESS);
  finish();
  EXPECT_EQ(driver_.made().back().what, 0x5000U);
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_INVALID_VALUE);
  driver_.on_call = nullptr;
  // No allocation begins there: the driver refuses it, at once.
  block();
  EXPECT_EQ(free_async(0x4010, kNonBlocking), CUDA_SUCCESS);
  EXPECT_EQ(driver_.made().back().what, 0x4010U);
  finish();
}

TEST_F(HookedQueue, EverythingQueuedIsSubmittedForACallThatFindsNoMemory) {
  EXPECT_FALSE(submit_everything());
  block();
  ASSERT_TRUE(queue().push_call(caller_, free_of(0x4000, kStream)));
  std::thread opener([&] {
    std::this_thread::sleep_for(5ms);
    gate_.open();
  });
  EXPECT_TRUE(submit_everything());
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "free 4000"));
  opener.join();
}

TEST_F(TwoDevices, AQueueCarriesItsOwnDevicesStreams) {
  EXPECT_FALSE(queue().push_call(caller_, fill_of({0x1000, 0, 1, 1, 0, 1}, false, kStreamThere)));
  EXPECT_TRUE(other_.push_call(caller_, fill_of({0x1000, 0, 1, 1, 0, 1}, false, kStreamThere)));
  EXPECT_TRUE(queue().push_call(caller_, fill_of({0x1000, 0, 1, 1, 0, 1}, false, kStream)));
}

// One record is queued on one device, and a wait for it on another drains it: the event ends where it still is queued.
TEST_F(TwoDevices, AnEventIsDestroyedInTheQueueThatHoldsIt) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  block();
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  go_there();
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(other_.pushed(), 0U);
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "destroy e1"));
}

// Two devices: an event recorded through one queue is waited for through the other.
TEST_F(HookedQueue, WhatIsQueuedOnAnotherDeviceIsDrained) {
  FakeGate other_gate;
  Queue other(other_gate, +[]() noexcept { return false; }, 64, 1U << 14);
  ASSERT_TRUE(other.start());
  router().add(other);
  ASSERT_TRUE(launch());
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  here.queue = &other;
  EXPECT_EQ(entry<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent")(kNonBlocking, kEvent, 0), CUDA_SUCCESS);
  EXPECT_EQ(queue().passed(), 2U);
  other.drain(caller_, other.pushed(), Waiter::For::kSynchronise);
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "wait e1"));
  router().forget_queues();
}

}  // namespace
}  // namespace cudasched::hook
