// Work queues on the device: the items 0 to N-1 of a launch, handed out while the launch runs. So no thread, warp or
// block waits for another with longer items. For kernels whose grid fills the GPU and stays (persistent kernels).
//
//   __global__ void kernel(cudasched::device::WorkQueue* queue, unsigned long long items, ...) {
//     cudasched::device::LaneWork work(*queue, items);
//     cudasched::device::Item item = 0;
//     bool busy = false, taken = false;
//     while (work.next(!busy, item, taken)) {
//       if (taken) {
//         begin(item);
//         busy = true;
//       }
//       if (busy) busy = step(item);  // until it is done
//     }
//     cudasched::device::finish(*queue);
//   }
//
// A WorkQueue is 16 bytes of device memory that are zero before its first launch (cuMemsetD8). The last block that
// calls finish() makes the bytes zero again, so the next launch needs no fill. One launch at a time uses a queue. After
// a launch that failed, and after one whose kernel did not call finish(), fill it with zeros.
//
// Each class, the owner of its batches, and the rate of changes to the one counter in device memory:
// - LaneWork: the lanes of a warp take single items from a batch that the warp holds; once a batch.
// - ThreadWork: a thread takes `batch` items for itself; once for all lanes that take at the same time.
// - WarpWork: a warp takes `batch` items for all of its lanes; once a batch.
// - BlockWork: a block takes `batch` items for all of its threads; once a batch, with two barriers.
// - SharedWork: warps take from the batch of their block; once for the `batch` items of a block.
//
// Take LaneWork where a thread does an item alone, in many steps. Its lanes go through one loop together, in which each
// does a step or changes to its next item. In a loop over steps inside a loop over items, lanes wait for the longest
// item among them, even with a queue.
//
// CUDA C++ for sm_70 and later, by nvcc or NVRTC, without includes. Up to 2^40 items.
#ifndef CUDASCHED_DEVICE_WORK_QUEUE_CUH_
#define CUDASCHED_DEVICE_WORK_QUEUE_CUH_

namespace cudasched {
namespace device {

using Item = unsigned long long;

// In device memory, zero before its first launch.
struct WorkQueue {
  Item next;             // the first item not yet taken
  unsigned blocks_done;  // that have called finish()
  unsigned reserved;
};

// The items first to first + count - 1. Sizes of batches are 1 to 2^22 - 1; larger requests are cut to that.
struct Batch {
  Item first;
  unsigned count;
};

// In shared memory: the rest of a block's batch. SharedWork initialises this. One word changes at once: the first item
// left, the number left, and two flags.
struct SharedBatch {
  unsigned long long word;
};

// In shared memory: the batch that BlockWork hands to the threads of a block.
struct BlockBatch {
  Batch batch;
};

// The index of the calling thread in its block, and the block's number of threads.
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

// The mask of calls that all lanes of a warp make; CUDA requires only the lanes that exist.
constexpr unsigned kWholeWarp = 0xffffffffu;

// How many of these lanes are below the calling one.
__device__ inline unsigned lanes_before(unsigned lanes) {
  return static_cast<unsigned>(__popc(lanes & ((1u << lane()) - 1)));
}

// A number of lanes, 1 to those that the calling warp has.
__device__ inline unsigned lanes_together(unsigned wanted) {
  const unsigned lanes = static_cast<unsigned>(__popc(lanes_of_warp()));
  return wanted == 0 ? 1 : wanted < lanes ? wanted : lanes;
}

__device__ inline unsigned warps_of_grid() {
  return gridDim.x * gridDim.y * gridDim.z * ((threads_of_block() + 31) / 32);
}

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

constexpr unsigned long long kNoMore = 1;
constexpr unsigned long long kBeingFilled = 2;
constexpr unsigned kFlagBits = 2;

__device__ inline unsigned long long packed(Item first, unsigned count) {
  return first << (kFlagBits + kCountBits) | static_cast<unsigned long long>(count) << kFlagBits;
}

// At most `wanted` items of the block's batch, which is filled anew from the queue when it is empty. Called by one of
// the lanes that take together; that lane waits only while another fills the batch, which waits for no other.
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

  // The thread's next item; false: no item is left. Any threads of a warp may call it.
  __device__ bool next(Item& item) {
    if (mine_.count == 0) take_together();
    if (mine_.count == 0) return false;
    item = mine_.first++;
    --mine_.count;
    return true;
  }

 private:
  // One lane takes for all that ask at the same time. No loop: at the head of a loop that changes memory the compiler
  // yields. The lanes that wait for the yielded ones would go on without them.
  __device__ void take_together() {
    const unsigned lanes = __activemask();
    const unsigned leader = static_cast<unsigned>(__ffs(static_cast<int>(lanes))) - 1;
    const unsigned before = each_ * detail::lanes_before(lanes);
    Batch all{0, 0};
    if (detail::lane() == leader) all = detail::take(queue_, items_, each_ * static_cast<unsigned>(__popc(lanes)));
    all = detail::from_lane(lanes, all, leader);
    if (before >= all.count) return;
    mine_ = {all.first + before, all.count - before < each_ ? all.count - before : each_};
  }

