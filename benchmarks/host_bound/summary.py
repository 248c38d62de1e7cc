"""The figures that `harvest` has to reach, beside what was measured: a line for each pair and way of sharing."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.figures import judged
from benchmarks.results.schema import ColocationRow, Mode, Results

#: What a P50 or best effort may be off of one that it is to be like, and a P99: they are medians of a few pairs.
SAME, SAME_P99 = 1.02, 1.1
#: Servers that are CUDA graphs: `harvest` is to leave their figures as they are under `strict`.
GRAPHS = ("bert_graph",)
MODES: dict[Mode, str] = {"mps": "MPS", "two_processes": "two processes", "one_process": "one process"}


@dataclass(frozen=True)
class Goal:
    """What a pair has to reach; None: nothing is promised of that.

    Attributes:
        p50: P50 over alone, at most.
        p99: P99 over alone, at most.
        kept: Best effort of the GPU time left, at least.
    """

    p50: float | None
    p99: float | None
    kept: float | None


def is_host_bound(results: Results) -> bool:
    """Whether these are the host-bound benchmark's rows."""
    return any(isinstance(row, ColocationRow) and row.policy == "harvest" for row in results.rows)


def goal(mode: Mode, server: str, beside: str) -> Goal:
    """What is promised of a server beside a program."""
    if server in GRAPHS:
        return Goal(None, None, None)
    if server == "recommender":
        return Goal(None, None, 0.85 if mode == "mps" else None)
    gemm = beside == "gemm"
    if mode == "mps":
        return Goal(1.10, 1.15, 0.85 if server == "decode_eager" else 0.90) if gemm else Goal(1.05, 1.15, 0.95)
    if mode == "two_processes":
        return Goal(1.10, 1.25, 0.85 if gemm else 0.90)
    return Goal(1.10, None, 0.90 if gemm else 0.95 if beside == "transformer" else None)


def host_bound_figures(results: Results) -> str:
    """Each pair in each mode: the figures with their goals, and beside time slices or strict where that is promised."""
    rows = {
        (row.arm, row.latency_load, row.best_effort_load): row for row in results.rows if isinstance(row, ColocationRow)
    }
    lines = [
        "| server beside | mode | P50 / alone | P99 / alone | of the GPU time left | host's pace | compared |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, spelled in MODES.items():
        for (arm, server, beside), row in rows.items():
            if arm != f"cudasched_{mode}":
                continue
            wanted = goal(mode, server, beside)
            cells = [
                _cell(row.p50_ratio, wanted.p50),
                _cell(row.p99_ratio, wanted.p99),
                _cell(row.best_effort_gpu_ratio, wanted.kept, at_least=True),
                _cell(row.host_pace, None),
                _compared(row, rows.get((f"{arm}_strict", server, beside)), rows.get(("processes", server, beside))),
            ]
            lines.append(f"| {server}, {beside} | {spelled} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(measured: float | None, target: float | None, at_least: bool = False) -> str:
    if target is None:
        return f"{measured:.3g}" if measured is not None else ""
    return judged(measured, target, at_least)


def _compared(row: ColocationRow, strict: ColocationRow | None, slices: ColocationRow | None) -> str:
    """What a row is to be like: a graph's and a recommender's the one under strict, others' not worse than slices."""
    if row.latency_load in GRAPHS:
        return _unchanged(row, strict) if strict is not None else ""
    if row.latency_load == "recommender":
        if strict is None or strict.best_effort_gpu_ratio is None or strict.p50_ratio is None:
            return ""
        kept = judged(row.best_effort_gpu_ratio, round(strict.best_effort_gpu_ratio, 3), at_least=True)
        return f"strict: {kept}, P50 {judged(row.p50_ratio, round(SAME * strict.p50_ratio, 3))}"
    if row.mode != "two_processes" or slices is None:
        return ""
    pairs = ((row.p50_ratio, slices.p50_ratio, 1), (row.best_effort_gpu_ratio, slices.best_effort_gpu_ratio, -1))
    worse = [ours * sign > theirs * sign for ours, theirs, sign in pairs if ours is not None and theirs is not None]
    return "time slices: **worse in both**" if len(worse) == 2 and all(worse) else "time slices: met"


def _unchanged(row: ColocationRow, strict: ColocationRow) -> str:
    over = {
        "P50": _over(row.p50_ratio, strict.p50_ratio),
        "P99": _over(row.p99_ratio, strict.p99_ratio),
        "best effort": _over(row.best_effort_per_s, strict.best_effort_per_s),
    }
    limits = {"P50": (SAME, False), "P99": (SAME_P99, False), "best effort": (round(1 / SAME, 2), True)}
    judgements = (f"{name} {judged(over[name], limit, at_least)}" for name, (limit, at_least) in limits.items())
    return f"over strict: {', '.join(judgements)}"


def _over(measured: float | None, other: float | None) -> float | None:
    return measured / other if measured is not None and other else None
