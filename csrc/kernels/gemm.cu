// C = A * B in fp32 on the SIMT cores; A is m x k, B k x n, C m x n, all row-major.
//
// A block makes a tile of TILE_M x TILE_N, a thread THREAD_M x THREAD_N of it, in quads of columns that lie
// TILE_N / (THREAD_N / 4) apart, so that the lanes of a warp read shared memory without conflicts. The next TILE_K
// columns of A and rows of B are loaded into registers while the current ones are used.
//
// Parameters: TILE_M, TILE_N, TILE_K, THREAD_M, THREAD_N (multiples of 4); BUFFERS: 1 a tile in shared memory, with two
// barriers a step, 2 two tiles, with one; GROUP: rows of tiles that neighbouring blocks share, for the L2; SPLIT_K: how
// many blocks share the work of a tile, each over a part of k; MIN_BLOCKS; ALIGNED: m, n and k are multiples of the tile,
// else of 4 (k and n).
//
// With SPLIT_K > 1 each block leaves its part in `workspace` and the last one of a tile adds them in order, so that the
// result does not depend on who was last. workspace: SPLIT_K * m * n floats, and then an unsigned for each tile, zero
// before the first launch and after each. Not used with SPLIT_K = 1.
#include "common.cuh"

namespace {

using namespace cudasched::kernels;

constexpr int kQuad = 4;
constexpr int kThreadsM = TILE_M / THREAD_M;
constexpr int kThreadsN = TILE_N / THREAD_N;
constexpr int kThreads = kThreadsM * kThreadsN;
constexpr int kPadding = kQuad;  // against conflicts when A is written transposed; a multiple of 16 bytes
constexpr int kStrideA = TILE_M + kPadding;
constexpr int kQuadsA = TILE_M * TILE_K / kQuad;
constexpr int kQuadsB = TILE_K * TILE_N / kQuad;
constexpr int kLoadsA = (kQuadsA + kThreads - 1) / kThreads;
constexpr int kLoadsB = (kQuadsB + kThreads - 1) / kThreads;
constexpr int kFloatsA = TILE_K * kStrideA;
constexpr int kFloatsB = TILE_K * TILE_N;
static_assert(THREAD_M % kQuad == 0 && THREAD_N % kQuad == 0 && TILE_K % kQuad == 0, "quads");

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

// Where in the tile a thread's row or column `i` is.
__device__ __forceinline__ int spread(int thread, int threads, int i) {
  return i / kQuad * (threads * kQuad) + thread * kQuad + i % kQuad;
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
#pragma unroll
    for (int j = 0; j < THREAD_N; j += kQuad) {
      *reinterpret_cast<float4*>(b + j) =
          *reinterpret_cast<const float4*>(tile_b + k * TILE_N + spread(thread_n, kThreadsN, j));
    }
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
  }
}

}  // namespace

// Grid: tiles of n * tiles of m, 1, SPLIT_K. Dynamic shared memory: BUFFERS * (TILE_K * (TILE_M + 4 + TILE_N)) floats.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    gemm(float* __restrict__ c, const float* __restrict__ a, const float* __restrict__ b, float* workspace, int m, int n,
         int k) {
  DYNAMIC_SHARED(float, tiles);
  const int thread_m = static_cast<int>(threadIdx.x) / kThreadsN;
  const int thread_n = static_cast<int>(threadIdx.x) % kThreadsN;

  // Blocks that run at the same time share GROUP rows of tiles: their A stays in the L2 while B passes.
  const int tiles_m = (m + TILE_M - 1) / TILE_M;
  const int tiles_n = (n + TILE_N - 1) / TILE_N;
  const int group = static_cast<int>(blockIdx.x) / (GROUP * tiles_n);
  const int rows_here = min(GROUP, tiles_m - group * GROUP);
  const int within = static_cast<int>(blockIdx.x) - group * GROUP * tiles_n;
  const int tile_row = group * GROUP + within % rows_here;
  const int tile_column = within / rows_here;
  const int row0 = tile_row * TILE_M;
  const int column0 = tile_column * TILE_N;

  const int steps_all = (k + TILE_K - 1) / TILE_K;
  const int steps_each = (steps_all + SPLIT_K - 1) / SPLIT_K;
  const int step_first = static_cast<int>(blockIdx.z) * steps_each;
  const int step_end = min(step_first + steps_each, steps_all);

  float sums[THREAD_M][THREAD_N] = {};
  Staged staged;
  float* tile_a = tiles;
  float* tile_b = tiles + BUFFERS * kFloatsA;
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

  float* out = SPLIT_K > 1 ? workspace + static_cast<long long>(blockIdx.z) * m * n : c;
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int row = row0 + spread(thread_m, kThreadsM, i);
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
  __shared__ bool is_last;
  auto* arrived = reinterpret_cast<unsigned*>(workspace + static_cast<long long>(SPLIT_K) * m * n) + blockIdx.x;
  __threadfence();  // this thread's part, before the arrival is counted
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1u) == SPLIT_K - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) *arrived = 0;
#pragma unroll 1
  for (int i = 0; i < THREAD_M; ++i) {
    const int row = row0 + spread(thread_m, kThreadsM, i);
#pragma unroll 1
    for (int j = 0; j < THREAD_N; j += kQuad) {
      const int column = column0 + spread(thread_n, kThreadsN, j);
      if (!ALIGNED && (row >= m || column >= n)) continue;
      const long long place = static_cast<long long>(row) * n + column;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int part = 0; part < SPLIT_K; ++part) {
        const float4 one = __ldcg(reinterpret_cast<const float4*>(workspace + static_cast<long long>(part) * m * n + place));
        sum = make_float4(sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w);
      }
      *reinterpret_cast<float4*>(c + place) = sum;
    }
  }
#endif
}
