// C = A * B on the tensor cores by mma.sync, for sm_80 and later; A is m x k, B k x n, C m x n, all row-major.
//
// A block makes a tile of TILE_M x TILE_N, its WARPS_M x WARPS_N warps equal parts of it. STAGES tiles of A and B are
// in shared memory or on their way there by cp.async. While one is multiplied, the STAGES - 1 tiles behind are loaded.
// A warp loads the fragments of the next 32 bytes of depth while it multiplies the current ones, across tiles too.
//
// mma.sync takes B by columns, and the way from rows to columns depends on the type. fp16 and bf16: ldmatrix turns the
// rows. tf32, which ldmatrix cannot turn: single words. int8: ldmatrix turns pairs of columns. A byte permutation makes
// one fragment of the even columns and one of the odd ones, so that a thread has four columns of C next to each other.
// Each type has a swizzle of its own for B, free of bank conflicts.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16, TYPE_TF32, TYPE_INT8); WIDE_OUTPUT: C is fp32 rather than of the type of A
// (tf32 and int8: C is fp32 and int32 in any case); TILE_M, TILE_N, TILE_K (powers of two; 64, 128 or 256 bytes of
// depth); WARPS_M, WARPS_N, STAGES; GROUP: rows of tiles that neighbouring blocks share, for the L2; SPLIT_K: how many
// blocks share the work of a tile, each over a part of k; MIN_BLOCKS; ALIGNED: m, n and k are multiples of the tile;
// COPY_BYTES: 16, 8 or 4, of which rows of A and of B are multiples.
//
// tf32 takes fp32 arrays and rounds their elements to nearest. Sums are fp32 (int8: int32), rounded once at the end.
//
// With SPLIT_K > 1 each block leaves its part in `workspace`. The last block of a tile adds the parts in order, so that
// the result does not depend on which was last. workspace: SPLIT_K * m * n sums, and then an unsigned for each tile,
// zero before the first launch and after each. Not used with SPLIT_K = 1.
#include "common.cuh"
#include "gemm.cuh"
#include "last_block.cuh"
#include "mma.cuh"

namespace {

using namespace cudasched::kernels;

#if TYPE == TYPE_FP16
using Type = Fp16;
#elif TYPE == TYPE_BF16
using Type = Bf16;
#elif TYPE == TYPE_TF32
using Type = Tf32;
#else
using Type = Int8;
#endif

#if TYPE == TYPE_INT8
using Total = int;
struct alignas(8) Pair {
  int x, y;
};
using Output = int;
#else
using Total = float;
struct alignas(8) Pair {
  float x, y;
};
#if TYPE == TYPE_TF32 || WIDE_OUTPUT
using Output = float;
#else
using Output = Element;
#endif
#endif

constexpr int kElementBytes = static_cast<int>(sizeof(Element));
constexpr int kWarps = WARPS_M * WARPS_N;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kWarpM = TILE_M / WARPS_M;
constexpr int kWarpN = TILE_N / WARPS_N;
constexpr int kTilesM = kWarpM / 16;
constexpr int kTilesN = kWarpN / 8;
constexpr int kRowBytesA = TILE_K * kElementBytes;
constexpr int kRowBytesB = TILE_N * kElementBytes;
constexpr int kBytesA = TILE_M * kRowBytesA;
constexpr int kBytesB = TILE_K * kRowBytesB;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kChunk = 16;
constexpr int kChunksRowA = kRowBytesA / kChunk;
constexpr int kChunksRowB = kRowBytesB / kChunk;
constexpr int kCopiesA = (kBytesA / kChunk + kThreads - 1) / kThreads;
constexpr int kCopiesB = (kBytesB / kChunk + kThreads - 1) / kThreads;
constexpr int kSlices = TILE_K / kDepth<Type>;  // of 32 bytes of depth

__device__ constexpr bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }
static_assert(is_power_of_two(TILE_M) && is_power_of_two(TILE_N) && is_power_of_two(WARPS_M) &&
              is_power_of_two(WARPS_N));
