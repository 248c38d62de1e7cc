// The measured times of kernels' first launches against the trees' estimates, by library.
//
// The trees may be off by the same factor for all kernels of a library that they were not trained on. But kernels of
// one library are often wrong in both directions, and then a mean over them makes the next kernel's first launch worse.
// So a library's mean is shrunk by its own evidence (James and Stein, 1961): by 1 - variance / (n mean^2), not below 0.
// n counts kernels, each with its first launch alone. A library with fewer than kLeast kernels has no correction.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace cudasched::predict {

inline constexpr std::uint8_t kNoLibrary = 0xff;

struct Library {
  static constexpr std::uint32_t kLeast = 3;
  static constexpr std::uint32_t kMostCount = 64;  // that the mean remembers

  std::uint32_t name = 0;  // NameTraits::library; 0: free
  std::uint32_t count = 0;
  float mean = 0;      // of log(measured / base)
  float variance = 0;  // about the mean

  void add(float log_ratio) noexcept {
    count = std::min(count + 1, kMostCount);
    const float step = 1 / static_cast<float>(count);
    const float before = log_ratio - mean;
    mean += step * before;
    variance += step * (before * (log_ratio - mean) - variance);
  }

  // The correction of the next kernel's first launch.
  float shrunk() const noexcept {
    if (count < kLeast || mean == 0) return 0;
    const float unbiased = variance * static_cast<float>(count) / static_cast<float>(count - 1);
    return mean * std::max(0.0F, 1 - unbiased / (static_cast<float>(count) * mean * mean));
  }
};

class Libraries {
 public:
  static constexpr std::size_t kMost = 64;

  // The library of that name, made if there is room; kNoLibrary: there is none.
  std::uint8_t find(std::uint32_t name) noexcept {
    for (std::size_t probe = 0; probe < kMost; ++probe) {
      Library& library = all_[(name + probe) % kMost];
      if (library.name == 0) library.name = name;
      if (library.name == name) return static_cast<std::uint8_t>((name + probe) % kMost);
    }
    return kNoLibrary;
  }

  Library* at(std::uint8_t index) noexcept { return index < kMost ? &all_[index] : nullptr; }
  float shrunk(std::uint8_t index) const noexcept { return index < kMost ? all_[index].shrunk() : 0; }
  const std::array<Library, kMost>& all() const noexcept { return all_; }

 private:
  std::array<Library, kMost> all_{};
};

}  // namespace cudasched::predict
