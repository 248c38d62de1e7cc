#include "schedule/ledger.hpp"

#include <algorithm>

namespace cudasched::schedule {
namespace {

constexpr std::uint64_t bit(int place) noexcept { return std::uint64_t{1} << place; }

}  // namespace

Ledger::Ledger() noexcept {
  // The first to be taken is marker 0.
  for (int i = 0; i < kMarkers; ++i) free_[static_cast<std::size_t>(i)] = static_cast<std::int16_t>(kMarkers - 1 - i);
  streams_[kShared].id = kNoStream - 1;
}

std::int64_t Ledger::tolerance_ns(std::int64_t predicted_ns) noexcept {
  return std::max(kToleranceNs, predicted_ns / kToleranceShare);
}

void Ledger::look(std::int64_t now_ns, Gpu gpu) noexcept {
  const std::int64_t passed_ns = now_ns_ != 0 ? std::max<std::int64_t>(now_ns - now_ns_, 0) : 0;
  now_ns_ = now_ns;
  own_before_ns_ = own_ns_;
  if ((gpu_ == Gpu::kShared || gpu_ == Gpu::kInGaps) && gpu != gpu_) {
    // The progress beside the latency work is not known: the first segments have their predicted time before them.
    for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
      streams_[static_cast<std::size_t>(__builtin_ctzll(streams))].started_ns = own_ns_;
    }
  }
  gpu_ = gpu;
  if (gpu == Gpu::kAnothers) return;
  own_ns_ += passed_ns;
  if (gpu == Gpu::kOwn) observed_ns_ += std::min(passed_ns, kMostGapNs);
}

// ---- streams and segments ------------------------------------------------------------------------------------------

const Ledger::Stream* Ledger::find(std::uint64_t stream) const noexcept {
  for (std::uint64_t streams = busy_ & ~bit(kShared); streams != 0; streams &= streams - 1) {
    const Stream& candidate = streams_[static_cast<std::size_t>(__builtin_ctzll(streams))];
    if (candidate.id == stream) return &candidate;
  }
  return nullptr;
}

int Ledger::place_of(std::uint64_t stream) noexcept {
  if (streams_[static_cast<std::size_t>(recent_)].id == stream && (busy_ & bit(recent_)) != 0) return recent_;
  if (const Stream* const known = find(stream)) return recent_ = static_cast<int>(known - streams_.data());
  const std::uint64_t free = ~busy_ & ~bit(kShared);
  if (free == 0) return kShared;
  recent_ = __builtin_ctzll(free);
  streams_[static_cast<std::size_t>(recent_)] = Stream{.id = stream};
  return recent_;
}

int Ledger::take_segment() noexcept {
  if (free_count_ == 0 && !merge_some()) return kNone;
  return free_[static_cast<std::size_t>(--free_count_)];
}

void Ledger::release(int segment) noexcept {
  at(segment) = Segment{};
  free_[static_cast<std::size_t>(free_count_++)] = static_cast<std::int16_t>(segment);
}

// Where every second marker of the stream that has the most can be done without. The first of a stream only where no
// other can: joined to a later one it might never be seen complete. Where launches come as fast as others end, it would
// go on to a later one again and again.
bool Ledger::merge_some() noexcept {
  for (const bool first_too : {false, true}) {
    for (std::uint64_t untried = busy_; untried != 0;) {
      int most = __builtin_ctzll(untried);
      for (std::uint64_t streams = untried; streams != 0; streams &= streams - 1) {
        const int place = __builtin_ctzll(streams);
        const auto segments = [&](int of) { return streams_[static_cast<std::size_t>(of)].segments; };
        if (segments(place) > segments(most)) most = place;
      }
      Stream& stream = streams_[static_cast<std::size_t>(most)];
      if ((most == kShared ? merge_shared() : merge(stream, first_too)) > 0) return true;
      untried &= ~bit(most);
    }
  }
  // More streams than markers: some are counted until another one's marker is complete.
  return (busy_ & bit(kShared)) != 0 && merge(streams_[kShared], /*first_too=*/true) > 0;
}

