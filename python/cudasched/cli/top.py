"""`cudasched top`: who uses the GPUs now, live."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cudasched.cli.run import configure
from cudasched.errors import ConfigError

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "Example: cudasched top --interval-s 0.5"


def command(
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Between two looks, seconds.")] = 1.0,
) -> int:
    """Show who uses the GPUs now: share, waits, targets; s sorts, r reverses, space pauses, q ends it.

    l, n and b give the chosen client a class, + and - its priority, w and W its weight, p its policy.
    """
    configure()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`cudasched top` needs a terminal; `cudasched status --json` is for programs")
    try:
        from cudasched.observe.top import Top
    except ImportError:
        raise ConfigError("`cudasched top` needs textual: pip install 'cudasched[observe]'") from None
    return Top(interval_s=interval_s).run() or 0
