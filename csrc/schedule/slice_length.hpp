// How long the hardware time slice of a process is to be.
//
// While the slice lasts, a request of another process waits. When it is over and that process has work, the GPU changes
// to its context, which takes kContextSwitchNs, and back where the request leaves it idle.
//
// Of a latency process: kLatencyUs, beside best effort of other processes. With libcuda's own the GPU changes to the
// best-effort context and back after each 2 ms of a request, 0.26 ms for 1 us of its work. Not beside latency work of
// other processes, which would wait for so long.
//
// Of a best-effort process:
//
//   shortest  1 us: running work gives way at once, to any process. Alone on the GPU it costs nothing. Nothing else is
//             needed beside requests that come unannounced: a gate adds nothing to their latency and costs best effort
//             (benchmarks/results/preempt_ablation.json). Longer slices beside requests that leave the GPU idle between
//             their kernels gain best effort little (docs/facts.md).
//   shared    several best-effort processes with work change places at the end of each slice.
//   starving  a process that never leaves the GPU idle gives a slice of 1 us next to nothing. Best effort that gets
//             nothing done for half a second has longer slices for a while, a tenth of the GPU's time; not where it is
//             latency work that it waits for.
//
// A length that the user has set takes the place of the shortest one. Beside other best effort, and while it starves,
// it is kStarvingUs at least: two processes of 1 us would do little but change contexts.
//
// Changes are at least kLeastChangeNs apart: setting a slice takes 0.3 ms in the driver's locks. The first choice is no
// change: a program that starts beside another one does not starve for so long. Pure, told the time; not thread-safe.
#pragma once

#include <cstdint>
#include <optional>

namespace cudasched::schedule {

class SliceLength {
 public:
  static constexpr std::uint32_t kLatencyUs = 20'000;
  static constexpr std::uint32_t kShortestUs = 1;
  static constexpr std::uint32_t kSharedUs = 1'200;
  static constexpr std::uint32_t kStarvingUs = 200;
  static constexpr std::int64_t kLeastChangeNs = 1'000'000'000;
  static constexpr std::int64_t kStarvedNs = 500'000'000;
  // For so long at first, and twice as long each time that it starves again at once.
  static constexpr std::int64_t kReliefNs = 10'000'000'000;
  static constexpr std::int64_t kMostReliefNs = 160'000'000'000;

  struct Look {
    std::int64_t now_ns = 0;
    int others = 0;                 // best-effort processes of the GPU, beside this one, that had work lately
    std::uint64_t completions = 0;  // of this one, ever
    bool in_flight = false;         // it has work on the GPU
    bool latency_active = false;
  };

  explicit SliceLength(std::optional<std::uint32_t> set_us = {}) noexcept : set_us_(set_us) {}

  std::uint32_t look(const Look& seen) noexcept;

 private:
  bool starves(const Look& seen) noexcept;

  std::optional<std::uint32_t> set_us_;
  std::uint32_t us_ = 0;         // 0: not yet chosen
  std::int64_t changed_ns_ = 0;  // 0: not yet
  std::uint64_t completions_ = 0;
  std::int64_t looked_ns_ = 0;
  std::int64_t without_ns_ = 0;  // how long nothing of ours was complete, beside no latency work
  std::int64_t relief_until_ns_ = 0;
  std::int64_t relief_ns_ = kReliefNs;
};

}  // namespace cudasched::schedule