int Ledger::merge(Stream& stream, bool first_too) noexcept {
  int merged = 0;
  int before = first_too ? kNone : stream.first;
  int segment = before == kNone ? stream.first : at(before).next;
  while (segment != kNone) {
    const int next = at(segment).next;
    if (next == kNone) break;
    const bool joined = join(stream, before, segment, next);
    merged += joined ? 1 : 0;
    before = joined ? next : segment;
    segment = joined ? at(next).next : next;
  }
  return merged;
}

// With one of the same stream: no marker says anything of another's.
int Ledger::merge_shared() noexcept {
  Stream& stream = streams_[kShared];
  int merged = 0;
  int before = kNone;
  for (int segment = stream.first, next = kNone; segment != kNone; segment = next) {
    const std::uint64_t stream_id = at(segment).stream_id;
    next = at(segment).next;
    int into = next;
    while (into != kNone && at(into).stream_id != stream_id) into = at(into).next;
    if (into == kNone || !join(stream, before, segment, into)) {
      before = segment;
      continue;
    }
    if (before == kNone) begin_first(stream, own_ns_, own_ns_, own_ns_);
    ++merged;
  }
  return merged;
}

// A segment, which is behind `before`, becomes part of a later one, whose marker is behind both. False: it may not.
bool Ledger::join(Stream& stream, int before, int segment, int into) noexcept {
  const Segment gone = at(segment);
  Segment& kept = at(into);
  const bool kept_is_marked = kept.recorded || kept.pending > 0;
  const bool is_late = before == kNone && late_ns(stream) > 0;
  if (is_late || gone.pinned || gone.pending > 0 || kept.pinned || !kept_is_marked) return false;
  kept.predicted_ns += gone.predicted_ns;
  kept.launches += gone.launches;
  if (before == kNone) {
    stream.first = gone.next;
  } else {
    at(before).next = gone.next;
  }
  --stream.segments;
  release(segment);
  return true;
}

int Ledger::last_shared(std::uint64_t stream) const noexcept {
  int last = kNone;
  if ((busy_ & bit(kShared)) == 0) return last;
  for (int segment = streams_[kShared].first; segment != kNone; segment = at(segment).next) {
    if (at(segment).stream_id == stream && !at(segment).pinned) last = segment;
  }
  return last;
}

void Ledger::unlink(Stream& stream, int place, int segment) noexcept {
  const Segment gone = at(segment);
  if (stream.first == segment) {
    stream.first = gone.next;
    if (stream.first == kNone) stream.last = kNone;
  } else {
    int before = stream.first;
    while (at(before).next != segment) before = at(before).next;
    at(before).next = gone.next;
    if (stream.last == segment) stream.last = static_cast<std::int16_t>(before);
  }
  stream.queued_ns -= gone.predicted_ns;
  total_ns_ -= gone.predicted_ns;
  launches_ -= gone.launches;
  --stream.segments;
  release(segment);
  if (stream.first == kNone) busy_ &= ~bit(place);
}

void Ledger::begin_first(Stream& stream, std::int64_t from_ns, std::int64_t after_ns, std::int64_t before_ns) noexcept {
  stream.started_ns = from_ns;
  stream.started_after_ns = after_ns;
  stream.started_before_ns = before_ns;
  stream.started_observed_ns = observed_ns_ - std::min(own_ns_ - from_ns, kMostGapNs);
  stream.done_before_ns = done_ns_;
}

// ---- launches ------------------------------------------------------------------------------------------------------

Ledger::Entry Ledger::submit(std::uint64_t stream_id, std::int64_t predicted_ns, bool mark) noexcept {
  predicted_ns = std::max<std::int64_t>(predicted_ns, 0);
  const int place = place_of(stream_id);
  Stream& stream = streams_[static_cast<std::size_t>(place)];
  const bool is_open = stream.last != kNone && state(stream.last) == State::kOpen && place != kShared;
  int segment = is_open ? stream.last : take_segment();
  // Its marker moves behind this launch.
  if (segment == kNone && place == kShared) segment = last_shared(stream_id);
  if (segment == kNone) segment = stream.last;
  if (segment == kNone || at(segment).pinned) return {};
  Segment& joined = at(segment);
  if (joined.launches == 0) {
    joined.stream = static_cast<std::int16_t>(place);
    joined.stream_id = stream_id;
    if (stream.first == kNone) {
      stream.first = static_cast<std::int16_t>(segment);
      stream.queued_ns = 0;
      stream.segments = 0;
      busy_ |= bit(place);
      begin_first(stream, own_ns_, own_ns_, own_ns_);
    } else {
      at(stream.last).next = static_cast<std::int16_t>(segment);
    }
    stream.last = static_cast<std::int16_t>(segment);
    ++stream.segments;
  }
  joined.predicted_ns += predicted_ns;
  joined.recorded = false;
  ++joined.launches;
  stream.queued_ns += predicted_ns;
  total_ns_ += predicted_ns;
  ++launches_;
  const bool marks = mark || place == kShared || joined.launches >= kSeldom || joined.predicted_ns >= kLongSegmentNs;
  if (marks) ++joined.pending;
  return {segment, marks};
}

