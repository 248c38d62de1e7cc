// The rules of docs/order.md, each by what the driver is asked and when.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>

#include "fake_driver.hpp"
#include "queue/queue.hpp"

namespace cudasched::queue {
namespace {

using testing::ElementsAre;
using For = Waiter::For;

// ---- the three treatments

TEST_F(QueueTest, EachKindOfOperationReachesTheDriverAsItWasCalled) {
  make_graph(kGraph);
  block();
  EXPECT_TRUE(push_graph(kGraph));
  for (const std::uint8_t bytes : {1, 2, 4}) {
    EXPECT_TRUE(queue().push_call(caller_, fill_of({0x1000, 0, 10, 1, 7, bytes}, false, kStream)));
    EXPECT_TRUE(queue().push_call(caller_, fill_of({0x1000, 64, 10, 3, 7, bytes}, true, kStream)));
  }
  for (const auto direction : {Operation::Direction::kAny, Operation::Direction::kToDevice,
                               Operation::Direction::kToHost, Operation::Direction::kOnDevice}) {
    EXPECT_TRUE(queue().push_call(caller_, copy_of({0x2000, 0x3000, 5, direction}, kStream)));
  }
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kOtherStream, kEvent, 0)));
  int data = 0;
  EXPECT_TRUE(queue().push_call(caller_, host_function([](void*) {}, &data, kStream)));
  EXPECT_TRUE(queue().push_call(caller_, free_of(0x4000, kStream)));
  EXPECT_TRUE(queue().push_destroy(caller_, kEvent, kContext));
  EXPECT_EQ(driver_.count(), 0U);  // the program went on
  finish();

  const auto made = driver_.made();
  std::vector<std::string> names;
  for (const DriverCall& call : made) names.push_back(call.name);
  EXPECT_THAT(names, ElementsAre("kernel", "graph", "fill_8", "fill_rows_8", "fill_16", "fill_rows_16", "fill_32",
                                 "fill_rows_32", "copy", "copy_to_device", "copy_to_host", "copy_on_device", "record",
                                 "wait", "host_function", "free", "destroy"));
  EXPECT_THAT(made[2].values, ElementsAre(7, 10));
  EXPECT_THAT(made[3].values, ElementsAre(64, 7, 10, 3));
  EXPECT_EQ(made[8].what, 0x2000U);
  EXPECT_THAT(made[8].values, ElementsAre(0x3000, 5));
  EXPECT_EQ(made[13].stream, kOtherStream);
  for (const DriverCall& call : made) EXPECT_EQ(call.context, kContext) << call.name;
}

// Parameters are copied at the push: what the program does to its variables afterwards changes nothing.
TEST_F(QueueTest, ParametersAreCopiedAtThePush) {
  Call call({.function = kFunction}, kStream);
  call.dynamic_shared_bytes = 99;
  std::uint64_t first = 0x1111'2222'3333'4444;
  std::uint32_t second = 0x5555'6666;
  void* parameters[] = {&first, &second};
  call.parameters = parameters;
  queue().kernel_launched(call);
  block();
  call.grid[0] = 7;
  ASSERT_TRUE(push(call));
  std::string packed = "0123456789ab";
  std::size_t bytes = packed.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(),
                   CU_LAUNCH_PARAM_END};
  call.parameters = nullptr;
  call.extra = extra;
  ASSERT_TRUE(push(call));
  std::string wanted(reinterpret_cast<const char*>(&first), 8);
  wanted.append(reinterpret_cast<const char*>(&second), 4);
  first = 0;
  second = 0;
  packed.assign(12, 'x');
  bytes = 0;
  parameters[0] = nullptr;
  finish();
  const auto made = driver_.made();
  ASSERT_EQ(made.size(), 3U);
  EXPECT_EQ(made[1].bytes, wanted);
  EXPECT_THAT(made[1].values, ElementsAre(7, 1, 1, 1, 1, 1, 99));
  EXPECT_EQ(made[2].bytes, "0123456789ab");
}

TEST_F(QueueTest, AKernelOfALibraryIsDescribedByItsOwnFunction) {
  Call call({.function = handle<CUfunction>(0x10f1)}, kStream);  // kFunction's parameters, as a CUkernel
  std::uint64_t first = 1;
  std::uint32_t second = 2;
  void* parameters[] = {&first, &second};
  call.parameters = parameters;
  queue().kernel_launched(call);
  EXPECT_TRUE(push(call));
  finish();
  EXPECT_EQ(driver_.made()[0].bytes.size(), 12U);
}

TEST_F(QueueTest, OneRingKeepsTheProgramsOrderAcrossStreams) {
  block(kStream);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kNonBlocking, kEvent, 0)));
  EXPECT_TRUE(launch(kNonBlocking));
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kNonBlocking, 0)));
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "wait e1", "kernel f2", "record e1"));
}

