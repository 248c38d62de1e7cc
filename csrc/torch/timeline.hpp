// The memory held over time, by class and by region, in bounded memory. Each point is the maximum of each amount in an
// interval. Where there are too many points, each two become one and the interval doubles. Pure: the caller says the
// time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cudasched::torch_memory {

class Timeline {
 public:
  static constexpr std::size_t kPoints = 2048;
  static constexpr std::size_t kClasses = 3;
  static constexpr std::size_t kRegions = 16;  // of those beyond, the last one has the sum
  static constexpr std::int64_t kFirstIntervalNs = 1'000'000;

  struct Point {
    std::int64_t begin_ns = 0;
    std::uint64_t reserved = 0;
    std::array<std::uint64_t, kClasses> by_class{};
    std::array<std::uint64_t, kRegions> by_region{};

    void raise(const Point& other) {
      reserved = std::max(reserved, other.reserved);
      for (std::size_t i = 0; i < kClasses; ++i) by_class[i] = std::max(by_class[i], other.by_class[i]);
      for (std::size_t i = 0; i < kRegions; ++i) by_region[i] = std::max(by_region[i], other.by_region[i]);
    }
  };

  static constexpr std::size_t place_of(std::uint32_t region) noexcept {
    return std::min<std::size_t>(region, kRegions - 1);
  }

  // The memory held from here on. A time before the last point's counts as that point's.
  void add(const Point& now) {
    if (points_.empty()) {
      points_.push_back(now);
      return;
    }
    if (now.begin_ns < points_.back().begin_ns + interval_ns_) {
      points_.back().raise(now);
      return;
    }
    if (points_.size() == kPoints) halve();
    points_.push_back(now);
  }

  const std::vector<Point>& points() const noexcept { return points_; }
  std::int64_t interval_ns() const noexcept { return interval_ns_; }

 private:
  void halve() {
    interval_ns_ *= 2;
    for (std::size_t i = 0; i < kPoints / 2; ++i) {
      points_[i] = points_[2 * i];
      points_[i].raise(points_[2 * i + 1]);
    }
    points_.resize(kPoints / 2);
  }

  std::int64_t interval_ns_ = kFirstIntervalNs;
  std::vector<Point> points_;
};

}  // namespace cudasched::torch_memory
