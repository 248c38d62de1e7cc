// What the matrix products share: in which order blocks take the tiles of C, and how blocks that share a tile agree on
// who adds up their parts.
#pragma once

namespace cudasched::kernels {

struct Tile {
  int row, column;  // in tiles
};

// Blocks that run at the same time share `group` rows of tiles: their part of A stays in the L2 while B passes.
__device__ __forceinline__ Tile tile_of(int block, int tiles_m, int tiles_n, int group) {
  const int first = block / (group * tiles_n) * group;
  const int rows = min(group, tiles_m - first);
  const int within = block - first * tiles_n;
  return {first + within % rows, within / rows};
}

// Whether this block is the last of `blocks` that come here with their parts of a tile written: then it sees the parts
// of the others. `arrived` is zero before and after. All threads of the block call it; `shared` is room for the answer,
// which nothing else uses at the time.
__device__ __forceinline__ bool is_last_of(unsigned* arrived, unsigned blocks, unsigned* shared) {
  __threadfence();  // this thread's part, before the arrival is counted
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(arrived, 1u);
  __syncthreads();
  if (*shared != blocks - 1) return false;
  __threadfence();
  if (threadIdx.x == 0) *arrived = 0;
  return true;
}

}  // namespace cudasched::kernels
