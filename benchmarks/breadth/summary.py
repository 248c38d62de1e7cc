"""What the breadth benchmark's rows say: a line a program, and the figures that are promised."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.breadth.programs import PROGRAMS
from benchmarks.figures import beside, best_effort_of_time_slices, few_requests, judged, p50_of_alone, ratio_cell
from benchmarks.results.schema import ColocationRow, Results

#: The arms under cudasched, and what a table calls them.
MANAGED = {"cudasched_two_processes": "two processes", "cudasched_mps": "under MPS"}
#: The same beside plain time slices.
SHOWN = {"processes": "time slices", **MANAGED}
#: What is promised: P99 over alone and best effort of the time left, typical and worst.
P99_MEDIAN, P99_WORST, BOUND_MARGIN = 1.25, 1.5, 1.05
BEST_EFFORT_MEDIAN, BEST_EFFORT_WORST = 0.99, 0.95
#: A cell with less than this says what limits it.
EXPLAINED = 0.97


def is_breadth(results: Results) -> bool:
    """Whether these are the breadth benchmark's rows: their best-effort loads are programs, named by their library."""
    return any(row.best_effort_load in PROGRAMS for row in results.colocations)


def breadth_table(results: Results) -> str:
    """A table for each server: a line a program, latency over alone and best effort in each arm."""
    rows = results.colocations
    tables = []
    for server in dict.fromkeys(row.latency_load for row in rows):
        own = [row for row in rows if row.latency_load == server]
        alone = next((row.latency_ms for row in own if row.arm == "latency_alone" and row.latency_ms), None)
        said = f", alone {alone.p50:.2f}/{alone.p95:.2f}/{alone.p99:.2f} ms (P50/P95/P99)" if alone else ""
        lines = [
            f"`{server}`, {own[0].arrivals} {own[0].rate_hz:g}/s{said}: P50/P99 over alone, best effort of the time "
            "left (and of time slices).",
            "",
            f"| program | alone | {' | '.join(SHOWN.values())} | bound: P99 / alone |",
            f"|---|---|{'---|' * (len(SHOWN) + 1)}",
        ]
        for program in dict.fromkeys(row.best_effort_load for row in own):
            by_arm = {row.arm: row for row in own if row.best_effort_load == program}
            alone_row = by_arm.get("best_effort_alone")
            per_s = f"{alone_row.best_effort_per_s:.1f}/s" if alone_row and alone_row.best_effort_per_s else ""
            cells = [ratio_cell(results, by_arm.get(arm)) for arm in SHOWN]
            lines.append(f"| {program} | {per_s} | {' | '.join(cells)} | {bounds(by_arm)} |")
        tables.append("\n".join(lines) + "\n" + few_requests(own))
    return "\n".join(tables)


def breadth_figures(results: Results) -> str:
    """The figures over all programs and servers, typical beside worst, a column for each way of sharing."""
    columns = {arm: _both_known(results, arm) for arm in SHOWN}
    lines = [f"| figure | {' | '.join(SHOWN.values())} |", f"|---|{'---|' * len(SHOWN)}"]

    def line(name: str, cell: Callable[[Sequence[ColocationRow]], str]) -> None:
        lines.append(f"| {name} | {' | '.join(cell(rows) if rows else '' for rows in columns.values())} |")

    def of_slices(rows: Sequence[ColocationRow]) -> dict[str, float]:
        known = ((row, best_effort_of_time_slices(results, row)) for row in rows if row.arm in MANAGED)
        return {f"{row.best_effort_load} beside {row.latency_load}": share for row, share in known if share}

    def least_of_slices(rows: Sequence[ColocationRow]) -> str:
        shares = of_slices(rows)
        return f"{min(shares.values()):.3g}, {min(shares, key=shares.__getitem__)}" if shares else ""

    line("pairs of program and server", lambda rows: str(len(rows)))
    line("requests", lambda rows: f"{sum(row.latency_ms.n for row in rows if row.latency_ms):,}")
    line("P50 / alone, median", lambda rows: f"{statistics.median(map(_p50, rows)):.3g}")
    line("P50 / alone, worst", lambda rows: _worst(max(rows, key=_p50), _p50))
    line("P99 / alone, median", lambda rows: _judged(rows, statistics.median(_of("p99_ratio", rows)), P99_MEDIAN))
    line("P99 / alone, mean", lambda rows: f"{statistics.fmean(_of('p99_ratio', rows)):.3g}")
    line("P99 / alone, worst", lambda rows: _worst(max(rows, key=_p99), _p99))
    line(
        f"P99 / the larger of {P99_WORST:g} x alone and {BOUND_MARGIN:g} x the bound, worst",
        lambda rows: _judged(rows, max(map(p99_over_allowed, rows)), 1.0),
    )
    line(
        "best effort of time slices, median",
        lambda rows: f"{statistics.median(shares):.3g}" if (shares := of_slices(rows).values()) else "",
    )
    line("best effort of time slices, worst", least_of_slices)
    line(
        f"best effort of time slices, pairs below {EXPLAINED:g}",
        lambda rows: str(sum(share < EXPLAINED for share in shares)) if (shares := of_slices(rows).values()) else "",
    )
    line(
        "best effort of the time left, median",
        lambda rows: _judged(rows, statistics.median(_of("best_effort_ratio", rows)), BEST_EFFORT_MEDIAN, True),
    )
    line("best effort of the time left, mean", lambda rows: f"{statistics.fmean(_of('best_effort_ratio', rows)):.3g}")
    line(
        "best effort of the time left, worst",
        lambda rows: _judged(rows, min(_of("best_effort_ratio", rows)), BEST_EFFORT_WORST, True)
        + f", {min(rows, key=lambda row: row.best_effort_ratio or 0.0).best_effort_load}",
    )
    return "\n".join(lines) + "\n"


