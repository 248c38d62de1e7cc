#include "runtime/stream_marks.hpp"

#include <algorithm>
#include <mutex>

#include "base/hash.hpp"

namespace cudasched::runtime {

const StreamMarks::Slot* StreamMarks::find_slot(std::uint64_t key) const noexcept {
  if (key == 0) return nullptr;
  const std::size_t home = static_cast<std::size_t>(mix(0, key)) % kSlots;
  for (std::size_t step = 0; step < kProbes; ++step) {
    const Slot& slot = slots_[(home + step) % kSlots];
    const std::uint64_t held = slot.key.load(std::memory_order_acquire);
    if (held == key) return &slot;
    if (held == 0) return nullptr;
  }
  return nullptr;
}

StreamMarks::Slot* StreamMarks::claim_slot(std::uint64_t key) noexcept {
  if (const Slot* const known = find_slot(key)) return const_cast<Slot*>(known);
  if (key == 0) return nullptr;
  const std::size_t home = static_cast<std::size_t>(mix(0, key)) % kSlots;
  for (std::size_t step = 0; step < kProbes; ++step) {
    Slot& slot = slots_[(home + step) % kSlots];
    std::uint64_t held = slot.key.load(std::memory_order_relaxed);
    if (held != 0 && held != kRemoved) continue;
    // Another thread may take the place for another key, or for this one.
    if (slot.key.compare_exchange_strong(held, key, std::memory_order_acq_rel) || held == key) return &slot;
  }
  // Places of streams whose marks were swept are had again.
  for (std::size_t step = 0; step < kProbes; ++step) {
    Slot& slot = slots_[(home + step) % kSlots];
    std::uint64_t held = slot.key.load(std::memory_order_relaxed);
    if (slot.origin.load(std::memory_order_acquire) != kNoOrigin) continue;
    if (slot.key.compare_exchange_strong(held, key, std::memory_order_acq_rel)) {
      epoch_.fetch_add(1, std::memory_order_relaxed);  // a thread that was about to mark the old one does so elsewhere
      return &slot;
    }
  }
  return nullptr;
}

Origin StreamMarks::find(std::uint64_t key) const noexcept {
  const Slot* const slot = find_slot(key);
  if (slot == nullptr) return kNoOrigin;
  const Origin origin = slot->origin.load(std::memory_order_acquire);
  return origin == slot->contested.load(std::memory_order_relaxed) ? kNoOrigin : origin;
}

bool StreamMarks::marked(std::uint64_t key) const noexcept {
  const Slot* const slot = find_slot(key);
  return slot != nullptr && slot->origin.load(std::memory_order_acquire) != kNoOrigin;
}

void StreamMarks::set(Slot& slot, CUstream stream, CUcontext context, Origin origin, bool inherited) noexcept {
  slot.stream.store(stream, std::memory_order_relaxed);
  slot.context.store(context, std::memory_order_relaxed);
  slot.inherited.store(inherited, std::memory_order_relaxed);
  if (slot.origin.exchange(origin, std::memory_order_acq_rel) == kNoOrigin) live_.fetch_add(1);
}

void StreamMarks::release(Slot& slot) noexcept {
  if (slot.origin.exchange(kNoOrigin, std::memory_order_acq_rel) != kNoOrigin) live_.fetch_sub(1);
}

void StreamMarks::mark(std::uint64_t key, CUstream stream, CUcontext context, Origin origin) noexcept {
  if (key == 0) return;
  if (Slot* const slot = claim_slot(key)) {
    set(*slot, stream, context, origin, /*inherited=*/false);
  } else {
    overflows_.fetch_add(1, std::memory_order_relaxed);
  }
}

bool StreamMarks::contest(std::uint64_t key) noexcept {
  Slot* const slot = const_cast<Slot*>(find_slot(key));
  if (slot == nullptr) return false;
  const Origin origin = slot->origin.load(std::memory_order_acquire);
  if (origin == kNoOrigin || slot->contested.load(std::memory_order_relaxed) == origin) return false;
  return slot->contested.exchange(origin, std::memory_order_acq_rel) != origin;
}

void StreamMarks::inherit(std::uint64_t key, CUstream stream, CUcontext context, Origin origin) noexcept {
  if (key == 0) return;
  Slot* slot = const_cast<Slot*>(find_slot(key));
  const bool marked = slot != nullptr && slot->origin.load(std::memory_order_acquire) != kNoOrigin;
  if (marked && !slot->inherited.load(std::memory_order_relaxed)) return;  // a region's own
  if (origin == kNoOrigin) {
    if (marked) release(*slot);
    return;
  }
  if (slot == nullptr) slot = claim_slot(key);
  if (slot != nullptr) {
    set(*slot, stream, context, origin, /*inherited=*/true);
  } else {
    overflows_.fetch_add(1, std::memory_order_relaxed);
  }
}

void StreamMarks::entered(Origin origin) noexcept {
  const std::scoped_lock lock(lock_);
  const auto free = std::find(open_.begin(), open_.end(), kNoOrigin);
  if (free != open_.end()) {
    *free = origin;
  } else {
    ++unlisted_;
  }
}

void StreamMarks::left(Origin origin) noexcept {
  const std::scoped_lock lock(lock_);
  const auto place = std::find(open_.begin(), open_.end(), origin);
  if (place != open_.end()) {
    *place = kNoOrigin;
  } else {
    --unlisted_;
  }
}

bool StreamMarks::is_open(Origin origin) noexcept {
  if (origin == kBoundOrigin) return any_bound_.load(std::memory_order_relaxed);
  const std::scoped_lock lock(lock_);
  return unlisted_ > 0 || std::find(open_.begin(), open_.end(), origin) != open_.end();
}

bool StreamMarks::needs_sweep() noexcept {
  if (!in_use()) return false;
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    const Origin origin = slot.origin.load(std::memory_order_acquire);
    return origin != kNoOrigin && !is_open(origin);
  });
}

