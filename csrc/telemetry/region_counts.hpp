// How long the requests of latency regions take, and how many keep their target, by the regions' names. Names are texts
// of the program's, so there are few places for them: once all are taken, further names count in the last place.
//
// index_of() is called when a region is entered: it takes a lock for a name that is not known yet. add() is called when
// a request is over, and takes none. Neither is on the launch path.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>

#include "base/histogram.hpp"
#include "base/spin_lock.hpp"
#include "cudasched/counts.h"

namespace cudasched::telemetry {

class RegionCounts {
 public:
  static constexpr int kMost = CUDASCHED_REGIONS;
  static constexpr std::size_t kNameBytes = CUDASCHED_REGION_NAME_BYTES;
  static constexpr std::string_view kOthers = "(others)";

  // The place of a name, which has fewer than kNameBytes bytes. "" is 0.
  int index_of(std::string_view name) noexcept {
    if (name.empty()) return 0;
    const int known = find(name, named_.load(std::memory_order_acquire));
    if (known > 0) return known;
    const std::scoped_lock lock(lock_);
    const int named = named_.load(std::memory_order_relaxed);
    if (const int meanwhile = find(name, named); meanwhile > 0) return meanwhile;
    if (named == kMost - 1) return kMost - 1;
    Place& place = places_[static_cast<std::size_t>(named)];
    std::copy_n(name.data(), std::min(name.size(), kNameBytes - 1), place.name.data());
    named_.store(named + 1, std::memory_order_release);
    return named;
  }

  // `slo_ns` 0: the request had no target.
  void add(int index, std::int64_t slo_ns, std::int64_t took_ns, bool met) noexcept {
    Place& place = places_[static_cast<std::size_t>(index)];
    place.times.add(took_ns);
    if (slo_ns <= 0) return;
    place.slo_ns.store(static_cast<std::uint64_t>(slo_ns), std::memory_order_relaxed);
    (met ? place.met : place.missed).fetch_add(1, std::memory_order_relaxed);
  }

  void read(cudasched_counts& to) const noexcept {
    const int named = named_.load(std::memory_order_acquire);
    for (int i = 0; i < kMost; ++i) {
      const Place& place = places_[static_cast<std::size_t>(i)];
      cudasched_region_counts& region = to.regions[i];
      const std::string_view name = i == kMost - 1 ? kOthers : std::string_view(place.name.data());
      if (i < named || i == kMost - 1) std::copy_n(name.data(), name.size(), region.name);
      region.slo_ns = place.slo_ns.load(std::memory_order_relaxed);
      region.met = place.met.load(std::memory_order_relaxed);
      region.missed = place.missed.load(std::memory_order_relaxed);
      place.times.read(region.times);
    }
  }

  // In a forked child, whose only thread has regions of these names open: the names stay.
  void reset() noexcept {
    lock_.unlock();
    for (Place& place : places_) {
      place.slo_ns.store(0, std::memory_order_relaxed);
      place.met.store(0, std::memory_order_relaxed);
      place.missed.store(0, std::memory_order_relaxed);
      place.times.reset();
    }
  }

 private:
  struct Place {
    std::array<char, kNameBytes> name{};
    std::atomic<std::uint64_t> slo_ns{0};
    std::atomic<std::uint64_t> met{0};
    std::atomic<std::uint64_t> missed{0};
    Histogram times;
  };

  int find(std::string_view name, int named) const noexcept {
    for (int i = 1; i < named; ++i) {
      if (name == places_[static_cast<std::size_t>(i)].name.data()) return i;
    }
    return 0;
  }

  SpinLock lock_;
  std::atomic<int> named_{1};  // the last place has no name of its own
  std::array<Place, kMost> places_{};
};

}  // namespace cudasched::telemetry
