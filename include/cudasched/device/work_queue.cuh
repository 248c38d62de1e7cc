// Work queues on the device: the items 0 to N-1 of a launch, handed out while it runs, so that no thread, warp or block
// waits for another that was dealt the long ones. For kernels whose grid fills the GPU and stays (persistent kernels).
//
//   __global__ void kernel(cudasched::device::WorkQueue* queue, unsigned long long items, ...) {
//     cudasched::device::WarpWork work(*queue, items, 32);
//     for (cudasched::device::Batch batch; work.next(batch);) {
//       const unsigned lane = threadIdx.x % 32;
//       if (lane < batch.count) process(batch.first + lane);
//     }
//     cudasched::device::finish(*queue);
//   }
//
// A WorkQueue is 16 bytes of device memory that are zero before its first launch (cuMemsetD8). finish() makes them zero
// again in the last block that calls it, so the next launch needs no fill; one launch at a time uses a queue. After a
// launch that failed, and after one whose kernel did not call finish(), fill it with zeros.
//
// Who takes items, and how often the one counter in device memory is changed:
// - ThreadWork: a thread takes `batch` items for itself; once for all lanes that take at the same time.
// - WarpWork: a warp takes `batch` items for all of its lanes; once a batch.
// - BlockWork: a block takes `batch` items for all of its threads; once a batch, with two barriers.
// - SharedWork: warps and threads take from the batch of their block; once for the `batch` items of a block.
//
// Counters in shared memory are an order of magnitude faster than the one in device memory, which all blocks share:
// take SharedWork where an item takes less than a few microseconds, and batches as large as the imbalance allows.
//
// ThreadWork and SharedWork::next(Item) give each thread its next item as soon as it wants one. What that is worth
// shows where a thread steps through its item in the same loop in which it takes the next
// (`examples/persistent_queue.cu`); in a loop of its own, the lanes of a warp wait for the longest item among them
// before they take again.
//
// CUDA C++ for sm_70 and later, by nvcc or NVRTC; it includes nothing. Up to 2^40 items.
#ifndef CUDASCHED_DEVICE_WORK_QUEUE_CUH_
#define CUDASCHED_DEVICE_WORK_QUEUE_CUH_

namespace cudasched {
namespace device {

using Item = unsigned long long;

// In device memory, zero before its first launch.
struct WorkQueue {
  Item next;             // the first item that nobody has taken
  unsigned blocks_done;  // that have called finish()
  unsigned reserved;
};

// The items first to first + count - 1. Sizes of batches are 1 to 2^22 - 1; what is asked for beyond that is cut to it.
struct Batch {
  Item first;
  unsigned count;
};

// In shared memory: what a block has of its batch. SharedWork sets it up. One word, so that all of it changes at once:
// the first item left, how many are left, and two flags.
struct SharedBatch {
  unsigned long long word;
};

// In shared memory: what BlockWork tells the threads of a block.
struct BlockBatch {
  Batch batch;
};

// The index of the calling thread in its block, and how many threads that has.
__device__ inline unsigned thread_in_block() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}
__device__ inline unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }

