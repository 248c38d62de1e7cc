#include "runtime/latency/context_prewarmer.hpp"

#include <algorithm>

#include "driver/driver.hpp"
#include "runtime/hot.hpp"

namespace cudasched::runtime {

void ContextPrewarmer::first_launch(std::int64_t now) noexcept {
  const std::int64_t since = entered_ns_.exchange(0, std::memory_order_relaxed);
  if (since == 0) return;
  const std::int64_t ahead = std::max<std::int64_t>(now - since, 0);
  ahead_ns_.store((ahead_ns_.load(std::memory_order_relaxed) + ahead) / 2, std::memory_order_relaxed);
}

bool ContextPrewarmer::prepare(CUcontext context) noexcept {
  if (context_ != nullptr) return context_ == context && !refused_;
  const driver::Driver& driver = driver::table();
  context_ = context;
  refused_ = driver.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS ||
             driver.cuMemAlloc(&memory_, sizeof(unsigned)) != CUDA_SUCCESS;
  return !refused_;
}

void ContextPrewarmer::prewarm() noexcept {
  // At exit, nothing calls the driver from here once stop() has passed the lock.
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  CUcontext const context = driver::shareable_context();
  if (context == nullptr || hot().may_capture()) return;
  const driver::RelaxedCapture relaxed;
  if (!prepare(context)) return;
  refused_ = driver::table().cuMemsetD32Async(memory_, 0, 1, stream_) != CUDA_SUCCESS;
}

void ContextPrewarmer::prewarm_last_context() noexcept {
  if (worked_in_ == nullptr || !hot().scheduling.load(std::memory_order_relaxed)) return;
  const driver::CurrentContext current(worked_in_);
  if (current.ok()) prewarm();
}

void ContextPrewarmer::forget(CUcontext context) noexcept {
  if (context == nullptr || context == worked_in_) worked_in_ = nullptr;
  if (context != nullptr && context != context_) return;
  context_ = nullptr;
  stream_ = nullptr;
  memory_ = 0;
  refused_ = false;
}

}  // namespace cudasched::runtime
