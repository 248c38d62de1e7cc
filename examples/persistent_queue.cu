// How many steps numbers take to 1 by Collatz's rule. What a number takes nobody knows before it is done: items of a
// work queue, one thread each. A thread takes its next number as soon as it is done with one, in the loop that does the
// steps, so the lanes of a warp never wait for the longest among them.
#include "cudasched/device/work_queue.cuh"

using namespace cudasched::device;

extern "C" __global__ void collatz(WorkQueue* queue, unsigned long long count, unsigned* steps) {
  __shared__ SharedBatch batch;
  SharedWork work(*queue, count, 4 * blockDim.x, batch);
  Item item;
  bool more = work.next(item);
  unsigned long long number = item + 1;
  unsigned taken = 0;
  while (more) {
    if (number != 1) {
      number = number % 2 == 0 ? number / 2 : 3 * number + 1;
      ++taken;
    } else {
      steps[item] = taken;
      more = work.next(item);
      number = item + 1;
      taken = 0;
    }
  }
  finish(*queue);
}