// ---- drains

// As a loop does that launches one kernel and records an event behind it.
TEST_F(QueueTest, WhatIsQueuedTakesTheGpuTimeThatOperationsLikeItTook) {
  const auto step = [&] {
    ASSERT_TRUE(launch());
    ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  };
  gate_.predict(1'000'000);
  for (int i = 0; i < 1'000; ++i) {
    step();
    finish();
  }
  block();
  for (int i = 0; i < 4; ++i) step();
  EXPECT_EQ(queue().queued(), 9u);
  EXPECT_NEAR(static_cast<double>(queue().queued_ns()), 4.5e6, 0.2e6);
  gate_.predict(10'000);
  finish();
  for (int i = 0; i < 1'000; ++i) {
    step();
    finish();
  }
  block();
  EXPECT_LT(queue().queued_ns(), 10'000) << "what they are like now";
}

TEST_F(QueueTest, WithNothingQueuedNothingIsWaitedFor) {
  for (const Scope scope : {Scope::kStream, Scope::kEvent, Scope::kStreamAndEvent, Scope::kTwoEvents, Scope::kEnd}) {
    EXPECT_EQ(queue().before(scope, kStream, kEvent, kOtherEvent), 0U);
  }
  EXPECT_FALSE(queue().stream_not_ready(caller_, kStream));
  EXPECT_FALSE(queue().event_not_ready(caller_, kEvent));
}

TEST_F(QueueTest, ACallWaitsForWhatItDependsOnAndNoMore) {
  block(kNonBlocking);                                                          // 1
  EXPECT_TRUE(launch(kStream));                                                 // 2
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kNonBlocking, 0)));  // 3
  EXPECT_TRUE(queue().push_call(caller_, record_of(kOtherEvent, kStream, 0)));  // 4
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));         // 5
  EXPECT_EQ(queue().before(Scope::kStream, kNonBlocking), 3U);
  EXPECT_EQ(queue().before(Scope::kStream, kStream), 5U);
  EXPECT_EQ(queue().before(Scope::kStream, kOtherStream), 0U);
  EXPECT_EQ(queue().before(Scope::kStream, handle<CUstream>(0x54)), 0U);
  EXPECT_EQ(queue().before(Scope::kEvent, nullptr, kEvent), 5U);  // a wait on it is queued
  EXPECT_EQ(queue().before(Scope::kEvent, nullptr, kOtherEvent), 4U);
  EXPECT_EQ(queue().before(Scope::kTwoEvents, nullptr, kOtherEvent, kEvent), 5U);
  EXPECT_EQ(queue().before(Scope::kStreamAndEvent, kOtherStream, kOtherEvent), 4U);
  EXPECT_EQ(queue().before(Scope::kStream, CU_STREAM_LEGACY), 5U);
  EXPECT_EQ(queue().before(Scope::kEnd, nullptr), 5U);
  EXPECT_EQ(queue().before(Scope::kNothing, kStream, kEvent), 0U);
}

TEST_F(QueueTest, TheLegacyStreamIsOrderedWithBlockingStreamsBothWays) {
  block(kNonBlocking);
  EXPECT_EQ(queue().before(Scope::kStream, CU_STREAM_LEGACY), 0U);
  EXPECT_TRUE(launch(CU_STREAM_LEGACY));
  EXPECT_EQ(queue().before(Scope::kStream, kOtherStream), 2U);
  EXPECT_EQ(queue().before(Scope::kStream, CU_STREAM_PER_THREAD), 2U);
  EXPECT_EQ(queue().before(Scope::kStream, handle<CUstream>(0x54)), 0U);
}

TEST_F(QueueTest, ADrainEndsWhenTheDriverCallHasReturned) {
  std::atomic<bool> inside{false};
  std::atomic<bool> release{false};
  driver_.on_call = [&](const DriverCall&) {
    inside = true;
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    return CUDA_SUCCESS;
  };
  ASSERT_TRUE(launch());
  ASSERT_TRUE(eventually([&] { return inside.load(); }));
  EXPECT_EQ(queue().before(Scope::kStream, kStream), 1U);  // under way is not passed
  std::thread releaser([&] {
    std::this_thread::sleep_for(5ms);
    release = true;
  });
  queue().drain(caller_, 1, For::kSynchronise);
  EXPECT_EQ(driver_.count(), 1U);
  releaser.join();
}

