// The few words that every launch reads.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/class.hpp"
#include "runtime/classify.hpp"
#include "runtime/host_backoff.hpp"
#include "runtime/stream_marks.hpp"
#include "runtime/ticker_sleep.hpp"
#include "telemetry/counters.hpp"

namespace cudasched::runtime {

struct Hot {
  std::atomic<bool> scheduling{false};  // classes have an effect
  std::atomic<Class> process_class{Class::kNormal};
  std::atomic<Device*> only_device{nullptr};    // on a machine with one GPU: no need to ask for the context
  std::atomic<std::uint64_t> context_epoch{1};  // changes when a context goes, so that threads look theirs up anew
  std::atomic<int> captures{0};                 // streams of the process that are being captured, as far as counted
  std::atomic<bool> uncounted_captures{false};  // a function was called that may have begun others
  std::atomic<unsigned> next_thread{1};
  std::atomic<bool> carries_origins{false};  // a stream of the process was marked, or bound to best effort
  StreamClasses streams;
  StreamClasses by_priority;  // where nothing else says the class; empty unless CUDASCHED_CLASS_BY_STREAM_PRIORITY
  StreamMarks marks;
  EventOrigins event_origins;
  HostBackoff host_backoff;
  TickerSleep ticker;
  telemetry::Counters counters;

  // May any stream of the process be capturing? If not, no stream needs to be asked.
  bool may_capture() const noexcept {
    return captures.load(std::memory_order_relaxed) != 0 || uncounted_captures.load(std::memory_order_relaxed);
  }
};

inline constinit Hot hot_state;

inline Hot& hot() noexcept { return hot_state; }

}  // namespace cudasched::runtime
