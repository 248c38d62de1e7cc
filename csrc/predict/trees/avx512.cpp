#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "predict/trees/layout.hpp"
#include "predict/trees/walks.hpp"

// For these functions alone, so that the library runs on processors without them.
#define CUDASCHED_AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi,popcnt")))
#define CUDASCHED_AVX512_INLINE CUDASCHED_AVX512 __attribute__((always_inline)) inline

namespace cudasched::predict::trees {
namespace {

// One node's 64 bytes out of 2^kLevel, for each lane by its turns. The latest turn is used last, so that the processor
// can do most of this before that turn is known.
template <int kLevel>
CUDASCHED_AVX512_INLINE __m512i choose(const std::uint8_t* nodes, const __mmask64* turned_right) {
  constexpr std::size_t kStride = 2 * kLanes;
  if constexpr (kLevel == 0) {
    return _mm512_load_si512(nodes);
  } else if constexpr (kLevel == 1) {
    return _mm512_mask_loadu_epi8(_mm512_load_si512(nodes), turned_right[0], nodes + kStride);
  } else {
    const __m512i left = choose<kLevel - 1>(nodes, turned_right);
    const __m512i right = choose<kLevel - 1>(nodes + (kStride << (kLevel - 1)), turned_right);
    return _mm512_mask_mov_epi8(left, turned_right[kLevel - 1], right);
  }
}

struct Table {
  __m512i low;
  __m512i high;
};

// A split of the last level, of a tree by itself.
struct LastSplit {
  std::uint8_t slot;
  std::uint8_t threshold;
};

// Where 64 trees' turns lead above the last level, to be looked up and added up.
struct Leaves {
  const float* values;      // 2^kDepth a tree
  const LastSplit* splits;  // 2^(kDepth - 1) a tree
  const std::uint8_t* row;  // a bin a slot
  alignas(64) std::uint8_t turns[kLanes];
};

// Takes the last turn of each tree and adds its leaf, one after the other as XGBoost does. The sum waits four cycles
// for each addition, in which the last turn costs nothing. Lanes would read all splits of the largest level.
template <int kDepth>
CUDASCHED_AVX512_INLINE float add_last(float sum, const Leaves& of, std::size_t first, std::size_t count) {
#pragma GCC unroll 8
  for (std::size_t tree = first; tree < first + count; ++tree) {
    const std::size_t turns = of.turns[tree];
    const LastSplit split = of.splits[(tree << (kDepth - 1)) + turns];
    const std::size_t last = of.row[split.slot] > split.threshold ? 1 : 0;
    sum += of.values[(tree << kDepth) + (last << (kDepth - 1)) + turns];
  }
  return sum;
}

// Walks a block and meanwhile, level by level, adds the leaves of the block before: the sum waits for one addition
// after the other, the walk for none of them.
template <int kDepth, bool kIsWide, bool kAdds, int kLevel = 0>
CUDASCHED_AVX512_INLINE __m512i walk(const ByteLanes& trees, std::size_t block, const Table& table,
                                     __mmask64* turned_right, __m512i turns, const Leaves& before, float& sum) {
  constexpr int kLevels = kDepth - 1;  // the last one is add_last()'s
  if constexpr (kLevel == kLevels) {
    return turns;
  } else {
    const std::uint8_t* nodes = trees.level(block, kLevel);
    const __m512i slot = choose<kLevel>(nodes, turned_right);
    const __m512i threshold = choose<kLevel>(nodes + kLanes, turned_right);
    // With a mask of ones, because GCC 12 warns of its own header's unmasked form.
    const __m512i bin = kIsWide ? _mm512_permutex2var_epi8(table.low, slot, table.high)
                                : _mm512_maskz_permutexvar_epi8(~__mmask64{0}, slot, table.low);
    turned_right[kLevel] = _mm512_cmpgt_epu8_mask(bin, threshold);
    turns = _mm512_mask_add_epi8(turns, turned_right[kLevel], turns, _mm512_set1_epi8(static_cast<char>(1 << kLevel)));
    if constexpr (kAdds) {
      constexpr std::size_t kFirst = kLanes * kLevel / kLevels;
      constexpr std::size_t kEnd = kLanes * (kLevel + 1) / kLevels;
      sum = add_last<kDepth>(sum, before, kFirst, kEnd - kFirst);
    }
    return walk<kDepth, kIsWide, kAdds, kLevel + 1>(trees, block, table, turned_right, turns, before, sum);
  }
}

template <int kDepth, bool kIsWide>
class Avx512Walk final : public Evaluator {
 public:
  explicit Avx512Walk(const Model& model) : Evaluator(model, Isa::kAvx512), trees_(model) {
    constexpr std::size_t kNodes = std::size_t{1} << (kDepth - 1);
    splits_.resize(trees_.blocks * kLanes * kNodes);
    for (std::size_t block = 0; block < trees_.blocks; ++block) {
      const std::uint8_t* nodes = trees_.level(block, kDepth - 1);
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        for (std::size_t node = 0; node < kNodes; ++node) {
          splits_[(block * kLanes + lane) * kNodes + node] = {nodes[2 * kLanes * node + lane],
                                                              nodes[2 * kLanes * node + kLanes + lane]};
        }
      }
    }
  }

