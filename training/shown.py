"""Tables and pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.measures import SPLITS, TARGETS

if TYPE_CHECKING:
    from training.evaluate import Tested


def show(rows: Sequence[dict[str, Any]], out: Callable[[str], None] = print) -> None:
    """The tables, as text."""
    models = list(dict.fromkeys((row["model"], row["corrected"]) for row in rows))
    titles = [f"{model}{' +' if corrected else ''}" for model, corrected in models]
    for split_name in SPLITS:
        mine = [row for row in rows if row["split"] == split_name and not row["scope"].startswith("program:")]
        if not mine:
            continue
        out(f"\n{split_name}: median absolute percentage error (target {TARGETS[split_name]:.0%}); ours + is corrected")
        out(f"{'':16}{'launches':>10}" + "".join(f"{title:>10}" for title in titles))
        for scope in dict.fromkeys(row["scope"] for row in mine):
            here = {(row["model"], row["corrected"]): row for row in mine if row["scope"] == scope}
            cells = [f"{here[model]['mdape']:>10.1%}" if model in here else f"{'':>10}" for model in models]
            out(f"{scope:16}{max(row['n'] for row in here.values()):>10}" + "".join(cells))


def show_deciles(tested: Tested, out: Callable[[str], None] = print) -> None:
    """Errors by decile of the measured duration."""
    edges = np.quantile(tested.launches.duration_ns, np.linspace(0, 1, 11)[1:-1])
    decile = np.searchsorted(edges, tested.launches.duration_ns)
    for split_name in SPLITS:
        out(f"\n{split_name}: median absolute percentage error by decile of the duration, trees alone and corrected")
        for model in ("ours", "ours corrected"):
            if (split_name, model) in tested.predicted:
                errors = [tested.errors(split_name, model, decile == i) for i in range(10)]
                out(f"{model:16}" + "".join(f"{np.median(e):>8.1%}" if len(e) else f"{'':>8}" for e in errors))


def plot_scatter(tested: Tested, path: Path) -> None:
    """Predicted against measured, a panel a split."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True)
    for axis, split_name in zip(axes, SPLITS, strict=True):
        model = "ours corrected" if split_name == "repeat" else "ours"
        if (split_name, model) not in tested.predicted:
            continue
        values = tested.predicted[split_name, model]
        known = ~np.isnan(values)
        measured = tested.launches.duration_ns[known] / 1e3
        axis.hexbin(measured, values[known] / 1e3, gridsize=60, xscale="log", yscale="log", bins="log", mincnt=1)
        ends = [float(measured.min()), float(measured.max())]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        median = np.median(tested.errors(split_name, model))
        axis.set_title(
            f"{split_name.replace('_', ' ')}: {median:.1%}" + (" (corrected)" if " " in model else " (trees)")
        )
        axis.set_xlabel("measured, us")
    axes[0].set_ylabel("predicted, us")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plot_errors(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Errors of ours and of the baselines, by split."""
    plt = pyplot()
    models = list(dict.fromkeys((row["model"], row["corrected"]) for row in rows if row["scope"] == "all"))
    figure, axis = plt.subplots(figsize=(8, 4))
    for place, (model, corrected) in enumerate(models):
        bars = []
        for split_name in SPLITS:
            found = [
                row["mdape"]
                for row in rows
                if (row["model"], row["corrected"], row["scope"], row["split"]) == (model, corrected, "all", split_name)
            ]
            bars.append(100 * found[0] if found else np.nan)
        where = np.arange(len(SPLITS)) + 0.8 * (place / len(models) - 0.5)
        axis.bar(where, bars, 0.8 / len(models), label=f"{model}{', corrected' if corrected else ''}", align="edge")
    for number, target in enumerate(TARGETS.values()):
        axis.hlines(100 * target, number - 0.4, number + 0.4, color="black", linewidth=1)
    axis.set_xticks(range(len(SPLITS)), [name.replace("_", " ") for name in SPLITS])
    axis.set_ylabel("median absolute error, %")
    axis.set_yscale("log")
    axis.set_yticks([2, 3, 5, 10, 20, 30, 50, 100], ["2", "3", "5", "10", "20", "30", "50", "100"])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plot_coverage(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Coverage of the bound by decile, with intervals."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.5))
    shares = np.array([100 * row["coverage"] for row in rows])
    spread = np.array([[100 * (row["coverage"] - row["low"]), 100 * (row["high"] - row["coverage"])] for row in rows]).T
    axis.axhspan(88, 92, color="lightgrey")
    axis.errorbar([row["decile"] for row in rows], shares, np.maximum(spread, 0), fmt="o", capsize=3)
    axis.set_xlabel("decile of predicted duration")
    axis.set_ylabel("launches within the bound, %")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