TEST_F(QueueTest, QueriesOfWhatIsQueuedAnswerWithoutDraining) {
  block(kStream);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kNonBlocking, kOtherEvent, 0)));
  EXPECT_TRUE(queue().stream_not_ready(caller_, kStream));
  EXPECT_TRUE(queue().stream_not_ready(caller_, CU_STREAM_LEGACY));
  EXPECT_FALSE(queue().stream_not_ready(caller_, kOtherStream));
  EXPECT_TRUE(queue().event_not_ready(caller_, kEvent));
  EXPECT_FALSE(queue().event_not_ready(caller_, kOtherEvent));  // only a wait on it is queued
  EXPECT_EQ(driver_.count(), 0U);
  finish();
  EXPECT_FALSE(queue().stream_not_ready(caller_, kStream));
  EXPECT_FALSE(queue().event_not_ready(caller_, kEvent));
}

TEST_F(QueueTest, AQueryByLatencyWorkOpensTheGateForWhatItAsks) {
  block(kStream);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_TRUE(eventually([&] { return !queue().event_not_ready(latency_, kEvent); }));
  EXPECT_EQ(driver_.count(), 2U);
  EXPECT_EQ(gate_.forced(), 1);
}

// ---- what is never deferred

TEST_F(QueueTest, TheFirstLaunchOfItsLikeIsNeverDeferred) {
  Call call = plain();
  EXPECT_FALSE(push(call));
  queue().kernel_launched(call);
  EXPECT_TRUE(push(call));
  call.grid[0] = 1000;  // the grid alone makes no new like
  EXPECT_TRUE(push(call));

  Call other = call;
  other.block[0] = 64;
  EXPECT_FALSE(push(other));
  other = call;
  other.dynamic_shared_bytes = 1024;
  EXPECT_FALSE(push(other));
  const auto serialization = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1);
  other = call;
  other.read_attributes(&serialization, 1);
  EXPECT_FALSE(push(other));
  queue().kernel_launched(other);
  EXPECT_TRUE(push(other));
  other = call;
  other.cooperative = true;  // may be too large: the grid belongs to the like
  queue().kernel_launched(other);
  EXPECT_TRUE(push(other));
  other.grid[0] += 1;
  EXPECT_FALSE(push(other));
  const auto cooperative = attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1);
  other = call;
  other.read_attributes(&cooperative, 1);
  queue().kernel_launched(other);
  EXPECT_TRUE(push(other));
  other.grid[0] += 1;
  EXPECT_FALSE(push(other));
}

TEST_F(QueueTest, ALikeThatNeverSucceededDirectlyStaysDirect) {
  // The hook reports successes alone; a launch that fails over and over is made directly each time.
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(push(plain()));
}

TEST_F(QueueTest, AChangedFunctionOrAnUnloadedOneStartsAnew) {
  EXPECT_TRUE(launch());
  driver::functions().changed(kPlainFunction);
  EXPECT_FALSE(push(plain()));
  EXPECT_TRUE(launch());
  driver::functions().all_changed();
  EXPECT_FALSE(push(plain()));
  EXPECT_TRUE(launch());
  { const driver::Functions::Ending unload(handle<CUmodule>(0x1)); }
  EXPECT_FALSE(push(plain()));
}

TEST_F(QueueTest, GridAndClusterLimitsAreCheckedAtThePush) {
  Call call = plain();
  queue().kernel_launched(call);
  for (const auto& grid : {std::array{0U, 1U, 1U}, std::array{1U, 65536U, 1U}, std::array{1U, 1U, 65536U},
                           std::array{0x8000'0000U, 1U, 1U}}) {
    std::copy(grid.begin(), grid.end(), call.grid);
    EXPECT_FALSE(push(call)) << grid[0] << " " << grid[1] << " " << grid[2];
  }
  CUlaunchAttribute cluster = attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  cluster.value.clusterDim = {2, 1, 1};
  call = plain();
  call.grid[0] = 4;
  call.read_attributes(&cluster, 1);
  queue().kernel_launched(call);
  EXPECT_TRUE(push(call));
  call.grid[0] = 3;
  queue().kernel_launched(call);
  EXPECT_FALSE(push(call));
}

TEST_F(QueueTest, ThePerThreadDefaultStreamIsNeverDeferred) {
  EXPECT_FALSE(launch(CU_STREAM_PER_THREAD));
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, CU_STREAM_PER_THREAD, 0)));
  EXPECT_FALSE(queue().push_call(caller_, fill_of({0x1000, 0, 1, 1, 0, 1}, false, CU_STREAM_PER_THREAD)));
}

TEST_F(QueueTest, AStreamThatTheDriverDoesNotKnowIsTheDriversToRefuse) {
  EXPECT_FALSE(launch(handle<CUstream>(0xbad)));
}

