#include "hook/offload.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "base/log.hpp"
#include "base/spin_lock.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"

extern "C" {
// In guards.S.
extern const char cudasched_guards[] __attribute__((visibility("hidden")));
void* cudasched_guard_target(std::uint32_t index, const std::uint64_t* registers, const std::uint64_t* stack)
    __attribute__((visibility("hidden")));
}

namespace cudasched::hook {
namespace {

using queue::Caller;
using queue::Operation;
using queue::Position;
using queue::Queue;
using queue::Site;
using For = queue::Waiter::For;

constexpr std::size_t kGuards = 1024;
constexpr std::size_t kGuardBytes = 16;
constexpr std::size_t kQueues = 32;

struct Guard {
  void* target = nullptr;
  const EntryPoint* point = nullptr;  // null: a version that the table does not know
  bool per_thread = false;

  bool operator==(const Guard&) const = default;
};

struct State {
  Offload::Engine engine;

  bool one_device = false;
  std::array<std::atomic<Queue*>, kQueues> queues{};
  std::atomic<std::size_t> queue_count{0};

  std::atomic<bool> connected{false};
  std::atomic<bool> off{false};  // nothing is deferred any more
  SpinLock guard_lock;           // while guards are added
  std::array<Guard, kGuards> guards{};
  std::size_t guard_count = 0;
};

constinit State state;

template <typename Visit>
void for_each_queue(Visit&& visit) noexcept {
  const std::size_t count = state.queue_count.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i) {
    if (Queue* known = state.queues[i].load(std::memory_order_acquire)) visit(*known);
  }
}

bool all_empty() noexcept {
  bool empty = true;
  for_each_queue([&](Queue& known) { empty = empty && known.empty(); });
  return empty;
}

constexpr CUstream meant(bool per_thread, CUstream stream) noexcept {
  return per_thread ? driver::meant_stream<true>(stream) : driver::meant_stream<false>(stream);
}

// ---- which queues a call is about, as a bitmap of device ordinals

using Devices = std::uint32_t;
constexpr Devices kAllDevices = ~Devices{0};

constexpr Devices only(int device) noexcept { return device < 0 || device >= 32 ? kAllDevices : Devices{1} << device; }

bool concerns(const Queue& known, Devices devices) noexcept { return (only(known.device()) & devices) != 0; }

// A stream's own; a default stream's is the current context's.
Devices devices_of(CUstream stream) noexcept {
  if (state.one_device) return kAllDevices;
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
    return only(driver::current_device());
  }
  driver::StreamFacts facts;
  return driver::registry().look_up(stream, facts) ? only(facts.device) : kAllDevices;
}

// Those that can use the memory: of host and managed memory all.
Devices devices_of(CUdeviceptr address) noexcept {
  if (state.one_device) return kAllDevices;
  unsigned managed = 1;
  int device = -1;
  if (driver::memory_type(address) != CU_MEMORYTYPE_DEVICE ||
      driver::table().cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) != CUDA_SUCCESS ||
      managed != 0 ||
      driver::table().cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) != CUDA_SUCCESS) {
    return kAllDevices;
  }
  return driver::registry().reach(device);
}

// Drains in every queue of these devices. Drains all queues' operations on the events, too, because one device may wait
// for an event of another.
void drain(const Caller& caller, queue::Scope scope, Devices devices, CUstream stream, CUevent event, CUevent other,
           For what, const Queue* except = nullptr, CUgraphExec exec = nullptr) noexcept {
  for_each_queue([&](Queue& known) {
    if (&known == except) return;
    queue::Scope here = scope;
    if (!concerns(known, devices)) {
      if (scope == queue::Scope::kStream || scope == queue::Scope::kEnd) return;
      if (scope == queue::Scope::kStreamAndEvent) here = queue::Scope::kEvent;
    }
    if (const Position position = known.before(here, stream, event, other, exec)) known.drain(caller, position, what);
  });
}

// ---- calls that may be deferred

// A deferred call must not overtake other devices' queued operations on its stream or event.
void drain_others(const Site& site, CUstream stream, CUevent event) noexcept {
  if (state.queue_count.load(std::memory_order_relaxed) < 2) return;
  const queue::Scope scope = event != nullptr ? queue::Scope::kStreamAndEvent : queue::Scope::kStream;
  drain(site.caller, scope, devices_of(stream), stream, event, nullptr, For::kOther, site.queue);
}

