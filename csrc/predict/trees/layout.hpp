// The memory layouts of the walks: the slots of a row, perfect heaps of floats, and byte lanes with their bins.
//
// Built once from a Model; read by the walks, never changed.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "predict/trees/model.hpp"

namespace cudasched::predict::trees {

inline constexpr int kMaxHeapDepth = 8;
inline constexpr std::size_t kMaxHeapBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxSlots = 128;       // of the byte walks
inline constexpr std::size_t kMaxThresholds = 255;  // of a feature, for the byte walks
inline constexpr int kLanes = 64;

// The order of a tree in perfect heaps of one depth: the node at each place, with leaves pushed down to the last level.
// `place` counts from the root: the left child of i is 2i + 1, the right one 2i + 2.
struct HeapNode {
  const Node* split = nullptr;  // null below a leaf
  float leaf = 0;               // where split is null
};
std::vector<HeapNode> heap_of(const Tree& tree, int depth);

// The (feature, side of missing values) pairs that the model's splits use.
class Slots {
 public:
  struct Slot {
    std::uint32_t feature = 0;
    bool missing_left = false;
  };

  explicit Slots(const Model& model);

  std::size_t size() const noexcept { return slots_.size(); }
  const Slot& operator[](std::size_t index) const noexcept { return slots_[index]; }
  std::uint32_t of(const Node& split) const noexcept {
    return index_[2 * split.feature + (split.default_left ? 1 : 0)];
  }

 private:
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> index_;
};

// Integers in the order of floats, with the two zeros as one. Finite values lie above 0 and below the largest integer.
constexpr std::uint32_t order_key(float value) noexcept {
  constexpr std::uint32_t kSign = 0x8000'0000U;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (bits == kSign) return kSign;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// Perfect heaps, padded to whole groups of trees: the children of place i are 2i and 2i + 1, the root is at 1. A row
// goes right iff its key is above `below`, the threshold's key less one. Small, so that 100 trees stay in the first
// cache.
struct KeyHeaps {
  static constexpr std::size_t kGroup = 8;

  static constexpr std::size_t kMaxSlots = 256;

  explicit KeyHeaps(const Model& model);

  int depth;
  std::size_t trees;
  float base_score;
  Slots slots;
  std::vector<std::uint32_t> below;  // 2^depth places a tree, tree after tree; the first is not used
  std::vector<std::uint8_t> slot;    // alike
  std::vector<float> leaves;         // 2^depth a tree, from left to right
};

// Trees in lanes of bytes. A block is 64 trees. Of a level, node i has 64 slots, then 64 thresholds, one a tree; bit k
// of i is the turn taken at level k, 1 for right. A row goes right iff bin > threshold.
struct ByteLanes {
  // A feature's thresholds in ascending order, in 16 runs of 16, with the last of each run in front; NaN where there
  // are none. bin = how many are <= the value, found in two comparisons of 16.
  struct alignas(64) Bins {
    std::array<float, 16> pivots;
    std::array<float, 256> thresholds;
  };

  struct Feature {
    std::uint32_t feature = 0;
    std::uint8_t missing_left_slot = 0;  // kMaxSlots where there is none: a place that is never read
    std::uint8_t missing_right_slot = 0;
  };

  struct alignas(64) Lane64 {
    std::array<std::uint8_t, kLanes> bytes;
  };

  // Where a row's bytes are put: the slots, and the place that is never read.
  struct alignas(64) Row {
    std::array<std::uint8_t, kMaxSlots + 64> bytes;
  };

  explicit ByteLanes(const Model& model);

  // Why the model cannot have this layout; nothing if it can.
  static std::optional<std::string> obstacle(const Model& model);

  const std::uint8_t* level(std::size_t block, int level) const noexcept {
    return lanes[block * 2 * ((std::size_t{1} << depth) - 1) + 2 * ((std::size_t{1} << level) - 1)].bytes.data();
  }

  int depth;
  std::size_t trees;
  std::size_t blocks;
  std::size_t slots;
  float base_score;
  std::vector<Bins> bins;         // one a feature in use
  std::vector<Feature> features;  // alike
  std::vector<Lane64> lanes;      // block after block
  std::vector<float> leaves;      // a tree's 2^depth, tree after tree, by its turns
};

// Why the model cannot have perfect heaps; nothing if it can.
std::optional<std::string> heap_obstacle(const Model& model);

// Adds the leaves where the trees' turns lead, one after the other as XGBoost does. `leaves` has 2^kDepth a tree.
template <int kDepth>
[[gnu::always_inline]] inline float add_leaves(float sum, const float* leaves, const std::uint8_t* turns,
                                               std::size_t count) noexcept {
  constexpr std::size_t kUnrolled = 8;
  std::size_t tree = 0;
  for (; tree + kUnrolled <= count; tree += kUnrolled) {
#pragma GCC unroll 8
    for (std::size_t i = tree; i < tree + kUnrolled; ++i) sum += leaves[(i << kDepth) + turns[i]];
  }
#pragma GCC unroll 8
  for (; tree < count; ++tree) sum += leaves[(tree << kDepth) + turns[tree]];
  return sum;
}

}  // namespace cudasched::predict::trees
