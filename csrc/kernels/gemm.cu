// C = A * B in fp32 on the SIMT cores; A is m x k, B k x n, C m x n, all row-major.
//
// A block makes a tile of TILE_M x TILE_N, a thread THREAD_M x THREAD_N of it, whose columns are quads that lie TILE_N
// / (THREAD_N / 4) apart. LANES_N lanes of a warp lie along the columns and the others along the rows. So a warp's
// reads of shared memory for one step of k have about the same number of rows and of columns. Lanes that read the same
// quad read it once, and shared memory is as busy as the multipliers.
//
// BUFFERS decides how A and B get there. 1 and 2: the next TILE_K columns of A and rows of B are loaded into registers
// while the current ones are used, and A is turned on its way to shared memory. One tile there with two barriers a
// step, or two with one. 3 and more: by cp.async, BUFFERS - 1 tiles ahead, without registers or instructions for the
// loads. A stays in rows, of which a thread reads quads along k, and a swizzle keeps the rows free of bank conflicts.
//
// Parameters: TILE_M, TILE_N, TILE_K, THREAD_M, THREAD_N (multiples of 4), LANES_N, BUFFERS; GROUP: rows of tiles that
// neighbouring blocks share, for the L2; SPLIT_K: how many blocks share the work of a tile, each over a part of k;
// MIN_BLOCKS; ALIGNED: m, n and k are multiples of the tile, else of 4 (k and n).
//
// With SPLIT_K > 1 each block leaves its part in `workspace`. The last block of a tile adds the parts in order, so that
// the result does not depend on which was last. workspace: SPLIT_K * m * n floats, and then an unsigned for each tile,
// zero before the first launch and after each. Not used with SPLIT_K = 1.
#include "common.cuh"
#include "gemm.cuh"
#include "last_block.cuh"
#include "mma.cuh"

#ifndef LANES_N
#define LANES_N 8
#endif

