// Random programs of several threads on two devices, through the entry points that a program gets, before a driver that
// hands the handles of what it has ended out again at once. For each stream, event and allocation the driver must see
// what the program did with it, in that order: nothing overtakes, nothing is lost, nothing reaches what comes after it
// under the same handle.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "fake_driver.hpp"
#include "fake_engine.hpp"
#include "hook/deferred.hpp"
#include "hook/guards.hpp"
#include "queue/router.hpp"

namespace cudasched::hook {
namespace {

using namespace queue;

constexpr std::uint64_t kEventBase = 0xe0000;
constexpr std::uint64_t kMemoryBase = 0x40000;
constexpr std::uint64_t kParts[] = {0xa1, 0xa2, 0xa3};  // of a graph

// What the program has done with each handle and the driver has not seen yet.
class Expected {
 public:
  void add(std::uint64_t handle, const std::string& what) {
    const std::scoped_lock lock(mutex_);
    waiting_[handle].push_back(what);
  }
  void seen(std::uint64_t handle, const std::string& what) {
    const std::scoped_lock lock(mutex_);
    std::deque<std::string>& all = waiting_[handle];
    if (all.empty() || all.front() != what) {
      complain("the driver saw " + what + " where " + (all.empty() ? "nothing" : all.front()) + " was next");
      if (all.empty()) return;
    }
    all.pop_front();
  }
  // A call that depends on all of this handle's is at the driver.
  void done(std::uint64_t handle, const char* what) {
    const std::scoped_lock lock(mutex_);
    if (!waiting_[handle].empty()) complain(std::string(what) + " went before " + waiting_[handle].front());
  }
  std::string wrong() {
    const std::scoped_lock lock(mutex_);
    for (const auto& [handle, all] : waiting_) {
      if (!all.empty()) complain(all.front() + " was lost");
    }
    return wrong_;
  }

 private:
  void complain(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  std::mutex mutex_;
  std::map<std::uint64_t, std::deque<std::string>> waiting_;
  std::string wrong_;
};

// Handles of one kind; the driver gives the last one that was ended first.
class Handles {
 public:
  void start(std::uint64_t first, std::uint64_t step, std::size_t count) {
    const std::scoped_lock lock(mutex_);
    unused_.clear();
    alive_.clear();
    for (std::size_t i = count; i-- > 0;) unused_.push_back(first + i * step);
  }
  std::uint64_t make() {
    const std::scoped_lock lock(mutex_);
    if (unused_.empty()) return 0;
    const std::uint64_t handle = unused_.back();
    unused_.pop_back();
    alive_.insert(handle);
    return handle;
  }
  bool end(std::uint64_t handle) {
    const std::scoped_lock lock(mutex_);
    if (alive_.erase(handle) == 0) return false;
    unused_.push_back(handle);
    return true;
  }
  bool alive(std::uint64_t handle) {
    const std::scoped_lock lock(mutex_);
    return alive_.contains(handle);
  }

