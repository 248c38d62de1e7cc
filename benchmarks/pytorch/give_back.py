"""A latency client that waits for memory which another process only caches: either process, told what to do.

    python benchmarks/pytorch/give_back.py giver|server --gib 40

`giver` is of best effort; its PyTorch keeps so much memory that no tensor uses, and holds of the rest what makes it
impossible to do without. `server` is of class latency, and allocates as much. Commands come as JSON lines, answers have
the time that they took, ms. On the host alone it rehearses, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from typing import Any

GIB = 1 << 30
BLOCK_GIB = 2
#: Matrix products that a computing program is ahead by, of 2 to 3 ms each.
AHEAD = 8
REFUSED = -1.0


class Allocations:
    """Tensors of whole GiB; on the host alone, of as many bytes."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.on_gpu = bool(torch.cuda.is_available())

    def empty(self, gib: float) -> Any:
        """Memory, and nothing in it."""
        size = int(gib * GIB) if self.on_gpu else int(gib)
        return self.torch.empty(size, dtype=self.torch.uint8, device="cuda" if self.on_gpu else "cpu")

    def empty_cache(self) -> None:
        """As a program does."""
        if self.on_gpu:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()

    def free_gib(self) -> float:
        """Of the GPU."""
        return float(self.torch.cuda.mem_get_info()[0]) / GIB if self.on_gpu else 64.0


class Giver:
    """The best-effort process."""

    def __init__(self, gib: int) -> None:
        import cudasched.torch
        import torch

        cudasched.torch.install(default="best_effort")
        self.memory, self.gib = Allocations(torch), gib
        self.computes = threading.Event()
        self.rest: Any = None
        if self.memory.on_gpu:
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
            cudasched.torch.give_back()
            time.sleep(0.2)  # its thread says that it gives
            # So that the cache and what the other one needs are not there at the same time.
            self.rest = self.memory.empty(max(0.0, self.memory.free_gib() - 1.5 * gib))
        threading.Thread(target=self._compute, args=(torch,), daemon=True).start()

    def _compute(self, torch: Any) -> None:
        matrix = torch.randn(4096, 4096, device="cuda") if self.memory.on_gpu else torch.ones(1)
        while True:
            self.computes.wait()
            if not self.memory.on_gpu:
                time.sleep(0.001)
                continue
            for _ in range(AHEAD):
                matrix = (matrix @ matrix).clamp_(-1, 1)
            torch.cuda.current_stream().synchronize()

    def fill(self) -> float:
        """The cache."""
        blocks = [self.memory.empty(BLOCK_GIB) for _ in range(self.gib // BLOCK_GIB)]
        del blocks
        return 0.0

    def bare(self) -> float:
        """Empties it as a program does, ms."""
        began = time.perf_counter_ns()
        self.memory.empty_cache()
        return (time.perf_counter_ns() - began) / 1e6

    def busy(self) -> float:
        """Computes from here on."""
        self.computes.set()
        time.sleep(0.5)
        return 0.0


class Server:
    """The latency process."""

    def __init__(self, gib: int) -> None:
        import cudasched
        import torch

        cudasched.set_class("latency")
        self.memory, self.gib = Allocations(torch), gib
        if self.memory.on_gpu:
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()

    def allocate(self) -> float:
        """What it needs, in ms; `REFUSED` where it cannot have it."""
        began = time.perf_counter_ns()
        try:
            block = self.memory.empty(self.gib)
        except self.memory.torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
            return REFUSED
        took = (time.perf_counter_ns() - began) / 1e6
        del block
        self.memory.empty_cache()
        return took


def main() -> None:
    """One of the two processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=["giver", "server"])
    parser.add_argument("--gib", type=int, default=40)
    options = parser.parse_args()
    mine: Any = Giver(options.gib) if options.role == "giver" else Server(options.gib)
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)["command"]
        if command == "quit":
            return
        print(json.dumps({"event": "result", "ms": getattr(mine, command)()}), flush=True)


if __name__ == "__main__":
    main()