namespace {

using namespace cudasched::kernels;

constexpr int kQuad = 4;
constexpr int kThreadsM = TILE_M / THREAD_M;
constexpr int kThreadsN = TILE_N / THREAD_N;
constexpr int kThreads = kThreadsM * kThreadsN;
constexpr int kLanesM = kWarpThreads / LANES_N;
constexpr bool kAsynchronous = BUFFERS > 2;
// Against conflicts when A is written transposed; a multiple of 16 bytes.
constexpr int kPadding = kAsynchronous ? 0 : kQuad;
constexpr int kRowBytesA = TILE_K * static_cast<int>(sizeof(float));  // of A that stays in rows
constexpr int kStrideA = TILE_M + kPadding;
constexpr int kQuadsA = TILE_M * TILE_K / kQuad;
constexpr int kQuadsB = TILE_K * TILE_N / kQuad;
constexpr int kLoadsA = (kQuadsA + kThreads - 1) / kThreads;
constexpr int kLoadsB = (kQuadsB + kThreads - 1) / kThreads;
constexpr int kFloatsA = TILE_K * kStrideA;
constexpr int kFloatsB = TILE_K * TILE_N;
static_assert(THREAD_M % kQuad == 0 && THREAD_N % kQuad == 0 && TILE_K % kQuad == 0, "quads");
static_assert(kThreadsM % kLanesM == 0 && kThreadsN % LANES_N == 0, "a block is whole warps of kLanesM x LANES_N");

struct Staged {
  float4 a[kLoadsA];
  float4 b[kLoadsB];
};

__device__ __forceinline__ float4 quad(const float* from, bool exists) {
  if (!exists) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return *reinterpret_cast<const float4*>(from);
}

__device__ __forceinline__ void fetch(Staged& staged, const float* a, const float* b, int row0, int column0, int k0,
                                      int m, int n, int k_end, int k) {
#pragma unroll
  for (int i = 0; i < kLoadsA; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    if (kQuadsA % kThreads != 0 && index >= kQuadsA) break;
    const int row = row0 + index / (TILE_K / kQuad);
    const int column = k0 + index % (TILE_K / kQuad) * kQuad;
    staged.a[i] = quad(a + static_cast<long long>(row) * k + column, ALIGNED || (row < m && column < k_end));
  }
#pragma unroll
  for (int i = 0; i < kLoadsB; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    if (kQuadsB % kThreads != 0 && index >= kQuadsB) break;
    const int row = k0 + index / (TILE_N / kQuad);
    const int column = column0 + index % (TILE_N / kQuad) * kQuad;
    staged.b[i] = quad(b + static_cast<long long>(row) * n + column, ALIGNED || (row < k_end && column < n));
  }
}

// A is turned round, so that a thread reads the rows of one column as quads.
__device__ __forceinline__ void put(const Staged& staged, float* tile_a, float* tile_b) {
#pragma unroll
  for (int i = 0; i < kLoadsA; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    if (kQuadsA % kThreads != 0 && index >= kQuadsA) break;
    const int row = index / (TILE_K / kQuad);
    const int column = index % (TILE_K / kQuad) * kQuad;
    tile_a[(column + 0) * kStrideA + row] = staged.a[i].x;
    tile_a[(column + 1) * kStrideA + row] = staged.a[i].y;
    tile_a[(column + 2) * kStrideA + row] = staged.a[i].z;
    tile_a[(column + 3) * kStrideA + row] = staged.a[i].w;
  }
#pragma unroll
  for (int i = 0; i < kLoadsB; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    if (kQuadsB % kThreads != 0 && index >= kQuadsB) break;
    *reinterpret_cast<float4*>(tile_b + index * kQuad) = staged.b[i];
  }
}

// A thread's copies of each tile: quads of one column, in rows that lie as many apart as the threads hold. Copies are
// begun tile after tile.
class Copier {
 public:
  __device__ __forceinline__ Copier(const float* a, const float* b, int row0, int column0, int k0, int m, int n, int k)
      : row_a_(static_cast<int>(threadIdx.x) / kQuadsRowA),
        column_a_(static_cast<int>(threadIdx.x) % kQuadsRowA * kQuad),
        rows_a_(m - row0),
        left_(k - k0),
        inside_(column0 + static_cast<int>(threadIdx.x) % kQuadsRowB * kQuad < n),
        k_(k),
        n_(n) {
    const int row_b = k0 + static_cast<int>(threadIdx.x) / kQuadsRowB;
    const int column_b = column0 + static_cast<int>(threadIdx.x) % kQuadsRowB * kQuad;
    from_a_ = a + static_cast<long long>(row0 + row_a_) * k + k0 + column_a_;
    from_b_ = b + static_cast<long long>(row_b) * n + column_b;
  }

  __device__ __forceinline__ void copy(float* tile_a, float* tile_b) {
    const float* from = from_a_;
#pragma unroll
    for (int i = 0; i < kLoadsA; ++i) {
      const int row = row_a_ + i * (kThreads / kQuadsRowA);
      if (kQuadsA % kThreads != 0 && row >= TILE_M) break;
      char* to =
          reinterpret_cast<char*>(tile_a) + swizzle<kRowBytesA>(row, column_a_ * static_cast<int>(sizeof(float)));
      copy_async<16>(to, from, ALIGNED || (row < rows_a_ && column_a_ < left_) ? 16 : 0);
      from += static_cast<long long>(k_) * (kThreads / kQuadsRowA);
    }
    from = from_b_;
#pragma unroll
    for (int i = 0; i < kLoadsB; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * kThreads;
      if (kQuadsB % kThreads != 0 && index >= kQuadsB) break;
      copy_async<16>(tile_b + index * kQuad, from, ALIGNED || (inside_ && index / kQuadsRowB < left_) ? 16 : 0);
      from += static_cast<long long>(n_) * (kThreads / kQuadsRowB);
    }
    from_a_ += TILE_K;
    from_b_ += static_cast<long long>(n_) * TILE_K;
    left_ -= TILE_K;
  }

