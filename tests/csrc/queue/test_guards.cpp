// Guards before driver functions: what drains, what is told, which queries are answered, and that every argument stays.
#include <array>

#include "hooked_queue.hpp"

namespace cudasched::hook {
namespace {

// Integers beyond the registers, floating point, a structure on the stack.
struct Large {
  std::uint64_t words[5];
};
std::string seen;
int everything(int a, long b, const char* c, unsigned char d, short e, void* f, double g, float h, double i, double j,
               double k, double l, double m, double n, double o, Large p, std::int64_t q, int r) {
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), "%d %ld %s %d %d %p %g %g %g %g %g %g %g %g %g %llx %lld %d", a, b, c, d, e,
                f, g, static_cast<double>(h), i, j, k, l, m, n, o, static_cast<unsigned long long>(p.words[4]),
                static_cast<long long>(q), r);
  seen = text.data();
  errno = 77;
  return 42;
}

TEST_F(HookedQueue, AGuardLeavesEveryArgumentAsItWas) {
  const auto call = [](auto* function) {
    return function(1, 2L, "three", 4, 5, nullptr, 7.5, 8.5F, 9.5, 10.5, 11.5, 12.5, 13.5, 14.5, 15.5,
                    Large{{1, 2, 3, 4, 0xabcdef}}, -17, 18);
  };
  EXPECT_EQ(call(&everything), 42);
  const std::string wanted = std::exchange(seen, "");
  ASSERT_TRUE(launch());  // with something to drain
  errno = 5;
  EXPECT_EQ(call(guard("cuUnknown", &everything)), 42);
  EXPECT_EQ(seen, wanted);
  EXPECT_EQ(errno, 77);
  EXPECT_TRUE(queue().empty());
}

