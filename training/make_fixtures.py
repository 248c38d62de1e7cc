"""Makes the saved models that the evaluator's tests read, with the installed XGBoost.

    python training/make_fixtures.py --out tests/data/xgboost

Run once with each version of XGBoost whose files are to be tested (`xgboost-cpu` and numpy are enough). It writes, in a
directory named by the version:

- models that are supported (`MODELS`), and beside each what XGBoost makes of rows from `rows`: `NAME.margins.json` has
  the seed, the number of rows, a hash over the bits of all float32 margins, and the bits of every `SAMPLE_EVERY`-th;
- `replay.json`, a model that carries rows and their margins, as csrc/predict/trees/model.hpp has it;
- `contributions.json`, what each feature adds to the margins of some of these rows (`pred_contribs`), for each model;
- `refused/NAME.json` and `.ubj`, models that must be refused.

Rows come from a counter-based generator that the tests have too (tests/csrc/predict/test_trees_fixtures.cpp), so that
a hundred thousand of them take no room.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

FEATURES = 24
ROWS = 100_000
SAMPLE_EVERY = 500
TRAINING_SEED = 1
ROWS_SEED = 2
EXPLAINED = 6

#: Name: parameters and number of trees.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "squared": ({"objective": "reg:squarederror", "max_depth": 6, "min_child_weight": 120}, 100),
    "absolute": ({"objective": "reg:absoluteerror", "max_depth": 3}, 5),
    "huber": ({"objective": "reg:pseudohubererror", "max_depth": 4, "huber_slope": 2.0, "base_score": 15.0}, 4),
    "quantile": ({"objective": "reg:quantileerror", "max_depth": 3, "quantile_alpha": 0.9}, 5),
    "pruned": ({"objective": "reg:squarederror", "max_depth": 4, "tree_method": "exact", "gamma": 400.0}, 6),
    "deep": ({"objective": "reg:squarederror", "max_depth": 12, "min_child_weight": 60}, 3),
    "fine": ({"objective": "reg:squarederror", "max_depth": 8, "tree_method": "exact", "min_child_weight": 40}, 8),
    "forest": ({"objective": "reg:squarederror", "max_depth": 3, "num_parallel_tree": 3, "subsample": 0.5}, 3),
    "leaves": ({"objective": "reg:squarederror", "max_depth": 3, "gamma": 1e9}, 2),
}


def rows(seed: int, count: int, features: int = FEATURES) -> np.ndarray:
    """Float32 rows of shape (count, features): mostly of [-4, 4), many on a grid, some missing or extreme."""
    with np.errstate(over="ignore"):
        index = np.arange(1, count * features + 1, dtype=np.uint64)
        z = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    kind = (z & np.uint64(63)).astype(np.int64)
    negative = (z >> np.uint64(6) & np.uint64(1)).astype(np.uint32) << np.uint32(31)
    high = (z >> np.uint64(40)).astype(np.float32)
    values = high * np.float32(2.0**-21) - np.float32(4)
    values = np.where(kind >= 40, np.floor(values * np.float32(16)) * np.float32(1 / 16), values)

    def special(bits: np.ndarray | int) -> np.ndarray:
        return (negative | np.asarray(bits, dtype=np.uint32)).view(np.float32)

    values = np.where(kind == 0, np.float32("nan"), values)
    values = np.where(kind == 1, special(0x7F800000), values)  # infinities
    values = np.where(kind == 2, special((z >> np.uint64(41)).astype(np.uint32)), values)  # denormal numbers
    values = np.where(kind == 3, special(0), values)
    values = np.where(kind == 4, special(0x7F7FFFFF), values)  # the largest
    return values.astype(np.float32).reshape(count, features)


def training_data(count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Rows without extremes, which XGBoost does not train on, and their targets."""
    x = rows(TRAINING_SEED, count)
    x[np.abs(x) > 5] = np.nan
    known = np.nan_to_num(x).astype(np.float64)
    y = 10 + 2 * known[:, 0] + np.sin(3 * known[:, 1]) + known[:, 2] * known[:, 3]
    y += np.abs(known[:, 4:]).sum(axis=1) / 4
    return x, y.astype(np.float32)


def margins(booster: xgboost.Booster, x: np.ndarray) -> np.ndarray:
    """XGBoost's margins; its two ways to predict have to agree where both take the rows."""
    found = np.asarray(booster.inplace_predict(x, predict_type="margin"), dtype=np.float32)
    finite = ~np.isinf(x).any(axis=1)
    other = booster.predict(xgboost.DMatrix(x[finite]), output_margin=True)
    if found[finite].tobytes() != other.tobytes():
        raise SystemExit("inplace_predict and predict differ")
    return found


def bits(values: np.ndarray) -> list[int]:
    """The float32 values' bits."""
    return [int(word) for word in np.ascontiguousarray(values).view(np.uint32).ravel()]


def fingerprint(values: np.ndarray) -> int:
    """FNV-1a over the values' 32-bit words."""
    state = 0xCBF29CE484222325
    for word in bits(values):
        state = (state ^ word) * 0x100000001B3 & (1 << 64) - 1
    return state


