// The PyTorch extension: the trace of PyTorch's CUDA caching allocator, counted into accounts that Python reads. Built
// on the user's machine, against the installed PyTorch (python/cudasched/torch/_extension.py), and called through
// ctypes.
//
// The allocator calls the tracker under its mutex, on the allocating thread. The tracker reads the thread's scope, puts
// a record into a ring and returns; it calls nothing of PyTorch, takes no lock and no GIL. All else holds
// `accounts_lock`: calls of Python, and a thread that empties the ring, so that a program that never asks loses no
// record. The engine's own thread empties the cache, without the GIL (cudasched_use_cache in engine.h).
//
// The child of a fork begins with nothing: another thread of the parent may have held the lock or changed the accounts,
// and the counts are the parent's. PyTorch does not use CUDA in such a child.
#include <c10/cuda/CUDACachingAllocator.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "base/blocked_signals.hpp"
#include "torch/accounts.hpp"
#include "torch/ring.hpp"

namespace {

using cudasched::torch_memory::Action;
using cudasched::torch_memory::Amount;
using cudasched::torch_memory::Device;
using cudasched::torch_memory::Record;
using cudasched::torch_memory::Ring;
using cudasched::torch_memory::Timeline;

constexpr std::size_t kCapacity = std::size_t{1} << 17;
constexpr std::size_t kDevices = 64;
constexpr auto kDrainEvery = std::chrono::milliseconds(50);

struct State {
  Ring<Record> ring{kCapacity};
  std::mutex accounts_lock;
  std::array<Device, kDevices> devices;
};

std::atomic<State*> current_state{nullptr};

// Never destroyed: the allocator keeps the tracker to the end of the process.
State& state() {
  State* found = current_state.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<State>();
  return current_state.compare_exchange_strong(found, made.get()) ? *made.release() : *found;
}

thread_local std::uint8_t thread_class = 0;
thread_local std::uint32_t thread_region = cudasched::torch_memory::kUntold;

// Of the last tick, which a timeline is content with, and which costs a fifth.
std::int64_t now_ns() noexcept {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

template <typename Entry>
void track(const Entry& entry) noexcept {
  Record record{};
  switch (entry.action_) {
    case Entry::ALLOC:
      record.action = Action::kAllocate;
      break;
    case Entry::FREE_COMPLETED:
      record.action = Action::kFree;
      break;
    case Entry::SEGMENT_ALLOC:
    case Entry::SEGMENT_MAP:
      record.action = Action::kReserve;
      break;
    case Entry::SEGMENT_FREE:
    case Entry::SEGMENT_UNMAP:
      record.action = Action::kRelease;
      break;
    case Entry::SNAPSHOT:
      record.action = Action::kSnapshot;
      break;
    default:
      return;
  }
  record.device = static_cast<std::int8_t>(entry.device_);
  record.client_class = thread_class;
  record.region = thread_region;
  record.address = static_cast<std::uint64_t>(entry.addr_);
  record.bytes = entry.size_;
  record.stream = reinterpret_cast<std::uint64_t>(entry.stream_);
  record.time_ns = now_ns();
  state().ring.push(record);
}

// The caller holds the lock.
void drain(State& mine) {
  for (Record record{}; mine.ring.pop(record);) {
    if (record.device >= 0 && static_cast<std::size_t>(record.device) < kDevices) {
      mine.devices[static_cast<std::size_t>(record.device)].apply(record);
    }
  }
}

}  // namespace

// The functions for Python and the engine; the library is compiled with all else hidden.
#pragma GCC visibility push(default)
extern "C" {

struct cudasched_torch_amount {
  std::uint64_t key, bytes, peak;
};

struct cudasched_torch_totals {
  std::uint64_t requested, requested_peak, reserved, reserved_peak, lost, unknown_frees;
  std::uint64_t class_bytes[3], class_peaks[3];
};

// Once a process. `begin_with` adds the allocator's present blocks, between this and the first read, from a snapshot
// taken after this.
void cudasched_torch_attach() {
  state();
  pthread_atfork(nullptr, nullptr, [] { current_state.store(nullptr); });  // the parent's is left unchanged
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) { track(entry); });
}

void cudasched_torch_begin_with(int device, std::uint64_t address, std::uint64_t bytes, std::uint64_t stream) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  mine.devices.at(static_cast<std::size_t>(device)).begin_with(address, bytes, stream);
}

