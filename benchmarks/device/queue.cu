// What the work queues are measured with: items that are chains of arithmetic of given lengths, which nothing can split
// (a ray that is marched, a root that is searched). Static distributions run a loop over items around a loop over
// steps, as such kernels do, and so do the queues for warps and blocks. The `_flat` ones and the queues for threads and
// lanes have one loop over steps, in which a thread changes to its next item. All of them leave the same numbers.
#include "cudasched/device/work_queue.cuh"

using namespace cudasched::device;

namespace {

constexpr int kOperations = 64;  // of a step

__device__ __forceinline__ float begin(unsigned long long item) { return static_cast<float>(item % 1021); }

__device__ __forceinline__ float step(float value) {
#pragma unroll
  for (int i = 0; i < kOperations; ++i) value = value * 0.9990234375f + 0.25f;
  return value;
}

__device__ __forceinline__ float chain(unsigned long long item, unsigned length) {
  float value = begin(item);
#pragma unroll 1
  for (unsigned i = 0; i < length; ++i) value = step(value);
  return value;
}

__device__ __forceinline__ unsigned long long thread() {
  return static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ unsigned long long threads() {
  return static_cast<unsigned long long>(gridDim.x) * blockDim.x;
}

// next(item) gives the thread's next item.
template <class Next>
__device__ __forceinline__ void flat(const unsigned* lengths, float* found, Next next) {
  unsigned long long item = 0;
  bool more = next(item);
  float value = begin(item);
  unsigned left = more ? lengths[item] : 0;
#pragma unroll 1
  while (more) {
    if (left == 0) {
      found[item] = value;
      more = next(item);
      value = begin(item);
      left = more ? lengths[item] : 0;
    }
    if (left != 0) {
      value = step(value);
      --left;
    }
  }
}

// The same loop, which the lanes of a warp go through together. No length is 0.
template <class Work>
__device__ __forceinline__ void turns(const unsigned* lengths, float* found, Work& work) {
  unsigned long long item = 0;
  bool taken = false;
  float value = 0;
  unsigned left = 0;
#pragma unroll 1
  while (work.next(left == 0, item, taken)) {
    if (taken) {
      value = begin(item);
      left = lengths[item];
    }
    if (left != 0) {
      value = step(value);
      if (--left == 0) found[item] = value;
    }
  }
}

}  // namespace

#define KERNEL(name)                                                                                                   \
  extern "C" __global__ void name(WorkQueue* queue, unsigned long long items, unsigned batch, const unsigned* lengths, \
                                  float* found)

// ---- static

KERNEL(blocked) {
  const unsigned long long each = (items + threads() - 1) / threads();
  const unsigned long long first = thread() * each;
  const unsigned long long last = first + each < items ? first + each : items;
  for (unsigned long long item = first; item < last; ++item) found[item] = chain(item, lengths[item]);
}

KERNEL(cyclic) {
  for (unsigned long long item = thread(); item < items; item += threads()) found[item] = chain(item, lengths[item]);
}

KERNEL(block_per_item) {
  if (threadIdx.x == 0) found[blockIdx.x] = chain(blockIdx.x, lengths[blockIdx.x]);
}

KERNEL(cyclic_flat) {
  unsigned long long mine = thread();
  flat(lengths, found, [&](unsigned long long& item) {
    item = mine;
    mine += threads();
    return item < items;
  });
}

// As LaneWork, without a queue: 4 lanes wait for one another, and take items that were theirs from the beginning.
struct CyclicLanes {
  unsigned long long mine;
  unsigned long long items;

  __device__ bool next(bool wants, unsigned long long& item, bool& taken) {
    taken = false;
    const unsigned asking = __ballot_sync(0xffffffffu, wants);
    if (__popc(asking) < 4) return true;
    taken = wants && mine < items;
    if (taken) {
      item = mine;
      mine += threads();
    }
    return __ballot_sync(0xffffffffu, taken || !wants) != 0;
  }
};

KERNEL(cyclic_flat_4) {
  CyclicLanes work{thread(), items};
  turns(lengths, found, work);
}

// ---- work queues

KERNEL(queue_thread) {
  ThreadWork work(*queue, items, batch);
  flat(lengths, found, [&](unsigned long long& item) { return work.next(item); });
  finish(*queue);
}

KERNEL(queue_lanes) {
  LaneWork work(*queue, items, batch, 4);
  turns(lengths, found, work);
  finish(*queue);
}

KERNEL(queue_warp) {
  WarpWork work(*queue, items, batch);
  for (Batch taken; work.next(taken);) {
    for (unsigned i = threadIdx.x % 32; i < taken.count; i += 32) {
      found[taken.first + i] = chain(taken.first + i, lengths[taken.first + i]);
    }
  }
  finish(*queue);
}

KERNEL(queue_shared_warp) {
  __shared__ SharedBatch shared;
  SharedWork work(*queue, items, batch, shared);
  for (Batch taken; work.next(taken, 32);) {
    const unsigned lane = threadIdx.x % 32;
    if (lane < taken.count) found[taken.first + lane] = chain(taken.first + lane, lengths[taken.first + lane]);
  }
  finish(*queue);
}

KERNEL(queue_block) {
  __shared__ BlockBatch shared;
  BlockWork work(*queue, items, batch, shared);
  for (Batch taken; work.next(taken);) {
    for (unsigned i = threadIdx.x; i < taken.count; i += blockDim.x) {
      found[taken.first + i] = chain(taken.first + i, lengths[taken.first + i]);
    }
  }
  finish(*queue);
}
