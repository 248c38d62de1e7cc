"""Plots of many pairs of programs: a line a pair, a mark an arm; latency on the left, best effort on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    "mps_priority": ("MPS, priority", "+", "#762a83"),
    "before": ("both under cudasched, before", "s", "#f4a582"),
    "slices": ("slices: best effort alone under cudasched", "o", "#4dac26"),
    "cudasched": ("both under cudasched", "D", "#2166ac"),
}
#: Between the marks of a program's arms, of the distance between two programs.
APART = 0.16
HOST_BOUND_APART = 0.11
RATIOS = (1, 1.25, 1.5, 2, 3, 4, 5, 6, 8)
PREEMPT_RATIOS = (0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 300, 1000, 3000)
HOST_BOUND_RATIOS = (0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 10, 18)


def servers(results: Results) -> list[str]:
    """The servers that have a row with a P99 over alone."""
    rows = [row for row in results.rows if isinstance(row, ColocationRow)]
    return list(dict.fromkeys(row.latency_load for row in rows if row.p99_ratio and row.arm in ARMS))


def plot_programs(results: Results, server: str, path: Path) -> bool:
    """Draws P99 over alone and best effort of what is left, of each program beside a server, in each arm that it has.

    Returns:
        False where matplotlib is not installed.
    """
    rows = [row for row in results.rows if isinstance(row, ColocationRow) and row.latency_load == server]
    rows = [row for row in rows if row.arm in ARMS and row.p99_ratio]
    programs = list(dict.fromkeys(row.best_effort_load for row in rows))
    arms = [arm for arm in ARMS if any(row.arm == arm for row in rows)]
    figure = _figure(11, 0.42 * len(programs) + 1.9)
    if figure is None:
        return False
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for number, arm in enumerate(arms):
        own = [row for row in rows if row.arm == arm]
        name, marker, color = ARMS[arm]
        offset = APART * (number - (len(arms) - 1) / 2)
        places = [programs.index(row.best_effort_load) + offset for row in own]
        left.plot([row.p99_ratio or 0.0 for row in own], places, marker, color=color, label=name, markersize=5)
        kept = [(row.best_effort_ratio, place) for row, place in zip(own, places, strict=True) if row.best_effort_ratio]
        right.plot([100 * share for share, _ in kept], [place for _, place in kept], marker, color=color, markersize=5)
        bounds = [(row.bound_p99_ms, row.alone_ms, place) for row, place in zip(own, places, strict=True)]
        shown = [(bound / alone.p99, place) for bound, alone, place in bounds if bound and alone and arm != "processes"]
        left.plot([ratio for ratio, _ in shown], [place for _, place in shown], "|", color="black")
    left.plot([], [], "|", color="black", label="its bound")
    right.set_xlim(left=min(90.0, right.get_xlim()[0]))
    left.set_yticks(range(len(programs)), [program.replace("_", " ") for program in programs])
    left.set_ylim(len(programs) - 0.5, -0.5)
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
    rows = [row for row in results.rows if isinstance(row, ColocationRow) and row.arm in HOST_BOUND_ARMS]
    pairs = list(dict.fromkeys((row.latency_load, row.best_effort_load) for row in rows))
    figure = _figure(12, 0.72 * len(pairs) + 1.6)
    if figure is None:
        return False
    panels = figure.subplots(1, 3, sharey=True)
    for number, (arm, (name, marker, color)) in enumerate(HOST_BOUND_ARMS.items()):
        own = [row for row in rows if row.arm == arm]
        offset = HOST_BOUND_APART * (number - (len(HOST_BOUND_ARMS) - 1) / 2)
        places = [pairs.index((row.latency_load, row.best_effort_load)) + offset for row in own]
        kept = [None if row.best_effort_gpu_ratio is None else 100 * row.best_effort_gpu_ratio for row in own]
        figures = [row.p50_ratio for row in own], [row.p99_ratio for row in own], kept
        for axes, values in zip(panels, figures, strict=True):
            shown = [(value, place) for value, place in zip(values, places, strict=True) if value is not None]
            if shown:
                axes.plot(*zip(*shown, strict=True), marker, color=color, label=name, markersize=5)
    panels[0].set_yticks(range(len(pairs)), [f"{server}\n{beside}".replace("_", " ") for server, beside in pairs])
    panels[0].set_ylim(len(pairs) - 0.5, -0.5)
    _show_ratios(panels[0], "P50 / alone, at one pace of the host", HOST_BOUND_RATIOS)
    _show_ratios(panels[1], "P99 / alone, at one pace of the host", HOST_BOUND_RATIOS)
    panels[2].set_xlabel("best effort, % of the GPU time that requests leave")
    title = f"eager servers beside other programs, {results.meta.gpu}"
    _finish(figure, (1.0, 1.0, 100.0), len(pairs), 4, title, path)
    return True


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
