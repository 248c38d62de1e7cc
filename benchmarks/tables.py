"""Writes the tables and figures of README.md and docs/ from benchmarks/results; `--check` only says which are stale.

A document asks for a table by a marker, and what stands between it and the end is replaced:

    <!-- table:colocation -->
    <!-- end -->

A figure in a sentence is a span (spans.py).

`table:NAME` is benchmarks/results/NAME.json. Of programs beside servers, `table:NAME:SERVER` has a line a program
beside one server, `every` is that for each, and `summary` a short form; `table:kernels:PART` is those of kernels, of
the device (queues, graphs) or of the tuner, with their plot where docs/images has PART.png; `table:predictor` has
the engines of predictor.json. With `table:NAME if measured` a missing file is
no error but a line that says so. `--pictures` draws those of README and docs anew.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cudasched.demo.plot import HOW_TO_GET_MATPLOTLIB, plot

from benchmarks import spans
from benchmarks.figures import best_effort_of_time_slices, few_requests, p50_of_alone
from benchmarks.graphs.summary import ablation_table
from benchmarks.plots import plot_scenes
from benchmarks.preempt.summary import every_table, is_preempt, preempt_table
from benchmarks.results.schema import (
    RESULTS,
    ColocationRow,
    Meta,
    OverheadRow,
    PredictorSpeedRow,
    Results,
    load,
    replace,
)

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MARKED = re.compile(
    r"(?P<start><!-- table:(?P<name>[\w-]+)(?::(?P<kind>\w+))?(?P<optional> if measured)? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)

NOT_MEASURED = "Not measured yet.\n"

#: Columns of the short form, and their arms.
SHORT = {
    "alone": "latency_alone",
    "time slices": "processes",
    "cudasched, two processes": "cudasched_two_processes",
    "cudasched, MPS": "cudasched_mps",
    "cudasched, one process": "cudasched_one_process",
}

#: What its lines call a best-effort load.
SPELLED = {
    "resnet50": "ResNet50 training",
    "transformer": "transformer training",
    "gemm": "large matrix products",
    "elementwise": "elementwise kernels",
}

#: Parts of kernels.json, and how the names of their figures begin; the kernels' own are all others.
FIGURES_OF = {
    "device": ("queue_", "graph_", "device_", "conditional_"),
    "tuner": ("tuner_", "warm_"),
    "quiet": ("quiet_", "bare_", "idle_"),
}

#: Lines under the arms, and the modes that they hold for.
BOUNDS = {"bound, one process or MPS": ("one_process", "mps"), "bound, two processes": ("two_processes",)}


def documents(root: Path = ROOT) -> list[Path]:
    """Every document that may ask for a table."""
    return [path for path in [root / "README.md", *sorted((root / "docs").glob("**/*.md"))] if path.exists()]


def rendered(text: str, results: Path = RESULTS, stale: list[str] | None = None) -> str:
    """A document with its tables and the figures in its prose made anew; `stale` gets a line for each changed figure.

    Raises:
        ValueError: It asks for results that are not there or do not meet the schema.
    """

    def table(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        if match["optional"] and not path.exists():
            return f"{match['start']}{NOT_MEASURED}{match['end']}"
        try:
            made = load(path)
            if match["name"] in ("kernels", "foresight") and match["kind"]:
                made = part_of(made, match["kind"])
                if match["optional"] and not made.rows:
                    return f"{match['start']}{NOT_MEASURED}{match['end']}"
            shown = picture_of(match["kind"]) if match["name"] == "kernels" else ""
            return f"{match['start']}{table_of(made, match['kind'])}{shown}{match['end']}"
        except (OSError, ValueError) as error:
            raise ValueError(f"table:{match['name']}: {path}: {error}") from error

    return MARKED.sub(table, spans.written(text, results, stale))


def part_of(results: Results, part: str) -> Results:
    """The figures of kernels.json that are of `kernels`, `device` or `tuner`, or of foresight.json, `rest` or `quiet`.

    Raises:
        ValueError: There is no such part.
    """
    if part not in ("kernels", "rest", *FIGURES_OF):
        raise ValueError(f"there is no part '{part}'")
    others = tuple(start for starts in FIGURES_OF.values() for start in starts)
    rows = results.figures
    if part not in FIGURES_OF:
        return results.model_copy(update={"rows": [row for row in rows if not row.figure.startswith(others)]})
    return results.model_copy(update={"rows": [row for row in rows if row.figure.startswith(FIGURES_OF[part])]})


def picture_of(part: str | None) -> str:
    """A line that shows a part's plot, where there is one."""
    return (
        f"\n![Figures of this page and their goals](images/{part}.png)\n" if (IMAGES / f"{part}.png").exists() else ""
    )


