// How long the hardware time slice of a best-effort process is to be, and whether its gate is needed beside it.
//
// While the slice lasts, a request of another process waits. When it is over and that process has work, the GPU changes
// to its context, which takes kContextSwitchNs, and back where the request leaves it idle.
//
//   shortest  1 us: what runs gives way at once, to any process. Alone on the GPU it costs nothing. Beside requests
//   that
//             keep the GPU busy it is all that is needed: the gate lets everything go.
//   host-bound requests  leave the GPU idle between their kernels; each such gap costs two changes of context, and best
//             effort gets nothing done in it. Where such requests take much of the time, the gate holds best effort
//             back for a whole request, and slices are long enough for what is in flight to end undisturbed.
//   shared    several best-effort processes with work change places at the end of each slice.
//   starving  a process that never leaves the GPU idle gives a slice of 1 us next to nothing. Best effort that gets
//             nothing done for half a second has longer slices for a while, a tenth of the GPU's time; not where it is
//             latency work that it waits for.
//
// Changes are at least kLeastChangeNs apart: setting a slice takes 0.3 ms in the driver's locks. Pure, told the time;
// not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cudasched::schedule {

// A latency client of another process, as its slot tells: all that it ever did.
struct Server {
  std::size_t slot = 0;
  std::uint64_t launches = 0;
  std::uint64_t requests = 0;
  std::int64_t request_ns = 0;  // of the last one
  bool hints = false;           // it said lately when requests come
};

class SliceLength {
 public:
  static constexpr std::uint32_t kShortestUs = 1;
  static constexpr std::uint32_t kHostBoundUs = 1'000;
  static constexpr std::uint32_t kSharedUs = 1'200;
  static constexpr std::uint32_t kStarvingUs = 200;
  // A request with so many launches leaves the GPU idle between them,
  static constexpr double kHostBoundLaunches = 64;
  // and where such requests take so much of the time, they are what best effort is arranged for; less, no more.
  static constexpr double kHostBoundShare = 0.12;
  static constexpr double kNotHostBoundShare = 0.08;
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
    std::span<const Server> servers;
  };
  struct Choice {
    std::uint32_t us = kShortestUs;
    bool gate = false;  // the gate is needed, too
  };

  Choice look(const Look& seen) noexcept;

 private:
  static constexpr std::size_t kSlots = 64;
  struct Before {
    std::uint64_t launches = 0;
    std::uint64_t requests = 0;
    double share = 0;  // of the time, of requests with many launches
  };

  double host_bound_share(const Look& seen) noexcept;
  bool starves(const Look& seen) noexcept;

  Choice choice_;
  bool chosen_ = false;
  bool host_bound_ = false;
  std::int64_t changed_ns_ = 0;
  std::int64_t counted_ns_ = 0;  // when `before_` was taken
  std::array<Before, kSlots> before_{};
  double share_ = 0;
  std::uint64_t completions_ = 0;
  std::int64_t looked_ns_ = 0;
  std::int64_t without_ns_ = 0;  // how long nothing of ours was complete, beside no latency work
  std::int64_t relief_until_ns_ = 0;
  std::int64_t relief_ns_ = kReliefNs;
};

}  // namespace cudasched::schedule