// push(queue, caller) defers or says false; then everything that the call depends on is drained and direct() called.
// `what`: kSynchronise for calls that wait for the device themselves, kLaunch for those that the gate may hold anyway.
template <typename Push, typename Direct>
CUresult defer_or(const Site& site, CUstream stream, CUevent event, Push&& push, Direct&& direct,
                  const For& what) noexcept {
  // The call becomes a node, which is ordered to no queued operation but those on an event that it records or waits
  // for.
  if (site.captured) {
    if (event != nullptr) drain(site.caller, queue::Scope::kEvent, kAllDevices, nullptr, event, nullptr, what);
    return direct();
  }
  if (site.queue != nullptr) {
    if (const CUresult error = site.queue->take_error(site.caller.thread)) return error;
    drain_others(site, stream, event);
    if (push(*site.queue, site.caller)) return CUDA_SUCCESS;
  }
  drain(site.caller, event != nullptr ? queue::Scope::kStreamAndEvent : queue::Scope::kStream, devices_of(stream),
        stream, event, nullptr, what);
  return direct();
}

template <typename Push, typename Direct>
CUresult defer_or(CUstream stream, CUevent event, Push&& push, Direct&& direct,
                  const For& what = For::kOther) noexcept {
  if (state.queue_count.load(std::memory_order_acquire) == 0) return direct();
  return defer_or(state.engine.find_site(stream, nullptr), stream, event, push, direct, what);
}

// The driver reads and writes pageable memory before such a call returns.
bool is_pageable(CUdeviceptr address) noexcept { return driver::memory_type(address) == 0; }

CUresult copy(const Operation::Copy& what, CUstream stream) noexcept {
  Operation operation;
  operation.kind = Operation::Kind::kCopy;
  operation.stream = stream;
  operation.copy = what;
  For wait = For::kOther;
  return defer_or(
      stream, nullptr,
      [&](Queue& known, const Caller& caller) {
        if (!known.active()) return false;
        const auto direction = what.direction;
        const bool any = direction == Operation::Direction::kAny;
        if (((any || direction == Operation::Direction::kToDevice) && is_pageable(what.from)) ||
            ((any || direction == Operation::Direction::kToHost) && is_pageable(what.to))) {
          wait = For::kSynchronise;  // the call returns when the device is done with that memory
          return false;
        }
        return known.push_copy(caller, what, stream);
      },
      [&] { return operation.execute(); }, wait);
}

CUresult fill(const Operation::Fill& what, bool rows, CUstream stream) noexcept {
  Operation operation;
  operation.kind = rows ? Operation::Kind::kFillRows : Operation::Kind::kFill;
  operation.stream = stream;
  operation.fill = what;
  return defer_or(
      stream, nullptr, [&](Queue& known, const Caller& caller) { return known.push_fill(caller, what, rows, stream); },
      [&] { return operation.execute(); });
}

template <bool kPerThread>
CUresult copy_any(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, from, bytes, Operation::Direction::kAny}, meant(kPerThread, stream));
}
template <bool kPerThread>
CUresult copy_to_device(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, reinterpret_cast<CUdeviceptr>(from), bytes, Operation::Direction::kToDevice},
              meant(kPerThread, stream));
}
template <bool kPerThread>
CUresult copy_to_host(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({reinterpret_cast<CUdeviceptr>(to), from, bytes, Operation::Direction::kToHost},
              meant(kPerThread, stream));
}
template <bool kPerThread>
CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, from, bytes, Operation::Direction::kOnDevice}, meant(kPerThread, stream));
}

template <bool kPerThread, typename Element>
CUresult fill_flat(CUdeviceptr to, Element value, std::size_t count, CUstream stream) noexcept {
  return fill({to, 0, count, 1, value, sizeof(Element)}, false, meant(kPerThread, stream));
}
template <bool kPerThread, typename Element>
CUresult fill_rows(CUdeviceptr to, std::size_t pitch, Element value, std::size_t width, std::size_t height,
                   CUstream stream) noexcept {
  return fill({to, pitch, width, height, value, sizeof(Element)}, true, meant(kPerThread, stream));
}

