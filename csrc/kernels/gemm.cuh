// The order in which the blocks of a matrix product take the tiles of C.
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

}  // namespace cudasched::kernels
