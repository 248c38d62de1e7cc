// The hook's side of the queue (csrc/hook/offload.cpp): what is pushed, what drains, what is told, and that a guard
// leaves every argument as it was.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>

#include "fake_driver.hpp"
#include "hook/offload.hpp"

namespace cudasched::hook {
namespace {

using namespace queue;
using testing::ElementsAre;

// What find_site() says.
thread_local Site here;
void note_nothing(CUevent, CUstream) noexcept {}
Site find_site(CUstream, CUevent) noexcept { return here; }

int attribute_value = 0;
unsigned memory_type = 0;  // 0: pageable
unsigned memory_device = 0;
int uncounted_captures = 0;
void count_capture() noexcept { ++uncounted_captures; }

void fill_table() {
  driver::Driver& table = driver::table();
  table.cuPointerGetAttribute = [](void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
      *static_cast<CUdeviceptr*>(value) = address & ~CUdeviceptr{0xff};
      return CUDA_SUCCESS;
    }
    unsigned answer = memory_type;
    if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) answer = 0;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) answer = memory_device;
    *static_cast<unsigned*>(value) = answer;
    return memory_type == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuEventCreate = [](CUevent* event, unsigned) {
    *event = kOtherEvent;
    return CUDA_SUCCESS;
  };
  table.cuIpcOpenEventHandle = [](CUevent* event, CUipcEventHandle) {
    *event = kOtherEvent;
    return CUDA_SUCCESS;
  };
  table.cuFuncGetAttribute = [](int* value, CUfunction_attribute, CUfunction function) {
    *value = attribute_value;
    return reinterpret_cast<std::uint64_t>(function) < 0x1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  };
  table.cuKernelGetAttribute = [](int* value, CUfunction_attribute, CUkernel, CUdevice) {
    *value = attribute_value;
    return CUDA_SUCCESS;
  };
}

class OffloadTest : public QueueTest {
 protected:
  OffloadTest() {
    fill_table();
    Offload::connect({&find_site, &note_nothing, &note_nothing, &count_capture});
    uncounted_captures = 0;
    Offload::add(queue());
    here = site_at(&queue(), caller_);
    memory_type = CU_MEMORYTYPE_HOST;
    attribute_value = 0;
  }
  ~OffloadTest() override { Offload::forget_queues(); }

  // As the entry points of launches do.
  static bool offer(Call call, CUresult& status) {
    call.site = here;
    return Offload::push(call, status);
  }
  // The function that a program would get under this name.
  template <typename Function>
  static Function* entry(std::string_view exported) {
    for (const TakenOver& each : offload_functions()) {
      if (each.symbol == exported) return reinterpret_cast<Function*>(each.legacy);
    }
    ADD_FAILURE() << exported;
    return nullptr;
  }
  template <typename Function>
  static Function* guard(const char* symbol, Function* target, bool per_thread = false) {
    return reinterpret_cast<Function*>(Offload::guarded(find_symbol(symbol), per_thread, address(target)));
  }
};

TEST_F(OffloadTest, WithoutQueuesEverythingIsTheDrivers) {
  Offload::forget_queues();
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_EQ(driver_.made().at(0).thread, static_cast<pid_t>(syscall(SYS_gettid)));
}

