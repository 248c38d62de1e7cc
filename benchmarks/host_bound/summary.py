"""The figures that `harvest` has to reach, beside what was measured: a line for each pair and way of sharing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import judged, spread
from benchmarks.results.schema import ColocationRow, Mode, Results

#: Servers whose figures `harvest` is to leave as they are under `strict`: a CUDA graph, and one that waits each 0.2 ms.
AS_STRICT = ("bert_graph", "recommender")
#: What each way of sharing is without cudasched: its arm, and what the table calls it.
RIVALS: dict[Mode, tuple[str, str]] = {
    "mps": ("mps_priority", "MPS, priorities"),
    "two_processes": ("processes", "time slices"),
    "one_process": ("one_process_priority", "stream priorities"),
}
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
    return any(row.policy == "harvest" for row in results.colocations)


def goal(mode: Mode, server: str, beside: str) -> Goal:
    """What is promised of a server beside a program."""
    if server in AS_STRICT:
        return Goal(None, None, 0.85 if server == "recommender" and mode == "mps" else None)
    gemm = beside == "gemm"
    if mode == "mps":
        return Goal(1.10, 1.15, 0.85 if server == "decode_eager" else 0.90) if gemm else Goal(1.05, 1.15, 0.95)
    if mode == "two_processes":
        return Goal(1.10, 1.25, 0.85 if gemm else 0.90)
    return Goal(1.10, None, 0.90 if gemm else 0.95 if beside == "transformer" else None)


def host_bound_figures(results: Results) -> str:
    """Each pair in each mode: the figures with their goals, and those of strict and of the same without cudasched."""
    rows = {(row.arm, row.latency_load, row.best_effort_load): row for row in results.colocations}
    lines = [
        "| server beside | mode | P50 / alone | P99 / alone | of the GPU time left | host's pace "
        "| compared: P50, P99, of the GPU time left |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, spelled in MODES.items():
        for (arm, server, beside), row in rows.items():
            if arm != f"cudasched_{mode}":
                continue
            wanted = goal(mode, server, beside)
            cells = [
                _cell(row.p50_ratio, wanted.p50, repeats=row.p50_ratio_per_repeat),
                _cell(row.p99_ratio, wanted.p99),
                _cell(row.best_effort_gpu_ratio, wanted.kept, at_least=True),
                _cell(row.host_pace, None),
                _compared(row, rows.get((RIVALS[mode][0], server, beside))),
            ]
            lines.append(f"| {server}, {beside} | {spelled} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(measured: float | None, target: float | None, at_least: bool = False, repeats: Sequence[float] = ()) -> str:
    if target is not None:
        return judged(measured, target, at_least, repeats)
    if measured is None:
        return ""
    return f"{measured:.3g} ({spread(repeats)})" if len(repeats) > 1 else f"{measured:.3g}"


def _compared(row: ColocationRow, rival: ColocationRow | None) -> str:
    """A row beside its rival, which it may be worse than in P50 and best effort, and of some servers over strict."""
    parts = [_over_strict(row)] if row.latency_load in AS_STRICT else []
    if rival is not None:
        ratios = (rival.p50_ratio, rival.p99_ratio, rival.best_effort_gpu_ratio)
        told = ", ".join("?" if ratio is None else f"{ratio:.3g}" for ratio in ratios)
        pairs = ((row.p50_ratio, ratios[0], 1), (row.best_effort_gpu_ratio, ratios[2], -1))
        worse = [ours * sign > theirs * sign for ours, theirs, sign in pairs if ours is not None and theirs is not None]
        name = RIVALS[row.mode][1]
        parts.append(f"{name}: {told}{' **worse in both**' if len(worse) == 2 and all(worse) else ''}")
    return "; ".join(part for part in parts if part)


def _over_strict(row: ColocationRow) -> str:
    """Medians over strict, with the least and the most of the repeats: of five, the true median is between in 94%."""
    if row.over_strict is None:
        return ""
    each = (("P50", row.over_strict.p50, 1), ("P99", row.over_strict.p99, 1))
    told = [_over(name, pairs, sign) for name, pairs, sign in (*each, ("best effort", row.over_strict.best_effort, -1))]
    return f"over strict: {', '.join(told)}"


def _over(name: str, pairs: list[float], sign: int) -> str:
    worse = min(pair * sign for pair in pairs) > sign
    told = f"{name} {statistics.median(pairs):.3g} ({spread(pairs)})"
    return f"{told} **worse**" if worse else told
