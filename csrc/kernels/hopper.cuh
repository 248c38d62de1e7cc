// Thin wrappers of Hopper's additions: barriers in shared memory that count bytes (mbarrier), copies by the tensor
// memory accelerator (TMA), products by a warpgroup (wgmma), clusters. For sm_90a alone.
//
// A tile in shared memory has rows of 128 bytes and begins at a multiple of 1,024. Its 16-byte chunks are in the order
// of the 128-byte swizzle, which TMA and wgmma both apply. Bits 4 to 6 of the address are XORed with bits 7 to 9. Wider
// tiles are several of these boxes, one after another.
//
// On the host, EMULATED_HOPPER names the file that has these functions instead (tests/csrc/kernels/emulate_hopper.hpp).
#pragma once

#include "mma.cuh"

#ifdef EMULATED_HOPPER
#define GRID_CONSTANT
#else
#define GRID_CONSTANT __grid_constant__
#endif

namespace cudasched::kernels {

constexpr int kBoxBytes = 128;  // of a row of a tile
constexpr int kGroupThreads = 128;

// A descriptor by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// The descriptor of a matrix with the 128-byte swizzle for wgmma: address, offsets and swizzle, as in the PTX ISA under
// "Matrix descriptor". Of a matrix whose rows are along k ("K-major") groups of 8 rows lie `stride` bytes apart, and
// `leading` is not used. Of one whose rows are along m or n, groups of 8 rows of k lie `stride` bytes apart and boxes
// of 64 columns `leading` bytes.
__device__ __forceinline__ constexpr unsigned long long matrix_descriptor(unsigned address, unsigned leading,
                                                                          unsigned stride) {
  return static_cast<unsigned long long>((address & 0x3ffffu) >> 4) |
         static_cast<unsigned long long>((leading & 0x3ffffu) >> 4) << 16 |
         static_cast<unsigned long long>((stride & 0x3ffffu) >> 4) << 32 | 1ull << 62;
}

}  // namespace cudasched::kernels

#ifdef EMULATED_HOPPER
#include EMULATED_HOPPER
#else

namespace cudasched::kernels {

using Barrier = unsigned long long;

// `count` arrivals complete a phase, with the bytes expected in that phase.
__device__ __forceinline__ void initialise_barrier(Barrier* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// After the initialisations, before a barrier that lets other threads, blocks of the cluster and TMA see them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and tells how many bytes copies will bring in this phase.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier at the same place in block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(Barrier* barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity is complete. The first phase has parity 0; the one before, of parity 1, is
// complete at once.
__device__ __forceinline__ void wait_for(Barrier* barrier, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Begins the copy of the box of `map` whose first column and row are given; its bytes count at the barrier. Elements
// beyond the array become zeros.
__device__ __forceinline__ void load_box(void* shared, const TensorMap& map, Barrier* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same into all blocks of the cluster whose bits are set in `blocks`, and counted at their barriers.
__device__ __forceinline__ void load_box_everywhere(void* shared, const TensorMap& map, Barrier* barrier, int column,
                                                    int row, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Begins the copy of a box to the array; elements beyond the array are left out.
__device__ __forceinline__ void store_box(const TensorMap& map, const void* shared, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(column), "r"(row)
               : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the `Groups` latest groups of this thread's stores still read shared memory.
template <int Groups>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

// store_box sees this thread's writes to shared memory after the next barrier.
__device__ __forceinline__ void publish_to_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit elements, the inverse of load_matrix_x4.
__device__ __forceinline__ void store_matrix_x4(void* shared, const unsigned (&registers)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared)),
               "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

// A barrier of `threads` threads of the block; 0 is that of __syncthreads.
__device__ __forceinline__ void meet_at(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster.
__device__ __forceinline__ void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Before the first product, and after sums have been touched otherwise.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the `Groups` latest groups of products are not done.
template <int Groups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

// The compiler neither reads nor moves the sums across this.
template <int Count>
__device__ __forceinline__ void hold(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// multiply_group(d, a, b, accumulate, Type()): begins d = a * b (+ d), 64 x N, N twice the size of d. The 128 threads
// of a warpgroup call it; a is 64 x 16 by rows along k, b 16 x N by rows along n. Warp w of the group has rows 16 w to
// 16 w + 15. Of these, value 4 j + i of a lane has row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
#define SUMS_8(d, i)                                                                                  \
  "+f"((d)[(i) + 0]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), \
      "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
#define SUMS_32(d, i) SUMS_8(d, i), SUMS_8(d, (i) + 8), SUMS_8(d, (i) + 16), SUMS_8(d, (i) + 24)
#define SUMS_64(d) SUMS_32(d, 0)
#define SUMS_128(d) SUMS_32(d, 0), SUMS_32(d, 32)
#define SUMS_192(d) SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64)
#define SUMS_256(d) SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64), SUMS_32(d, 96)
#define LIST_64                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_128                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_192                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_256                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MULTIPLY_GROUP(N, A, B, P, TYPE, NAME)                                                                         \
  __device__ __forceinline__ void multiply_group(float(&d)[N / 2], unsigned long long a, unsigned long long b,         \
                                                 int accumulate, TYPE) {                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                                                 \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##N "}, " A ", " B          \
                                                                                               ", p, 1, 1, 0, 1;\n}\n" \
                 : SUMS_##N(d)                                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                   \
  }
MULTIPLY_GROUP(64, "%32", "%33", "%34", Bf16, "bf16")
MULTIPLY_GROUP(64, "%32", "%33", "%34", Fp16, "f16")
MULTIPLY_GROUP(128, "%64", "%65", "%66", Bf16, "bf16")
MULTIPLY_GROUP(128, "%64", "%65", "%66", Fp16, "f16")
MULTIPLY_GROUP(192, "%96", "%97", "%98", Bf16, "bf16")
MULTIPLY_GROUP(192, "%96", "%97", "%98", Fp16, "f16")
MULTIPLY_GROUP(256, "%128", "%129", "%130", Bf16, "bf16")
MULTIPLY_GROUP(256, "%128", "%129", "%130", Fp16, "f16")
#undef MULTIPLY_GROUP
#undef LIST_64
#undef LIST_128
#undef LIST_192
#undef LIST_256
#undef SUMS_8
#undef SUMS_32
#undef SUMS_64
#undef SUMS_128
#undef SUMS_192
#undef SUMS_256

}  // namespace cudasched::kernels

#endif  // EMULATED_HOPPER
