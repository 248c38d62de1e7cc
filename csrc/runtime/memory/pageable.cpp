#include "runtime/memory/pageable.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <string>

#include "base/log.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/engine.hpp"
#include "runtime/hot.hpp"
#include "runtime/memory/memory.hpp"

namespace cudasched::runtime {

using driver::table;

namespace {

const queue::Queue* queue_of_gpu() noexcept {
  const Device* const device = engine().known_device(0);
  return device != nullptr ? device->queue() : nullptr;
}

}  // namespace

// Made at the first use, where the current context is the only GPU's primary one.
memory::Pool* Pageable::pool() noexcept {
  CUcontext current = nullptr;
  if (table().cuCtxGetCurrent(&current) != CUDA_SUCCESS || current == nullptr) return nullptr;
  const std::lock_guard held(mutex_);
  if (pool_ == nullptr) {
    int devices = 0;
    unsigned flags = 0;
    int active = 0;
    if (table().cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices != 1 ||
        table().cuDevicePrimaryCtxGetState(0, &flags, &active) != CUDA_SUCCESS || active == 0) {
      return nullptr;
    }
    try {
      pool_ = new memory::Pool(memory::Pool::Options{});
    } catch (const std::exception& error) {
      stop();
      log::warning("pageable memory is not to be had here, allocations are plain: " + std::string(error.what()));
      return nullptr;
    }
  }
  return pool_->context() == current ? pool_ : nullptr;
}

std::optional<CUresult> Pageable::allocate(CUdeviceptr* pointer, std::size_t bytes) noexcept {
  if (!wanted_.load(std::memory_order_relaxed) || stopped_.load(std::memory_order_relaxed) || pointer == nullptr ||
      bytes < kLeastBytes || hot().process_class.load(std::memory_order_relaxed) != Class::kBestEffort ||
      Memory::class_of_thread() != Class::kBestEffort || hot().may_capture()) {
    return std::nullopt;
  }
  memory::Pool* const from = pool();
  if (from == nullptr) return std::nullopt;
  try {
    const CUdeviceptr made = from->allocate_idle(bytes);
    const std::lock_guard held(mutex_);
    blocks_.emplace(made, Entry{bytes});
    used_.store(true, std::memory_order_relaxed);
    *pointer = made;
    return CUDA_SUCCESS;
  } catch (const memory::OutOfMemoryError&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    log::debug(error.what());
    return std::nullopt;
  }
}

void Pageable::give_back(const std::vector<CUdeviceptr>& pointers) noexcept {
  try {
    for (const CUdeviceptr each : pointers) pool_->free_idle(each);
    pool_->trim();
  } catch (const std::exception& error) {  // the pool keeps it for later blocks
    log::debug(error.what());
  }
}

bool Pageable::free_later(CUdeviceptr pointer) noexcept {
  if (!used_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard held(mutex_);
  const auto found = blocks_.find(pointer);
  if (found == blocks_.end() || found->second.is_late) return false;
  const queue::Queue* const launches = queue_of_gpu();
  found->second = {found->second.bytes, true, launches != nullptr ? launches->pushed() : 0};
  late_.store(true, std::memory_order_relaxed);
  return true;
}

bool Pageable::free_late() noexcept {
  if (!owes() || !driver::barrier().try_enter()) return false;
  const bool freed = carry_out_frees();
  driver::barrier().leave();
  return freed;
}

bool Pageable::carry_out_frees() noexcept {
  std::vector<CUdeviceptr> pointers;
  if (!owes() || hot().may_capture()) return false;
  if (!take(pointers, /*all=*/false)) return !owes();  // another thread has
  give_back(pointers);
  return true;
}

bool Pageable::free(CUdeviceptr pointer) noexcept {
  if (!free_later(pointer)) return false;
  free_late();
  return true;
}

// Blocks that no work uses any more, once all work that was submitted before is done. False: the driver failed, or
// there is no memory for their list; all blocks stay.
bool Pageable::take(std::vector<CUdeviceptr>& pointers, bool all) noexcept {
  const std::lock_guard alone(taking_);
  const queue::Queue* const launches = queue_of_gpu();
  const queue::Position submitted = launches != nullptr ? launches->passed() : 0;
  try {
    const std::lock_guard held(mutex_);
    for (const auto& [begin, entry] : blocks_) {
      if (all || (entry.is_late && entry.after <= submitted)) pointers.push_back(begin);
    }
  } catch (const std::exception&) {
    return false;
  }
  if (pointers.empty()) return false;
  const driver::CurrentContext current(pool_->context());
  if (!current.ok() || table().cuCtxSynchronize() != CUDA_SUCCESS) return false;
  const std::lock_guard held(mutex_);
  for (const CUdeviceptr each : pointers) blocks_.erase(each);
  late_.store(std::ranges::any_of(blocks_, [](const auto& each) { return each.second.is_late; }));
  return true;
}

std::optional<Pageable::Block> Pageable::find(CUdeviceptr pointer) noexcept {
  if (!used_.load(std::memory_order_relaxed)) return std::nullopt;
  const std::lock_guard held(mutex_);
  const auto next = blocks_.upper_bound(pointer);
  if (next == blocks_.begin()) return std::nullopt;
  const auto& [begin, entry] = *std::prev(next);
  if (entry.is_late || pointer - begin >= entry.bytes) return std::nullopt;
  return Block{begin, entry.bytes, pool_->context()};
}

memory::Pool* Pageable::pool_made() noexcept {
  const std::lock_guard held(mutex_);
  return pool_;
}

void Pageable::drop(bool is_gone) noexcept {
  stop();
  if (is_gone) {
    const std::lock_guard held(mutex_);
    blocks_.clear();
    late_.store(false);
  }
  std::vector<CUdeviceptr> pointers;
  if (used_.load() && take(pointers, /*all=*/true)) give_back(pointers);
}

// The driver does not work in a child, and its memory is the parent's.
void Pageable::reset_in_child() noexcept {
  new (this) Pageable;
  stop();
}

}  // namespace cudasched::runtime
