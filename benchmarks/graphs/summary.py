"""What the graphs benchmark's rows say: a line a load, with slices and whole, and the figures that are promised."""

from __future__ import annotations

import statistics

from benchmarks.breadth.summary import bounds
from benchmarks.figures import best_effort_of_time_slices, few_requests, ratio_cell
from benchmarks.graphs.loads import LOADS
from benchmarks.results.schema import ColocationRow, Results

#: The arms with slices, what a table calls them, and what is promised: P99 over alone.
SLICED = {
    "cudasched_two_processes": ("two processes", 1.40),
    "cudasched_mps": ("under MPS", 1.25),
    "cudasched_one_process": ("one process", 1.25),
}
#: The arms beside them.
WHOLE = {"processes": "time slices", "cudasched_two_processes_whole": "two processes, whole graphs"}
PREDICTORS = ("trees", "history", "constant", "oracle")
#: Where kernels are long, the bound and 5% count instead.
LONG_KERNELS_US, BOUND_MARGIN = 500.0, 1.05
#: Of what is left.
BEST_EFFORT = 0.96


def is_graphs(results: Results) -> bool:
    """Whether these are the graphs benchmark's rows."""
    return any(row.best_effort_load in LOADS for row in results.colocations)


def graphs_table(results: Results) -> str:
    """A line a load: latency over alone and best effort in each arm."""
    rows = results.colocations
    alone = next((row.latency_ms for row in rows if row.arm == "latency_alone" and row.latency_ms), None)
    said = f", alone {alone.p50:.2f}/{alone.p95:.2f}/{alone.p99:.2f} ms (P50/P95/P99)" if alone else ""
    names = [*WHOLE.values(), *(name for name, _ in SLICED.values())]
    lines = [
        f"`{rows[0].latency_load}`, {rows[0].arrivals} {rows[0].rate_hz:g}/s{said}: P50/P99 over alone, best effort of "
        "the time left (and of time slices).",
        "",
        f"| load | alone | {' | '.join(names)} | bound: P99 / alone | while slices are built: P99 / alone (requests) |",
        f"|---|---|{'---|' * (len(names) + 2)}",
    ]
    for load in _loads(rows):
        by_arm = {row.arm: row for row in rows if row.best_effort_load == load}
        alone_row = by_arm.get("best_effort_alone")
        per_s = f"{alone_row.best_effort_per_s:.1f}/s" if alone_row and alone_row.best_effort_per_s else ""
        mps_row = by_arm.get("best_effort_alone_mps")
        if mps_row and mps_row.best_effort_per_s:
            per_s = f"{per_s}, MPS {mps_row.best_effort_per_s:.1f}/s".removeprefix(", ")
        shown = [by_arm.get(arm) for arm in (*WHOLE, *SLICED)]
        cells = [ratio_cell(results, row) + (_of_mps(row, 0) if row else "") for row in shown]
        lines.append(f"| {load} | {per_s} | {' | '.join(cells)} | {bounds(by_arm)} | {_building(by_arm)} |")
    return "\n".join(lines) + "\n" + few_requests(rows)


def graphs_figures(results: Results) -> str:
    """What is promised of each load and arm, and whether it was met."""
    rows = results.colocations
    lines = [f"| load | {' | '.join(name for name, _ in SLICED.values())} |", f"|---|{'---|' * len(SLICED)}"]
    for load in _loads(rows):
        by_arm = {row.arm: row for row in rows if row.best_effort_load == load}
        cells = [_judged(results, by_arm.get(arm), goal) for arm, (_, goal) in SLICED.items()]
        if any(cells):
            lines.append(f"| {load} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ablation_table(results: Results) -> str:
    """A line a scene, program and mode: latency over alone and best effort with each predictor; medians of repeats."""
    rows = [row for row in results.colocations if row.predictor]
    predictors = [name for name in PREDICTORS if any(row.predictor == name for row in rows)]
    lines = [
        "P50/P99 over alone, best effort of that in time slices: medians of repeats, in brackets least to most.",
        "",
        f"| scene | program | mode | {' | '.join(predictors)} |",
        f"|---|---|---|{'---|' * len(predictors)}",
    ]
    for line in dict.fromkeys((row.scene, row.best_effort_load, row.mode) for row in rows):
        own = [row for row in rows if (row.scene, row.best_effort_load, row.mode) == line]
        cells = [_medians([row for row in own if row.predictor == name]) for name in predictors]
        lines.append(f"| {' | '.join([*line, *cells])} |")
    return "\n".join(lines) + "\n" + few_requests(rows)


def _medians(rows: list[ColocationRow]) -> str:
    shown = []
    for name, form in (("p50_ratio", ".2f"), ("p99_ratio", ".2f"), ("best_effort_of_time_slices", ".1%")):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        if values:
            spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
            shown.append(f"{statistics.median(values):{form}}{spread}")
    return " / ".join(shown)


def allowed_p99_ms(row: ColocationRow, goal: float) -> float | None:
    """What a row's P99 may be: `goal` x alone, or the bound and 5% where that is more."""
    if row.alone_ms is None:
        return None
    return max(goal * row.alone_ms.p99, BOUND_MARGIN * (row.bound_p99_ms or 0.0))


def _loads(rows: list[ColocationRow]) -> list[str]:
    """Those that were measured, in the order of the programs."""
    there = {row.best_effort_load for row in rows if row.arm != "latency_alone"}
    return [load for load in LOADS if load in there]


def _of_mps(row: ColocationRow, digits: int) -> str:
    """The same share of what it does alone as an MPS client, where that was measured."""
    return f" ({row.best_effort_mps_ratio:.{digits}%} of MPS alone)" if row.best_effort_mps_ratio else ""


def _judged(results: Results, row: ColocationRow | None, goal: float) -> str:
    """Both figures and their goals.

    Best effort is held to its goal against time slices, too: a program that is bound by its host alone is faster with
    the launcher thread, whatever the gate costs it.
    """
    if row is None or row.latency_ms is None or row.alone_ms is None or row.best_effort_ratio is None:
        return ""
    allowed_ms = allowed_p99_ms(row, goal)
    assert allowed_ms is not None
    of_slices = best_effort_of_time_slices(results, row)
    met = row.latency_ms.p99 <= allowed_ms and min(row.best_effort_ratio, of_slices or 1.0) >= BEST_EFFORT
    beside = f", {of_slices:.1%} of time slices" if of_slices else ""
    said = f"{row.latency_ms.p99 / row.alone_ms.p99:.2f} (<= {allowed_ms / row.alone_ms.p99:.2f})"
    kept = f"{row.best_effort_ratio:.1%}{beside} (>= {BEST_EFFORT:.0%})"
    return f"{said}, {kept} {'met' if met else '**missed**'}{_of_mps(row, 1)}"


def _building(by_arm: dict[str, ColocationRow]) -> str:
    """The same of requests that met the building of slices, where they were measured."""
    found = []
    for arm, (name, _) in SLICED.items():
        row = by_arm.get(arm)
        if row and row.building_p99_ms and row.alone_ms:
            found.append(f"{name} {row.building_p99_ms / row.alone_ms.p99:.2f}x ({row.building_requests})")
    return ", ".join(found) or "not measured"
