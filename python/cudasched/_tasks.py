"""Regions of greenlets and of trio's tasks: tasks that take turns on one thread do not share regions.

A greenlet or task that gives way to another leaves its regions, and enters them again when it goes on. Both libraries
report this: greenlets by a trace function of the thread, which calls the earlier one; trio by an instrument of its run.
Nothing here imports either.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

__all__ = ["follow"]


def follow(thread: Any) -> None:
    """The calling thread's regions are those of its greenlet or task from here on.

    Args:
        thread: `cudasched._region`'s of it.
    """
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and not thread.traces_greenlets:
        thread.traces_greenlets = True
        _trace_greenlets(greenlet, _Turns(thread))
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    if lowlevel is not None:
        with contextlib.suppress(RuntimeError):  # not in a run
            run = lowlevel.current_trio_token()
            if run is not thread.trio_run:
                thread.trio_run = run
                lowlevel.add_instrument(_Instrument(_Turns(thread)))


class _Turns:
    """The regions of a thread's greenlets or tasks that wait for their turn."""

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self._waiting: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def ends(self, task: Any) -> None:
        if entries := self._thread.regions:
            self._waiting[task] = list(entries)
            while entries:
                entries[-1].leave()

    def begins(self, task: Any) -> None:
        for entry in self._waiting.pop(task, ()) if self._waiting else ():
            entry.enter_again()


def _trace_greenlets(greenlet: Any, turns: _Turns) -> None:
    before = greenlet.gettrace()

    def trace(event: str, arguments: Any) -> None:
        if event in ("switch", "throw"):
            gives_way, goes_on = arguments
            turns.ends(gives_way)
            turns.begins(goes_on)
        if before is not None:
            before(event, arguments)

    greenlet.settrace(trace)


class _Instrument:
    """trio's, of one run."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def before_task_step(self, task: Any) -> None:
        self._turns.begins(task)

    def after_task_step(self, task: Any) -> None:
        self._turns.ends(task)