def table_of(results: Results, kind: str | None = None) -> str:
    """The tables of one results file, in markdown, each with a line that says where it was measured.

    Raises:
        ValueError: A kind is asked for that the file does not have.
    """
    if bool(results.figures):
        return f"{core_table(results)}\n{origins(results)}\n"
    if any(row.predictor for row in results.colocations):
        return f"{ablation_table(results)}\n{origin(results.meta)}\n"
    if kind == "summary":
        return f"{summary_table(results)}\n{origin(results.meta)}\n"
    if is_preempt(results) or (results.colocations and kind):
        table = every_table(results) if kind == "every" else preempt_table(results, kind)
        return f"{table}\n{origin(results.meta)}\n"
    if any(isinstance(row, PredictorSpeedRow) for row in results.rows):
        return speed_table(results)
    if any(isinstance(row, OverheadRow) for row in results.rows):
        return f"{overhead_table(results)}\n{origin(results.meta)}\n"
    return f"{colocation_table(results)}\n{origin(results.meta)}\n"


def origin(meta: Meta, cpu: str | None = None) -> str:
    """Where and when it was measured, and with what."""
    known = (("driver", meta.driver), ("CUDA", meta.cuda), ("PyTorch", meta.torch))
    versions = "".join(f", {name} {value}" for name, value in known if value)
    return f"{cpu or meta.gpu}{versions}, {meta.date[:10]}, commit {meta.commit or 'unknown'}."


def origins(results: Results) -> str:
    """The same of figures, a line each run where several made them."""
    by_origin: dict[str, list[str]] = {}
    for row in results.figures:
        meta = results.meta_by_kind.get(row.figure, results.meta)
        by_origin.setdefault(origin(meta), []).append(f"`{row.figure}`")
    if len(by_origin) <= 1:
        return next(iter(by_origin), origin(results.meta))
    return "\n\n".join(f"{', '.join(names)}: {said}" for said, names in by_origin.items())


def colocation_table(results: Results) -> str:
    """A table for each latency load, its company and arrivals: an arm a line, a best-effort load a column."""
    rows = results.colocations
    tables = []
    for scene in dict.fromkeys(map(_scene, rows)):
        these = [row for row in rows if _scene(row) == scene]
        latency, other, arrivals, rate_hz = scene
        company = f" beside `{other}`" if other else ""
        loads = list(dict.fromkeys(row.best_effort_load for row in these))
        by_gpu = ", and of the GPU time left" if any(row.best_effort_gpu_ratio for row in these) else ""
        lines = [
            f"`{latency}`{company}, {arrivals} {rate_hz:g}/s: P50/P95/P99 ms (P50 and P99 over alone), best effort of "
            f"the time left to it (and of that in time slices){by_gpu}.",
            "",
            f"| arm | {' | '.join(f'beside {beside}' for beside in loads)} |",
            f"|---|{'---|' * len(loads)}",
        ]
        for arm, lead_us in dict.fromkeys((row.arm, row.lead_us) for row in these):
            own = {row.best_effort_load: row for row in these if (row.arm, row.lead_us) == (arm, lead_us)}
            several = len({row.lead_us for row in these if row.arm == arm}) > 1
            name = arm.replace("_", " ") + (f", lead {lead_us} us" if several and lead_us is not None else "")
            cells = [_colocation_cell(results, own[beside]) if beside in own else "" for beside in loads]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        for name, modes in BOUNDS.items():
            bounded = [row for row in these if row.mode in modes]
            cells = [_bound_cell(row for row in bounded if row.best_effort_load == beside) for beside in loads]
            if any(cells):
                lines.append(f"| {name}: P99 | {' | '.join(cells)} |")
        tables.append("\n".join(lines) + "\n" + few_requests(these))
    return "\n".join(tables)


