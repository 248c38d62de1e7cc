// flash_attention.cu on Hopper's tensor cores (wgmma), for sm_90a: the same arguments, the same results.
//
// A warpgroup makes 64 rows of out, a block GROUPS of them. The scores of the next tile of keys are computed while the
// current tile's values are multiplied (Shah and others, 2024, "FlashAttention-3"): the exponentials of the one hide
// behind the products of the other. Both read keys and values from shared memory by descriptors; the weights stay in
// registers, where the scores were. Copies are those of sm_80 (cp.async), by all threads: strides are free, rows beyond
// the end are zeros, and no warp is reserved for copies.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16); HEAD (64, 128); CAUSAL; GROUPS (1 to 4); TILE_K (a multiple of 16, 32 to
// 192); STAGES (2 or more); ORDER: 0 neighbouring blocks are tiles of one head, 1 heads; MIN_BLOCKS, the blocks that
// the compiler leaves registers for. RESCALE: whether a row's sums are rescaled 0 for each tile, 1 where a maximum of
// the warp has grown, 2 where one has grown so much that weights would overflow (Dao, 2025, "FlashAttention-4").
// POLYNOMIAL: of so many exponentials about one is computed by a polynomial, for the special function units are slower
// than the tensor cores; 0: none. LATE: whether the copies of a step begin 0 before its products, 1 behind them.
#include "attention.cuh"
#include "common.cuh"
#include "hopper.cuh"
#include "hopper_products.cuh"