  WorkQueue& queue_;
  Item items_;
  unsigned each_;
  Batch mine_;
};

// Items for the lanes of a warp that goes through one loop. In each turn the lanes that want an item get one, and the
// others do a step of theirs. From a batch that the warp takes from the queue and holds in registers.
class LaneWork {
 public:
  // batch: how many items a warp takes at most at once; towards the end it takes fewer. together: how many lanes must
  // want an item before any lane gets one. The start of an item costs the warp the same for one lane as for many. Use 1
  // where a step takes much longer than that.
  __device__ LaneWork(WorkQueue& queue, Item items, unsigned batch = 256, unsigned together = 4)
      : queue_(queue),
        items_(items),
        most_(detail::batch_size(batch)),
        together_(detail::lanes_together(together)),
        first_(0),
        left_(0) {}

  // One turn of the loop: all lanes of the warp call it. wants: the lane has no item or has finished its item. taken:
  // the lane got `item`. A lane that got none asks again in the next turn. False, for all lanes: no lane has an item,
  // and none is left.
  __device__ bool next(bool wants, Item& item, bool& taken) {
    const unsigned asking = __ballot_sync(detail::kWholeWarp, wants);
    const unsigned wanted = static_cast<unsigned>(__popc(asking));
    unsigned given = 0;
    taken = false;
    if (wanted >= together_) {
      if (left_ == 0 && first_ < items_) refill(wanted);
      given = wanted < left_ ? wanted : left_;
      const unsigned before = detail::lanes_before(asking);
      if (wants && before < given) {
        item = first_ + before;
        taken = true;
      }
      first_ += given;
      left_ -= given;
    }
    return given != 0 || asking != detail::lanes_of_warp();
  }

 private:
  // A quarter of an even share of the items left at the warp's last look, in whole warps. Takes are few while many
  // items remain, and small at the end, so that no warp's lanes wait for another warp's items. Then as many items as
  // the lanes want, but no more than an even share: few long items are spread over all warps.
  __device__ void refill(unsigned wanted) {
    const float even = __fdividef(static_cast<float>(items_ - first_), static_cast<float>(detail::warps_of_grid()));
    unsigned size = even < static_cast<float>(wanted) ? static_cast<unsigned>(even) : wanted;
    if (even >= 128.0f) size = even < 4.0f * static_cast<float>(most_) ? static_cast<unsigned>(even) / 128 * 32 : most_;
    size = size == 0 ? 1 : size < most_ ? size : most_;
    Batch got{0, 0};
    if (detail::lane() == 0) got = detail::take(queue_, items_, size);
    got = detail::from_lane(detail::kWholeWarp, got, 0);
    first_ = got.first;
    left_ = got.count;
  }

  WorkQueue& queue_;
  Item items_;
  unsigned most_;
  unsigned together_;
  Item first_;
  unsigned left_;
};

// Items for warps, straight from the queue.
class WarpWork {
 public:
  // batch: how many items a warp takes at once; 32 where each lane has its own.
  __device__ WarpWork(WorkQueue& queue, Item items, unsigned batch)
      : queue_(queue), items_(items), each_(detail::batch_size(batch)) {}

  // The warp's next items, the same for all of its lanes, which all call next(). False: no item is left.
  __device__ bool next(Batch& batch) {
    Batch got{0, 0};
    if (detail::lane() == 0) got = detail::take(queue_, items_, each_);
    batch = detail::from_lane(detail::kWholeWarp, got, 0);
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

  // The block's next items, the same for all of its threads, which all call next(). The call begins and ends with a
  // barrier. False: no item is left.
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

// Items for the warps of a block, from a batch that the block takes from the queue.
class SharedWork {
 public:
  // batch: how many items a block takes at once. shared: the block's, in shared memory. All threads of the block
  // construct one: the constructor has a barrier.
  __device__ SharedWork(WorkQueue& queue, Item items, unsigned batch, SharedBatch& shared)
      : queue_(queue), items_(items), block_batch_(detail::batch_size(batch)), shared_(shared) {
    if (thread_in_block() == 0) shared_.word = 0;
    __syncthreads();
  }

  // At most `count` items for the calling warp, the same for all of its lanes, which all call next().
  __device__ bool next(Batch& batch, unsigned count) {
    Batch got{0, 0};
    if (detail::lane() == 0)
      got = detail::take_shared(shared_, queue_, items_, block_batch_, detail::batch_size(count));
    batch = detail::from_lane(detail::kWholeWarp, got, 0);
    return batch.count != 0;
  }

 private:
  WorkQueue& queue_;
  Item items_;
  unsigned block_batch_;
  SharedBatch& shared_;
};

// Every thread of every block calls finish() once, after its last item. The last block makes the queue ready for the
// next launch. The call has a barrier.
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