CUresult record_event(CUevent event, CUstream stream, unsigned flags) noexcept {
  state.engine.note_record(event, stream);
  return defer_or(
      stream, event,
      [&](Queue& known, const Caller& caller) { return known.push_record(caller, event, stream, flags); },
      [&] {
        const CUresult status = flags == CU_EVENT_RECORD_DEFAULT
                                    ? driver::table().cuEventRecord(event, stream)
                                    : driver::table().cuEventRecordWithFlags(event, stream, flags);
        if (status == CUDA_SUCCESS) driver::registry().recorded(event, driver::is_capturing(stream));
        return status;
      });
}
template <bool kPerThread>
CUresult event_record(CUevent event, CUstream stream) noexcept {
  return record_event(event, meant(kPerThread, stream), CU_EVENT_RECORD_DEFAULT);
}
template <bool kPerThread>
CUresult event_record_with_flags(CUevent event, CUstream stream, unsigned flags) noexcept {
  return record_event(event, meant(kPerThread, stream), flags);
}

template <bool kPerThread>
CUresult stream_wait_event(CUstream stream, CUevent event, unsigned flags) noexcept {
  const CUstream on = meant(kPerThread, stream);
  state.engine.note_wait(event, on);
  return defer_or(
      on, event, [&](Queue& known, const Caller& caller) { return known.push_wait(caller, on, event, flags); },
      [&] { return driver::table().cuStreamWaitEvent(on, event, flags); });
}

template <bool kPerThread>
CUresult launch_host_function(CUstream stream, CUhostFn function, void* data) noexcept {
  const CUstream on = meant(kPerThread, stream);
  return defer_or(
      on, nullptr,
      [&](Queue& known, const Caller& caller) { return known.push_host_function(caller, function, data, on); },
      [&] { return driver::table().cuLaunchHostFunc(on, function, data); });
}

// ---- stream-ordered frees

// A free that the driver will refuse goes to the driver now: only the beginning of an allocation can be freed.
bool may_free(CUdeviceptr address) noexcept {
  CUdeviceptr begin = 0;
  return driver::table().cuPointerGetAttribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) ==
             CUDA_SUCCESS &&
         begin == address;
}

// An earlier call's error is not due here: a program takes memory for freed even if its free fails.
CUresult free_on(CUdeviceptr address, CUstream on) noexcept {
  if (state.queue_count.load(std::memory_order_acquire) != 0) {
    const Site site = state.engine.find_site(on, nullptr);
    if (site.queue != nullptr && site.queue->active() && may_free(address)) {
      drain_others(site, on, nullptr);
      if (site.queue->push_free(site.caller, address, on)) return CUDA_SUCCESS;
    }
    drain(site.caller, queue::Scope::kStream, devices_of(on), on, nullptr, nullptr, For::kOther);
  }
  return driver::table().cuMemFreeAsync.legacy(address, on);
}

template <bool kPerThread>
CUresult free_async(CUdeviceptr address, CUstream stream) noexcept {
  const CUstream on = meant(kPerThread, stream);
  if (state.engine.free_memory == nullptr) return free_on(address, on);
  return state.engine.free_memory(address, on, &free_on);
}

// ---- events: made, seen by other processes, destroyed

CUresult event_create(CUevent* event, unsigned flags) noexcept {
  const CUresult status = driver::table().cuEventCreate(event, flags);
  if (status == CUDA_SUCCESS) driver::registry().created(*event, flags);
  return status;
}

CUresult open_event(CUevent* event, CUipcEventHandle handle) noexcept {
  const CUresult status = driver::table().cuIpcOpenEventHandle(event, handle);
  if (status == CUDA_SUCCESS) driver::registry().opened(*event);
  return status;
}

// A queue that holds operations on the event or the graph, and whether several do.
Queue* holder_of(queue::Scope scope, CUevent event, CUgraphExec exec, bool& several) noexcept {
  Queue* found = nullptr;
  for_each_queue([&](Queue& known) {
    if (known.before(scope, nullptr, event, nullptr, exec) == 0) return;
    several = several || found != nullptr;
    found = &known;
  });
  return found;
}

