// Uses each function of mma.cuh once, so that a test can compile them.
#include "common.cuh"
#include "mma.cuh"

using namespace cudasched::kernels;

template <typename Type, typename Result>
__device__ void use(Result* out, const unsigned (&x4)[4], const unsigned (&x2)[2]) {
  FragmentA<Type> a = {x4[0], x4[1], x4[2], x4[3]};
  FragmentB<Type> b = {x2[0], x2[1]};
  Result d[4] = {};
  multiply_accumulate(d, a, b);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}

extern "C" __global__ void probe(float* sums, int* integers, const char* from, int valid) {
  DYNAMIC_SHARED(char, shared);
  char* mine = shared + swizzle<128>(static_cast<int>(threadIdx.x), 16);
  copy_async<16>(mine, from, valid);
  copy_async<8>(mine + 4096, from);
  copy_async<4>(mine + 8192, from);
  commit_copies();
  wait_for_copies<1>();
  wait_for_copies<0>();
  __syncthreads();
  unsigned x4[4], x2[2];
  load_matrix_x4(x4, mine);
  load_matrix_x2(x2, mine);
  use<Fp16>(sums, x4, x2);
  use<Bf16>(sums + 128, x4, x2);
  use<Int8>(integers, x4, x2);
  load_matrix_x4_transposed(x4, mine);
  load_matrix_x2_transposed(x2, mine);
  x2[0] = round_to_tf32(x2[0]);
  use<Tf32>(sums + 256, x4, x2);
  integers[128 + threadIdx.x] = static_cast<int>(pack<Fp16>(sums[0], sums[1]) + pack<Bf16>(sums[2], sums[3]));
}
