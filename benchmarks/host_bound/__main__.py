"""Runs the host-bound benchmark within a given time, and goes on where the last run stopped.

    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --limit-s 590
    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --plan
    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --limit-s 590 --only bert_eager/transformer
    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --limit-s 590 --pass 2
    python -m benchmarks.host_bound --out benchmarks/results/host_bound.json --predict simulated.json   # needs no GPU
    python -m benchmarks.host_bound merge --out benchmarks/results/host_bound.json first.cells second.cells
    python -m benchmarks.host_bound --simulate --out /tmp/rehearsal.json

Eager servers beside training and GEMMs: alone, in time slices, under MPS with a low priority, as threads of one process
on streams with priorities, and under cudasched with the policies `harvest` and `strict` (`_strict`). A server's
requests come at a rate that keeps its host busy for 35% of the time (BERT: at most 60 a second); it is measured once
and kept with the cells. The arms of a repeat have equal arrivals, and ratios are medians over the pairs of a repeat. A
cell is as long as 1,000 latencies in all repeats take. A host that others share is faster and slower by turns: each
request has with it what a fixed piece of work takes the server's thread then, and ratios are of latencies at one pace.
How that differs between the arms is beside them. Programs are pinned: the server to the first half of the cores that
the benchmark may use, best effort to the other, in all arms, and the threads of a core are in the same half. In one
process their threads are.

The most important cells come first: the first pass, over all pairs, has what the figures are made of (the new policy in
all modes, time slices, priorities, both loads alone); the second has the rest, with both loads alone again, so that
what is compared was measured together; the third, under both policies, the servers that are to be as they are under
`strict`: a CUDA graph and a recommender. The servers' requests are recorded for the simulator where they are not yet.
`--plan` prints the passes with the time that each takes, and measures nothing. `--pass N` takes one of them, `--only
SERVER[/BESIDE[/ARM]]` parts, and both may be given again; `--part I/N` takes every Nth server, for a GPU a part
(benchmarks/host_bound.sh), and `merge` puts these together. Each outcome is saved at once in NAME.cells. The exit
status is 0 when all cells have a result, 3 when time ran out first, 1 when a cell failed. Beside the results is
NAME.requests.json.xz, what the simulator replays; `--predict FILE` says by how much its P50 and ratio are off of those
that were measured (benchmarks/host_bound/replayed.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    CELL_EXTRA_S,
    CLOSING_S,
    START_S,
    TIME_RAN_OUT,
    brief,
    configured_lead_us,
    write_plots,
)
from benchmarks.colocation.cells import BUSY, CALIBRATION, KERNELS, Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.frame import merge_cells, merge_parser, part_of, report, run_cells
from benchmarks.colocation.rows import results
from benchmarks.host_bound import replayed
from benchmarks.host_bound.summary import AS_STRICT
from benchmarks.results.schema import Results, load
from benchmarks.tables import colocation_table

LOADS = Path(__file__).with_name("loads.py")
#: What each server runs beside, the most important first.
PAIRS = (
    ("bert_eager", "transformer"),
    ("decode_eager", "transformer"),
    ("bert_eager", "gemm"),
    ("decode_eager", "gemm"),
    ("resnet50_eager", "transformer"),
    ("recommender", "transformer"),
    ("bert_eager", "resnet50"),
    ("decode_eager", "resnet50"),
)
#: Servers that `harvest` is to leave as they are: a CUDA graph has no host to wait for.
GRAPH_PAIRS = (("bert_graph", "transformer"),)
ALL_PAIRS = PAIRS + GRAPH_PAIRS
#: Of the servers whose figures are to be those of `strict`.
AS_STRICT_PAIRS = tuple(pair for server in AS_STRICT for pair in ALL_PAIRS if pair[0] == server)
SERVERS = tuple(dict.fromkeys(server for server, _ in ALL_PAIRS))
HOST_SHARE = 0.35
#: Requests a second, at most.
MOST_HZ = {"bert_eager": 60.0, "bert_graph": 200.0}
#: At which it is measured what a request takes: so slow that the longest, a decoder's, do not meet.
CALIBRATION_HZ = 3.0
#: On the simulated driver: it is slow, threads that wait for it take the host from one another, and a cell of a second
#: is to have some requests on a busy machine, too.
LEAST_SIMULATED_HZ, MOST_SIMULATED_HZ = 50.0, 120.0
#: Latencies that a P99 is made of, with what a Poisson process may be short of; how long a cell is at least and most.
POOLED = 1000 * 1.05
LEAST_S, MOST_S = 4.0, 15.0
#: In which requests are timed one by one, for the rate.
CALIBRATION_S = 6.0
#: How often best effort alone is measured, which is always as fast.
ALONE_REPEATS = 2
#: Requests that are recorded for the simulator; a decoder's have some thousand launches each.
RECORDED = {"decode_eager": 6}
RECORDED_OTHERS = 24
#: What --plan reckons with: a pair's workers to start, a cell beyond its seconds, the profile of a load.
PLANNED_START_S, PLANNED_EXTRA_S, PLANNED_PROFILE_S = 35.0, 1.2, 10.0
#: And for servers that have not run yet: latencies a second.
USUAL_PER_S = {
    "bert_eager": 60.0,
    "resnet50_eager": 50.0,
    "decode_eager": 75.0,
    "recommender": 350.0,
    "bert_graph": 200.0,
}
MODES = ("two_processes", "mps", "one_process")
ARMS = {
    arm.name: arm
    for arm in (
        *(COLOCATION_ARMS[name] for name in ("latency_alone", "best_effort_alone", "best_effort_alone_hooked")),
        *(COLOCATION_ARMS[name] for name in ("processes", "mps_priority", "one_process_priority")),
        *(Arm(f"cudasched_{mode}", mode, managed=True, policy="harvest") for mode in MODES),
        *(Arm(f"cudasched_{mode}_strict", mode, managed=True) for mode in MODES),
    )
}


@dataclass(frozen=True)
class Pass:
    """Arms that are measured together.

    Attributes:
        arms: Their names.
        pairs: Of which loads.
    """

    arms: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = PAIRS


PASSES = (
    Pass(
        (
            *("latency_alone", "best_effort_alone_hooked", "processes", "one_process_priority"),
            *(f"cudasched_{mode}" for mode in MODES),
        )
    ),
    Pass(
        (
            *("latency_alone", "best_effort_alone", "best_effort_alone_hooked", "mps_priority"),
            *(f"cudasched_{mode}_strict" for mode in MODES),
        )
    ),
    Pass(
        (
            *("latency_alone", "best_effort_alone_hooked"),
            *(f"cudasched_{mode}{policy}" for mode in MODES for policy in ("", "_strict")),
        ),
        pairs=AS_STRICT_PAIRS,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["merge"]:
        return merge(arguments[1:])
    options = parse(arguments)
    if options.plan:
        return print_plan(options)
    if options.predict:
        return predict(options)

    def measure(backend: Backend, cells: CellFile) -> int:
        backend.loads = LOADS
        backend.cores = halves(by_core(os.sched_getaffinity(0)))
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
    parser.add_argument(
        "--pass", action="append", type=int, dest="passes", metavar="N", help="only this pass, from 1 on"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth server, from the Ith on")
    parser.add_argument("--limit-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--repeats", type=int, default=None, help="of each cell (5; 1 on the simulated driver)")
    parser.add_argument("--seconds", type=float, help="of each cell (4, or what 1,000 latencies take; simulated: 1)")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be measured, in order, and how long it takes"
    )
    parser.add_argument(
        "--predict", type=Path, metavar="FILE", help="simulate what was measured, and write how far off"
    )
    parser.add_argument("--simulate", "--rehearse", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots beside the results")
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 1 if options.simulate else 5
    if options.seconds is None and options.simulate:
        options.seconds = 1.0
    if options.repeats <= 0 or (options.seconds is not None and options.seconds <= 0):
        parser.error("--repeats and --seconds must be above 0")
    options.passes = options.passes or list(range(1, len(PASSES) + 1))
    if not set(options.passes) <= set(range(1, len(PASSES) + 1)):
        parser.error(f"--pass takes 1 to {len(PASSES)}")
    servers = part_of(parser, options.part, SERVERS)
    options.pairs = [(server, beside) for server, beside in ALL_PAIRS if server in servers]
    for part in options.only:
        server, beside, arm = [*part.split("/"), "", ""][:3]
        if not any(server == one and beside in (other, "") for one, other in ALL_PAIRS) or (arm and arm not in ARMS):
            pairs = ", ".join("/".join(pair) for pair in ALL_PAIRS)
            parser.error(f"--only {part}: there are {pairs}; arms {', '.join(ARMS)}")
    return options


def by_core(threads: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Hardware threads in the order of their cores; in their own where the machine does not tell."""

    def core(thread: int) -> list[int]:
        told = topology / f"cpu{thread}" / "topology" / "thread_siblings_list"
        with contextlib.suppress(OSError, ValueError):
            return [int(re.split("[,-]", told.read_text().strip())[0]), thread]
        return [thread, thread]

    return sorted(threads, key=core)


