"""Replays a history with the allocator of a library: `python -m benchmarks.memory.rivals torch|rmm HISTORY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Made = tuple[Callable[[int], Any], Callable[[Any], None], Callable[[], int]]


def torch() -> Made:
    """PyTorch's caching allocator, as PYTORCH_CUDA_ALLOC_CONF says."""
    cuda = importlib.import_module("torch").cuda
    cuda.init()
    return cuda.caching_allocator_alloc, cuda.caching_allocator_delete, cuda.max_memory_reserved


def rmm() -> Made:
    """RMM's pool, which grows as it must."""
    module = importlib.import_module("rmm")
    below = module.mr.StatisticsResourceAdaptor(module.mr.CudaMemoryResource())
    pool = module.mr.PoolMemoryResource(below, initial_pool_size=0)
    return (
        lambda size: (pool.allocate(size), size),
        lambda block: pool.deallocate(*block),
        lambda: int(below.allocation_counts.peak_bytes),
    )


def main(library: str, history: Path) -> None:
    """Prints what was used and reserved at most, in bytes, and how long it took."""
    allocate, free, reserved = {"torch": torch, "rmm": rmm}[library]()
    live: dict[str, tuple[Any, int]] = {}
    used = peak = 0
    began = time.monotonic()
    for line in history.read_text().splitlines():
        identity, size = line.split()
        if size != "0":
            live[identity] = allocate(int(size)), int(size)
            used += int(size)
            peak = max(peak, used)
        else:
            block, held = live.pop(identity)
            free(block)
            used -= held
    print(json.dumps({"used": peak, "reserved": reserved(), "s": time.monotonic() - began}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
