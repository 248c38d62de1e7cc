#include "schedule/in_flight.hpp"

#include <algorithm>

namespace cudasched::schedule {

int InFlight::submit(std::uint64_t stream_id, std::int64_t predicted_ns, std::int64_t now_ns) noexcept {
  int chosen = kNone;
  for (int i = 0; i < kStreams; ++i) {
    const Stream& stream = streams_[static_cast<std::size_t>(i)];
    if (stream.first != kNone && stream.id == stream_id) {
      chosen = i;
      break;
    }
    if (stream.first == kNone && chosen == kNone) chosen = i;
  }
  if (chosen == kNone || count_ == kEntries) return kNone;
  int entry = 0;
  while (entries_[static_cast<std::size_t>(entry)].stream != kNone) ++entry;

  entries_[static_cast<std::size_t>(entry)] = {std::max<std::int64_t>(predicted_ns, 0), chosen, kNone};
  Stream& stream = streams_[static_cast<std::size_t>(chosen)];
  if (stream.first == kNone) {
    stream = {.id = stream_id, .first_started_ns = now_ns, .first = entry, .last = entry};
  } else {
    entries_[static_cast<std::size_t>(stream.last)].next = entry;
    stream.last = entry;
  }
  stream.queued_ns += entries_[static_cast<std::size_t>(entry)].predicted_ns;
  ++count_;
  return entry;
}

void InFlight::unlink_first(Stream& stream) noexcept {
  Entry& first = entries_[static_cast<std::size_t>(stream.first)];
  stream.queued_ns -= first.predicted_ns;
  stream.first = first.next;
  stream.restarts = 0;
  if (stream.first == kNone) stream.last = kNone;
  first = Entry{};
  --count_;
}

// Of its first entry.
std::int64_t InFlight::end_ns(const Stream& stream, std::int64_t running_ns, std::int64_t now_ns) const noexcept {
  const std::int64_t started_ns = std::min(stream.first_started_ns, now_ns);
  const std::int64_t predicted_ns = entries_[static_cast<std::size_t>(stream.first)].predicted_ns;
  return std::clamp(started_ns + predicted_ns, std::clamp(running_ns, started_ns, now_ns), now_ns);
}

void InFlight::complete(int entry, std::int64_t running_ns, std::int64_t now_ns) noexcept {
  if (entry < 0 || entry >= kEntries || entries_[static_cast<std::size_t>(entry)].stream == kNone) return;
  Stream& stream = streams_[static_cast<std::size_t>(entries_[static_cast<std::size_t>(entry)].stream)];
  bool last_one = false;
  do {
    last_one = stream.first == entry;
    stream.first_started_ns = end_ns(stream, running_ns, now_ns);
    unlink_first(stream);
  } while (!last_one);
}

void InFlight::withdraw(int entry, std::int64_t now_ns) noexcept {
  if (entry < 0 || entry >= kEntries || entries_[static_cast<std::size_t>(entry)].stream == kNone) return;
  Stream& stream = streams_[static_cast<std::size_t>(entries_[static_cast<std::size_t>(entry)].stream)];
  if (stream.first == entry) {
    unlink_first(stream);
    stream.first_started_ns = now_ns;
    return;
  }
  int before = stream.first;
  while (entries_[static_cast<std::size_t>(before)].next != entry)
    before = entries_[static_cast<std::size_t>(before)].next;
  Entry& gone = entries_[static_cast<std::size_t>(entry)];
  entries_[static_cast<std::size_t>(before)].next = gone.next;
  if (stream.last == entry) stream.last = before;
  stream.queued_ns -= gone.predicted_ns;
  gone = Entry{};
  --count_;
}

void InFlight::restart(std::int64_t now_ns) noexcept {
  for (Stream& stream : streams_) {
    if (stream.first == kNone) continue;
    stream.first_started_ns = now_ns;
    stream.restarts = std::min(stream.restarts + 1, kMostRestarts);
  }
}

bool InFlight::straggles(const Stream& stream, std::int64_t now_ns) const noexcept {
  const std::int64_t predicted_ns = entries_[static_cast<std::size_t>(stream.first)].predicted_ns;
  const std::int64_t late_ns = now_ns - stream.first_started_ns - predicted_ns;
  return stream.restarts == kMostRestarts || late_ns > std::max(straggler_ns_, predicted_ns / kWrongBy);
}

std::int64_t InFlight::next_end_ns(std::int64_t now_ns) const noexcept {
  std::int64_t next_ns = kNothingNs;
  for (const Stream& stream : streams_) {
    if (stream.first == kNone || straggles(stream, now_ns)) continue;
    const std::int64_t end_ns = stream.first_started_ns + entries_[static_cast<std::size_t>(stream.first)].predicted_ns;
    next_ns = std::min(next_ns, std::max<std::int64_t>(end_ns - now_ns, 0));
  }
  return next_ns;
}

std::int64_t InFlight::remaining_ns(std::int64_t now_ns) const noexcept {
  std::int64_t total = 0;
  for (const Stream& stream : streams_) {
    if (stream.first == kNone || straggles(stream, now_ns)) continue;
    const std::int64_t first_ns = entries_[static_cast<std::size_t>(stream.first)].predicted_ns;
    const std::int64_t running_ns = now_ns - stream.first_started_ns;
    total += std::clamp<std::int64_t>(first_ns - running_ns, 0, first_ns) + stream.queued_ns - first_ns;
  }
  return total;
}

}  // namespace cudasched::schedule
