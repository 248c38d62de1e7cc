"""Runs the host-bound benchmark within a given time, and goes on where the last run stopped.

    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --limit-s 590
    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --limit-s 590 --only bert_eager/transformer
    python -m benchmarks.host_bound --simulate --out /tmp/rehearsal.json

Eager servers beside training and GEMMs: alone, in time slices, under MPS with a low priority, and under cudasched with
the policies `harvest` and `strict` (`_strict`). A server's requests come at a rate that keeps its host busy for 35% of
the time (BERT: 60 a second); it is measured once and kept with the cells. The arms of a repeat have equal arrivals, and
ratios are medians over the pairs of a repeat. Programs are pinned: the server to the first half of the cores that the
benchmark may use, best effort to the other, in all arms; one process has them all. `--only SERVER[/BESIDE[/ARM]]` takes
parts, and may be given again. Each outcome is saved at once in NAME.cells. The exit status is 0 when all cells have a
result, 3 when time ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import (
    ARMS as COLOCATION_ARMS,
)
from cudasched.demo.harness import (
    START_TIMEOUT_S,
    Arm,
    Backend,
    HarnessError,
    Pool,
    Run,
    WorkerSpec,
    workers_of,
)

from benchmarks.colocation.__main__ import (
    CALIBRATION_HZ,
    CELL_EXTRA_S,
    CLOSING_S,
    START_S,
    TIME_RAN_OUT,
    brief,
    configured_lead_us,
    write_plots,
)
from benchmarks.colocation.cells import BUSY, CALIBRATION, KERNELS, Cell, CellFile, Outcome
from benchmarks.colocation.frame import report, run_cells
from benchmarks.colocation.rows import results
from benchmarks.tables import colocation_table

LOADS = Path(__file__).with_name("loads.py")
#: What each server runs beside.
PAIRS = {
    "bert_eager": ("transformer", "resnet50", "gemm"),
    "resnet50_eager": ("transformer",),
    "decode_eager": ("transformer", "resnet50", "gemm"),
    "recommender": ("transformer",),
}
#: Requests a second; others follow from `HOST_SHARE`.
RATES_HZ = {"bert_eager": 60.0}
HOST_SHARE = 0.35
MOST_SIMULATED_HZ = 120.0
MODES = ("two_processes", "mps", "one_process")
ARMS = {
    arm.name: arm
    for arm in (
        *(COLOCATION_ARMS[name] for name in ("latency_alone", "best_effort_alone", "best_effort_alone_hooked")),
        *(COLOCATION_ARMS[name] for name in ("processes", "mps_priority")),
        *(Arm(f"cudasched_{mode}", mode, managed=True, policy="harvest") for mode in MODES),
        *(Arm(f"cudasched_{mode}_strict", mode, managed=True) for mode in MODES),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    options = parse(arguments)

    def measure(backend: Backend, cells: CellFile) -> int:
        backend.loads = LOADS
        backend.cores = halves(sorted(os.sched_getaffinity(0)))
        with Pool(backend) as pool:
            return Runner(pool, cells, options).run()

    return run_cells("host_bound", options, measure, lambda cells: finish(cells, options.out, options.plots))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_bound", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--only", action="append", default=[], metavar="SERVER[/BESIDE[/ARM]]", help="only these cells")
    parser.add_argument("--limit-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--repeats", type=int, default=None, help="of each cell (4; 1 on the simulated driver)")
    parser.add_argument("--seconds", type=float, default=None, help="of each cell (8; 1 on the simulated driver)")
    parser.add_argument("--simulate", "--rehearse", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    options = parser.parse_args(arguments)
    for name, value in (("repeats", 1 if options.simulate else 4), ("seconds", 1.0 if options.simulate else 8.0)):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.repeats, options.seconds) <= 0:
        parser.error("--repeats and --seconds must be above 0")
    for part in options.only:
        server, beside, arm = [*part.split("/"), "", ""][:3]
        if server not in PAIRS or (beside and beside not in PAIRS[server]) or (arm and arm not in ARMS):
            pairs = "; ".join(f"{name} beside {', '.join(others)}" for name, others in PAIRS.items())
            parser.error(f"--only {part}: there are {pairs}; arms {', '.join(ARMS)}")
    return options


def halves(cores: list[int]) -> dict[str, list[int]]:
    """Which cores a worker may use, by its role; with one core, all share it."""
    middle = max(1, len(cores) // 2)
    return {"latency": cores[:middle], "best_effort": cores[middle:] or cores, "both": cores}


def wanted(only: Sequence[str], server: str, beside: str, arm: str) -> bool:
    """Whether a cell is among those that were asked for."""
    own = f"{server}/{beside}/{arm}/"
    return not only or any(own.startswith(part + "/") for part in only)


class Runner:
    """Does the cells that are missing, pair by pair, while there is time."""

    def __init__(self, pool: Pool, cells: CellFile, options: argparse.Namespace) -> None:
        self.pool, self.cells, self.options = pool, cells, options
        self.began = time.monotonic()
        self.lead_us = configured_lead_us(pool.backend)
        self.arms = [name for name, arm in ARMS.items() if not (options.simulate and arm.mode == "mps")]
        self.failed = 0

    def run(self) -> int:
        """Returns the exit status."""
        for server, besides in PAIRS.items():
            for beside in besides:
                arms = [arm for arm in self.arms if wanted(self.options.only, server, beside, arm)]
                if not arms:
                    continue
                rate_hz = self._rate_hz(server)
                if rate_hz is None:
                    return 1 if self.failed else self._out_of_time()
                if not self._pair(self._planned(server, beside, rate_hz, arms), f"{server} beside {beside}"):
                    return self._out_of_time()
        return 1 if self.failed else 0

    def _out_of_time(self) -> int:
        print("time ran out: the same command goes on from here")
        return TIME_RAN_OUT

    def _rate_hz(self, server: str) -> str | None:
        """What keeps the server's host busy for its share, by a measurement that is made once; None: it failed."""
        if server in RATES_HZ:
            return f"{RATES_HZ[server]:g}"
        hz = f"{CALIBRATION_HZ * (10 if self.options.simulate else 1):g}"
        cell = Cell.calibration(server, hz, min(self.options.seconds, 3.0))
        if self.cells.missing([cell]):
            if self._left_s() < START_S + cell.seconds:
                return None
            self._cell(cell)
        outcome = self.cells.outcomes[cell]
        if outcome.result is None:
            return None
        served = outcome.result["latency"][server]
        rate_hz = HOST_SHARE / statistics.median(served.get("request_ms") or served["latency_ms"]) * 1e3
        # The simulated device is slow, and threads that wait for it take the host from one another.
        return f"{min(rate_hz, MOST_SIMULATED_HZ) if self.options.simulate else rate_hz:.4g}"

    def _planned(self, server: str, beside: str, rate_hz: str, arms: list[str]) -> list[Cell]:
        planned = []
        for repeat in range(self.options.repeats):
            for name in arms:
                lead_us = self.lead_us if ARMS[name].managed else 0.0
                planned.append(
                    Cell(name, server, beside, "poisson", rate_hz, self.options.seconds, lead_us, repeat, 0.0)
                )
        return [*planned, Cell.kernels(beside), Cell.busy(server)]

    @staticmethod
    def _workers(cell: Cell) -> list[WorkerSpec]:
        alone = {KERNELS: "best_effort_alone", CALIBRATION: "latency_alone", BUSY: "latency_alone"}
        return workers_of(ARMS[alone.get(cell.arm, cell.arm)], cell.latency, cell.best_effort)

    def _pair(self, planned: list[Cell], name: str) -> bool:
        """All missing cells of a pair of loads; False when time ran out."""
        missing = self.cells.missing(planned)
        if not missing:
            return True
        if self._left_s() < START_S + self.options.seconds + CELL_EXTRA_S:
            return False
        needed = list(dict.fromkeys(spec for cell in missing for spec in self._workers(cell)))
        self.pool.retire(keep=needed)
        self._say(f"{name}: {len(missing)} cells, starting {len(needed)} workers")
        for error in self.pool.start(needed, min(START_TIMEOUT_S, max(self._left_s(), 1.0))).values():
            self._say(str(error))
        for cell in missing:
            if self._left_s() < cell.seconds + CELL_EXTRA_S:
                return False
            self._cell(cell)
        return True

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
                # The arms of a repeat have its arrivals.
                result = self.pool.run(specs, Run(cell.seconds, cell.rates_hz, cell.arrivals, cell.repeat))
        except HarnessError as error:
            problem = str(error)
            self.failed += 1
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.cells.add(Outcome(cell, result, problem, now))
        self.cells.save()
        self._say(f"{cell.arm} {cell.repeat}: {problem or brief(result)}")

    def _left_s(self) -> float:
        if self.options.limit_s is None:
            return float("inf")
        return float(self.options.limit_s - CLOSING_S - (time.monotonic() - self.began))

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def finish(cells: CellFile, out: Path, plots: bool) -> None:
    """Writes results and plots, and prints the table and what failed."""
    made = results(cells, arms=ARMS, paired=True)
    if made.rows and plots:
        write_plots(made, out)
    report(cells, out, made, (colocation_table,))


if __name__ == "__main__":
    sys.exit(main())
