// Kernels that have what a rule of `cudasched advise` warns of, and the same work without it (cases.py says how each is
// compiled and launched). Written for that; they compute nothing of use.

#ifndef HELD
#define HELD 8  // values that a thread keeps in registers
#endif
#ifndef MOST_THREADS
#define MOST_THREADS 1024  // of a block
#endif
#ifndef LEAST_BLOCKS
#define LEAST_BLOCKS 1  // on a multiprocessor
#endif

__device__ __forceinline__ unsigned mixed(unsigned value) {
  value ^= value >> 16;
  value *= 0x7feb352dU;
  value ^= value >> 15;
  value *= 0x846ca68bU;
  return value ^ value >> 16;
}

// Arithmetic alone: `rounds` steps for each of `count` values.
extern "C" __global__ void advised_compute(float* data, int count, int rounds) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  float value = data[at];
  for (int i = 0; i < rounds; ++i) value = fmaf(value, 0.999F, 0.001F);
  data[at] = value;
}

// Loads that each wait for the one before, anywhere in memory: only other warps hide them. HELD values stay in
// registers.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, LEAST_BLOCKS)
    advised_chase(float* data, int count, int rounds) {
  extern __shared__ float staged[];
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  float held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = static_cast<float>(i);
  unsigned at = mixed(thread) % count;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const float found = data[at];
      held[i] = fmaf(held[i], 0.5F, found);
      at = mixed(at + __float_as_uint(found) % 7U + 1U) % count;
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) sum += held[i] * static_cast<float>(i + 1);
  if (sum == -1.0F) data[0] = staged[0] + sum;  // never; so that nothing is optimised away
}

// Loads in a row of which each waits for the one before, a whole line of memory a warp: what is under way at a time
// grows with the resident warps, and stays far below what the memory can give.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) advised_stream(float* data, int count, int rounds) {
  extern __shared__ float staged[];
  const unsigned step = gridDim.x * blockDim.x;
  unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int round = 0; round < rounds; ++round) {
    const float found = data[at % count];
    sum += found;
    at += step + (found < -1.0F ? 1 : 0);
  }
  if (sum == -1.0F) data[0] = staged[0] + sum;  // never; so that nothing is optimised away
}

// HELD values that are all needed in each round: without registers for them they are spilled.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, LEAST_BLOCKS)
    advised_spill(float* data, int count, int rounds) {
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) % count;
  float held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = data[(at + i) % count];
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i] = fmaf(held[i], 0.5F, held[(i + 1) % HELD]);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) sum += held[i];
  if (sum == -1.0F) data[at] = sum;
}

// Each block has an equal share of the values, and steps through it.
extern "C" __global__ void advised_share(float* data, int count, int rounds) {
  const int share = (count + gridDim.x - 1) / gridDim.x;
  const int end = min(count, static_cast<int>(blockIdx.x + 1) * share);
  for (int at = blockIdx.x * share + threadIdx.x; at < end; at += blockDim.x) {
    float value = data[at];
    for (int i = 0; i < rounds; ++i) value = fmaf(value, 0.999F, 0.001F);
    data[at] = value;
  }
}