// The driver would return success for a known event, so the event is destroyed behind its queued operations. Until then
// the driver cannot give its handle to another one.
CUresult event_destroy(CUevent event) noexcept {
  driver::EventFacts facts;
  const bool known = driver::registry().forget(event, &facts);
  bool several = false;
  if (Queue* const holder = holder_of(queue::Scope::kEvent, event, nullptr, several)) {
    const Caller caller = state.engine.find_site(nullptr, event).caller;
    if (known && !several && !facts.shared && !facts.captured && facts.context != nullptr &&
        holder->push_destroy(caller, event, facts.context)) {
      return CUDA_SUCCESS;
    }
    drain(caller, queue::Scope::kEvent, kAllDevices, nullptr, event, nullptr, For::kOther);
  }
  for_each_queue([&](Queue& each) { each.event_destroyed(event); });
  return driver::table().cuEventDestroy(event);
}

// ---- guards

CUresult not_ready() noexcept { return CUDA_ERROR_NOT_READY; }
CUresult deinitialized() noexcept { return CUDA_ERROR_DEINITIALIZED; }

CUresult hand_over_error() noexcept {
  const Site site = state.engine.find_site(nullptr, nullptr);
  CUresult found = CUDA_SUCCESS;
  for_each_queue([&](Queue& known) {
    if (found == CUDA_SUCCESS) found = known.take_error(site.caller.thread);
  });
  return found;
}

bool has_error(const Caller& caller) noexcept {
  bool found = false;
  for_each_queue([&](Queue& known) { found = found || known.has_error(caller.thread); });
  return found;
}

// A guarded call's arguments, integers and addresses all.
struct Passed {
  const std::uint64_t* registers;
  const std::uint64_t* stack;

  std::uint64_t word(int place) const noexcept {
#if defined(__x86_64__)
    constexpr int kInRegisters = 6;
#else
    constexpr int kInRegisters = 8;
#endif
    return place < kInRegisters ? registers[place] : stack[place - kInRegisters];
  }

  // 0 where the table does not name the argument.
  template <typename Handle>
  Handle handle(int place) const noexcept {
    return place < 0 ? Handle{} : reinterpret_cast<Handle>(word(place));
  }
};

// Does this call change nothing? Libraries set the same attribute before each launch.
bool is_set_already(const EntryPoint& point, const Passed& passed) noexcept {
  int value = 0;
  if (point.meaning == Meaning::kSetFunction) {
    return driver::table().cuFuncGetAttribute(&value, static_cast<CUfunction_attribute>(passed.word(1)),
                                              passed.handle<CUfunction>(0)) == CUDA_SUCCESS &&
           value == static_cast<int>(passed.word(2));
  }
  return point.meaning == Meaning::kSetKernel &&
         driver::table().cuKernelGetAttribute(&value, static_cast<CUfunction_attribute>(passed.word(0)),
                                              passed.handle<CUkernel>(2),
                                              static_cast<CUdevice>(passed.word(3))) == CUDA_SUCCESS &&
         value == static_cast<int>(passed.word(1));
}

// Updates the registry and the queues before the driver's call; drained.
void tell(const EntryPoint& point, const Passed& passed) noexcept {
  driver::Registry& registry = driver::registry();
  const Arguments& at = point.arguments;
  switch (point.meaning) {
    case Meaning::kDestroyStream: {
      const auto stream = passed.handle<CUstream>(at.stream);
      registry.forget(stream);
      return for_each_queue([&](Queue& known) { known.stream_destroyed(stream); });
    }
    case Meaning::kShareEvent:
      return registry.shared(passed.handle<CUevent>(at.event));
    case Meaning::kDestroyContext:
      return for_each_queue([](Queue& known) { known.context_gone(); });
    case Meaning::kChangeExec:
      registry.changed(passed.handle<CUgraphExec>(at.exec));
      return;
    case Meaning::kDestroyExec:
      return registry.forget(passed.handle<CUgraphExec>(at.exec));
    case Meaning::kSetFunction:
      return driver::functions().changed(passed.handle<const void*>(at.function));
    case Meaning::kSetKernel:
      return driver::functions().kernel_changed(passed.handle<const void*>(at.kernel));
    case Meaning::kSetFunctions:
      return driver::functions().all_changed();
    case Meaning::kPeerAccess:
      return registry.may_reach(driver::current_device(), driver::device_of(passed.handle<CUcontext>(at.context)));
    case Meaning::kPoolAccess:
      return registry.all_reach_all();
    default:
      return;
  }
}

// Is everything in the graph ordered by its stream alone? Launches of any other are never queued.
bool is_plain(CUgraphExec exec) noexcept {
  driver::ExecFacts facts;
  return driver::registry().find(exec, facts) && facts.plain;
}

