"""What a region's entry and end do with PyTorch's streams. Whatever fails costs the streams, not the program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from cudasched.errors import ConfigError, HookWarning
from cudasched.torch import _adapter, _check, _give_back

__all__ = ["enter", "entered", "leave", "on_change"]

_warned = False
_tell: Callable[[str, str], None] | None = None
_checking = _check.wanted()


def enter(entry: Any, client_class: str, stream: object, begin: Callable[[], None]) -> None:
    """A region is entered, and `begin` tells the engine.

    Args:
        entry: `cudasched._region`'s of this region; what `leave` needs is put there.
        client_class: Its class.
        stream: ``"own"``, ``"inherit"``, or one of PyTorch's.
        begin: Called once.

    Raises:
        ConfigError: The stream cannot be this region's; `begin` was not called.
    """
    begun = False

    def begin_once() -> None:
        nonlocal begun
        if not begun:
            begun = True
            begin()

    try:
        streams = _adapter.streams()
        if streams is not None and client_class == "best_effort":
            _give_back.begin_if_built()
        if streams is None or stream == "inherit":
            return
        chosen = None if stream == "own" else _adapter.chosen_stream(stream)
        entry.stream_entry = streams.enter(client_class, chosen, begin_once)
        if _checking:
            _check.watch(sys.modules["torch"])
    except ConfigError:
        begun = True
        raise
    except Exception as error:
        _warn_once(error)
    finally:
        begin_once()


def on_change(tell: Callable[[str, str], None]) -> None:
    """Tells the class and name of the region that a thread is in from here on; `normal` and "" outside."""
    global _tell
    _tell = tell


def entered(client_class: str, name: str) -> None:
    """The calling thread is in this region now, or in none."""
    if _tell is not None:
        _tell(client_class, name)


def leave(entry: Any) -> None:
    """It is left, on the thread that entered it."""
    streams, mine = _adapter.streams(), entry.stream_entry
    if streams is None or mine is None:
        return
    try:
        streams.leave(mine)
    except Exception as error:
        _warn_once(error)


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"regions go on without streams of their own here: {type(error).__name__}: {error}",
            HookWarning,
            stacklevel=6,
        )