TEST_F(QueueTest, EventsOfOtherProcessesAreNeverDeferred) {
  driver::registry().shared(kEvent);
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_FALSE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
  CUlaunchAttribute record = attribute(CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT);
  record.value.launchCompletionEvent = {kEvent, 0};
  Call call = plain();
  call.read_attributes(&record, 1);
  queue().kernel_launched(call);
  EXPECT_FALSE(push(call));
  driver::registry().forget(kEvent);
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));  // not known to be anything
  driver::registry().created(kEvent, CU_EVENT_DEFAULT);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
}

TEST_F(QueueTest, AWaitOnAnEventRecordedInACaptureIsNeverDeferred) {
  driver::registry().recorded(kEvent, true);
  EXPECT_FALSE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
  driver::registry().recorded(kEvent, false);
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
  driver::registry().recorded(kEvent, true);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));  // recorded elsewhere
  EXPECT_TRUE(queue().push_call(caller_, wait_of(kStream, kEvent, 0)));
}

TEST_F(QueueTest, ExternalRecordsAndWaitsAreNotDeferred) {
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, kStream, CU_EVENT_RECORD_EXTERNAL)));
  EXPECT_FALSE(queue().push_call(caller_, wait_of(kStream, kEvent, CU_EVENT_WAIT_EXTERNAL)));
}

TEST_F(QueueTest, LaunchesWithAttributesThatTheCodeDoesNotKnowAreNeverDeferred) {
  Call call = plain();
  for (const unsigned id : {unsigned{CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE}, 200U}) {
    const CUlaunchAttribute unknown = attribute(id);
    call.read_attributes(&unknown, 1);
    queue().kernel_launched(call);
    EXPECT_FALSE(push(call)) << id;
  }
  call.read_attributes(nullptr, 1);
  EXPECT_FALSE(push(call));  // one attribute, nowhere
}

TEST_F(QueueTest, AttributesAreCopied) {
  auto priority = attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, -3);
  Call call = plain();
  call.read_attributes(&priority, 1);
  queue().kernel_launched(call);
  block();
  ASSERT_TRUE(push(call));
  priority = attribute(CU_LAUNCH_ATTRIBUTE_IGNORE);
  finish();
  EXPECT_EQ(driver_.made()[1].name, "kernel_ex");
  EXPECT_EQ(driver_.made()[1].values.back(), static_cast<std::uint64_t>(CU_LAUNCH_ATTRIBUTE_PRIORITY));
}

TEST_F(QueueTest, EventAttributesOfALaunchCountAsRecords) {
  CUlaunchAttribute record = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT);
  record.value.programmaticEvent.event = kEvent;
  Call call = plain();
  call.read_attributes(&record, 1);
  queue().kernel_launched(call);
  block();
  ASSERT_TRUE(push(call));
  EXPECT_EQ(queue().before(Scope::kEvent, nullptr, kEvent), 2U);
  EXPECT_TRUE(queue().event_not_ready(caller_, kEvent));
}

TEST_F(QueueTest, TheGateIsToldToPutNoEventBeforeAQueuedProgrammaticLaunch) {
  const auto overlap = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1);
  Call call = plain();
  call.read_attributes(&overlap, 1);
  queue().kernel_launched(call);
  block();
  ASSERT_TRUE(push(call));  // overlaps the one before it
  call.stream = kOtherStream;
  ASSERT_TRUE(push(call));            // is on another stream
  ASSERT_TRUE(launch(kOtherStream));  // does not overlap
  finish();
  EXPECT_THAT(gate_.overlap_follows(), ElementsAre(true, false, false, false));
}

TEST_F(QueueTest, ParametersThatCannotBeReadAreTheDriversToRefuse) {
  Call call({.function = kFunction}, kStream);
  std::uint64_t first = 1;
  std::uint32_t second = 2;
  void* parameters[] = {&first, &second};
  call.parameters = parameters;
  queue().kernel_launched(call);
  call.parameters = nullptr;
  EXPECT_FALSE(push(call));  // two parameters, none given
  void* extra[] = {CU_LAUNCH_PARAM_END};
  call.extra = extra;
  EXPECT_FALSE(push(call));
  // More bytes than the function takes, and than there are.
  void* packed[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &first, CU_LAUNCH_PARAM_BUFFER_SIZE, nullptr, CU_LAUNCH_PARAM_END};
  call.extra = packed;
  for (std::size_t bytes : {~std::size_t{0}, ~std::size_t{0} - 7, std::size_t{100'000}}) {
    packed[3] = &bytes;
    EXPECT_FALSE(push(call)) << bytes;
  }
}

// Which graphs the driver was asked to launch.
std::vector<std::uint64_t> graphs_launched(FakeDriver& driver) {
  std::vector<std::uint64_t> graphs;
  for (const DriverCall& call : driver.made()) graphs.push_back(call.what);
  return graphs;
}

TEST_F(QueueTest, AGraphInPartsIsAdmittedPartByPartAndPassedOnce) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2), handle<CUgraphExec>(0xa3)});
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0xa2, 0xa3));
  for (const DriverCall& call : driver_.made()) EXPECT_EQ(call.stream, kStream);
  EXPECT_EQ(gate_.asked(), 3);
  EXPECT_EQ(queue().passed(), 1U);
  EXPECT_THAT(gate_.ended(), ElementsAre(std::pair(kGraph, CUDA_SUCCESS)));
}

