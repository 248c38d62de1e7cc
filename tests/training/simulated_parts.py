"""A program for `training.record` over the simulated driver: the same launches on parts of the multiprocessors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from cudasched import _partition
from launcher import Gpu


def parts(tiny: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    gpu = Gpu()
    gpu.launch()
    gpu.synchronize()

    def run(count: int) -> None:
        gpu.launch(10, _partition.stream((count + 0.5) / 132) if count < 132 else 0)
        gpu.synchronize()

    for count in (16, 64, 132):
        yield f"{count}|work", lambda count=count: run(count)