static_assert(kRowBytesA == 64 || kRowBytesA == 128 || kRowBytesA == 256, "what the swizzle of A takes");
static_assert(kRowBytesB >= (TYPE == TYPE_FP16 || TYPE == TYPE_BF16 ? 64 : 128), "what the swizzle of B takes");
static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp has whole fragments, those of B in pairs");
static_assert(kThreads % kChunksRowA == 0 && kThreads % kChunksRowB == 0, "a thread copies chunks of one column");
static_assert(STAGES >= 2, "one stage is loaded while another is used");

// The displacement of the 16-byte chunks of a row of B.
__device__ __forceinline__ int place_b(int row, int byte) {
  if constexpr (TYPE == TYPE_TF32) {
    return row * kRowBytesB + (byte ^ (row % 4 * 32));
  } else if constexpr (TYPE == TYPE_INT8) {
    return row * kRowBytesB + (byte ^ ((row % 2 + row / 4 % 4 * 2) * kChunk));
  } else {
    return swizzle<kRowBytesB>(row, byte);
  }
}

// A thread's copies of each tile: chunks of one column, in rows that lie kThreads / chunks of a row apart.
class Copier {
 public:
  __device__ __forceinline__ Copier(const Element* a, const Element* b, int row0, int column0, int m, int n, int k)
      : rows_a_(m - row0), bytes_b_((n - column0) * kElementBytes), k_(k), n_(n) {
    const int thread = static_cast<int>(threadIdx.x);
    row_a_ = thread / kChunksRowA;
    byte_a_ = thread % kChunksRowA * kChunk;
    row_b_ = thread / kChunksRowB;
    byte_b_ = thread % kChunksRowB * kChunk;
    from_a_ = reinterpret_cast<const char*>(a + static_cast<long long>(row0 + row_a_) * k) + byte_a_;
    from_b_ = reinterpret_cast<const char*>(b + static_cast<long long>(row_b_) * n + column0) + byte_b_;
  }

  // Begins the copies of columns k0 and on of A, and rows k0 and on of B.
  __device__ __forceinline__ void copy(char* stage, int k0) const {
    const char* from = from_a_ + static_cast<long long>(k0) * kElementBytes;
    const int bytes_left = (k_ - k0) * kElementBytes - byte_a_;
#pragma unroll
    for (int i = 0; i < kCopiesA; ++i) {
      const int row = row_a_ + i * (kThreads / kChunksRowA);
      if (kBytesA / kChunk % kThreads != 0 && row >= TILE_M) break;
      one(stage + swizzle<kRowBytesA>(row, byte_a_), from, row < rows_a_ ? bytes_left : 0);
      from += static_cast<long long>(k_) * (kThreads / kChunksRowA * kElementBytes);
    }
    from = from_b_ + static_cast<long long>(k0) * n_ * kElementBytes;
#pragma unroll
    for (int i = 0; i < kCopiesB; ++i) {
      const int row = row_b_ + i * (kThreads / kChunksRowB);
      if (kBytesB / kChunk % kThreads != 0 && row >= TILE_K) break;
      one(stage + kBytesA + place_b(row, byte_b_), from, k0 + row < k_ ? bytes_b_ - byte_b_ : 0);
      from += static_cast<long long>(n_) * (kThreads / kChunksRowB * kElementBytes);
    }
  }

 private:
  static __device__ __forceinline__ void one(char* to, const char* from, int bytes_left) {
    if constexpr (ALIGNED) {
      copy_async<kChunk>(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; i += COPY_BYTES) {
        copy_async<COPY_BYTES>(to + i, from + i, min(max(bytes_left - i, 0), COPY_BYTES));
      }
    }
  }

  const char* from_a_;
  const char* from_b_;
  int row_a_, byte_a_, row_b_, byte_b_;
  int rows_a_, bytes_b_;
  int k_, n_;
};

struct Fragments {
  FragmentA<Type> a[kTilesM];
  FragmentB<Type> b[kTilesN];
};

