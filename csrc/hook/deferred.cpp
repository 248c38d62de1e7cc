#include "hook/deferred.hpp"

#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/registry.hpp"
#include "hook/engine_calls.hpp"

namespace cudasched::hook {
namespace {

using driver::meant_stream;
using queue::Caller;
using queue::Operation;
using queue::Queue;
using queue::router;
using queue::Scope;
using queue::Site;
using For = queue::Waiter::For;

// The operations before a call on a stream that is about an event, or none (null).
queue::Dependency before(CUstream stream, CUevent event) noexcept {
  return {.scope = event != nullptr ? Scope::kStreamAndEvent : Scope::kStream,
          .devices = router().devices_of(stream),
          .stream = stream,
          .event = event};
}

// A deferred call must not overtake other devices' queued operations on its stream or event.
void drain_others(const Site& site, CUstream stream, CUevent event) noexcept {
  if (router().count() > 1) router().drain(site.caller, before(stream, event), For::kOther, site.queue);
}

// push(queue, caller) defers or says false; then everything that the call depends on is drained and direct() called.
// `what`: kSynchronise for calls that wait for the device themselves, kLaunch for those that the gate may hold anyway.
template <typename Push, typename Direct>
CUresult defer_or(const Site& site, CUstream stream, CUevent event, Push&& push, Direct&& direct,
                  const For& what) noexcept {
  // The call becomes a node, which is ordered to no queued operation but those on an event that it records or waits
  // for.
  if (site.captured) {
    if (event != nullptr) router().drain(site.caller, {.scope = Scope::kEvent, .event = event}, what);
    return direct();
  }
  if (site.queue != nullptr) {
    if (const CUresult error = site.queue->take_error(site.caller.thread)) return error;
    drain_others(site, stream, event);
    if (push(*site.queue, site.caller)) return CUDA_SUCCESS;
  }
  router().drain(site.caller, before(stream, event), what);
  return direct();
}

template <typename Direct>
CUresult defer_or(const Operation& call, CUevent event, Direct&& direct) noexcept {
  if (router().count() == 0) return direct();
  const auto push = [&](Queue& known, const Caller& caller) { return known.push_call(caller, call); };
  return defer_or(find_site(call.stream, nullptr), call.stream, event, push, direct, For::kOther);
}

// The driver reads and writes pageable memory before such a call returns.
bool is_pageable(CUdeviceptr address) noexcept { return driver::memory_type(address) == 0; }

CUresult copy(const Operation::Copy& what, CUstream stream) noexcept {
  const Operation operation(Operation::Kind::kCopy, stream, what);
  if (router().count() == 0) return operation.execute();
  For wait = For::kOther;
  return defer_or(
      find_site(stream, nullptr), stream, nullptr,
      [&](Queue& known, const Caller& caller) {
        if (!known.active()) return false;
        const auto direction = what.direction;
        const bool any = direction == Operation::Direction::kAny;
        if (((any || direction == Operation::Direction::kToDevice) && is_pageable(what.from)) ||
            ((any || direction == Operation::Direction::kToHost) && is_pageable(what.to))) {
          wait = For::kSynchronise;  // the call returns when the device is done with that memory
          return false;
        }
        return known.push_call(caller, operation);
      },
      [&] { return operation.execute(); }, wait);
}

CUresult fill(const Operation::Fill& what, bool rows, CUstream stream) noexcept {
  const Operation operation(rows ? Operation::Kind::kFillRows : Operation::Kind::kFill, stream, what);
  return defer_or(operation, nullptr, [&] { return operation.execute(); });
}

template <bool kPerThread>
CUresult copy_any(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, from, bytes, Operation::Direction::kAny}, meant_stream<kPerThread>(stream));
}
template <bool kPerThread>
CUresult copy_to_device(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, reinterpret_cast<CUdeviceptr>(from), bytes, Operation::Direction::kToDevice},
              meant_stream<kPerThread>(stream));
}
template <bool kPerThread>
CUresult copy_to_host(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({reinterpret_cast<CUdeviceptr>(to), from, bytes, Operation::Direction::kToHost},
              meant_stream<kPerThread>(stream));
}
template <bool kPerThread>
CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) noexcept {
  return copy({to, from, bytes, Operation::Direction::kOnDevice}, meant_stream<kPerThread>(stream));
}

template <bool kPerThread, typename Element>
CUresult fill_flat(CUdeviceptr to, Element value, std::size_t count, CUstream stream) noexcept {
  return fill({to, 0, count, 1, value, sizeof(Element)}, false, meant_stream<kPerThread>(stream));
}
template <bool kPerThread, typename Element>
CUresult fill_rows(CUdeviceptr to, std::size_t pitch, Element value, std::size_t width, std::size_t height,
                   CUstream stream) noexcept {
  return fill({to, pitch, width, height, value, sizeof(Element)}, true, meant_stream<kPerThread>(stream));
}

template <bool kPerThread>
CUresult event_record(CUevent event, CUstream stream) noexcept {
  return record_event(event, meant_stream<kPerThread>(stream), CU_EVENT_RECORD_DEFAULT);
}
template <bool kPerThread>
CUresult event_record_with_flags(CUevent event, CUstream stream, unsigned flags) noexcept {
  return record_event(event, meant_stream<kPerThread>(stream), flags);
}

template <bool kPerThread>
CUresult stream_wait_event(CUstream stream, CUevent event, unsigned flags) noexcept {
  return wait_for_event(meant_stream<kPerThread>(stream), event, flags);
}

