#include "telemetry/window.hpp"

#include <algorithm>

namespace cudasched::telemetry {
namespace {

constexpr std::size_t kMostWaiting = 262'144;  // records or correlations whose other half has not come

bool same_shape(const Pending& launch, const cupti::DeviceRecord& record) noexcept {
  if ((launch.row.is_graph != 0) != record.is_graph) return false;
  if (record.is_graph) return true;
  return std::equal(record.grid, record.grid + 3, launch.row.grid) &&
         std::equal(record.block, record.block + 3, launch.row.block);
}

}  // namespace

Pending* Window::find(std::uint64_t number) noexcept {
  return number < base_ || number - base_ >= pending_.size() ? nullptr : &pending_[number - base_];
}

Pending& Window::slot(std::uint64_t number) {
  while (number - base_ >= pending_.size()) pending_.emplace_back();
  return pending_[number - base_];
}

bool Window::add(Pending&& launch) {
  const std::uint64_t number = launch.row.launch;
  if (number < base_) return false;
  Pending& place = slot(number);
  place = std::move(launch);
  place.state = Pending::State::kLaunched;
  if (const auto early = early_.find(number); early != early_.end()) {
    join(place, early->second);
    early_.erase(early);
  }
  return true;
}

void Window::failed(std::uint64_t number) {
  if (number >= base_) slot(number).state = Pending::State::kGone;
}

void Window::correlate(const cupti::Correlation& correlation) {
  if (const auto found = waiting_.find(correlation.correlation); found != waiting_.end()) {
    const Waiting waiting = found->second;
    waiting_.erase(found);
    ++counts_.exact;
    Pending* const launch = find(correlation.launch);
    if (launch != nullptr && launch->state == Pending::State::kLaunched) {
      join(*launch, waiting);
    } else if (correlation.launch >= base_) {
      early_.insert_or_assign(correlation.launch, waiting);
    }
    return;
  }
  if (correlations_.size() >= kMostWaiting) correlations_.clear();
  correlations_.insert_or_assign(correlation.correlation, correlation.launch);
}

void Window::observe(const cupti::DeviceRecord& record, std::int64_t offset_ns) {
  if (waiting_.size() >= kMostWaiting) {
    counts_.foreign += waiting_.size();
    waiting_.clear();
  }
  waiting_.insert_or_assign(record.correlation, Waiting{record, offset_ns, 0});
  if (const auto found = correlations_.find(record.correlation); found != correlations_.end()) {
    const cupti::Correlation correlation{found->first, found->second};
    correlations_.erase(found);
    correlate(correlation);
  }
}

void Window::join(Pending& launch, const Waiting& waiting) {
  const cupti::DeviceRecord& record = waiting.record;
  launch.state = Pending::State::kUntimed;
  launch.device_graph = record.graph;
  if (!same_shape(launch, record)) {
    ++counts_.mismatched;
  } else if (record.start == 0 || record.end < record.start) {
    ++counts_.untimed;
  } else {
    launch.state = Pending::State::kTimed;
    launch.row.start_ns = static_cast<std::int64_t>(record.start) + waiting.offset_ns;
    launch.row.duration_ns = static_cast<std::int64_t>(record.end - record.start);
    launch.end_ns = launch.row.start_ns + launch.row.duration_ns;
  }
  std::uint64_t& newest = newest_timed_[launch.stream];
  newest = std::max(newest, launch.row.launch);
}

void Window::flushed(bool all) {
  std::vector<Waiting> old;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (all || ++it->second.age >= kOrderAge) {
      old.push_back(it->second);
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  if (counts_.exact > 0) {
    counts_.foreign += old.size();  // correlations do come: these are launches that the hook never saw
  } else {
    join_by_order(std::move(old));
  }
}

void Window::join_by_order(std::vector<Waiting> records) {
  std::sort(records.begin(), records.end(),
            [](const Waiting& a, const Waiting& b) { return a.record.correlation < b.record.correlation; });
  for (const Waiting& waiting : records) {
    const std::uint64_t key = std::uint64_t{waiting.record.device} << 32 | waiting.record.stream;
    const auto known = stream_of_.find(key);
    const auto found = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& launch) {
      return launch.state == Pending::State::kLaunched && same_shape(launch, waiting.record) &&
             (waiting.record.is_graph || launch.name_hash == 0 || launch.name_hash == waiting.record.name_hash) &&
             (known == stream_of_.end() || known->second == launch.stream);
    });
    if (found == pending_.end()) {
      ++counts_.foreign;
      continue;
    }
    stream_of_.emplace(key, found->stream);
    ++counts_.by_order;
    join(*found, waiting);
  }
}

