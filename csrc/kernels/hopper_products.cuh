// Products by a warpgroup that hopper.cuh has not: of B by columns, and of an A in registers. For sm_90a alone.
//
// On the host, EMULATED_HOPPER_PRODUCTS names the file that has these functions instead
// (tests/csrc/kernels/emulate_hopper_products.hpp).
#pragma once

#include "hopper.cuh"

#ifdef EMULATED_HOPPER_PRODUCTS
#include EMULATED_HOPPER_PRODUCTS
#else

namespace cudasched::kernels {

#define EIGHT_SUMS(d, i)                                                                              \
  "+f"((d)[(i) + 0]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), \
      "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
// The operands of N columns, and their names in the instruction.
#define SUMS_16(d) EIGHT_SUMS(d, 0)
#define SUMS_32(d) SUMS_16(d), EIGHT_SUMS(d, 8)
#define SUMS_48(d) SUMS_32(d), EIGHT_SUMS(d, 16)
#define SUMS_64(d) SUMS_48(d), EIGHT_SUMS(d, 24)
#define SUMS_80(d) SUMS_64(d), EIGHT_SUMS(d, 32)
#define SUMS_96(d) SUMS_80(d), EIGHT_SUMS(d, 40)
#define SUMS_112(d) SUMS_96(d), EIGHT_SUMS(d, 48)
#define SUMS_128(d) SUMS_112(d), EIGHT_SUMS(d, 56)
#define SUMS_144(d) SUMS_128(d), EIGHT_SUMS(d, 64)
#define SUMS_160(d) SUMS_144(d), EIGHT_SUMS(d, 72)
#define SUMS_176(d) SUMS_160(d), EIGHT_SUMS(d, 80)
#define SUMS_192(d) SUMS_176(d), EIGHT_SUMS(d, 88)
#define SUMS_208(d) SUMS_192(d), EIGHT_SUMS(d, 96)
#define SUMS_224(d) SUMS_208(d), EIGHT_SUMS(d, 104)
#define SUMS_240(d) SUMS_224(d), EIGHT_SUMS(d, 112)
#define SUMS_256(d) SUMS_240(d), EIGHT_SUMS(d, 120)
#define LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_32 LIST_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_48 LIST_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIST_64 LIST_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_80 LIST_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_96 LIST_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_112 LIST_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIST_128 LIST_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_144 LIST_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_160 LIST_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_176 LIST_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LIST_192 LIST_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_208 LIST_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LIST_224 LIST_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define LIST_240 LIST_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LIST_256 LIST_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// multiply_by_columns(d, a, b, accumulate, Type()): begins d = a * b (+ d), 64 x N, N twice the size of d. The 128
// threads of a warpgroup call it; a is 64 x 16 by rows along k, b 16 x N by columns along k. Sums lie as those of
// multiply_group.
#define BY_COLUMNS(N, A, B, P, TYPE, NAME)                                                                             \
  __device__ __forceinline__ void multiply_by_columns(float(&d)[N / 2], unsigned long long a, unsigned long long b,    \
                                                      int accumulate, TYPE) {                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                                                 \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##N "}, " A ", " B          \
                                                                                               ", p, 1, 1, 0, 0;\n}\n" \
                 : SUMS_##N(d)                                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                   \
  }
BY_COLUMNS(32, "%16", "%17", "%18", Bf16, "bf16")
BY_COLUMNS(32, "%16", "%17", "%18", Fp16, "f16")
BY_COLUMNS(48, "%24", "%25", "%26", Bf16, "bf16")
BY_COLUMNS(48, "%24", "%25", "%26", Fp16, "f16")
BY_COLUMNS(64, "%32", "%33", "%34", Bf16, "bf16")
BY_COLUMNS(64, "%32", "%33", "%34", Fp16, "f16")
BY_COLUMNS(80, "%40", "%41", "%42", Bf16, "bf16")
BY_COLUMNS(80, "%40", "%41", "%42", Fp16, "f16")
BY_COLUMNS(96, "%48", "%49", "%50", Bf16, "bf16")
BY_COLUMNS(96, "%48", "%49", "%50", Fp16, "f16")
BY_COLUMNS(112, "%56", "%57", "%58", Bf16, "bf16")
BY_COLUMNS(112, "%56", "%57", "%58", Fp16, "f16")
BY_COLUMNS(128, "%64", "%65", "%66", Bf16, "bf16")
BY_COLUMNS(128, "%64", "%65", "%66", Fp16, "f16")
BY_COLUMNS(144, "%72", "%73", "%74", Bf16, "bf16")
BY_COLUMNS(144, "%72", "%73", "%74", Fp16, "f16")
BY_COLUMNS(160, "%80", "%81", "%82", Bf16, "bf16")
BY_COLUMNS(160, "%80", "%81", "%82", Fp16, "f16")
BY_COLUMNS(176, "%88", "%89", "%90", Bf16, "bf16")
BY_COLUMNS(176, "%88", "%89", "%90", Fp16, "f16")
BY_COLUMNS(192, "%96", "%97", "%98", Bf16, "bf16")
BY_COLUMNS(192, "%96", "%97", "%98", Fp16, "f16")
BY_COLUMNS(256, "%128", "%129", "%130", Bf16, "bf16")
BY_COLUMNS(256, "%128", "%129", "%130", Fp16, "f16")
#undef BY_COLUMNS

// multiply_held(d, a, b): begins d += a * b, 64 x N. Each warp has its 16 rows of a as a fragment; b is 16 x N by rows
// along n. The fragment may not change before the product is waited for.
#define HELD(N, A0, A1, A2, A3, B, TYPE, NAME)                                                                      \
  __device__ __forceinline__ void multiply_held(float(&d)[N / 2], const FragmentA<TYPE>& a, unsigned long long b) { \
    asm volatile(                                                                                                   \
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##N                               \
        "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 1;\n}\n"                                              \
        : SUMS_##N(d)                                                                                               \
        : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "l"(b));                                          \
  }
HELD(64, "%32", "%33", "%34", "%35", "%36", Bf16, "bf16")
HELD(64, "%32", "%33", "%34", "%35", "%36", Fp16, "f16")
HELD(128, "%64", "%65", "%66", "%67", "%68", Bf16, "bf16")
HELD(128, "%64", "%65", "%66", "%67", "%68", Fp16, "f16")
#undef HELD
#undef EIGHT_SUMS
#undef LIST_16
#undef LIST_32
#undef LIST_48
#undef LIST_64
#undef LIST_80
#undef LIST_96
#undef LIST_112
#undef LIST_128
#undef LIST_144
#undef LIST_160
#undef LIST_176
#undef LIST_192
#undef LIST_208
#undef LIST_224
#undef LIST_240
#undef LIST_256
#undef SUMS_16
#undef SUMS_32
#undef SUMS_48
#undef SUMS_64
#undef SUMS_80
#undef SUMS_96
#undef SUMS_112
#undef SUMS_128
#undef SUMS_144
#undef SUMS_160
#undef SUMS_176
#undef SUMS_192
#undef SUMS_208
#undef SUMS_224
#undef SUMS_240
#undef SUMS_256

}  // namespace cudasched::kernels

#endif  // EMULATED_HOPPER_PRODUCTS
