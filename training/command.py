"""A mistake in what a command was given is one line on standard error, and exit code 1."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["InputError", "carry_out", "duration", "report_of"]


class InputError(ValueError):
    """A recording or a model that nothing can be made of; says why."""


def duration(text: str) -> float:
    """A time as an option has it. Raises ValueError where it is none."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def report_of(model: Path) -> dict[str, Any]:
    """What training.train wrote of a model. Raises InputError where it is damaged."""
    try:
        found: dict[str, Any] = json.loads((model / "report.json").read_text())
        if not {"recipe", "tried", "data", "recorded", "versions"} <= found.keys():
            raise ValueError
    except (ValueError, AttributeError):  # the latter where it is no object
        raise InputError(f"{model / 'report.json'} is damaged: train the model again") from None
    return found


def carry_out(work: Callable[[], object], undone: str) -> int:
    """Does a command's work; returns the exit code. `undone` begins the line that says why it was not done."""
    from cudasched.errors import Error

    try:
        work()
    except (InputError, Error, OSError) as error:
        print(f"{undone}: {error}", file=sys.stderr)
        return 1
    return 0
