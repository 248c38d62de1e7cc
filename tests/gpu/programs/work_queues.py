"""Each item once, for sizes at random, by each way of taking; the queue is ready again after each launch."""

from __future__ import annotations

import random
from ctypes import c_uint32, c_uint64

import torch
from kernels import compiled, function, launch, load, pointer

SOURCE = """
#include "cudasched/device/work_queue.cuh"
using namespace cudasched::device;
using Count = unsigned;
#define KERNEL(name) \\
  extern "C" __global__ void name(WorkQueue* queue, Item items, Count batch, Count each, unsigned* seen)

__device__ void process(unsigned* seen, unsigned long long item) {
  atomicAdd(seen + item, 1u);
  for (unsigned i = 0; i < item % 13; ++i) __nanosleep(100);
}
__device__ void process(unsigned* seen, Batch taken, unsigned first, unsigned step) {
  for (unsigned i = first; i < taken.count; i += step) process(seen, taken.first + i);
}
__device__ unsigned lanes() { return min(32u, blockDim.x - threadIdx.x / 32 * 32); }

KERNEL(threads) {
  ThreadWork work(*queue, items, batch);
  for (Item item; work.next(item);) process(seen, item);
  finish(*queue);
}
KERNEL(lane_items) {
  LaneWork work(*queue, items, batch, each);
  Item item = 0;
  bool taken = false;
  unsigned left = 0;
  while (work.next(left == 0, item, taken)) {
    if (taken) {
      atomicAdd(seen + item, 1u);
      left = static_cast<unsigned>(item % 13);
    } else if (left != 0) {
      --left;
    }
  }
  finish(*queue);
}
KERNEL(warps) {
  WarpWork work(*queue, items, batch);
  for (Batch taken; work.next(taken);) process(seen, taken, threadIdx.x % 32, lanes());
  finish(*queue);
}
KERNEL(blocks) {
  __shared__ BlockBatch shared;
  BlockWork work(*queue, items, batch, shared);
  for (Batch taken; work.next(taken);) process(seen, taken, threadIdx.x, blockDim.x);
  finish(*queue);
}
KERNEL(shared_warps) {
  __shared__ SharedBatch shared;
  SharedWork work(*queue, items, batch, shared);
  for (Batch taken; work.next(taken, each);) process(seen, taken, threadIdx.x % 32, lanes());
  finish(*queue);
}
"""
NAMES = ("threads", "lane_items", "warps", "blocks", "shared_warps")


def main() -> None:
    module = load(compiled(SOURCE))
    kernels = {name: function(module, name) for name in NAMES}
    queue = torch.zeros(2, dtype=torch.int64, device="cuda")
    chance = random.Random(20261123)
    for turn in range(60):
        items = chance.choice((0, 1, 20, chance.randrange(1000), chance.randrange(300_000)))
        seen = torch.zeros(max(items, 1), dtype=torch.int32, device="cuda")
        batch, each = chance.choice((1, 2, 31, 32, 100, 4096, 0xFFFFFFFF)), chance.choice((1, 8, 32, 50))
        grid, threads = chance.choice((1, 7, 132, 1056)), chance.choice((1, 20, 33, 32, 64, 256, 1024, 96))
        for count, name in enumerate(NAMES, 1):
            arguments = [pointer(queue), c_uint64(items), c_uint32(batch), c_uint32(each), pointer(seen)]
            launch(kernels[name], grid, threads, arguments)
            torch.cuda.synchronize()
            said = f"turn {turn}: {name}, {items} items, batch {batch}/{each}, {grid} x {threads}"
            assert items == 0 or bool((seen[:items] == count).all()), said
            assert queue.tolist() == [0, 0], said
    print("done")


if __name__ == "__main__":
    main()
