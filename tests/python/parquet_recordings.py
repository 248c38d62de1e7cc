"""Recordings of programs that were never run, for tests that read them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MS = 1_000_000
H100 = {"gpu": "NVIDIA H100 80GB HBM3", "sm_count": "132", "memory": str(80 << 30)}
USUAL = {
    "kind": "kernel",
    "function": "gemm",
    "words": [],
    "pointers": [],
    "label": "",
    "overlapped": False,
    "grid_x": 1320,
    "grid_y": 1,
    "grid_z": 1,
    "blocks_per_sm": 1,
    "waves": 10.0,
    "pid": 7,
}


def write(
    directory: Path,
    name: str,
    launches: Sequence[tuple[float, float]],
    metadata: dict[str, str] | None = None,
    types: dict[str, Any] | None = None,
    **columns: Any,
) -> Path:
    """Writes a recording: of each launch when it was submitted, its ms, and other columns, each a list or a value."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from cudasched.collect import _dataset

    form = _dataset.schema()
    table: dict[str, list[Any]] = {each: [USUAL.get(each, 0)] * len(launches) for each in form.names}
    end = 0.0
    for number, (at_ms, duration_ms) in enumerate(launches):
        start = max(at_ms + 0.003, end + 0.0013)
        end = start + duration_ms
        table["launch"][number] = number
        table["submitted_ns"][number] = round(at_ms * MS)
        table["start_ns"][number], table["duration_ns"][number] = round(start * MS), round(duration_ms * MS)
    table |= {each: one if isinstance(one, list) else [one] * len(launches) for each, one in columns.items()}
    said = {f"cudasched.{each}": value for each, value in {**H100, "schema": "1", **(metadata or {})}.items()}
    fields = [pa.field(each.name, (types or {}).get(each.name, each.type)) for each in form]
    path = directory / f"{name}.parquet"
    pq.write_table(pa.table(table, schema=pa.schema(fields, said)), path)
    return path


def requests(rate_hz: float = 60, count: int = 120, each_ms: float = 0.4) -> list[tuple[float, float]]:
    return [(number * 1e3 / rate_hz, each_ms) for number in range(count)]


def steps(each_ms: float = 1.0, count: int = 400, gap_ms: float = 0.012) -> list[tuple[float, float]]:
    """A host that runs ahead of the GPU, but for a queue's length."""
    return [(max(number * gap_ms, (number - 500) * each_ms), each_ms) for number in range(count)]


def training(directory: Path) -> Path:
    """Of a program's 500 launches and 20 of another process, with some that were not timed."""
    chance = random.Random(3)
    launches = [(0.009 * launch, chance.uniform(0.004, 0.09)) for launch in range(520)]
    return write(
        directory,
        "training",
        launches,
        pid=[7] * 500 + [8] * 20,
        label="program:resnet50|forward",
        grid_x=[launch % 3 for launch in range(520)],
        duration_ns=[None if launch % 10 == 9 else round(ms * MS) for launch, (_, ms) in enumerate(launches)],
    )
