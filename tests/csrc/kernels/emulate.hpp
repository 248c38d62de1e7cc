// Compiles a kernel of csrc/kernels for the host: the threads of a block are fibers that a barrier switches between,
// one block after another. What is emulated is what the kernels use; a warp's exchanges wait for its 32 lanes, and a
// block in which some threads wait for a barrier that others never reach aborts with a message. Shared memory begins as
// NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulate::dynamic_shared.data())

#define EMULATED

namespace emulate {

// The types of 16 bits, as bits.
inline float float_of_fp16(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}
inline unsigned short fp16_of_float(float value) {
  const auto rounded = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
inline float float_of_bf16(unsigned short bits) {
  const unsigned wide = static_cast<unsigned>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline unsigned short bf16_of_float(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline std::vector<float4> dynamic_shared;
inline unsigned long blocks_run = 0;
inline bool last_warp_first = false;
inline dim3 thread_index, block_index, block_size, grid_size;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int waits = 0;  // 0: runs, 1: for its warp, 2: for its block
  float given = 0;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned running;
inline std::function<void()> body;

inline void wait(int what) {
  const unsigned self = running;
  fibers[self].waits = what;
  swapcontext(&fibers[self].context, &scheduler);
}

inline void enter() {
  body();
  fibers[running].done = true;
  swapcontext(&fibers[running].context, &scheduler);
}

inline bool release(std::size_t first, std::size_t last, int what) {
  for (std::size_t i = first; i < last; ++i) {
    if (!fibers[i].done && fibers[i].waits != what) return false;
  }
  bool any = false;
  for (std::size_t i = first; i < last; ++i) {
    any |= !fibers[i].done;
    fibers[i].waits = 0;
  }
  return any;
}

// Runs a warp as far as it comes without the others: a barrier that is missing shows.
inline bool run_warp(unsigned first, unsigned last) {
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned i = first; i < last; ++i) {
      if (fibers[i].done || fibers[i].waits != 0) continue;
      running = i;
      thread_index = {i, 0, 0};
      swapcontext(&scheduler, &fibers[i].context);
      again = true;
    }
    again |= release(first, last, 1);
    moved |= again;
  }
  return moved;
}

inline void run_block(unsigned threads) {
  ++blocks_run;
  constexpr std::size_t kStack = 64 * 1024;
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    fiber.done = false;
    fiber.waits = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  const unsigned warps = (threads + 31) / 32;
  while (true) {
    bool moved = false;
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = 32 * (last_warp_first ? warps - 1 - i : i);
      moved |= run_warp(first, std::min(first + 32, threads));
    }
    if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; })) return;
    moved |= release(0, threads, 2);
    if (!moved) {
      std::fprintf(stderr, "emulate: some threads wait for a barrier that others do not reach\n");
      std::abort();
    }
  }
}

// Runs kernel() for each thread of each block, blocks and warps in reverse order if wanted.
inline void launch(dim3 grid, unsigned threads, std::size_t shared_bytes, std::function<void()> kernel,
                   bool backwards = false) {
  grid_size = grid;
  block_size = {threads, 1, 1};
  body = std::move(kernel);
  last_warp_first = backwards;
  const unsigned blocks = grid.x * grid.y * grid.z;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = backwards ? blocks - 1 - i : i;
    block_index = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    dynamic_shared.assign(shared_bytes / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
    run_block(threads);
  }
}

}  // namespace emulate

#define threadIdx emulate::thread_index
#define blockIdx emulate::block_index
#define blockDim emulate::block_size
#define gridDim emulate::grid_size

inline void __syncthreads() { emulate::wait(2); }
inline void __threadfence() {}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  const unsigned self = emulate::running;
  emulate::fibers[self].given = value;
  emulate::wait(1);
  const float got = emulate::fibers[self ^ static_cast<unsigned>(mask)].given;
  emulate::wait(1);  // nobody gives anew before all have taken
  return got;
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to += value;
  return before;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
using std::max;
using std::min;
