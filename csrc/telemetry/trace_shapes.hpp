// The shapes of kernels' launches that a trace has: each is kept once, and a record has its number.
//
// number_of() is on the launch path, while something is traced: a hash of 20 bytes and, of a shape that is known, one
// comparison. It takes no lock, allocates nothing and never waits. The thread that writes the trace reads a shape by
// the number that it has from a record.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/hash.hpp"
#include "predict/launch.hpp"

namespace cudasched::telemetry {

// Dimensions are as narrow as the largest that the driver accepts.
struct TraceShape {
  std::uint32_t grid_x = 0;
  std::uint16_t grid_y = 0;
  std::uint16_t grid_z = 0;
  std::uint16_t block_x = 0;
  std::uint16_t block_y = 0;
  std::uint8_t block_z = 0;
  std::uint8_t cluster[3] = {0, 0, 0};
  std::uint32_t dynamic_shared_bytes = 0;

  TraceShape() noexcept = default;
  explicit TraceShape(const predict::Launch& launch) noexcept
      : grid_x(launch.grid[0]),
        grid_y(static_cast<std::uint16_t>(launch.grid[1])),
        grid_z(static_cast<std::uint16_t>(launch.grid[2])),
        block_x(static_cast<std::uint16_t>(launch.block[0])),
        block_y(static_cast<std::uint16_t>(launch.block[1])),
        block_z(static_cast<std::uint8_t>(launch.block[2])),
        cluster{static_cast<std::uint8_t>(launch.cluster[0]), static_cast<std::uint8_t>(launch.cluster[1]),
                static_cast<std::uint8_t>(launch.cluster[2])},
        dynamic_shared_bytes(launch.dynamic_shared_bytes) {}

  bool operator==(const TraceShape&) const noexcept = default;
};
static_assert(sizeof(TraceShape) == 20 && std::has_unique_object_representations_v<TraceShape>);

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
    std::atomic<std::uint32_t> state{kFree};
    TraceShape shape;  // as it is from kWritten on
  };
  static_assert(sizeof(Place) == 24);

  static std::size_t hash_of(const TraceShape& shape) noexcept {
    std::array<std::uint64_t, 2> words{};
    std::memcpy(words.data(), &shape, sizeof words);
    return mix(mix(words[0], words[1]), shape.dynamic_shared_bytes) >> 13;
  }

  std::array<Place, kPlaces> places_{};
};

}  // namespace cudasched::telemetry