def summary_table(results: Results) -> str:
    """A line for each best-effort load beside the file's first latency load: P99, and best effort of time slices."""
    rows = results.colocations
    scene = _scene(rows[0])
    lines = [f"| beside | {' | '.join(SHORT)} |", f"|---|{'---|' * len(SHORT)}"]
    for beside in dict.fromkeys(row.best_effort_load for row in rows if _scene(row) == scene):
        own = {row.arm: row for row in rows if _scene(row) == scene and row.best_effort_load == beside}
        cells = [_summary_cell(results, own.get(arm)) for arm in SHORT.values()]
        if all(cells):
            lines.append(f"| {SPELLED.get(beside, beside)} | {' | '.join(cells)} |")
    shown = [row for row in rows if _scene(row) == scene and row.arm in SHORT.values()]
    return "\n".join(lines) + "\n" + few_requests(shown)


def overhead_table(results: Results) -> str:
    """A line for each thing measured."""
    lines = ["| measured | median ns | P99 ns | without, median ns | added ns |", "|---|---|---|---|---|"]
    for row in results.rows:
        if isinstance(row, OverheadRow):
            added = row.ns_median - row.baseline_ns_median if row.added_ns_median is None else row.added_ns_median
            lines.append(
                f"| {row.what} | {row.ns_median:.0f} | {row.ns_p99:.0f} | {row.baseline_ns_median:.0f} | {added:+.0f} |"
            )
    return "\n".join(lines) + "\n"


def core_table(results: Results) -> str:
    """A line for each figure: measured, its spread, the goal, and what limits it where that is missed."""
    lines = ["| figure | measured | least to most | n | goal | limited by |", "|---|---|---|---|---|---|"]
    for row in results.figures:
        goal = f"{'<=' if row.better == 'less' else '>='} {row.goal:g} {'met' if row.met else '**missed**'}"
        goal = "none" if row.only_reported else goal
        spread = f"{row.low:.3g} to {row.high:.3g}"
        if row.interval:
            spread += f"; 95%: {row.interval[0]:.3g} to {row.interval[1]:.3g}"
        lines.append(f"| `{row.figure}` | {row.value:.3g} | {spread} | {row.n:,} | {goal} | {row.limited_by} |")
    return "\n".join(lines) + "\n"


#: What an engine's row in predictor.json is called in a table.
ENGINES = {
    "cudasched": "cudasched, trees",
    "xgboost-inplace": "XGBoost, inplace_predict",
    "xgboost-capi": "XGBoost, C interface",
    "onnxruntime": "ONNX Runtime",
    "treelite": "treelite, GTIL",
    "tl2cgen": "tl2cgen, compiled",
}


def speed_table(results: Results) -> str:
    """A line for each engine, and the processor that all of them ran on."""
    rows = [row for row in results.rows if isinstance(row, PredictorSpeedRow)]
    lines = ["| engine | by | median ns a row |", "|---|---|---|"]
    lines += [f"| {ENGINES[row.engine]} | {row.isa} | {row.ns_per_row_median:,.0f} |" for row in rows]
    meta = results.meta_by_kind.get("speed", results.meta)
    return "\n".join(lines) + f"\n\n{origin(meta, rows[0].cpu)}\n"


def _scene(row: ColocationRow) -> tuple[str, str, str, float]:
    return row.latency_load, row.other_latency, row.arrivals, row.rate_hz


def _colocation_cell(results: Results, row: ColocationRow) -> str:
    parts = []
    if row.latency_ms:
        shares = "/".join(f"{value:.2f}" for value in (row.latency_ms.p50, row.latency_ms.p95, row.latency_ms.p99))
        parts.append(f"{shares}{_over_alone(row)}")
    if row.best_effort_per_s:
        rate = f"{row.best_effort_per_s:.1f}/s" if row.best_effort_per_s < 1000 else f"{row.best_effort_per_s:.0f}/s"
        if "+" in row.best_effort_load:
            rate = f"{row.best_effort_per_s:.0%} of the GPU"
        parts.append(", ".join([rate, *_kept(results, row)]))
    return " · ".join(parts)


def _summary_cell(results: Results, row: ColocationRow | None) -> str:
    if row is None or row.latency_ms is None:
        return ""
    ratios = "" if row.arm == "latency_alone" else _over_alone(row)
    of_slices = best_effort_of_time_slices(results, row)
    return f"{row.latency_ms.p99:.2f} ms{ratios}" + (f", {of_slices:.0%}" if of_slices else "")


