// A measured duration and the measurement's error.
//
// CUPTI gives the time on the device to a few nanoseconds. Two CUDA events around a launch give more than the kernel's
// time (`event_sample`), by an amount that varies. For a kernel of 1 us a single sample is wrong by 15 to 40%. So short
// kernels are averaged in nanoseconds, not in logarithms, over more samples.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace cudasched::predict {

struct Sample {
  static constexpr float kLeastNs = 50;
  static constexpr float kMostNs = 7e13F;  // 20 hours
  static constexpr float kLoud = 0.04F;    // noise of more than that share of the duration is noise to average out

  float ns = 0;        // may be anything, also below 0; true in the median
  float noise_ns = 0;  // standard deviation; 0: none to speak of
  float low_ns = 0;    // the distance of such samples' lower quarter below their median

  // The noise as a share of a duration.
  float noise_of(float duration_ns) const noexcept { return noise_ns / duration_ns; }

  float log() const noexcept { return std::log(std::clamp(ns, kLeastNs, kMostNs)); }

  // log(ns / reference); for noisy samples nearby the share itself, whose mean the noise does not move.
  float log_over(float reference_log) const noexcept {
    constexpr float kNear = 0.5F;
    if (noise_ns > 0) {
      const float reference = std::exp(reference_log);
      const float share = ns / reference - 1;
      if (noise_of(reference) > kLoud && std::abs(share) < kNear) return share;
    }
    return log() - reference_log;
  }
};

// The measurement of two events around a launch.
struct Elapsed {
  std::int64_t ns = 0;
  // Where the GPU was idle and waited for the launch: the call's time on the host, which is between the events, too. 0:
  // the GPU had the launch in its queue.
  std::int64_t call_ns = 0;
};

// The time that events add to a kernel, and its variation, as measured on an H200 (docs/training.md). In the queue they
// add 2.2 to 3.3 us, with a floor that is alike in all programs; beside a launch call nearly always the same.
inline constexpr std::int64_t kQueuedEventsNs = 2'690;
inline constexpr std::int64_t kEventsBesideCallNs = 1'110;
inline constexpr float kQueuedNoiseNs = 380;
inline constexpr float kCallNoiseNs = 150;

// The kernel's time by two events.
inline Sample event_sample(const Elapsed& elapsed) noexcept {
  if (elapsed.call_ns == 0) return {static_cast<float>(elapsed.ns - kQueuedEventsNs), kQueuedNoiseNs, 150};
  return {static_cast<float>(elapsed.ns - elapsed.call_ns - kEventsBesideCallNs), kCallNoiseNs, 80};
}

}  // namespace cudasched::predict
