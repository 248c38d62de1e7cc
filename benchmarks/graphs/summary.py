"""What the ablation's rows say: a line a scene, program and mode, a column a predictor."""

from __future__ import annotations

import statistics

from benchmarks.figures import few_requests
from benchmarks.results.schema import ColocationRow, Results

PREDICTORS = ("trees", "history", "constant", "oracle")


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
    for line in sorted({(row.scene, row.best_effort_load, row.mode) for row in rows}):
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
