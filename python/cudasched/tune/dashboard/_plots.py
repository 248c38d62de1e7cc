"""The dashboard's figures, by matplotlib: one hue from light to dark for amounts, text in plain ink, thin grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cudasched.tune._need import need
from cudasched.tune.dashboard._data import Entry, Layer, cost, grid, pareto

__all__ = ["MOST_BARS", "heat_map", "layer_bars", "pareto_plot", "progress"]

_INK, _MUTED, _GRID = "#1f2933", "#66727f", "#e3e8ee"
_BLUE, _ORANGE, _GREY = "#2563a8", "#c8611a", "#b6bfc9"
_SERIES = (_BLUE, _ORANGE, "#2d8659", "#8a5bb5", "#a33b52", "#5f6b77")


MOST_BARS = 40
"""The most bars of a plot; a figure of thousands takes gigabytes."""
_MOST_NUMBERS = 2000
_HIGHEST = 24.0


def _axes(width: float = 7.0, height: float = 3.6) -> tuple[Any, Any]:
    figure_module = need("matplotlib.figure", "the dashboard", "'cudasched[dashboard]'")
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_MUTED, fontsize=9)
    axes.set_ylabel(y, color=_MUTED, fontsize=9)


def progress(traces: Mapping[str, Sequence[float]]) -> Any:
    """The best time after each evaluation, a line a run."""
    figure, axes = _axes()
    for (name, trace), colour in zip(traces.items(), _SERIES, strict=False):
        points = [(i, one) for i, one in enumerate(trace, 1) if math.isfinite(one)]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, drawstyle="steps-post", color=colour, linewidth=1.8, label=name)
    _label(axes, "configurations tried", "best time, us")
    if len(traces) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
    return figure


def heat_map(found: Sequence[Entry], x: str, y: str) -> Any:
    """The best time for each pair of values; pairs without a time stay empty, and thousands are colours alone."""
    np = need("numpy", "the dashboard")
    xs, ys, times = grid(found, x, y)
    values = np.array([[np.nan if one is None else one for one in row] for row in times], dtype=float)
    figure, axes = _axes(7.0, min(max(2.2, 0.55 * len(ys) + 1.2), _HIGHEST))
    axes.grid(False)
    known = values[~np.isnan(values)]
    if known.size:
        colours = need("matplotlib.colors", "the dashboard")
        scale = colours.LogNorm(known.min(), max(known.max(), known.min() * 1.001))
        axes.imshow(values, cmap="Blues", norm=scale, aspect="auto")
        middle = math.sqrt(known.min() * known.max())
        for row, column in zip(*np.nonzero(~np.isnan(values)), strict=True) if values.size <= _MOST_NUMBERS else ():
            value = values[row, column]
            ink = "white" if value > middle else _INK
            weight = "bold" if value == known.min() else "normal"
            axes.text(column, row, f"{value:.4g}", ha="center", va="center", color=ink, fontsize=8, fontweight=weight)
    for ticks, known_values in ((axes.set_xticks, xs), (axes.set_yticks, ys)):
        step = -(-len(known_values) // MOST_BARS)
        ticks(range(0, len(known_values), step), [str(one) for one in known_values[::step]], parse_math=False)
    _label(axes, x, y)
    return figure


def pareto_plot(found: Sequence[Entry], what: str) -> Any:
    """Time against another cost; those that none beats in both are joined."""
    figure, axes = _axes()
    timed = [one for one in found if one.time_us is not None]
    axes.scatter([one.time_us for one in timed], [cost(one, what) for one in timed], s=12, color=_GREY, linewidths=0)
    front = pareto(found, what)
    axes.plot(
        [one.time_us for one in front],
        [cost(one, what) for one in front],
        color=_BLUE,
        marker="o",
        markersize=5,
        linewidth=1.6,
        drawstyle="steps-post",
    )
    if timed:
        times = [one.time_us for one in timed if one.time_us is not None]
        # A configuration four times as slow as the best is of no interest.
        axes.set_xlim(min(times) * 0.93, min(max(times) * 1.05, min(times) * 4))
    units = {"registers": "registers a thread", "workspace": "workspace, MB", "shared memory": "static shared, KiB"}
    _label(axes, "time, us", units.get(what, what))
    return figure


def layer_bars(found: Sequence[Layer]) -> Any:
    """Baseline and tuned time of each kernel, side by side, with how many times as fast; of many, the longest ones."""
    if len(found) > MOST_BARS:
        found = sorted(found, key=lambda one: -one.baseline_us)[:MOST_BARS]
    figure, axes = _axes(7.0, max(2.0, 0.62 * len(found) + 1.0))
    axes.grid(False, axis="y")
    for place, one in enumerate(found):
        axes.barh(place - 0.19, one.baseline_us, height=0.34, color=_GREY, label="baseline" if place == 0 else None)
        axes.barh(place + 0.19, one.tuned_us, height=0.34, color=_BLUE, label="tuned" if place == 0 else None)
        longest = max(one.baseline_us, one.tuned_us)
        text = f" {one.baseline_us / one.tuned_us:.2f}x"
        axes.text(longest, place, text, va="center", color=_INK, fontsize=9)
    axes.set_yticks(range(len(found)), [one.kernel for one in found], color=_INK, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _label(axes, "time, us", "")
    # Above the bars, where no label is.
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure
