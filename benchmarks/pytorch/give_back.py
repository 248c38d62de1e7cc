"""How long a latency client waits for memory that another process only caches; prints one JSON line of samples.

    python benchmarks/pytorch/give_back.py --gib 40

Two processes: one of best effort, whose PyTorch keeps so much memory that no tensor uses, and holds of the rest what
makes it impossible to do without; and one of class latency, which allocates as much. Each sample has three times, in
ms: `bare` of the first one's `torch.cuda.empty_cache()`, `allocation` of the second one's allocation where the
memory is free, and `give_back` of the same where the other's cache has it. With `busy`, the first one computes
meanwhile, some 20 ms ahead of the GPU, so that its frees wait for what is on it; `refused` counts the allocations that
failed then. Half a minute; on the host alone it rehearses, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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


class Process:
    """One of them, told what to do."""

    def __init__(self, role: str, gib: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--gib", str(gib), "--role", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        self.ask("ready")

    def ask(self, what: str) -> float:
        """Has it done, and returns what it says.

        Raises:
            RuntimeError: It ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        if what != "ready":
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended at {what!r}, with exit code {self.process.wait()}")
        return float(line)

    def end(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


def play(role: str, gib: int) -> None:
    """A process of its own."""
    mine: Any = Giver(gib) if role == "giver" else Server(gib)
    print(0.0, flush=True)
    for line in sys.stdin:
        print(getattr(mine, line.strip())(), flush=True)


def measure(gib: int, samples: int) -> dict[str, list[float]]:
    """All samples; each has its times side by side."""
    processes: list[Process] = []
    found: dict[str, list[float]] = {"bare": [], "allocation": [], "give_back": [], "busy": [], "refused": []}
    try:
        processes.append(Process("giver", gib))
        processes.append(Process("server", gib))
        giver, server = processes
        for sample in range(samples + 1):
            giver.ask("fill")
            times = {"bare": giver.ask("bare")}
            times["allocation"] = server.ask("allocate")
            giver.ask("fill")
            times["give_back"] = server.ask("allocate")
            giver.ask("bare")
            if REFUSED in times.values():
                raise RuntimeError(f"an allocation was refused: {times}")
            if sample > 0:  # the first one warms up
                for name, took in times.items():
                    found[name].append(took)
        giver.ask("busy")
        for _ in range(samples):
            giver.ask("fill")
            took = server.ask("allocate")
            found["refused" if took == REFUSED else "busy"].append(took)
    finally:
        for process in processes:
            process.end()
    return found


def main() -> None:
    """Measures, or is one of the two processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=40)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--role", choices=["giver", "server"])
    options = parser.parse_args()
    if options.role is not None:
        play(options.role, options.gib)
        return
    print(json.dumps(measure(options.gib, options.samples)))


if __name__ == "__main__":
    main()
