#include "memory/pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>

#include "base/log.hpp"
#include "base/size_text.hpp"
#include "driver/driver.hpp"

namespace cudasched::memory {
namespace {

using driver::check;
using driver::table;

std::atomic<unsigned> forks{0};

unsigned forks_so_far() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

std::string text(Bytes bytes) { return size_text(bytes, /*decimals=*/2); }

// The pool's context is current for a scope; most callers have it current.
struct Here : driver::CurrentContext {
  explicit Here(CUcontext context) : CurrentContext(context) { check("cuCtxPushCurrent", status()); }
};

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

Bytes page_of(int device) {
  const auto& driver = table();
  if (driver.cuMemAddressReserve == nullptr || driver.cuMemAddressFree == nullptr || driver.cuMemMap == nullptr ||
      driver.cuMemUnmap == nullptr || driver.cuMemCreate == nullptr || driver.cuMemRelease == nullptr ||
      driver.cuMemSetAccess == nullptr || driver.cuMemGetAllocationGranularity == nullptr ||
      driver.cuDeviceTotalMem == nullptr || driver.cuStreamGetId == nullptr) {
    throw PoolError("a pool needs an NVIDIA driver of release 525 or later, with virtual memory management");
  }
  check("cuInit", driver.cuInit(0));
  int devices = 0;
  check("cuDeviceGetCount", driver.cuDeviceGetCount(&devices));
  if (device < 0 || device >= devices) {
    throw PoolError("there is no device " + std::to_string(device) + ": this process sees " + std::to_string(devices));
  }
  std::size_t page = 0;
  const CUmemAllocationProp properties = properties_of(device);
  check("cuMemGetAllocationGranularity",
        driver.cuMemGetAllocationGranularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return page;
}

// Addresses for 32 times the device's memory: blocks that stay can then leave no hole too small for another one.
Bytes range_of(int device) {
  std::size_t total = 0;
  check("cuDeviceTotalMem", table().cuDeviceTotalMem(&total, device));
  return std::bit_ceil(Bytes{total}) * 32;
}

}  // namespace

Pool::Pool(const Options& options)
    : options_(options), forks_(forks_so_far()), layout_([&] {
        const Bytes page = page_of(options.device);
        if (options.limit_bytes != 0 && options.limit_bytes < page) {
          throw PoolError("a pool's limit of " + text(options.limit_bytes) + " is less than a page of " + text(page));
        }
        range_ = range_of(options.device);
        return Layout(range_, page, std::max(options.chunk_bytes / page * page, page),
                      options.limit_bytes / page * page);
      }()) {
  check("cuDevicePrimaryCtxRetain", table().cuDevicePrimaryCtxRetain(&context_, options_.device));
  try {
    const Here here(context_);
    check("cuMemAddressReserve", table().cuMemAddressReserve(&base_, range_, 0, 0, 0));
  } catch (...) {
    table().cuDevicePrimaryCtxRelease(options_.device);
    throw;
  }
}

Pool::~Pool() {
  try {
    if (forks_ == forks_so_far()) close();
  } catch (const Error&) {
    // Blocks in use stay mapped, and the driver may be gone at the end of a process.
    try {
      trim();
    } catch (const Error& error) {
      log::debug(error.what());
    }
  }
}

void Pool::refuse_other_process() const {
  if (forks_ != forks.load(std::memory_order_relaxed)) {
    throw PoolError("this pool is of the process that forked this one; CUDA does not work after fork, use spawn");
  }
}

Pool::Lock Pool::lock() {
  Lock held(mutex_);
  if (closed_) throw PoolError("the pool of device " + std::to_string(options_.device) + " is closed");
  return held;
}

// The driver's number of a stream is never given twice, as its handle is. 0 is kIdle: the stream captures.
Stream Pool::number_of(CUstream stream) const {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult status = table().cuStreamIsCapturing(stream, &capture);
  if (status == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE) return kIdle;
  check("cuStreamIsCapturing", status);
  unsigned long long number = 0;
  check("cuStreamGetId", table().cuStreamGetId(stream, &number));
  return Stream{number} + 1;
}

CUdeviceptr Pool::allocate(Bytes bytes, CUstream stream) {
  refuse_other_process();
  if (bytes == 0) throw PoolError("a block of 0 bytes cannot be allocated");
  const Here here(context_);
  return allocate_for(bytes, number_of(stream));
}

CUdeviceptr Pool::allocate_idle(Bytes bytes) {
  const Here here(context_);
  return allocate_for(bytes, kIdle);
}

CUdeviceptr Pool::allocate_for(Bytes bytes, Stream stream) {
  Lock held = lock();
  if (bytes > range_ / 2) throw_out_of_memory(bytes, "the GPU's memory");
  if (const auto at = layout_.allocate(bytes, stream)) return base_ + *at;
  return make_room(held, bytes, stream);
}

CUdeviceptr Pool::make_room(Lock& held, Bytes bytes, Stream stream) {
  const driver::RelaxedCapture relaxed;
  for (;;) {
    poll();
    if (const auto at = layout_.allocate(bytes, stream)) return base_ + *at;
    const Plan plan = layout_.plan(bytes, stream);
    if (plan.refused) throw_out_of_memory(bytes, "the pool's limit");
    if (!plan.wait && carry_out(plan)) return base_ + layout_.allocate_at(plan.begin, bytes);
    if (!layout_.has_pending()) throw_out_of_memory(bytes, "the GPU's memory");
    wait(held);
  }
}

void Pool::throw_out_of_memory(Bytes bytes, const char* whose) {
  const Statistics now = layout_.statistics();
  throw OutOfMemoryError("an allocation of " + text(bytes) + " on device " + std::to_string(options_.device) +
                         " does not fit in " + whose + ": the pool has " + text(now.reserved) + " of the GPU" +
                         (layout_.limit() == 0 ? "" : ", its limit is " + text(layout_.limit())) + "; " +
                         std::to_string(now.blocks) + " blocks hold " + text(now.allocated) +
                         ", the largest free block has " + text(now.largest_free));
}

void Pool::free(CUdeviceptr address, CUstream stream) {
  refuse_other_process();
  const Here here(context_);
  const Stream number = number_of(stream);
  Lock held = lock();
  if (number == kIdle) throw PoolError("a block cannot be freed on a stream that captures a graph: free it afterwards");
  record(stream, number);
  free_from(address, number);
}

void Pool::free_idle(CUdeviceptr address) {
  const Lock held = lock();
  free_from(address, kIdle);
}

void Pool::free_from(CUdeviceptr address, Stream stream) {
  const Layout::Freed freed = address < base_ ? Layout::Freed::kUnknown : layout_.free(address - base_, stream);
  if (freed == Layout::Freed::kDone) return;
  std::array<char, 24> shown{};
  std::snprintf(shown.data(), shown.size(), "0x%llx", static_cast<unsigned long long>(address));
  throw PoolError(std::string(shown.data()) + (freed == Layout::Freed::kTwice
                                                   ? " was freed already"
                                                   : " is no block of this pool, or was freed already"));
}

// ---- the work before a free

void Pool::record(CUstream stream, Stream number) {
  CUevent& event = pending_[number];
  if (event == nullptr && !events_.empty()) {
    event = events_.back();
    events_.pop_back();
  } else if (event == nullptr) {
    const CUresult status = table().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (status != CUDA_SUCCESS) pending_.erase(number);
    check("cuEventCreate", status);
  }
  check("cuEventRecord", table().cuEventRecord(event, stream));
}

void Pool::poll() {
  for (auto each = pending_.begin(); each != pending_.end();) {
    const CUresult status = table().cuEventQuery(each->second);
    if (status == CUDA_ERROR_NOT_READY) {
      ++each;
      continue;
    }
    check("cuEventQuery", status);
    layout_.passed(each->first);
    events_.push_back(each->second);
    each = pending_.erase(each);
  }
}

void Pool::wait(Lock& held) {
  std::vector<CUevent> events;
  events.reserve(pending_.size());
  for (const auto& [stream, event] : pending_) events.push_back(event);
  ++waiting_;
  held.unlock();
  CUresult status = CUDA_SUCCESS;
  for (CUevent const event : events) {
    if (status == CUDA_SUCCESS) status = table().cuEventSynchronize(event);
  }
  held.lock();
  --waiting_;
  check("cuEventSynchronize", status);
}

// ---- chunks

void Pool::release(const std::vector<Chunk>& chunks) {
  for (const Chunk chunk : chunks) {
    check("cuMemRelease", table().cuMemRelease(chunk));
    layout_.released(chunk);
  }
}

// False: the GPU has no room for a new chunk, and has those back that were created before it.
bool Pool::carry_out(const Plan& plan) {
  for (const Span& span : plan.unmap) {
    check("cuMemUnmap", table().cuMemUnmap(base_ + span.at, span.bytes));
    layout_.unmapped(span);
  }
  release(plan.release);
  const CUmemAllocationProp properties = properties_of(options_.device);
  std::vector<Chunk> created;
  for (const Bytes bytes : plan.create) {
    CUmemGenericAllocationHandle chunk = 0;
    const CUresult status = table().cuMemCreate(&chunk, bytes, &properties, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
      release(created);
      return false;
    }
    check("cuMemCreate", status);
    layout_.created(chunk, bytes);
    created.push_back(chunk);
  }
  if (!plan.map.empty()) map(plan);
  return true;
}

// All of the plan's chunks, or none.
void Pool::map(const Plan& plan) {
  const std::vector<Chunk> chunks = layout_.spares(plan.map);
  const char* call = "cuMemMap";
  CUresult status = CUDA_SUCCESS;
  Bytes mapped = 0;
  for (std::size_t i = 0; i < chunks.size() && status == CUDA_SUCCESS; ++i) {
    status = table().cuMemMap(base_ + plan.at + mapped, plan.map[i], 0, chunks[i], 0);
    if (status == CUDA_SUCCESS) mapped += plan.map[i];
  }
  if (status == CUDA_SUCCESS) {
    call = "cuMemSetAccess";
    CUmemAccessDesc access{};
    access.location = properties_of(options_.device).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = table().cuMemSetAccess(base_ + plan.at, mapped, &access, 1);
  }
  if (status != CUDA_SUCCESS && mapped != 0) table().cuMemUnmap(base_ + plan.at, mapped);
  check(call, status);
  layout_.mapped(plan.at, chunks);
}

void Pool::trim_to(Lock& held, Bytes keep) {
  const driver::RelaxedCapture relaxed;
  for (;;) {
    poll();
    const Plan plan = layout_.plan_trim(keep);
    carry_out(plan);
    if (!plan.wait) return;
    wait(held);
  }
}

Bytes Pool::trim(Bytes keep) {
  refuse_other_process();
  const Here here(context_);
  Lock held = lock();
  const Bytes before = layout_.statistics().reserved;
  trim_to(held, keep);
  return before - std::min(before, layout_.statistics().reserved);
}

void Pool::close() {
  refuse_other_process();
  Lock held(mutex_);
  if (closed_) return;
  give_all_back(held);
  check("cuDevicePrimaryCtxRelease", table().cuDevicePrimaryCtxRelease(options_.device));
}

void Pool::give_all_back(Lock& held) {
  const Here here(context_);
  const Statistics now = layout_.statistics();
  if (now.blocks != 0 || waiting_ != 0) {
    throw PoolError("the pool of device " + std::to_string(options_.device) + " cannot be closed: " +
                    (now.blocks == 0 ? "another thread waits for its memory"
                                     : std::to_string(now.blocks) + " blocks hold " + text(now.allocated)));
  }
  closed_ = true;  // for other threads, while this one waits
  try {
    trim_to(held, 0);
    check("cuMemAddressFree", table().cuMemAddressFree(base_, range_));
  } catch (...) {
    closed_ = false;
    throw;
  }
  for (const auto& [stream, event] : pending_) events_.push_back(event);
  for (CUevent const event : events_) table().cuEventDestroy(event);
}

bool Pool::is_closed() {
  const Lock held(mutex_);
  return closed_;
}

Statistics Pool::statistics() {
  refuse_other_process();
  const Lock held = lock();
  return layout_.statistics();
}

std::optional<Statistics> Pool::look() noexcept {
  const Lock held(mutex_, std::try_to_lock);
  if (!held.owns_lock()) return std::nullopt;
  return closed_ ? Statistics{} : layout_.statistics();
}

}  // namespace cudasched::memory
