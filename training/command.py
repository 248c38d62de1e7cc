"""A mistake in what a command was given is one line on standard error, and exit code 1."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["InputError", "carry_out"]


class InputError(ValueError):
    """A recording or a model that nothing can be made of; says why."""


def carry_out(work: Callable[[], object], undone: str) -> int:
    """Does a command's work; returns the exit code. `undone` begins the line that says why it was not done."""
    from cudasched.errors import Error

    try:
        work()
    except (InputError, Error, OSError) as error:
        print(f"{undone}: {error}", file=sys.stderr)
        return 1
    return 0
