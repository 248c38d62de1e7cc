"""What tables say of rows beside one another: best effort of time slices, ratios, cells of few requests."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.lab.intervals import LEAST_FOR_P99
from benchmarks.results.schema import ColocationRow, Results


def beside(results: Results, row: ColocationRow, arm: str) -> ColocationRow | None:
    """The row of another arm with the same programs, requests, scene and repeat."""

    def about(one: ColocationRow) -> tuple[object, ...]:
        requests = one.latency_load, one.other_latency, one.arrivals, one.rate_hz
        return one.best_effort_load, *requests, one.scene, one.repeat

    others = (one for one in results.colocations if one.arm == arm)
    return next((one for one in others if about(one) == about(row)), None)


def best_effort_of_time_slices(results: Results, row: ColocationRow) -> float | None:
    """Best effort over best effort beside the same requests in plain time slices.

    None where either is missing, and of time slices themselves.
    """
    slices = beside(results, row, "processes")
    if slices is None or row.arm == "processes" or not row.best_effort_per_s or not slices.best_effort_per_s:
        return None
    return row.best_effort_per_s / slices.best_effort_per_s


def p50_of_alone(row: ColocationRow) -> float | None:
    """The row's ratio, or that of its medians in a file that is older than the ratio."""
    if row.p50_ratio or row.latency_ms is None or row.alone_ms is None:
        return row.p50_ratio
    return row.latency_ms.p50 / row.alone_ms.p50


def few_requests(rows: Iterable[ColocationRow]) -> str:
    """The end of a table with cells of few requests: a blank line and a warning; else nothing."""
    numbers = [row.latency_ms.n for row in rows if row.latency_ms and row.arm != "latency_alone"]
    if not numbers or min(numbers) >= LEAST_FOR_P99:
        return ""
    of = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{numbers[0]}"
    return f"\nP99 is of {of} requests a cell, fewer than {LEAST_FOR_P99:,}: single requests move it.\n"
