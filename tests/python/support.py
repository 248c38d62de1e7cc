"""What several test modules share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_S = 120
"""Against hangs only: nothing takes that long."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a program to its end; see the fixtures `python` and `cudasched`."""
