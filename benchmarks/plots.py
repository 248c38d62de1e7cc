"""Plots of many pairs of programs: a line a pair, a mark an arm; latency on the left, best effort on the right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._output import Output

from benchmarks.preempt.summary import groups_of, share
from benchmarks.results.schema import ColocationRow, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The arms that are drawn, in this order: what the legend calls them, their mark and colour.
ARMS: Mapping[str, tuple[str, str, str]] = {
    "processes": ("time slices", "x", "#b2182b"),
    "cudasched_two_processes_whole": ("two processes, whole graphs", "s", "#f4a582"),
    "cudasched_two_processes": ("two processes", "o", "#2166ac"),
    "cudasched_mps": ("under MPS", "D", "#4dac26"),
    "cudasched_one_process": ("one process", "^", "#762a83"),
}
#: The same of host-bound servers.
HOST_BOUND_ARMS: Mapping[str, tuple[str, str, str]] = {
    "processes": ("time slices", "x", "#b2182b"),
    "mps_priority": ("MPS, low priority", "+", "#b2182b"),
    "cudasched_two_processes_strict": ("two processes, strict", "o", "#92c5de"),
    "cudasched_two_processes": ("two processes, harvest", "o", "#2166ac"),
    "cudasched_mps_strict": ("under MPS, strict", "D", "#b8e186"),
    "cudasched_mps": ("under MPS, harvest", "D", "#4dac26"),
    "one_process_priority": ("one process, priorities", "1", "#b2182b"),
    "cudasched_one_process": ("one process, harvest", "^", "#762a83"),
}
#: The same beside long kernels.
PREEMPT_ARMS: Mapping[str, tuple[str, str, str]] = {
    "processes": ("time slices", "x", "#b2182b"),
    "mps": ("MPS", "1", "#c2a5cf"),
    "mps_priority": ("MPS, priority", "+", "#762a83"),
    "mps_half": ("MPS, half of the SMs", "2", "#9970ab"),
    "before": ("both under cudasched, before", "s", "#f4a582"),
    "slices": ("slices: best effort alone under cudasched", "o", "#4dac26"),
    "cudasched": ("both under cudasched", "D", "#2166ac"),
}
Panels = Mapping["Axes", Callable[[ColocationRow], Any]]
"""The value of a row in each panel."""
#: Between the marks of a program's arms, of the distance between two programs.
APART = 0.16
HOST_BOUND_APART = 0.11
RATIOS = (1, 1.25, 1.5, 2, 3, 4, 5, 6, 8)
PREEMPT_RATIOS = (0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 300, 1000, 3000)
HOST_BOUND_RATIOS = (0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 10, 18)


def plot_programs(results: Results, server: str, path: Path) -> bool:
    """Draws P99 over alone and best effort of what is left, of each program beside a server, in each arm that it has.

    Returns:
        False where matplotlib is not installed.
    """
    rows = [row for row in results.colocations if row.latency_load == server and row.arm in ARMS and row.p99_ratio]
    programs = list(dict.fromkeys(row.best_effort_load for row in rows))
    figure = _figure(11, 0.42 * len(programs) + 1.9)
    if figure is None:
        return False
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    arms = {arm: drawn for arm, drawn in ARMS.items() if any(row.arm == arm for row in rows)}

    def kept(row: ColocationRow) -> float | None:
        return 100 * row.best_effort_ratio if row.best_effort_ratio else None

    places = _draw(rows, lambda row: row.best_effort_load, arms, {left: lambda row: row.p99_ratio, right: kept}, APART)
    for row, place in places:
        if row.bound_p99_ms and row.alone_ms and row.arm != "processes":
            left.plot(row.bound_p99_ms / row.alone_ms.p99, place, "|", color="black")
    left.plot([], [], "|", color="black", label="its bound")
    right.set_xlim(left=min(90.0, right.get_xlim()[0]))
    _show_ratios(left, "P99 / alone", RATIOS)
    right.set_xlabel("best effort, % of alone x (1 - latency duty)")
    title = f"{server} ({rows[0].rate_hz:g}/s) beside other programs, {results.meta.gpu}"
    _finish(figure, (1.0, 100.0), len(programs), 6, title, path)
    return True


def plot_host_bound(results: Results, path: Path) -> bool:
    """Draws P50 and P99 over alone and best effort of the GPU time left, of each pair in each arm that it has.

    Returns:
        False where matplotlib is not installed.
    """
    rows = [row for row in results.colocations if row.arm in HOST_BOUND_ARMS]

    def pair(row: ColocationRow) -> str:
        return f"{row.latency_load}\n{row.best_effort_load}"

    def kept(row: ColocationRow) -> float | None:
        return None if row.best_effort_gpu_ratio is None else 100 * row.best_effort_gpu_ratio

    lines = len({*map(pair, rows)})
    figure = _figure(12, 0.72 * lines + 1.6)
    if figure is None:
        return False
    first, second, third = figure.subplots(1, 3, sharey=True)
    shown: Panels = {first: lambda row: row.p50_ratio, second: lambda row: row.p99_ratio, third: kept}
    _draw(rows, pair, HOST_BOUND_ARMS, shown, HOST_BOUND_APART)
    _show_ratios(first, "P50 / alone, at one pace of the host", HOST_BOUND_RATIOS)
    _show_ratios(second, "P99 / alone, at one pace of the host", HOST_BOUND_RATIOS)
    third.set_xlabel("best effort, % of the GPU time that requests leave")
    _finish(figure, (1.0, 1.0, 100.0), lines, 4, f"eager servers beside other programs, {results.meta.gpu}", path)
    return True


def _draw(
    rows: Sequence[ColocationRow],
    line_of: Callable[[ColocationRow], str],
    arms: Mapping[str, tuple[str, str, str]],
    panels: Panels,
    apart: float,
) -> list[tuple[ColocationRow, float]]:
    """A line a name, a mark an arm in each panel; the rows with their places."""
    names = list(dict.fromkeys(map(line_of, rows)))
    found = []
    for number, (arm, (label, marker, color)) in enumerate(arms.items()):
        offset = apart * (number - (len(arms) - 1) / 2)
        places = [(row, names.index(line_of(row)) + offset) for row in rows if row.arm == arm]
        for axes, value_of in panels.items():
            known = [(value, place) for row, place in places if (value := value_of(row)) is not None]
            if known:
                axes.plot(*zip(*known, strict=True), marker, color=color, label=label, markersize=5)
        found += places
    first = next(iter(panels))
    first.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    first.set_ylim(len(names) - 0.5, -0.5)
    return found


def plot_preempt(results: Results, path: Path) -> bool:
    """Draws P99 over alone against best effort of that in time slices: a mark for each program, server and repeat.

    Returns:
        False where matplotlib is not installed.
    """
    groups = groups_of(results, "main")
    figure = _figure(9, 6)
    if figure is None:
        return False
    axes = figure.subplots()
    for arm, (name, marker, color) in PREEMPT_ARMS.items():
        both = [(group[arm].p99_ratio, share(group, arm)) for group in groups if arm in group]
        known = [(ratio, 100 * kept) for ratio, kept in both if ratio and kept]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color=color, label=name, markersize=5)
    axes.axhline(100.0, color="#888888", linewidth=0.8)
    axes.set_ylabel("best effort, % of that in time slices")
    ratios = [line.get_xdata() for line in axes.get_lines() if line.get_marker() != "None"]
    most = max((float(value) for values in ratios for value in values), default=1.0)
    _show_ratios(axes, "P99 / alone", [ratio for ratio in PREEMPT_RATIOS if ratio <= 1.5 * most])
    loads = {row.latency_load for group in groups for row in group.values()}
    title = f"{', '.join(sorted(loads))} beside programs of long kernels, {results.meta.gpu}"
    _finish(figure, (1.0,), 1, 3, title, path)
    return True


def _figure(width: float, height: float) -> Figure | None:
    """An empty one; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _show_ratios(axes: Axes, label: str, ratios: Sequence[float]) -> None:
    """On a logarithmic axis."""
    axes.set_xscale("log")
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _finish(figure: Figure, wholes: Sequence[float], lines: int, columns: int, title: str, path: Path) -> None:
    """Draws where nothing is lost in each panel, and between the lines; adds legend and title; writes the plot."""
    for axes, whole in zip(figure.axes, wholes, strict=True):
        axes.axvline(whole, color="#888888", linewidth=0.8)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for place in range(1, lines):
            axes.axhline(place - 0.5, color="#eeeeee", linewidth=0.6)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    with Output(path, parents=True).replacing() as temporary:
        figure.savefig(temporary, dpi=120, format=None if path.suffix else "png")
