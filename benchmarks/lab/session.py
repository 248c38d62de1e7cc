"""One run of a benchmark: the time that is left, the parts that are done, and the figures."""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cudasched._scratch import Scratch
from cudasched.demo.harness import Backend, HarnessError, installed_simulated_driver, percentile

from benchmarks import meta
from benchmarks.colocation.cells import Cell, CellFile, Outcome, cells_path
from benchmarks.lab import gpu
from benchmarks.results.schema import Figure, FigureRow, Goal, Meta, Results
from benchmarks.store import Store

Goals = Mapping[str, Goal]
"""The goal of each figure in the order of the results, and whether less or more is better; more than 0 is no goal."""
Found = dict[str, Figure]
Made = TypeVar("Made")
Done = Mapping[str, Any]
"""The measured parts, by GROUP/PART."""

#: Time that is kept for the results, s.
CLOSING_S = 5.0


class OutOfTimeError(Exception):
    """The next part would pass the limit."""


class Session:
    """One run. Parts that `store` has are not measured again.

    Attributes:
        name: The benchmark's.
        options: Of the command line.
        meta: The machine and its versions.
        found: Figures that need no parts.
        limits: Why some of them miss their goals.
        rows: Rows of the results that are no figures.
        failed: Parts that failed.
    """

    def __init__(self, name: str, options: argparse.Namespace, described: Meta) -> None:
        self.name, self.options, self.meta = name, options, described
        self.began = time.monotonic()
        self.found: Found = {}
        self.limits: dict[str, str] = {}
        self.rows: list[Any] = []
        self.failed = 0
        self._opened = ExitStack()
        self._shared: dict[object, Any] = {}
        self._limit_s = float("inf") if options.minutes is None else 60.0 * options.minutes

    @property
    def rehearsal(self) -> bool:
        """Whether this is a rehearsal, whose figures are no results."""
        return bool(self.options.rehearse)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return not self.rehearsal and not self.meta.gpu.startswith(("none", "simulated"))

    @property
    def out(self) -> Path:
        """The results file."""
        return Path(self.options.out)

    @cached_property
    def backend(self) -> Backend:
        """The GPU, or in a rehearsal a simulated device of its own. Raises HarnessError."""
        backend = Backend.simulated() if self.rehearsal else Backend()
        self._opened.callback(backend.close)
        return backend

    @cached_property
    def store(self) -> Store:
        """The parts, beside the results. Raises ValueError."""
        return Store(self.out.with_suffix(".cells"), self.meta)

    @cached_property
    def scratch(self) -> Path:
        """A directory of this run, in memory where there is such a place."""
        return self._opened.enter_context(Scratch("benchmark", in_memory=True))

    @cached_property
    def builds(self) -> Path:
        """A directory of this run for programs: not in memory, where nothing may be executable."""
        return self._opened.enter_context(Scratch("benchmark"))

    @cached_property
    def cells(self) -> CellFile:
        """The outcomes of cells, in the place of parts. Raises ValueError."""
        return CellFile(cells_path(self.out), self.meta)

    @cached_property
    def unscaled(self) -> dict[str, str]:
        """The environment of a rehearsal's programs whose simulated device has the time of the wall clock."""
        (self.scratch / "unscaled").mkdir(mode=0o700)
        return {
            "LD_LIBRARY_PATH": str(installed_simulated_driver().parent),
            "CUDASCHED_SIM_DIR": str(self.scratch / "unscaled"),
            "CUDASCHED_SIM_SCALE": "1",
        }

    def shared(self, make: Callable[[Session], Made]) -> Made:
        """What several groups use: made once; a context is entered then, and left at the end of the run."""
        if make not in self._shared:
            made = make(self)
            self._shared[make] = self._opened.enter_context(made) if isinstance(made, AbstractContextManager) else made
        found: Made = self._shared[make]
        return found

    def measure_cell(self, cell: Cell, measure: Callable[[], dict[str, Any]]) -> None:
        """Keeps what comes of a cell: its result, or an error.

        Raises:
            BusyGpuError: Another program is on the GPU; nothing is measured.
        """
        result, problem = None, None
        if self.on_gpu:
            gpu.refuse_strangers()
        try:
            result = measure()
            if self.on_gpu:
                gpu.refuse_slow()
        except (HarnessError, ValueError) as error:
            result, problem = None, str(error)
            self.failed += 1
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.cells.add(Outcome(cell, result, problem, now))
        if cell.arm == "best_effort_alone" and result:
            self.note_clock()
        self.cells.save()
        self.say(f"  {cell.arm} {cell.repeat}: {problem or cell_brief(result)}")

    def left_s(self) -> float:
        """Seconds until the results have to be written."""
        return self._limit_s - CLOSING_S - (time.monotonic() - self.began)

    def need(self, seconds: float) -> None:
        """Raises OutOfTimeError where fewer seconds are left."""
        if self.left_s() < seconds:
            raise OutOfTimeError

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def fail(self, text: str) -> None:
        """Prints why a part failed; the exit status says that one did."""
        self.failed += 1
        self.say(text)

    def note_clock(self) -> None:
        """Keeps the highest clock of the SMs that was seen."""
        clock = meta.sm_clock_mhz() if self.on_gpu else None
        if clock and clock > (self.meta.sm_clock_mhz or 0):
            self.meta.sm_clock_mhz = clock

    def close(self) -> None:
        """Leaves what is shared, and removes what the run has made beside its results."""
        self._opened.close()


