// Attention without its matrix of scores (Dao, 2023, "FlashAttention-2"): out = softmax(scale * q * k^T) * v for each
// batch and head, in fp16 or bf16 with fp32 sums, on the tensor cores of sm_80 and later (mma.sync). With CAUSAL=1
// query i sees keys 0 to i.
//
// A block makes TILE_Q rows of out, a warp TILE_Q / WARPS of them, and walks over the keys in tiles of TILE_K. For each
// tile the block computes the scores in registers, rescales its sums to the new maxima, and adds the tile's part: the
// scores are at once the fragments of the second product. Keys and values arrive by asynchronous copies in rings of
// STAGES tiles. A tile of keys is given up as soon as the scores are there, so that the next one arrives during the
// second product.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16); HEAD, the head size (a multiple of 16 whose rows are 64 bytes or whole 128
// bytes); CAUSAL; TILE_Q; TILE_K; WARPS; STAGES; QUERIES_IN: where the queries are, 0 in shared memory, 1 in registers,
// by way of the memory of the rings, 2 in registers, by way of memory of their own, which costs no time at the
// beginning; RESCALE: whether a row's sums are rescaled 0 for each tile, 1 where its maximum has grown; ORDER: 0
// neighbouring blocks are tiles of one head, 1 heads; MIN_BLOCKS, the blocks that the compiler leaves registers for.
//
// flash_attention_sm90.cu is the same for sm_90a, with the arguments of this one.
#include "attention.cuh"
#include "common.cuh"
#include "corner.cuh"
#include "mma.cuh"

#define QUERIES_IN_SHARED 0
#define QUERIES_BY_RINGS 1
#define QUERIES_IN_REGISTERS 2

namespace {

using namespace cudasched::kernels;

#if TYPE == TYPE_FP16
using Type = Fp16;
#else
using Type = Bf16;
#endif
static_assert(TYPE != TYPE_FP32, "the tensor cores take fp16 and bf16");

constexpr int kThreads = WARPS * kWarpThreads;
constexpr int kRowBytes = HEAD * static_cast<int>(sizeof(Element));
constexpr int kChunkElements = 8;  // of 16 bytes
constexpr int kChunks = HEAD / kChunkElements;
constexpr int kRowsPerWarp = TILE_Q / WARPS;
constexpr int kBands = kRowsPerWarp / 16;  // of a warp: 16 rows, the height of a fragment
constexpr int kTileBytesQ = TILE_Q * kRowBytes;
constexpr int kTileBytesK = TILE_K * kRowBytes;
static_assert(TILE_Q % (16 * WARPS) == 0 && TILE_K % 16 == 0 && HEAD % 16 == 0, "fragments are 16 x 16");
static_assert(kThreads % kChunks == 0 && TILE_Q % (kThreads / kChunks) == 0 && TILE_K % (kThreads / kChunks) == 0,
              "all threads copy equally many chunks of a tile");

// Begins the copy of `Rows` rows from row `first` on; rows from `end` on become zeros.
template <int Rows>
__device__ __forceinline__ void fetch(unsigned char* tile, const Element* from, long long stride, int first, int end) {
  constexpr int kStep = kThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int thread_row = static_cast<int>(threadIdx.x) / kChunks;
  const Element* at = from + static_cast<long long>(first + thread_row) * stride + chunk * kChunkElements;
#pragma unroll
  for (int i = 0; i < Rows / kStep; ++i) {
    const int row = thread_row + i * kStep;
    copy_async<16>(tile + swizzle<kRowBytes>(row, chunk * 16), at, first + row < end ? 16 : 0);
    at += kStep * stride;
  }
}

__device__ __forceinline__ void load_queries(FragmentA<Type> (&made)[kBands], const unsigned char* tile,
                                             const Corner<kRowBytes, true>& corner, int warp, int depth) {
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
    load_matrix_x4(made[band].at, corner.in(tile, warp * kRowsPerWarp + band * 16, depth * 32));
  }
}

}  // namespace