namespace detail {

constexpr unsigned kCountBits = 22;
constexpr unsigned kLargestBatch = (1u << kCountBits) - 1;

__device__ inline unsigned batch_size(unsigned wanted) {
  return wanted == 0 ? 1 : wanted < kLargestBatch ? wanted : kLargestBatch;
}

// The lanes of the calling warp that exist: the last warp of a block may have fewer than 32.
__device__ inline unsigned lanes_of_warp() {
  const unsigned left = threads_of_block() - thread_in_block() / 32 * 32;
  return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}

__device__ inline unsigned lane() { return thread_in_block() % 32; }

// At most `wanted` items of the queue; none: there are no more.
__device__ inline Batch take(WorkQueue& queue, Item items, unsigned wanted) {
  const Item first = atomicAdd(&queue.next, static_cast<Item>(wanted));
  if (first >= items) return {items, 0};
  const Item left = items - first;
  return {first, left < wanted ? static_cast<unsigned>(left) : wanted};
}

__device__ inline Batch from_lane(unsigned lanes, Batch batch, unsigned source) {
  batch.first = __shfl_sync(lanes, batch.first, static_cast<int>(source));
  batch.count = __shfl_sync(lanes, batch.count, static_cast<int>(source));
  return batch;
}

// What one lane takes for all that ask at the same time: take(wanted) gives at most so many, none if there are no more.
// Each lane gets up to `each` of them. False: none were left for this lane.
template <class Take>
__device__ inline bool take_together(unsigned each, Batch& mine, Take take_some) {
  while (true) {
    const unsigned lanes = __activemask();
    const unsigned leader = static_cast<unsigned>(__ffs(static_cast<int>(lanes))) - 1;
    const unsigned rank = static_cast<unsigned>(__popc(lanes & ((1u << lane()) - 1)));
    Batch all{0, 0};
    if (lane() == leader) all = take_some(each * static_cast<unsigned>(__popc(lanes)));
    all = from_lane(lanes, all, leader);
    if (all.count == 0) return false;
    const unsigned before = rank * each;
    if (before < all.count) {
      mine.first = all.first + before;
      mine.count = all.count - before < each ? all.count - before : each;
      return true;
    }
    // Fewer came than were asked for, as at the end of a block's batch: the lanes that got none ask again.
  }
}

constexpr unsigned long long kNoMore = 1;
constexpr unsigned long long kBeingFilled = 2;
constexpr unsigned kFlagBits = 2;

__device__ inline unsigned long long packed(Item first, unsigned count) {
  return first << (kFlagBits + kCountBits) | static_cast<unsigned long long>(count) << kFlagBits;
}

// At most `wanted` items of the block's batch, which is filled anew from the queue when it is empty. Called by one of
// the lanes that take together; it waits only while another fills the batch, which waits for nobody.
__device__ inline Batch take_shared(SharedBatch& shared, WorkQueue& queue, Item items, unsigned block_batch,
                                    unsigned wanted) {
  unsigned long long word = atomicAdd(&shared.word, 0ull);
  while (true) {
    const unsigned left = static_cast<unsigned>(word >> kFlagBits) & kLargestBatch;
    const Item first = word >> (kFlagBits + kCountBits);
    if (left != 0) {
      const unsigned taken = left < wanted ? left : wanted;
      const unsigned long long before = atomicCAS(&shared.word, word, packed(first + taken, left - taken));
      if (before == word) return {first, taken};
      word = before;
    } else if ((word & kNoMore) != 0) {
      return {items, 0};
    } else if ((word & kBeingFilled) != 0) {
      __nanosleep(20);
      word = atomicAdd(&shared.word, 0ull);
    } else {
      const unsigned long long before = atomicCAS(&shared.word, word, word | kBeingFilled);
      if (before != word) {
        word = before;
        continue;
      }
      const Batch got = take(queue, items, block_batch);
      const unsigned taken = got.count < wanted ? got.count : wanted;
      atomicExch(&shared.word, got.count == 0 ? kNoMore : packed(got.first + taken, got.count - taken));
      return {got.first, taken};
    }
  }
}

}  // namespace detail

// Items for single threads, straight from the queue.
class ThreadWork {
 public:
  // batch: how many items a thread takes at once.
  __device__ ThreadWork(WorkQueue& queue, Item items, unsigned batch = 1)
      : queue_(queue), items_(items), each_(detail::batch_size(batch)), mine_{0, 0} {}

  // The thread's next item; false: there is none, and none will come. Any threads of a warp may call it.
  __device__ bool next(Item& item) {
    if (mine_.count == 0 &&
        !detail::take_together(each_, mine_, [&](unsigned n) { return detail::take(queue_, items_, n); })) {
      return false;
    }
    item = mine_.first++;
    --mine_.count;
    return true;
  }

