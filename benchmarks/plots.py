"""The plot of programs beside servers: P99 over alone against best effort of time slices, a mark a pair and arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cudasched._output import Output

from benchmarks.preempt.summary import groups_of, share
from benchmarks.results.schema import Results

#: The arms that are drawn: what the legend calls them, their mark and colour.
ARMS: Mapping[str, tuple[str, str, str]] = {
    "processes": ("time slices", "x", "#b2182b"),
    "mps": ("MPS", "1", "#c2a5cf"),
    "mps_priority": ("MPS, priority", "+", "#762a83"),
    "mps_half": ("MPS, half of the SMs", "2", "#9970ab"),
    "before": ("both under cudasched, before", "s", "#f4a582"),
    "slices": ("slices: best effort alone under cudasched", "o", "#4dac26"),
    "cudasched": ("both under cudasched", "D", "#2166ac"),
    "cudasched_two_processes_whole": ("two processes, whole graphs", "s", "#f4a582"),
    "cudasched_two_processes": ("two processes", "o", "#2166ac"),
    "cudasched_mps": ("under MPS", "D", "#4dac26"),
    "cudasched_one_process": ("one process", "^", "#762a83"),
    "one_process_priority": ("one process, priorities", "1", "#b2182b"),
}
RATIOS = (0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 300, 1000, 3000)


def plot_scenes(results: Results, path: Path, scene: str = "") -> bool:
    """Draws P99 over alone against best effort of that in time slices: a mark for each program, server and repeat.

    Args:
        results: The rows.
        path: Of the plot.
        scene: Of which rows; of a file without scenes, all.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    groups = groups_of(results, scene)
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    most = 1.0
    for arm, (name, marker, color) in ARMS.items():
        both = [(group[arm].p99_ratio, share(group, arm)) for group in groups if arm in group]
        known = [(ratio, 100 * kept) for ratio, kept in both if ratio and kept]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color=color, label=name, markersize=5, linestyle="none")
            most = max(most, *(ratio for ratio, _ in known))
    ratios = [ratio for ratio in RATIOS if ratio <= 1.5 * most]
    axes.set_xscale("log")
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlabel("P99 / alone")
    axes.set_ylabel("best effort, % of that in time slices")
    axes.axhline(100.0, color="#888888", linewidth=0.8)
    axes.axvline(1.0, color="#888888", linewidth=0.8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    servers = sorted({row.latency_load for group in groups for row in group.values()})
    figure.suptitle(f"{', '.join(servers)} beside other programs, {results.meta.gpu}", fontsize=11)
    with Output(path, parents=True).replacing() as temporary:
        figure.savefig(temporary, dpi=120, format=None if path.suffix else "png")
    return True
