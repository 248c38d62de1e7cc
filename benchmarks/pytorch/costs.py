"""What regions, inference under `install` and counted allocations cost; prints one JSON line of samples.

python benchmarks/pytorch/costs.py region|idle|inference|observe [--install]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cudasched
import cudasched.torch
import torch
from cudasched.demo.workloads import resnet50
from torch import nn

#: Between two entries, where idleness is measured.
IDLE_S = 0.016


def medians(samples: int, inner: int, timed: Callable[[], float]) -> list[float]:
    """So many medians of some times each."""
    return [statistics.median([timed() for _ in range(inner)]) for _ in range(samples)]


def entry_us(scope: AbstractContextManager[Any], samples: int, inner: int, idle_s: float) -> list[float]:
    """Entering and leaving, in a loop or after some idleness each, us: a median over some each."""

    def timed() -> float:
        if idle_s:
            time.sleep(idle_s)
        began = time.perf_counter_ns()
        with scope:
            pass
        return (time.perf_counter_ns() - began) / 1e3

    return medians(samples, inner, timed)


def inference_ms(samples: int, inner: int, device: str) -> list[float]:
    """A batch of 32 through eager ResNet50, ms."""
    torch.manual_seed(0)
    small = device == "cpu"
    model: nn.Module = (nn.Sequential(nn.Flatten(), nn.Linear(48, 8)) if small else resnet50()).eval().to(device)
    images = torch.randn(32, 3, 4, 4, device=device) if small else torch.randn(32, 3, 224, 224, device=device)
    found = []

    def synchronize() -> None:
        if not small:
            torch.cuda.synchronize()

    with torch.no_grad():
        for _ in range(10):
            model(images)
        for _ in range(samples):
            synchronize()
            began = time.perf_counter_ns()
            for _ in range(inner):
                model(images)
            synchronize()
            found.append((time.perf_counter_ns() - began) / 1e6 / inner)
    return found


def allocations_ns(samples: int, inner: int, device: str) -> list[float]:
    """Allocating and freeing a tensor that the allocator has cached, ns: a median over some each."""

    def timed() -> float:
        began = time.perf_counter_ns()
        for _ in range(100):
            torch.empty(1 << 16, device=device)
        return (time.perf_counter_ns() - began) / 100

    return medians(samples, inner, timed)


def observe(samples: int, inner: int, device: str) -> dict[str, list[float]]:
    """What observing adds to an allocation with its free, ns, and by how many bytes the accounts differ from PyTorch's.

    The differences are of each step of a random program of allocations, frees and emptied caches.
    """
    bare = allocations_ns(samples, inner, device)
    rng, held, differences = random.Random(1), [torch.empty(1 << 20, device=device)], []
    if device == "cuda":
        cudasched.torch.observe()
    observed = allocations_ns(samples, inner, device)
    for _ in range(samples * inner * 10):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            with cudasched.region(rng.choice(["latency", "normal", "best_effort"])):
                held.append(torch.empty(rng.randrange(1, 1 << 24), device=device, dtype=torch.int8))
        if rng.random() < 0.02 and device == "cuda":
            torch.cuda.empty_cache()
        if device == "cuda":
            mine, theirs = cudasched.torch.memory(), torch.cuda.memory_stats()
            differences.append(
                float(
                    abs(mine.requested_bytes - theirs["requested_bytes.all.current"])
                    + abs(mine.reserved_bytes - theirs["reserved_bytes.all.current"])
                    + mine.lost
                )
            )
    added = [ours - theirs for ours, theirs in zip(observed, bare, strict=True)]
    return {"samples": added, "differences": differences or [0.0]}


def main() -> None:
    """Measures one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["region", "idle", "inference", "observe"])
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--inner", type=int, default=100)
    options = parser.parse_args()
    if options.install:
        cudasched.torch.install(default="best_effort")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ones(1, device=device).add_(1)
    if options.what == "observe":
        print(json.dumps(observe(options.samples, options.inner, device)))
        return
    if options.what in ("region", "idle"):
        with cudasched.region("latency"):
            torch.ones(1, device=device).add_(1)
    if options.what == "inference":
        print(json.dumps({"samples": inference_ms(options.samples, options.inner, device)}))
        return
    idle_s = IDLE_S if options.what == "idle" else 0.0
    said = {"samples": entry_us(cudasched.region("latency"), options.samples, options.inner, idle_s)}
    if device == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream(device=device))
        said["stream"] = entry_us(stream, options.samples, options.inner, idle_s)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
