// C = A * B on Hopper's tensor cores (wgmma), fp16 or bf16, for sm_90a; A is m x k, B k x n, C m x n, all row-major.
//
// A block has CONSUMERS warpgroups, each of which multiplies TILE_M / CONSUMERS rows of the tile. One thread of a
// further warpgroup loads by TMA, STAGES tiles of A and B ahead; each stage has a barrier for "full" and one for
// "free". Blocks take tiles until there are none left, so that the loads of the next tile run while C of the last one
// is written. With a grid of as many blocks as tiles each block takes one.
//
// B is not turned: wgmma takes B by rows, in boxes of 64 columns. With CLUSTER = 2 two blocks share the columns of two
// tiles, one above the other: each loads half of B for both.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16); TILE_M (64 or 128 rows a consumer), TILE_N (64, 128, 192, 256), TILE_K (64,
// 128); CONSUMERS (1 to 3), STAGES; CLUSTER (1, 2); GROUP: rows of tiles (of pairs of tiles) that neighbouring blocks
// share, for the L2; STORE_BOX: C goes through shared memory and by TMA, else each thread writes its pairs of elements.
//
// map_a, map_b and map_c describe the arrays in boxes of 64 columns and TILE_M, TILE_K and 64 rows, with the 128-byte
// swizzle. k and n are multiples of 8, and the arrays begin at multiples of 16 bytes, as TMA requires. Sums are fp32,
// rounded once at the end.
#include "common.cuh"
#include "gemm.cuh"
#include "hopper.cuh"

