#include "queue/order.hpp"

#include <algorithm>

namespace cudasched::queue {

void Order::stream_used(std::uint64_t stream, StreamKind kind, Position position) noexcept {
  end_ = position;
  if (kind != StreamKind::kNonBlocking) last_blocking_ = position;
  if (kind == StreamKind::kLegacy) {
    last_legacy_ = position;
    return;
  }
  Stream* place = streams_.add(stream);
  if (place == nullptr) {
    streams_.sweep([this](const Stream& known) { return known.last <= passed_; });
    place = streams_.add(stream);
  }
  if (place == nullptr) {
    streams_left_out_ = position;
    return;
  }
  *place = {position, kind};
}

Order::Event* Order::event_at(std::uint64_t event, Position position) noexcept {
  end_ = std::max(end_, position);
  Event* place = events_.add(event);
  if (place == nullptr) {
    events_.sweep([this](const Event& known) { return known.last <= passed_; });
    place = events_.add(event);
  }
  if (place == nullptr) events_left_out_ = position;
  return place;
}

void Order::event_recorded(std::uint64_t event, Position position) noexcept {
  if (Event* place = event_at(event, position)) *place = {position, position};
}

void Order::event_awaited(std::uint64_t event, Position position) noexcept {
  if (Event* place = event_at(event, position)) place->last = position;
}

Position Order::of_stream(std::uint64_t stream, StreamKind kind) const noexcept {
  if (kind == StreamKind::kLegacy) return last_blocking_;
  const Stream* known = kind == StreamKind::kPerThread ? nullptr : streams_.find(stream);
  Position position = std::max(known != nullptr ? known->last : 0, streams_left_out_);
  if (kind != StreamKind::kNonBlocking) position = std::max(position, last_legacy_);
  return position;
}

Position Order::of_event(std::uint64_t event) const noexcept {
  const Event* known = events_.find(event);
  return std::max(known != nullptr ? known->last : 0, events_left_out_);
}

Position Order::record_of(std::uint64_t event) const noexcept {
  const Event* known = events_.find(event);
  return std::max(known != nullptr ? known->record : 0, events_left_out_);
}

Order::Mark* Order::mark_at(std::uint64_t event) noexcept {
  Mark* mark = marks_.add(event);
  if (mark == nullptr) marks_left_out_ = true;
  return mark;
}

void Order::recorded_in_capture(std::uint64_t event, bool capturing) noexcept {
  if (capturing) {
    if (Mark* mark = mark_at(event)) mark->captured = true;
  } else if (Mark* mark = marks_.find(event)) {
    mark->captured = false;
    if (!mark->shared) marks_.remove(event);
  }
}

void Order::shared_between_processes(std::uint64_t event) noexcept {
  if (Mark* mark = mark_at(event)) mark->shared = true;
}

bool Order::may_defer_record(std::uint64_t event) const noexcept {
  const Mark* mark = marks_.find(event);
  return mark != nullptr ? !mark->shared : !marks_left_out_;
}

bool Order::may_defer_wait(std::uint64_t event) const noexcept {
  return marks_.find(event) == nullptr && !marks_left_out_;
}

bool Order::find_kind(std::uint64_t stream, StreamKind& kind) const noexcept {
  const Stream* known = streams_.find(stream);
  if (known == nullptr) return false;
  kind = known->kind;
  return true;
}

void Order::remember_kind(std::uint64_t stream, StreamKind kind) noexcept {
  if (Stream* place = streams_.add(stream)) {
    // Its operations may have been left out, and the table's answer must not be earlier for knowing it now.
    place->kind = kind;
  }
}

void Order::forget_event(std::uint64_t event) noexcept {
  events_.remove(event);
  marks_.remove(event);
}

void Order::forget_streams_and_events() noexcept {
  streams_.clear();
  events_.clear();
  // Other contexts' may still be queued. Marks stay: one too many only keeps a call from being deferred.
  streams_left_out_ = end_;
  events_left_out_ = end_;
}

}  // namespace cudasched::queue
