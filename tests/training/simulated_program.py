"""A program for `training.record` over the simulated driver: kernels of known lengths, and a part that fails."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from launcher import Gpu


def parts(tiny: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    gpu = Gpu()

    def refuse() -> None:
        raise RuntimeError("not supported here")

    yield "some", lambda: gpu.launch(20)
    yield "refused", refuse
    if not tiny:
        yield "hang", lambda: ctypes.CDLL(None).pause()
    yield "more", lambda: gpu.launch(30)
    gpu.synchronize()
