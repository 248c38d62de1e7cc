"""Runs cells of the colocation benchmark within a given time; `merge` puts several runs together.

    python -m benchmarks.colocation --out benchmarks/results/colocation.json --budget-s 540
    python -m benchmarks.colocation --out benchmarks/results/colocation.json --budget-s 540 --resume
    python -m benchmarks.colocation --simulate --out /tmp/rehearsal.json
    python -m benchmarks.colocation merge --out benchmarks/results/colocation.json first.cells second.cells

Each outcome is saved at once, beside the results with the suffix .cells; `--resume` goes on where a run stopped, and
tries again what failed. Arms take turns within each repeat. Idle workers of other arms stay, with their contexts: a
context without work takes no slice of the GPU, under MPS or not. The exit status is 0 when all cells have a result, 3
when time ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
from benchmarks.colocation.cells import KERNELS, Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.rows import results
from benchmarks.results.schema import ColocationRow, Results
from benchmarks.tables import colocation_table

#: What a run takes beyond its measured seconds, and what starting workers takes at least.
CELL_EXTRA_S = 2.5
START_S = 30.0
#: Kept back for the results at the end.
CLOSING_S = 10.0
TIME_RAN_OUT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["merge"]:
        return merge(arguments[1:])
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    path = cells_path(options.out)
    if path.exists() and not options.resume:
        print(f"{path} is there from another run: --resume goes on with it; else remove it", file=sys.stderr)
        return 2
    backend: Backend | None = None
    try:
        described = meta.describe(options.simulate, options.commit)
        backend = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
        if options.lead_us is not None:
            backend.settings["CUDASCHED_LEAD_US"] = f"{options.lead_us * backend.scale:g}"
        cells = CellFile(path, described)
        with Pool(backend) as pool:
            status = Runner(pool, cells, options).run()
    except (HarnessError, ValueError) as error:
        print(f"colocation: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"colocation: interrupted; {path} has what is done", file=sys.stderr)
        return 130
    finally:
        if backend:
            backend.close()
    finish(cells, options.out, options.slo_ms, options.plots)
    return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with lists split and checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation", description=__doc__.splitlines()[0])
    parser.add_argument("--arms", help=f"which arms, by commas, of {', '.join(ARMS)}; those without history by default")
    parser.add_argument("--latency", default="bert_graph", help=f"loads, by commas, of {', '.join(LATENCY_LOADS)}")
    parser.add_argument("--best-effort", default=None, help=f"loads, by commas, of {', '.join(BEST_EFFORT_LOADS)}")
    parser.add_argument("--arrivals", default="poisson", help=f"by commas, of {', '.join(ARRIVALS)}")
    parser.add_argument("--rate", type=float, default=None, help="requests a second (60; 120 on the simulated driver)")
    parser.add_argument("--repeats", type=int, default=None, help="of each cell (3; 1 on the simulated driver)")
    parser.add_argument("--seconds", type=float, default=None, help="of each cell (10; 2 on the simulated driver)")
    parser.add_argument("--budget-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--lead-us", type=float, default=None, help="the lead, for arms with cudasched")
    parser.add_argument("--slo-ms", type=float, default=None, help="target of attainment (1.7 x the P99 alone)")
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--resume", action="store_true", help="go on where the last run with this --out stopped")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    options = parser.parse_args(arguments)
    fallback = (
        (120.0, 1, 2.0, "transformer") if options.simulate else (60.0, 3, 10.0, "transformer,resnet50,gemm,elementwise")
    )
    for name, value in zip(("rate", "repeats", "seconds", "best_effort"), fallback, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    possible = [arm.name for arm in ARMS.values() if not (options.simulate and arm.mode == "mps")]
    if options.arms is None:
        options.arms = ",".join(name for name in possible if not ARMS[name].is_optional)
    checks = (
        ("arms", possible),
        ("latency", LATENCY_LOADS),
        ("best_effort", BEST_EFFORT_LOADS),
        ("arrivals", ARRIVALS),
    )
    for name, known in checks:
        chosen = [part for part in getattr(options, name).split(",") if part]
        unknown = [part for part in chosen if part not in known]
        if unknown or not chosen:
            parser.error(
                f"--{name.replace('_', '-')}: {', '.join(unknown) or 'none named'}; there are {', '.join(known)}"
            )
        setattr(options, name, chosen)
    if min(options.rate, options.repeats, options.seconds) <= 0:
        parser.error("--rate, --repeats and --seconds must be above 0")
    return options


class Runner:
    """Does the cells that are missing, pair of loads by pair, while there is time."""

    def __init__(self, pool: Pool, cells: CellFile, options: argparse.Namespace) -> None:
        self.pool, self.cells, self.options = pool, cells, options
        self.began = time.monotonic()
        self.lead_us = options.lead_us if options.lead_us is not None else _configured_lead_us(pool.backend)
        self.failed = 0
        self.done = 0

    def run(self) -> int:
        """Returns the exit status."""
        for latency in self.options.latency:
            for best_effort in self.options.best_effort:
                for arrivals in self.options.arrivals:
                    if not self._pair(latency, best_effort, arrivals):
                        print("time ran out: --resume goes on from here")
                        return TIME_RAN_OUT
        return 1 if self.failed else 0

    def _pair(self, latency: str, best_effort: str, arrivals: str) -> bool:
        """All missing cells of a pair of loads; False when time ran out."""
        missing = self.cells.missing(self._planned(latency, best_effort, arrivals))
        if not missing:
            return True
        if self._left_s() < START_S + self.options.seconds + CELL_EXTRA_S:
            return False
        wanted = list(dict.fromkeys(spec for cell in missing for spec in self._workers(cell)))
        self.pool.retire(keep=wanted)
        self._say(f"{latency} beside {best_effort}: {len(missing)} cells, starting {len(wanted)} workers")
        broken = self.pool.start(wanted, min(START_TIMEOUT_S, max(self._left_s(), 1.0)))
        for error in broken.values():
            self._say(str(error))
        for cell in missing:
            if self._left_s() < cell.seconds + CELL_EXTRA_S:
                return False
            self._cell(cell)
        return True

    def _planned(self, latency: str, best_effort: str, arrivals: str) -> list[Cell]:
        planned = []
        for repeat in range(self.options.repeats):
            for name in self.options.arms:
                lead_us = self.lead_us if ARMS[name].managed else 0.0
                planned.append(
                    Cell(name, latency, best_effort, arrivals, self.options.rate, self.options.seconds, lead_us, repeat)
                )
        # Last, because profiling ends the worker.
        return [*planned, Cell.kernels(best_effort)]

    @staticmethod
    def _workers(cell: Cell) -> list[WorkerSpec]:
        arm = ARMS["best_effort_alone" if cell.arm == KERNELS else cell.arm]
        return workers_of(arm, cell.latency, cell.best_effort)

    def _cell(self, cell: Cell) -> None:
        result: dict[str, Any] | None = None
        problem = None
        specs = self._workers(cell)
        try:
            if cell.arm == KERNELS:
                result = self.pool.kernels(specs[0])
            else:
                result = self.pool.run(specs, Run(cell.seconds, cell.rate_hz, cell.arrivals, seed=cell.repeat))
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
        self._say(f"{cell.arm} {cell.repeat}: {problem or _brief(result)}")

    def _left_s(self) -> float:
        if self.options.budget_s is None:
            return float("inf")
        return float(self.options.budget_s - CLOSING_S - (time.monotonic() - self.began))

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def merge(arguments: Sequence[str]) -> int:
    """Puts the cells of several runs together; later files win."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation merge", description=merge.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json; its cells go beside it")
    parser.add_argument("--slo-ms", type=float, default=None, help="target of attainment (1.7 x the P99 alone)")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    parser.add_argument("cells", type=Path, nargs="+", help="NAME.cells of each run, oldest first")
    options = parser.parse_args(arguments)
    try:
        for path in options.cells:
            if not path.exists():
                raise ValueError(f"{path}: no such file")
        merged = CellFile(options.cells[0])
        for path in options.cells[1:]:
            merged.merge(CellFile(path))
    except ValueError as error:
        print(f"colocation: {error}", file=sys.stderr)
        return 1
    merged.path = cells_path(options.out)
    merged.save()
    finish(merged, options.out, options.slo_ms, options.plots)
    return 0


