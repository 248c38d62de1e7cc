// A map from driver handles to a few words, of fixed size: open addressing, no allocation after construction. The
// caller holds a lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/hash.hpp"

namespace cudasched::queue {

template <typename Value, std::size_t kPlaces>
class FixedMap {
  static_assert((kPlaces & (kPlaces - 1)) == 0);

 public:
  static constexpr std::size_t kCapacity = kPlaces / 4 * 3;

  Value* find(std::uint64_t handle) noexcept {
    for (std::size_t at = home(handle);; at = next(at)) {
      if (places_[at].handle == kFree) return nullptr;
      if (places_[at].handle == handle) return &places_[at].value;
    }
  }
  const Value* find(std::uint64_t handle) const noexcept { return const_cast<FixedMap*>(this)->find(handle); }

  // The handle's value, new if there was none; null when the table is full, and for handle 0.
  Value* add(std::uint64_t handle) noexcept {
    if (Value* known = find(handle)) return known;
    if (size_ == kCapacity || handle == kFree) return nullptr;
    std::size_t at = home(handle);
    while (places_[at].handle != kFree) at = next(at);
    ++size_;
    places_[at] = {handle, Value{}};
    return &places_[at].value;
  }

  void remove(std::uint64_t handle) noexcept {
    if (find(handle) == nullptr) return;
    std::size_t hole = home(handle);
    while (places_[hole].handle != handle) hole = next(hole);
    --size_;
    // Entries that the removed one displaced move up, so that a search may end at a free place.
    for (std::size_t at = next(hole); places_[at].handle != kFree; at = next(at)) {
      const std::size_t wanted = home(places_[at].handle);
      if (((at - wanted) & kMask) >= ((at - hole) & kMask)) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole] = {};
  }

  // Removes the entries for which `done(value)` is true.
  template <typename Done>
  void sweep(Done&& done) noexcept {
    for (std::size_t at = 0; at < kPlaces;) {
      if (places_[at].handle != kFree && done(places_[at].value)) {
        remove(places_[at].handle);  // another may have moved here
      } else {
        ++at;
      }
    }
  }

  void clear() noexcept {
    places_.fill({});
    size_ = 0;
  }
  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::uint64_t kFree = 0;
  static constexpr std::size_t kMask = kPlaces - 1;

  struct Place {
    std::uint64_t handle = kFree;
    Value value{};
  };

  static std::size_t home(std::uint64_t handle) noexcept {
    return static_cast<std::size_t>(mix(0, handle) >> 20) & kMask;
  }
  static std::size_t next(std::size_t at) noexcept { return (at + 1) & kMask; }

  std::array<Place, kPlaces> places_{};
  std::size_t size_ = 0;
};

}  // namespace cudasched::queue
