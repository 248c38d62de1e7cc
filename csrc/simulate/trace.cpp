#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "simulate/replay.hpp"

namespace cudasched::simulate {

std::vector<TraceLaunch> trace_launches(std::span<const RecordedLaunch> recorded) {
  constexpr std::int64_t kAheadNs = 20'000;  // from a launch to its start: others were before it
  constexpr std::size_t kFullQueue = 512;    // launches not complete: no program means to run so far ahead
  constexpr std::int64_t kShortGapNs = 10'000;
  std::vector<TraceLaunch> launches;
  launches.reserve(recorded.size());
  std::int64_t busy_until_ns = INT64_MIN;
  std::size_t done = 0;  // launches before this one are complete
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    TraceLaunch traced{0, std::max<std::int64_t>(launch.duration_ns, 0), false};
    if (i > 0) {
      const RecordedLaunch& before = recorded[i - 1];
      traced.gap_ns = std::max<std::int64_t>(launch.submitted_ns - before.submitted_ns, 0);
      const bool was_ahead = before.start_ns >= 0 && before.start_ns - before.submitted_ns > kAheadNs;
      if (was_ahead && before.submitted_ns < busy_until_ns && busy_until_ns <= launch.submitted_ns) {
        traced.synchronised = true;
        traced.gap_ns = launch.submitted_ns - busy_until_ns;
      }
      while (done < i && recorded[done].start_ns + recorded[done].duration_ns <= launch.submitted_ns) ++done;
      if (i - done >= kFullQueue) traced.gap_ns = std::min(traced.gap_ns, kShortGapNs);
    }
    if (launch.start_ns >= 0) {
      const std::int64_t end_ns = launch.start_ns + traced.duration_ns;
      traced.duration_ns = std::max<std::int64_t>(end_ns - std::max(launch.start_ns, busy_until_ns), 0);
      busy_until_ns = std::max(busy_until_ns, end_ns);
    }
    launches.push_back(traced);
  }
  return launches;
}

std::vector<std::size_t> request_ends(std::span<const RecordedLaunch> recorded, std::int64_t gap_ns) {
  std::vector<std::size_t> ends;
  std::int64_t busy_until_ns = INT64_MIN;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    const bool quiet = i > 0 && launch.submitted_ns - std::max(busy_until_ns, recorded[i - 1].submitted_ns) >= gap_ns;
    if (quiet) ends.push_back(i);
    const std::int64_t start_ns = launch.start_ns >= 0 ? launch.start_ns : launch.submitted_ns;
    busy_until_ns = std::max(busy_until_ns, start_ns + std::max<std::int64_t>(launch.duration_ns, 0));
  }
  if (!recorded.empty()) ends.push_back(recorded.size());
  return ends;
}

}  // namespace cudasched::simulate