def finish(cells: CellFile, out: Path, slo_ms: float | None, plots: bool) -> None:
    """Writes results and plots, and prints the table and what failed."""
    made = results(cells, slo_ms)
    if made.rows:
        made.write(out)
        print(colocation_table(made))
        if plots:
            write_plots(made, out)
    for outcome in cells.outcomes.values():
        if outcome.error:
            print(f"failed: {outcome.cell.arm} beside {outcome.cell.best_effort}, {outcome.error.splitlines()[0]}")
    print(f"results: {out}, cells: {cells.path}")


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


def _configured_lead_us(backend: Backend) -> float:
    setting = {**os.environ, **backend.settings}.get("CUDASCHED_LEAD_US")
    return float(setting) / backend.scale if setting else 20.0


def _brief(result: dict[str, Any] | None) -> str:
    result = result or {}
    parts = []
    if result.get("latency_ms"):
        values = result["latency_ms"]
        shares = "/".join(f"{percentile(values, share):.2f}" for share in (0.5, 0.95, 0.99))
        parts.append(f"P50/P95/P99 {shares} ms of {len(values)}")
    if "best_effort_per_s" in result:
        parts.append(f"best effort {result['best_effort_per_s']:.2f}/s")
    if "kernel_us" in result:
        count = sum(number for _, number in result["kernel_us"])
        parts.append(f"{count} kernels, {result['per_item_us']:.0f} us an item")
    return ", ".join(parts)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