TEST_F(QueueTest, AGraphThatFailsMidwayIsAnErrorAndNothingOfItIsMadeAgain) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2), handle<CUgraphExec>(0xa3)});
  driver_.on_call = [](const DriverCall& call) { return call.what == 0xa2 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS; };
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0xa2));
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_THAT(gate_.ended(), ElementsAre(std::pair(kGraph, CUDA_ERROR_OUT_OF_MEMORY)));
}

TEST_F(QueueTest, AGraphWhoseFirstPartIsRefusedGoesWhole) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  driver_.on_call = [](const DriverCall& call) { return call.what == 0xa1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; };
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0x91));
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_SUCCESS);
  // Not where the context is broken: every call would fail.
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0x91, 0xa1));
}

// The driver has refused a change of it.
TEST_F(QueueTest, AGraphWhosePartIsMissingGoesWholeOrFailsMidway) {
  make_graph(kGraph);
  gate_.cut({nullptr, handle<CUgraphExec>(0xa2)});
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0x91));
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_SUCCESS);
  gate_.cut({handle<CUgraphExec>(0xa1), nullptr, handle<CUgraphExec>(0xa3)});
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0x91, 0xa1));
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  gate_.forbid_whole();
  gate_.cut({nullptr});
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}

TEST_F(QueueTest, AChangeOfAGraphIsMadeBehindTheLaunchesBeforeItAndAheadOfThoseBehindIt) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  gate_.close();
  const std::array<std::byte, 3> first{std::byte{7}};
  const std::array<std::byte, 3> second{std::byte{8}};
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(queue().push_change(caller_, kGraph, nullptr, first));
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(queue().push_change(caller_, kGraph, nullptr, second));
  EXPECT_NE(queue().before(Scope::kGraph, nullptr, nullptr, nullptr, kGraph), 0U);
  EXPECT_TRUE(gate_.changes().empty());
  gate_.open();
  finish();
  EXPECT_THAT(gate_.changes(), ElementsAre(std::tuple(kGraph, 7U, 2), std::tuple(kGraph, 8U, 4)));
  EXPECT_EQ(queue().before(Scope::kGraph, nullptr, nullptr, nullptr, kGraph), 0U);
}

// It may hold a graph, and launches of its graph go in slices until it was made or given up.
TEST_F(QueueTest, AChangeIsHandedOverWhereItsContextCannotBeMadeCurrent) {
  make_graph(kGraph);
  const std::array<std::byte, 1> change{std::byte{7}};
  ASSERT_TRUE(queue().push_change(caller_, kGraph, FakeDriver::kBrokenContext, change));
  finish();
  EXPECT_THAT(gate_.changes(), ElementsAre(std::tuple(kGraph, 7U, 0)));
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_SUCCESS);  // the program had the driver's verdict
}

// Behind it a change is queued that the whole graph has already.
TEST_F(QueueTest, AGraphThatMayNotGoWholeIsAnErrorWhereItsPartsCannotGo) {
  make_graph(kGraph);
  gate_.forbid_whole();
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_VALUE; };
  ASSERT_TRUE(push_graph(kGraph));
  finish();
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_ERROR_INVALID_VALUE);
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1));
}

TEST_F(QueueTest, WhatNothingOrdersBehindAGraphIsMadeBetweenItsParts) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  gate_.close();
  ASSERT_TRUE(push_graph(kGraph));
  const auto fill = [&](CUdeviceptr to, CUstream stream) {
    ASSERT_TRUE(queue().push_call(caller_, fill_of({to, 0, 10, 1, 7, 4}, false, stream)));
  };
  fill(0x1, kStream);                                                                // stays
  fill(0x2, kOtherStream);                                                           // goes
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));            // stays
  ASSERT_TRUE(queue().push_call(caller_, record_of(kOtherEvent, kOtherStream, 0)));  // goes
  ASSERT_TRUE(queue().push_call(caller_, wait_of(kNonBlocking, kEvent, 0)));         // stays, and keeps its stream
  fill(0x3, kNonBlocking);                                                           // stays
  fill(0x4, kOtherStream);                                                           // goes
  ASSERT_TRUE(launch(kOtherStream));                                                 // stays: the gate's
  fill(0x5, kOtherStream);                                                           // stays
  finish();
  const auto event = [](CUevent which) { return reinterpret_cast<std::uint64_t>(which); };
  const auto function = reinterpret_cast<std::uint64_t>(kPlainFunction);
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0x2, event(kOtherEvent), 0x4, 0xa2, 0x1, event(kEvent),
                                                    event(kEvent), 0x3, function, 0x5));
  EXPECT_EQ(queue().passed(), queue().pushed());
}

