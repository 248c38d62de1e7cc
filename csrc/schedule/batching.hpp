// When the next batch of inference requests starts, and whether a request that arrives can meet its deadline.
//
// The latest start of a batch is the earliest deadline in it, less a margin and the bound of its size; with `deadline`
// half as much again as the bound, which one batch in ten exceeds. A batch takes the requests in the order in which
// they wait. The policy decides how many, and when:
//
//   deadline  the number that gives the most requests per second, of those whose bound meets the earliest deadline,
//             or of all where the largest of those does not keep up with the arrivals: the caller then compares that
//             batch with others, without the requests that would be late in it.
//             The batch starts when no larger batch can start in time, or when waiting gains nothing: batches of its
//             size keep up with the arrivals in half of the time, a larger batch serves no more requests per second,
//             the requests that it lacks are not expected before its latest start, or none has come for kQuietGaps
//             times as long as usual. It grows no further than the slack of other processes' requests, unless that
//             is too short for the smallest batch: programs that are late would otherwise run ever smaller batches.
//   eager     as many as wait, at once.
//   delay     as many as wait, once the batch is full, or the first of them has waited for `delay_ns`, or at the latest
//             start: max_queue_delay_microseconds of Triton Inference Server.
//   aimd      as eager, up to a limit that grows by one and shrinks by a tenth (Clipper, NSDI 2017).
//
// Times are ns of one monotonic clock. Pure: no clock, no thread, no CUDA call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace cudasched::schedule {

enum class BatchPolicy : std::uint8_t { kDeadline, kEager, kDelay, kAimd };

// Of a request without a deadline, and of a look that no time brings.
inline constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();

inline constexpr std::int64_t kQuietGaps = 4;
inline constexpr std::int64_t kSpare = 2;

struct BatchView {
  BatchPolicy policy = BatchPolicy::kDeadline;
  std::int64_t now_ns = 0;  // the GPU is free
  // Of the requests that wait, in the order in which they are served.
  std::span<const std::int64_t> deadlines_ns;
  std::span<const std::int64_t> arrivals_ns;
  // Sizes of batches, ascending, at least one. A batch takes as long as the least size that holds it.
  std::span<const std::int64_t> sizes;
  std::span<const std::int64_t> bounds_ns;  // of each size, ascending; 0: not known
  std::size_t most = 1;                     // requests in a batch: at least 1, at most the last size
  std::int64_t margin_ns = 0;
  std::int64_t delay_ns = 0;
  std::int64_t gap_ns = kNeverNs;    // expected between two arrivals; kNeverNs: not known
  std::int64_t slack_ns = kNeverNs;  // of other processes' requests under way; kNeverNs: none, or not known
};

struct BatchDecision {
  std::size_t take = 0;             // so many requests, the first that wait, start now
  std::int64_t look_ns = kNeverNs;  // else: decide again then, or when a request arrives
};

BatchDecision next_batch(const BatchView& view) noexcept;

struct RequestAdmission {
  std::int64_t end_ns = 0;  // predicted
  bool displaces = false;   // another request, of those to protect, would become late
};

// A request with this deadline would wait at `place`, of 0 to the number that wait. `view.now_ns` is when the GPU is
// free, if not before. The first `protected_count` requests that wait are not to become late for it. Batches are
// predicted to start back to back, as next_batch forms them.
RequestAdmission admit_request(const BatchView& view, std::size_t place, std::int64_t deadline_ns,
                               std::size_t protected_count);

// The limit of `aimd` after a batch: `full`: it had as many requests as the limit allowed; `in_time`: none of them was
// late. From 1 to `most`.
double aimd_limit(double limit, bool full, bool in_time, double most) noexcept;

}  // namespace cudasched::schedule