def parts_of(done: Done, prefix: str) -> list[Any]:
    """The measured parts whose keys begin so, in the keys' order."""
    return [part for key, part in sorted(done.items()) if key.startswith(prefix)]


def once(value: float, number: int = 1) -> Figure:
    """A figure that was measured once, of so many requests."""
    return value, value, value, number


def median_of(values: Sequence[float], number: int | None = None) -> Figure:
    """A figure: the median of its parts, the least and the most of them, and how many, or of how many requests."""
    return statistics.median(values), min(values), max(values), len(values) if number is None else number


def worst_of(values: Sequence[float]) -> Figure:
    """A figure of which less is better: the most of its parts, the least and the most, and how many."""
    return max(values), min(values), max(values), len(values)


def least_of(values: Sequence[float]) -> Figure:
    """The same where more is better."""
    return min(values), min(values), max(values), len(values)


def brief(latency_ms: Sequence[float]) -> str:
    """Three percentiles of latencies, and how many these are; empty where there are none."""
    if not latency_ms:
        return ""
    shares = "/".join(f"{percentile(latency_ms, share):.2f}" for share in (0.5, 0.95, 0.99))
    return f"P50/P95/P99 {shares} ms of {len(latency_ms)}"


def cell_brief(result: dict[str, Any] | None) -> str:
    """What a cell's result says, in a line."""
    result = result or {}
    served = {name: brief(requests["latency_ms"]) for name, requests in result.get("latency", {}).items()}
    parts = [f"{name} {said}" for name, said in served.items() if said]
    parts += [f"{name} {per_s:.2f}/s" for name, per_s in result.get("best_effort_per_s", {}).items()]
    if "kernel_us" in result:
        count = sum(number for _, number in result["kernel_us"])
        parts.append(f"{count} kernels, {result['per_item_us']:.0f} us an item")
    if "busy_us" in result:
        parts.append(f"the GPU is busy for {result['busy_us']:.0f} us a request")
    return ", ".join(parts)


def report(cells: CellFile, out: Path, made: Results, tables: Sequence[Callable[[Results], str]]) -> None:
    """Writes the results of cells, and prints what they say and what failed."""
    if made.rows:
        made.write(out)
        for table in tables:
            print(table(made))
    for outcome in cells.outcomes.values():
        if outcome.error:
            print(f"failed: {outcome.cell.arm} beside {outcome.cell.best_effort}, {outcome.error.splitlines()[0]}")


def judged(goals: Goals, found: Found, limited_by: Mapping[str, str]) -> list[FigureRow]:
    """A row for each figure that was found; one that misses its goal has its reason."""
    return [
        FigureRow.judged(name, found[name], goal, limited_by.get(name, ""))
        for name, goal in goals.items()
        if name in found
    ]
