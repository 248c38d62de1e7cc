// conv2d.cu on Hopper's tensor cores (wgmma), for sm_90a: the same arguments, the same results.
//
// A warpgroup makes 64 * PARTS pixels of the tile, a block GROUPS times as many. Copies are those of sm_80 (cp.async),
// by all threads: a tile of patches is no box of x that could be copied as a whole. They are worked out while the
// tensor cores are busy: products of one step are always under way, so that tiles are given up two steps after they
// were used.
//
// Parameters: TYPE, SPLIT_K, ORDER, CHUNK, MIN_BLOCKS as in conv2d.cu; GROUPS, PARTS (1, 2); TILE_M = 64 * GROUPS *
// PARTS; TILE_N (64, 128, 256); TILE_K = 64; STAGES (3 or more).
#define TILE_M (64 * GROUPS * PARTS)
#define TILE_K 64
#include "conv2d.cuh"
#include "hopper.cuh"
#include "hopper_products.cuh"

namespace {

using namespace cudasched::kernels;

constexpr int kThreads = GROUPS * kGroupThreads;
constexpr int kQuads = TILE_N / 8;  // of 64 rows
constexpr unsigned kEightRows = 8 * kBoxBytes;
constexpr int kAlignment = 1024;
static_assert(kRowBytes == kBoxBytes, "a tile is one box");
static_assert(STAGES >= 3, "one tile arrives while one is used and one was");

}  // namespace

// As conv2d.cu has it. Dynamic shared memory: 1,024 bytes, and STAGES * (TILE_M + TILE_N) * 64 elements, or TILE_M *
// TILE_N if that is more. workspace likewise.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    conv2d_sm90(Element* __restrict__ y, const Element* __restrict__ x, const Element* __restrict__ w,
                const Element* __restrict__ bias, float* workspace, int images, int height, int width, int channels,
                int filters, int rows, int columns, int out_height, int out_width, int stride_y, int stride_x,
                int padding_y, int padding_x, int dilation_y, int dilation_x) {
  DYNAMIC_SHARED(unsigned char, unaligned);
  unsigned char* shared = unaligned + (kAlignment - shared_address(unaligned) % kAlignment) % kAlignment;
  const Convolution of{images,    height,   width,    channels,  filters,   rows,       columns,   out_height,
                       out_width, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x};
  const Work work(of);
  Loader<kThreads> loader(x, w, of, work.pixel0, work.filter0, work.k0);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads % 4;
  const unsigned tiles = shared_address(shared);
  float sums[PARTS][TILE_N / 2] = {};
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 2; ++stage) {
    unsigned char* to = shared + stage * kStageBytes;
    if (stage < work.steps) loader.next(to, to + kTileBytesA);
    commit_copies();
  }
  int slot = 0;
  int slot_free = STAGES - 2;  // of the tile that is copied next
  for (int step = 0; step < work.steps; ++step) {
    wait_for_copies<STAGES - 3>();
    publish_to_tma();
    __syncthreads();  // the tiles are there, and no product of the step before the last one is under way
    const unsigned a = tiles + slot * kStageBytes + static_cast<unsigned>(group * PARTS * 64 * kBoxBytes);
    const unsigned b = tiles + slot * kStageBytes + kTileBytesA;
    begin_products();
#pragma unroll
    for (int slice = 0; slice < TILE_K / kDepth<Type>; ++slice) {
      const unsigned inside = slice * kDepth<Type> * static_cast<unsigned>(sizeof(Element));
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        multiply_by_columns(sums[part], matrix_descriptor(a + part * 64 * kBoxBytes + inside, 0, kEightRows),
                            matrix_descriptor(b + inside, 0, kEightRows), 1, Type{});
      }
    }
    commit_products();
    if (step + STAGES - 2 < work.steps) {
      unsigned char* to = shared + slot_free * kStageBytes;
      loader.next(to, to + kTileBytesA);
    }
    commit_copies();
    wait_for_products<1>();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    slot_free = slot_free + 1 == STAGES ? 0 : slot_free + 1;
  }
  wait_for_products<0>();
#pragma unroll
  for (int part = 0; part < PARTS; ++part) hold(sums[part]);
  wait_for_copies<0>();
  __syncthreads();

  const auto quad = [&](int i) { return sums[i / kQuads] + i % kQuads * 4; };
  if (!add_parts<kThreads, PARTS * kQuads>(workspace, work.tile, quad)) return;
  write_tile<kThreads, PARTS * kQuads>(
      y, bias, shared, work, filters, quad, [&](int i) { return (group * PARTS + i / kQuads) * 64 + warp * 16; },
      [&](int i) { return i % kQuads * 8; });
}
