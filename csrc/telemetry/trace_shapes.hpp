// The shapes of kernels' launches that a trace has: each is kept once, and a record has its number.
//
// number_of() is on the launch path, while something is traced: a hash of three words and, of a shape that is known,
// one comparison. It takes no lock, allocates nothing and never waits. The thread that writes the trace reads a shape
// by the number that it has from a record.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/hash.hpp"
#include "predict/launch.hpp"

namespace cudasched::telemetry {

// In three words, so that it is hashed and compared in registers. Dimensions are as narrow as the largest that the
// driver accepts.
struct TraceShape {
  std::uint64_t grid = 0;   // x: 32 bits, y and z: 16
  std::uint64_t block = 0;  // x and y: 16 bits, z: 8; above, the cluster: 8 each
  std::uint32_t dynamic_shared_bytes = 0;

  TraceShape() noexcept = default;
  explicit TraceShape(const predict::Launch& launch) noexcept
      : grid(launch.grid[0] | std::uint64_t{launch.grid[1] & 0xFFFFU} << 32 | std::uint64_t{launch.grid[2]} << 48),
        block((launch.block[0] & 0xFFFFU) | std::uint64_t{launch.block[1] & 0xFFFFU} << 16 |
              std::uint64_t{launch.block[2] & 0xFFU} << 32 | std::uint64_t{launch.cluster[0] & 0xFFU} << 40 |
              std::uint64_t{launch.cluster[1] & 0xFFU} << 48 | std::uint64_t{launch.cluster[2]} << 56),
        dynamic_shared_bytes(launch.dynamic_shared_bytes) {}

  // Grid, block and cluster, x, y and z of each; then the bytes.
  std::array<std::uint32_t, 10> numbers() const noexcept {
    const auto part = [](std::uint64_t word, int from, int bits) {
      return static_cast<std::uint32_t>(word >> from & ((std::uint64_t{1} << bits) - 1));
    };
    return {part(grid, 0, 32),  part(grid, 32, 16), part(grid, 48, 16), part(block, 0, 16), part(block, 16, 16),
            part(block, 32, 8), part(block, 40, 8), part(block, 48, 8), part(block, 56, 8), dynamic_shared_bytes};
  }
  bool operator==(const TraceShape&) const noexcept = default;
};

class TraceShapes {
 public:
  static constexpr std::size_t kPlaces = 1 << 13;
  static constexpr std::size_t kProbes = 8;

  // From 1 on; 0: there is no place for it. A shape that two threads bring at once may have two numbers.
  std::uint16_t number_of(const TraceShape& shape) noexcept {
    const std::size_t begin = hash_of(shape);
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      const std::size_t index = (begin + probe) % kPlaces;
      Place& place = places_[index];
      std::uint32_t state = place.state.load(std::memory_order_acquire);
      if (state == kFree && place.state.compare_exchange_strong(state, kTaken, std::memory_order_acquire)) {
        place.shape = shape;
        place.state.store(kWritten, std::memory_order_release);
        return static_cast<std::uint16_t>(index + 1);
      }
      if (state == kWritten && place.shape == shape) return static_cast<std::uint16_t>(index + 1);
    }
    return 0;
  }

  // Of a number that number_of() has given.
  const TraceShape& shape(std::uint16_t number) const noexcept { return places_[number - std::size_t{1}].shape; }

 private:
  enum : std::uint32_t { kFree, kTaken, kWritten };
  struct Place {
    TraceShape shape;  // as it is from kWritten on
    std::atomic<std::uint32_t> state{kFree};
  };
  static_assert(sizeof(Place) == 32);

  static std::size_t hash_of(const TraceShape& shape) noexcept {
    // Independent products, as in Predictor's key.
    const std::uint64_t sum = mix(1, shape.grid) + mix(2, shape.block) + mix(3, shape.dynamic_shared_bytes);
    return sum >> 32 ^ sum;
  }

  std::array<Place, kPlaces> places_{};
};

}  // namespace cudasched::telemetry