// The scope drained for a call of this scope,
constexpr queue::Scope drained(Scope scope) noexcept {
  switch (scope) {
    case Scope::kNone:
      return queue::Scope::kNothing;
    case Scope::kStream:
      return queue::Scope::kStream;
    case Scope::kEvent:
      return queue::Scope::kEvent;
    case Scope::kStreamAndEvent:
      return queue::Scope::kStreamAndEvent;
    case Scope::kEvents:
      return queue::Scope::kTwoEvents;
    case Scope::kContext:
    case Scope::kMemory:
    case Scope::kContextAndMemory:
    case Scope::kPeers:
    case Scope::kExec:  // unless the graph is plain
    case Scope::kGraph:
    case Scope::kProcess:
      return queue::Scope::kEnd;
  }
  return queue::Scope::kEnd;
}

// and in the queues of which devices.
Devices devices_of(const EntryPoint& point, CUstream stream, const Passed& passed) noexcept {
  if (state.one_device) return kAllDevices;
  const auto of_memory = [&] { return devices_of(CUdeviceptr{passed.word(point.arguments.memory)}); };
  switch (point.scope) {
    case Scope::kStream:
    case Scope::kStreamAndEvent:
      return devices_of(stream);
    case Scope::kContext:
      return only(driver::current_device());
    case Scope::kMemory:
      return of_memory();
    case Scope::kContextAndMemory:
      return only(driver::current_device()) | of_memory();
    case Scope::kPeers:
      return only(driver::current_device()) |
             only(driver::device_of(passed.handle<CUcontext>(point.arguments.context))) |
             only(driver::device_of(passed.handle<CUcontext>(point.arguments.other)));
    default:
      return kAllDevices;
  }
}

void drain_everything(const Caller& caller, For what) noexcept {
  drain(caller, queue::Scope::kEnd, kAllDevices, nullptr, nullptr, nullptr, what);
}

// Drains once; from then on every call goes to the driver directly.
void stop_deferring(std::string_view message) noexcept {
  if (state.off.exchange(true)) return;
  for_each_queue([](Queue& known) { known.fail(); });
  drain_everything({}, For::kOther);
  log::warning(message);
}

void* drained_target(const Guard& guard, const Passed& passed) noexcept {
  if (guard.point == nullptr) {
    state.engine.uncounted_capture();
    if (state.queue_count.load(std::memory_order_acquire) != 0 && !all_empty()) {
      drain_everything(state.engine.find_site(nullptr, nullptr).caller, For::kOther);
    }
    return guard.target;
  }
  const EntryPoint& point = *guard.point;
  if (point.meaning == Meaning::kBeginCapture && !point.taken_over) state.engine.uncounted_capture();
  if (state.queue_count.load(std::memory_order_acquire) == 0) {
    tell(point, passed);
    return guard.target;
  }
  if (is_set_already(point, passed)) return guard.target;
  if (point.scope == Scope::kGraph && !driver::registry().graphs_hold_memory()) return guard.target;
  CUstream stream = nullptr;  // null for calls that have none
  if (point.scope == Scope::kStream) stream = meant(guard.per_thread, passed.handle<CUstream>(point.arguments.stream));
  const auto event = passed.handle<CUevent>(point.arguments.event);
  const bool empty = all_empty();
  const bool synchronises = point.meaning == Meaning::kSynchronise;
  if (!empty || synchronises) {
    const Site site = state.engine.find_site(stream, event);
    const bool queries_stream = point.meaning == Meaning::kQueryStream;
    const bool queries_event = point.meaning == Meaning::kQueryEvent;
    bool queued = false;
    for_each_queue([&](Queue& known) {
      if (queries_stream && concerns(known, devices_of(stream))) {
        queued = queued || known.stream_not_ready(site.caller, stream);
      }
      if (queries_event) queued = queued || known.event_not_ready(site.caller, event);
    });
    if (queued) return address(&not_ready);
    if (!empty && !queries_stream && !queries_event) {
      const auto exec = passed.handle<CUgraphExec>(point.arguments.exec);
      const bool of_graph = point.scope == Scope::kExec && is_plain(exec);
      drain(site.caller, of_graph ? queue::Scope::kGraph : drained(point.scope), devices_of(point, stream, passed),
            stream, event, passed.handle<CUevent>(point.arguments.other),
            synchronises ? For::kSynchronise : For::kOther, nullptr, exec);
    }
    if (synchronises && has_error(site.caller)) return address(&hand_over_error);
  }
  tell(point, passed);
  return guard.target;
}