 private:
  static constexpr int kQuadsRowA = TILE_K / kQuad;
  static constexpr int kQuadsRowB = TILE_N / kQuad;
  static_assert(!kAsynchronous || (kThreads % kQuadsRowA == 0 && kThreads % kQuadsRowB == 0), "quads of one column");

  const float* from_a_;
  const float* from_b_;
  int row_a_, column_a_, rows_a_, left_;
  bool inside_;
  int k_, n_;
};

// Where in the tile a thread's row or column `i` is.
__device__ __forceinline__ int spread(int thread, int threads, int i) {
  return i / kQuad * (threads * kQuad) + thread * kQuad + i % kQuad;
}
__device__ __forceinline__ int row_of(int thread_m, int i) {
  return kAsynchronous ? thread_m + i * kThreadsM : spread(thread_m, kThreadsM, i);
}

__device__ __forceinline__ void load_b(float (&b)[THREAD_N], const float* tile_b, int k, int thread_n) {
#pragma unroll
  for (int j = 0; j < THREAD_N; j += kQuad) {
    *reinterpret_cast<float4*>(b + j) =
        *reinterpret_cast<const float4*>(tile_b + k * TILE_N + spread(thread_n, kThreadsN, j));
  }
}

__device__ __forceinline__ void multiply_rows(float (&sums)[THREAD_M][THREAD_N], const float* tile_a,
                                              const float* tile_b, int thread_m, int thread_n) {
  constexpr int kNextRow = kThreadsM * kRowBytesA;  // bytes to a thread's next row
  const int first = swizzle<kRowBytesA>(thread_m, 0);
#pragma unroll
  for (int k = 0; k < TILE_K; k += kQuad) {
    const int along = k * static_cast<int>(sizeof(float));
    float a[THREAD_M][kQuad];
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
      // The swizzle repeats every 1,024 bytes and turns bits that no row changes.
      const int place =
          kNextRow % 1024 == 0 ? (first ^ along) + i * kNextRow : swizzle<kRowBytesA>(thread_m + i * kThreadsM, along);
      *reinterpret_cast<float4*>(a[i]) =
          *reinterpret_cast<const float4*>(reinterpret_cast<const char*>(tile_a) + place);
    }
#pragma unroll
    for (int l = 0; l < kQuad; ++l) {
      float b[THREAD_N];
      load_b(b, tile_b, k + l, thread_n);
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sums[i][j] = fmaf(a[i][l], b[j], sums[i][j]);
      }
    }
  }
}

__device__ __forceinline__ void multiply(float (&sums)[THREAD_M][THREAD_N], const float* tile_a, const float* tile_b,
                                         int thread_m, int thread_n) {
#pragma unroll
  for (int k = 0; k < TILE_K; ++k) {
    float a[THREAD_M];
    float b[THREAD_N];
#pragma unroll
    for (int i = 0; i < THREAD_M; i += kQuad) {
      *reinterpret_cast<float4*>(a + i) =
          *reinterpret_cast<const float4*>(tile_a + k * kStrideA + spread(thread_m, kThreadsM, i));
    }
    load_b(b, tile_b, k, thread_n);
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
  }
}

}  // namespace