TEST_F(HookedQueue, AGuardDrainsByItsFunctionsRule) {
  static std::atomic<Position> passed_at_call{0};
  static Queue* queue_seen = nullptr;
  queue_seen = &queue();
  const auto target = +[](CUstream) {
    passed_at_call = queue_seen->passed();
    return CUDA_SUCCESS;
  };
  static_cast<void>(guard("cuStreamSynchronize", target));
  ASSERT_TRUE(launch(kStream));
  EXPECT_EQ(guard("cuStreamSynchronize", target)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(passed_at_call, 1U);
  block(kStream);
  EXPECT_EQ(guard("cuStreamSynchronize", target)(kNonBlocking), CUDA_SUCCESS);  // depends on nothing queued
  EXPECT_EQ(passed_at_call, 1U);
  ASSERT_TRUE(launch(CU_STREAM_LEGACY));
  here.caller.latency = true;
  EXPECT_EQ(guard("cuStreamSynchronize", target)(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(passed_at_call, 3U);
}

// The stream of cuMemcpyBatchAsync is its ninth argument.
TEST_F(HookedQueue, AGuardReadsArgumentsOnTheStack) {
  const auto target =
      +[](void*, void*, void*, std::size_t, void*, void*, std::size_t, void*, CUstream) { return CUDA_SUCCESS; };
  auto* const copy = guard("cuMemcpyBatchAsync", target);
  block(kStream);
  EXPECT_EQ(copy(nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, nullptr, kNonBlocking), CUDA_SUCCESS);
  EXPECT_FALSE(queue().empty());  // it depends on nothing queued
  gate_.open();
  EXPECT_EQ(copy(nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, nullptr, kStream), CUDA_SUCCESS);
  EXPECT_TRUE(queue().empty());
}

TEST_F(HookedQueue, WhatMayBeginACaptureUnseenIsTold) {
  const auto fine = +[](CUstream) { return CUDA_SUCCESS; };
  router().forget_queues();
  EXPECT_EQ(guard("cuStreamBeginCapture_v2", fine)(kStream), CUDA_SUCCESS);  // counted by the function taken over
  EXPECT_EQ(guard("cuStreamSynchronize", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 0);
  EXPECT_EQ(guard("cuStreamBeginRecaptureToGraph", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 1);
  EXPECT_EQ(guard("cuOfTheFuture", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 2);
}

TEST_F(HookedQueue, QueriesOfQueuedThingsAreAnsweredHere) {
  const auto done = +[](CUevent) { return CUDA_SUCCESS; };
  block();
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(guard("cuEventQuery", done)(kEvent), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(guard("cuEventQuery", done)(kOtherEvent), CUDA_SUCCESS);
  const auto stream_done = +[](CUstream) { return CUDA_SUCCESS; };
  EXPECT_EQ(guard("cuStreamQuery", stream_done)(kStream), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(guard("cuStreamQuery", stream_done)(kNonBlocking), CUDA_SUCCESS);
  finish();
  EXPECT_EQ(guard("cuEventQuery", done)(kEvent), CUDA_SUCCESS);
}

TEST_F(HookedQueue, ASynchroniseHandsOverTheError) {
  const auto fine = +[](CUstream) { return CUDA_SUCCESS; };
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_IMAGE; };
  ASSERT_TRUE(launch());
  auto* const synchronise = guard("cuStreamSynchronize", fine);
  EXPECT_EQ(synchronise(kStream), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(synchronise(kStream), CUDA_SUCCESS);
}

TEST_F(HookedQueue, HandlesThatGoAreForgotten) {
  const auto fine = +[](void*) { return CUDA_SUCCESS; };
  ASSERT_TRUE(launch());
  EXPECT_EQ(driver_.flag_queries, 1);
  EXPECT_EQ(guard("cuStreamDestroy_v2", fine)(kStream), CUDA_SUCCESS);
  ASSERT_TRUE(launch());
  EXPECT_EQ(driver_.flag_queries, 2);  // the handle may mean another stream
  make_graph(kGraph);
  ASSERT_TRUE(push_graph(kGraph));
  EXPECT_EQ(guard("cuGraphExecBatchMemOpNodeSetParams", fine)(kGraph), CUDA_SUCCESS);
  EXPECT_FALSE(push_graph(kGraph));
}

// Found: each update of a graph waited for all that was queued, on every device, and opened the gate for it.
TEST_F(HookedQueue, AChangeOfAGraphWaitsForItsOwnLaunchesAlone) {
  const auto fine = +[](void*) { return CUDA_SUCCESS; };
  const CUgraphExec other = handle<CUgraphExec>(0x6bad);
  for (const char* const change : {"cuGraphExecBatchMemOpNodeSetParams", "cuGraphExecDestroy"}) {
    make_graph(kGraph);
    make_graph(other);
    queue().latency_came();
    block();
    ASSERT_TRUE(push_graph(kGraph));
    ASSERT_TRUE(launch());
    const int forced = gate_.forced();
    const Position passed = queue().passed();
    EXPECT_EQ(guard(change, fine)(other), CUDA_SUCCESS);  // not queued
    EXPECT_EQ(gate_.forced(), forced) << change;
    EXPECT_EQ(guard(change, fine)(kGraph), CUDA_SUCCESS);
    EXPECT_EQ(queue().passed(), passed + 2) << change;  // what is behind its launch waits on
    EXPECT_FALSE(push_graph(kGraph)) << change;
    finish();
  }
}

// What graphs with memory nodes have allocated may be in use by anything.
TEST_F(HookedQueue, AChangeOfAGraphThatIsNotPlainWaitsForEverything) {
  const auto fine = +[](void*) { return CUDA_SUCCESS; };
  for (const bool is_known : {true, false}) {
    driver::registry().forget(kGraph);
    if (is_known) make_graph(kGraph, /*plain=*/false);
    queue().latency_came();
    block();
    EXPECT_EQ(guard("cuGraphExecDestroy", fine)(kGraph), CUDA_SUCCESS);
    EXPECT_TRUE(queue().empty()) << is_known;
  }
}

TEST_F(HookedQueue, ASetterDrainsOnlyWhenTheValueChanges) {
  const auto set = +[](CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; };
  attribute_value = 3;
  block();
  EXPECT_EQ(guard("cuFuncSetAttribute", set)(kPlainFunction, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 3),
            CUDA_SUCCESS);
  EXPECT_FALSE(queue().empty());
  EXPECT_TRUE(push(plain()));
  gate_.open();
  EXPECT_EQ(guard("cuFuncSetAttribute", set)(kPlainFunction, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 4),
            CUDA_SUCCESS);
  EXPECT_TRUE(queue().empty());
  EXPECT_FALSE(push(plain()));
}

TEST_F(EachLine, HasAGuardIfItDrainsAndNoneElse) {
  for (const EntryPoint& point : entry_points()) {
    const bool guarded = hook::guarded(&point, false, address(&its_target)) != address(&its_target);
    EXPECT_EQ(guarded, point.treatment == Treatment::kDrain) << point.symbol;
  }
}

// As latency work calls it, which opens the gate for what it waits for and for nothing behind that. A query by best
// effort opens nothing, so that the answer is the same however fast the launcher is.
TEST_F(EachLine, ThatDrainsWaitsForWhatItsScopeSaysAndTellsWhatItMeans) {
  memory_type = CU_MEMORYTYPE_DEVICE;
  int lines = 0;
  for_each(Treatment::kDrain, [&](const EntryPoint& point, bool per_thread) {
    fill();
    const bool queries = point.meaning == Meaning::kQueryStream || point.meaning == Meaning::kQueryEvent;
    here = queries ? site_at(&queue(), caller_) : site_at(nullptr, latency_);
    void* const guarded = hook::guarded(&point, per_thread, address(&its_target));
    EXPECT_EQ(call(guarded, point), queries ? CUDA_ERROR_NOT_READY : CUDA_ERROR_NOT_SUPPORTED) << point.symbol;
    if (!queries) {
      EXPECT_EQ(passed(), end_of(point.scope)) << point.symbol;
    }
    expect_told(point);
    if (point.scope == Scope::kGraph) {
      driver::registry().may_hold_memory();
      EXPECT_EQ(call(guarded, point), CUDA_ERROR_NOT_SUPPORTED) << point.symbol;
      EXPECT_EQ(passed(), Position{kLast}) << point.symbol;
    }
    finish();
    ++lines;
  });
  EXPECT_GT(lines, 250);
}

// Found: a free on one GPU waited for the gate of another.
TEST_F(TwoDevices, AFreeWaitsForTheQueuesOfTheDevicesThatReachTheMemory) {
  auto* const free_memory = guard("cuMemFree_v2", +[](CUdeviceptr) { return CUDA_SUCCESS; });
  auto* const enable = guard("cuCtxEnablePeerAccess", +[](CUcontext, unsigned) { return CUDA_SUCCESS; });
  const auto frees = [&] { EXPECT_EQ(free_memory(0x4000), CUDA_SUCCESS); };
  block();
  go_there();
  Call there = plain(kStreamThere);
  other_.kernel_launched(there);
  there.site = here;
  ASSERT_TRUE(other_.push_kernel(there));
  frees();  // and has waited for its own device
  EXPECT_EQ(other_.passed(), 1U);
  EXPECT_FALSE(queue().empty());
  for (const unsigned type : {0U, unsigned{CU_MEMORYTYPE_HOST}}) {
    memory_type = type;
    EXPECT_TRUE(waits_for_the_first_gate(frees)) << type;
    block();
  }
  memory_type = CU_MEMORYTYPE_DEVICE;
  memory_device = 0;
  EXPECT_TRUE(waits_for_the_first_gate(frees));
  memory_device = 1;
  // The first device may use the second one's memory from here on.
  FakeDriver::device_now() = 0;
  FakeDriver::current() = kContext;
  EXPECT_EQ(enable(kOtherContext, 0), CUDA_SUCCESS);
  block();
  EXPECT_TRUE(waits_for_the_first_gate(frees));
}

// A device where no best effort runs has no queue, and its calls wait for nobody's.
TEST_F(TwoDevices, ACallOfADeviceWithoutAQueueWaitsForNone) {
  router().forget_queues();
  router().add(queue());
  auto* const free_memory = guard("cuMemFree_v2", +[](CUdeviceptr) { return CUDA_SUCCESS; });
  auto* const synchronise = guard("cuCtxSynchronize", +[]() { return CUDA_SUCCESS; });
  block();
  EXPECT_FALSE(waits_for_the_first_gate([&] {
    here.queue = nullptr;
    free_memory(0x4000);
    synchronise();
  }));
}

TEST_F(TwoDevices, WhatConcernsOneContextWaitsForItsDeviceAlone) {
  const auto fine = +[](void*) { return CUDA_SUCCESS; };
  block(CU_STREAM_LEGACY);
  auto* const synchronise = guard("cuCtxSynchronize", +[]() { return CUDA_SUCCESS; });
  auto* const stream_synchronise = guard("cuStreamSynchronize", fine);
  EXPECT_FALSE(waits_for_the_first_gate([&] { synchronise(); }));
  EXPECT_FALSE(waits_for_the_first_gate([&] { stream_synchronise(nullptr); }));  // its own legacy stream
  EXPECT_FALSE(waits_for_the_first_gate([&] { stream_synchronise(kStreamThere); }));
  EXPECT_TRUE(waits_for_the_first_gate([&] { stream_synchronise(kStream); }));
  block();
  EXPECT_TRUE(waits_for_the_first_gate([&] { guard("cuMemFreeHost", fine)(nullptr); }));
  block();
  EXPECT_TRUE(waits_for_the_first_gate([&] { guard("cuUnknown", fine)(nullptr); }));
}

TEST_F(TwoDevices, ACopyBetweenContextsWaitsForTheirDevicesAndItsOwn) {
  auto* const copy =
      guard("cuMemcpyPeer", +[](CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, std::size_t) { return CUDA_SUCCESS; });
  block();
  EXPECT_FALSE(waits_for_the_first_gate([&] { copy(0x1000, kOtherContext, 0x2000, kOtherContext, 8); }));
  EXPECT_TRUE(waits_for_the_first_gate([&] { copy(0x1000, kOtherContext, 0x2000, kContext, 8); }));
  block();
  EXPECT_TRUE(waits_for_the_first_gate([&] { copy(0x1000, kContext, 0x2000, kOtherContext, 8); }));
  block();
  EXPECT_TRUE(waits_for_the_first_gate([&] {
    FakeDriver::device_now() = 0;
    FakeDriver::current() = kContext;
    copy(0x1000, kOtherContext, 0x2000, kOtherContext, 8);
  }));
}

}  // namespace
}  // namespace cudasched::hook
