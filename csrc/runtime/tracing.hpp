// Between the engine and its trace (telemetry/trace.hpp): gathers the contents of a record. While nothing is traced,
// each function is one load and a branch that is always the same.
//
// The driver describes a kernel at its first traced launch, as for the gate. From then on a record costs two looks at
// the clock and a place in a ring.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/clock.hpp"
#include "queue/call.hpp"
#include "queue/operation.hpp"
#include "runtime/classify.hpp"
#include "schedule/admission.hpp"
#include "telemetry/trace.hpp"

namespace cudasched::runtime {

// Of a launch that the launcher thread makes.
struct Submission {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t predicted_ns = 0;
  CUgraphExec graph = nullptr;  // null: a kernel
  std::uint32_t part = 0;       // of a graph launch, from 0,
  std::uint32_t parts = 0;      // of so many; 0: it is whole
};

// Out of line: only while something is traced.
void trace_launch(const queue::Call& call, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t predicted_ns,
                  CUresult status) noexcept;
void trace_push(const queue::Call& call, std::int64_t begin_ns) noexcept;
void trace_region(const Region& region, telemetry::TraceKind kind) noexcept;
void trace_wait(const queue::Call& call, int device, std::int64_t begin_ns, telemetry::WaitReason why) noexcept;
// Of a launch that the gate times: the record at submission, and at the end.
telemetry::TraceRecord traced_launch(const queue::Call& call, int device, std::int64_t predicted_ns) noexcept;
void trace_timed(telemetry::TraceRecord record, std::int64_t took_ns) noexcept;
void trace_submission(const queue::Operation& operation, int device, const Submission& what, CUresult status) noexcept;
void trace_counter(telemetry::TraceCounter counter, int device, std::uint64_t value) noexcept;
// The ticker's: the devices' counters, every kTraceCountersNs.
inline constexpr std::int64_t kTraceCountersNs = 50'000'000;
void trace_counters(Device& device) noexcept;

// Of the innermost region of the thread; 0: it is in none.
inline std::uint16_t traced_region(const ThreadState& thread) noexcept {
  const Region* const region = thread.innermost();
  return region != nullptr ? region->traced : std::uint16_t{0};
}

// The call of a launch that goes to the driver on this thread. Recorded at the end, behind the launch's other work.
class TracedLaunch {
 public:
  TracedLaunch(const queue::Call& call, std::int64_t predicted_ns) noexcept
      : call_(call), begin_ns_(telemetry::traced_now()), predicted_ns_(predicted_ns) {}
  ~TracedLaunch() {
    if (end_ns_ != 0) [[unlikely]]
      trace_launch(call_, begin_ns_, end_ns_, predicted_ns_, status_);
  }
  TracedLaunch(const TracedLaunch&) = delete;
  TracedLaunch& operator=(const TracedLaunch&) = delete;

  void returned(CUresult status) noexcept {
    if (begin_ns_ == 0) [[likely]]
      return;
    end_ns_ = now_ns();
    status_ = status;
  }

 private:
  const queue::Call& call_;
  std::int64_t begin_ns_;
  std::int64_t end_ns_ = 0;
  std::int64_t predicted_ns_;
  CUresult status_ = CUDA_SUCCESS;
};

// A launch's wait at the gate, from look to look: a record for each stretch of one reason.
class TracedWait {
 public:
  void waits(const queue::Call& call, int device, telemetry::WaitReason why) noexcept {
    if (!telemetry::tracing() || (since_ns_ != 0 && why == why_)) return;
    ends(call, device);
    since_ns_ = now_ns();
    why_ = why;
  }
  void ends(const queue::Call& call, int device) noexcept {
    if (since_ns_ != 0) [[unlikely]]
      trace_wait(call, device, since_ns_, why_);
    since_ns_ = 0;
  }

 private:
  std::int64_t since_ns_ = 0;  // 0: it does not wait, or nothing is traced
  telemetry::WaitReason why_{};
};

// The built-in policies' reason to hold a launch (schedule/admission.cpp).
telemetry::WaitReason why_it_waits(const schedule::Decision& decision, const schedule::Snapshot& seen) noexcept;

// CUDASCHED_TRACE_DIR starts a trace with the process's first cuInit; an error is logged as a warning.
void trace_if_asked() noexcept;

}  // namespace cudasched::runtime
