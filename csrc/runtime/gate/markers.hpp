// The events that say when the segments of a device's ledger are complete: one for each of its markers.
//
// Events belong to one context. Launches of a second context of the same device count too: without markers, such
// launches are taken to end when predicted.
//
// Not thread-safe: the gate's lock is held.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "schedule/ledger.hpp"

namespace cudasched::runtime {

class Markers {
 public:
  // Makes the context's events, once. False where the context has none: the events go to the first context that asks.
  bool ready(CUcontext context) noexcept;
  bool made() const noexcept { return context_ != nullptr; }
  CUcontext context() const noexcept { return context_; }
  bool belongs_to(CUcontext context) const noexcept {
    return context_ != nullptr && (context == nullptr || context == context_);
  }

  CUevent event(int segment) const noexcept { return events_[static_cast<std::size_t>(segment)]; }

  static bool is_complete(CUevent event) noexcept;

  // The context is about to go, and its events with it.
  void forget(const schedule::Ledger& ledger) noexcept;

 private:
  void destroy() noexcept;

  CUcontext context_ = nullptr;  // whose events these are
  std::array<CUevent, schedule::Ledger::kMarkers> events_{};
};

}  // namespace cudasched::runtime