  CUDASCHED_AVX512 float margin(const float* row) const noexcept override {
    ByteLanes::Row bytes;
    const std::size_t features = trees_.features.size();
    for (std::size_t i = 0; i < features; ++i) {
      const ByteLanes::Feature& feature = trees_.features[i];
      const ByteLanes::Bins& bins = trees_.bins[i];
      const __m512 value = _mm512_set1_ps(row[feature.feature]);
      const auto run = static_cast<std::size_t>(
          _mm_popcnt_u32(_mm512_cmp_ps_mask(_mm512_load_ps(bins.pivots.data()), value, _CMP_LE_OQ)));
      const auto within = static_cast<std::size_t>(
          _mm_popcnt_u32(_mm512_cmp_ps_mask(_mm512_load_ps(bins.thresholds.data() + 16 * run), value, _CMP_LE_OQ)));
      const auto missing = static_cast<std::uint8_t>(_mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q));
      const auto bin = static_cast<std::uint8_t>(16 * run + within);
      bytes.bytes[feature.missing_left_slot] = bin;
      bytes.bytes[feature.missing_right_slot] = bin | missing;
    }
    Table table{_mm512_load_si512(bytes.bytes.data()), __m512i{}};
    if constexpr (kIsWide) table.high = _mm512_load_si512(bytes.bytes.data() + 64);

    float sum = trees_.base_score;
    if (trees_.blocks == 0) return sum;
    Leaves leaves;
    leaves.values = trees_.leaves.data();
    leaves.splits = splits_.data();
    leaves.row = bytes.bytes.data();
    __mmask64 turned_right[kDepth];
    __m512i turns = walk<kDepth, kIsWide, false>(trees_, 0, table, turned_right, _mm512_setzero_si512(), leaves, sum);
    _mm512_store_si512(leaves.turns, turns);
    for (std::size_t block = 1; block < trees_.blocks; ++block) {
      turns = walk<kDepth, kIsWide, true>(trees_, block, table, turned_right, _mm512_setzero_si512(), leaves, sum);
      if constexpr (kDepth == 1) sum = add_last<kDepth>(sum, leaves, 0, kLanes);  // no level to do it meanwhile
      _mm512_store_si512(leaves.turns, turns);
      leaves.values += std::size_t{kLanes} << kDepth;
      leaves.splits += std::size_t{kLanes} << (kDepth - 1);
    }
    return add_last<kDepth>(sum, leaves, 0, trees_.trees - (trees_.blocks - 1) * kLanes);
  }

 private:
  ByteLanes trees_;
  std::vector<LastSplit> splits_;
};

template <int kDepth>
using WideWalk = Avx512Walk<kDepth, true>;
template <int kDepth>
using NarrowWalk = Avx512Walk<kDepth, false>;

}  // namespace

std::unique_ptr<const Evaluator> make_avx512(const Model& model) {
  return Slots(model).size() > kLanes ? make_of_depth<WideWalk>(model) : make_of_depth<NarrowWalk>(model);
}

}  // namespace cudasched::predict::trees

#endif
