// conv2d.cu on Hopper's tensor cores (wgmma), for sm_90a: the same arguments, the same results.
//
// A warpgroup makes 64 * PARTS pixels of the tile, a block GROUPS times as many. Copies are those of sm_80 (cp.async),
// by all threads: a tile of patches is no box of x that could be copied as a whole. With LATE their addresses are
// computed while the tensor cores are busy.
//
// Parameters: TYPE, SPLIT_K, ORDER, CHUNK, MIN_BLOCKS as in conv2d.cu; GROUPS, PARTS; TILE_M = 64 * GROUPS * PARTS;
// TILE_N (64, 128, 256); TILE_K = 64; PENDING: of how many steps products stay under way while the next one begins (0,
// 1), so that tiles are given up one or two steps after they were used; STAGES (PENDING + 2 or more); LATE: whether the
// copies of a step begin 0 before its products, 1 behind them; BY_L1: whether x is read by the L1, too; OUT_BY_SHARED:
// whether y is written 1 by way of shared memory, 16 bytes at a time, 0 from the registers, 4 bytes at a time.
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
constexpr int kAhead = STAGES - 1 - PENDING;  // steps from a copy to its use
static_assert(kAhead >= 1, "one tile arrives while one is used, and with PENDING one was");

}  // namespace

// Arguments as in conv2d.cu. Dynamic shared memory: 1,024 bytes, and STAGES * (TILE_M + TILE_N) * 64 elements, or with
// OUT_BY_SHARED TILE_M * TILE_N if that is more. workspace likewise.
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
  Loader<kThreads, BY_L1 != 0> loader(x, w, of, work.pixel0, work.filter0, work.k0);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads % 4;
  const unsigned tiles = shared_address(shared);
  float sums[PARTS][TILE_N / 2] = {};
#pragma unroll 1
  for (int stage = 0; stage < kAhead; ++stage) {
    unsigned char* to = shared + stage * kStageBytes;
    if (stage < work.steps) loader.next(to, to + kTileBytesA);
    commit_copies();
  }
  int slot = 0;
  int slot_free = kAhead;  // of the tile that is copied next
  for (int step = 0; step < work.steps; ++step) {
    wait_for_copies<kAhead - 1>();
    publish_to_tma();
    __syncthreads();  // the tiles are there, and no product is under way but those of PENDING steps
    const auto copy_ahead = [&](int step, int slot_free) {
      if (step + kAhead < work.steps) {
        unsigned char* to = shared + slot_free * kStageBytes;
        loader.next(to, to + kTileBytesA);
      }
      commit_copies();
    };
    if constexpr (LATE == 0) copy_ahead(step, slot_free);
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
    if constexpr (LATE == 1) copy_ahead(step, slot_free);
    wait_for_products<PENDING>();
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
  const auto row_of = [&](int i) { return (group * PARTS + i / kQuads) * 64 + warp * 16; };
  const auto column_of = [&](int i) { return i % kQuads * 8; };
  if constexpr (OUT_BY_SHARED != 0) {
    write_tile<kThreads, PARTS * kQuads>(y, bias, shared, work, filters, quad, row_of, column_of);
  } else {
    write_pairs<PARTS * kQuads>(y, bias, work, filters, quad, row_of, column_of);
  }
}