// The addresses of a lane's fragments. Fragments of a warp differ by whole 1,024 bytes, which do not change the
// swizzle, or by bits that the swizzle only turns.
class Loader {
 public:
  __device__ __forceinline__ Loader(int warp_m, int warp_n, int lane) {
    a_ = swizzle<kRowBytesA>(warp_m * kWarpM + lane % 16, lane / 16 * kChunk);
    const int byte = warp_n * kWarpN * kElementBytes;
    if constexpr (TYPE == TYPE_TF32) {
      b_ = place_b(lane % 4, byte + lane / 4 * kElementBytes);
    } else if constexpr (TYPE == TYPE_INT8) {
      const int matrix = lane / 8;
      const int row = lane % 8;
      b_ = place_b(matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2, byte);
    } else {
      b_ = place_b(lane % 16, byte + lane / 16 * kChunk);
    }
  }

  __device__ __forceinline__ void load(Fragments& fragments, const char* stage, int slice) const {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      load_matrix_x4(fragments.a[i].at, stage + (a_ ^ (slice * 32)) + i * 16 * kRowBytesA);
      if constexpr (TYPE == TYPE_TF32) {
#pragma unroll
        for (int j = 0; j < 4; ++j) fragments.a[i].at[j] = round_to_tf32(fragments.a[i].at[j]);
      }
    }
    const char* b = stage + kBytesA + slice * kDepth<Type> * kRowBytesB;
    if constexpr (TYPE == TYPE_TF32) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const char* from = b + (b_ ^ (j * 32));
        fragments.b[j].at[0] = round_to_tf32(*reinterpret_cast<const unsigned*>(from));
        fragments.b[j].at[1] = round_to_tf32(*reinterpret_cast<const unsigned*>(from + 4 * kRowBytesB));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTilesN; j += 2) {
        unsigned four[4];
        load_matrix_x4_transposed(four, b + (b_ ^ (j / 2 * (16 * kElementBytes))));
        if constexpr (TYPE == TYPE_INT8) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            fragments.b[j].at[half] = __byte_perm(four[2 * half], four[2 * half + 1], 0x6420);
            fragments.b[j + 1].at[half] = __byte_perm(four[2 * half], four[2 * half + 1], 0x7531);
          }
        } else {
          fragments.b[j] = {four[0], four[1]};
          fragments.b[j + 1] = {four[2], four[3]};
        }
      }
    }
  }

 private:
  int a_, b_;
};

template <typename To>
__device__ __forceinline__ void store_pair(To* to, Pair pair, bool both) {
  if constexpr (sizeof(To) == 4) {
    if (ALIGNED || (both && reinterpret_cast<unsigned long long>(to) % sizeof(Pair) == 0)) {
      *reinterpret_cast<Pair*>(to) = pair;
    } else {
      to[0] = pair.x;
      if (both) to[1] = pair.y;
    }
  }
#if TYPE == TYPE_FP16 || TYPE == TYPE_BF16
  else {
    *reinterpret_cast<unsigned*>(to) = pack<Type>(pair.x, pair.y);  // n is even
  }
#endif
}

// Calls visit(i, j, half, row, column) for each pair of sums of this thread: values 2 * half and 2 * half + 1 of
// fragment (i, j). int8 takes a pair from two fragments: value 2 * half + j % 2 of fragments j - j % 2 and the next.
template <typename Visit>
__device__ __forceinline__ void each_pair(int row0, int column0, int warp_m, int warp_n, int lane, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + warp_m * kWarpM + i * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const int within = TYPE == TYPE_INT8 ? j / 2 * 16 + lane % 4 * 4 + j % 2 * 2 : j * 8 + lane % 4 * 2;
        visit(i, j, half, row, column0 + warp_n * kWarpN + within);
      }
    }
  }
}

__device__ __forceinline__ Pair pair_of(const Total (&sums)[kTilesM][kTilesN][4], int i, int j, int half) {
  if constexpr (TYPE == TYPE_INT8) {
    const int even = j - j % 2;
    return {sums[i][even][2 * half + j % 2], sums[i][even + 1][2 * half + j % 2]};
  } else {
    return {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
  }
}

}  // namespace

