"""`cudasched advise --beside` against what was measured.

`foresight` records servers and programs of `preempt` alone, forecasts each pair in each mode, and measures it. The
forecasts know nothing of the pairs. `foresight_committed` needs no GPU: it forecasts pairs of which results are
committed and either recordings are (host_bound) or none is needed, because the program never leaves the GPU idle and
is interrupted (preempt). A cell is within where forecast and measured ratio to alone differ by so much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudasched import simulate
from cudasched.advise import beside

from benchmarks.host_bound import replayed
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session
from benchmarks.preempt.programs import LONG_KERNELS
from benchmarks.results.schema import RESULTS, ColocationRow, load

#: How far a forecast may be from the measured.
P99_WITHIN, BEST_EFFORT_WITHIN = 0.15, 0.08
MODE_OF = {
    "processes": "time_slices",
    "slices": "cudasched_slices",
    "cudasched_mps": "cudasched_mps",
    "cudasched_mps_strict": "cudasched_mps",
    "cudasched_one_process": "cudasched_one_process",
    "cudasched_one_process_strict": "cudasched_one_process",
}


@dataclass(frozen=True)
class Compared:
    """Measured over forecast of one cell; None where it was not measured."""

    server: str
    program: str
    mode: str
    p50: float | None
    p99: float | None
    best_effort: float | None
    cost: tuple[float, float] | None


def compared(row: ColocationRow, mode: str, found: beside.Forecast) -> Compared:
    """A measured cell beside its forecast."""
    said = found.modes[mode]

    def over(measured: float | None, forecast: float) -> float | None:
        return measured / forecast if measured and forecast else None

    kept = row.best_effort_ratio if row.latency_load in GRAPHS else row.best_effort_gpu_ratio
    measured = row.p99_ratio / kept if row.p99_ratio and kept else None
    return Compared(
        found.server,
        found.program,
        mode,
        over(row.p50_ratio, said.p50_ratio.value),
        over(row.p99_ratio, said.p99_ratio.value),
        over(kept, said.best_effort.value),
        (measured, said.p99_ratio.value / said.best_effort.value) if measured and said.best_effort.value else None,
    )


def made_of(trace: simulate.Trace, gpu: str) -> beside.Recording:
    """A recording of a trace that no file has: which part of the GPU its launches take is not told."""
    launches = trace.launches
    halves = trace.core.with_shares([0.5] * launches, [0.0] * launches)
    least = simulate.Trace(trace.name, launches, trace.gpu_ms, trace.load, halves, trace.ends)
    per_s = launches / trace.gpu_ms * 1e3
    mark = hash((trace.name, launches))
    return beside.Recording("", gpu, trace, least, per_s, 0.0, 1.0, (), 0.0, None, len(trace.ends), 0, 0, (mark, 0, 0))


#: What is not on the GPU of a request of a graph, ms.
HOST_MS = 0.1
GRAPHS = ("bert_graph", "vit_graph")


def graph(row: ColocationRow) -> beside.Recording:
    """A server whose request is one graph, as long as it was alone in the same cell."""
    assert row.alone_ms is not None
    return made_of(simulate.request(row.alone_ms.p50 - HOST_MS, kernels=30, name=row.latency_load), "")


def committed() -> Iterator[Compared]:
    """All cells of which recordings and results are committed."""
    recorded = replayed.read(RESULTS / "host_bound.requests.json.xz")
    busy = simulate.host_trace([6_000] * 100, [1_000_000] * 100, [False] * 100, name="busy")
    for name in ("preempt", "scheduler", "host_bound"):
        for row in load(RESULTS / f"{name}.json").colocations:
            mode = MODE_OF.get(row.arm)
            if mode is None or row.alone_ms is None or (name == "preempt" and row.scene != "main"):
                continue
            if row.arrivals != "poisson" or row.other_latency or row.policy == "harvest":
                continue
            known = recorded["beside"].get(row.best_effort_load)
            if name == "preempt" and row.best_effort_load in LONG_KERNELS:
                program = made_of(busy, "")
            elif name != "preempt" and known:
                program = made_of(replayed.beside_trace(known, row.best_effort_load, row.best_effort_alone_per_s), "")
            else:
                continue
            own = recorded["servers"].get(row.latency_load)
            if row.latency_load in GRAPHS:
                server = graph(row)
            elif name == "host_bound" and own and not own["waits"]:
                own = {**own, "request_ms": row.alone_ms.p50}
                server = made_of(replayed.server_trace(own, row.latency_load), "")
            else:
                continue
            found = beside.forecast(server, program, rate_hz=row.rate_hz, alone_ms=row.alone_ms.p50)
            yield compared(row, mode, found)
