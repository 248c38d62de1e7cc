// Where the GPU is to stop the kernels of a best-effort process when its time slice is over.
//
//   at an instruction  at once, whatever kernels run. The GPU saves and restores the state of every SM.
//   between blocks     once the thread blocks that run have ended: less is saved.
//   between kernels    once the kernels that run have ended: nothing of them is saved.
//
// A request waits for the rest of what runs, half a kernel or block on average: by how long these are, weighted by
// their time on the GPU. Where that is shorter than the GPU takes to save and restore, a later stop is better for both.
// On an H100, beside programs of kernels of 5 to 10 us, it shortened P50 by 0.02 to 0.05 ms and P99 by 0.1 to 0.15, and
// best effort gained 1 to 5%; beside Llama layers, whose blocks are as long as kernels, P50 was 0.8 ms longer.
//
// Not the default: on a GPU the looks below have not run, nor has a kernel that lasts seconds, which a later stop would
// have every other context wait for.
//
// Pure, told the time; not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cudasched::schedule {

enum class Stop : std::uint32_t { kBetweenKernels = 0, kBetweenBlocks = 1, kAtInstruction = 2 };

// The launches of a process so far, by their estimates.
struct Lengths {
  double total_ns = 0;
  double kernels_ns2 = 0;  // the sum of their squares,
  double blocks_ns2 = 0;   // and of each kernel's time by the time of a block

  // `threads` of a kernel of which the GPU holds `at_once`: its blocks run in turns, which take as long each.
  void add(std::int64_t kernel_ns, std::uint64_t threads, std::uint64_t at_once) noexcept {
    const auto kernel = static_cast<double>(kernel_ns);
    const double square = kernel * kernel;
    total_ns += kernel;
    kernels_ns2 += square;
    blocks_ns2 += threads <= at_once ? square : square * static_cast<double>(at_once) / static_cast<double>(threads);
  }
};

class StopPoint {
 public:
  // A request may wait for so long on average, and goes on to do so up to twice as long.
  static constexpr double kShortNs = 15'000;
  static constexpr std::int64_t kLookNs = 1'000'000'000;
  static constexpr int kLooks = 5;  // in a row that find no longer ones, in which a wrong estimate is found out
  static constexpr int kMostLooks = 320;
  static constexpr double kLeastNs = 5'000'000;  // of work, or a look tells nothing

  Stop look(std::int64_t now_ns, const Lengths& so_far) noexcept {
    const double total_ns = so_far.total_ns - before_.total_ns;
    if (now_ns - looked_ns_ < kLookNs || total_ns < kLeastNs) return stop_;
    const double block_ns = (so_far.blocks_ns2 - before_.blocks_ns2) / total_ns / 2;
    const double kernel_ns = (so_far.kernels_ns2 - before_.kernels_ns2) / total_ns / 2;
    looked_ns_ = now_ns;
    before_ = so_far;
    const double limit_ns = stop_ == Stop::kAtInstruction ? kShortNs : 2 * kShortNs;
    if (block_ns > limit_ns || (stop_ == Stop::kBetweenKernels && kernel_ns > limit_ns)) {
      if (stop_ != Stop::kAtInstruction) wanted_ = std::min(4 * wanted_, kMostLooks);
      stop_ = Stop::kAtInstruction;
      looks_ = 0;
      kernels_are_short_ = true;
      return stop_;
    }
    kernels_are_short_ = kernels_are_short_ && kernel_ns <= kShortNs;
    if (stop_ == Stop::kAtInstruction && ++looks_ >= wanted_) {
      stop_ = kernels_are_short_ ? Stop::kBetweenKernels : Stop::kBetweenBlocks;
    }
    return stop_;
  }

 private:
  Stop stop_ = Stop::kAtInstruction;
  Lengths before_;
  std::int64_t looked_ns_ = 0;
  int looks_ = 0;
  int wanted_ = kLooks;
  bool kernels_are_short_ = true;
};

}  // namespace cudasched::schedule