void StreamMarks::forget(std::uint64_t key) noexcept {
  Slot* const slot = const_cast<Slot*>(find_slot(key));
  if (slot == nullptr) return;
  release(*slot);
  slot->key.store(kRemoved, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_relaxed);
}

void StreamMarks::forget_context(CUcontext context) noexcept {
  for (Slot& slot : slots_) {
    const std::uint64_t key = slot.key.load(std::memory_order_relaxed);
    if (key == 0 || key == kRemoved) continue;
    if (context != nullptr && slot.context.load(std::memory_order_relaxed) != context) continue;
    release(slot);
    slot.key.store(kRemoved, std::memory_order_release);
  }
  epoch_.fetch_add(1, std::memory_order_relaxed);
}

void StreamMarks::reset() noexcept {
  for (Slot& slot : slots_) {
    slot.key.store(0, std::memory_order_relaxed);
    slot.origin.store(kNoOrigin, std::memory_order_relaxed);
    slot.contested.store(kNoOrigin, std::memory_order_relaxed);
  }
  live_.store(0);
  overflows_.store(0);
  epoch_.fetch_add(1);
  lock_.unlock();  // a thread that is not here may have held it
  open_.fill(kNoOrigin);
  unlisted_ = 0;
}

void EventOrigins::set(CUevent event, Origin origin) noexcept {
  const std::size_t home = static_cast<std::size_t>(mix(0, reinterpret_cast<std::uint64_t>(event))) % kSlots;
  Slot* place = nullptr;
  for (std::size_t step = 0; step < kProbes; ++step) {
    Slot& slot = slots_[(home + step) % kSlots];
    const CUevent held = slot.event.load(std::memory_order_acquire);
    if (held == event) return slot.origin.store(origin, std::memory_order_release);
    if (place == nullptr && (held == nullptr || slot.origin.load(std::memory_order_relaxed) == kNoOrigin))
      place = &slot;
  }
  if (origin == kNoOrigin) return;
  if (place == nullptr) place = &slots_[home];
  // Between the two stores the event of before would carry nothing.
  place->origin.store(kNoOrigin, std::memory_order_release);
  place->event.store(event, std::memory_order_release);
  place->origin.store(origin, std::memory_order_release);
}

Origin EventOrigins::find(CUevent event) const noexcept {
  const std::size_t home = static_cast<std::size_t>(mix(0, reinterpret_cast<std::uint64_t>(event))) % kSlots;
  for (std::size_t step = 0; step < kProbes; ++step) {
    const Slot& slot = slots_[(home + step) % kSlots];
    if (slot.event.load(std::memory_order_acquire) != event) continue;
    const Origin origin = slot.origin.load(std::memory_order_acquire);
    if (slot.event.load(std::memory_order_acquire) == event) return origin;
  }
  return kNoOrigin;
}

void EventOrigins::clear() noexcept {
  for (Slot& slot : slots_) slot.origin.store(kNoOrigin, std::memory_order_relaxed);
}

}  // namespace cudasched::runtime
