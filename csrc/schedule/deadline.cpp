#include "schedule/deadline.hpp"

#include <algorithm>

namespace cudasched::schedule {

bool more_urgent(const Entrant& one, const Entrant& other) noexcept {
  if (one.priority != other.priority) return one.priority > other.priority;
  if (one.deadline_ns != other.deadline_ns) {
    return other.deadline_ns == 0 || (one.deadline_ns != 0 && one.deadline_ns < other.deadline_ns);
  }
  return one.slot < other.slot;
}

Decision earliest_deadline_first(const EntryView& view) noexcept {
  if (view.waited_ns >= view.max_wait_ns) return {Answer::kSubmit, 0};
  const bool waits = std::any_of(view.others.begin(), view.others.end(),
                                 [&](const Entrant& other) { return more_urgent(other, view.self); });
  return waits ? Decision{Answer::kWaitForLatency, 0} : Decision{Answer::kSubmit, 0};
}

}  // namespace cudasched::schedule
