"""Small recordings of kernels whose durations follow from their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

METADATA = {
    "cudasched.schema": "1",
    "cudasched.version": "0",
    "cudasched.gpu": "NVIDIA H200",
    "cudasched.compute_capability": "9.0",
    "cudasched.sm_count": "132",
    "cudasched.driver_version": "13000",
    "cudasched.timing": "cupti",
    "cudasched.max_threads_per_sm": "2048",
    "cudasched.command": "[]",
}
KERNELS = ("add", "copy", "gelu", "norm", "scan", "sort", "sum", "take")


def launch(kernel: int, elements: int, label: str, noise: float, number: int, pid: int) -> dict[str, Any]:
    """One row: an elementwise kind of kernel whose time grows with its elements."""
    name = KERNELS[kernel]
    block = (128, 256, 512)[kernel % 3]
    blocks = max(1, elements // block // 4)
    per_sm = 2048 // block
    row: dict[str, Any] = {f"{what}_{axis}": 1 for what in ("grid", "block", "cluster") for axis in "xyz"}
    return {
        **row,
        "launch": number,
        "pid": pid,
        "thread": 0,
        "device": 0,
        "stream": 0,
        "kind": "kernel",
        "function": f"_Z{len(name) + 7}{name}_kernelPfi",
        "identity": 1000 + kernel,
        "graph": 0,
        "grid_x": blocks,
        "block_x": block,
        "dynamic_shared_bytes": 0,
        "static_shared_bytes": 64 * kernel,
        "local_bytes": 0,
        "registers": 24 + 8 * kernel,
        "max_threads": 1024,
        "blocks_per_sm": per_sm,
        "waves": blocks / (132 * per_sm),
        "parameter_bytes": 24,
        "words": [0, 0, elements, kernel, 0, 1],
        "pointers": [0, 1],
        "submitted_ns": 10_000 * number,
        "start_ns": 10_000 * number + 5_000,
        "duration_ns": int((2000 + elements / 500 * (1 + kernel / 8)) * math.exp(noise)),
        "overlapped": False,
        "sm_clock_mhz": 1980,
        "label": label,
    }


def table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as a recording."""
    import cudasched.collect

    return pa.Table.from_pylist(rows, schema=cudasched.collect.schema().with_metadata(METADATA))


def sweep(pid: int, shapes: int, seed: int, repeats: int = 3) -> list[dict[str, Any]]:
    """Labelled launches: the same shapes in the same order, whatever the seed, which makes the noise."""
    draw, noise = np.random.default_rng(0), np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for shape in range(shapes):
        kernel, elements = int(draw.integers(len(KERNELS))), int(math.exp(draw.uniform(6, 18)))
        for dtype in ("fp32", "bf16"):
            size = elements if dtype == "fp32" else elements // 2
            for _ in range(repeats):
                label = f"{('gemm.mm', 'softmax.row')[shape % 2]}|{shape}x{elements}|{dtype}|forward"
                rows.append(launch(kernel, size, label, float(noise.normal(0, 0.02)), len(rows), pid))
    return rows


def write_sweeps(path: Path, shapes: int = 300) -> Path:
    """Two processes, the second a repeat of the first half."""
    pq.write_table(table(sweep(11, shapes, 1) + sweep(12, shapes // 2, 2)), path)
    return path


def write_programs(path: Path, launches: int = 3000) -> Path:
    """Five programs that go round twenty launches each."""
    rows: list[dict[str, Any]] = []
    draw = np.random.default_rng(3)
    for program in range(5):
        step = [(int(draw.integers(len(KERNELS))), int(math.exp(draw.uniform(6, 18)))) for _ in range(20)]
        for number in range(launches):
            kernel, elements = step[number % len(step)]
            label = f"program:p{program}|step{number // len(step)}||"
            rows.append(launch(kernel, elements, label, float(draw.normal(0, 0.05)), number, 20 + program))
    pq.write_table(table(rows), path)
    return path