// Grid: tiles of n * tiles of m, 1, SPLIT_K. Dynamic shared memory: STAGES * (TILE_M + TILE_N) * TILE_K elements.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    gemm_mma(Output* __restrict__ c, const Element* __restrict__ a, const Element* __restrict__ b, Total* workspace,
             int m, int n, int k) {
  DYNAMIC_SHARED(char, shared);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int warp_m = warp / WARPS_N;
  const int warp_n = warp % WARPS_N;
  const Tile tile = tile_of(static_cast<int>(blockIdx.x), (m + TILE_M - 1) / TILE_M, (n + TILE_N - 1) / TILE_N, GROUP);
  const int row0 = tile.row * TILE_M;
  const int column0 = tile.column * TILE_N;

  const int steps_all = (k + TILE_K - 1) / TILE_K;
  const int steps_each = (steps_all + SPLIT_K - 1) / SPLIT_K;
  const int step_first = static_cast<int>(blockIdx.z) * steps_each;
  const int steps = max(min(step_first + steps_each, steps_all) - step_first, 0);

  const Copier copier(a, b, row0, column0, m, n, k);
  const Loader loader(warp_m, warp_n, lane);
  Total sums[kTilesM][kTilesN][4] = {};
  Fragments fragments[2];

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < steps) copier.copy(shared + stage * kStageBytes, (step_first + stage) * TILE_K);
    commit_copies();
  }
  wait_for_copies<STAGES - 2>();
  __syncthreads();
  if (steps > 0) loader.load(fragments[0], shared, 0);
  int read = 0;
  int write = STAGES - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice == 0) {  // into the stage that all warps had finished at the last barrier
        const int ahead = step + STAGES - 1;
        if (ahead < steps) copier.copy(shared + write * kStageBytes, (step_first + ahead) * TILE_K);
        commit_copies();
        write = write + 1 == STAGES ? 0 : write + 1;
      }
      if (slice == kSlices - 1) {  // the last fragments of this stage are in registers
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        read = read + 1 == STAGES ? 0 : read + 1;
      }
      // With an odd number of slices the parity of a stage's first would change: the number is two, four or more.
      if (slice + 1 < kSlices || step + 1 < steps) {
        loader.load(fragments[(slice + 1) % 2], shared + read * kStageBytes, (slice + 1) % kSlices);
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          const int turned = i % 2 == 0 ? j : kTilesN - 1 - j;  // the fragment that was just used again
          multiply_accumulate(sums[i][turned], fragments[slice % 2].a[i], fragments[slice % 2].b[turned]);
        }
      }
    }
  }

#if SPLIT_K == 1
  each_pair(row0, column0, warp_m, warp_n, lane, [&](int i, int j, int half, int row, int column) {
    if (!ALIGNED && (row >= m || column >= n)) return;
    store_pair(c + static_cast<long long>(row) * n + column, pair_of(sums, i, j, half), ALIGNED || column + 1 < n);
  });
#else
  const long long size = static_cast<long long>(m) * n;
  each_pair(row0, column0, warp_m, warp_n, lane, [&](int i, int j, int half, int row, int column) {
    if (!ALIGNED && (row >= m || column >= n)) return;
    Total* to = workspace + size * blockIdx.z + static_cast<long long>(row) * n + column;
    store_pair(to, pair_of(sums, i, j, half), ALIGNED || column + 1 < n);
  });
  auto* arrived = reinterpret_cast<unsigned*>(workspace + SPLIT_K * size) + blockIdx.x;
  if (!is_last_block(arrived, SPLIT_K)) return;
  each_pair(row0, column0, warp_m, warp_n, lane, [&](int, int, int, int row, int column) {
    if (!ALIGNED && (row >= m || column >= n)) return;
    const bool both = ALIGNED || column + 1 < n;
    const long long place = static_cast<long long>(row) * n + column;
    Pair sum = {};
    for (int part = 0; part < SPLIT_K; ++part) {
      sum.x += __ldcg(workspace + size * part + place);
      if (both) sum.y += __ldcg(workspace + size * part + place + 1);
    }
    store_pair(c + place, sum, both);
  });
#endif
}