def halves(cores: list[int]) -> dict[str, list[int]]:
    """Which hardware threads a role's programs, or threads, may use; with one, all share it."""
    middle = max(1, len(cores) // 2)
    return {"latency": cores[:middle], "best_effort": cores[middle:] or cores}


def wanted(only: Sequence[str], server: str, beside: str, arm: str) -> bool:
    """Whether a cell is among those that were asked for."""
    own = f"{server}/{beside}/{arm}/"
    return not only or any(own.startswith(part + "/") for part in only)


def wanted_pairs(options: argparse.Namespace) -> Iterator[tuple[int, str, str, list[str]]]:
    """The passes and their pairs that were asked for, in order: a pass's number from 0, server, beside, arms."""
    for number, one in enumerate(PASSES):
        for server, beside in one.pairs:
            arms = [arm for arm in one.arms if wanted(options.only, server, beside, arm)]
            if number + 1 in options.passes and (server, beside) in options.pairs and arms:
                yield number, server, beside, arms


def cell_seconds(repeats: int, latencies_per_s: float) -> float:
    """How long a cell is, so that all its repeats have the latencies that a P99 needs."""
    return float(min(MOST_S, max(LEAST_S, math.ceil(POOLED / repeats / latencies_per_s))))


def repeats_of(arm: str, number: int, repeats: int) -> range:
    """The numbers of an arm's repeats in a pass."""
    first = number * repeats
    return range(first, first + (repeats if ARMS[arm].latency else min(repeats, ALONE_REPEATS)))


def print_plan(options: argparse.Namespace) -> int:
    """Prints the pairs in their order with what each takes, as far as it is known beforehand."""
    path = cells_path(options.out)
    cells = CellFile(path) if path.exists() else None
    total_s = 0.0
    for number, server, beside, arms in wanted_pairs(options):
        seconds = options.seconds or cell_seconds(options.repeats, USUAL_PER_S[server])
        planned = {(arm, repeat) for arm in arms for repeat in repeats_of(arm, number, options.repeats)}
        known = [
            cell
            for cell, outcome in (cells.outcomes.items() if cells else ())
            if cell.latency in (server, "") and cell.best_effort in (beside, "") and outcome.result is not None
        ]
        left = len(planned - {(cell.arm, cell.repeat) for cell in known})
        profiles = 2 - sum(cell.arm in (KERNELS, BUSY) for cell in known)
        took_s = left * (seconds + PLANNED_EXTRA_S) + PLANNED_START_S + profiles * PLANNED_PROFILE_S if left else 0.0
        total_s += took_s
        print(
            f"pass {number + 1}, {server} beside {beside}: {left} cells of {seconds:g} s, "
            f"{took_s:.0f} s, {total_s / 60:.1f} min by its end ({', '.join(arms)})"
        )
    return 0


def merge(arguments: Sequence[str]) -> int:
    """Puts the cells of several runs together."""
    options = merge_parser("host_bound").parse_args(arguments)
    return merge_cells("host_bound", options, lambda cells: finish(cells, options.out, plots=False))


def predict(options: argparse.Namespace) -> int:
    """Simulates the measured rows from what was recorded; writes and prints how far off they are."""
    try:
        made = load(options.out)
        found = replayed.figures(made, replayed.read(replayed.recording_path(options.out)))
    except (OSError, ValueError) as error:
        print(f"host_bound: {error}", file=sys.stderr)
        return 1
    if not found:
        print("host_bound: nothing was measured beside what was recorded", file=sys.stderr)
        return 1
    for row in found:
        print(f"{row.figure}: off by {row.value:.1%}{'' if row.met else f', missed: {row.limited_by}'}")
    Results(meta=made.meta, rows=found).write(options.predict)
    return 0


class Runner:
    """Does the cells that are missing, pass by pass and pair by pair, while there is time."""

    def __init__(self, pool: Pool, cells: CellFile, options: argparse.Namespace) -> None:
        self.pool, self.cells, self.options = pool, cells, options
        self.began = time.monotonic()
        self.lead_us = configured_lead_us(pool.backend)
        self.arms = {name for name, arm in ARMS.items() if not (options.simulate and arm.mode == "mps")}
        self.failed = 0

    def run(self) -> int:
        """Returns the exit status."""
        for number, server, beside, arms in wanted_pairs(self.options):
            arms = [arm for arm in arms if arm in self.arms]
            if not arms:
                continue
            rate = self._rate(server)
            if rate is None:
                return 1 if self.failed else self._out_of_time()
            planned = self._planned(server, beside, rate, arms, number)
            planned += [Cell.kernels(beside), Cell.busy(server)]
            if not self._pair(planned, f"pass {number + 1}, {server} beside {beside}"):
                return self._out_of_time()
        return 1 if self.failed else 0

    def _out_of_time(self) -> int:
        print("time ran out: the same command goes on from here")
        return TIME_RAN_OUT

    def _rate(self, server: str) -> tuple[str, float] | None:
        """Requests a second that keep the host busy for its share, and the seconds of a cell at that; None: no time.

        By a measurement that is made once.
        """
        hz = f"{CALIBRATION_HZ * (10 if self.options.simulate else 1):g}"
        cell = Cell.calibration(server, hz, self.options.seconds or CALIBRATION_S)
        if self.cells.missing([cell]):
            if self._left_s() < START_S + cell.seconds:
                return None
            self._cell(cell)
        outcome = self.cells.outcomes[cell]
        if outcome.result is None:
            return None
        served = outcome.result["latency"][server]
        requests_ms = served.get("request_ms") or served["latency_ms"]
        rate_hz = min(HOST_SHARE / statistics.median(requests_ms) * 1e3, MOST_HZ.get(server, math.inf))
        if self.options.simulate:
            rate_hz = min(max(rate_hz, LEAST_SIMULATED_HZ), MOST_SIMULATED_HZ)
        return f"{rate_hz:.4g}", self._seconds(rate_hz * len(served["latency_ms"]) / len(requests_ms))

    def _seconds(self, latencies_per_s: float) -> float:
        return float(self.options.seconds or cell_seconds(self.options.repeats, latencies_per_s))

    def _planned(self, server: str, beside: str, rate: tuple[str, float], arms: list[str], number: int) -> list[Cell]:
        rate_hz, seconds = rate
        return [
            Cell(name, server, beside, "poisson", rate_hz, seconds, self.lead_us if ARMS[name].managed else 0.0, repeat)
            for repeat in range(number * self.options.repeats, (number + 1) * self.options.repeats)
            for name in arms
            if repeat in repeats_of(name, number, self.options.repeats)
        ]

    @staticmethod
    def _workers(cell: Cell) -> list[WorkerSpec]:
        alone = {KERNELS: "best_effort_alone", CALIBRATION: "latency_alone", BUSY: "latency_alone"}
        return workers_of(ARMS[alone.get(cell.arm, cell.arm)], cell.latency, cell.best_effort)

    def _pair(self, planned: list[Cell], name: str) -> bool:
        """All missing cells of a pair of loads; False when time ran out."""
        missing = self.cells.missing(planned)
        if not missing:
            return True
        if self._left_s() < START_S + max(cell.seconds for cell in missing) + CELL_EXTRA_S:
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
                result = self.pool.requests(specs[0], RECORDED.get(cell.latency, RECORDED_OTHERS))
                if result.get("problem"):
                    self._say(f"{cell.latency}: its requests could not be recorded: {result['problem']}")
            else:
                # The arms of a repeat have its arrivals.
                run = Run(cell.seconds, cell.rates_hz, cell.arrivals, seed=cell.repeat, keep_pace=True)
                result = self.pool.run(specs, run)
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
    recorded = replayed.packed(cells)
    if recorded["servers"]:
        replayed.save(recorded, replayed.recording_path(out))
    if made.rows and plots:
        write_plots(made, out)
    report(cells, out, made, (colocation_table,))


if __name__ == "__main__":
    sys.exit(main())