 private:
  WorkQueue& queue_;
  Item items_;
  unsigned each_;
  Batch mine_;
};

// Items for warps, straight from the queue.
class WarpWork {
 public:
  // batch: how many items a warp takes at once; 32 where each lane has its own.
  __device__ WarpWork(WorkQueue& queue, Item items, unsigned batch)
      : queue_(queue), items_(items), each_(detail::batch_size(batch)) {}

  // The warp's next items, the same for all of its lanes, which all call it. False: there are none, and none will come.
  __device__ bool next(Batch& batch) {
    const unsigned lanes = detail::lanes_of_warp();
    Batch got{0, 0};
    if (detail::lane() == 0) got = detail::take(queue_, items_, each_);
    batch = detail::from_lane(lanes, got, 0);
    return batch.count != 0;
  }

 private:
  WorkQueue& queue_;
  Item items_;
  unsigned each_;
};

// Items for blocks, straight from the queue.
class BlockWork {
 public:
  // batch: how many items a block takes at once. shared: the block's, in shared memory.
  __device__ BlockWork(WorkQueue& queue, Item items, unsigned batch, BlockBatch& shared)
      : queue_(queue), items_(items), each_(detail::batch_size(batch)), shared_(shared) {}

  // The block's next items, the same for all of its threads, which all call it: it begins and ends with a barrier.
  // False: there are none, and none will come.
  __device__ bool next(Batch& batch) {
    __syncthreads();  // all have read the batch before
    if (thread_in_block() == 0) shared_.batch = detail::take(queue_, items_, each_);
    __syncthreads();
    batch = shared_.batch;
    return batch.count != 0;
  }

 private:
  WorkQueue& queue_;
  Item items_;
  unsigned each_;
  BlockBatch& shared_;
};

// Items for warps and threads of a block, from a batch that the block takes from the queue.
class SharedWork {
 public:
  // batch: how many items a block takes at once. shared: the block's, in shared memory. each: how many of them a thread
  // takes at once, for next(Item). All threads of the block make it: it has a barrier.
  __device__ SharedWork(WorkQueue& queue, Item items, unsigned batch, SharedBatch& shared, unsigned each = 1)
      : queue_(queue),
        items_(items),
        block_batch_(detail::batch_size(batch)),
        each_(detail::batch_size(each)),
        shared_(shared),
        mine_{0, 0} {
    if (thread_in_block() == 0) shared_.word = 0;
    __syncthreads();
  }

  // At most `count` items for the calling warp, the same for all of its lanes, which all call it.
  __device__ bool next(Batch& batch, unsigned count) {
    const unsigned lanes = detail::lanes_of_warp();
    Batch got{0, 0};
    if (detail::lane() == 0)
      got = detail::take_shared(shared_, queue_, items_, block_batch_, detail::batch_size(count));
    batch = detail::from_lane(lanes, got, 0);
    return batch.count != 0;
  }

  // The calling thread's next item. Any threads of a warp may call it.
  __device__ bool next(Item& item) {
    if (mine_.count == 0 && !detail::take_together(each_, mine_, [&](unsigned n) {
          return detail::take_shared(shared_, queue_, items_, block_batch_, n);
        })) {
      return false;
    }
    item = mine_.first++;
    --mine_.count;
    return true;
  }

 private:
  WorkQueue& queue_;
  Item items_;
  unsigned block_batch_;
  unsigned each_;
  SharedBatch& shared_;
  Batch mine_;
};

// Every thread of every block calls it, once, when it takes no more. The last block makes the queue ready for the next
// launch. It has a barrier.
__device__ inline void finish(WorkQueue& queue) {
  __syncthreads();
  if (thread_in_block() != 0) return;
  __threadfence();
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  if (atomicAdd(&queue.blocks_done, 1u) + 1 != blocks) return;
  __threadfence();
  atomicExch(&queue.next, static_cast<Item>(0));
  atomicExch(&queue.blocks_done, 0u);
}

}  // namespace device
}  // namespace cudasched

#endif
