"""The plot of many programs beside one server: a line a program, a mark an arm; P99 on the left, throughput right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cudasched._output import Output

from benchmarks.results.schema import ColocationRow, Results

#: The arms that are drawn, in this order: what the legend calls them, their mark and colour.
ARMS: Mapping[str, tuple[str, str, str]] = {
    "processes": ("time slices", "x", "#b2182b"),
    "cudasched_two_processes_whole": ("two processes, whole graphs", "s", "#f4a582"),
    "cudasched_two_processes": ("two processes", "o", "#2166ac"),
    "cudasched_mps": ("under MPS", "D", "#4dac26"),
    "cudasched_one_process": ("one process", "^", "#762a83"),
}
#: Between the marks of a program's arms, of the distance between two programs.
APART = 0.16


def servers(results: Results) -> list[str]:
    """The servers that have a row with a P99 over alone."""
    rows = [row for row in results.rows if isinstance(row, ColocationRow)]
    return list(dict.fromkeys(row.latency_load for row in rows if row.p99_ratio and row.arm in ARMS))


def plot_programs(results: Results, server: str, path: Path) -> bool:
    """Draws P99 over alone and best effort of what is left, of each program beside a server, in each arm that it has.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in results.rows if isinstance(row, ColocationRow) and row.latency_load == server]
    rows = [row for row in rows if row.arm in ARMS and row.p99_ratio]
    programs = list(dict.fromkeys(row.best_effort_load for row in rows))
    arms = [arm for arm in ARMS if any(row.arm == arm for row in rows)]
    figure = Figure(figsize=(11, 0.42 * len(programs) + 1.9), layout="constrained")
    FigureCanvasAgg(figure)
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
    left.set_xscale("log")
    ticks = [1, 1.25, 1.5, 2, 3, 4, 5, 6, 8]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_xlabel("P99 / alone")
    right.set_xlabel("best effort, % of alone x (1 - latency duty)")
    for axes, whole in ((left, 1.0), (right, 100.0)):
        axes.axvline(whole, color="#888888", linewidth=0.8)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for place in range(1, len(programs)):
            axes.axhline(place - 0.5, color="#eeeeee", linewidth=0.6)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"{server} ({rows[0].rate_hz:g}/s) beside other programs, {results.meta.gpu}", fontsize=11)
    output = Output(path, parents=True)
    with output.replacing() as temporary:
        figure.savefig(temporary, dpi=120, format=None if path.suffix else "png")
    return True
