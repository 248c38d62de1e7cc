"""The plot of a colocation: latency percentiles and best-effort throughput of each arm, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched._output import Output

COLORS = {"p50": "#9ecae1", "p95": "#4292c6", "p99": "#08306b", "best_effort": "#74a57f"}
SHARES = (("attainment", "SLO met", "#c58b4a"), ("utilisation", "GPU busy", "#8d99ae"))
FORMATS = (".png", ".svg")
HOW_TO_GET_MATPLOTLIB = "no plot: matplotlib is not installed (pip install 'cudasched[plot]')"


PERCENTILES = ("p50", "p95", "p99")


def plot(
    rows: Sequence[Mapping[str, Any]], path: Path | Output, title: str, percentiles: Sequence[str] = PERCENTILES
) -> bool:
    """Writes a PNG or SVG, by the suffix of `path`.

    Args:
        rows: One an arm, as in results: `arm`, `latency_ms` (or None) and `best_effort_ratio` (or None);
            where it was measured, `best_effort_gpu_ratio`, too; simulated ones have `attainment` and `utilisation`.
        path: The image to write.
        title: The loads and the machine.
        percentiles: Those of `PERCENTILES` that the number of requests bears.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shares = [each for each in SHARES if any(row.get(each[0]) is not None for row in rows)]
    figure = Figure(figsize=(13 if shares else 11, 0.55 * len(rows) + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    widths = (3, 2, 2) if shares else (3, 2)
    left, right, *others = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    places = range(len(rows))
    served = [(place, row["latency_ms"]) for place, row in zip(places, rows, strict=True) if row["latency_ms"]]
    for place_in_group, share in enumerate(percentiles):
        offset = 0.25 * (place_in_group - (len(percentiles) - 1) / 2)
        bars = left.barh(
            [place + offset for place, _ in served],
            [latency[share] for _, latency in served],
            height=0.25,
            color=COLORS[share],
            label=share.upper(),
        )
        if share == percentiles[-1]:
            left.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    left.set_yticks(list(places), [row["arm"].replace("_", " ") for row in rows])
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set_xlabel("latency from the scheduled arrival, ms")
    left.legend(loc="best", frameon=False, fontsize=8)
    ratios = [(place, row["best_effort_ratio"]) for place, row in zip(places, rows, strict=True)]
    kept = [(place, ratio) for place, ratio in ratios if ratio]
    bars = right.barh(
        [place for place, _ in kept], [100 * value for _, value in kept], height=0.6, color=COLORS["best_effort"]
    )
    right.bar_label(bars, fmt="%.0f%%", padding=3, fontsize=8)
    by_gpu = [(place, row.get("best_effort_gpu_ratio")) for place, row in zip(places, rows, strict=True)]
    if any(ratio for _, ratio in by_gpu):
        right.plot(
            [100 * ratio for _, ratio in by_gpu if ratio],
            [place for place, ratio in by_gpu if ratio],
            "|",
            color=COLORS["p99"],
            markersize=14,
            label="% of alone, offloaded, x (1 - GPU duty)",
        )
        right.legend(loc="best", frameon=False, fontsize=8)
    right.margins(x=0.15)
    right.set_xlabel("best effort, % of alone x (1 - latency duty)")
    for axes in others:
        for number, (name, label, color) in enumerate(shares):
            values = [100 * (row[name] or 0) for row in rows]
            axes.barh([place + 0.4 * number - 0.2 for place in places], values, height=0.4, color=color, label=label)
        axes.set_xlabel("%")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize=8)
    for axes in (left, right, *others):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    output = path if isinstance(path, Output) else Output(path, parents=True)
    with output.replacing() as temporary:
        figure.savefig(temporary, dpi=150, format=None if output.path.suffix else "png")
    return True
