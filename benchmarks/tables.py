"""Writes the tables and figures of README.md and docs/ from benchmarks/results; `--check` only says which are stale.

A document asks for a table by a marker, and what stands between it and the end is replaced:

    <!-- table:main -->
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
from collections.abc import Sequence
from pathlib import Path

from cudasched.demo.plot import HOW_TO_GET_MATPLOTLIB

from benchmarks import spans
from benchmarks.graphs.summary import ablation_table
from benchmarks.plots import plot_scenes
from benchmarks.preempt.summary import every_table, preempt_table
from benchmarks.results.schema import (
    RESULTS,
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

#: The arms of the short form, and what they are called there.
SHORT = {
    "latency_alone": "alone",
    "processes": "time slices",
    "mps_priority": "MPS, priority",
    "slices": "cudasched",
}

#: Parts of kernels.json, and how the names of their figures begin; the kernels' own are all others.
FIGURES_OF = {
    "device": ("queue_", "graph_", "device_", "conditional_"),
    "tuner": ("tuner_", "warm_"),
    "quiet": ("quiet_", "bare_", "idle_"),
}


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
        return f"{preempt_table(results, arms=SHORT)}\n{origin(results.meta)}\n"
    if results.colocations:
        table = every_table(results) if kind == "every" else preempt_table(results, kind)
        return f"{table}\n{origin(results.meta)}\n"
    if any(isinstance(row, PredictorSpeedRow) for row in results.rows):
        return speed_table(results)
    return f"{overhead_table(results)}\n{origin(results.meta)}\n"


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
        plot_figures(load(RESULTS / "kernels.json"), IMAGES)
    if options.check and stale:
        print("stale tables: python -m benchmarks.tables makes them anew", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
