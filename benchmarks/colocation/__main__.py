"""Runs cells of the colocation benchmark within a given time; `merge` puts several runs together.

    python -m benchmarks.colocation --out benchmarks/results/colocation.json --budget-s 540
    python -m benchmarks.colocation --out benchmarks/results/colocation.json --budget-s 540 --resume
    python -m benchmarks.colocation --simulate --out /tmp/rehearsal.json
    python -m benchmarks.colocation merge --out benchmarks/results/colocation.json first.cells second.cells

Each outcome is saved at once, beside the results with the suffix .cells; `--resume` goes on where a run stopped, and
tries again what failed. Arms take turns within each repeat; `--arms processes:3` gives one arm other repeats than the
rest has. Loads joined by + run at once, at `--rate` joined likewise. Idle workers of other arms stay, with their
contexts: a context without work takes no slice of the GPU, under MPS or not. The exit status is 0 when all cells have a
result, 3 when time ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from cudasched.config import Config
from cudasched.demo.arrivals import ARRIVALS
from cudasched.demo.harness import (
    ARMS,
    START_TIMEOUT_S,
    Backend,
    HarnessError,
    Pool,
    Run,
    WorkerSpec,
    percentile,
    workers_of,
)
from cudasched.demo.plot import HOW_TO_GET_MATPLOTLIB, plot
from cudasched.demo.simulated import BEST_EFFORT_LOADS, LATENCY_LOADS

from benchmarks import meta
from benchmarks.colocation.cells import BUSY, CALIBRATION, KERNELS, Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.frame import merge_cells, merge_parser, report, run_cells
from benchmarks.colocation.rows import results
from benchmarks.results.schema import ColocationRow, Results
from benchmarks.tables import colocation_table

#: What a run takes beyond its measured seconds, and what starting workers takes at least.
CELL_EXTRA_S = 2.5
START_S = 30.0
#: Where --duty asks for it: requests a second while one is measured, and its latency target as a multiple of that.
CALIBRATION_HZ = 10.0
SLO_OVER_REQUEST = 2.0
#: Kept back for the results at the end.
CLOSING_S = 10.0
TIME_RAN_OUT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["merge"]:
        return merge(arguments[1:])
    options = parse(arguments)
    path = cells_path(options.out)
    if path.exists() and not options.resume:
        print(f"{path} is there from another run: --resume goes on with it; else remove it", file=sys.stderr)
        return 2

    def measure(backend: Backend, cells: CellFile) -> int:
        if options.lead_us is not None:
            lead_us = options.lead_us
            backend.settings["CUDASCHED_LEAD_US"] = lead_us if lead_us == "auto" else f"{lead_us * backend.scale:g}"
        with Pool(backend) as pool:
            return Runner(pool, cells, options).run()

    return run_cells(
        "colocation", options, measure, lambda cells: finish(cells, options.out, options.slo_ms, options.plots)
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with lists split and checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation", description=__doc__.splitlines()[0])
    parser.add_argument("--arms", help=f"which arms, by commas, each with :REPEATS if it likes, of {', '.join(ARMS)}")
    parser.add_argument("--latency", default="bert_graph", help=f"loads, by commas, of {', '.join(LATENCY_LOADS)}")
    parser.add_argument("--best-effort", default=None, help=f"loads, by commas, of {', '.join(BEST_EFFORT_LOADS)}")
    parser.add_argument("--arrivals", default="poisson", help=f"by commas, of {', '.join(ARRIVALS)}")
    parser.add_argument("--rate", default=None, help="requests a second (60; 120 on the simulated driver)")
    parser.add_argument("--duty", type=float, help="a rate that keeps the GPU busy for this share, and an SLO")
    parser.add_argument("--repeats", type=int, default=None, help="of each cell (3; 1 on the simulated driver)")
    parser.add_argument("--seconds", type=float, default=None, help="of each cell (10; 2 on the simulated driver)")
    parser.add_argument("--budget-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--lead-us", type=_lead, default=None, help="the lead, or auto, for arms with cudasched")
    parser.add_argument("--slo-ms", type=float, default=None, help="target of attainment (1.7 x the P99 alone)")
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--resume", action="store_true", help="go on where the last run with this --out stopped")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    options = parser.parse_args(arguments)
    fallback = (
        ("120", 1, 2.0, "transformer") if options.simulate else ("60", 3, 10.0, "transformer,resnet50,gemm,elementwise")
    )
    for name, value in zip(("rate", "repeats", "seconds", "best_effort"), fallback, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    possible = [arm.name for arm in ARMS.values() if not (options.simulate and arm.mode == "mps")]
    if options.arms is None:
        options.arms = ",".join(name for name in possible if not ARMS[name].is_optional)
    checks = (
        ("latency", LATENCY_LOADS),
        ("best_effort", BEST_EFFORT_LOADS),
        ("arrivals", ARRIVALS),
    )
    chosen = [part.partition(":") for part in options.arms.split(",") if part]
    options.arms = [name for name, _, _ in chosen]
    _check(parser, "arms", options.arms, options.arms, possible)
    options.arms = {name: int(own) if own.isdigit() else options.repeats for name, _, own in chosen}
    for name, known in checks:
        parts = [part for part in getattr(options, name).split(",") if part]
        _check(parser, name, parts, [load for part in parts for load in part.split("+")], known)
        setattr(options, name, parts)
    if any(len(options.rate.split("+")) != len(loads.split("+")) for loads in options.latency):
        parser.error("--rate: one for each latency load, joined by + as they are")
    try:
        rates = [float(rate) for rate in options.rate.split("+")]
    except ValueError:
        parser.error("--rate: numbers, joined by +")
    if min(*rates, *options.arms.values(), options.seconds) <= 0:
        parser.error("--rate, --repeats and --seconds must be above 0")
    if options.duty is not None and not (0 < options.duty < 1 and "+" not in "".join(options.latency)):
        parser.error("--duty: between 0 and 1, and for one latency load at a time")
    return options


def _check(
    parser: argparse.ArgumentParser, name: str, chosen: Sequence[str], parts: Sequence[str], known: Collection[str]
) -> None:
    unknown = [part for part in parts if part not in known]
    if unknown or not chosen:
        option = name.replace("_", "-")
        parser.error(f"--{option}: {', '.join(unknown) or 'none named'}; there are {', '.join(known)}")


def _lead(text: str) -> float | str:
    return text if text == "auto" else float(text)


class Runner:
    """Does the cells that are missing, pair of loads by pair, while there is time."""

    def __init__(self, pool: Pool, cells: CellFile, options: argparse.Namespace) -> None:
        self.pool, self.cells, self.options = pool, cells, options
        self.began = time.monotonic()
        self.lead_us = options.lead_us if options.lead_us is not None else configured_lead_us(pool.backend)
        self.failed = 0
        self.done = 0

    def run(self) -> int:
        """Returns the exit status."""
        for latency in self.options.latency:
            rates_hz, slo_ms = self.options.rate, 0.0
            if self.options.duty is not None:
                request_ms = self._request_ms(latency)
                if request_ms is None:
                    return 1 if self.failed else self._out_of_time()
                rates_hz = f"{self.options.duty / request_ms * 1e3:.4g}"
                slo_ms = round(SLO_OVER_REQUEST * request_ms, 3)
            for best_effort in self.options.best_effort:
                for arrivals in self.options.arrivals:
                    planned = self._planned(latency, best_effort, arrivals, rates_hz, slo_ms)
                    if not self._pair(planned, f"{latency} beside {best_effort}"):
                        return self._out_of_time()
        return 1 if self.failed else 0

    def _out_of_time(self) -> int:
        print("time ran out: --resume goes on from here")
        return TIME_RAN_OUT

    def _request_ms(self, latency: str) -> float | None:
        """What a request takes by itself on the bare device, measured once; None if that failed or time ran out."""
        hz = f"{CALIBRATION_HZ * (10 if self.options.simulate else 1):g}"
        cell = Cell.calibration(latency, hz, min(self.options.seconds, 3.0))
        if self.cells.missing([cell]):
            if self._left_s() < START_S + cell.seconds:
                return None
            self._cell(cell)
        outcome = self.cells.outcomes[cell]
        return statistics.median(outcome.result["latency"][latency]["latency_ms"]) if outcome.result else None

    def _pair(self, planned: list[Cell], name: str) -> bool:
        """All missing cells of a pair of loads; False when time ran out."""
        missing = self.cells.missing(planned)
        if not missing:
            return True
        if self._left_s() < START_S + self.options.seconds + CELL_EXTRA_S:
            return False
        wanted = list(dict.fromkeys(spec for cell in missing for spec in self._workers(cell)))
        self.pool.retire(keep=wanted)
        self._say(f"{name}: {len(missing)} cells, starting {len(wanted)} workers")
        broken = self.pool.start(wanted, min(START_TIMEOUT_S, max(self._left_s(), 1.0)))
        for error in broken.values():
            self._say(str(error))
        for cell in missing:
            if self._left_s() < cell.seconds + CELL_EXTRA_S:
                return False
            self._cell(cell)
        return True

    def _planned(self, latency: str, best_effort: str, arrivals: str, rates_hz: str, slo_ms: float) -> list[Cell]:
        planned = []
        for repeat in range(max(self.options.arms.values())):
            for name, repeats in self.options.arms.items():
                if repeat >= repeats:
                    continue
                arm = ARMS[name]
                lead_us = self.lead_us if arm.managed else 0.0
                planned.append(
                    Cell(
                        name,
                        latency,
                        best_effort,
                        arrivals,
                        rates_hz,
                        self.options.seconds,
                        lead_us,
                        repeat,
                        slo_ms,
                    )
                )
        # Last, because profiling ends the worker.
        profiled = [Cell.kernels(load) for load in best_effort.split("+")]
        return [*planned, *profiled, *(Cell.busy(load) for load in latency.split("+"))]

    @staticmethod
    def _workers(cell: Cell) -> list[WorkerSpec]:
        alone = {KERNELS: "best_effort_alone", CALIBRATION: "latency_alone", BUSY: "latency_alone"}
        return workers_of(ARMS[alone.get(cell.arm, cell.arm)], cell.latency, cell.best_effort)

    def _cell(self, cell: Cell) -> None:
        result: dict[str, Any] | None = None
        problem = None
        specs = self._workers(cell)
        try:
            if cell.arm == KERNELS:
                result = self.pool.kernels(specs[0])
            elif cell.arm == BUSY:
                result = self.pool.busy(specs[0])
            else:
                hint_ms = ARMS[cell.arm].hint_ms if cell.arm in ARMS else 0.0
                run = Run(cell.seconds, cell.rates_hz, cell.arrivals, cell.repeat, hint_ms, cell.slo_ms)
                result = self.pool.run(specs, run)
        except HarnessError as error:
            problem = str(error)
            self.failed += 1
        self.done += 1
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.cells.add(Outcome(cell, result, problem, now))
        if self.cells.meta and not self.options.simulate and cell.arm == "best_effort_alone" and result:
            clock = meta.sm_clock_mhz()
            if clock and clock > (self.cells.meta.sm_clock_mhz or 0):
                self.cells.meta.sm_clock_mhz = clock
        self.cells.save()
        self._say(f"{cell.arm} {cell.repeat}: {problem or brief(result)}")

    def _left_s(self) -> float:
        if self.options.budget_s is None:
            return float("inf")
        return float(self.options.budget_s - CLOSING_S - (time.monotonic() - self.began))

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def merge(arguments: Sequence[str]) -> int:
    """Puts the cells of several runs together."""
    parser = merge_parser("colocation")
    parser.add_argument("--slo-ms", type=float, default=None, help="target of attainment (1.7 x the P99 alone)")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    options = parser.parse_args(arguments)
    return merge_cells("colocation", options, lambda cells: finish(cells, options.out, options.slo_ms, options.plots))


def finish(cells: CellFile, out: Path, slo_ms: float | None, plots: bool) -> None:
    """Writes results and plots, and prints the table and what failed."""
    made = results(cells, slo_ms)
    if made.rows and plots:
        write_plots(made, out)
    report(cells, out, made, (colocation_table,))


def write_plots(made: Results, out: Path) -> None:
    """One plot for each pair of loads, beside the results."""
    pairs: dict[tuple[str, str, str], list[ColocationRow]] = {}
    for row in made.rows:
        if isinstance(row, ColocationRow) and row.latency_ms:
            pairs.setdefault((row.latency_load, row.best_effort_load, row.arrivals), []).append(row)
    for names, rows in pairs.items():
        title = f"{names[0]} ({names[2]}, {rows[0].rate_hz:g}/s) beside {names[1]}, {made.meta.gpu}"
        image = out.with_name(f"{out.stem}-{'-'.join(names)}.png")
        if not plot([row.model_dump() for row in rows], image, title):
            print(HOW_TO_GET_MATPLOTLIB)
            return


def configured_lead_us(backend: Backend) -> float | str:
    if "CUDASCHED_LEAD_US" in backend.settings:
        return float(backend.settings["CUDASCHED_LEAD_US"]) / backend.scale
    return _lead(os.environ.get("CUDASCHED_LEAD_US") or str(Config().lead_us))


def brief(result: dict[str, Any] | None) -> str:
    result = result or {}
    parts = []
    for name, served in result.get("latency", {}).items():
        values = served["latency_ms"]
        if values:
            shares = "/".join(f"{percentile(values, share):.2f}" for share in (0.5, 0.95, 0.99))
            parts.append(f"{name} P50/P95/P99 {shares} ms of {len(values)}")
    parts += [f"{name} {per_s:.2f}/s" for name, per_s in result.get("best_effort_per_s", {}).items()]
    if "kernel_us" in result:
        count = sum(number for _, number in result["kernel_us"])
        parts.append(f"{count} kernels, {result['per_item_us']:.0f} us an item")
    if "busy_us" in result:
        parts.append(f"the GPU is busy for {result['busy_us']:.0f} us a request")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