int Ledger::mark(std::uint64_t stream) noexcept {
  const Stream* const known = find(stream);
  if (known == nullptr || state(known->last) != State::kOpen) return kNone;
  ++at(known->last).pending;
  return known->last;
}

void Ledger::submitted(int segment, bool recorded) noexcept {
  if (segment < 0 || segment >= kMarkers || at(segment).pending == 0) return;
  Segment& of = at(segment);
  --of.pending;
  // Of two launches that were on their way at once, the marker is behind both when the last has recorded it.
  of.recorded = recorded;
}

void Ledger::withdraw(int segment, std::int64_t predicted_ns) noexcept {
  if (segment < 0 || segment >= kMarkers || at(segment).pending == 0) return;
  Segment& of = at(segment);
  const int place = of.stream;
  Stream& stream = streams_[static_cast<std::size_t>(place)];
  --of.pending;
  if (of.launches == 1) {
    const bool was_first = stream.first == segment;
    unlink(stream, place, segment);
    if (was_first && stream.first != kNone) begin_first(stream, own_ns_, own_ns_, own_ns_);
    return;
  }
  predicted_ns = std::clamp<std::int64_t>(predicted_ns, 0, of.predicted_ns);
  of.predicted_ns -= predicted_ns;
  --of.launches;
  stream.queued_ns -= predicted_ns;
  total_ns_ -= predicted_ns;
  --launches_;
}

Ledger::Completed Ledger::complete(int segment) noexcept {
  if (segment < 0 || segment >= kMarkers || at(segment).launches == 0) return {};
  const int place = at(segment).stream;
  if (place == kShared) return complete_shared(segment);
  Stream& stream = streams_[static_cast<std::size_t>(place)];
  Completed completed;
  completed.least_ns = std::max<std::int64_t>(own_before_ns_ - stream.started_before_ns, 0);
  completed.most_ns = std::max<std::int64_t>(own_ns_ - stream.started_after_ns, 0);
  bool last_one = false;
  do {
    last_one = stream.first == segment;
    const Segment& first = at(stream.first);
    completed.launches += first.launches;
    completed.predicted_ns += first.predicted_ns;
    // The segment ended between the two looks: within them, the prediction is believed.
    const std::int64_t started_ns = std::min(stream.started_ns, own_ns_);
    const std::int64_t end_ns =
        std::clamp(started_ns + first.predicted_ns, std::clamp(own_before_ns_, started_ns, own_ns_), own_ns_);
    done_ns_ += end_ns - started_ns;
    ++completions_;
    const std::int64_t after_ns = std::max(own_before_ns_, stream.started_after_ns);
    unlink(stream, place, stream.first);
    begin_first(stream, end_ns, after_ns, own_ns_);
  } while (!last_one);
  return completed;
}

// Segments of several streams in one queue: nothing is known of those before it, nor since when it ran.
Ledger::Completed Ledger::complete_shared(int segment) noexcept {
  Stream& stream = streams_[kShared];
  const Segment of = at(segment);
  const bool was_first = stream.first == segment;
  const std::int64_t started_ns = std::min(stream.started_ns, own_ns_);
  done_ns_ += std::min(of.predicted_ns, own_ns_ - started_ns);
  ++completions_;
  unlink(stream, kShared, segment);
  if (was_first) begin_first(stream, own_ns_, own_before_ns_, own_ns_);
  return {of.launches, of.predicted_ns, 0, own_ns_};
}