def _over_alone(row: ColocationRow) -> str:
    p50 = p50_of_alone(row)
    return f" ({p50:.2f}x, {row.p99_ratio:.2f}x)" if p50 and row.p99_ratio else ""


def _kept(results: Results, row: ColocationRow) -> list[str]:
    """Best effort of the time that requests leave, of time slices, and where it was measured, of the GPU time left."""
    of_slices = best_effort_of_time_slices(results, row) if row.latency_ms else None
    beside = f" ({of_slices:.0%})" if of_slices else ""
    kept = [f"{row.best_effort_ratio:.0%}{beside}"] if row.best_effort_ratio else []
    return [*kept, f"{row.best_effort_gpu_ratio:.0%} of GPU time"] if row.best_effort_gpu_ratio else kept


def _bound_cell(rows: Iterable[ColocationRow]) -> str:
    bounds = [row.bound_p99_ms for row in rows if row.bound_p99_ms]
    return f"{bounds[0]:.2f}" if bounds else ""


def plot_figures(results: Results, directory: Path) -> None:
    """Plots each part of kernels.json that has figures into PART.png: values, their ranges, and goals."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print(HOW_TO_GET_MATPLOTLIB)
        return
    directory.mkdir(parents=True, exist_ok=True)
    for part in ("kernels", *FIGURES_OF):
        rows = part_of(results, part).figures
        if not rows:
            continue
        figure = Figure(figsize=(9, 0.4 * len(rows) + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for place, row in enumerate(rows):
            colour = "#8b98a5" if row.only_reported else "#4292c6" if row.met else "#d9822b"
            axes.barh(place, row.value, height=0.6, color=colour)
            axes.plot([row.low, row.high], [place, place], color="#1f2933", linewidth=1)
            axes.text(max(row.value, row.high, row.goal), place, f"  {row.value:.3g}", va="center", fontsize=8)
            if not row.only_reported:
                axes.plot([row.goal, row.goal], [place - 0.4, place + 0.4], color="black", linewidth=2)
        axes.set_yticks(range(len(rows)), [row.figure for row in rows], fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        better = " (less is better)" if rows[0].better == "less" else ""
        axes.set_xlabel(f"ratio to the arm in the name{better}; thin: least to most; thick: the goal; orange: missed")
        figure.savefig(directory / f"{part}.png", dpi=110)


def plot_beside(path: Path) -> None:
    """The plots of a file of figures, beside it."""
    if path.exists():
        plot_figures(load(path), path.parent)


def picture(results: Results, path: Path, beside: str = "transformer") -> bool:
    """Plots the arms of the short form beside one load; False where matplotlib is not installed."""
    rows = results.colocations
    own = {row.arm: row for row in rows if _scene(row) == _scene(rows[0]) and row.best_effort_load == beside}
    plotted = [own[arm].model_dump() | {"arm": name} for name, arm in SHORT.items()]
    title = f"BERT requests ({own['latency_alone'].rate_hz:g}/s) beside {SPELLED[beside]}, {results.meta.gpu}"
    return plot(plotted, path, title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text. The exit status is 1 for stale tables under `--check` and for errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is stale")
    parser.add_argument("--pictures", action="store_true", help="write those of README and docs into docs/images")
    options = parser.parse_args(arguments)
    stale, wrong = [], []
    for path in documents():
        name, changed = path.relative_to(ROOT), list[str]()
        text = path.read_text()
        wrong += [f"{name}:{said}" for said in spans.unmarked(path.name, text)]
        try:
            new = rendered(text, stale=changed)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        if new != text:
            stale.append(path)
            if not options.check:
                replace(path, new)
            print(f"{name}: {'stale' if options.check else 'written'}")
            for said in changed:
                print(f"{name}:{said}")
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    if options.pictures:
        for name in ("breadth", "graphs", "host_bound"):
            plot_scenes(load(RESULTS / f"{name}.json"), IMAGES / f"{name}.png")
        newest = next(path for name in ("main", "preempt") if (path := RESULTS / f"{name}.json").exists())
        plot_scenes(load(newest), IMAGES / "preempt.png", "main")
        picture(load(RESULTS / "scheduler.json"), IMAGES / "overview.png")
        plot_figures(load(RESULTS / "kernels.json"), IMAGES)
    if options.check and stale:
        print("stale tables: python -m benchmarks.tables makes them anew", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