TEST_F(OffloadTest, PageableCopiesAreDrainedAndDirect) {
  memory_type = 0;
  ASSERT_TRUE(launch());
  EXPECT_EQ(entry<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2")(0x1000, &memory_type, 4, kStream), CUDA_SUCCESS);
  EXPECT_EQ(entry<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2")(&memory_type, 0x1000, 4, kStream), CUDA_SUCCESS);
  const auto made = driver_.made();
  ASSERT_EQ(made.size(), 3U);
  EXPECT_EQ(made[0].name, "kernel");
  for (const std::size_t i : {1U, 2U}) EXPECT_EQ(made[i].thread, static_cast<pid_t>(syscall(SYS_gettid)));
}

TEST_F(OffloadTest, ALatencyCallBypassesWhatItDoesNotDependOnAndDrainsTheRestWithTheGateOpen) {
  block(kStream);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  here = site_at(nullptr, latency_);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kOtherEvent, kNonBlocking), CUDA_SUCCESS);
  EXPECT_THAT(driver_.story(), ElementsAre("record e2"));
  EXPECT_EQ(entry<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent")(kNonBlocking, kEvent, 0), CUDA_SUCCESS);
  EXPECT_THAT(driver_.story(), ElementsAre("record e2", "kernel f2", "record e1", "wait e1"));
  EXPECT_EQ(gate_.forced(), 1);
}

TEST_F(OffloadTest, ADirectRecordOnACapturingStreamMarksTheEvent) {
  auto* const idle = driver::table().cuStreamIsCapturing;
  driver::table().cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  };
  here.queue = nullptr;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_wait(caller_, kStream, kEvent, 0));
  driver::table().cuStreamIsCapturing = idle;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
  EXPECT_TRUE(queue().push_wait(caller_, kStream, kEvent, 0));
}

