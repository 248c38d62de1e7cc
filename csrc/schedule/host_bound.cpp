#include "schedule/host_bound.hpp"

namespace cudasched::schedule {

void SegmentReader::begin(std::int64_t now) noexcept {
  now_ns_ = now;
  requests_ = {};
  requests_.known = true;
  requests_.left_host_ns = requests_.late_ns = Snapshot::kLongAgoNs;
  requests_.late_share = 1;
}

void SegmentReader::add(int client, const Segments::SegmentNews& told) noexcept {
  constexpr std::int64_t kFarLonger = 4;
  constexpr std::int64_t kLongestSkewNs = 1'000'000;   // the clock may have been looked at before the segment began
  constexpr std::int64_t kMostNs = 3'600'000'000'000;  // a longer one is a damaged word
  const std::optional<TimeLeft> left = unpack(told.left);
  std::int64_t passed_ns = 0;
  const bool sound = !__builtin_sub_overflow(now_ns_, told.since_ns, &passed_ns) && left && told.late_ns > 0 &&
                     told.median_ns > 0 && told.median_ns <= kMostNs && told.late_ns <= told.median_ns &&
                     passed_ns > -kLongestSkewNs && passed_ns <= kFarLonger * told.median_ns;
  if (!sound) {
    requests_.known = false;
    return;
  }
  Last& last = last_[static_cast<std::size_t>(client)];
  if (last.segment != told.segment || last.left != told.left) last = {told.segment, told.left, now_ns_};
  requests_.left_gpu_ns += left->gpu_ns;
  requests_.left_host_ns = std::min(requests_.left_host_ns, left->host_ns - (now_ns_ - last.since_ns));
  requests_.late_ns = std::min(requests_.late_ns, told.late_ns);
  const double share = static_cast<double>(told.late_ns) / static_cast<double>(told.median_ns);
  requests_.late_share = std::min(requests_.late_share, share);
}

void LatencyClock::look(const View& view) noexcept {
  constexpr std::int64_t kLongNs = 1'000'000'000;  // longer, or backwards: another client's words, or damaged ones
  const Progress& now = view.latency;
  const std::int64_t passed_ns = view.now_ns - before_.now_ns;
  const std::int64_t came_ns = now.submitted_ns - before_.latency.submitted_ns;
  const std::int64_t fed_ns = view.best_effort_submitted_ns - before_.best_effort_submitted_ns;
  const bool follows = looked_ && passed_ns >= 0 && passed_ns < kLongNs && came_ns >= 0 && came_ns < kLongNs;
  if (!follows) {
    least_ns_ = likely_ns_ = 0;
    done_ns_ = now.done_ns;
  } else {
    const std::int64_t best_effort_ns =
        std::clamp<std::int64_t>(before_.best_effort_ns + fed_ns - view.best_effort_ns, 0, passed_ns);
    likely_ns_ += came_ns - (passed_ns - best_effort_ns);
    const bool calm = before_.best_effort_in_flight == 0 && view.best_effort_launches == before_.best_effort_launches;
    if (calm) done_ns_ += std::clamp<std::int64_t>(now.submitted_ns - done_ns_, 0, passed_ns);
    // A mark was asked for since the last look: from then on, the GPU may have worked on nothing else.
    const bool asked = now.not_done_ns != before_.latency.not_done_ns;
    least_ns_ = (asked ? now.submitted_ns - now.not_done_ns : least_ns_ + came_ns) - passed_ns;
  }
  done_ns_ = std::max(done_ns_, now.done_ns);
  most_ns_ = std::clamp<std::int64_t>(now.submitted_ns - done_ns_, 0, kLongNs);
  least_ns_ = std::clamp<std::int64_t>(least_ns_, 0, most_ns_);
  likely_ns_ = std::clamp(likely_ns_, least_ns_, most_ns_);
  before_ = view;
  looked_ = true;
}

HostBound GapView::look(const Own& own, bool sliced) noexcept {
  LatencyClock::View& view = clock_view_;
  view.best_effort_ns = own.in_flight_ns;
  view.best_effort_submitted_ns = own.submitted_ns;
  view.best_effort_launches = own.submitted;
  view.best_effort_in_flight = std::max<std::uint64_t>(own.in_flight, own.in_flight_ns > 0 ? 1 : 0);
  clock_.look(view);
  if (!known()) return {};
  HostBound seen = reader_.requests();
  seen.gpu_ns = clock_.likely_ns();
  seen.gpu_most_ns = clock_.most_ns();
  seen.sliced = sliced;
  if (sliced) seen.closed = gate_.closed(segments_, seen, own.in_flight_ns + seen.gpu_ns + own.longest_ns);
  return seen;
}

}  // namespace cudasched::schedule
