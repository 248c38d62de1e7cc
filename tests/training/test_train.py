"""A small model is trained, evaluated and exported in seconds, and C++ answers with XGBoost's own bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'cudasched[training]'")

from cudasched import errors, hook  # noqa: E402

from training import baselines, data, evaluate, export, train  # noqa: E402

try:
    hook.load_core()
except errors.HookError as error:
    pytest.skip(f"the package is not built: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def trained(sweeps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m training.train` makes of the small recording."""
    out = tmp_path_factory.mktemp("model")
    assert train.main(["--data", str(sweeps), "--out", str(out), "--quick", "--threads", "2"]) == 0
    return out


@pytest.fixture(scope="module")
def launches(sweeps: Path) -> data.Launches:
    return data.load(sweeps)


def booster_of(path: Path) -> xgboost.Booster:
    booster = xgboost.Booster()
    booster.load_model(path / "model.ubj")
    return booster


def test_the_report_says_what_was_done(trained: Path, launches: data.Launches) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["launches"] == len(launches)
    assert report["recipe"]["trees"] == train.TREES
    assert len(report["feature_names"]) >= export.LEAST_FEATURES
    assert set(report["tried"][0]) > {"shapes", "kernels"}
    assert report["recorded"]["cudasched.gpu"] == "NVIDIA H200"


def test_it_learns_new_shapes(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["tried"][0]["shapes"] < 0.10
    assert report["tried"][0]["kernels"] < 0.30


def test_exported_trees_answer_bit_for_bit_as_xgboost(
    trained: Path, sweeps: Path, launches: data.Launches, tmp_path: Path
) -> None:
    from cudasched.predictor import Model

    out = tmp_path / "models" / "sm_90.ubj"
    assert export.main(["--model", str(trained), "--data", str(sweeps), "--out", str(out)]) == 0
    expected = booster_of(trained).inplace_predict(launches.rows, predict_type="margin", validate_features=False)
    fastest = Model(out)
    for isa in fastest.isas:
        assert Model(out, isa=isa).margins(launches.rows).tobytes() == np.asarray(expected).tobytes(), isa
    # From the recording itself: features made in C++, walked in C++.
    assert np.exp(np.asarray(expected, np.float64)).tobytes() == fastest.predict(str(sweeps)).tobytes()
    card = out.with_suffix(".md").read_text()
    assert "NVIDIA H200" in card
    assert f"{len(launches):,} of" in card


def broken(name: str, launches: data.Launches, names: list[str]) -> xgboost.Booster:
    """A model that must not be shipped."""
    recipe = {
        "too many": train.Recipe(trees=train.TREES + 1),
        "too deep": train.Recipe(depth=train.MAX_DEPTH + 1, min_child_weight=1),
    }
    if name in recipe:
        return train.fit(launches, names, recipe[name])
    targets = {
        "not logarithms": launches.duration_ns,
        "seconds": np.log(launches.duration_ns / 1e9),
        "noise": np.log(launches.duration_ns[np.random.default_rng(1).permutation(len(launches))]),
        "constant": np.full(len(launches), 9.0),
    }
    titles = names if name != "other names" else [f"feature {i}" for i in range(len(names))]
    target = targets.get(name, np.log(launches.duration_ns))
    return xgboost.train({"max_depth": 3}, xgboost.DMatrix(launches.rows, target, feature_names=titles), 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too many", f"{train.TREES + 1} trees"),
        ("too deep", f"depth {train.MAX_DEPTH + 1}"),
        ("not logarithms", "natural logarithm"),
        ("seconds", "natural logarithm"),
        ("noise", "wrong by"),
        ("constant", "no splits"),
        ("other names", "not those that this cudasched computes"),
    ],
)
def test_nonsense_is_not_exported(name: str, message: str, launches: data.Launches) -> None:
    from cudasched.predictor._recording import feature_names

    names = list(feature_names())
    with pytest.raises(export.ExportError, match=message):
        export.check(broken(name, launches, names), launches, names)


def test_a_refused_model_leaves_no_file(trained: Path, sweeps: Path, tmp_path: Path) -> None:
    from cudasched.predictor._recording import feature_names

    names = list(feature_names())
    bad = tmp_path / "bad"
    bad.mkdir()
    broken("constant", data.load(sweeps), names).save_model(bad / "model.ubj")
    (bad / "report.json").write_text((trained / "report.json").read_text())
    out = tmp_path / "sm_90.ubj"
    assert export.main(["--model", str(bad), "--data", str(sweeps), "--out", str(out)]) == 1
    assert not out.exists()


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_baselines_answer_every_launch(name: str, launches: data.Launches) -> None:
    train_mask, test_mask = data.split(launches, "kernels")
    answers = baselines.BASELINES[name](launches.take(train_mask), launches.take(test_mask))
    assert answers.shape == (test_mask.sum(),)
    assert (answers > 0).all()
    assert np.isfinite(answers).all()


def test_history_knows_what_it_has_seen(launches: data.Launches) -> None:
    train_mask, test_mask = data.split(launches, "processes")
    test = launches.take(test_mask)
    errors_seen = train.percentage_errors(baselines.history(launches.take(train_mask), test), test.duration_ns)
    assert np.median(errors_seen) < 0.05


def test_a_feature_set_hides_its_features(launches: data.Launches) -> None:
    from cudasched.predictor._recording import feature_names

    names = feature_names()
    for feature_set, beginnings in train.FEATURE_SETS.items():
        booster = train.fit(launches, names, train.Recipe(trees=5, features=feature_set))
        used = set(booster.get_score())
        assert used
        assert not [name for name in used if beginnings and name.startswith(beginnings)]
        assert not beginnings or any(name.startswith(beginnings) for name in names)


def test_the_whole_evaluation(trained: Path, sweeps: Path, programs: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictor.json"
    arguments = ["--data", str(sweeps), "--programs", str(programs), "--model", str(trained), "--out", str(out)]
    assert evaluate.main([*arguments, "--plots", str(tmp_path / "plots")]) == 0
    from benchmarks.results.schema import load

    results = load(out)
    rows = [row.model_dump() for row in results.rows]
    accuracy = {
        (row["split"], row["model"], row["corrected"]): row["mdape"]
        for row in rows
        if row["kind"] == "accuracy" and row["scope"] == "all"
    }
    for split in evaluate.SPLITS:
        models = {(model, corrected) for name, model, corrected in accuracy if name == split}
        assert models == {("ours", False), ("ours", True), *((name, False) for name in baselines.BASELINES)}
    assert accuracy["new_shape", "ours", False] < 0.10
    assert accuracy["repeat", "ours", True] < 0.05
    coverage = [row for row in rows if row["kind"] == "coverage"]
    assert [row["decile"] for row in coverage] == list(range(1, 11))
    assert sum(row["n"] for row in coverage) == 5 * (3000 - evaluate.WARM_UP)
    assert all(row["low"] <= row["coverage"] <= row["high"] for row in coverage)
    assert results.meta.gpu == "NVIDIA H200"
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "predictor_scatter.png",
        "predictor_errors.png",
        "predictor_coverage.png",
    }


def test_intervals_take_keys_for_units() -> None:
    # A thousand launches of two keys, one always inside and one never, say little of a third key.
    inside = np.repeat([True, False], 500)
    assert evaluate.interval(inside, np.repeat([0, 1], 500)) == (0.0, 1.0)
    low, high = evaluate.interval(inside, np.arange(1000))
    assert 0.45 < low < high < 0.55