template <bool kPerThread>
CUresult launch_host_function(CUstream stream, CUhostFn function, void* data) noexcept {
  const CUstream on = meant_stream<kPerThread>(stream);
  return defer_or({Operation::Kind::kHostFunction, on, Operation::Host{function, data}}, nullptr,
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
  if (router().count() != 0) {
    const Site site = find_site(on, nullptr);
    if (site.queue != nullptr && site.queue->active() && may_free(address)) {
      drain_others(site, on, nullptr);
      if (site.queue->push_call(site.caller, {Operation::Kind::kFreeMemory, on, Operation::Memory{address}}))
        return CUDA_SUCCESS;
    }
    router().drain(site.caller, before(on, nullptr), For::kOther);
  }
  return driver::table().cuMemFreeAsync.legacy(address, on);
}

template <bool kPerThread>
CUresult free_async(CUdeviceptr address, CUstream stream) noexcept {
  return free_counted(address, meant_stream<kPerThread>(stream), &free_on);
}

// ---- events seen by other processes, and destroyed

CUresult open_event(CUevent* event, CUipcEventHandle handle) noexcept {
  const CUresult status = driver::table().cuIpcOpenEventHandle(event, handle);
  if (status == CUDA_SUCCESS) driver::registry().opened(*event);
  return status;
}

// The driver would return success for a known event, so the event is destroyed behind its queued operations. Until then
// the driver cannot give its handle to another one.
CUresult event_destroy(CUevent event) noexcept {
  driver::EventFacts facts;
  const bool known = driver::registry().forget(event, &facts);
  const queue::Dependency on_event{.scope = Scope::kEvent, .event = event};
  if (const queue::Router::Holders holders = router().holders_of(on_event); holders.queue != nullptr) {
    const Caller caller = find_site(nullptr, event).caller;
    if (known && !holders.several && !facts.shared && !facts.captured && facts.context != nullptr &&
        holders.queue->push_destroy(caller, event, facts.context)) {
      return CUDA_SUCCESS;
    }
    router().drain(caller, on_event, For::kOther);
  }
  router().for_each([&](Queue& each) { each.event_destroyed(event); });
  return driver::table().cuEventDestroy(event);
}

}  // namespace

bool defer_or_drain(const queue::Call& call, CUresult& status) noexcept {
  driver::barrier().settle();
  const Caller& caller = call.site.caller;
  if (call.always_direct) {
    router().drain(caller, {}, For::kLaunch);
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
  if (direct && call.is_graph && !router().empty() && !driver::registry().is_plain(call.graph())) {
    router().drain(caller, {}, For::kOther);
  }
  return !direct;
}

CUresult create_event(CUevent* event, unsigned flags) noexcept {
  const CUresult status = driver::table().cuEventCreate(event, flags);
  if (status == CUDA_SUCCESS) driver::registry().created(*event, flags);
  return status;
}

CUresult record_event(CUevent event, CUstream stream, unsigned flags) noexcept {
  note_record(event, stream);
  return defer_or({Operation::Kind::kRecord, stream, Operation::Event{event, flags}}, event, [&] {
    const CUresult status = flags == CU_EVENT_RECORD_DEFAULT
                                ? driver::table().cuEventRecord(event, stream)
                                : driver::table().cuEventRecordWithFlags(event, stream, flags);
    if (status == CUDA_SUCCESS) driver::registry().recorded(event, driver::is_capturing(stream));
    return status;
  });
}

CUresult wait_for_event(CUstream stream, CUevent event, unsigned flags) noexcept {
  note_wait(event, stream);
  return defer_or({Operation::Kind::kWait, stream, Operation::Event{event, flags}}, event,
                  [&] { return driver::table().cuStreamWaitEvent(stream, event, flags); });
}

bool submit_everything() noexcept {
  if (router().empty()) return false;
  router().drain(this_caller(), {}, For::kOther);
  return true;
}

std::span<const TakenOver> deferred_functions() noexcept {
  static const TakenOver points[] = {
      {"cuMemcpyAsync", &copy_any<false>, &copy_any<true>},
      {"cuMemcpyHtoDAsync_v2", &copy_to_device<false>, &copy_to_device<true>},
      {"cuMemcpyDtoHAsync_v2", &copy_to_host<false>, &copy_to_host<true>},
      {"cuMemcpyDtoDAsync_v2", &copy_on_device<false>, &copy_on_device<true>},
      {"cuMemsetD8Async", &fill_flat<false, unsigned char>, &fill_flat<true, unsigned char>},
      {"cuMemsetD16Async", &fill_flat<false, unsigned short>, &fill_flat<true, unsigned short>},
      {"cuMemsetD32Async", &fill_flat<false, unsigned>, &fill_flat<true, unsigned>},
      {"cuMemsetD2D8Async", &fill_rows<false, unsigned char>, &fill_rows<true, unsigned char>},
      {"cuMemsetD2D16Async", &fill_rows<false, unsigned short>, &fill_rows<true, unsigned short>},
      {"cuMemsetD2D32Async", &fill_rows<false, unsigned>, &fill_rows<true, unsigned>},
      {"cuEventRecord", &event_record<false>, &event_record<true>},
      {"cuEventRecordWithFlags", &event_record_with_flags<false>, &event_record_with_flags<true>},
      {"cuStreamWaitEvent", &stream_wait_event<false>, &stream_wait_event<true>},
      {"cuLaunchHostFunc", &launch_host_function<false>, &launch_host_function<true>},
      {"cuMemFreeAsync", &free_async<false>, &free_async<true>},
      {"cuEventDestroy_v2", &event_destroy},
      {"cuEventDestroy", &event_destroy},
      {"cuEventCreate", &create_event},
      {"cuIpcOpenEventHandle", &open_event},
  };
  return points;
}

}  // namespace cudasched::hook
