#include "hook/guards.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <mutex>

#include "base/spin_lock.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "hook/deferred.hpp"
#include "hook/engine_calls.hpp"
#include "hook/taken_over.hpp"
#include "queue/router.hpp"

extern "C" {
// In guards.S.
extern const char cudasched_guards[] __attribute__((visibility("hidden")));
void* cudasched_guard_target(std::uint32_t index, const std::uint64_t* registers, const std::uint64_t* stack)
    __attribute__((visibility("hidden")));
}

namespace cudasched::hook {
namespace {

using queue::bit_of;
using queue::Caller;
using queue::Devices;
using queue::Queue;
using queue::router;
using For = queue::Waiter::For;

constexpr std::size_t kGuards = 1024;
constexpr std::ptrdiff_t kGuardBytes = 16;

struct Guard {
  void* target = nullptr;
  const EntryPoint* point = nullptr;  // null: a version that the table does not know
  bool per_thread = false;

  bool operator==(const Guard&) const = default;
};

constinit SpinLock adding;
constinit std::array<Guard, kGuards> guards{};
std::size_t guard_count = 0;

CUresult not_ready() noexcept { return CUDA_ERROR_NOT_READY; }
CUresult deinitialized() noexcept { return CUDA_ERROR_DEINITIALIZED; }

CUresult hand_over_error() noexcept {
  const unsigned thread = this_caller().thread;
  CUresult found = CUDA_SUCCESS;
  router().for_each([&](Queue& known) {
    if (found == CUDA_SUCCESS) found = known.take_error(thread);
  });
  return found;
}

bool has_error(const Caller& caller) noexcept {
  bool found = false;
  router().for_each([&](Queue& known) { found = found || known.has_error(caller.thread); });
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
      return router().for_each([&](Queue& known) { known.stream_destroyed(stream); });
    }
    case Meaning::kShareEvent:
      return registry.shared(passed.handle<CUevent>(at.event));
    case Meaning::kDestroyContext:
      return router().for_each([](Queue& known) { known.context_gone(); });
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
  if (router().one_device()) return queue::kAllDevices;
  const auto of_memory = [&] { return router().devices_of(CUdeviceptr{passed.word(point.arguments.memory)}); };
  switch (point.scope) {
    case Scope::kStream:
    case Scope::kStreamAndEvent:
      return router().devices_of(stream);
    case Scope::kContext:
      return bit_of(driver::current_device());
    case Scope::kMemory:
      return of_memory();
    case Scope::kContextAndMemory:
      return bit_of(driver::current_device()) | of_memory();
    case Scope::kPeers:
      return bit_of(driver::current_device()) |
             bit_of(driver::device_of(passed.handle<CUcontext>(point.arguments.context))) |
             bit_of(driver::device_of(passed.handle<CUcontext>(point.arguments.other)));
    default:
      return queue::kAllDevices;
  }
}

// The answer to a query of queued work; null: the driver's.
void* answer(const EntryPoint& point, const Caller& caller, CUstream stream, CUevent event) noexcept {
  bool queued = false;
  router().for_each([&](Queue& known) {
    queued = queued ||
             (point.meaning == Meaning::kQueryEvent ? known.event_not_ready(caller, event)
                                                    : (bit_of(known.device()) & router().devices_of(stream)) != 0 &&
                                                          known.stream_not_ready(caller, stream));
  });
  return queued ? address(&not_ready) : nullptr;
}

// Of a call about these, while a device has a queue; null: the driver's function.
void* drain_for(const EntryPoint& point, CUstream stream, const Passed& passed) noexcept {
  const bool synchronises = point.meaning == Meaning::kSynchronise;
  const bool empty = router().empty();
  if (empty && !synchronises) return nullptr;
  const auto event = passed.handle<CUevent>(point.arguments.event);
  const Caller caller = find_site(stream, event).caller;
  if (point.meaning == Meaning::kQueryStream || point.meaning == Meaning::kQueryEvent) {
    return answer(point, caller, stream, event);
  }
  if (!empty) {
    const auto exec = passed.handle<CUgraphExec>(point.arguments.exec);
    const bool of_graph = point.scope == Scope::kExec && driver::registry().is_plain(exec);
    router().drain(caller,
                   {of_graph ? queue::Scope::kGraph : drained(point.scope), devices_of(point, stream, passed), stream,
                    event, passed.handle<CUevent>(point.arguments.other), exec},
                   synchronises ? For::kSynchronise : For::kOther);
  }
  return synchronises && has_error(caller) ? address(&hand_over_error) : nullptr;
}

void* drained_target(const Guard& guard, const Passed& passed) noexcept {
  if (guard.point == nullptr) {
    capture_may_begin();
    submit_everything();
    return guard.target;
  }
  const EntryPoint& point = *guard.point;
  if (point.meaning == Meaning::kBeginCapture && !point.taken_over) capture_may_begin();
  if (router().count() != 0) {
    if (is_set_already(point, passed)) return guard.target;
    if (point.scope == Scope::kGraph && !driver::registry().graphs_hold_memory()) return guard.target;
    CUstream stream = nullptr;  // null for calls that have none
    if (point.scope == Scope::kStream) {
      const auto given = passed.handle<CUstream>(point.arguments.stream);
      stream = guard.per_thread ? driver::meant_stream<true>(given) : driver::meant_stream<false>(given);
    }
    if (void* const ours = drain_for(point, stream, passed)) return ours;
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

void* guarded(const EntryPoint* point, bool per_thread, void* target) noexcept {
  if (target == nullptr) return nullptr;
  const auto is_guarded = [](const EntryPoint& known) {
    return known.treatment == Treatment::kDrain ||
           (driver::barrier().armed() &&
            (known.meaning == Meaning::kNamesMemory || known.meaning == Meaning::kPinsMemory));
  };
  if (point != nullptr && !is_guarded(*point)) return target;
  const Guard wanted{target, point, per_thread};
  {
    const std::scoped_lock lock(adding);
    auto* const end = guards.begin() + guard_count;
    auto* const place = std::find(guards.begin(), end, wanted);
    if (place == end && guard_count < kGuards) guards[guard_count++] = wanted;
    if (place != guards.end()) return const_cast<char*>(cudasched_guards) + (place - guards.begin()) * kGuardBytes;
  }
  // No driver has that many. A call that nothing stands before must find nothing queued, now and later.
  router().stop_deferring(
      "nothing is deferred any more: the driver has more functions than there are guards for (1,024)");
  return target;
}

}  // namespace cudasched::hook

extern "C" void* cudasched_guard_target(std::uint32_t index, const std::uint64_t* registers,
                                        const std::uint64_t* stack) {
  const int saved_errno = errno;
  void* const target = cudasched::hook::go(cudasched::hook::guards[index], {registers, stack});
  errno = saved_errno;
  return target;
}
