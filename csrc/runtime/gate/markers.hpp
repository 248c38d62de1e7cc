// What is in flight on a device, and the events that say when it is complete: one for each marker of the ledger. The
// ledger knows times and counts, this knows the driver.
//
// Events belong to one context. Launches of a second context of the same device are counted too; having no markers,
// they are taken to end when predicted.
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
  schedule::Ledger& ledger() noexcept { return ledger_; }
  const schedule::Ledger& ledger() const noexcept { return ledger_; }

  // Makes the context's events, once. False where the context has none: they go to the first context that asks.
  bool ready(CUcontext context) noexcept;
  bool made() const noexcept { return context_ != nullptr; }
  CUcontext context() const noexcept { return context_; }
  bool belongs_to(CUcontext context) const noexcept {
    return context_ != nullptr && (context == nullptr || context == context_);
  }

  CUevent event(int segment) const noexcept { return events_[static_cast<std::size_t>(segment)]; }

  // Looks which segments are complete. `event_of(segment)` is what to ask the driver; done(segment, completed, marked)
  // is called for each, `marked` where the driver said so and not the clock.
  template <typename EventOf, typename Done>
  void retire(EventOf&& event_of, Done&& done) noexcept {
    ledger_.for_each([&](int segment) {
      const schedule::Ledger::State state = ledger_.state(segment);
      if (state == schedule::Ledger::State::kPending) return false;
      const bool marked = state == schedule::Ledger::State::kMarked;
      if (marked ? !is_complete(event_of(segment)) : !ledger_.has_run_out(segment)) return false;
      done(segment, ledger_.complete(segment), marked);
      return true;
    });
  }

  // The context is about to go: what was in flight there is forgotten with its events.
  void forget() noexcept;

  // Changes with forget(): what was submitted before has no segment any more.
  std::uint32_t generation() const noexcept { return generation_; }

 private:
  static bool is_complete(CUevent event) noexcept;
  void destroy() noexcept;

  schedule::Ledger ledger_;
  CUcontext context_ = nullptr;  // whose events these are
  std::uint32_t generation_ = 0;
  std::array<CUevent, schedule::Ledger::kMarkers> events_{};
};

}  // namespace cudasched::runtime