def limits_table(results: Results) -> str:
    """The cells with less than `EXPLAINED` of what is left or of time slices, and the GPU time that a request costs.

    That is what is missing, divided by the requests. Where the best effort keeps the GPU busy by itself, no faster
    submission makes up for it. What the program's own counts say is in rows measured since they keep them.
    """
    lines = [
        "| program | beside | arm | best effort | time slices | of time slices | lost a request, ms "
        "| more than alone, ms | GPU alone | gate waits | launcher CPU |",
        f"|{'---|' * 11}",
    ]
    for row in results.colocations:
        if row.arm not in MANAGED or row.best_effort_ratio is None:
            continue
        of_slices = best_effort_of_time_slices(results, row)
        if min(row.best_effort_ratio, of_slices or 1.0) >= EXPLAINED:
            continue
        assert row.duty is not None
        sliced = beside(results, row, "processes")
        lost_ms = (1.0 - row.best_effort_ratio) * (1.0 - row.duty) / row.rate_hz * 1e3
        longer_ms = row.latency_ms.mean - row.alone_ms.mean if row.latency_ms and row.alone_ms else None
        cells = (
            row.best_effort_load,
            row.latency_load,
            MANAGED[row.arm],
            f"{row.best_effort_ratio:.3f}",
            f"{sliced.best_effort_ratio:.3f}" if sliced and sliced.best_effort_ratio else "",
            f"{of_slices:.3f}" if of_slices else "",
            f"{lost_ms:.2f}" if lost_ms > 0 else "",
            f"{longer_ms:.2f}" if longer_ms is not None else "",
            *(
                f"{share:.0%}" if share is not None else "not kept"
                for share in (row.gpu_alone, row.gate_wait, row.launcher_cpu)
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def p99_over_allowed(row: ColocationRow) -> float:
    """A row's P99 over what is allowed to the worst one: 1.5 x alone, or the bound and 5% where that is more."""
    assert row.latency_ms and row.alone_ms
    allowed = max(P99_WORST * row.alone_ms.p99, BOUND_MARGIN * (row.bound_p99_ms or 0.0))
    return row.latency_ms.p99 / allowed


def _both_known(results: Results, arm: str) -> list[ColocationRow]:
    """The rows of an arm that have both figures."""
    rows = [row for row in results.colocations if row.arm == arm]
    return [row for row in rows if row.p99_ratio is not None and row.best_effort_ratio is not None]


def _of(field: str, rows: Sequence[ColocationRow]) -> list[float]:
    return [value for row in rows if (value := getattr(row, field)) is not None]


def _judged(rows: Sequence[ColocationRow], value: float, target: float, at_least: bool = False) -> str:
    """A value, held against its target where the rows are of an arm under cudasched."""
    return judged(value, target, at_least) if rows[0].arm in MANAGED else f"{value:.3g}"


def _p50(row: ColocationRow) -> float:
    return p50_of_alone(row) or 0.0


def _p99(row: ColocationRow) -> float:
    return row.p99_ratio or 0.0


def _worst(row: ColocationRow, ratio: Callable[[ColocationRow], float]) -> str:
    return f"{ratio(row):.3g}, {row.best_effort_load} beside {row.latency_load}"


def bounds(by_arm: dict[str, ColocationRow]) -> str:
    """The bound of two processes and of MPS, over alone."""
    found = []
    for arm in MANAGED:
        row = by_arm.get(arm)
        if row and row.bound_p99_ms and row.alone_ms:
            found.append(f"{row.bound_p99_ms / row.alone_ms.p99:.2f}")
    return ", ".join(found)