TEST_F(QueueTest, NothingOvertakesAGraphOnTheLegacyStream) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  gate_.close();
  ASSERT_TRUE(push_graph(kGraph, CU_STREAM_LEGACY));
  ASSERT_TRUE(queue().push_call(caller_, fill_of({0x1, 0, 10, 1, 7, 4}, false, kOtherStream)));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0xa2, 0x1));
}

TEST_F(QueueTest, NothingOvertakesWhatIsOnTheLegacyStream) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  gate_.close();
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(queue().push_call(caller_, fill_of({0x1, 0, 10, 1, 7, 4}, false, CU_STREAM_LEGACY)));
  ASSERT_TRUE(queue().push_call(caller_, fill_of({0x2, 0, 10, 1, 7, 4}, false, kOtherStream)));
  finish();
  EXPECT_THAT(graphs_launched(driver_), ElementsAre(0xa1, 0xa2, 0x1, 0x2));
}

TEST_F(QueueTest, AGraphIsDeferredFromItsSecondLaunchOn) {
  driver::Registry& registry = driver::registry();
  EXPECT_FALSE(push_graph(kGraph));  // not seen being made
  registry.launched(kGraph);
  EXPECT_FALSE(push_graph(kGraph));
  registry.made(kGraph, {.identity = 1, .plain = true});
  EXPECT_FALSE(push_graph(kGraph));
  registry.launched(kGraph);
  EXPECT_TRUE(push_graph(kGraph));
  registry.changed(kGraph);
  EXPECT_FALSE(push_graph(kGraph));
  registry.launched(kGraph);
  EXPECT_TRUE(push_graph(kGraph));
  { const driver::Functions::Ending unload(handle<CUmodule>(0x1)); }
  EXPECT_TRUE(push_graph(kGraph));
  registry.forget(kGraph);
  EXPECT_FALSE(push_graph(kGraph));
  make_graph(kGraph, false);  // with event nodes
  EXPECT_FALSE(push_graph(kGraph));
}

// An allocator destroys events that a backlog still records.
TEST_F(QueueTest, AnEventIsDestroyedBehindWhatIsQueuedOfIt) {
  block();
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  ASSERT_TRUE(queue().push_call(caller_, wait_of(kOtherStream, kEvent, 0)));
  ASSERT_TRUE(queue().push_destroy(caller_, kEvent, kContext));
  // What uses it all the same gets the driver's answer, once it is gone.
  EXPECT_EQ(queue().before(Scope::kEvent, nullptr, kEvent), 4U);
  EXPECT_EQ(queue().before(Scope::kEnd, nullptr), 4U);
  EXPECT_EQ(queue().before(Scope::kStream, kStream), 2U);
  EXPECT_EQ(driver_.count(), 0U);
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "wait e1", "destroy e1"));
}

// exit() in a signal handler: whatever the handlers of exit ask of the queue, none waits for the push that the signal
// interrupted. Here the push reads a parameter that cannot be read yet, under the queue's lock.
TEST_F(QueueTest, AThreadThatASignalInterruptedInAPushMayUseAndStopTheQueue) {
  static Queue* interrupted = nullptr;
  static void* page = nullptr;
  static std::atomic<int> pushed{-1};
  static std::atomic<Position> end{0};
  interrupted = &queue();
  pushed = -1;
  page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  Call call({.function = kFunction}, kStream);
  std::uint32_t second = 2;
  void* parameters[] = {page, &second};
  call.parameters = parameters;
  queue().kernel_launched(call);
  ASSERT_TRUE(launch());
  struct sigaction before {};
  struct sigaction action {};
  action.sa_handler = [](int) {
    const Caller caller{1, kContext, false};
    pushed = interrupted->push_call(caller, record_of(kEvent, kStream, 0)) ? 1 : 0;
    end = interrupted->before(Scope::kEnd, nullptr);
    interrupted->drain(caller, interrupted->before(Scope::kStream, kStream), For::kOther);
    interrupted->stream_not_ready(caller, kStream);
    interrupted->event_not_ready(caller, kEvent);
    interrupted->stream_destroyed(kOtherStream);
    interrupted->event_destroyed(kEvent);
    interrupted->stop(kNsPerSecond);
    mprotect(page, 4096, PROT_READ);
  };
  ASSERT_EQ(sigaction(SIGSEGV, &action, &before), 0);
  static_cast<void>(push(call));  // and not: waits for ever
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
  munmap(page, 4096);
  EXPECT_EQ(pushed, 0);
  EXPECT_EQ(driver_.count(), 1U);
  EXPECT_FALSE(queue().active());
}