// The snapshot's blocks are counted. From here on a thread takes the records out of the ring; where none can be made,
// only calls of Python do.
void cudasched_torch_begin() {
  const auto drains = [&mine = state()] {
    while (true) {
      {
        const std::scoped_lock lock(mine.accounts_lock);
        drain(mine);
      }
      std::this_thread::sleep_for(kDrainEvery);
    }
  };
  try {
    const cudasched::BlockedSignals blocked;
    std::thread(drains).detach();
  } catch (const std::exception&) {
  }
}

void cudasched_torch_begin_with_reserved(int device, std::uint64_t bytes) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  mine.devices.at(static_cast<std::size_t>(device)).begin_with_reserved(bytes);
}

void cudasched_torch_name_stream(int device, std::uint64_t stream, int client_class) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  mine.devices.at(static_cast<std::size_t>(device)).name_stream(stream, static_cast<std::uint8_t>(client_class));
}

// Of the calling thread, from here on.
void cudasched_torch_scope(int client_class, std::uint32_t region) {
  thread_class = static_cast<std::uint8_t>(client_class);
  thread_region = region;
}

void cudasched_torch_read(int device, cudasched_torch_totals* totals) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  drain(mine);
  const Device& found = mine.devices.at(static_cast<std::size_t>(device));
  totals->requested = found.requested.bytes;
  totals->requested_peak = found.requested.peak;
  totals->reserved = found.reserved.bytes;
  totals->reserved_peak = found.reserved.peak;
  totals->lost = mine.ring.lost();
  totals->unknown_frees = found.unknown_frees;
  for (std::size_t i = 0; i < Device::kClasses; ++i) {
    totals->class_bytes[i] = found.by_class[i].bytes;
    totals->class_peaks[i] = found.by_class[i].peak;
  }
}

// By stream, or by region. Writes at most `room`; returns how many there are.
int cudasched_torch_read_parts(int device, int by_region, cudasched_torch_amount* out, int room) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  const Device& found = mine.devices.at(static_cast<std::size_t>(device));
  int count = 0;
  const auto write = [&](std::uint64_t key, const Amount& amount) {
    if (count < room) out[count] = {key, amount.bytes, amount.peak};
    ++count;
  };
  if (by_region != 0) {
    for (const auto& [region, amount] : found.by_region) write(region, amount);
  } else {
    for (const auto& [stream, amount] : found.by_stream) write(stream, amount);
  }
  return count;
}

// Of a region, on each device.
void cudasched_torch_limit(std::uint32_t region, std::uint64_t bytes) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  drain(mine);
  for (Device& device : mine.devices) device.limit(region, bytes);
}

// `device`: -1: of all.
std::uint64_t cudasched_torch_over_limit(int device, std::uint32_t region) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  drain(mine);
  std::uint64_t times = 0;
  for (std::size_t i = 0; i < kDevices; ++i) {
    if (device < 0 || static_cast<std::size_t>(device) == i) times += mine.devices[i].over_limit(region);
  }
  return times;
}

struct cudasched_torch_point {
  std::int64_t begin_ns;
  std::uint64_t reserved, by_class[Timeline::kClasses], by_region[Timeline::kRegions];
};

// Writes at most `room` points, the oldest first; returns how many there are.
int cudasched_torch_timeline(int device, cudasched_torch_point* out, int room) {
  State& mine = state();
  const std::scoped_lock lock(mine.accounts_lock);
  drain(mine);
  const auto& points = mine.devices.at(static_cast<std::size_t>(device)).timeline.points();
  for (std::size_t i = 0; i < points.size() && i < static_cast<std::size_t>(room); ++i) {
    out[i].begin_ns = points[i].begin_ns;
    out[i].reserved = points[i].reserved;
    std::copy(points[i].by_class.begin(), points[i].by_class.end(), out[i].by_class);
    std::copy(points[i].by_region.begin(), points[i].by_region.end(), out[i].by_region);
  }
  return static_cast<int>(points.size());
}

// For cudasched_use_cache. A failure gives nothing back; the asking program goes on without.
void cudasched_torch_release_cache(std::int32_t, void*) {
  try {
    c10::cuda::CUDACachingAllocator::emptyCache();
  } catch (const std::exception&) {
  }
}

}  // extern "C"
#pragma GCC visibility pop
