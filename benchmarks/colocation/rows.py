"""From cells to rows: repeats pooled, each arm against the arms alone, the physical bound beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from cudasched.demo.harness import ARMS, percentile, summary

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.colocation.cells import KERNELS, CellFile, Outcome
from benchmarks.results.schema import ColocationRow, Latency, Results

#: The target that attainment counts against, as a multiple of the P99 alone: what the project promises.
SLO_OVER_ALONE = 1.7
POLICY = "strict"

Pair = tuple[str, str, str, float]


def results(cells: CellFile, slo_ms: float | None = None) -> Results:
    """The rows of all cells that have a result.

    Args:
        cells: What was measured.
        slo_ms: Target that attainment counts against; by default 1.7 x the P99 alone.

    Raises:
        ValueError: The cells say nothing of where they come from.
    """
    if cells.meta is None:
        raise ValueError(f"{cells.path}: no meta")
    good = [outcome for outcome in cells.outcomes.values() if outcome.result is not None]
    kernels = {outcome.cell.best_effort: outcome for outcome in good if outcome.cell.arm == KERNELS}
    pairs: dict[Pair, dict[tuple[str, float, float], list[Outcome]]] = {}
    for outcome in good:
        cell = outcome.cell
        if cell.arm == KERNELS:
            continue
        arms = pairs.setdefault((cell.latency, cell.best_effort, cell.arrivals, cell.rate_hz), {})
        arms.setdefault((cell.arm, cell.lead_us, cell.seconds), []).append(outcome)
    rows = []
    for pair, arms in pairs.items():
        rows += _pair_rows(pair, arms, kernels.get(pair[1]), slo_ms)
    return Results(meta=cells.meta, rows=rows)


def _pair_rows(
    pair: Pair,
    arms: dict[tuple[str, float, float], list[Outcome]],
    kernels: Outcome | None,
    slo_ms: float | None,
) -> list[ColocationRow]:
    latency_load, best_effort_load, arrivals, rate_hz = pair
    alone = [outcome for key, outcomes in arms.items() if key[0] == "latency_alone" for outcome in outcomes]
    alone_ms = _latencies(alone)
    alone_summary = _summary(alone_ms)
    alone_rates = [
        rate for key, outcomes in arms.items() if key[0] == "best_effort_alone" for rate in _throughputs(outcomes)
    ]
    alone_per_s = statistics.fmean(alone_rates) if alone_rates else None
    duty = min(1.0, rate_hz * alone_summary.mean / 1e3) if alone_summary else None
    target_ms = slo_ms or (SLO_OVER_ALONE * alone_summary.p99 if alone_summary else None)
    bounds = _bounds(alone_ms, kernels, alone_per_s)
    order = list(ARMS)
    rows = []
    for (name, lead_us, seconds), outcomes in sorted(arms.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        arm = ARMS[name]
        measured_ms = _latencies(outcomes)
        measured = _summary(measured_ms)
        rates = _throughputs(outcomes)
        per_s = statistics.fmean(rates) if rates else None
        left_over = 1.0 - (duty or 0.0) if arm.latency else 1.0
        ratio = per_s / alone_per_s / left_over if per_s and alone_per_s and left_over > 0 else None
        if arm.latency and duty is None:
            ratio = None
        rows.append(
            ColocationRow.model_validate(
                dict(
                    arm=name,
                    mode=arm.mode,
                    latency_load=latency_load,
                    best_effort_load=best_effort_load,
                    arrivals=arrivals,
                    rate_hz=rate_hz,
                    policy=POLICY if arm.managed else None,
                    lead_us=lead_us if arm.managed else None,
                    repeats=len(outcomes),
                    latency_ms=measured,
                    alone_ms=alone_summary,
                    p99_ratio=measured.p99 / alone_summary.p99 if measured and alone_summary else None,
                    bound_p99_ms=bounds.get(arm.mode) if arm.latency and arm.best_effort else None,
                    best_effort_per_s=per_s,
                    best_effort_alone_per_s=alone_per_s,
                    duty=duty,
                    best_effort_ratio=ratio,
                    attainment=_share_within(measured_ms, target_ms),
                    slo_ms=target_ms,
                    seconds=seconds,
                    unserved=sum((outcome.result or {}).get("unserved", 0) for outcome in outcomes),
                    p99_ms_per_repeat=_p99s(outcomes),
                    best_effort_per_s_per_repeat=rates,
                    alone_p99_ms_per_repeat=_p99s(alone),
                )
            )
        )
    return rows


def _bounds(alone_ms: list[float], kernels: Outcome | None, alone_per_s: float | None) -> dict[str, float]:
    """The bound in each mode, as far as what it needs was measured."""
    if not alone_ms or kernels is None or kernels.result is None or alone_per_s is None:
        return {}
    durations = [(duration_us, count) for duration_us, count in kernels.result["kernel_us"]]
    busy = min(1.0, alone_per_s * kernels.result["per_item_us"] / 1e6)
    plain = bound_p99_ms(alone_ms, durations, busy)
    switched = bound_p99_ms(alone_ms, durations, busy, CONTEXT_SWITCH_MS)
    return {"one_process": plain, "mps": plain, "two_processes": switched}


def _latencies(outcomes: Iterable[Outcome]) -> list[float]:
    return [value for outcome in outcomes for value in (outcome.result or {}).get("latency_ms", [])]


def _throughputs(outcomes: Iterable[Outcome]) -> list[float]:
    rates = [(outcome.result or {}).get("best_effort_per_s") for outcome in outcomes]
    return [rate for rate in rates if rate]


def _p99s(outcomes: Iterable[Outcome]) -> list[float]:
    each = [_latencies([outcome]) for outcome in outcomes]
    return [round(percentile(values, 0.99), 5) for values in each if values]


def _summary(values_ms: list[float]) -> Latency | None:
    return Latency.model_validate(summary(values_ms)) if values_ms else None


def _share_within(values_ms: list[float], target_ms: float | None) -> float | None:
    if not values_ms or target_ms is None:
        return None
    return sum(value <= target_ms for value in values_ms) / len(values_ms)
