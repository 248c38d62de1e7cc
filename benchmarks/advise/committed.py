"""`cudasched advise --beside` against results that are committed; needs no GPU.

Forecasts use recordings of the same programs (host_bound), or none: a program that never leaves the GPU idle, and is
interrupted, is any other (preempt). Of a server's graph the time alone is known. Errors of the advisor's modes
(`cudasched.advise.beside.MODES`) are of these cells. Values are corrected in one process, where Python's interpreter,
which the simulator does not have, makes requests slower; and P99 in cudasched's time slices.

`coverage_least_program` is the share of launches that the predictor's bound of 90% held for, of the program with the
least, among the recorded programs that training has not seen, each with a predictor of its own; low and high are the
least and the most of the programs. The first thousand launches of each stand apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched import simulate
from cudasched.advise import beside

from benchmarks.advise import replayed
from benchmarks.advise.foresight import (
    BEST_EFFORT_WITHIN,
    MODE_OF,
    P99_WITHIN,
    Compared,
    compared,
    of_row,
    share_within,
)
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session
from benchmarks.predictor.benchmark import SHIPPED
from benchmarks.results.schema import RESULTS, ColocationRow, load

ONE_PROCESS = "cudasched_one_process"
DATA = Path(__file__).parents[2] / "training" / "data"
MODES = MODE_OF | {
    ONE_PROCESS: ONE_PROCESS,
    f"{ONE_PROCESS}_strict": ONE_PROCESS,
    "cudasched_mps_strict": "cudasched_mps",
}
FIGURES = {"p50": P99_WITHIN, "p99": P99_WITHIN, "best_effort": BEST_EFFORT_WITHIN}
LIMITS = {
    "p50": "kernels of 1.6 ms, which nothing interrupts",
    "p99": "of 1,000 requests and fewer: alone, P99 of one server at one rate is 1.01 to 1.43 ms in twelve cells",
    "best_effort": "ResNet-50 and an LSTM lose more than is simulated; beside eager servers others keep 6 to 12% more",
}
INTERPRETER = "Python's interpreter is not simulated"
GRAPHS = ("bert_graph", "vit_graph")
#: What is not on the GPU of a request of a graph, ms.
HOST_MS = 0.1


def busy(name: str) -> beside.Recording:
    """A program that never leaves the GPU idle."""
    return beside.unrecorded(simulate.host_trace([6_000] * 100, [1_000_000] * 100, [False] * 100, name=name))


def programs_of(source: str, recorded: Mapping[str, Any], row: ColocationRow) -> beside.Recording | None:
    """The program of a row; None where nothing is known of it."""
    if source == "preempt":
        return busy(row.best_effort_load)
    known = recorded["beside"].get(row.best_effort_load)
    if known is None:
        return None
    return beside.unrecorded(replayed.beside_trace(known, row.best_effort_load, row.best_effort_alone_per_s))


def server_of(source: str, recorded: Mapping[str, Any], row: ColocationRow) -> beside.Recording | None:
    """The server of a row; None where nothing is known of it."""
    assert row.alone_ms is not None
    if row.latency_load in GRAPHS:
        return beside.unrecorded(simulate.request(row.alone_ms.p50 - HOST_MS, kernels=30, name=row.latency_load))
    own = recorded["servers"].get(row.latency_load)
    if source != "host_bound" or own is None or own["waits"]:  # a decoder's latencies are times between tokens
        return None
    return beside.unrecorded(replayed.server_trace({**own, "request_ms": row.alone_ms.p50}, row.latency_load))


def committed(*sources: str) -> Iterator[Compared]:
    """All cells of results that a forecast can be made of."""
    recorded = replayed.read(RESULTS / "host_bound.requests.json.xz")
    for source in sources or ("preempt", "scheduler", "host_bound"):
        made: dict[tuple[object, ...], beside.Forecast] = {}
        for row in load(RESULTS / f"{source}.json").colocations:
            mode = MODES.get(row.arm)
            usual = row.arrivals == "poisson" and not row.other_latency and row.scene in ("", "main")
            if mode is None or row.alone_ms is None or row.policy == "harvest" or not usual:
                continue
            server, program = server_of(source, recorded, row), programs_of(source, recorded, row)
            if server is None or program is None:
                continue
            key = row.latency_load, row.best_effort_load, row.alone_ms.p50
            if key not in made:
                made[key] = of_row(server, program, row)
            own = row if row.latency_load not in GRAPHS else row.model_copy(update={"best_effort_gpu_ratio": None})
            yield compared(own, mode, made[key])


def errors_of(cells: Sequence[Compared], mode: str) -> beside.Errors:
    """Measured over simulated of a mode's cells: the ends of nine of ten, and the median."""
    found = {}
    for figure in FIGURES:
        scale = beside.MODES[mode].errors[figure][1]
        values = sorted(cell.ratios[figure] * scale for cell in cells if cell.mode == mode and figure in cell.ratios)
        least, middle, most = (values[round(share * (len(values) - 1))] for share in (0.05, 0.5, 0.95))
        found[figure] = (least, middle, most)
    return found


def measure(session: Session) -> Found:
    """The share of cells whose forecast is within, of each mode and figure."""
    cells = list(committed())
    found = {
        f"committed_{mode}_{figure}": share_within([cell for cell in cells if cell.mode == mode], figure, most)
        for mode in beside.MODES
        for figure, most in FIGURES.items()
    }
    return {name: share for name, share in found.items() if share}


def covered(session: Session) -> Found:
    """The bound's coverage by program, of the first launches and the others."""
    from training.evaluate import WARM_UP, Programs

    shares: dict[str, list[tuple[float, int]]] = {"coverage_first_program": [], "coverage_least_program": []}
    for recording in ("h200_programs", "h200_libraries"):
        programs = Programs(DATA / f"{recording}.parquet", str(SHIPPED))
        columns = programs.columns
        held, later = columns["duration"] <= columns["bound"], columns["position"] >= WARM_UP
        for place, name in enumerate(programs.names):
            mine = columns["program"] == place
            for figure, part in zip(shares, (mine & ~later, mine & later), strict=True):
                if part.sum() >= WARM_UP:
                    shares[figure].append((float(held[part].mean()), int(part.sum())))
                    session.say(f"{name}: {figure} {held[part].mean():.1%} of {part.sum()}")
    return {
        figure: (*(choose(share for share, _ in found) for choose in (min, min, max)), sum(n for _, n in found))
        for figure, found in shares.items()
    }


BENCHMARK = Benchmark(
    about="what `cudasched advise --beside` forecasts, beside results that are committed",
    groups={"forecasts": measure, "coverage": covered},
    goals={
        **{f"committed_{mode}_{figure}": (0.9, "more") for mode in beside.MODES for figure in FIGURES},
        **dict.fromkeys(("coverage_first_program", "coverage_least_program"), (0.87, "more")),
    },
    limits={
        f"committed_{mode}_{figure}": INTERPRETER if mode == ONE_PROCESS else text
        for mode in beside.MODES
        for figure, text in LIMITS.items()
    },
    results="foresight",
    gpu=False,
    torch=False,
)