void* go(const Guard& guard, const Passed& passed) noexcept {
  driver::barrier().settle();
  const bool direct = guard.point != nullptr && guard.point->treatment == Treatment::kDirect;
  void* const target = direct ? guard.target : drained_target(guard, passed);
  if (!driver::barrier().armed() || !uses_memory(guard.point)) return target;
  if (guard.point == nullptr || guard.point->meaning == Meaning::kPinsMemory) driver::barrier().pin();
  return driver::barrier().jump() ? target : address(&deinitialized);
}

}  // namespace

void Offload::connect(const Engine& engine) noexcept {
  state.engine = engine;
  state.connected.store(true, std::memory_order_release);
}

bool Offload::connected() noexcept { return state.connected.load(std::memory_order_acquire); }

void Offload::add(Queue& known) noexcept {
  const std::size_t place = state.queue_count.load();
  if (place == kQueues) return;
  int devices = 0;
  auto* const count = driver::table().cuDeviceGetCount;
  state.one_device = count != nullptr && count(&devices) == CUDA_SUCCESS && devices == 1;
  state.queues[place].store(&known, std::memory_order_release);
  state.queue_count.store(place + 1, std::memory_order_release);
  if (state.off.load()) known.fail();
}

void Offload::forget_queues() noexcept { state.queue_count.store(0); }

void* Offload::guarded(const EntryPoint* point, bool per_thread, void* target) noexcept {
  if (target == nullptr) return nullptr;
  const auto is_guarded = [](const EntryPoint& known) {
    return known.treatment == Treatment::kDrain ||
           (driver::barrier().armed() &&
            (known.meaning == Meaning::kNamesMemory || known.meaning == Meaning::kPinsMemory));
  };
  if (point != nullptr && !is_guarded(*point)) return target;
  const Guard wanted{target, point, per_thread};
  {
    const std::scoped_lock lock(state.guard_lock);
    for (std::size_t i = 0; i < state.guard_count; ++i) {
      if (state.guards[i] == wanted) return const_cast<char*>(cudasched_guards) + i * kGuardBytes;
    }
    if (state.guard_count < kGuards) {
      const std::size_t index = state.guard_count++;
      state.guards[index] = wanted;
      return const_cast<char*>(cudasched_guards) + index * kGuardBytes;
    }
  }
  // No driver has that many. A call that nothing stands before must find nothing queued, now and later.
  stop_deferring("nothing is deferred any more: the driver has more functions than there are guards for (1,024)");
  return target;
}

bool Offload::push(const queue::Call& call, CUresult& status) noexcept {
  if (state.queue_count.load(std::memory_order_acquire) == 0) return false;
  driver::barrier().settle();
  const Caller& caller = call.site.caller;
  if (call.always_direct) {
    if (!all_empty()) drain_everything(caller, For::kLaunch);
    return false;
  }
  bool direct = false;
  status = defer_or(
      call.site, call.stream, nullptr,
      [&](Queue& known, const Caller&) { return call.is_graph ? known.push_graph(call) : known.push_kernel(call); },
      [&] {
        direct = true;
        return CUDA_SUCCESS;
      },
      For::kLaunch);
  // A graph's event nodes may wait for queued operations, or record events that are in use there.
  if (direct && call.is_graph && !all_empty() && !is_plain(call.graph())) drain_everything(caller, For::kOther);
  return !direct;
}

void Offload::drain_launches_of(const queue::Call& call) noexcept {
  if (all_empty()) return;
  drain(call.site.caller, queue::Scope::kGraph, kAllDevices, nullptr, nullptr, nullptr, For::kLaunch, nullptr,
        call.graph());
}

bool Offload::is_complete(CUstream stream) noexcept {
  bool queued = false;
  for_each_queue([&](Queue& known) {
    queued = queued || (!known.empty() && concerns(known, devices_of(stream)) &&
                        known.before(queue::Scope::kStream, stream) != 0);
  });
  return !queued && driver::table().cuStreamQuery.legacy(stream) == CUDA_SUCCESS;
}