void Window::timed(std::uint64_t number, std::int64_t start_ns, std::int64_t duration_ns) {
  Pending* const launch = find(number);
  if (launch == nullptr || launch->state != Pending::State::kLaunched) return;
  launch->events = nullptr;
  if (duration_ns < 0) {
    launch->state = Pending::State::kUntimed;
    ++counts_.untimed;
    return;
  }
  launch->state = Pending::State::kTimed;
  launch->row.start_ns = start_ns;
  launch->row.duration_ns = duration_ns;
  launch->end_ns = start_ns + duration_ns;
}

bool Window::hopeless(const Pending& launch, std::int64_t now_ns) const noexcept {
  if (launch.state != Pending::State::kLaunched || launch.events != nullptr) return false;
  const auto newest = newest_timed_.find(launch.stream);
  return newest != newest_timed_.end() && newest->second > launch.row.launch &&
         now_ns - launch.row.submitted_ns > kPatienceNs;
}

// Of spans sorted by start, one overlaps an earlier one if it starts before the latest end so far; and then the one
// that ends there overlaps it.
void Window::mark_overlaps() {
  std::vector<Span> spans = taken_;
  for (Pending& launch : pending_) {
    if (launch.state == Pending::State::kTimed) {
      spans.push_back({launch.row.device, launch.row.start_ns, launch.end_ns, &launch});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.device != b.device ? a.device < b.device : a.start_ns < b.start_ns;
  });
  const Span* longest = nullptr;
  for (const Span& span : spans) {
    if (longest != nullptr && longest->device == span.device && span.start_ns < longest->end_ns) {
      if (span.launch != nullptr) span.launch->row.overlapped = 1;
      if (longest->launch != nullptr) longest->launch->row.overlapped = 1;
    }
    if (longest == nullptr || longest->device != span.device || span.end_ns > longest->end_ns) longest = &span;
  }
}

std::vector<Pending> Window::take(std::int64_t now_ns, bool all) {
  const std::size_t crowd = pending_.size() > kMostPending ? pending_.size() - kMostPending : 0;
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    Pending& launch = pending_[i];
    if (!launch.open()) continue;
    if (!all && i >= crowd && !hopeless(launch, now_ns)) break;
    // An awaited one was begun and did not come back: it has no row.
    const bool awaited = launch.state == Pending::State::kAwaited;
    launch.state = awaited ? Pending::State::kGone : Pending::State::kUntimed;
    if (!awaited) ++counts_.untimed;
  }
  mark_overlaps();
  std::int64_t settled_until = INT64_MAX;  // no launch that is still open was submitted before
  std::int64_t submitted = INT64_MIN;
  for (const Pending& launch : pending_) {
    if (launch.open()) {
      settled_until = launch.state == Pending::State::kAwaited ? submitted : launch.row.submitted_ns;
      break;
    }
    if (launch.state != Pending::State::kGone) submitted = launch.row.submitted_ns;
  }
  std::vector<Pending> taken;
  while (!pending_.empty()) {
    Pending& launch = pending_.front();
    if (launch.open()) break;
    const bool crowded = pending_.size() > kMostPending;
    if (launch.state == Pending::State::kTimed && !all && !crowded && settled_until != INT64_MAX &&
        launch.end_ns + kClockSlackNs > settled_until) {
      break;
    }
    if (launch.state == Pending::State::kTimed) {
      taken_.push_back({launch.row.device, launch.row.start_ns, launch.end_ns, nullptr});
    }
    if (launch.state != Pending::State::kGone) taken.push_back(std::move(launch));
    pending_.pop_front();
    ++base_;
  }
  std::erase_if(early_, [this](const auto& timed) { return timed.first < base_; });  // of launches that were dropped
  // A launch that ended before the first pending one was submitted can overlap no launch to come.
  const bool known = !pending_.empty() && pending_.front().state != Pending::State::kAwaited;
  const std::int64_t since =
      std::max(known ? pending_.front().row.submitted_ns : submitted, kClockSlackNs) - kClockSlackNs;
  std::erase_if(taken_, [since](const Span& span) { return span.end_ns < since; });
  return taken;
}

}  // namespace cudasched::telemetry
