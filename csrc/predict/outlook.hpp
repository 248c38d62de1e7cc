// A launch's predicted use of the GPU, beside its time: how full the GPU is and how hard it works. Also whether the
// launch's shape is worth a change.
//
// Arithmetic over the predictor's input and answer; occupancy is the driver's own. Nothing is learned. No allocation,
// no lock; some 30 ns.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "predict/launch.hpp"

namespace cudasched::predict {

// Shares are 0 to 1.
struct Outlook {
  float occupancy = 0;         // threads resident of those that a full multiprocessor can hold
  float waves = 0;             // blocks over the blocks that the device holds at once
  float sm_utilisation = 0;    // up to one wave the multiprocessors that have a block; above, waves over whole waves
  float block_efficiency = 0;  // threads of a block over those of its warps
  float bytes_per_s = 0;       // the least bytes of the work over the predicted time (work.hpp); 0: not known
  float flops_per_s = 0;       // alike
};

// `duration_ns`: the predicted time, or a measured one. Of a graph all is 0.
Outlook outlook_of(const Query& query, std::int64_t duration_ns) noexcept;

// The worst first, as `cudasched advise` has them.
enum class Level : std::uint8_t { kCritical, kWarning, kGood, kNotJudged };
inline constexpr std::size_t kLevels = 4;

// The judgement of the launch's shape, by the rules of python/cudasched/advise/rules.py that need the launch alone,
// with their gains: partial warps, few blocks, a tail, local memory. That module alone judges whether another block
// size would have a better occupancy. Libraries' kernels are not judged.
Level level_of(const Query& query, std::int64_t duration_ns) noexcept;

// The outlooks of a predictor's kernels, summed: each kernel in each launch shape counts once, up to kMostShapes.
//
// add() is called under the predictor's lock, for launches whose key is new in this run; sums() from any thread.
class Outlooks {
 public:
  static constexpr std::size_t kMostShapes = 4096;
  static constexpr double kUnit = 1e6;

  struct Sums {
    std::array<std::uint64_t, kLevels> kernels{};  // by level
    std::uint64_t occupancy = 0;                   // of all of them, in millionths
    std::uint64_t sm_utilisation = 0;
    std::uint64_t block_efficiency = 0;
  };

  // `shape` is a hash of the kernel and its launch shape.
  void add(std::uint64_t shape, const Query& query, std::int64_t duration_ns) noexcept;

  Sums sums() const noexcept;

 private:
  static constexpr std::size_t kPlaces = 2 * kMostShapes;

  bool is_new(std::uint64_t shape) noexcept;

  std::array<std::uint64_t, kPlaces> shapes_{};  // open addressing; 0: free
  std::size_t count_ = 0;
  std::array<std::atomic<std::uint64_t>, kLevels> kernels_{};
  std::array<std::atomic<std::uint64_t>, 3> shares_{};  // occupancy, SM utilisation, block efficiency
};

}  // namespace cudasched::predict