namespace {

using namespace cudasched::kernels;

#if TYPE == TYPE_FP16
using Type = Fp16;
#else
using Type = Bf16;
#endif
static_assert(TYPE == TYPE_FP16 || TYPE == TYPE_BF16, "what wgmma takes by rows along n has two bytes");

constexpr int kBoxColumns = kBoxBytes / static_cast<int>(sizeof(Element));
constexpr int kThreads = (CONSUMERS + 1) * kGroupThreads;
constexpr int kRows = TILE_M / CONSUMERS;  // of a consumer
constexpr int kParts = kRows / 64;
constexpr int kSlice = kDepth<Type>;
constexpr int kBytesA = TILE_M * TILE_K * static_cast<int>(sizeof(Element));
constexpr int kBytesB = TILE_N * TILE_K * static_cast<int>(sizeof(Element));
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kBoxesB = TILE_N / kBoxColumns;
constexpr int kStoredBytes = 64 * kBoxBytes;                  // a box of C
constexpr unsigned kEmptyArrivals = CONSUMERS * 4 * CLUSTER;  // a lane of each warp, in each block of the cluster
constexpr int kAlignment = 1024;

static_assert(kRows == 64 || kRows == 128, "rows of a consumer");
static_assert(TILE_N % 64 == 0 && TILE_N <= 256 && (TILE_K == 64 || TILE_K == 128), "whole boxes");
static_assert(CLUSTER == 1 || (CLUSTER == 2 && kBoxesB % 2 == 0), "each block of a cluster loads half of B");

// The next stage, and the parity of its barriers.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

struct Shared {
  char* stages;
  char* stored;
  Barrier* full;
  Barrier* empty;
};

__device__ __forceinline__ void load_stage(const Shared& shared, const TensorMap& map_a, const TensorMap& map_b,
                                           Turn turn, int row0, int column0, int k0, unsigned rank) {
  char* stage = shared.stages + turn.stage * kStageBytes;
  Barrier* full = shared.full + turn.stage;
  wait_for(shared.empty + turn.stage, turn.parity ^ 1u);
  arrive_expecting(full, kStageBytes);
#pragma unroll
  for (int i = 0; i < TILE_K / kBoxColumns; ++i) {
    load_box(stage + i * TILE_M * kBoxBytes, map_a, full, k0 + i * kBoxColumns, row0);
  }
#pragma unroll
  for (int i = 0; i < kBoxesB / CLUSTER; ++i) {
    const int box = CLUSTER == 1 ? i : static_cast<int>(rank) * (kBoxesB / CLUSTER) + i;
    char* to = stage + kBytesA + box * TILE_K * kBoxBytes;
    if constexpr (CLUSTER == 1) {
      load_box(to, map_b, full, column0 + box * kBoxColumns, k0);
    } else {
      load_box_everywhere(to, map_b, full, column0 + box * kBoxColumns, k0, 3);
    }
  }
}

__device__ __forceinline__ void free_stage(const Shared& shared, int stage, int lane) {
  if constexpr (CLUSTER == 1) {
    if (lane == 0) arrive(shared.empty + stage);
  } else {
    if (lane < CLUSTER) arrive_at(shared.empty + stage, static_cast<unsigned>(lane));
  }
}

__device__ __forceinline__ void multiply_stage(float (&sums)[kParts][TILE_N / 2], const char* stage, int consumer,
                                               bool first) {
  const unsigned a = shared_address(stage) + static_cast<unsigned>(consumer * kRows * kBoxBytes);
  const unsigned b = shared_address(stage) + kBytesA;
#pragma unroll
  for (int slice = 0; slice < TILE_K / kSlice; ++slice) {
    const int box = slice * kSlice / kBoxColumns;
    const unsigned inside = slice * kSlice % kBoxColumns * static_cast<unsigned>(sizeof(Element));
    const auto from_b = matrix_descriptor(b + slice * kSlice * kBoxBytes, TILE_K * kBoxBytes, 8 * kBoxBytes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const unsigned rows = static_cast<unsigned>((box * TILE_M + part * 64) * kBoxBytes);
      const auto from_a = matrix_descriptor(a + rows + inside, 0, 8 * kBoxBytes);
      multiply_group(sums[part], from_a, from_b, !(first && slice == 0), Type{});
    }
  }
}

// C through shared memory, in boxes of 64 x 64.
__device__ __forceinline__ void store_boxes(const float (&sums)[kParts][TILE_N / 2], char* stored,
                                            const TensorMap& map_c, int consumer, int row0, int column0) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int lane = thread % kWarpThreads;
  const int row = thread / kWarpThreads * 16 + lane % 16;
  if (thread == 0) wait_for_stores<0>();  // of the last tile, from the same memory
  meet_at(1 + consumer, kGroupThreads);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int column = 0; column < TILE_N; column += 16) {
      const float* from = sums[part] + column / 2;
      const unsigned four[4] = {pack<Type>(from[0], from[1]), pack<Type>(from[2], from[3]),
                                pack<Type>(from[4], from[5]), pack<Type>(from[6], from[7])};
      char* box = stored + (part * kBoxesB + column / kBoxColumns) * kStoredBytes;
      const int byte = (column % kBoxColumns + lane / 16 * 8) * static_cast<int>(sizeof(Element));
      store_matrix_x4(box + swizzle<kBoxBytes>(row, byte), four);
    }
  }
  publish_to_tma();
  meet_at(1 + consumer, kGroupThreads);
  if (thread == 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kBoxesB; ++i) {
        store_box(map_c, stored + (part * kBoxesB + i) * kStoredBytes, column0 + i * kBoxColumns, row0 + part * 64);
      }
    }
    commit_stores();
  }
}

__device__ __forceinline__ void store_pairs(const float (&sums)[kParts][TILE_N / 2], Element* c, int row0, int column0,
                                            int m, int n) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int lane = thread % kWarpThreads;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + part * 64 + thread / kWarpThreads * 16 + half * 8 + lane / 4;
      Element* to = c + static_cast<long long>(row) * n + column0 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        if (row < m && column0 + j * 8 < n) {  // n is a multiple of 8
          *reinterpret_cast<unsigned*>(to + j * 8) =
              pack<Type>(sums[part][4 * j + 2 * half], sums[part][4 * j + 2 * half + 1]);
        }
      }
    }
  }
}

}  // namespace

