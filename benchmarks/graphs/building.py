"""Requests that meet the building of slices: a program begins anew beside its server, which serves meanwhile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cudasched.demo.harness import HEAD_START_S, HarnessError

from benchmarks.lab.processes import ANSWER_S

if TYPE_CHECKING:
    from benchmarks.colocation.cells import Cell
    from benchmarks.lab.fleet import Place
    from benchmarks.lab.programs import Runner

#: How often a program begins anew, so that requests arrive while its slices are built; what compiles does so once.
#: Requests come in runs of so many seconds until it has.
BEGINNINGS = 3
BEGINNING_S = 2.0


def while_building(runner: Runner, cell: Cell, process: Place, server: Place) -> dict[str, Any]:
    """The latencies of the requests that met the building of a paused program's slices, and how many builds there were.

    Raises:
        HarnessError: The program does not begin anew.
    """
    rehearsal = runner.session.rehearsal
    short = dataclasses.replace(cell, seconds=min(BEGINNING_S, cell.seconds) if rehearsal else BEGINNING_S)
    met: list[float] = []
    builds = 0
    for _ in range(1 if runner.known[process.name].compiles or rehearsal else BEGINNINGS):
        if runner.session.left_s() < BEGINNING_S:
            break
        runner.fleet.ask(process, "again", after_s=HEAD_START_S)  # when requests count
        told: dict[str, Any] = {"done": False}
        until = time.monotonic() + ANSWER_S
        served: list[tuple[int, float]] = []
        while not told["done"]:
            if time.monotonic() > until:
                raise HarnessError(f"{process.name} has not begun anew within {ANSWER_S:.0f} s")
            requests = runner.window(short, [], [server], keep_due=True)["latency"][cell.latency]
            served += zip(requests["due_ns"], requests["latency_ms"], strict=True)
            told = runner.fleet.ask(process, "builds")
        builds += len(told["builds"])
        met += met_ms(served, told["builds"], runner.fleet.backend.scale)
    return {"latency_ms": met, "builds": builds}


def met_ms(served: Iterable[tuple[int, float]], spans: Sequence[tuple[int, int]], scale: float = 1.0) -> list[float]:
    """The latencies of the requests that were due or waited within one of the spans.

    Args:
        served: When each was due, ns, and its latency, ms of the device.
        spans: From when until when, ns.
        scale: Wall-clock seconds a second of the device.
    """
    return [
        ms
        for due_ns, ms in served
        if any(due_ns < until_ns and due_ns + ms * scale * 1e6 > from_ns for from_ns, until_ns in spans)
    ]
