// The errors so far of the base estimates of new keys (by trees, critical path or guess), as log(measured / base). Each
// kernel has a running mean and the errors nearby (nearby.hpp). A new kernel has its library's error, as far as the
// library's kernels agree (libraries.hpp). All graphs whose critical path is known count as one.
//
// Means are kept between runs, by the kernels' identities. Not thread-safe: the predictor's caller holds a lock. Only
// save() and restore() allocate.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "predict/function.hpp"
#include "predict/libraries.hpp"
#include "predict/nearby.hpp"
#include "predict/state.hpp"
#include "predict/words.hpp"

namespace cudasched::predict {

class Corrections {
 public:
  static constexpr std::uint32_t kGraphs = kMaxFunctions;        // the index that all graphs share
  static constexpr std::uint32_t kNameless = kMaxFunctions + 1;  // and of kernels without a number
  static constexpr std::uint32_t kUncorrected = kMaxFunctions + 2;
  static constexpr float kMostRatio = 4;  // of a logarithm: 55 times

  static std::uint16_t index_of(const Function* function) noexcept {
    return static_cast<std::uint16_t>(function != nullptr && function->index < kMaxFunctions ? function->index
                                                                                             : kNameless);
  }

  // The function's first launch.
  void meet(const Function& function) noexcept;

  // Over all sizes.
  float mean_log(std::uint32_t index) const noexcept {
    if (index == kUncorrected) return 0;
    const Mean& own = means_[index];
    const auto samples = static_cast<float>(own.samples);
    return (samples * own.log_ratio + kLibraryWeight * libraries_.shrunk(own.library)) / (samples + kLibraryWeight);
  }

  // Of a launch without a sample of its own.
  float log(std::uint32_t index, float base_log) const noexcept {
    const float mean = mean_log(index);
    return index < kMaxFunctions ? nearby_.about(index, base_log, mean) : mean;
  }

  // A key without a sample took exp(log_ratio) times the base estimate.
  void add(std::uint32_t index, float base_log, float log_ratio, float noise) noexcept;

  void save(StateWriter& out) const;
  // Throws StateError. Of another base only the functions' identities are taken over, and the errors of graphs.
  void restore(StateReader& in, bool same_base);

 private:
  static constexpr float kLibraryWeight = 2;  // samples of a function that weigh as much as its library

  struct Mean {
    std::uint64_t identity = 0;
    float log_ratio = 0;
    std::uint32_t samples = 0;
    std::uint8_t library = kNoLibrary;

    void add(float log) noexcept;
  };

  std::array<Mean, kMaxFunctions + 2> means_{};
  Libraries libraries_;
  Nearby nearby_;
  std::vector<Mean> saved_;  // of functions of earlier runs, by identity
};

}  // namespace cudasched::predict
