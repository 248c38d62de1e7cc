"""What several test modules share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_S = 120
"""Against hangs only: nothing takes that long."""

_OF_LONG_KERNELS = "cudasched: warning: a best-effort launch was held for 100 ms in which nothing"
"""What a program may say whose kernels never end, or whose machine, and so its simulated GPU, stood still."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a program to its end; see the fixtures `python` and `cudasched`."""


def but_for_long_kernels(text: str) -> str:
    """What a program has said, without the warning that a kernel runs for very long."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_OF_LONG_KERNELS))