// ---- the gate and who waits behind it

TEST_F(QueueTest, ABestEffortProcessesOwnDrainsLeaveTheGateClosed) {
  expect_opening_ = false;
  for (const For what : {For::kSynchronise, For::kLaunch, For::kOther}) {
    block();
    EXPECT_FALSE(opens(caller_, queue().pushed(), what));
  }
  EXPECT_EQ(gate_.forced(), 0);
}

TEST_F(QueueTest, ADrainByLatencyWorkOpensTheGateUpToItsPosition) {
  block(kStream);                                                          // 1
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));  // 2
  EXPECT_TRUE(launch(kStream));                                            // 3
  EXPECT_TRUE(opens(latency_, queue().before(Scope::kEvent, nullptr, kEvent), For::kOther));
  ASSERT_TRUE(eventually([&] { return gate_.asked() == 2; }));
  EXPECT_EQ(queue().passed(), 2U);  // the launch behind it still waits
  EXPECT_EQ(gate_.forced(), 1);
}

TEST_F(QueueTest, BesideLatencyRegionsOtherDrainsOpenTheGate) {
  queue().latency_came();
  block();
  EXPECT_TRUE(opens(caller_, queue().pushed(), For::kOther));
}

TEST_F(QueueTest, BesideLatencyRegionsASynchroniseWithoutTheGilWaits) {
  queue().latency_came();
  expect_opening_ = false;
  for (const For what : {For::kSynchronise, For::kLaunch}) {
    block();
    EXPECT_FALSE(opens(caller_, queue().pushed(), what));
  }
}

TEST_F(QueueTest, BesideLatencyRegionsAThreadWithTheGilOpensTheGate) {
  queue().latency_came();
  holds_gil = true;
  for (const For what : {For::kSynchronise, For::kLaunch}) {
    block();
    EXPECT_TRUE(opens(caller_, queue().pushed(), what));
    gate_.open();
  }
}

// An allocator queries what it may use again, and goes on; a thread that only asks may hold what latency work needs.
TEST_F(QueueTest, QueriesOfBestEffortWorkOpenTheGateOnlyWhereTheThreadDoesNothingElse) {
  queue().latency_came();
  holds_gil = true;
  block();
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(queue().event_not_ready(caller_, kEvent));
  }
  EXPECT_EQ(gate_.forced(), 0);
  EXPECT_TRUE(eventually([&] { return !queue().event_not_ready(caller_, kEvent); }));
  EXPECT_EQ(gate_.forced(), 1);
}