namespace {

using namespace cudasched::kernels;

#if TYPE == TYPE_FP16
using Type = Fp16;
#else
using Type = Bf16;
#endif
static_assert(TYPE != TYPE_FP32, "the tensor cores take fp16 and bf16");

constexpr int kThreads = GROUPS * kGroupThreads;
constexpr int kTileQ = 64 * GROUPS;
constexpr int kChunkElements = 8;  // of 16 bytes
constexpr int kChunks = HEAD / kChunkElements;
constexpr int kStep = kThreads / kChunks;  // rows of a tile that all threads copy at once
constexpr int kBytesQ = kTileQ * HEAD * static_cast<int>(sizeof(Element));
constexpr int kBytesK = TILE_K * HEAD * static_cast<int>(sizeof(Element));
constexpr int kBoxColumns = kBoxBytes / static_cast<int>(sizeof(Element));
constexpr int kSlices = kBoxColumns / kDepth<Type>;  // of a box: the depth of one product
constexpr unsigned kEightRows = 8 * kBoxBytes;
constexpr int kAlignment = 1024;
static_assert(HEAD == 64 || HEAD == 128, "whole boxes, and sums that fit the registers");
static_assert(TILE_K % 16 == 0 && TILE_K >= 32 && TILE_K <= 192, "the products that there are");
constexpr float kLeeway = 8.0f;  // a weight is at most two to the power of this: far from fp16's largest number
static_assert(STAGES >= 2, "one tile arrives while another is used");

// A tile of `Rows` rows is HEAD / 64 boxes of 64 columns, one after another.
template <int Rows>
__device__ __forceinline__ int place_of(int row, int chunk) {
  return chunk / 8 * Rows * kBoxBytes + swizzle<kBoxBytes>(row, chunk % 8 * 16);
}

// Begins the copy of `Rows` rows from row `first` on; rows from `end` on become zeros.
template <int Rows>
__device__ __forceinline__ void fetch(char* tile, const Element* from, long long stride, int first, int end) {
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int thread_row = static_cast<int>(threadIdx.x) / kChunks;
  const Element* at = from + static_cast<long long>(first + thread_row) * stride + chunk * kChunkElements;
#pragma unroll
  for (int i = 0; i < (Rows + kStep - 1) / kStep; ++i) {
    const int row = thread_row + i * kStep;
    if (Rows % kStep != 0 && row >= Rows) break;
    copy_async<16>(tile + place_of<Rows>(row, chunk), at, first + row < end ? 16 : 0);
    at += kStep * stride;
  }
}

// Begins scores = 64 rows of queries * keys^T.
__device__ __forceinline__ void begin_scores(float (&scores)[TILE_K / 2], unsigned queries, unsigned keys) {
#pragma unroll
  for (int slice = 0; slice < HEAD / kDepth<Type>; ++slice) {
    const int box = slice / kSlices;
    const unsigned inside = slice % kSlices * kDepth<Type> * static_cast<unsigned>(sizeof(Element));
    multiply_by_columns(scores, matrix_descriptor(queries + box * kTileQ * kBoxBytes + inside, 0, kEightRows),
                        matrix_descriptor(keys + box * TILE_K * kBoxBytes + inside, 0, kEightRows), slice > 0, Type{});
  }
  commit_products();
}

// Begins sums += weights * values.
__device__ __forceinline__ void begin_sums(float (&sums)[HEAD / 2], const FragmentA<Type> (&weights)[TILE_K / 16],
                                           unsigned values) {
#pragma unroll
  for (int slice = 0; slice < TILE_K / 16; ++slice) {
    multiply_held(sums, weights[slice],
                  matrix_descriptor(values + slice * 16 * kBoxBytes, TILE_K * kBoxBytes, kEightRows));
  }
  commit_products();
}

// The rows lane / 4 and 8 below of a warp's part.
struct Rows {
  float maxima[2];
  float totals[2];
};

// Two to the power of `value`, the weight at place `i`, the first of a pair.
__device__ __forceinline__ float exponential_of(int i, float value) {
  constexpr int kPairs = POLYNOMIAL > 0 ? POLYNOMIAL / 2 : 1;
  if (POLYNOMIAL > 0 && i / 4 % kPairs == 0) return exponential2_by_polynomial(value);
  return exponential2(value);
}

// Makes weights of scores; `fade` gets the factors for the sums so far. Keys from `end` on, and with CAUSAL those
// behind a row's own place, weigh nothing.
__device__ __forceinline__ void weigh(float (&scores)[TILE_K / 2], Rows& rows, float (&fade)[2], float scale2, int key0,
                                      int keys, int row, int first_row, int lane) {
  if (key0 + TILE_K > keys || (CAUSAL && key0 + TILE_K > first_row + 1)) {
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) {
      const int key = key0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (key >= keys || (CAUSAL && key > row + i / 2 % 2 * 8)) scores[i] = Maximum::neutral();
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = rows.maxima[half];
    float largest = before;
#pragma unroll
    for (int i = 2 * half; i < TILE_K / 2; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
    largest = reduce_quad<Maximum>(largest);
    if (RESCALE == 2 && (largest - before) * scale2 <= kLeeway) largest = before;
    const float shift = shift_of(largest, scale2);
    fade[half] = RESCALE > 0 && largest == before ? 1.0f : exponential2(fmaf(before, scale2, -shift));
    rows.maxima[half] = largest;
    float total = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < TILE_K / 2; i += 4) {
      scores[i] = exponential_of(i, fmaf(scores[i], scale2, -shift));
      scores[i + 1] = exponential2(fmaf(scores[i + 1], scale2, -shift));
      total += scores[i] + scores[i + 1];
    }
    rows.totals[half] = fmaf(rows.totals[half], fade[half], total);
  }
}

__device__ __forceinline__ void pack_weights(FragmentA<Type> (&weights)[TILE_K / 16],
                                             const float (&scores)[TILE_K / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_K / 4; ++i) weights[i / 4].at[i % 4] = pack<Type>(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ bool any_of_warp(bool mine) {
#ifdef EMULATED
  return mine;  // a warp goes the same way for speed alone
#else
  return __any_sync(kAllLanes, mine);
#endif
}

// This thread's copies are there, and after the barrier those of all threads, for the products of all.
__device__ __forceinline__ void meet_copies() {
  publish_to_tma();
  __syncthreads();
}

}  // namespace

// Arguments as in flash_attention.cu, with tiles of 64 * GROUPS queries. Dynamic shared memory: 1,024 bytes, and GROUPS
// * 64 + 2 * STAGES * TILE_K rows of HEAD elements.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    flash_attention_sm90(Element* __restrict__ out, float* __restrict__ lse, const Element* __restrict__ q,
                         const Element* __restrict__ k, const Element* __restrict__ v, int queries, int keys, int group,
                         float scale, long long out_batch, long long out_head, long long out_row, long long q_batch,
                         long long q_head, long long q_row, long long k_batch, long long k_head, long long k_row,
                         long long v_batch, long long v_head, long long v_row) {
  DYNAMIC_SHARED(char, shared);
  char* tile_q = shared + (kAlignment - shared_address(shared) % kAlignment) % kAlignment;
  char* ring_k = tile_q + kBytesQ;
  char* ring_v = ring_k + STAGES * kBytesK;

  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warpgroup = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpThreads * 16;  // in the tile
  const int head = static_cast<int>(ORDER == 0 ? blockIdx.y : blockIdx.x);
  const int heads = static_cast<int>(ORDER == 0 ? gridDim.y : gridDim.x);
  const int batch = static_cast<int>(blockIdx.z);
  const int tiles_q = static_cast<int>(ORDER == 0 ? gridDim.x : gridDim.y);
  const int place = static_cast<int>(ORDER == 0 ? blockIdx.x : blockIdx.y);
  const int row0 = (CAUSAL ? tiles_q - 1 - place : place) * kTileQ;  // those that see most keys begin first
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  out += batch * out_batch + head * out_head;

  const int keys_seen = CAUSAL ? min(keys, row0 + kTileQ) : keys;
  const int tiles = (keys_seen + TILE_K - 1) / TILE_K;
  const unsigned queries_at = shared_address(tile_q) + static_cast<unsigned>(warpgroup * 64 * kBoxBytes);
  const unsigned keys_at = shared_address(ring_k);
  const unsigned values_at = shared_address(ring_v);

  // Groups of copies: the first tile of keys with the queries, then always a tile of keys with the values before.
  fetch<kTileQ>(tile_q, q, q_row, row0, queries);
  if (tiles > 0) fetch<TILE_K>(ring_k, k, k_row, 0, keys);
  commit_copies();
#pragma unroll
  for (int stage = 1; stage < STAGES; ++stage) {
    if (stage < tiles) fetch<TILE_K>(ring_k + stage * kBytesK, k, k_row, stage * TILE_K, keys);
    if (stage - 1 < tiles) fetch<TILE_K>(ring_v + (stage - 1) * kBytesK, v, v_row, (stage - 1) * TILE_K, keys);
    commit_copies();
  }

  const float scale2 = scale * kLog2E;
  const int row = row0 + warp_row + lane / 4;
  float sums[HEAD / 2] = {};
  Rows rows{{Maximum::neutral(), Maximum::neutral()}, {0.0f, 0.0f}};
  if (tiles > 0) {
    float scores[TILE_K / 2] = {};
    float fade[2];
    FragmentA<Type> weights[TILE_K / 16];
    wait_for_copies<STAGES - 1>();
    meet_copies();
    begin_products();
    begin_scores(scores, queries_at, keys_at);
    wait_for_products<0>();
    hold(scores);
    weigh(scores, rows, fade, scale2, 0, keys, row, row0 + warp_row, lane);
    pack_weights(weights, scores);

    int slot = 0;  // of the current tile
    int slot_before = STAGES - 1;
    for (int tile = 0; tile < tiles - 1; ++tile) {
      const int slot_next = slot + 1 == STAGES ? 0 : slot + 1;
      wait_for_copies<STAGES - 2>();
      meet_copies();  // no thread reads this tile's keys, nor the values before, any more
      const auto fetch_ahead = [&](int tile, int slot, int slot_before) {
        const int ahead = tile + STAGES;
        if (ahead < tiles) fetch<TILE_K>(ring_k + slot * kBytesK, k, k_row, ahead * TILE_K, keys);
        if (ahead - 1 < tiles) fetch<TILE_K>(ring_v + slot_before * kBytesK, v, v_row, (ahead - 1) * TILE_K, keys);
        commit_copies();
      };
      if constexpr (LATE == 0) fetch_ahead(tile, slot, slot_before);

      begin_products();
      begin_scores(scores, queries_at, keys_at + slot_next * kBytesK);
      begin_sums(sums, weights, values_at + slot * kBytesK);
      if constexpr (LATE == 1) fetch_ahead(tile, slot, slot_before);
      wait_for_products<1>();
      hold(scores);
      weigh(scores, rows, fade, scale2, (tile + 1) * TILE_K, keys, row, row0 + warp_row, lane);
      wait_for_products<0>();
      hold(sums);
      if (RESCALE == 0 || any_of_warp(fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) sums[i] *= fade[i / 2 % 2];
      }
      pack_weights(weights, scores);
      slot_before = slot;
      slot = slot_next;
    }
    wait_for_copies<0>();
    meet_copies();
    begin_products();
    begin_sums(sums, weights, values_at + slot * kBytesK);
    wait_for_products<0>();
    hold(sums);
  }

  // The rows of out go through the queries' memory, for writes of 16 bytes at a time.
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = reduce_quad<Sum>(rows.totals[half]);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
      *reinterpret_cast<unsigned*>(tile_q + place_of<kTileQ>(warp_row + half * 8 + lane / 4, n) + lane % 4 * 4) =
          pack<Type>(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
    }
    if (lse != nullptr && lane % 4 == 0 && row + half * 8 < queries) {
      lse[(static_cast<long long>(batch) * heads + head) * queries + row + half * 8] =
          total == 0.0f ? Maximum::neutral() : rows.maxima[half] * scale + log2f(total) * kLn2;
    }
  }
  __syncthreads();
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
  for (int i = 0; i < (kTileQ + kStep - 1) / kStep; ++i) {
    const int local = static_cast<int>(threadIdx.x) / kChunks + i * kStep;
    if (local >= kTileQ || row0 + local >= queries) break;
    *reinterpret_cast<uint4*>(out + (row0 + local) * out_row + chunk * kChunkElements) =
        *reinterpret_cast<const uint4*>(tile_q + place_of<kTileQ>(local, chunk));
  }
}
