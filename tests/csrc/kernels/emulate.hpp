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
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulate::own_shared())

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

inline std::vector<float4> dynamic_shared;  // of the blocks that run together, one after another
inline std::size_t shared_quads = 0;        // of a block
inline unsigned long blocks_run = 0;
inline unsigned first_block = 0;  // of those that run together
inline bool last_warp_first = false;
inline std::function<bool()> when_all_wait;  // does something that was left for later, if there is something
inline dim3 thread_index, block_index, block_size, grid_size;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int waits = 0;  // 0: runs, 1: for its warp, 2: for its block, 3: until something holds, 4: for its cluster
  std::function<bool()> until;
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

inline void wait_until(std::function<bool()> holds) {
  if (holds()) return;
  fibers[running].until = std::move(holds);
  wait(3);
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

// A block of those that run together, as a thread sees it.
inline void become(unsigned fiber) {
  running = fiber;
  thread_index = {fiber % block_size.x, 0, 0};
  const unsigned block = first_block + fiber / block_size.x;
  block_index = {block % grid_size.x, block / grid_size.x % grid_size.y, block / grid_size.x / grid_size.y};
}

inline float4* own_shared() { return dynamic_shared.data() + running / block_size.x * shared_quads; }

// Runs a warp as far as it comes without the others: a barrier that is missing shows.
inline bool run_warp(unsigned first, unsigned last) {
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned i = first; i < last; ++i) {
      Fiber& fiber = fibers[i];
      if (fiber.waits == 3 && fiber.until()) fiber.waits = 0;
      if (fiber.done || fiber.waits != 0) continue;
      become(i);
      swapcontext(&scheduler, &fiber.context);
      again = true;
    }
    again |= release(first, last, 1);
    moved |= again;
  }
  return moved;
}

// And a block as far as it comes without those of its cluster.
inline bool run_block(unsigned block) {
  const unsigned begin = block * block_size.x;
  const unsigned end = begin + block_size.x;
  const unsigned warps = (block_size.x + 31) / 32;
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = begin + 32 * (last_warp_first ? warps - 1 - i : i);
      again |= run_warp(first, std::min(first + 32, end));
    }
    again |= release(begin, end, 2);
    moved |= again;
  }
  return moved;
}

inline void run_blocks(unsigned blocks) {
  blocks_run += blocks;
  constexpr std::size_t kStack = 64 * 1024;
  const unsigned threads = block_size.x;
  fibers.resize(blocks * threads);
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
  while (true) {
    bool moved = false;
    for (unsigned i = 0; i < blocks; ++i) moved |= run_block(last_warp_first ? blocks - 1 - i : i);
    if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; })) return;
    moved |= release(0, blocks * threads, 4);
    if (!moved && !(when_all_wait && when_all_wait())) {
      std::fprintf(stderr, "emulate: some threads wait for a barrier that others do not reach\n");
      std::abort();
    }
  }
}

// Runs kernel() for each thread of each block, clusters of `cluster` blocks together; blocks and warps in reverse order
// if wanted.
inline void launch(dim3 grid, unsigned threads, std::size_t shared_bytes, std::function<void()> kernel,
                   bool backwards = false, unsigned cluster = 1) {
  grid_size = grid;
  block_size = {threads, 1, 1};
  body = std::move(kernel);
  last_warp_first = backwards;
  shared_quads = shared_bytes / sizeof(float4) + 1;
  const unsigned clusters = grid.x * grid.y * grid.z / cluster;
  for (unsigned i = 0; i < clusters; ++i) {
    first_block = (backwards ? clusters - 1 - i : i) * cluster;
    dynamic_shared.assign(cluster * shared_quads, float4{NAN, NAN, NAN, NAN});
    run_blocks(cluster);
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
