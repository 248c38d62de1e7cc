"""Writes the model that the package ships, with rows to replay and a card; refuses what should not be shipped.

    python -m training.export --model model/ --data training/data/h200.parquet \
        --out python/cudasched/predictor/models/sm_90.ubj

The file is what `cudasched.predictor.load` and the scheduler read; XGBoost is not needed for either.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from training.command import InputError, carry_out, report_of
from training.data import Launches, load
from training.train import MAX_DEPTH, TREES, percentage_errors, predict

#: Rows that the file carries with their margins, which every load replays.
REPLAYED = 64
LEAST_FEATURES = 20
#: A model that is wrong by more on its own training data has learned nothing.
WORST_MDAPE = 0.5


class ExportError(InputError):
    """This model is not one to ship; says why."""


def check(booster: xgboost.Booster, launches: Launches, feature_names: Sequence[str]) -> float:
    """Refuses models that are too large, do not know today's features, or answer nonsense.

    Args:
        booster: The model.
        launches: Some that it should know.
        feature_names: What `csrc/predict/features.hpp` makes of a launch.

    Returns:
        The median absolute percentage error on `launches`.

    Raises:
        ExportError: Says what is wrong.
    """
    if list(booster.feature_names or []) != list(feature_names):
        raise ExportError("the model's features are not those that this cudasched computes: train it again")
    if len(feature_names) < LEAST_FEATURES:
        raise ExportError(f"{len(feature_names)} features are fewer than {LEAST_FEATURES}")
    trees = booster.get_dump()
    if not 1 <= len(trees) <= TREES:
        raise ExportError(f"{len(trees)} trees: a launch has time for 1 to {TREES}")
    depth = max(line.count("\t") for tree in trees for line in tree.splitlines())
    if depth > MAX_DEPTH:
        raise ExportError(f"depth {depth}: a launch has time for {MAX_DEPTH}")
    if sum(tree.count("\n") for tree in trees) == len(trees):
        raise ExportError("the trees have no splits: the model says the same of every launch")
    with np.errstate(over="ignore"):
        durations = predict(booster, launches)
    if not np.isfinite(durations).all() or durations.min() < 100 or durations.max() > 1e11:
        raise ExportError(
            f"it predicts {durations.min():.3g} to {durations.max():.3g} ns: "
            "the target is the natural logarithm of the duration in ns"
        )
    mdape = float(np.median(percentage_errors(durations, launches.duration_ns)))
    if not mdape <= WORST_MDAPE:
        raise ExportError(f"on its own data it is wrong by {mdape:.0%} in the median; {WORST_MDAPE:.0%} is too much")
    return mdape


def rows_to_replay(launches: Launches) -> NDArray[np.float32]:
    """Some of the data's rows, and some with values missing."""
    random = np.random.default_rng(1)
    rows = launches.rows[np.sort(random.choice(len(launches), min(REPLAYED, len(launches)), replace=False))].copy()
    missing = random.random(rows.shape) < 0.1
    missing[: len(rows) // 2] = False
    rows[missing] = np.nan
    return rows


def card(report: dict[str, Any], mdape: float, name: str) -> str:
    """The model card: what it is, what it was trained on, what it does not know."""
    recipe, data, versions = report["recipe"], report["data"], report["versions"]
    recorded = {key.removeprefix("cudasched."): value for key, value in report["recorded"].items()}
    tried = "\n".join(
        f"| {one['objective'][4:]} | {one['depth']} | {one['eta']} | {one['min_child_weight']:g} | {one['features']} | "
        + " | ".join(percent(one.get(kind)) for kind in ("shapes", "shapes by time", "kernels", "kernels by time"))
        + " |"
        for one in report["tried"]
    )
    return f"""# {name}

Trees that predict how long a kernel takes on a GPU of compute capability {recorded["compute_capability"]}, from what
is known when it is launched: geometry, the kernel's attributes and name, occupancy, and the sizes among its parameters.
Margin: natural logarithm of the duration in ns.

| | |
| --- | --- |
| Recorded on | {recorded["gpu"]}, {recorded["sm_count"]} SMs, CUDA driver {recorded["driver_version"]} |
| Times | {recorded["timing"]} |
| Data | `{data["name"]}`, SHA-256 `{data["sha256"]}`; training/data/README.md |
| Launches | {report["launches"]:,} of {report["kernels"]:,} kernels of {report["name_families"]:,} name families |
| Shapes | {report["shape_groups"]:,} |
| Families | {", ".join(report["families"])} |
| Model | {recipe["trees"]} trees, depth {recipe["depth"]}, {recipe["objective"]} |
| Features | {len(report["feature_names"])} ({recipe["features"]}) |
| Versions | XGBoost {versions["xgboost"]}, numpy {versions["numpy"]}, Python {versions["python"]} |
| Error on its own training data | {mdape:.1%} in the median |

How it was chosen, by three-fold cross-validation over shape groups and name families (median absolute percentage error,
and time-weighted error):

| objective | depth | eta | least leaf | features | new shapes | by time | unseen kernels | by time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{tried}

What it is worth on launches that it has not seen: `benchmarks/results/predictor.json`, docs/training.md.

Limits. Kernels that ran alone, on one GPU model at its own clocks; other GPUs of the same capability differ in clocks
and memory, which the correction on line learns. Durations that depend on the data (sparsity, sorting) and on what the
cache holds are averages. What a parameter block does not say (lengths read from memory) the trees cannot know. Graphs
are predicted by other means.
"""


def percent(value: float | None) -> str:
    """A fraction as a table has it."""
    return "" if value is None else f"{value:.1%}"


def export(model: Path, data: Path, out: Path) -> None:
    """Writes `out` and, beside it, the card with the suffix .md.

    Raises:
        ExportError: The model is not one to ship.
        Error: A file cannot be written, or would replace one that was read.
        OSError: A file cannot be read.
    """
    from cudasched._output import Output
    from cudasched.predictor import Model
    from cudasched.predictor._recording import feature_names

    place = Output(out, option="--out", parents=True)
    place.refuse(data, "the model would replace the recording")
    place.refuse(model / "model.ubj", "the exported model would replace the trained one")
    if out.suffix == ".md":
        raise ExportError(f"{out}: the card has that suffix; name the model sm_XY.ubj")
    report = report_of(model)
    booster = xgboost.Booster()
    try:
        booster.load_model(model / "model.ubj")
    except ValueError:  # XGBoost's own
        raise InputError(f"{model / 'model.ubj'} is damaged: train the model again") from None
    launches = load(data)
    mdape = check(booster, launches, feature_names())
    shipped = Model.from_xgboost(booster, replay=rows_to_replay(launches))
    some = launches.rows[:1000]
    expected = booster.inplace_predict(some, predict_type="margin", validate_features=False)
    if shipped.margins(some).tobytes() != np.asarray(expected).tobytes():
        raise ExportError("it answers otherwise than XGBoost")
    shipped.save(place)
    out.with_suffix(".md").write_text(card(report, mdape, out.stem))
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB, median error on its own data {mdape:.1%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="what training.train wrote")
    parser.add_argument("--data", type=Path, required=True, help="what it was trained on")
    parser.add_argument("--out", type=Path, required=True, help="sm_XY.ubj, for compute capability X.Y")
    options = parser.parse_args(arguments)
    return carry_out(lambda: export(options.model, options.data, options.out), "not exported")


if __name__ == "__main__":
    sys.exit(main())
