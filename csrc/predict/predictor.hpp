// How long will this launch take? The one interface that the scheduler knows; per-key history now, the trees slot in
// between history and guess later.
//
// Known keys: the history's estimate. New kernels: occupancy and waves, times what such guesses were wrong by so far.
// New graphs: kUnknownGraphNs. The predictor also says which launches are worth timing: the first three of a key, then
// one in kSamplePeriod.
//
// Not thread-safe: the caller (the gate) holds a lock. No allocation, no system call.
#pragma once

#include <cstdint>

#include "predict/history.hpp"
#include "predict/launch.hpp"

namespace cudasched::predict {

struct Prediction {
  std::int64_t duration_ns = 0;
  std::int64_t raw_guess_ns = 0;  // the guess before correction, where there was nothing better; else 0
  bool wants_sample = false;
};

class Predictor {
 public:
  static constexpr std::uint64_t kFirstSamples = 3;
  static constexpr std::uint64_t kSamplePeriod = 64;
  static constexpr std::int64_t kUnknownGraphNs = 200'000;
  static constexpr std::int64_t kShortestNs = 2'000;  // a kernel that does nothing
  static constexpr std::int64_t kWaveNs = 6'000;      // a wave of a middling kernel

  // Will predict() ask for this launch's residency?
  bool wants_residency(const Launch& launch) const noexcept {
    if (launch.is_graph) return false;
    const History::Entry* entry = history_.find(launch.key());
    return entry == nullptr || entry->samples == 0;
  }

  // `residency` is called for a kernel that has no sample yet and returns a Residency.
  template <typename AskResidency>
  Prediction predict(const Launch& launch, AskResidency&& residency) noexcept {
    History::Entry& entry = history_.use(launch.key());
    Prediction prediction;
    prediction.wants_sample = entry.launches < kFirstSamples || entry.launches % kSamplePeriod == 0;
    ++entry.launches;
    if (entry.samples > 0) {
      prediction.duration_ns = known_ns(entry);
    } else if (launch.is_graph) {
      prediction.duration_ns = kUnknownGraphNs;
    } else {
      prediction.raw_guess_ns = guess_ns(launch, residency());
      prediction.duration_ns = corrected_ns(prediction.raw_guess_ns);
    }
    return prediction;
  }

  // A launch with this key took `duration_ns`; `prediction` is what was said of it.
  void observe(std::uint64_t key, const Prediction& prediction, std::int64_t duration_ns) noexcept;

  static std::int64_t guess_ns(const Launch& launch, const Residency& residency) noexcept;

 private:
  static std::int64_t known_ns(const History::Entry& entry) noexcept;
  std::int64_t corrected_ns(std::int64_t raw_ns) const noexcept;

  History history_;
  float guess_log_ratio_ = 0;  // log of measured over guessed, running over first samples
};

}  // namespace cudasched::predict
