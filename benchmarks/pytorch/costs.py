"""What a region costs to enter and leave, or what eager ResNet50 inference takes; prints one JSON line of samples.

python benchmarks/pytorch/costs.py region|idle|inference [--install]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import cudasched
import cudasched.torch
import torch
from cudasched.demo.workloads import resnet50
from torch import nn


def region_us(samples: int, inner: int) -> list[float]:
    """Entering and leaving, in a loop, us: a median over some each."""
    region, found = cudasched.region("latency"), []
    for _ in range(samples):
        times = []
        for _ in range(inner):
            began = time.perf_counter_ns()
            with region:
                pass
            times.append((time.perf_counter_ns() - began) / 1e3)
        found.append(statistics.median(times))
    return found


def idle_us(samples: int, inner: int) -> list[float]:
    """The same after 16 ms of sleep each."""
    region, found = cudasched.region("latency"), []
    for _ in range(samples):
        times = []
        for _ in range(inner):
            time.sleep(0.016)
            began = time.perf_counter_ns()
            with region:
                pass
            times.append((time.perf_counter_ns() - began) / 1e3)
        found.append(statistics.median(times))
    return found


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


def main() -> None:
    """Measures one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["region", "idle", "inference"])
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--inner", type=int, default=100)
    options = parser.parse_args()
    if options.install:
        cudasched.torch.install(default="best_effort")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ones(1, device=device).add_(1)
    if options.what != "inference":
        with cudasched.region("latency"):
            torch.ones(1, device=device).add_(1)
    measure = {
        "region": lambda: region_us(options.samples, options.inner),
        "idle": lambda: idle_us(options.samples, options.inner),
        "inference": lambda: inference_ms(options.samples, options.inner, device),
    }[options.what]
    print(json.dumps({"samples": measure()}))


if __name__ == "__main__":
    main()
