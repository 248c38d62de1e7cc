"""What the breadth benchmark's rows say: a line a program, and the figures that are promised."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeGuard

from benchmarks.breadth.programs import PROGRAMS
from benchmarks.colocation.cells import KERNELS, CellFile
from benchmarks.results.schema import ColocationRow, Results

#: The arms under cudasched, and what a table calls them.
MANAGED = {"cudasched_two_processes": "two processes", "cudasched_mps": "under MPS"}
#: What is promised: P99 over alone and best effort of what is left, typical and worst.
P99_MEDIAN, P99_WORST, BOUND_MARGIN = 1.25, 1.5, 1.05
BEST_EFFORT_MEDIAN, BEST_EFFORT_WORST = 0.99, 0.95
#: A cell with less than this says what limits it.
EXPLAINED = 0.97


def is_breadth(results: Results) -> bool:
    """Whether these are the breadth benchmark's rows: their best-effort loads are programs, named by their library."""
    return any(isinstance(row, ColocationRow) and row.best_effort_load in PROGRAMS for row in results.rows)


def breadth_table(results: Results) -> str:
    """A table for each server: a line a program, P99 over alone and best effort of what is left in each arm."""
    rows = [row for row in results.rows if isinstance(row, ColocationRow)]
    tables = []
    for server in dict.fromkeys(row.latency_load for row in rows):
        own = [row for row in rows if row.latency_load == server]
        alone = next((row.latency_ms for row in own if row.arm == "latency_alone" and row.latency_ms), None)
        said = f", alone {alone.p50:.2f}/{alone.p95:.2f}/{alone.p99:.2f} ms (P50/P95/P99)" if alone else ""
        lines = [
            f"`{server}`, {own[0].arrivals} {own[0].rate_hz:g}/s{said}: P99 / alone, best effort of what is left.",
            "",
            f"| program | alone | time slices | {' | '.join(MANAGED.values())} | bound: P99 / alone |",
            f"|---|---|---|{'---|' * (len(MANAGED) + 1)}",
        ]
        for program in dict.fromkeys(row.best_effort_load for row in own):
            by_arm = {row.arm: row for row in own if row.best_effort_load == program}
            alone_row = by_arm.get("best_effort_alone")
            per_s = f"{alone_row.best_effort_per_s:.1f}/s" if alone_row and alone_row.best_effort_per_s else ""
            cells = [_cell(by_arm.get(arm)) for arm in ("processes", *MANAGED)]
            lines.append(f"| {program} | {per_s} | {' | '.join(cells)} | {_bounds(by_arm)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def breadth_figures(results: Results) -> str:
    """The figures over all programs and servers, typical beside worst, a column for each way of sharing."""
    columns = {arm: _managed(results, arm) for arm in MANAGED}
    lines = [f"| figure | {' | '.join(MANAGED.values())} |", f"|---|{'---|' * len(MANAGED)}"]

    def line(name: str, cell: Callable[[Sequence[ColocationRow]], str]) -> None:
        lines.append(f"| {name} | {' | '.join(cell(rows) if rows else '' for rows in columns.values())} |")

    line("pairs of program and server", lambda rows: str(len(rows)))
    line("requests", lambda rows: f"{sum(row.latency_ms.n for row in rows if row.latency_ms):,}")
    line("P99 / alone, median", lambda rows: _judged(statistics.median(_p99(rows)), P99_MEDIAN))
    line("P99 / alone, mean", lambda rows: f"{statistics.fmean(_p99(rows)):.3g}")
    line("P99 / alone, worst", lambda rows: _worst(max(rows, key=lambda row: row.p99_ratio or 0.0), "p99_ratio"))
    line(
        f"P99 / the larger of {P99_WORST:g} x alone and {BOUND_MARGIN:g} x the bound, worst",
        lambda rows: _judged(max(map(p99_over_allowed, rows)), 1.0),
    )
    line(
        "best effort of what is left, median",
        lambda rows: _judged(statistics.median(_best_effort(rows)), BEST_EFFORT_MEDIAN, at_least=True),
    )
    line("best effort of what is left, mean", lambda rows: f"{statistics.fmean(_best_effort(rows)):.3g}")
    line(
        "best effort of what is left, worst",
        lambda rows: _judged(min(_best_effort(rows)), BEST_EFFORT_WORST, at_least=True)
        + f", {min(rows, key=lambda row: row.best_effort_ratio or 0.0).best_effort_load}",
    )
    return "\n".join(lines) + "\n"


def limits_table(results: Results) -> str:
    """The cells with less than `EXPLAINED` of what is left: how much GPU time a request costs them beyond its own.

    That is what is missing, divided by the requests. Where the best effort keeps the GPU busy by itself, no faster
    submission makes up for it. What the program's own counts say is in rows measured since they keep them.
    """
    lines = [
        "| program | beside | arm | best effort | time slices | lost a request, ms | more than alone, ms | GPU alone "
        "| gate waits | launcher CPU |",
        f"|{'---|' * 10}",
    ]
    rows = [row for row in results.rows if isinstance(row, ColocationRow)]
    for row in rows:
        if not _is_managed(row) or row.best_effort_ratio is None or row.best_effort_ratio >= EXPLAINED:
            continue
        assert row.duty is not None
        pair = (row.best_effort_load, row.latency_load)
        sliced = next(
            (each for each in rows if each.arm == "processes" and (each.best_effort_load, each.latency_load) == pair),
            None,
        )
        lost_ms = (1.0 - row.best_effort_ratio) * (1.0 - row.duty) / row.rate_hz * 1e3
        longer_ms = row.latency_ms.mean - row.alone_ms.mean if row.latency_ms and row.alone_ms else None
        cells = (
            row.best_effort_load,
            row.latency_load,
            MANAGED[row.arm],
            f"{row.best_effort_ratio:.3f}",
            f"{sliced.best_effort_ratio:.3f}" if sliced and sliced.best_effort_ratio else "",
            f"{lost_ms:.2f}",
            f"{longer_ms:.2f}" if longer_ms is not None else "",
            *(
                f"{share:.0%}" if share is not None else "not kept"
                for share in (row.gpu_alone, row.gate_wait, row.launcher_cpu)
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def explain_table(results: Results, cells: CellFile) -> str:
    """What may limit each managed cell, the least best effort first: the gate, the launcher, the host, missed launches.

    `gpu` is the share of the time in which the program keeps the GPU busy by itself: below 1, its host is a limit too.
    """
    columns = ("gpu", "duty", "gate waits", "launcher CPU", "launches/s", "offloaded")
    counts = ("normal_beside_best_effort", "untracked_launches", "gate_exceptions")
    head = ("program", "server", "arm", "best effort", "P99", *columns, *(name.replace("_", " ") for name in counts))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    rows: dict[tuple[str, str, str], ColocationRow] = {
        (row.arm, row.latency_load, row.best_effort_load): row for row in results.rows if _is_managed(row)
    }
    kernels = {each.best_effort: known.result for each, known in cells.outcomes.items() if each.arm == KERNELS}
    known = [(each, rows.get((each.arm, each.latency, each.best_effort))) for each in cells.outcomes]
    for cell, row in sorted(known, key=lambda pair: (pair[1].best_effort_ratio or 9.0) if pair[1] else 9.0):
        result = cells.outcomes[cell].result
        if row is None or result is None or "counted" not in result:
            continue
        told, seconds = result["counted"], result["counted_s"]
        launches = told["best_effort_launches"]
        recorded = kernels.get(cell.best_effort)
        alone_per_s = row.best_effort_alone_per_s
        gpu = f"{alone_per_s * recorded['per_item_us'] / 1e6:.0%}" if alone_per_s and recorded else ""
        launcher_ns = told["launcher_cpu_ns"] - told.get("launcher_driver_ns", 0)
        cells_of_row = (
            gpu,
            f"{row.duty:.0%}" if row.duty is not None else "",
            f"{told['gate_wait_ns'] / 1e9 / seconds:.0%}",
            f"{launcher_ns / 1e9 / seconds:.0%}",
            f"{launches / seconds:.0f}",
            f"{told['offloaded_launches'] / launches:.1%}" if launches else "",
            *(str(told.get(name, "")) for name in counts),
        )
        kept = f"{row.best_effort_ratio:.3f}" if row.best_effort_ratio else ""
        ratio = f"{row.p99_ratio:.2f}x" if row.p99_ratio else ""
        names = (cell.best_effort, cell.latency, MANAGED[cell.arm], kept, ratio)
        lines.append(f"| {' | '.join((*names, *cells_of_row))} |")
    return "\n".join(lines) + "\n"


def p99_over_allowed(row: ColocationRow) -> float:
    """A row's P99 over what is allowed to the worst one: 1.5 x alone, or the bound and 5% where that is more."""
    assert row.latency_ms and row.alone_ms
    allowed = max(P99_WORST * row.alone_ms.p99, BOUND_MARGIN * (row.bound_p99_ms or 0.0))
    return row.latency_ms.p99 / allowed


def _is_managed(row: object) -> TypeGuard[ColocationRow]:
    return isinstance(row, ColocationRow) and row.arm in MANAGED


def _managed(results: Results, arm: str) -> list[ColocationRow]:
    """The rows of an arm that have both figures."""
    rows = [row for row in results.rows if isinstance(row, ColocationRow) and row.arm == arm]
    return [row for row in rows if row.p99_ratio is not None and row.best_effort_ratio is not None]


def _p99(rows: Sequence[ColocationRow]) -> list[float]:
    return [row.p99_ratio for row in rows if row.p99_ratio is not None]


def _best_effort(rows: Sequence[ColocationRow]) -> list[float]:
    return [row.best_effort_ratio for row in rows if row.best_effort_ratio is not None]


def _judged(value: float, target: float, at_least: bool = False) -> str:
    met = value >= target if at_least else value <= target
    return f"{value:.3g} ({'>=' if at_least else '<='} {target:g}) {'met' if met else '**missed**'}"


def _worst(row: ColocationRow, field: str) -> str:
    return f"{getattr(row, field):.3g}, {row.best_effort_load} beside {row.latency_load}"


def _cell(row: ColocationRow | None) -> str:
    if row is None or row.latency_ms is None:
        return ""
    ratio = f"{row.p99_ratio:.2f}x" if row.p99_ratio else f"{row.latency_ms.p99:.2f} ms"
    return f"{ratio} · {row.best_effort_ratio:.0%}" if row.best_effort_ratio else ratio


def _bounds(by_arm: dict[str, ColocationRow]) -> str:
    """The bound of two processes and of MPS, over alone."""
    found = []
    for arm in MANAGED:
        row = by_arm.get(arm)
        if row and row.bound_p99_ms and row.alone_ms:
            found.append(f"{row.bound_p99_ms / row.alone_ms.p99:.2f}")
    return ", ".join(found)
