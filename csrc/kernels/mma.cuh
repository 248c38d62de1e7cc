// Thin wrappers of the tensor-core kernels' instructions: asynchronous copies to shared memory (cp.async), loads of
// matrix fragments (ldmatrix) and products of fragments (mma.sync). Also the swizzle that keeps accesses to shared
// memory free of bank conflicts. For sm_80 and later.
//
// All threads of a warp call load_matrix_* and multiply_accumulate together. A fragment is each lane's part of a
// matrix, in the layout that the PTX ISA documents for mma.m16n8k16 (fp16, bf16), .m16n8k8 (tf32) and .m16n8k32 (int8):
// with g = lane / 4, t = lane % 4 and E elements in a register (2, 1 and 4),
//
//   A, 16 x 8E: register r has row g + 8 (r % 2), columns E t + 4E (r / 2) and the E - 1 behind it
//   B, 8E x 8:  register r has column g, rows E t + 4E r and the E - 1 behind it
//   C, 16 x 8:  value i has row g + 8 (i / 2), column 2 t + i % 2
//
// So load_matrix_x4 fills an A from a row-major matrix of any type; lane l gives the address of row l % 16, byte 16 (l
// / 16). load_matrix_x2 fills a B from a matrix that is stored by columns; lane l gives column l % 8, byte 16 (l / 8 %
// 2). The transposed ones turn elements of two bytes: a B from a row-major matrix of fp16 or bf16.
//
// On the host, EMULATED_MMA names the file that has these functions instead (tests/csrc/kernels/emulate_mma.hpp).
#pragma once

namespace cudasched::kernels {

// Types of the elements of A and B.
struct Fp16 {};
struct Bf16 {};
struct Tf32 {};
struct Int8 {};

template <typename Type>
struct FragmentA {
  unsigned at[4];
};

template <typename Type>
struct FragmentB {
  unsigned at[2];
};

// How many columns of A one multiply_accumulate takes.
template <typename Type>
constexpr int kDepth = 16;
template <>
constexpr int kDepth<Tf32> = 8;
template <>
constexpr int kDepth<Int8> = 32;

// The offset in bytes of (row, byte) in a tile of rows of `RowBytes`, a power of two or a multiple of 128. Eight
// consecutive rows at one 16-byte column lie in different banks. A chunk of 16 bytes stays whole. The tile begins at a
// multiple of 1,024 bytes of the memory that is swizzled together. With rows of 128 bytes this is TMA's 128-byte
// swizzle.
template <int RowBytes>
__device__ __forceinline__ constexpr int swizzle(int row, int byte) {
  static_assert(RowBytes % 128 == 0 || RowBytes == 64 || RowBytes == 32 || RowBytes == 16, "rows that tile the banks");
  const int offset = row * RowBytes + byte;
  const int line = RowBytes >= 128 ? row : offset / 128;
  return offset ^ (line % 8 * 16);
}

}  // namespace cudasched::kernels

#ifdef EMULATED_MMA
#include EMULATED_MMA
#else

namespace cudasched::kernels {

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Begins a copy of `Bytes` (4, 8 or 16; both addresses are multiples) to shared memory. Only the first `valid` bytes
// are read, the others become zeros; with 0 the address need not exist.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "what cp.async copies");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(Bytes),
                 "r"(valid)
                 : "memory");
  }
}

// Makes a group of the copies that this thread has begun since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `Groups` latest groups of this thread are not done. Other threads see the copies after a
// barrier.
template <int Groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// Loads 8 x 8 matrices of 16-bit elements. Lanes 0 to 7 give the rows of the first (16 bytes each), 8 to 15 those of
// the second, and so on. Register i gets of matrix i row lane / 4, elements 2 (lane % 4) and the next.
__device__ __forceinline__ void load_matrix_x4(unsigned (&registers)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(shared))
               : "memory");
}

// Register i gets of matrix i column lane / 4, rows 2 (lane % 4) and the next.
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&registers)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(shared))
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2(unsigned (&registers)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(shared_address(shared))
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2_transposed(unsigned (&registers)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(shared_address(shared))
               : "memory");
}

// d += a * b, 16 x 8. Sums are fp32, those of int8 int32.
__device__ __forceinline__ void multiply_accumulate(float (&d)[4], const FragmentA<Fp16>& a, const FragmentB<Fp16>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
}

__device__ __forceinline__ void multiply_accumulate(float (&d)[4], const FragmentA<Bf16>& a, const FragmentB<Bf16>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
}

// The elements are fp32 bits of which the last 13 are not looked at: round_to_tf32 first.
__device__ __forceinline__ void multiply_accumulate(float (&d)[4], const FragmentA<Tf32>& a, const FragmentB<Tf32>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
}

__device__ __forceinline__ void multiply_accumulate(int (&d)[4], const FragmentA<Int8>& a, const FragmentB<Int8>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
}

// The bits of a float, rounded to the nearest tf32 (halves away from zero).
__device__ __forceinline__ unsigned round_to_tf32(unsigned bits) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// Two values as elements of one register, `low` at the lower column.
template <typename Type>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<Fp16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ unsigned pack<Bf16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace cudasched::kernels

#endif  // EMULATED_MMA