// q, out: queries x HEAD, k, v: keys x HEAD for each head and batch, at strides (in elements, multiples of 8) between
// batches, heads and rows; the elements of a row are contiguous, all arrays begin at multiples of 16 bytes. `group`
// heads of q share a head of k and v. scale is over 0. lse, if not null: batches x heads x queries, the logarithm of
// the sum of the exponentials of each row of scores. A query that sees no key gets zeros and minus infinity.
//
// Grid: tiles of queries, heads, batches with ORDER 0; heads, tiles, batches with ORDER 1. Dynamic shared memory: the
// rings, 2 * STAGES * TILE_K rows of HEAD elements, and TILE_Q rows beside them; with QUERIES_BY_RINGS the larger of
// both.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    flash_attention(Element* __restrict__ out, float* __restrict__ lse, const Element* __restrict__ q,
                    const Element* __restrict__ k, const Element* __restrict__ v, int queries, int keys, int group,
                    float scale, long long out_batch, long long out_head, long long out_row, long long q_batch,
                    long long q_head, long long q_row, long long k_batch, long long k_head, long long k_row,
                    long long v_batch, long long v_head, long long v_row) {
  DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* tile_q = shared;
  unsigned char* ring_k = shared + (QUERIES_IN == QUERIES_BY_RINGS ? 0 : kTileBytesQ);
  unsigned char* ring_v = ring_k + STAGES * kTileBytesK;

  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int head = static_cast<int>(ORDER == 0 ? blockIdx.y : blockIdx.x);
  const int heads = static_cast<int>(ORDER == 0 ? gridDim.y : gridDim.x);
  const int batch = static_cast<int>(blockIdx.z);
  const int tiles_q = static_cast<int>(ORDER == 0 ? gridDim.x : gridDim.y);
  const int place = static_cast<int>(ORDER == 0 ? blockIdx.x : blockIdx.y);
  const int row0 = (CAUSAL ? tiles_q - 1 - place : place) * TILE_Q;  // those that see most keys begin first
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  out += batch * out_batch + head * out_head;

  const int keys_seen = CAUSAL ? min(keys, row0 + TILE_Q) : keys;
  const int tiles = (keys_seen + TILE_K - 1) / TILE_K;
  const int warp_row = row0 + warp * kRowsPerWarp;
  const Corner<kRowBytes, true> corner(lane);  // of queries, and of values, which are turned
  const Corner<kRowBytes, false> corner_keys(lane);

  FragmentA<Type> kept[QUERIES_IN == QUERIES_IN_SHARED ? 1 : HEAD / 16][kBands];
  fetch<TILE_Q>(tile_q, q, q_row, row0, queries);
  if constexpr (QUERIES_IN == QUERIES_BY_RINGS) {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < HEAD / 16; ++depth) load_queries(kept[depth], tile_q, corner, warp, depth);
    __syncthreads();
  }

  // One group of copies a tile of keys or values, in turns, also where there is none left: the waits below are always
  // for the oldest of 2 * STAGES - 1. The queries belong to the first.
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    if (stage < tiles) fetch<TILE_K>(ring_k + stage * kTileBytesK, k, k_row, stage * TILE_K, keys);
    commit_copies();
    if (stage == STAGES - 1) break;
    if (stage < tiles) fetch<TILE_K>(ring_v + stage * kTileBytesK, v, v_row, stage * TILE_K, keys);
    commit_copies();
  }
  if constexpr (QUERIES_IN == QUERIES_IN_REGISTERS) {
    wait_for_copies<2 * STAGES - 2>();
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < HEAD / 16; ++depth) load_queries(kept[depth], tile_q, corner, warp, depth);
  }

  const float scale2 = scale * kLog2E;
  float sums[kBands][HEAD / 8][4] = {};
  float maxima[kBands][2];  // of the rows lane / 4 and 8 below
  float totals[kBands][2] = {};
