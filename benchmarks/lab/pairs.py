"""Benchmarks of pairs: latency loads beside best-effort loads in several arms, by the warm workers of cudasched/demo.

Arms take turns within each repeat. A run of a pair starts the workers that its missing cells need and keeps those of
the pair before that it needs, too; a context without work takes no slice of the GPU, under MPS or not.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cudasched.config import Config
from cudasched.demo.harness import START_TIMEOUT_S, Arm, Backend, HarnessError, Pool, Run, WorkerSpec, workers_of

from benchmarks.colocation.cells import BUSY, CALIBRATION, KERNELS, Cell
from benchmarks.lab.session import Session

#: What a cell takes beyond its measured seconds, and what starting workers takes at least.
CELL_EXTRA_S = 2.5
START_S = 30.0

Requests = Mapping[str, Any]
"""What a worker says of a load's requests (cudasched/demo/client.py)."""


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        rates_hz: Requests a second of each latency load, joined by + in their order.
        seconds: Of a cell.
        slo_ms: Latency target that their regions are given; 0: none.
    """

    rates_hz: str
    seconds: float
    slo_ms: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """A measurement of requests one by one, from which their load follows.

    Attributes:
        hz: Requests a second, so few that none meets another.
        seconds: How long.
        load: The load, from the requests and the session.
    """

    hz: float
    seconds: float
    load: Callable[[Requests, Session, str], Load]


@dataclass(frozen=True)
class Pair:
    """Loads that run together, and the arms in which they do.

    Attributes:
        latency: Latency loads, joined by +.
        best_effort: Best-effort loads, joined by +.
        arms: Their names, and repeats that are not those of the session.
        rates_hz: Requests a second, joined likewise; or a calibration.
        arrivals: Their kind.
        longer: Cells are so many times as long as those of other pairs.
        number: Of a pair that is measured again with other arms: its repeats follow those of the numbers before.
    """

    latency: str
    best_effort: str
    arms: Mapping[str, int | None]
    rates_hz: str | Calibration = "60"
    arrivals: str = "poisson"
    longer: float = 1.0
    number: int = 0


@dataclass(frozen=True)
class Pairs:
    """Measures pairs.

    Attributes:
        arms: What the names of arms mean.
        pool: Makes the workers' pool.
        record: So many requests of a latency load are recorded launch by launch; without it, how long one is busy.
        keep_pace: How slow the host was is kept with each request.
    """

    arms: Mapping[str, Arm]
    pool: Callable[[Session], Pool] = field(default=lambda session: Pool(session.backend))
    record: Callable[[str], int] | None = None
    keep_pace: bool = False

    def groups(self, pairs: Mapping[str, Pair]) -> dict[str, Callable[[Session], None]]:
        """The groups of a benchmark, one a pair."""
        return {name: partial(self.measure, pair=pair) for name, pair in pairs.items()}

    def measure(self, session: Session, pair: Pair) -> None:
        """All missing cells of a pair; raises OutOfTimeError where time runs out first."""
        pool = session.shared(self.pool)
        load = self._load(session, pool, pair)
        if load is None:
            return
        missing = session.cells.missing(self.planned(session, pair, load))
        if not missing:
            return
        session.need(START_S + load.seconds + CELL_EXTRA_S)
        wanted = list(dict.fromkeys(spec for cell in missing for spec in self._workers(cell)))
        pool.retire(keep=wanted)
        session.say(f"{pair.latency} beside {pair.best_effort}: {len(missing)} cells, starting {len(wanted)} workers")
        for error in pool.start(wanted, min(START_TIMEOUT_S, max(session.left_s(), 1.0))).values():
            session.say(str(error))
        for cell in missing:
            session.need(cell.seconds + CELL_EXTRA_S)
            session.measure_cell(cell, partial(self._cell, pool, cell))

    def _load(self, session: Session, pool: Pool, pair: Pair) -> Load | None:
        """How requests come; None where their calibration failed."""
        if isinstance(pair.rates_hz, str):
            rates = [float(rate) * (2 if session.rehearsal else 1) for rate in pair.rates_hz.split("+")]
            return Load("+".join(f"{rate:g}" for rate in rates), session.options.seconds * pair.longer)
        by = pair.rates_hz
        hz = f"{by.hz * (10 if session.rehearsal else 1):g}"
        cell = Cell.calibration(pair.latency, hz, min(session.options.seconds, by.seconds))
        if session.cells.missing([cell]):
            session.need(START_S + cell.seconds)
            session.measure_cell(cell, partial(self._cell, pool, cell))
        result = session.cells.outcomes[cell].result
        return by.load(result["latency"][pair.latency], session, pair.latency) if result else None

    def planned(self, session: Session, pair: Pair, load: Load) -> list[Cell]:
        """The cells of a pair; those that end their worker, because they profile it, are the last."""
        chosen = [arm for arm in session.options.arms.split(",") if arm] or list(pair.arms)
        if unknown := [arm for arm in chosen if arm not in self.arms]:
            raise HarnessError(f"--arms: {', '.join(unknown)}; there are {', '.join(self.arms)}")
        arms = {name: pair.arms.get(name) or session.options.repeats for name in chosen}
        if session.rehearsal:  # whose driver has no MPS
            arms = {name: repeats for name, repeats in arms.items() if self.arms[name].mode != "mps"}
        first = pair.number * session.options.repeats
        lead_us = configured_lead_us(session.backend)
        cells = [
            Cell(
                name,
                pair.latency,
                pair.best_effort,
                pair.arrivals,
                load.rates_hz,
                load.seconds,
                lead_us if self.arms[name].managed else 0.0,
                first + repeat,
                load.slo_ms,
            )
            for repeat in range(max(arms.values(), default=0))
            for name, repeats in arms.items()
            if repeat < repeats
        ]
        profiled = [Cell.kernels(load) for load in pair.best_effort.split("+")]
        return [*cells, *profiled, *(Cell.busy(load) for load in pair.latency.split("+"))]

    def _workers(self, cell: Cell) -> list[WorkerSpec]:
        alone = {KERNELS: "best_effort_alone", CALIBRATION: "latency_alone", BUSY: "latency_alone"}
        return workers_of(self.arms[alone.get(cell.arm, cell.arm)], cell.latency, cell.best_effort)

    def _cell(self, pool: Pool, cell: Cell) -> dict[str, Any]:
        specs = self._workers(cell)
        if cell.arm == KERNELS:
            return pool.kernels(specs[0])
        if cell.arm == BUSY:
            return pool.requests(specs[0], self.record(cell.latency)) if self.record else pool.busy(specs[0])
        hint_ms = self.arms[cell.arm].hint_ms if cell.arm in self.arms else 0.0
        # The arms of a repeat have its arrivals.
        run = Run(cell.seconds, cell.rates_hz, cell.arrivals, cell.repeat, hint_ms, cell.slo_ms, self.keep_pace)
        return pool.run(specs, run)


def every(arms: Iterable[str], **repeats: int) -> dict[str, int | None]:
    """Arms as a pair has them, some with repeats of their own."""
    return {name: repeats.get(name) for name in arms}


def requests_ms(served: Requests) -> list[float]:
    """What requests took, where their latencies are of something else, too."""
    times: list[float] = served.get("request_ms") or served["latency_ms"]
    return times


def half_busy(served: Requests, session: Session, latency: str) -> Load:
    """Requests that keep the GPU busy for half of the time, each with a target of twice what it takes."""
    del latency
    request_ms = statistics.median(served["latency_ms"])
    return Load(f"{0.5 / request_ms * 1e3:.4g}", session.options.seconds, round(2 * request_ms, 3))


def configured_lead_us(backend: Backend) -> float | str:
    """The lead of arms with cudasched, or auto."""
    if "CUDASCHED_LEAD_US" in backend.settings:
        return float(backend.settings["CUDASCHED_LEAD_US"]) / backend.scale
    lead_us = os.environ.get("CUDASCHED_LEAD_US") or str(Config().lead_us)
    return lead_us if lead_us == "auto" else float(lead_us)