 private:
  std::mutex mutex_;
  std::vector<std::uint64_t> unused_;
  std::set<std::uint64_t> alive_;
};

Expected expected;
Handles events;
Handles memory;

std::uint64_t memory_device(std::uint64_t address) { return address >> 12 & 1; }

void fill_table() {
  driver::Driver& table = driver::table();
  table.cuPointerGetAttribute = [](void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr*>(value) = address;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(value) = static_cast<int>(memory_device(address));
        return CUDA_SUCCESS;
      default:
        *static_cast<unsigned*>(value) = 0;
        return CUDA_SUCCESS;
    }
  };
  table.cuEventCreate = [](CUevent* event, unsigned) {
    *event = handle<CUevent>(events.make());
    return *event == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  };
}

std::string named(const char* what, std::uint64_t number) { return std::string(what) + ' ' + std::to_string(number); }

// The driver: checks each call against what the program did, and what it is made with.
CUresult check(const DriverCall& call) {
  const auto stream = reinterpret_cast<std::uint64_t>(call.stream);
  const auto must_live = [&](Handles& handles) {
    if (!handles.alive(call.what)) expected.seen(0, call.name + " of what is gone");
  };
  if (call.name == "kernel") {
    expected.seen(stream, named("launch", call.values[0]));
  } else if (call.name == "graph") {
    expected.seen(stream, named("part", call.what));
  } else if (call.name == "fill_32") {
    expected.seen(stream, named("fill", call.values[0]));
    expected.seen(call.what, named("fill", call.values[0]));
    must_live(memory);
  } else if (call.name == "record" || call.name == "wait") {
    expected.seen(stream, call.name);
    expected.seen(call.what, call.name);
    must_live(events);
  } else if (call.name == "destroy") {
    expected.seen(call.what, "destroy");
    if (!events.end(call.what)) return CUDA_ERROR_INVALID_HANDLE;
  } else if (call.name == "free") {
    expected.seen(stream, "free");
    expected.seen(call.what, "free");
    if (!memory.end(call.what)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

class Programs : public QueueTest {
 protected:
  Programs() : other_(other_gate_, +[]() noexcept { return holds_gil; }, 64, 1U << 16) {
    fill_table();
    queue().serve(0);
    other_.serve(1);
    EXPECT_TRUE(other_.start());
    router().add(queue());
    router().add(other_);
    events.start(kEventBase, 16, 12);
    memory.start(kMemoryBase, 1 << 12, 24);
    driver_.on_call = &check;
    queue().kernel_launched(plain());
    other_.kernel_launched(plain());
  }
  ~Programs() override {
    other_gate_.open();
    router().forget_queues();
  }

  // Programs in threads on both devices, whose gates open and close; every order that they may rely on holds.
  void run_all(bool with_graphs);

  template <typename Function>
  static Function* entry(std::string_view exported) {
    for (const TakenOver& each : deferred_functions()) {
      if (each.symbol == exported) return reinterpret_cast<Function*>(each.legacy);
    }
    return nullptr;
  }
  template <typename Function>
  static Function* guard(const char* symbol, Function* target) {
    return reinterpret_cast<Function*>(guarded(find_symbol(symbol), false, address(target)));
  }

  FakeGate other_gate_;
  Queue other_;
};

// A thread's work on one device. Its streams, events and memory are its own, so the order of what it does is the
// program's.
class Program {
 public:
  Program(Queue& queue, unsigned number, int device, bool latency) : random_(number * 7919 + 1), device_(device) {
    FakeDriver::device_now() = device;
    FakeDriver::current() = device == 0 ? kContext : kOtherContext;
    here = site_at(latency ? nullptr : &queue, {number, FakeDriver::current(), latency});
    for (std::uint64_t i = 0; i < 3; ++i) {
      streams_.push_back(handle<CUstream>((device == 0 ? 0x40 : 0x100) + number * 4 + i % 4));
    }
  }

  // It launches graphs, too, which are submitted in parts. What it does with an allocation is then on one stream: on
  // several, nothing but events orders it.
  void use_graphs() noexcept { graphs_ = true; }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) act();
    while (!events_.empty()) destroy();
    while (!memory_.empty()) free_async();
  }

 private:
  CUstream stream() { return streams_[random_() % streams_.size()]; }
  template <typename Value>
  Value& any(std::vector<Value>& of) {
    return of[random_() % of.size()];
  }
  static std::uint64_t word(CUstream stream) { return reinterpret_cast<std::uint64_t>(stream); }
  static std::uint64_t word(CUevent event) { return reinterpret_cast<std::uint64_t>(event); }

  void act() {
    switch (random_() % 12) {
      case 0:
        return graphs_ ? launch_graph() : launch();
      case 1:
        return launch();
      case 2:
        return create();
      case 3:
      case 4:
        if (!events_.empty()) record_or_wait(true);
        return;
      case 5:
      case 6:
        if (!events_.empty()) record_or_wait(false);
        return;
      case 7:
        if (!events_.empty() && random_() % 2 == 0) destroy();
        return;
      case 8:
        return allocate();
      case 9:
        if (!memory_.empty()) fill();
        return;
      case 10:
        if (!memory_.empty()) random_() % 4 == 0 ? free_now() : free_async();
        return;
      default:
        if (random_() % 8 == 0) synchronise();
        return;
    }
  }

  void launch() {
    Call call({.function = kPlainFunction}, stream());
    call.site = here;
    call.grid[0] = ++number_;
    expected.add(word(call.stream), named("launch", number_));
    CUresult status = CUDA_SUCCESS;
    if (defer(call, status)) {
      EXPECT_EQ(status, CUDA_SUCCESS);
      return;
    }
    const DriverCall direct{"kernel", call.stream, word(call.stream), nullptr, 0, {number_}, {}};
    check(direct);
    if (call.site.queue != nullptr) call.site.queue->kernel_launched(call);
  }
  void launch_graph() {
    Call call({.function = kGraph, .is_graph = true}, stream());
    call.site = here;
    if (call.site.queue == nullptr) return;  // another thread's
    for (const std::uint64_t part : kParts) expected.add(word(call.stream), named("part", part));
    CUresult status = CUDA_ERROR_UNKNOWN;
    EXPECT_TRUE(defer(call, status));
    EXPECT_EQ(status, CUDA_SUCCESS);
  }
  CUstream stream_of(std::uint64_t address) { return graphs_ ? streams_[(address >> 12) % streams_.size()] : stream(); }
  void create() {
    CUevent event = nullptr;
    if (entry<decltype(cuEventCreate)>("cuEventCreate")(&event, 0) == CUDA_SUCCESS) events_.push_back(event);
  }
  void record_or_wait(bool records) {
    const CUevent event = any(events_);
    const CUstream on = stream();
    expected.add(word(on), records ? "record" : "wait");
    expected.add(word(event), records ? "record" : "wait");
    const CUresult status = records ? entry<decltype(cuEventRecord)>("cuEventRecord")(event, on)
                                    : entry<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent")(on, event, 0);
    EXPECT_EQ(status, CUDA_SUCCESS);
  }
  void destroy() {
    CUevent& chosen = any(events_);
    const CUevent event = std::exchange(chosen, events_.back());
    events_.pop_back();
    expected.add(word(event), "destroy");
    EXPECT_EQ(entry<decltype(cuEventDestroy)>("cuEventDestroy_v2")(event), CUDA_SUCCESS);
  }
  void allocate() {
    // Directly: stream-ordered allocation has no entry point of the queue's.
    const std::uint64_t address = memory.make();
    if (address != 0) memory_.push_back(address);
  }
  void fill() {
    const std::uint64_t address = any(memory_);
    const CUstream on = stream_of(address);
    expected.add(word(on), named("fill", ++number_));
    expected.add(address, named("fill", number_));
    EXPECT_EQ(entry<decltype(cuMemsetD32Async)>("cuMemsetD32Async")(address, number_, 1, on), CUDA_SUCCESS);
  }
  std::uint64_t take_memory() {
    std::uint64_t& chosen = any(memory_);
    const std::uint64_t address = std::exchange(chosen, memory_.back());
    memory_.pop_back();
    return address;
  }
  void free_async() {
    const std::uint64_t address = take_memory();
    const CUstream on = stream_of(address);
    expected.add(word(on), "free");
    expected.add(address, "free");
    EXPECT_EQ(entry<decltype(cuMemFreeAsync)>("cuMemFreeAsync")(address, on), CUDA_SUCCESS);
  }
  void free_now() {
    const auto target = +[](CUdeviceptr address) {
      expected.done(address, "a free");
      return memory.end(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    };
    // Its device is that of the thread's context only where the address says so; else only its own uses are awaited.
    const std::uint64_t address = take_memory();
    if (memory_device(address) != static_cast<std::uint64_t>(device_)) {
      memory_.push_back(address);
      return free_async();
    }
    const auto free_memory =
        reinterpret_cast<CUresult (*)(CUdeviceptr)>(guarded(find_symbol("cuMemFree_v2"), false, hook::address(target)));
    EXPECT_EQ(free_memory(address), CUDA_SUCCESS);
  }
  void synchronise() {
    const CUstream on = stream();
    const auto target = +[](CUstream stream) {
      expected.done(word(stream), "a synchronise");
      return CUDA_SUCCESS;
    };
    const auto call = reinterpret_cast<CUresult (*)(CUstream)>(
        guarded(find_symbol("cuStreamSynchronize"), false, hook::address(target)));
    EXPECT_EQ(call(on), CUDA_SUCCESS);
  }

  template <typename Function>
  static Function* entry(std::string_view exported) {
    for (const TakenOver& each : deferred_functions()) {
      if (each.symbol == exported) return reinterpret_cast<Function*>(each.legacy);
    }
    return nullptr;
  }

  std::mt19937 random_;
  const int device_;
  bool graphs_ = false;
  unsigned number_ = 0;
  std::vector<CUstream> streams_;
  std::vector<CUevent> events_;
  std::vector<std::uint64_t> memory_;
};

void Programs::run_all(bool with_graphs) {
  constexpr unsigned kThreads = 5;
  constexpr int kSteps = 20'000;
  std::atomic<bool> done{false};
  std::thread gatekeeper([&] {
    while (!done) {
      gate_.close();
      std::this_thread::sleep_for(200us);
      other_gate_.close();
      gate_.open();
      std::this_thread::sleep_for(200us);
      other_gate_.open();
    }
  });
  std::vector<std::thread> threads;
  for (unsigned number = 1; number <= kThreads; ++number) {
    threads.emplace_back([&, number] {
      const int device = static_cast<int>(number % 2);
      Program program(device == 0 ? queue() : other_, number, device, number == kThreads);
      if (with_graphs) program.use_graphs();
      program.run(kSteps);
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  gatekeeper.join();
  finish();
  other_.drain(caller_, other_.pushed(), Waiter::For::kSynchronise);
  EXPECT_EQ(expected.wrong(), "");
  EXPECT_GT(queue().passed() + other_.passed(), Position{kSteps});  // most of it was queued
}

TEST_F(Programs, KeepTheOrderOfEachStreamEventAndAllocation) { run_all(/*with_graphs=*/false); }

// What it does with each handle is as before, whatever is made between the parts of its graphs.
TEST_F(Programs, KeepTheOrderOfEachStreamEventAndAllocationBesideGraphsInParts) {
  for (FakeGate* const gate : {&gate_, &other_gate_}) {
    gate->cut({handle<CUgraphExec>(kParts[0]), handle<CUgraphExec>(kParts[1]), handle<CUgraphExec>(kParts[2])});
  }
  make_graph(kGraph);
  run_all(/*with_graphs=*/true);
}

}  // namespace
}  // namespace cudasched::hook