CUresult Offload::new_event(CUevent& event) noexcept { return event_create(&event, CU_EVENT_DISABLE_TIMING); }
CUresult Offload::record(CUevent event, CUstream stream) noexcept { return event_record<false>(event, stream); }
CUresult Offload::wait(CUstream stream, CUevent event) noexcept { return stream_wait_event<false>(stream, event, 0); }

bool Offload::has_queued(CUgraphExec exec) noexcept {
  if (state.queue_count.load(std::memory_order_acquire) == 0 || all_empty()) return false;
  bool several = false;
  return !is_plain(exec) || holder_of(queue::Scope::kGraph, nullptr, exec, several) != nullptr;
}

void Offload::drain_changed(CUgraphExec exec) noexcept {
  const Caller caller = this_caller();
  if (!is_plain(exec)) return drain_everything(caller, For::kOther);
  drain(caller, queue::Scope::kGraph, kAllDevices, nullptr, nullptr, nullptr, For::kOther, nullptr, exec);
}

Queue* Offload::queue_of(CUgraphExec exec) noexcept {
  bool several = false;
  Queue* const found = holder_of(queue::Scope::kGraph, nullptr, exec, several);
  return several ? nullptr : found;
}

Caller Offload::this_caller() noexcept { return state.engine.find_site(nullptr, nullptr).caller; }

bool Offload::submit_everything() noexcept {
  if (state.queue_count.load(std::memory_order_acquire) == 0 || all_empty()) return false;
  drain_everything(state.engine.find_site(nullptr, nullptr).caller, For::kOther);
  return true;
}

std::span<const TakenOver> offload_functions() noexcept {
  static const std::array points{
      TakenOver{"cuMemcpyAsync", address(&copy_any<false>), address(&copy_any<true>)},
      TakenOver{"cuMemcpyHtoDAsync_v2", address(&copy_to_device<false>), address(&copy_to_device<true>)},
      TakenOver{"cuMemcpyDtoHAsync_v2", address(&copy_to_host<false>), address(&copy_to_host<true>)},
      TakenOver{"cuMemcpyDtoDAsync_v2", address(&copy_on_device<false>), address(&copy_on_device<true>)},
      TakenOver{"cuMemsetD8Async", address(&fill_flat<false, unsigned char>), address(&fill_flat<true, unsigned char>)},
      TakenOver{"cuMemsetD16Async", address(&fill_flat<false, unsigned short>),
                address(&fill_flat<true, unsigned short>)},
      TakenOver{"cuMemsetD32Async", address(&fill_flat<false, unsigned>), address(&fill_flat<true, unsigned>)},
      TakenOver{"cuMemsetD2D8Async", address(&fill_rows<false, unsigned char>),
                address(&fill_rows<true, unsigned char>)},
      TakenOver{"cuMemsetD2D16Async", address(&fill_rows<false, unsigned short>),
                address(&fill_rows<true, unsigned short>)},
      TakenOver{"cuMemsetD2D32Async", address(&fill_rows<false, unsigned>), address(&fill_rows<true, unsigned>)},
      TakenOver{"cuEventRecord", address(&event_record<false>), address(&event_record<true>)},
      TakenOver{"cuEventRecordWithFlags", address(&event_record_with_flags<false>),
                address(&event_record_with_flags<true>)},
      TakenOver{"cuStreamWaitEvent", address(&stream_wait_event<false>), address(&stream_wait_event<true>)},
      TakenOver{"cuLaunchHostFunc", address(&launch_host_function<false>), address(&launch_host_function<true>)},
      TakenOver{"cuMemFreeAsync", address(&free_async<false>), address(&free_async<true>)},
      TakenOver{"cuEventDestroy_v2", address(&event_destroy)},
      TakenOver{"cuEventDestroy", address(&event_destroy)},
      TakenOver{"cuEventCreate", address(&event_create)},
      TakenOver{"cuIpcOpenEventHandle", address(&open_event)},
  };
  return points;
}

}  // namespace cudasched::hook

extern "C" void* cudasched_guard_target(std::uint32_t index, const std::uint64_t* registers,
                                        const std::uint64_t* stack) {
  const int saved_errno = errno;
  void* const target = cudasched::hook::go(cudasched::hook::state.guards[index], {registers, stack});
  errno = saved_errno;
  return target;
}
