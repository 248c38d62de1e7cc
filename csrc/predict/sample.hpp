// A measured duration, with what the measurement may be wrong by.
//
// CUPTI gives the time on the device to a few nanoseconds. Two CUDA events around a launch give it in half-microsecond
// ticks and with the gap before the kernel, which event_sample() takes off: of a kernel of 1 us a single sample is
// wrong by 20%, but not in the mean, as long as nothing is cut off below. So short kernels are averaged in nanoseconds,
// not in logarithms, over more samples.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace cudasched::predict {

struct Sample {
  static constexpr float kLeastNs = 50;
  static constexpr float kMostNs = 7e13F;  // 20 hours
  static constexpr float kLoud = 0.02F;    // noise of more than that share of the duration is noise to average out

  float ns = 0;        // may be anything, also below 0
  float noise_ns = 0;  // standard deviation; 0: none to speak of

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

// What two events around a launch add to its kernel, and what they resolve.
inline constexpr std::int64_t kEventGapNs = 1'300;
inline constexpr float kEventTickNs = 500;
inline constexpr float kEventNoiseNs =
    0.41F * kEventTickNs;  // of the difference of two rounded times: a tick over root six

// What two events around a launch say of it.
inline Sample event_sample(std::int64_t elapsed_ns) noexcept {
  return {static_cast<float>(elapsed_ns - kEventGapNs), kEventNoiseNs};
}

}  // namespace cudasched::predict