// Grid: a multiple of CLUSTER, at most CLUSTER * tiles of n * ceil(tiles of m / CLUSTER). Dynamic shared memory: 1024 +
// STAGES * (TILE_M + TILE_N) * TILE_K * 2 + (STORE_BOX ? TILE_M * TILE_N * 2 : 0) + STAGES * 16 bytes. `a` and `b` are
// read by their maps alone, and so is c with STORE_BOX.
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(kThreads, 1)
        gemm_sm90(Element* __restrict__ c, const Element* a, const Element* b, const GRID_CONSTANT TensorMap map_a,
                  const GRID_CONSTANT TensorMap map_b, const GRID_CONSTANT TensorMap map_c, int m, int n, int k) {
  DYNAMIC_SHARED(char, memory);
  static_cast<void>(a);
  static_cast<void>(b);
  Shared shared;
  shared.stages = memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment;
  shared.stored = shared.stages + STAGES * kStageBytes;
  shared.full = reinterpret_cast<Barrier*>(shared.stored + (STORE_BOX ? TILE_M * TILE_N * sizeof(Element) : 0));
  shared.empty = shared.full + STAGES;

  const unsigned rank = CLUSTER == 1 ? 0 : cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (threadIdx.x == 0) {
    prefetch(map_a);
    prefetch(map_b);
    for (int stage = 0; stage < STAGES; ++stage) {
      initialise_barrier(shared.full + stage, 1);
      initialise_barrier(shared.empty + stage, kEmptyArrivals);
    }
    publish_barriers();
  }
  if constexpr (CLUSTER == 1) {
    __syncthreads();
  } else {
    meet_in_cluster();
  }

  const int tiles_n = (n + TILE_N - 1) / TILE_N;
  const int tiles_m = (m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER);  // of the cluster
  const int tiles = tiles_m * tiles_n;
  const int steps = (k + TILE_K - 1) / TILE_K;
  const int first = static_cast<int>(blockIdx.x) / CLUSTER;
  const int clusters = static_cast<int>(gridDim.x) / CLUSTER;
  Turn turn;

  if (group == CONSUMERS) {
    if constexpr (CONSUMERS == 2) give_registers<40>();
    if constexpr (CONSUMERS == 3) give_registers<32>();
    if (threadIdx.x == CONSUMERS * kGroupThreads) {
      for (int index = first; index < tiles; index += clusters) {
        const Tile tile = tile_of(index, tiles_m, tiles_n, GROUP);
        const int row0 = (tile.row * CLUSTER + static_cast<int>(rank)) * TILE_M;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          load_stage(shared, map_a, map_b, turn, row0, tile.column * TILE_N, step * TILE_K, rank);
          turn.advance();
        }
      }
    }
  } else {
    if constexpr (CONSUMERS == 2) take_registers<232>();
    if constexpr (CONSUMERS == 3) take_registers<160>();
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    for (int index = first; index < tiles; index += clusters) {
      const Tile tile = tile_of(index, tiles_m, tiles_n, GROUP);
      const int row0 = (tile.row * CLUSTER + static_cast<int>(rank)) * TILE_M + group * kRows;
      const int column0 = tile.column * TILE_N;
      float sums[kParts][TILE_N / 2];
      int last = 0;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        wait_for(shared.full + turn.stage, turn.parity);
#pragma unroll
        for (int part = 0; part < kParts; ++part) hold(sums[part]);
        begin_products();
        multiply_stage(sums, shared.stages + turn.stage * kStageBytes, group, step == 0);
        commit_products();
        wait_for_products<1>();  // those of the stage before are done
        if (step > 0) free_stage(shared, last, lane);
        last = turn.stage;
        turn.advance();
      }
      wait_for_products<0>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) hold(sums[part]);
      free_stage(shared, last, lane);
      if constexpr (STORE_BOX != 0) {
        store_boxes(sums, shared.stored + group * kRows * TILE_N * static_cast<int>(sizeof(Element)), map_c, group,
                    row0, column0);
      } else {
        store_pairs(sums, c, row0, column0, m, n);
      }
    }
    if constexpr (STORE_BOX != 0) wait_for_stores<0>();
  }
  if constexpr (CLUSTER > 1) meet_in_cluster();  // no block is gone while another arrives at its barriers
}