// A drain that was free to wait when it began is not once the process has latency work: that work may wait for a lock
// which the waiting thread holds.
TEST_F(QueueTest, LatencyWorkThatComesOpensTheGateForDrainsUnderWay) {
  block();
  std::atomic<bool> done{false};
  std::thread thread([&] {
    queue().drain(caller_, queue().pushed(), For::kOther);
    done = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(done);
  queue().latency_came();
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  EXPECT_EQ(gate_.forced(), 1);
  gate_.open();  // where that failed
  thread.join();
}

TEST_F(QueueTest, LatencyWorkThatComesLeavesASynchroniseWaiting) {
  block();
  std::atomic<bool> done{false};
  std::thread thread([&] {
    queue().drain(caller_, queue().pushed(), For::kSynchronise);
    done = true;
  });
  std::this_thread::sleep_for(20ms);
  queue().latency_came();
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(done);
  gate_.open();
  thread.join();
  EXPECT_EQ(gate_.forced(), 0);
}

// ---- back-pressure

class SmallQueueTest : public QueueTest {
 protected:
  SmallQueueTest() : QueueTest(8, 1U << 12) {}
};

TEST_F(SmallQueueTest, AFullRingHoldsThePusherUntilThereIsRoom) {
  block();
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(launch());
  std::atomic<bool> pushed{false};
  std::thread pusher([&] {
    EXPECT_TRUE(launch());
    pushed = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(pushed);
  EXPECT_EQ(queue().pushed(), 7U);
  gate_.open();
  pusher.join();
  finish();
  EXPECT_EQ(driver_.count(), 8U);
}

TEST_F(SmallQueueTest, AFullRingOpensTheGateForAThreadThatHoldsTheGilBesideLatencyWork) {
  queue().latency_came();
  block();
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(launch());
  holds_gil = true;
  EXPECT_TRUE(launch());
  EXPECT_GE(gate_.forced(), 1);
}

class RoomyQueueTest : public QueueTest {
 protected:
  RoomyQueueTest() : QueueTest(64, 1U << 14) {}
};

// By no more than the room it needs: every launch let through early is in the way of latency work.
TEST_F(RoomyQueueTest, WhatMayNotWaitForRoomOpensTheGateForOneLaunch) {
  queue().latency_came();
  block();
  for (int i = 0; i < 58; ++i) ASSERT_TRUE(launch());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));  // the spare
  EXPECT_EQ(queue().passed(), 0U);
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(queue().passed(), 1U);
}

// The launcher may pass everything between the look that finds the ring full and the wait for room.
TEST_F(SmallQueueTest, AFullRingThatEmptiesAtThatMomentHoldsNobody) {
  queue().latency_came();
  gate_.open();
  for (int i = 0; i < 300'000; ++i) ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
}

TEST_F(RoomyQueueTest, BehindAsManyLaunchesAsGoInThereIsRoomForARecord) {
  queue().latency_came();
  expect_opening_ = false;
  block();
  for (int i = 0; i < 58; ++i) ASSERT_TRUE(launch());
  std::thread pusher([&] { EXPECT_TRUE(launch()); });  // and waits
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(queue().pushed(), 59U);
  EXPECT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(queue().passed(), 0U);
  EXPECT_EQ(gate_.forced(), 0);
  gate_.open();
  pusher.join();
}

TEST_F(SmallQueueTest, WhatCanNeverFitIsNotDeferred) {
  Call call = plain();
  queue().kernel_launched(call);
  std::string packed(2048, 'p');
  std::size_t bytes = packed.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  call.extra = extra;
  EXPECT_FALSE(push(call));
}

// ---- errors

TEST_F(QueueTest, ANonStickyErrorGoesToTheThreadThatPushed) {
  driver_.on_call = [](const DriverCall& call) { return call.what == 0xf2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; };
  ASSERT_TRUE(launch(kStream, {7, kContext, false}));
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  finish();
  EXPECT_EQ(driver_.count(), 2U);  // what was queued behind it ran
  EXPECT_EQ(queue().take_error(8), CUDA_SUCCESS);
  EXPECT_EQ(queue().take_error(7), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(queue().take_error(7), CUDA_SUCCESS);
  EXPECT_THAT(gate_.statuses(), ElementsAre(CUDA_ERROR_INVALID_VALUE));
}

TEST_F(QueueTest, AStickyErrorGoesToWhicheverCallComesNext) {
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  ASSERT_TRUE(launch(kStream, {7, kContext, false}));
  finish();
  EXPECT_EQ(queue().take_error(8), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(queue().take_error(7), CUDA_SUCCESS);
}

// Each call then goes to the driver, which answers it with that error.
TEST_F(QueueTest, AfterAStickyErrorNothingIsDeferredUntilTheContextIsGone) {
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  ASSERT_TRUE(launch());
  finish();
  EXPECT_FALSE(push(plain()));
  EXPECT_FALSE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  EXPECT_EQ(driver_.count(), 1U);

  driver_.on_call = nullptr;
  queue().context_gone();
  EXPECT_EQ(queue().take_error(caller_.thread), CUDA_SUCCESS);
  ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(driver_.count(), 2U);
}

TEST_F(QueueTest, ANonStickyErrorStopsNoDeferring) {
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_VALUE; };
  ASSERT_TRUE(launch());
  finish();
  EXPECT_TRUE(push(plain()));
  finish();
}

TEST_F(QueueTest, AContextThatCannotBeMadeCurrentIsAnErrorOfTheCall) {
  ASSERT_TRUE(launch(kStream, {7, FakeDriver::kBrokenContext, false}));
  ASSERT_TRUE(launch());
  finish();
  EXPECT_EQ(queue().take_error(7), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(driver_.count(), 1U);
}

TEST(Mailbox, OneErrorAThreadAndNoneLost) {
  Mailbox mailbox;
  mailbox.put(3, CUDA_ERROR_INVALID_VALUE);
  mailbox.put(3, CUDA_ERROR_NOT_SUPPORTED);  // CUDA too tells the first
  EXPECT_EQ(mailbox.take(3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(mailbox.take(3), CUDA_SUCCESS);
  for (unsigned thread = 1; thread <= Mailbox::kPlaces; ++thread) mailbox.put(thread, CUDA_ERROR_INVALID_VALUE);
  mailbox.put(1000, CUDA_ERROR_NOT_SUPPORTED);  // no place of its own
  EXPECT_EQ(mailbox.take(2000), CUDA_ERROR_NOT_SUPPORTED);
  for (unsigned thread = 1; thread <= Mailbox::kPlaces; ++thread) {
    EXPECT_EQ(mailbox.take(thread), CUDA_ERROR_INVALID_VALUE);
  }
}

}  // namespace
}  // namespace cudasched::queue