// Grid: tiles of n * tiles of m, 1, SPLIT_K. Dynamic shared memory: BUFFERS * TILE_K * (TILE_M + TILE_N) floats,
// and BUFFERS * TILE_K * 4 more where BUFFERS is 1 or 2.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    gemm(float* __restrict__ c, const float* __restrict__ a, const float* __restrict__ b, float* workspace, int m,
         int n, int k) {
  DYNAMIC_SHARED(float, tiles);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int thread_m = warp / (kThreadsN / LANES_N) * kLanesM + lane / LANES_N;
  const int thread_n = warp % (kThreadsN / LANES_N) * LANES_N + lane % LANES_N;
  const Tile tile = tile_of(static_cast<int>(blockIdx.x), (m + TILE_M - 1) / TILE_M, (n + TILE_N - 1) / TILE_N, GROUP);
  const int row0 = tile.row * TILE_M;
  const int column0 = tile.column * TILE_N;

  const int steps_all = (k + TILE_K - 1) / TILE_K;
  const int steps_each = (steps_all + SPLIT_K - 1) / SPLIT_K;
  const int step_first = static_cast<int>(blockIdx.z) * steps_each;
  const int step_end = min(step_first + steps_each, steps_all);

  float sums[THREAD_M][THREAD_N] = {};
  float* tile_a = tiles;
  float* tile_b = tiles + BUFFERS * kFloatsA;
  if constexpr (kAsynchronous) {
    Copier copier(a, b, row0, column0, step_first * TILE_K, m, n, k);
#pragma unroll
    for (int ahead = 0; ahead < BUFFERS - 1; ++ahead) {
      if (step_first + ahead < step_end) {
        copier.copy(tile_a + ahead * kFloatsA, tile_b + ahead * kFloatsB);
      }
      commit_copies();
    }
    int current = 0;
    int next = BUFFERS - 1;
    for (int step = step_first; step < step_end; ++step) {
      wait_for_copies<BUFFERS - 2>();
      __syncthreads();  // all threads see the current tile, and are done with the one before
      const int ahead = step + BUFFERS - 1;
      if (ahead < step_end) {
        copier.copy(tile_a + next * kFloatsA, tile_b + next * kFloatsB);
      }
      commit_copies();
      multiply_rows(sums, tile_a + current * kFloatsA, tile_b + current * kFloatsB, thread_m, thread_n);
      current = current + 1 == BUFFERS ? 0 : current + 1;
      next = next + 1 == BUFFERS ? 0 : next + 1;
    }
  } else {
    Staged staged;
    if (step_first < step_end) {
      fetch(staged, a, b, row0, column0, step_first * TILE_K, m, n, k, k);
      put(staged, tile_a, tile_b);
    }
    __syncthreads();
    for (int step = step_first; step < step_end; ++step) {
      const int current = BUFFERS == 2 ? (step - step_first) % 2 : 0;
      const int next = BUFFERS == 2 ? 1 - current : 0;
      const bool more = step + 1 < step_end;
      if (more) fetch(staged, a, b, row0, column0, (step + 1) * TILE_K, m, n, k, k);
      multiply(sums, tile_a + current * kFloatsA, tile_b + current * kFloatsB, thread_m, thread_n);
      if (BUFFERS == 1) __syncthreads();
      if (more) put(staged, tile_a + next * kFloatsA, tile_b + next * kFloatsB);
      __syncthreads();
    }
  }

  float* out = SPLIT_K > 1 ? workspace + static_cast<long long>(blockIdx.z) * m * n : c;
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int row = row0 + row_of(thread_m, i);
#pragma unroll
    for (int j = 0; j < THREAD_N; j += kQuad) {
      const int column = column0 + spread(thread_n, kThreadsN, j);
      if (ALIGNED || (row < m && column < n)) {
        *reinterpret_cast<float4*>(out + static_cast<long long>(row) * n + column) =
            make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
      }
    }
  }
#if SPLIT_K > 1
  auto* arrived = reinterpret_cast<unsigned*>(workspace + static_cast<long long>(SPLIT_K) * m * n) + blockIdx.x;
  if (!is_last_block(arrived, SPLIT_K)) return;
#pragma unroll 1
  for (int i = 0; i < THREAD_M; ++i) {
    const int row = row0 + row_of(thread_m, i);
#pragma unroll 1
    for (int j = 0; j < THREAD_N; j += kQuad) {
      const int column = column0 + spread(thread_n, kThreadsN, j);
      if (!ALIGNED && (row >= m || column >= n)) continue;
      const long long place = static_cast<long long>(row) * n + column;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int part = 0; part < SPLIT_K; ++part) {
        const float4 one =
            __ldcg(reinterpret_cast<const float4*>(workspace + static_cast<long long>(part) * m * n + place));
        sum = make_float4(sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w);
      }
      *reinterpret_cast<float4*>(c + place) = sum;
    }
  }
#endif
}