def write(path: Path, content: object) -> None:
    """Writes JSON without blanks."""
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def make_supported(out: Path) -> None:
    """The models of `MODELS`, what they answer, and `replay.json`."""
    x, y = training_data()
    asked = rows(ROWS_SEED, ROWS)
    for name, (parameters, trees) in MODELS.items():
        # More than 255 thresholds of a feature come about only where few features are of use.
        data = xgboost.DMatrix(np.where(np.arange(FEATURES) < 2, x, np.float32(0)) if name == "fine" else x, y)
        booster = xgboost.train({"eta": 0.1, "max_bin": 255, "nthread": 2, **parameters}, data, trees)
        # One model in both formats; the large ones in the shorter one.
        booster.save_model(out / f"{name}.ubj")
        if name not in ("squared", "fine", "deep"):
            booster.save_model(out / f"{name}.json")
        answers = margins(booster, asked)
        write(
            out / f"{name}.margins.json",
            {
                "seed": ROWS_SEED,
                "rows": ROWS,
                # As text: a JSON number is not sure to hold 64 bits.
                "hash": f"{fingerprint(answers):016x}",
                "sample_every": SAMPLE_EVERY,
                "sample": bits(answers[::SAMPLE_EVERY]),
            },
        )
    names = [f"feature {i}" for i in range(FEATURES)]
    data = xgboost.DMatrix(x, y, feature_names=names, feature_types=["q"] * FEATURES)
    booster = xgboost.train(
        {"max_depth": 3, "eta": 1.5}, data, 20, evals=[(data, "train")], early_stopping_rounds=2, verbose_eval=False
    )
    booster.set_attr(note='a "quoted" note, \u00e9\u4e16\U0001f600')
    booster.save_model(out / "replay.json")
    stored = asked[:50]
    answers = np.asarray(booster.inplace_predict(stored, predict_type="margin", validate_features=False))
    write(
        out / "replay.json",
        {
            "cudasched": 1,
            "model": json.loads((out / "replay.json").read_text()),
            "rows": [bits(row) for row in stored],
            "margins": bits(answers),
        },
    )


def make_contributions(out: Path) -> None:
    """`contributions.json`: row numbers, and for each model their contributions, the bias last."""
    asked = rows(ROWS_SEED, 100)
    # A DMatrix takes no infinities.
    chosen = np.flatnonzero(~np.isinf(asked).any(axis=1))[:EXPLAINED]
    found = {}
    for name in MODELS:
        booster = xgboost.Booster(model_file=out / f"{name}.ubj")
        answers = booster.predict(xgboost.DMatrix(asked[chosen]), pred_contribs=True, strict_shape=False)
        found[name] = [[float(f"{value:.9g}") for value in row] for row in answers]
    write(out / "contributions.json", {"seed": ROWS_SEED, "rows": chosen.tolist(), "contributions": found})


def make_refused(out: Path) -> None:
    """Small models of kinds that are not supported."""
    out.mkdir(exist_ok=True)
    x, y = training_data(500)
    x = np.nan_to_num(x[:, :4])
    classes = (np.arange(len(y)) % 3).astype(np.float32)
    colours = xgboost.DMatrix(np.column_stack([classes, x[:, 1]]), y, feature_types=["c", "q"], enable_categorical=True)
    two = np.column_stack([y, -y])
    kinds: dict[str, tuple[dict[str, Any], xgboost.DMatrix]] = {
        "dart": ({"booster": "dart", "rate_drop": 0.5}, xgboost.DMatrix(x, y)),
        "gblinear": ({"booster": "gblinear"}, xgboost.DMatrix(x, y)),
        "logistic": ({"objective": "binary:logistic"}, xgboost.DMatrix(x, classes > 0)),
        "gamma": ({"objective": "reg:gamma"}, xgboost.DMatrix(x, np.abs(y) + 1)),
        "classes": ({"objective": "multi:softprob", "num_class": 3}, xgboost.DMatrix(x, classes)),
        "targets": ({"objective": "reg:squarederror"}, xgboost.DMatrix(x, two)),
        "vector_leaves": (
            {"objective": "reg:squarederror", "multi_strategy": "multi_output_tree", "tree_method": "hist"},
            xgboost.DMatrix(x, two),
        ),
        "quantiles": ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}, xgboost.DMatrix(x, y)),
        "categorical": ({"max_cat_to_onehot": 1, "tree_method": "hist"}, colours),
    }
    for name, (parameters, data) in kinds.items():
        booster = xgboost.train({"max_depth": 2, "nthread": 1, **parameters}, data, 2)
        booster.save_model(out / f"{name}.json")
        booster.save_model(out / f"{name}.ubj")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the version's directory is put")
    options = parser.parse_args(arguments)
    out = options.out / ".".join(xgboost.__version__.split(".")[:2])
    out.mkdir(parents=True, exist_ok=True)
    make_supported(out)
    make_contributions(out)
    make_refused(out / "refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
