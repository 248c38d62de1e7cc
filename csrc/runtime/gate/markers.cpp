#include "runtime/gate/markers.hpp"

#include "driver/driver.hpp"

namespace cudasched::runtime {

bool Markers::ready(CUcontext context) noexcept {
  if (context_ == context) return context != nullptr;
  if (context_ != nullptr || context == nullptr) return false;
  for (CUevent& event : events_) {
    if (driver::table().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) continue;
    event = nullptr;
    destroy();
    return false;
  }
  context_ = context;
  return true;
}

bool Markers::is_complete(CUevent event) noexcept {
  // Any other error than "not ready" means that nothing more will be heard of it.
  return driver::table().cuEventQuery(event) != CUDA_ERROR_NOT_READY;
}

void Markers::destroy() noexcept {
  for (const CUevent event : events_) {
    if (event != nullptr) driver::table().cuEventDestroy(event);
  }
  events_.fill(nullptr);
}

void Markers::forget(const schedule::Ledger& ledger) noexcept {
  for (int segment = 0; segment < schedule::Ledger::kMarkers; ++segment) {
    // Another thread is about to record these: they are left to the context's end.
    if (ledger.state(segment) == schedule::Ledger::State::kPending) {
      events_[static_cast<std::size_t>(segment)] = nullptr;
    }
  }
  // Not left to the context's end: a primary context that is released may live on.
  destroy();
  context_ = nullptr;
}

}  // namespace cudasched::runtime