#pragma unroll
  for (int band = 0; band < kBands; ++band) maxima[band][0] = maxima[band][1] = Maximum::neutral();

  int slot = 0;  // of the current tile
  int slot_before = STAGES - 1;
  for (int tile = 0; tile < tiles; ++tile) {
    const int key0 = tile * TILE_K;
    wait_for_copies<2 * STAGES - 2>();
    __syncthreads();  // the keys are there, and no thread reads the values of the tile before any more
    if (tile + STAGES - 1 < tiles) {
      fetch<TILE_K>(ring_v + slot_before * kTileBytesK, v, v_row, key0 + (STAGES - 1) * TILE_K, keys);
    }
    commit_copies();

    float scores[kBands][TILE_K / 8][4] = {};
    const bool sees =
        !CAUSAL || key0 < warp_row + kRowsPerWarp;  // whether any row of the warp sees any key of the tile
    if (sees) {
      const unsigned char* tile_k = ring_k + slot * kTileBytesK;
#pragma unroll
      for (int depth = 0; depth < HEAD / 16; ++depth) {
        FragmentA<Type> loaded[kBands];
        if constexpr (QUERIES_IN == QUERIES_IN_SHARED) load_queries(loaded, tile_q, corner, warp, depth);
        const auto& a = QUERIES_IN == QUERIES_IN_SHARED ? loaded : kept[QUERIES_IN == QUERIES_IN_SHARED ? 0 : depth];
#pragma unroll
        for (int n = 0; n < TILE_K / 16; ++n) {
          unsigned loaded_keys[4];
          load_matrix_x4(loaded_keys, corner_keys.in(tile_k, n * 16, depth * 32));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const FragmentB<Type> b{{loaded_keys[2 * i], loaded_keys[2 * i + 1]}};
#pragma unroll
            for (int band = 0; band < kBands; ++band) multiply_accumulate(scores[band][2 * n + i], a[band], b);
          }
        }
      }
    }

    wait_for_copies<2 * STAGES - 2>();
    __syncthreads();  // the values are there, and no thread reads the keys any more
    if (tile + STAGES < tiles) fetch<TILE_K>(ring_k + slot * kTileBytesK, k, k_row, key0 + STAGES * TILE_K, keys);
    commit_copies();

    if (sees) {
      if (key0 + TILE_K > keys || (CAUSAL && key0 + TILE_K > warp_row + 1)) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
          for (int n = 0; n < TILE_K / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = key0 + n * 8 + lane % 4 * 2 + i % 2;
              const int row = warp_row + band * 16 + lane / 4 + i / 2 * 8;
              if (key >= keys || (CAUSAL && key > row)) scores[band][n][i] = Maximum::neutral();
            }
          }
        }
      }
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          largest[half] = maxima[band][half];
#pragma unroll
          for (int n = 0; n < TILE_K / 8; ++n) {
            largest[half] = fmaxf(largest[half], fmaxf(scores[band][n][2 * half], scores[band][n][2 * half + 1]));
          }
          largest[half] = reduce_quad<Maximum>(largest[half]);
        }
        if (RESCALE == 0 || largest[0] != maxima[band][0] || largest[1] != maxima[band][1]) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float fade = exponential2(fmaf(maxima[band][half], scale2, -shift_of(largest[half], scale2)));
            maxima[band][half] = largest[half];
            totals[band][half] *= fade;
#pragma unroll
            for (int n = 0; n < HEAD / 8; ++n) {
              sums[band][n][2 * half] *= fade;
              sums[band][n][2 * half + 1] *= fade;
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float shift = shift_of(maxima[band][half], scale2);
#pragma unroll
          for (int n = 0; n < TILE_K / 8; ++n) {
            float& first = scores[band][n][2 * half];
            float& second = scores[band][n][2 * half + 1];
            first = exponential2(fmaf(first, scale2, -shift));
            second = exponential2(fmaf(second, scale2, -shift));
            totals[band][half] += first + second;
          }
        }
      }

      const unsigned char* tile_v = ring_v + slot * kTileBytesK;
#pragma unroll
      for (int m = 0; m < TILE_K / 16; ++m) {
        FragmentA<Type> weights[kBands];
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float(&pair)[4] = scores[band][2 * m + i / 2];
            weights[band].at[i] = pack<Type>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
          }
        }
#pragma unroll
        for (int n = 0; n < HEAD / 16; ++n) {
          unsigned loaded_values[4];
          load_matrix_x4_transposed(loaded_values, corner.in(tile_v, m * 16, n * 32));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const FragmentB<Type> b{{loaded_values[2 * i], loaded_values[2 * i + 1]}};
#pragma unroll
            for (int band = 0; band < kBands; ++band) multiply_accumulate(sums[band][2 * n + i], weights[band], b);
          }
        }
      }
    }
    slot_before = slot;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  // The rows of out go through shared memory, for writes of 16 bytes at a time.
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = reduce_quad<Sum>(totals[band][half]);
      const float factor = total == 0.0f ? 0.0f : 1.0f / total;
      const int local = warp * kRowsPerWarp + band * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < HEAD / 8; ++n) {
        const float(&found)[4] = sums[band][n];
        *reinterpret_cast<unsigned*>(tile_q + swizzle<kRowBytes>(local, n * 16 + lane % 4 * 4)) =
            pack<Type>(found[2 * half] * factor, found[2 * half + 1] * factor);
      }
      const int row = row0 + local;
      if (lse != nullptr && lane % 4 == 0 && row < queries) {
        lse[(static_cast<long long>(batch) * heads + head) * queries + row] =
            total == 0.0f ? Maximum::neutral() : maxima[band][half] * scale + log2f(total) * kLn2;
      }
    }
  }
  __syncthreads();
  constexpr int kStep = kThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
  for (int i = 0; i < TILE_Q / kStep; ++i) {
    const int row = static_cast<int>(threadIdx.x) / kChunks + i * kStep;
    if (row0 + row >= queries) break;
    *reinterpret_cast<uint4*>(out + (row0 + row) * out_row + chunk * kChunkElements) =
        *reinterpret_cast<const uint4*>(tile_q + swizzle<kRowBytes>(row, chunk * 16));
  }
}
