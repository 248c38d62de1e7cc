// Where the GPU is to stop the kernels of a best-effort process when its time slice is over.
//
//   at an instruction  at once, whatever kernels run. The GPU saves and restores the state of every SM.
//   between blocks     once the thread blocks that run have ended. Less is saved: beside 120 requests a second a
//   program
//                      of kernels of 10 us keeps 97% of its speed, and 85% at an instruction (H100). A request waits
//                      for the longest block.
//
// So the GPU stops between blocks once no block was long for a while. A long block ends that at once, and for longer
// each time: one request may have waited for the block.
//
// Pure, told the time; not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cudasched::schedule {

class BlockLength {
 public:
  // A change of contexts at an instruction takes about as long.
  static constexpr std::int64_t kLongNs = 100'000;
  static constexpr std::int64_t kCalmNs = 5'000'000'000;
  static constexpr std::int64_t kMostCalmNs = 320'000'000'000;
  static constexpr std::uint64_t kFewest = 200;  // completions, in which a wrong prediction is found out

  // How long a block of a kernel runs at most, where all take as long. `at_once`: threads that the GPU holds.
  static std::int64_t longest_ns(std::int64_t kernel_ns, std::uint64_t threads, std::uint64_t at_once) noexcept {
    return kernel_ns /
           static_cast<std::int64_t>(std::max<std::uint64_t>(1, threads / std::max<std::uint64_t>(1, at_once)));
  }

  // `completions`: Ledger::completions(). `long_ns`: when a kernel of long blocks was launched last; 0: never.
  bool are_short(std::int64_t now_ns, std::uint64_t completions, std::int64_t long_ns) noexcept {
    if (since_ns_ == 0 || long_ns > since_ns_) {
      if (short_) calm_ns_ = std::min(4 * calm_ns_, kMostCalmNs);
      short_ = false;
      since_ns_ = now_ns;
      since_ = completions;
    }
    if (now_ns - since_ns_ >= calm_ns_ && completions - since_ >= kFewest) short_ = true;
    return short_;
  }

 private:
  std::int64_t since_ns_ = 0;  // since when no block is long; 0: not yet looked
  std::uint64_t since_ = 0;    // completions by then
  std::int64_t calm_ns_ = kCalmNs;
  bool short_ = false;
};

}  // namespace cudasched::schedule
