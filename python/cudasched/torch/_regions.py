"""A region's entry and end, for PyTorch's streams. A failure costs the streams, not the program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from cudasched.errors import ConfigError, HookWarning
from cudasched.torch import _adapter, _check, _give_back

__all__ = ["check_limit", "enter", "leave", "limit", "note_holders", "on_change", "tell"]

_warned = False
tell: Callable[[str, str], None] | None = None
"""Who is told of the class and name of the region that the calling thread is in from here on."""
_checking = _check.wanted()


def enter(entry: Any, client_class: str, stream: object) -> None:
    """A region is entered, and its entry's `begin` has told the engine when this returns.

    Args:
        entry: `cudasched._region`'s of this region, which keeps the data for `leave`.
        client_class: The class.
        stream: ``"own"``, ``"inherit"``, or one of PyTorch's.

    Raises:
        ConfigError: The stream cannot be this region's; the engine was not told.
    """
    try:
        streams = _adapter.streams()
        if streams is not None and client_class == "best_effort":
            _give_back.begin_if_built()
        if streams is not None and stream != "inherit":
            chosen = None if stream == "own" else _adapter.chosen_stream(stream)
            entry.stream_entry = streams.enter(client_class, chosen, entry.begin)
        if streams is not None and _checking:
            _check.watch(sys.modules["torch"])
    except ConfigError:
        raise
    except Exception as error:
        _warn_once(error)
    if not entry.begun:
        entry.begin()


def on_change(listener: Callable[[str, str], None]) -> None:
    """Tells the class and name of the region that a thread is in from here on; `normal` and "" outside."""
    global tell
    tell = listener


class Limits(Protocol):
    """Who counts memory by region."""

    def limit(self, name: str, size: int) -> None:
        """Regions of this name should hold no more."""

    def over(self, name: str) -> int:
        """How often regions crossed their limit."""


_limits: Limits | None = None
_limited: dict[str, int] = {}
_told: set[str] = set()


def on_limits(limits: Limits) -> None:
    """Tells of the limits that there are, and of those to come."""
    global _limits
    _limits = limits
    for name, size in _limited.items():
        limits.limit(name, size)


def limit(name: str, size: int) -> None:
    """A region of this name, with this limit, is entered."""
    if _limited.get(name) == size:
        return
    _limited[name] = size
    if _limits is not None:
        _limits.limit(name, size)
    elif "" not in _told:
        _told.add("")
        warnings.warn(
            f"the memory limit of the region {name!r} has no effect: call cudasched.torch.observe() first",
            HookWarning,
            stacklevel=5,
        )


def check_limit(name: str) -> None:
    """The region is left; warns once where it has held more than its limit."""
    if _limits is None or name in _told or not _limits.over(name):
        return
    _told.add(name)
    warnings.warn(
        f"regions named {name!r} have held more than their memory limit, {_limited[name] / 2**30:.1f} GiB; "
        "cudasched.torch.memory().over_limit counts how often",
        HookWarning,
        stacklevel=5,
    )


def note_holders(error: BaseException) -> None:
    """Each client's GPU memory, as a note of an out-of-memory error (Python 3.11 and later have notes)."""
    add_note = getattr(error, "add_note", None)
    if add_note is None or any("cudasched: holders" in note for note in getattr(error, "__notes__", ())):
        return
    try:
        from cudasched.status import status

        holders = [
            f"{client.name} ({client.pid}) {client.memory_bytes / 2**30:.1f} GiB {client.client_class}"
            for device in status()
            for client in sorted(device.clients, key=lambda each: -each.memory_bytes)
            if client.memory_bytes
        ]
        if holders:
            add_note(f"cudasched: holders: {', '.join(holders)}")
    except Exception:  # the program's own error goes on
        return


def leave(entry: Any) -> None:
    """The region is left, on the thread that entered it."""
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
