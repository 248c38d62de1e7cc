// Cheap estimates of how long launches take, for while no latency client is on the device. The bound of the work in
// flight (kMostUngatedNs, admission.hpp) need not be exact then, and a prediction for each launch would cost too much.
// By function and geometry alone, in a table with one place a key; the first launch of a key asks the predictor.
// Completions put an estimate right: a marker says within which times its segment ended.
//
// An estimate is proven once launches of the key were within kWrongBy times of it, above and below, twice, kSettleNs
// apart. Until then an estimate counts at least kUnprovenNs. So few launches of a kernel that takes a thousand times
// longer than predicted are in flight before the first one tells. Where launches together have taken kWrongBy times as
// long as estimated for kSettleNs, all estimates have to be proven anew (doubt).
//
// A launch that another process interrupted takes longer for once. So launches or segments have to take kWrongBy times
// as long for kSettleNs, with none as estimated between them. Else an estimate rises at once. An estimate falls by half
// in kSettleNs at most. A device that was stopped for a while, as a guest's is, seems to complete a backlog in a
// moment.
//
// Pure: no clock, no driver, no allocation. Not thread-safe: the caller holds a lock. 112 KiB.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/hash.hpp"

namespace cudasched::schedule {

class Estimates {
 public:
  static constexpr std::size_t kPlaces = 2'048;
  static constexpr std::int64_t kUnprovenNs = 1'000'000;
  static constexpr std::int64_t kWrongBy = 4;
  static constexpr std::int64_t kSettleNs = 5'000'000;
  static constexpr std::int64_t kFinestNs = 10'000;  // completions do not time shorter launches exactly

  // Never 0.
  static std::uint64_t key_of(const void* function, const unsigned (&grid)[3], const unsigned (&block)[3]) noexcept {
    const std::uint64_t geometry = mix(std::uint64_t{grid[0]} << 32 | grid[1], std::uint64_t{grid[2]} << 32 | block[0]);
    const std::uint64_t threads = std::uint64_t{block[1]} << 32 | block[2];
    const std::uint64_t key = mix(reinterpret_cast<std::uintptr_t>(function) ^ geometry, threads ^ kSeed);
    return key != 0 ? key : 1;
  }

  struct Found {
    std::int64_t duration_ns = 0;
    bool known = false;   // else ask the predictor and note() it
    bool proven = false;  // else it wants a marker of its own, and observe() when that is complete
    bool is_collective = false;
    std::int64_t likely_ns = 0;  // the estimate, proven or not
  };

  Found find(std::uint64_t key) const noexcept {
    const Place& place = places_[key % kPlaces];
    if (place.key != key) return {};
    const bool proven = place.proven == epoch_;
    return {proven ? place.duration_ns : std::max(place.duration_ns, kUnprovenNs), true, proven, place.is_collective,
            place.duration_ns};
  }

  void note(std::uint64_t key, std::int64_t duration_ns, bool is_collective = false) noexcept {
    places_[key % kPlaces] = {
        .key = key, .duration_ns = std::max<std::int64_t>(duration_ns, 0), .is_collective = is_collective};
  }

  // The completion time of later observations.
  void look(std::int64_t now_ns) noexcept { now_ns_ = now_ns; }

  // A launch of the key took between these times.
  void observe(std::uint64_t key, std::int64_t least_ns, std::int64_t most_ns) noexcept {
    Place& place = places_[key % kPlaces];
    if (place.key != key || least_ns > most_ns) return;
    const std::int64_t told_ns = std::clamp(place.duration_ns, least_ns, most_ns);
    if (!believed(place.wrong_since_ns, kWrongBy * place.duration_ns, least_ns, most_ns)) return;
    if (told_ns > place.duration_ns) {
      place.duration_ns = told_ns;
      place.supported_ns = 0;
    } else if (told_ns < place.duration_ns && (place.lowered_ns == 0 || now_ns_ - place.lowered_ns >= kSettleNs)) {
      place.duration_ns = std::max(told_ns, place.duration_ns / 2);
      place.lowered_ns = now_ns_;
    }
    if (most_ns > kWrongBy * place.duration_ns) return;
    if (place.duration_ns > kWrongBy * std::max(most_ns, kFinestNs)) return;
    if (place.supported_ns <= doubted_ns_) {
      place.supported_ns = now_ns_;
    } else if (now_ns_ - place.supported_ns >= kSettleNs) {
      place.proven = epoch_;
    }
  }

  // Launches that were estimated to take `estimated_ns` together took between these times.
  void observe_together(std::int64_t estimated_ns, std::int64_t least_ns, std::int64_t most_ns) noexcept {
    const std::int64_t limit_ns = kWrongBy * estimated_ns;
    if (!believed(wrong_since_ns_, limit_ns, least_ns, most_ns) || least_ns <= limit_ns) return;
    ++epoch_;
    doubted_ns_ = now_ns_;
  }

  // The predictor's answers may have changed.
  void clear() noexcept { places_.fill({}); }

 private:
  static constexpr std::uint64_t kSeed = 0x9e37'79b9'7f4a'7c15ULL;

  // Is a time between these within the limit, or has it been beyond the limit for long enough?
  bool believed(std::int64_t& wrong_since_ns, std::int64_t limit_ns, std::int64_t least_ns,
                std::int64_t most_ns) const noexcept {
    if (least_ns <= limit_ns) {
      if (most_ns <= limit_ns) wrong_since_ns = 0;
      return true;
    }
    if (wrong_since_ns == 0) wrong_since_ns = now_ns_;
    if (now_ns_ - wrong_since_ns < kSettleNs) return false;
    wrong_since_ns = 0;
    return true;
  }

  struct Place {
    std::uint64_t key = 0;  // 0: free
    std::int64_t duration_ns = 0;
    std::uint64_t proven = 0;         // in which epoch; 0: in none
    std::int64_t lowered_ns = 0;      // when; 0: never
    std::int64_t supported_ns = 0;    // since when launches support it; 0: none has
    std::int64_t wrong_since_ns = 0;  // since when they take much longer; 0: they do not
    bool is_collective = false;
  };

  std::uint64_t epoch_ = 1;
  std::int64_t now_ns_ = 1;
  std::int64_t doubted_ns_ = 0;
  std::int64_t wrong_since_ns_ = 0;  // of launches together; 0: the last ones were not
  std::array<Place, kPlaces> places_{};
};

}  // namespace cudasched::schedule
