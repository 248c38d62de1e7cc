// Runs CUDA device code on threads of the host, one for each thread of each block, so that all blocks run at once and
// ThreadSanitizer sees what they do to one another. What is emulated is what include/cudasched/device uses: barriers,
// shuffles, votes, the mask of active lanes, atomics. Where lanes of a warp have diverged, __activemask gives those of
// them that have come to it by the time when no lane of the warp is running; a kernel that waits for ever aborts with a
// message.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__

namespace device_threads {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

enum class Wait { kNothing, kBlock, kShuffle, kVote, kMask };

struct Lane {
  Wait waits = Wait::kNothing;
  bool done = false;
  unsigned mask = 0;         // of a shuffle or vote: the lanes that take part; of kMask: the answer
  std::uint64_t value = 0;   // that it gives
  std::uint64_t round = 0;   // how often it was let go on
  unsigned source = 0;       // of a shuffle: whose value it takes
  std::uint64_t result = 0;  // of a shuffle or vote
  std::condition_variable changed;
};

// One block: a monitor over all that its threads wait for.
struct Block {
  std::mutex mutex;
  std::vector<Lane> lanes;
  std::vector<std::uint64_t> shared;

  Block(unsigned threads, std::size_t shared_bytes) : lanes(threads), shared(shared_bytes / 8 + 1, ~std::uint64_t{0}) {}

  // Called with the mutex held, by a thread that has begun to wait or has ended.
  void settle() {
    for (std::size_t first = 0; first < lanes.size(); first += 32) settle_warp(first);
    bool all = true;
    bool any = false;
    for (const Lane& lane : lanes) {
      all = all && (lane.done || lane.waits == Wait::kBlock);
      any = any || lane.waits == Wait::kBlock;
    }
    if (!all || !any) return;
    for (Lane& lane : lanes) {
      if (lane.waits == Wait::kBlock) let_go(lane);
    }
  }

  void settle_warp(std::size_t first) {
    const std::size_t count = std::min<std::size_t>(32, lanes.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      const Lane& lane = lanes[first + i];
      if (lane.waits != Wait::kShuffle && lane.waits != Wait::kVote) continue;
      const Wait what = lane.waits;
      const unsigned mask = lane.mask;
      bool complete = true;
      std::uint64_t votes = 0;
      for (std::size_t j = 0; j < count; ++j) {  // a mask may name lanes that do not exist
        if ((mask >> j & 1) == 0) continue;
        complete = complete && lanes[first + j].waits == what && lanes[first + j].mask == mask;
        votes |= (lanes[first + j].value & 1) << j;
      }
      if (!complete) continue;
      for (std::size_t j = 0; j < count; ++j) {
        if ((mask >> j & 1) == 0) continue;
        lanes[first + j].result = what == Wait::kVote ? votes : lanes[first + lanes[first + j].source % 32].value;
      }
      for (std::size_t j = 0; j < count; ++j) {
        if ((mask >> j & 1) != 0) let_go(lanes[first + j]);
      }
    }
    bool running = false;
    unsigned asking = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Lane& lane = lanes[first + i];
      running = running || (!lane.done && lane.waits == Wait::kNothing);
      if (lane.waits == Wait::kMask) asking |= 1u << i;
    }
    if (running || asking == 0) return;
    for (std::size_t i = 0; i < count; ++i) {
      if ((asking >> i & 1) == 0) continue;
      lanes[first + i].mask = asking;
      let_go(lanes[first + i]);
    }
  }

  static void let_go(Lane& lane) {
    lane.waits = Wait::kNothing;
    ++lane.round;
    lane.changed.notify_one();
  }
};

inline thread_local Index thread_index, block_index;
inline thread_local unsigned rank;  // of the thread in its block
inline thread_local Block* block;
inline Index block_size, grid_size;  // of the launch that runs

inline Lane& wait(Wait what, unsigned mask = 0, std::uint64_t value = 0, unsigned source = 0) {
  constexpr auto kPatience = std::chrono::seconds(120);
  std::unique_lock lock(block->mutex);
  Lane& lane = block->lanes[rank];
  lane.waits = what;
  lane.mask = mask;
  lane.value = value;
  lane.source = source;
  const std::uint64_t round = lane.round;
  block->settle();
  if (!lane.changed.wait_for(lock, kPatience, [&] { return lane.round != round; })) {
    std::fprintf(stderr, "a thread of the emulated kernel waits for others that never come\n");
    std::abort();
  }
  return lane;
}

// Runs kernel() in each thread of each block, all at once.
inline void launch(Index grid, Index size, std::size_t shared_bytes, const std::function<void()>& kernel) {
  grid_size = grid;
  block_size = size;
  const unsigned threads = size.x * size.y * size.z;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> running;
  for (unsigned b = 0; b < grid.x * grid.y * grid.z; ++b) {
    blocks.push_back(std::make_unique<Block>(threads, shared_bytes));
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([&kernel, grid, size, b, t, of = blocks.back().get()] {
        block = of;
        rank = t;
        thread_index = {t % size.x, t / size.x % size.y, t / size.x / size.y};
        block_index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        kernel();
        const std::lock_guard lock(of->mutex);
        of->lanes[t].done = true;
        of->settle();
      });
    }
  }
  for (std::thread& thread : running) thread.join();
}

// Lets other threads in, often: between two atomic operations that a kernel takes for one, they find the gap.
inline void let_others_in() {
  static thread_local std::uint32_t state = 2463534242u + 7919u * rank + 104729u * block_index.x;
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  if (state % 8 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  } else if (state % 2 == 0) {
    std::this_thread::yield();
  }
}

// The block's shared memory, as a T.
template <class T>
T& shared() {
  return *reinterpret_cast<T*>(block->shared.data());
}

}  // namespace device_threads

#define threadIdx device_threads::thread_index
#define blockIdx device_threads::block_index
#define blockDim device_threads::block_size
#define gridDim device_threads::grid_size

inline void __syncthreads() { device_threads::wait(device_threads::Wait::kBlock); }
inline unsigned __activemask() { return device_threads::wait(device_threads::Wait::kMask).mask; }
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return static_cast<T>(device_threads::wait(device_threads::Wait::kShuffle, mask, static_cast<std::uint64_t>(value),
                                             static_cast<unsigned>(source))
                            .result);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  return static_cast<unsigned>(device_threads::wait(device_threads::Wait::kVote, mask, vote ? 1 : 0).result);
}
inline void __threadfence() {}  // the atomics below order everything
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __fdividef(float a, float b) { return a / b; }
template <class T>
T atomicAdd(T* to, T value) {
  device_threads::let_others_in();
  return std::atomic_ref(*to).fetch_add(value);
}
template <class T>
T atomicExch(T* to, T value) {
  device_threads::let_others_in();
  return std::atomic_ref(*to).exchange(value);
}
template <class T>
T atomicCAS(T* to, T expected, T value) {
  device_threads::let_others_in();
  std::atomic_ref(*to).compare_exchange_strong(expected, value);
  return expected;
}
