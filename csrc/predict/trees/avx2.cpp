#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "predict/trees/layout.hpp"
#include "predict/trees/walks.hpp"

// For these functions alone, so that the library runs on processors without them.
#define CUDASCHED_AVX2 __attribute__((target("avx2,popcnt")))
#define CUDASCHED_AVX2_INLINE CUDASCHED_AVX2 __attribute__((always_inline)) inline

namespace cudasched::predict::trees {
namespace {

constexpr std::size_t kHalf = kLanes / 2;
constexpr std::size_t kAtOnce = 256;  // trees walked before their leaves are added
constexpr std::size_t kTable = 16;    // slots that one byte shuffle looks up

CUDASCHED_AVX2_INLINE __m256i load(const std::uint8_t* bytes) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
}

// As in avx512.cpp, for 32 lanes.
template <int kLevel>
CUDASCHED_AVX2_INLINE __m256i choose(const std::uint8_t* nodes, const __m256i* turned_left) {
  constexpr std::size_t kStride = 2 * kLanes;
  if constexpr (kLevel == 0) {
    return load(nodes);
  } else {
    const __m256i left = choose<kLevel - 1>(nodes, turned_left);
    const __m256i right = choose<kLevel - 1>(nodes + (kStride << (kLevel - 1)), turned_left);
    return _mm256_blendv_epi8(right, left, turned_left[kLevel - 1]);
  }
}

// The slots' bytes, 16 slots at a time: a shuffle gives 0 where the index has its highest bit set, and a saturating
// addition sets it in every index but those of the 16.
CUDASCHED_AVX2_INLINE __m256i look_up(const std::uint8_t* row, std::size_t slots, __m256i slot) {
  __m256i found = _mm256_setzero_si256();
  const __m256i outside = _mm256_set1_epi8(0x70);
  for (std::size_t first = 0; first < slots; first += kTable) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(row + first)));
    const __m256i index = _mm256_sub_epi8(slot, _mm256_set1_epi8(static_cast<char>(first)));
    found = _mm256_or_si256(found, _mm256_shuffle_epi8(table, _mm256_adds_epu8(index, outside)));
  }
  return found;
}

template <int kDepth, int kLevel = 0>
CUDASCHED_AVX2_INLINE __m256i walk(const ByteLanes& trees, std::size_t block, std::size_t half, const std::uint8_t* row,
                                   __m256i* turned_left, __m256i leaf) {
  if constexpr (kLevel == kDepth) {
    return leaf;
  } else {
    const std::uint8_t* nodes = trees.level(block, kLevel) + half;
    const __m256i slot = choose<kLevel>(nodes, turned_left);
    const __m256i threshold = choose<kLevel>(nodes + kLanes, turned_left);
    const __m256i above = _mm256_subs_epu8(look_up(row, trees.slots, slot), threshold);
    turned_left[kLevel] = _mm256_cmpeq_epi8(above, _mm256_setzero_si256());
    const __m256i turn = _mm256_andnot_si256(turned_left[kLevel], _mm256_set1_epi8(static_cast<char>(1 << kLevel)));
    return walk<kDepth, kLevel + 1>(trees, block, half, row, turned_left, _mm256_or_si256(leaf, turn));
  }
}

CUDASCHED_AVX2_INLINE std::size_t count_not_above(const float* thresholds, __m256 value) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_load_ps(thresholds), value, _CMP_LE_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_load_ps(thresholds + 8), value, _CMP_LE_OQ));
  return static_cast<std::size_t>(_mm_popcnt_u32(static_cast<unsigned>(high << 8 | low)));
}

template <int kDepth>
class Avx2Walk final : public Evaluator {
 public:
  explicit Avx2Walk(const Model& model) : Evaluator(model, Isa::kAvx2), trees_(model) {}

  CUDASCHED_AVX2 float margin(const float* row) const noexcept override {
    ByteLanes::Row bytes;
    const std::size_t features = trees_.features.size();
    for (std::size_t i = 0; i < features; ++i) {
      const ByteLanes::Feature& feature = trees_.features[i];
      const ByteLanes::Bins& bins = trees_.bins[i];
      const float value = row[feature.feature];
      const __m256 values = _mm256_set1_ps(value);
      const std::size_t run = count_not_above(bins.pivots.data(), values);
      const std::size_t within = count_not_above(bins.thresholds.data() + 16 * run, values);
      const auto bin = static_cast<std::uint8_t>(16 * run + within);
      bytes.bytes[feature.missing_left_slot] = bin;
      bytes.bytes[feature.missing_right_slot] = value != value ? 255 : bin;
    }

    float sum = trees_.base_score;
    for (std::size_t first = 0; first < trees_.trees; first += kAtOnce) {
      alignas(32) std::uint8_t turns[kAtOnce];
      const std::size_t count = std::min(kAtOnce, trees_.trees - first);
      for (std::size_t at = 0; at < count; at += kHalf) {
        __m256i turned_left[kDepth];
        const __m256i leaf = walk<kDepth>(trees_, (first + at) / kLanes, at % kLanes, bytes.bytes.data(), turned_left,
                                          _mm256_setzero_si256());
        _mm256_store_si256(reinterpret_cast<__m256i*>(turns + at), leaf);
      }
      sum = add_leaves<kDepth>(sum, &trees_.leaves[first << kDepth], turns, count);
    }
    return sum;
  }

 private:
  ByteLanes trees_;
};

}  // namespace

std::unique_ptr<const Evaluator> make_avx2(const Model& model) { return make_of_depth<Avx2Walk>(model); }

}  // namespace cudasched::predict::trees

#endif
