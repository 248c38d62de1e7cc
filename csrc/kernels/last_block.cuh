// The choice of the one of several blocks that finishes their common work: the last one to arrive, without waiting.
#pragma once

namespace cudasched::kernels {

// Whether this block is the last of `count` that come here. The last block sees all earlier writes of all these blocks,
// by loads that pass the L1 (__ldcg). `arrived` is zero before the first and after the last. All threads of the block
// call is_last_block.
__device__ __forceinline__ bool is_last_block(unsigned* arrived, unsigned count) {
  __shared__ bool last;
  __threadfence();  // this thread's writes, before the arrival is counted
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1u) == count - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (threadIdx.x == 0) *arrived = 0;
  return true;
}

}  // namespace cudasched::kernels