// ---- questions -----------------------------------------------------------------------------------------------------

Ledger::State Ledger::state(int segment) const noexcept {
  const Segment& of = at(segment);
  if (of.launches == 0) return State::kFree;
  if (of.pending > 0) return State::kPending;
  return of.recorded ? State::kMarked : State::kOpen;
}

std::uint64_t Ledger::stream(int segment) const noexcept {
  return streams_[static_cast<std::size_t>(at(segment).stream)].id;
}

std::int64_t Ledger::ran_ns(const Stream& stream) const noexcept {
  return observed_ns_ - stream.started_observed_ns - (done_ns_ - stream.done_before_ns);
}

std::int64_t Ledger::late_ns(const Stream& stream) const noexcept {
  const std::int64_t predicted_ns = at(stream.first).predicted_ns;
  const std::int64_t late_ns = ran_ns(stream) - predicted_ns;
  return late_ns > tolerance_ns(predicted_ns) ? late_ns : 0;
}

std::int64_t Ledger::late_ns(std::uint64_t stream) const noexcept {
  const Stream* const known = find(stream);
  return known != nullptr ? late_ns(*known) : 0;
}

std::int64_t Ledger::segment_late_ns(int segment) const noexcept {
  if (state(segment) == State::kFree) return 0;
  const Stream& stream = streams_[static_cast<std::size_t>(at(segment).stream)];
  return stream.first == segment ? late_ns(stream) : 0;
}

std::int64_t Ledger::segment_ran_ns(int segment) const noexcept {
  if (state(segment) == State::kFree) return 0;
  const Stream& stream = streams_[static_cast<std::size_t>(at(segment).stream)];
  return stream.first == segment ? std::max<std::int64_t>(ran_ns(stream), 0) : 0;
}

std::int64_t Ledger::first_left_ns(const Stream& stream) const noexcept {
  // As long again as it has run.
  if (late_ns(stream) > 0) return ran_ns(stream);
  const std::int64_t predicted_ns = at(stream.first).predicted_ns;
  return std::clamp<std::int64_t>(predicted_ns - (own_ns_ - stream.started_ns), 0, predicted_ns);
}

bool Ledger::waits_for_latency_work(const Stream& stream) const noexcept {
  const std::int64_t predicted_ns = at(stream.first).predicted_ns;
  return own_ns_ - stream.started_ns - predicted_ns > std::max(kSharedLateNs, predicted_ns / kToleranceShare);
}

std::int64_t Ledger::remaining_ns(std::uint64_t stream_id) const noexcept {
  std::int64_t total_ns = 0;
  for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
    const Stream& stream = streams_[static_cast<std::size_t>(__builtin_ctzll(streams))];
    if (stream.id != stream_id && late_ns(stream) > 0) continue;
    if (gpu_ == Gpu::kShared && waits_for_latency_work(stream)) continue;
    total_ns += first_left_ns(stream) + stream.queued_ns - at(stream.first).predicted_ns;
  }
  return total_ns;
}

bool Ledger::holds_others(std::uint64_t stream_id) const noexcept {
  for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
    if (streams_[static_cast<std::size_t>(__builtin_ctzll(streams))].id != stream_id) return true;
  }
  return false;
}

bool Ledger::any_late() const noexcept {
  for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
    if (late_ns(streams_[static_cast<std::size_t>(__builtin_ctzll(streams))]) > 0) return true;
  }
  return false;
}

std::int64_t Ledger::next_end_ns() const noexcept {
  std::int64_t next_ns = kNothingNs;
  for (std::uint64_t streams = busy_; streams != 0; streams &= streams - 1) {
    const Stream& stream = streams_[static_cast<std::size_t>(__builtin_ctzll(streams))];
    next_ns = std::min(next_ns, late_ns(stream) > 0 ? ran_ns(stream) / 8 : first_left_ns(stream));
  }
  return next_ns;
}

bool Ledger::has_run_out(int segment) const noexcept {
  const Stream& stream = streams_[static_cast<std::size_t>(at(segment).stream)];
  return stream.first == segment && own_ns_ - stream.started_ns >= at(segment).predicted_ns;
}

}  // namespace cudasched::schedule
