// How many steps numbers take to 1 by Collatz's rule. What a number takes nobody knows before it is done: items of a
// work queue, one lane each. A lane gets its next number soon after it is done with one, in the loop that does the
// steps, so the lanes of a warp never wait for the longest among them.
#include "cudasched/device/work_queue.cuh"

using namespace cudasched::device;

extern "C" __global__ void collatz(WorkQueue* queue, unsigned long long count, unsigned* steps) {
  LaneWork work(*queue, count);
  Item item = 0;
  unsigned long long number = 1;
  unsigned done = 0;
  bool busy = false, taken = false;
  while (work.next(!busy, item, taken)) {
    if (taken) {
      number = item + 1;
      done = 0;
      busy = true;
    }
    if (busy && number != 1) {
      number = number % 2 == 0 ? number / 2 : 3 * number + 1;
      ++done;
    } else if (busy) {
      steps[item] = done;
      busy = false;
    }
  }
  finish(*queue);
}
