#include "queue/router.hpp"

#include "base/log.hpp"
#include "driver/driver.hpp"
#include "driver/registry.hpp"

namespace cudasched::queue {

void Router::add(Queue& queue) noexcept {
  const std::size_t place = count();
  if (place == kQueues) return;
  int devices = 0;
  auto* const get_count = driver::table().cuDeviceGetCount;
  one_device_ = get_count != nullptr && get_count(&devices) == CUDA_SUCCESS && devices == 1;
  queues_[place].store(&queue, std::memory_order_release);
  count_.store(place + 1, std::memory_order_release);
  if (off_.load()) queue.fail();
}

bool Router::empty() const noexcept {
  bool empty = true;
  for_each([&](const Queue& queue) { empty = empty && queue.empty(); });
  return empty;
}

Devices Router::devices_of(CUstream stream) const noexcept {
  if (one_device_) return kAllDevices;
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
    return bit_of(driver::current_device());
  }
  driver::StreamFacts facts;
  return driver::registry().look_up(stream, facts) ? bit_of(facts.device) : kAllDevices;
}

Devices Router::devices_of(CUdeviceptr address) const noexcept {
  if (one_device_) return kAllDevices;
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

Position Router::position_in(Queue& queue, const Dependency& dependency) noexcept {
  Scope scope = dependency.scope;
  if ((bit_of(queue.device()) & dependency.devices) == 0) {
    if (scope == Scope::kStream || scope == Scope::kEnd) return 0;
    if (scope == Scope::kStreamAndEvent) scope = Scope::kEvent;
  }
  return queue.before(scope, dependency.stream, dependency.event, dependency.other, dependency.exec);
}

void Router::drain(const Caller& caller, const Dependency& dependency, Waiter::For what,
                   const Queue* except) const noexcept {
  for_each([&](Queue& queue) {
    if (&queue == except) return;
    if (const Position position = position_in(queue, dependency)) queue.drain(caller, position, what);
  });
}

Router::Holders Router::holders_of(const Dependency& dependency) const noexcept {
  Holders found;
  for_each([&](Queue& queue) {
    if (position_in(queue, dependency) == 0) return;
    found = {&queue, found.queue != nullptr};
  });
  return found;
}

Dependency Router::on_graph(CUgraphExec exec) noexcept {
  return {.scope = driver::registry().is_plain(exec) ? Scope::kGraph : Scope::kEnd, .exec = exec};
}

Queue* Router::queue_of(CUgraphExec exec) const noexcept {
  const Holders holders = holders_of({.scope = Scope::kGraph, .exec = exec});
  return holders.several ? nullptr : holders.queue;
}

void Router::stop_deferring(std::string_view message) noexcept {
  if (off_.exchange(true)) return;
  for_each([](Queue& queue) { queue.fail(); });
  drain({}, {}, Waiter::For::kOther);
  log::warning(message);
}

}  // namespace cudasched::queue
