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
  Position* place = streams_.add(stream);
  if (place == nullptr) {
    streams_.sweep([this](Position known) { return known <= passed_; });
    place = streams_.add(stream);
  }
  if (place == nullptr) {
    streams_left_out_ = position;
    return;
  }
  *place = position;
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

void Order::event_destroyed(std::uint64_t event, Position position) noexcept {
  if (Event* place = event_at(event, position)) *place = {position, 0};
}

Position Order::of_stream(std::uint64_t stream, StreamKind kind) const noexcept {
  if (kind == StreamKind::kLegacy) return last_blocking_;
  const Position* known = kind == StreamKind::kPerThread ? nullptr : streams_.find(stream);
  Position position = std::max(known != nullptr ? *known : 0, streams_left_out_);
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

void Order::forget_streams_and_events() noexcept {
  streams_.clear();
  events_.clear();
  // Other contexts' may still be queued.
  streams_left_out_ = end_;
  events_left_out_ = end_;
}

}  // namespace cudasched::queue
