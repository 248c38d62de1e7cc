"""CPU time of a small PyTorch operation, `x.add_(1)`: run by path, prints ns an operation for each batch."""

import sys
import time

import torch

WARM_UP_BATCHES = 50


def main(batches: int, operations: int) -> None:
    """Times `operations` together and synchronises between batches, so that the launch queue never fills."""
    x = torch.zeros(1024, device="cuda")
    taken_ns = []
    for _ in range(WARM_UP_BATCHES + batches):
        began = time.perf_counter_ns()
        for _ in range(operations):
            x.add_(1)
        taken_ns.append((time.perf_counter_ns() - began) / operations)
        torch.cuda.synchronize()
    print("add_", *(f"{taken:.2f}" for taken in taken_ns[WARM_UP_BATCHES:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
