"""Eager servers beside training and GEMMs, with the policies `harvest` and `strict`: see benchmarks/README.md."""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from cudasched.demo.harness import ARMS as COLOCATION_ARMS
from cudasched.demo.harness import Arm, Pool

from benchmarks.colocation.cells import CellFile
from benchmarks.colocation.rows import results
from benchmarks.host_bound import replayed
from benchmarks.host_bound.summary import AS_STRICT
from benchmarks.lab.pairs import Calibration, Load, Pair, Pairs, Requests, every, requests_ms
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session, report
from benchmarks.results.schema import RESULTS, load
from benchmarks.tables import colocation_table

LOADS = Path(__file__).with_name("loads.py")
#: What each server runs beside, the most important first; a CUDA graph has no host to wait for.
SERVED = (
    ("bert_eager", "transformer"),
    ("decode_eager", "transformer"),
    ("bert_eager", "gemm"),
    ("decode_eager", "gemm"),
    ("resnet50_eager", "transformer"),
    ("recommender", "transformer"),
    ("bert_eager", "resnet50"),
    ("decode_eager", "resnet50"),
)
GRAPH = ("bert_graph", "transformer")
HOST_SHARE = 0.35
#: Requests a second, at most.
MOST_HZ = {"bert_eager": 60.0, "bert_graph": 200.0}
#: On the simulated driver: it is slow, threads that wait for it take the host from one another, and a cell of a second
#: is to have some requests on a busy machine, too.
LEAST_SIMULATED_HZ, MOST_SIMULATED_HZ = 50.0, 120.0
#: Latencies that a P99 is made of, with what a Poisson process may be short of; how long a cell is at least and most.
POOLED = 1000 * 1.05
LEAST_S, MOST_S = 4.0, 15.0
#: Requests that are recorded for the simulator; a decoder's have some thousand launches each.
RECORDED = {"decode_eager": 6}
RECORDED_OTHERS = 24
MODES = ("two_processes", "mps", "one_process")
HARVEST = tuple(f"cudasched_{mode}" for mode in MODES)
STRICT = tuple(f"{arm}_strict" for arm in HARVEST)
ARMS = {
    arm.name: arm
    for arm in (
        *(COLOCATION_ARMS[name] for name in ("latency_alone", "best_effort_alone", "best_effort_alone_hooked")),
        *(COLOCATION_ARMS[name] for name in ("processes", "mps_priority", "one_process_priority")),
        *(Arm(f"cudasched_{mode}", mode, managed=True, policy="harvest") for mode in MODES),
        *(Arm(f"cudasched_{mode}_strict", mode, managed=True) for mode in MODES),
    )
}
#: Best effort alone is always as fast: twice is enough.
TWICE = {"best_effort_alone": 2, "best_effort_alone_hooked": 2}
PASSES = (
    every(("latency_alone", "best_effort_alone_hooked", "processes", "one_process_priority", *HARVEST), **TWICE),
    every(("latency_alone", *TWICE, "mps_priority", *STRICT), **TWICE),
    every(("latency_alone", "best_effort_alone_hooked", *HARVEST, *STRICT), **TWICE),
)


def cell_seconds(repeats: int, latencies_per_s: float) -> float:
    """How long a cell is, so that all its repeats have the latencies that a P99 needs."""
    return float(min(MOST_S, max(LEAST_S, math.ceil(POOLED / repeats / latencies_per_s))))


def for_its_host(served: Requests, session: Session, server: str) -> Load:
    """Requests that keep the host busy for its share."""
    times_ms = requests_ms(served)
    rate_hz = min(HOST_SHARE / statistics.median(times_ms) * 1e3, MOST_HZ.get(server, math.inf))
    if session.rehearsal:
        rate_hz = min(max(rate_hz, LEAST_SIMULATED_HZ), MOST_SIMULATED_HZ)
        return Load(f"{rate_hz:.4g}", session.options.seconds)
    latencies_per_s = rate_hz * len(served["latency_ms"]) / len(times_ms)
    return Load(f"{rate_hz:.4g}", cell_seconds(session.options.repeats, latencies_per_s))


#: So slow that the longest requests, a decoder's, do not meet.
ONE_BY_ONE = Calibration(3.0, 6.0, for_its_host)
GROUPS = {
    f"{server}/{beside}/{number}": Pair(server, beside, arms, rates_hz=ONE_BY_ONE, number=number - 1)
    for number, arms in enumerate(PASSES, 1)
    for server, beside in (*SERVED, GRAPH)
    if (server in AS_STRICT) or number < 3
    if (server, beside) != GRAPH or number == 3
}


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


def pool(session: Session) -> Pool:
    """Workers with the servers of this benchmark, pinned."""
    session.backend.loads = LOADS
    session.backend.cores = halves(by_core(os.sched_getaffinity(0)))
    return Pool(session.backend)


def written(cells: CellFile, out: Path) -> None:
    """Writes the results of cells, and what was recorded of the servers."""
    recorded = replayed.packed(cells)
    if recorded["servers"]:
        replayed.save(recorded, replayed.recording_path(out))
    report(cells, out, results(cells, arms=ARMS, paired=True), (colocation_table,))


def simulate(session: Session) -> None:
    """How far the simulator is off each measured row.

    Raises:
        ValueError: Nothing was measured beside what was recorded.
    """
    measured = session.options.measured
    found = replayed.figures(load(measured), replayed.read(replayed.recording_path(measured)))
    if not found:
        raise ValueError("nothing was measured beside the recording")
    for row in found:
        print(f"{row.figure}: off by {row.value:.1%}{'' if row.met else f', missed: {row.limited_by}'}")
    session.rows += found


BENCHMARK = Benchmark(
    about="eager servers beside training and GEMMs, with the policies `harvest` and `strict`",
    groups=Pairs(ARMS, pool, record=lambda load: RECORDED.get(load, RECORDED_OTHERS), keep_pace=True).groups(GROUPS),
    written=written,
    unit=lambda group: group.partition("/")[0],
    settings={"arms": "", "repeats": (5, 1), "seconds": (6.0, 1.0)},
)
SIMULATED = Benchmark(
    about="the simulator's error against host_bound's measurements",
    groups={"replay": simulate},
    settings={"measured": RESULTS / "host_bound.json"},
    gpu=False,
)
