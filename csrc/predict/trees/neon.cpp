#if defined(__aarch64__)
#include <arm_neon.h>

#include <algorithm>

#include "predict/trees/layout.hpp"
#include "predict/trees/walks.hpp"

namespace cudasched::predict::trees {
namespace {

constexpr std::size_t kQuarter = kLanes / 4;
constexpr std::size_t kAtOnce = 256;  // trees walked before their leaves are added
constexpr std::size_t kTable = 64;    // slots that one look-up takes

// As in avx512.cpp, for 16 lanes.
template <int kLevel>
inline uint8x16_t choose(const std::uint8_t* nodes, const uint8x16_t* turned_left) {
  constexpr std::size_t kStride = 2 * kLanes;
  if constexpr (kLevel == 0) {
    return vld1q_u8(nodes);
  } else {
    const uint8x16_t left = choose<kLevel - 1>(nodes, turned_left);
    const uint8x16_t right = choose<kLevel - 1>(nodes + (kStride << (kLevel - 1)), turned_left);
    return vbslq_u8(turned_left[kLevel - 1], left, right);
  }
}

// The slots' bytes, 64 slots at a time: an index outside of the table gives 0.
inline uint8x16_t look_up(const std::uint8_t* row, std::size_t slots, uint8x16_t slot) {
  uint8x16_t found = vdupq_n_u8(0);
  for (std::size_t first = 0; first < slots; first += kTable) {
    const uint8x16x4_t table = vld1q_u8_x4(row + first);
    found = vorrq_u8(found, vqtbl4q_u8(table, vsubq_u8(slot, vdupq_n_u8(static_cast<std::uint8_t>(first)))));
  }
  return found;
}

template <int kDepth, int kLevel = 0>
inline uint8x16_t walk(const ByteLanes& trees, std::size_t block, std::size_t quarter, const std::uint8_t* row,
                       uint8x16_t* turned_left, uint8x16_t leaf) {
  if constexpr (kLevel == kDepth) {
    return leaf;
  } else {
    const std::uint8_t* nodes = trees.level(block, kLevel) + quarter;
    const uint8x16_t slot = choose<kLevel>(nodes, turned_left);
    const uint8x16_t threshold = choose<kLevel>(nodes + kLanes, turned_left);
    turned_left[kLevel] = vcleq_u8(look_up(row, trees.slots, slot), threshold);
    const uint8x16_t turn = vbicq_u8(vdupq_n_u8(static_cast<std::uint8_t>(1 << kLevel)), turned_left[kLevel]);
    return walk<kDepth, kLevel + 1>(trees, block, quarter, row, turned_left, vorrq_u8(leaf, turn));
  }
}

inline std::size_t count_not_above(const float* thresholds, float value) {
  const float32x4_t values = vdupq_n_f32(value);
  uint32x4_t count = vdupq_n_u32(0);
  for (std::size_t four = 0; four < 16; four += 4) {
    count = vsubq_u32(count, vcleq_f32(vld1q_f32(thresholds + four), values));
  }
  return vaddvq_u32(count);
}

template <int kDepth>
class NeonWalk final : public Evaluator {
 public:
  explicit NeonWalk(const Model& model) : Evaluator(model, Isa::kNeon), trees_(model) {}

  float margin(const float* row) const noexcept override {
    ByteLanes::Row bytes;
    const std::size_t features = trees_.features.size();
    for (std::size_t i = 0; i < features; ++i) {
      const ByteLanes::Feature& feature = trees_.features[i];
      const ByteLanes::Bins& bins = trees_.bins[i];
      const float value = row[feature.feature];
      const std::size_t run = count_not_above(bins.pivots.data(), value);
      const std::size_t within = count_not_above(bins.thresholds.data() + 16 * run, value);
      const auto bin = static_cast<std::uint8_t>(16 * run + within);
      bytes.bytes[feature.missing_left_slot] = bin;
      bytes.bytes[feature.missing_right_slot] = value != value ? 255 : bin;
    }

    float sum = trees_.base_score;
    for (std::size_t first = 0; first < trees_.trees; first += kAtOnce) {
      alignas(16) std::uint8_t turns[kAtOnce];
      const std::size_t count = std::min(kAtOnce, trees_.trees - first);
      for (std::size_t at = 0; at < count; at += kQuarter) {
        uint8x16_t turned_left[kDepth];
        vst1q_u8(turns + at, walk<kDepth>(trees_, (first + at) / kLanes, at % kLanes, bytes.bytes.data(), turned_left,
                                          vdupq_n_u8(0)));
      }
      sum = add_leaves<kDepth>(sum, &trees_.leaves[first << kDepth], turns, count);
    }
    return sum;
  }

 private:
  ByteLanes trees_;
};

}  // namespace

std::unique_ptr<const Evaluator> make_neon(const Model& model) { return make_of_depth<NeonWalk>(model); }

}  // namespace cudasched::predict::trees

#endif
