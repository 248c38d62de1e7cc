// The lead, found on line: as small as keeps the GPU from running dry between best-effort kernels.
//
// Each launch reports how long it was held for the lead's sake and how long the GPU had had nothing to do when it
// arrived. Dry after holding: the lead was too small, and goes up by a part of the gap. Each launch takes the same part
// of kDryShare of its own time off the lead. So the GPU is dry for that share of the time, whatever the kernels'
// lengths. Where nothing was held since the GPU last ran dry, the lead does not go up: a larger one would not have
// helped (the program itself is slow).
//
// The user may state how much slower latency requests may become (max_inflation 1.2: by 20%). A ceiling comes down
// while more than one request in ten exceeds that limit, and rises otherwise. The ceiling acts on the lead alone: the
// rest of the kernel in flight stays.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

class Lead {
 public:
  static constexpr double kDryShare = 0.005;
  static constexpr double kGain = 0.25;  // the part of a gap by which the lead goes up
  static constexpr double kExceedShare = 0.1;
  static constexpr std::int64_t kStepNs = 2'000;  // of the ceiling

  struct Bounds {
    std::int64_t least_ns = 10'000;
    std::int64_t first_ns = 20'000;  // to begin with
    std::int64_t most_ns = 40'000;
    double max_inflation = 0;  // 0: no target
  };

  // Bounds in the wrong order are put right: least_ns stands.
  explicit Lead(const Bounds& bounds) noexcept;
  Lead() noexcept : Lead(Bounds{}) {}

  std::int64_t ns() const noexcept;

  // A best-effort launch of `gpu_ns` reached the GPU after having been held for `held_ns` because the lead was in
  // flight; the GPU had been dry for `dry_ns` (0: it was not). Not to be told of the first launch after latency work.
  void submitted(std::int64_t held_ns, std::int64_t dry_ns, std::int64_t gpu_ns) noexcept;

  // A latency request is complete: it took `time_ns` in all, of which it waited `waited_ns` for best-effort work.
  void completed(std::int64_t time_ns, std::int64_t waited_ns) noexcept;

 private:
  Bounds bounds_;
  double lead_ns_;
  double ceiling_ns_;
  bool held_ = false;  // a launch, since the GPU last ran dry
};

}  // namespace cudasched::schedule