TEST_F(OffloadTest, InterprocessEventsAreTold) {
  CUevent event = nullptr;
  EXPECT_EQ(entry<decltype(cuEventCreate)>("cuEventCreate")(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  EXPECT_TRUE(queue().push_record(caller_, event, kStream, 0));
  EXPECT_EQ(entry<decltype(cuEventCreate)>("cuEventCreate")(&event, CU_EVENT_INTERPROCESS), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_record(caller_, event, kStream, 0));
  driver::registry().forget(event);
  EXPECT_EQ(entry<decltype(cuIpcOpenEventHandle)>("cuIpcOpenEventHandle")(&event, {}), CUDA_SUCCESS);
  EXPECT_FALSE(queue().push_record(caller_, event, kStream, 0));
}

TEST_F(OffloadTest, ADeferredCallsErrorComesAtTheNextCall) {
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_VALUE; };
  ASSERT_TRUE(launch());
  finish();
  driver_.on_call = nullptr;
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(entry<decltype(cuEventRecord)>("cuEventRecord")(kEvent, kStream), CUDA_SUCCESS);
}

// ---- guards

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

TEST_F(OffloadTest, AGuardLeavesEveryArgumentAsItWas) {
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

TEST_F(OffloadTest, AGuardDrainsByItsFunctionsRule) {
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
TEST_F(OffloadTest, AGuardReadsArgumentsOnTheStack) {
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

TEST_F(OffloadTest, WhatMayBeginACaptureUnseenIsTold) {
  const auto fine = +[](CUstream) { return CUDA_SUCCESS; };
  Offload::forget_queues();
  EXPECT_EQ(guard("cuStreamBeginCapture_v2", fine)(kStream), CUDA_SUCCESS);  // counted by the function taken over
  EXPECT_EQ(guard("cuStreamSynchronize", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 0);
  EXPECT_EQ(guard("cuStreamBeginRecaptureToGraph", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 1);
  EXPECT_EQ(guard("cuOfTheFuture", fine)(kStream), CUDA_SUCCESS);
  EXPECT_EQ(uncounted_captures, 2);
}

TEST_F(OffloadTest, QueriesOfQueuedThingsAreAnsweredHere) {
  const auto done = +[](CUevent) { return CUDA_SUCCESS; };
  block();
  ASSERT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
  EXPECT_EQ(guard("cuEventQuery", done)(kEvent), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(guard("cuEventQuery", done)(kOtherEvent), CUDA_SUCCESS);
  const auto stream_done = +[](CUstream) { return CUDA_SUCCESS; };
  EXPECT_EQ(guard("cuStreamQuery", stream_done)(kStream), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(guard("cuStreamQuery", stream_done)(kNonBlocking), CUDA_SUCCESS);
  finish();
  EXPECT_EQ(guard("cuEventQuery", done)(kEvent), CUDA_SUCCESS);
}

TEST_F(OffloadTest, ASynchroniseHandsOverTheError) {
  const auto fine = +[](CUstream) { return CUDA_SUCCESS; };
  driver_.on_call = [](const DriverCall&) { return CUDA_ERROR_INVALID_IMAGE; };
  ASSERT_TRUE(launch());
  auto* const synchronise = guard("cuStreamSynchronize", fine);
  EXPECT_EQ(synchronise(kStream), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(synchronise(kStream), CUDA_SUCCESS);
}

TEST_F(OffloadTest, HandlesThatGoAreForgotten) {
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
TEST_F(OffloadTest, AChangeOfAGraphWaitsForItsOwnLaunchesAlone) {
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

TEST_F(OffloadTest, WhoChangesAGraphKnowsWhatIsQueuedOfItAndWaitsForThatAlone) {
  const CUgraphExec other = handle<CUgraphExec>(0x6bad);
  make_graph(kGraph);
  make_graph(other);
  EXPECT_FALSE(Offload::has_queued(kGraph));
  queue().latency_came();
  block();
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(launch());
  const Position passed = queue().passed();
  EXPECT_TRUE(Offload::has_queued(kGraph));
  EXPECT_EQ(Offload::queue_of(kGraph), &queue());
  EXPECT_FALSE(Offload::has_queued(other));
  EXPECT_EQ(Offload::queue_of(other), nullptr);
  Offload::drain_changed(kGraph);
  EXPECT_EQ(queue().passed(), passed + 2);  // what is behind its launch waits on
  EXPECT_FALSE(Offload::has_queued(kGraph));
  driver::registry().forget(other);
  EXPECT_TRUE(Offload::has_queued(other));  // not plain: it may wait for anything
  finish();
}

// What graphs with memory nodes have allocated may be in use by anything.
TEST_F(OffloadTest, AChangeOfAGraphThatIsNotPlainWaitsForEverything) {
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

TEST_F(OffloadTest, ASetterDrainsOnlyWhenTheValueChanges) {
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

TEST_F(OffloadTest, TheFirstLaunchGoesDirectlyAndIsLearned) {
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
TEST_F(OffloadTest, BesideLatencyRegionsALaunchThatIsNotDeferredLeavesTheGateClosed) {
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

// ---- each line of the table of entry points

class EachLine : public OffloadTest {
 protected:
  // Positions of what fill() queues, of which each is the last one for something. A launch behind each of them holds
  // what is queued next while the gate is closed.
  enum Queued : Position { kLaunchOnStream = 1, kRecord = 3, kGraphLaunch = 5, kOtherRecord = 7, kLast = 8 };

  void fill() {
    for (const CUevent event : {kEvent, kOtherEvent}) driver::registry().created(event, CU_EVENT_DISABLE_TIMING);
    make_graph(kGraph);
    before_ = queue().pushed();
    block(kStream);
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(queue().push_record(caller_, kEvent, kNonBlocking, 0));
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(push_graph(kGraph, kNonBlocking));
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(queue().push_record(caller_, kOtherEvent, kNonBlocking, 0));
    ASSERT_TRUE(launch(kOtherStream));
    ASSERT_EQ(queue().pushed() - before_, Position{kLast});
  }
  Position passed() { return queue().passed() - before_; }

  // Where a call that is about kStream, kEvent, kOtherEvent and kGraph stops waiting.
  static Position end_of(Scope scope) {
    switch (scope) {
      case Scope::kNone:
      case Scope::kGraph:  // no graph has memory
        return 0;
      case Scope::kStream:
        return kLaunchOnStream;
      case Scope::kEvent:
      case Scope::kStreamAndEvent:
        return kRecord;
      case Scope::kEvents:
        return kOtherRecord;
      case Scope::kExec:
        return kGraphLaunch;
      default:
        return kLast;
    }
  }

  // With these in the places that the table names, and in all others what is none of them.
  static CUresult call(void* function, const EntryPoint& point) {
    std::array<std::uint64_t, 16> with{};
    with.fill(7);
    const auto put = [&](int place, auto value) {
      if (place >= 0) with[static_cast<std::size_t>(place)] = (std::uint64_t)value;
    };
    const Arguments& at = point.arguments;
    put(at.stream, kStream);
    put(at.event, kEvent);
    if (point.scope == Scope::kPeers) {
      put(at.other, kContext);
    } else {
      put(at.other, kOtherEvent);
    }
    put(at.function, kFunction);
    put(at.kernel, kFunction);
    put(at.exec, kGraph);
    put(at.context, kContext);
    put(at.memory, 0x1000);
    using Word = std::uint64_t;
    return reinterpret_cast<CUresult (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                                         Word, Word, Word)>(function)(
        with[0], with[1], with[2], with[3], with[4], with[5], with[6], with[7], with[8], with[9], with[10], with[11],
        with[12], with[13], with[14], with[15]);
  }

  static void expect_told(const EntryPoint& point) {
    driver::StreamFacts stream;
    driver::EventFacts event;
    driver::ExecFacts exec;
    switch (point.meaning) {
      case Meaning::kDestroyStream:
        EXPECT_FALSE(driver::registry().find(kStream, stream)) << point.symbol;
        break;
      case Meaning::kShareEvent:
        EXPECT_TRUE(driver::registry().find(kEvent, event) && event.shared) << point.symbol;
        break;
      case Meaning::kChangeExec:
        EXPECT_TRUE(driver::registry().find(kGraph, exec) && !exec.launched) << point.symbol;
        break;
      case Meaning::kDestroyExec:
        EXPECT_FALSE(driver::registry().find(kGraph, exec)) << point.symbol;
        break;
      default:
        break;
    }
  }

  template <typename Visit>
  static void for_each(Treatment treatment, Visit&& visit) {
    for (const EntryPoint& point : entry_points()) {
      if (point.treatment != treatment) continue;
      visit(point, false);
      if (!point.twin.empty()) visit(point, true);
    }
  }

  Position before_ = 0;
};

template <typename Function>
Function* as(void* function) {
  return reinterpret_cast<Function*>(function);
}

CUresult its_target() { return CUDA_ERROR_NOT_SUPPORTED; }

TEST_F(EachLine, HasAGuardIfItDrainsAndNoneElse) {
  for (const EntryPoint& point : entry_points()) {
    const bool guarded = Offload::guarded(&point, false, address(&its_target)) != address(&its_target);
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
    void* const guarded = Offload::guarded(&point, per_thread, address(&its_target));
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
    const auto functions = offload_functions();
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

// ---- what ends behind a backlog

// Found: an event destroy behind gated launches waited for the gate, and opened it beside latency work.
TEST_F(OffloadTest, AnEventIsDestroyedBehindItsRecordsWithoutWaiting) {
  queue().latency_came();
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  block();
  ASSERT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(destroy(kOtherEvent), CUDA_SUCCESS);  // nothing of it is queued
  EXPECT_THAT(driver_.story(), ElementsAre("destroy e2"));
  EXPECT_EQ(gate_.forced(), 0);
  // The handle may come back once the driver has ended the event, and then is another's.
  EXPECT_FALSE(queue().push_record(caller_, kEvent, kStream, 0));
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("destroy e2", "kernel f2", "record e1", "destroy e1"));
  EXPECT_EQ(driver_.made().back().context, kContext);  // which was current when it was created
  driver::registry().created(kEvent, CU_EVENT_DEFAULT);
  EXPECT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
}

TEST_F(OffloadTest, OfAnEventThatIsNotKnownOrSharedTheDriverAnswers) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  driver_.on_call = [](const DriverCall& call) {
    return call.name == "destroy" ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  };
  for (const CUevent event : {kEvent, kOtherEvent}) {
    ASSERT_TRUE(queue().push_record(caller_, event, kStream, 0));
    if (event == kEvent) driver::registry().shared(event);
    if (event == kOtherEvent) driver::registry().forget(event);
    EXPECT_EQ(destroy(event), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_TRUE(queue().empty());
    EXPECT_EQ(driver_.made().back().thread, static_cast<pid_t>(syscall(SYS_gettid)));
  }
}

// Destroyed twice: the second time the driver says so, after it has done the first.
TEST_F(OffloadTest, AnEventThatIsDestroyedTwiceIsDestroyedOnceForTheProgram) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  driver_.on_call = [ended = false](const DriverCall& call) mutable {
    if (call.name != "destroy") return CUDA_SUCCESS;
    return std::exchange(ended, true) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  };
  ASSERT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(destroy(kEvent), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(OffloadTest, AStreamOrderedFreeIsQueuedInItsStreamsOrder) {
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

TEST_F(OffloadTest, EverythingQueuedIsSubmittedForACallThatFindsNoMemory) {
  EXPECT_FALSE(Offload::submit_everything());
  block();
  ASSERT_TRUE(queue().push_free(caller_, 0x4000, kStream));
  std::thread opener([&] {
    std::this_thread::sleep_for(5ms);
    gate_.open();
  });
  EXPECT_TRUE(Offload::submit_everything());
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "free 4000"));
  opener.join();
}

// ---- two devices

const CUstream kStreamThere = handle<CUstream>(0x151);  // of the second device

class TwoDevices : public OffloadTest {
 protected:
  TwoDevices() : other_(other_gate_, +[]() noexcept { return false; }, 64, 1U << 14) {
    queue().serve(0);
    other_.serve(1);
    EXPECT_TRUE(other_.start());
    Offload::add(other_);
    memory_type = CU_MEMORYTYPE_DEVICE;
    memory_device = 1;
  }
  ~TwoDevices() override {
    other_gate_.open();
    Offload::forget_queues();
    FakeDriver::device_now() = 0;
  }
  // From here on the calling thread is on the second device.
  void go_there() {
    FakeDriver::device_now() = 1;
    FakeDriver::current() = kOtherContext;
    here = site_at(&other_, {1, kOtherContext, false});
  }
  // Calls `what` with the first device's gate closed behind a launch; says whether it waited.
  template <typename Call>
  bool waits_for_the_first_gate(Call&& what) {
    std::atomic<bool> done{false};
    std::thread thread([&] {
      go_there();
      what();
      done = true;
    });
    const auto end = std::chrono::steady_clock::now() + 50ms;
    while (!done && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    const bool waited = !done && !queue().empty();
    if (waited) gate_.open();
    thread.join();
    if (waited) finish();
    return waited;
  }

  FakeGate other_gate_;
  Queue other_;
};

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
  Offload::forget_queues();
  Offload::add(queue());
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

TEST_F(TwoDevices, AQueueCarriesItsOwnDevicesStreams) {
  EXPECT_FALSE(queue().push_fill(caller_, {0x1000, 0, 1, 1, 0, 1}, false, kStreamThere));
  EXPECT_TRUE(other_.push_fill(caller_, {0x1000, 0, 1, 1, 0, 1}, false, kStreamThere));
  EXPECT_TRUE(queue().push_fill(caller_, {0x1000, 0, 1, 1, 0, 1}, false, kStream));
}

// One record is queued on one device, and a wait for it on another drains it: the event ends where it still is queued.
TEST_F(TwoDevices, AnEventIsDestroyedInTheQueueThatHoldsIt) {
  auto* const destroy = entry<decltype(cuEventDestroy)>("cuEventDestroy_v2");
  block();
  ASSERT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
  go_there();
  EXPECT_EQ(destroy(kEvent), CUDA_SUCCESS);
  EXPECT_EQ(other_.pushed(), 0U);
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "destroy e1"));
}

// Two devices: an event recorded through one queue is waited for through the other.
TEST_F(OffloadTest, WhatIsQueuedOnAnotherDeviceIsDrained) {
  FakeGate other_gate;
  Queue other(other_gate, +[]() noexcept { return false; }, 64, 1U << 14);
  ASSERT_TRUE(other.start());
  Offload::add(other);
  ASSERT_TRUE(launch());
  ASSERT_TRUE(queue().push_record(caller_, kEvent, kStream, 0));
  here.queue = &other;
  EXPECT_EQ(entry<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent")(kNonBlocking, kEvent, 0), CUDA_SUCCESS);
  EXPECT_EQ(queue().passed(), 2U);
  other.drain(caller_, other.pushed(), Waiter::For::kSynchronise);
  EXPECT_THAT(driver_.story(), ElementsAre("kernel f2", "record e1", "wait e1"));
  Offload::forget_queues();
}

}  // namespace
}  // namespace cudasched::hook
