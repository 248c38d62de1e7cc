"""Trains the predictor's trees on recorded launches.

    python -m training.train --data training/data/h200.parquet --out model/

Objective, rate and leaves are chosen by cross-validation over shape groups and name families (`training.data`): what
predicts new shapes and unseen kernels best, by two errors of each beside their targets: the median of the relative
errors, and the time-weighted error, where a launch counts by its duration (at most 1 ms, or a handful of launches of 80
ms would decide). Sets of features are left out to see what each is worth, and stay in: names cost unseen kernels more
than they give new shapes, but an unseen kernel's first samples correct it, and new shapes of known kernels are what
programs launch. Writes `model.ubj` (XGBoost's own file, which says for which GPU it was trained) and `report.json`
(what was tried, what was chosen, data and versions).

The model is at most 128 trees of depth 7 with at most 254 thresholds a feature: what the evaluator walks in 200 ns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from training import baselines
from training.command import InputError, carry_out
from training.data import Codes, Floats, Launches, Mask, folds, launches_of, split, table_of

TREES = 128
MAX_DEPTH = 7
MAX_BIN = 255
#: Median absolute percentage errors to reach, and time-weighted ones.
TARGETS = {"shapes": 0.09, "kernels": 0.30}
TIME_TARGETS = {"shapes": 0.30, "kernels": 0.60}
#: What a launch's duration counts at most in a time-weighted error, in ns.
MOST_WEIGHT_NS = 1e6
#: What a relative error counts at most there: one kernel predicted at a thousand times must not decide either.
MOST_ERROR = 10.0
SEED = 1

#: Features that a set leaves out, by the beginnings of their names.
FEATURE_SETS: dict[str, tuple[str, ...]] = {
    "all": (),
    "no words": ("log_size", "log_product", "log_tile_work", "log_wave_work", "log_thread_share", "log_work"),
    "no layouts": ("log_work",),
    "no names": ("log_tile", "stages", "element_bytes", "vector_width", "family"),
    "no occupancy": ("blocks_per_sm", "occupancy", "log_waves", "whole_waves", "tail"),
}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    depth: int = MAX_DEPTH
    objective: str = "reg:squarederror"
    features: str = "all"
    eta: float = 0.25
    trees: int = TREES
    min_child_weight: float = 10.0


def hide(rows: NDArray[np.float32], names: Sequence[str], feature_set: str) -> NDArray[np.float32]:
    """The rows with the features that the set leaves out made constant, so that no tree asks for them."""
    left_out = [i for i, name in enumerate(names) if name.startswith(FEATURE_SETS[feature_set] or "\0")]
    if not left_out:
        return rows
    rows = rows.copy()
    rows[:, left_out] = 0
    return rows


def fit(launches: Launches, names: Sequence[str], recipe: Recipe, threads: int = 2) -> xgboost.Booster:
    """Trains trees on the natural logarithm of the duration in ns."""
    target = np.log(launches.duration_ns)
    # A launch that was recorded ten times is one thing to learn, not ten.
    key, first = np.unique(launches.key, return_index=True)
    target = baselines.medians(launches.key, target, int(key[-1]) + 1)[key]
    rows = hide(launches.rows[first], names, recipe.features)
    data = xgboost.QuantileDMatrix(rows, target, feature_names=list(names), max_bin=MAX_BIN, nthread=threads)
    parameters = {
        "objective": recipe.objective,
        "max_depth": recipe.depth,
        "eta": recipe.eta,
        "min_child_weight": recipe.min_child_weight,
        "max_bin": MAX_BIN,
        "tree_method": "hist",
        "nthread": threads,
        "seed": SEED,
    }
    return xgboost.train(parameters, data, recipe.trees)


def fit_parts(parts: Sequence[Launches], names: Sequence[str], recipe: Recipe, threads: int = 2) -> xgboost.Booster:
    """The same on several recordings: launches of two of them are never alike."""
    joined = parts[0]
    for part in parts[1:]:
        joined = replace(
            joined,
            rows=np.concatenate([joined.rows, part.rows]),
            duration_ns=np.concatenate([joined.duration_ns, part.duration_ns]),
            key=np.concatenate([joined.key, part.key + int(joined.key.max()) + 1]),
        )
    return fit(joined, names, recipe, threads)


def predict(booster: xgboost.Booster, launches: Launches) -> Floats:
    """Durations in ns."""
    margins = booster.inplace_predict(launches.rows, predict_type="margin", validate_features=False)
    return np.exp(np.asarray(margins, np.float64))


def percentage_errors(predicted: Floats, measured: Floats) -> Floats:
    """Absolute error as a fraction of what was measured."""
    return np.abs(predicted - measured) / measured


def time_weighted(predicted: Floats, measured: Floats) -> float:
    """Sum of the errors over that of the durations; durations count up to `MOST_WEIGHT_NS`, errors to `MOST_ERROR`."""
    weights = np.minimum(measured, MOST_WEIGHT_NS)
    return float((np.minimum(percentage_errors(predicted, measured), MOST_ERROR) * weights).sum() / weights.sum())


def sample_groups(launches: Launches, groups: Codes, most: int) -> Mask:
    """Whole groups, about `most` launches in all."""
    parts = max(1, round(len(launches) / most))
    return folds(groups, parts, "sample") == 0


def cross_validate(
    launches: Launches, names: Sequence[str], recipe: Recipe, count: int = 3, threads: int = 2
) -> dict[str, float]:
    """Errors over all folds, for new shapes and for unseen kernels: medians, and time-weighted ("shapes by time").

    Raises:
        InputError: The recording has nothing to hold out.
    """
    found: dict[str, float] = {}
    for kind in TARGETS:
        predicted, measured = [], []
        for fold in range(count):
            try:
                train_mask, test_mask = split(launches, kind, fold, count)
            except ValueError:  # a recording of one kernel alone, say
                continue
            test = launches.take(test_mask)
            predicted.append(predict(fit(launches.take(train_mask), names, recipe, threads), test))
            measured.append(test.duration_ns)
        if predicted:
            said, lasted = np.concatenate(predicted), np.concatenate(measured)
            found[kind] = float(np.median(percentage_errors(said, lasted)))
            found[f"{kind} by time"] = time_weighted(said, lasted)
    if not found:
        raise InputError("the recording has one shape or kernel alone: there is nothing to hold out")
    return found


def score(errors: dict[str, float]) -> float:
    """Mean of the errors as shares of their targets; less is better."""
    targets = TARGETS | {f"{kind} by time": target for kind, target in TIME_TARGETS.items()}
    return float(np.mean([error / targets[kind] for kind, error in errors.items()]))


def choose(
    launches: Launches, names: Sequence[str], threads: int = 2, quick: bool = False
) -> tuple[Recipe, list[dict[str, Any]]]:
    """The best recipe that can be shipped, and what was tried: objective, leaves, rate, depth, and less features.

    With `quick`, one recipe is tried.

    Raises:
        InputError: The recording has nothing to hold out.
    """
    tried: list[dict[str, Any]] = []

    def attempt(recipe: Recipe) -> tuple[float, Recipe]:
        began = time.perf_counter()
        errors = cross_validate(launches, names, recipe, threads=threads)
        tried.append({**asdict(recipe), **errors, "score": score(errors)})
        took = time.perf_counter() - began
        print(f"{recipe}: {' '.join(f'{kind} {e:.3f}' for kind, e in errors.items())} ({took:.0f} s)", flush=True)
        return score(errors), recipe

    if quick:
        return attempt(Recipe())[1], tried
    best = min((attempt(Recipe(objective=f"reg:{name}error")) for name in ("squared", "absolute")), key=lambda p: p[0])
    for change in ({"min_child_weight": 3.0}, {"min_child_weight": 30.0}, {"eta": 0.35}, {"depth": 6}):
        best = min(best, attempt(Recipe(**{**asdict(best[1]), **change})), key=lambda pair: pair[0])
    for name in FEATURE_SETS:
        if name != "all":
            attempt(Recipe(**{**asdict(best[1]), "features": name}))
    return best[1], tried


def train(data: Path, out: Path, threads: int = 2, quick: bool = False, most: int = 60_000) -> Recipe:
    """Chooses a recipe on at most about `most` launches, trains it on all and writes `out`."""
    from cudasched._output import Output
    from cudasched.predictor._recording import _metadata, capability_of, feature_names

    table = table_of(data)
    # Before the search, which takes long.
    about = {"cudasched_architecture": capability_of(table), "cudasched_gpu": _metadata(table, "cudasched.gpu")}
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    model, about_it = (Output(out / name, parents=True) for name in ("model.ubj", "report.json"))
    launches = launches_of(table)
    names = feature_names()
    shown = launches.take(sample_groups(launches, launches.shape_group, most))
    print(f"{len(launches)} launches of {len(launches.functions)} kernels; chosen on {len(shown)} of them", flush=True)
    recipe, tried = choose(shown, names, threads, quick)
    booster = fit(launches, names, recipe, threads)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    booster.set_attr(**about)
    model.write(bytes(booster.save_raw("ubj")))
    report = {
        "recipe": asdict(recipe),
        "tried": tried,
        "launches": len(launches),
        "kernels": len(launches.functions),
        "name_families": len(np.unique(launches.group)),
        "shape_groups": len(np.unique(launches.shape_group)),
        "families": list(launches.families),
        "feature_names": list(names),
        "gain": booster.get_score(importance_type="total_gain"),
        "data": {"name": data.name, "sha256": sha256},
        "recorded": {key: value for key, value in metadata.items() if key.startswith("cudasched.")},
        "versions": {"xgboost": xgboost.__version__, "numpy": np.__version__, "python": sys.version.split()[0]},
    }
    about_it.write(json.dumps(report, indent=1) + "\n")
    print(f"{model.path}: {recipe}", flush=True)
    return recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a recording, or what training.compact wrote")
    parser.add_argument("--out", type=Path, required=True, help="the directory that the model is put in")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="without a search: one recipe")
    options = parser.parse_args(arguments)
    return carry_out(lambda: train(options.data, options.out, options.threads, options.quick), "not trained")


if __name__ == "__main__":
    sys.exit(main())
