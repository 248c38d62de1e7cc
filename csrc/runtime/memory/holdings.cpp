#include "runtime/memory/holdings.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>

namespace cudasched::runtime {

template <typename Change>
void Holdings::record(Change&& change) noexcept {
  const SpinGuard guard(lock_);
  if (!guard.owns() || records_ == nullptr) return;
  try {
    change(*records_);
  } catch (const std::exception&) {
  }
}

void Holdings::is_there(const Held& held) noexcept {
  Totals& of = totals(held.device);
  of.by_class[static_cast<std::size_t>(held.client_class)].fetch_add(held.bytes, std::memory_order_relaxed);
  const std::uint64_t now = of.there.fetch_add(held.bytes, std::memory_order_relaxed) + held.bytes;
  std::uint64_t peak = of.peak.load(std::memory_order_relaxed);
  while (peak < now && !of.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

bool Holdings::reserve(int device, std::uint64_t bytes, std::uint64_t room) noexcept {
  if (!known(device)) return true;
  const std::uint64_t most = limit();
  Totals& of = totals(device);
  std::uint64_t now = of.all.load(std::memory_order_relaxed);
  do {
    if (most != 0 && (bytes > most || now > most - bytes || bytes > room)) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
  } while (!of.all.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  return true;
}

void Holdings::give_up(int device, std::uint64_t bytes) noexcept {
  if (known(device)) totals(device).all.fetch_sub(bytes, std::memory_order_relaxed);
}

void Holdings::is_gone(const Held& held) noexcept {
  if (!known(held.device)) return;
  Totals& of = totals(held.device);
  of.by_class[static_cast<std::size_t>(held.client_class)].fetch_sub(held.bytes, std::memory_order_relaxed);
  of.there.fetch_sub(held.bytes, std::memory_order_relaxed);
  give_up(held.device, held.bytes);
}

void Holdings::hold(std::uint64_t address, const Held& held) noexcept {
  if (!known(held.device)) return;
  is_there(held);
  put_back(address, held);
}

void Holdings::put_back(std::uint64_t address, const Held& held) noexcept {
  record([&](Records& records) { records.by_address[address] = held; });
}

Holdings::Held Holdings::forget(std::uint64_t address) noexcept {
  Held found;
  record([&](Records& records) {
    const auto place = records.by_address.find(address);
    if (place == records.by_address.end()) return;
    found = place->second;
    records.by_address.erase(place);
  });
  return found;
}

void Holdings::hold_physical(std::uint64_t handle, const Held& held) noexcept {
  if (!known(held.device)) return;
  is_there(held);
  record([&](Records& records) { records.physical[handle] = {held}; });
}

void Holdings::retain_physical(std::uint64_t handle) noexcept {
  record([&](Records& records) {
    const auto place = records.physical.find(handle);
    if (place != records.physical.end()) ++place->second.references;
  });
}

void Holdings::map_physical(std::uint64_t address, std::uint64_t bytes, std::uint64_t handle) noexcept {
  record([&](Records& records) {
    const auto place = records.physical.find(handle);
    if (place == records.physical.end()) return;  // another process's, which holds it
    records.mappings[address] = {bytes, handle};
    ++place->second.mappings;
  });
}

Holdings::Released Holdings::release_physical(std::uint64_t handle) noexcept {
  Released released{handle, {}, false};
  record([&](Records& records) {
    const auto place = records.physical.find(handle);
    if (place == records.physical.end() || place->second.references == 0) return;
    Physical& physical = place->second;
    released.held = physical.held;
    released.last = --physical.references == 0 && physical.mappings == 0;
    if (released.last) records.physical.erase(place);
  });
  return released;
}

void Holdings::put_back(const Released& released) noexcept {
  if (released.held.device < 0) return;
  record([&](Records& records) {
    if (released.last) {
      records.physical[released.handle] = {released.held};
    } else if (const auto place = records.physical.find(released.handle); place != records.physical.end()) {
      ++place->second.references;
    }
  });
}

void Holdings::is_gone(const Released& released) noexcept {
  if (released.last) is_gone(released.held);
}

Holdings::Unmapped Holdings::unmap_physical(std::uint64_t address, std::uint64_t bytes) noexcept {
  Unmapped unmapped;
  record([&](Records& records) {
    for (auto at = records.mappings.lower_bound(address);
         at != records.mappings.end() && at->first - address < bytes;) {
      unmapped.insert(records.mappings.extract(at++));
    }
  });
  return unmapped;
}

void Holdings::put_back(const Unmapped& unmapped) noexcept {
  record([&](Records& records) { records.mappings.insert(unmapped.begin(), unmapped.end()); });
}

int Holdings::is_gone(const Unmapped& unmapped) noexcept {
  int device = -1;
  record([&](Records& records) {
    for (const auto& [address, mapping] : unmapped) {
      const auto place = records.physical.find(mapping.handle);
      if (place == records.physical.end()) continue;
      const Held held = place->second.held;
      device = held.device;
      if (--place->second.mappings > 0 || place->second.references > 0) continue;
      records.physical.erase(place);
      is_gone(held);
    }
  });
  return device;
}

void Holdings::hold_pool(std::uint64_t pool, int device, Class client_class, std::uint64_t bytes) noexcept {
  if (!known(device) && device != kOnHost) return;
  record([&](Records& records) {
    auto place = std::ranges::find(records.pools, pool, &Pool::pool);
    if (place == records.pools.end()) {
      records.pools.push_back({pool, device, client_class, 0});
      place = records.pools.end() - 1;
    }
    if (place->device == kOnHost) return;
    if (bytes >= place->bytes) {
      totals(place->device).all.fetch_add(bytes - place->bytes, std::memory_order_relaxed);
      is_there({bytes - place->bytes, place->device, place->client_class});
    } else {
      is_gone({place->bytes - bytes, place->device, place->client_class});
    }
    place->bytes = bytes;
  });
}

void Holdings::forget_pool(std::uint64_t pool) noexcept {
  record([&](Records& records) {
    const auto place = std::ranges::find(records.pools, pool, &Pool::pool);
    if (place == records.pools.end()) return;
    is_gone({place->bytes, place->device, place->client_class});
    records.pools.erase(place);
  });
}

int Holdings::device_of_pool(std::uint64_t pool) const noexcept {
  const SpinGuard guard(lock_);
  if (!guard.owns() || records_ == nullptr) return -1;
  const auto place = std::ranges::find(records_->pools, pool, &Pool::pool);
  return place == records_->pools.end() ? -1 : place->device;
}

void Holdings::list_pools(int device, std::vector<Pool>& pools) const {
  const SpinGuard guard(lock_);
  if (!guard.owns() || records_ == nullptr) return;
  std::ranges::copy_if(records_->pools, std::back_inserter(pools),
                       [&](const Pool& each) { return each.device == device; });
}

void Holdings::context_ended(int device, const void* context) noexcept {
  record([&](Records& records) {
    std::erase_if(records.by_address, [&](const auto& entry) {
      const Held& held = entry.second;
      if (held.context == nullptr || (context != nullptr ? held.context != context : held.device != device)) {
        return false;
      }
      is_gone(held);
      return true;
    });
  });
}

std::uint64_t Holdings::held(int device) const noexcept {
  return known(device) ? totals(device).all.load(std::memory_order_relaxed) : 0;
}

std::uint64_t Holdings::there(int device) const noexcept {
  return known(device) ? totals(device).there.load(std::memory_order_relaxed) : 0;
}

std::uint64_t Holdings::there(int device, Class client_class) const noexcept {
  if (!known(device)) return 0;
  return totals(device).by_class[static_cast<std::size_t>(client_class)].load(std::memory_order_relaxed);
}

std::uint64_t Holdings::peak(int device) const noexcept {
  return known(device) ? totals(device).peak.load(std::memory_order_relaxed) : 0;
}

std::uint64_t Holdings::most_held() const noexcept {
  std::uint64_t most = 0;
  for (int device = 0; device < kDevices; ++device) most = std::max(most, held(device));
  return most;
}

void Holdings::reset_in_child() noexcept {
  new (&lock_) SpinLock;  // the parent's thread may hold it
  records_ = new (std::nothrow) Records;
  for (Totals& of : totals_) {
    of.all.store(0);
    of.there.store(0);
    of.peak.store(0);
    for (auto& each : of.by_class) each.store(0);
  }
  refused_.store(0);
}

}  // namespace cudasched::runtime
