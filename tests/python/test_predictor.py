"""The predictor's Python face: XGBoost's bits, reasons that add up, recordings, and what it says when it cannot."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from cudasched import collect, hook, predictor
from cudasched.advise import rules
from cudasched.advise.occupancy import ARCHITECTURES
from cudasched.advise.origins import origin_of
from cudasched.advise.origins import rules as origin_rules
from cudasched.advise.profile import Group
from cudasched.errors import Error, ModelError
from cudasched.predictor import _recording, _shipped
from cudasched.status import LEVELS
from support import ROOT

MODELS = ROOT / "tests" / "data" / "xgboost"
NAMES = sorted(path.stem for path in (MODELS / "3.4").glob("*.ubj"))
VERSIONS = ("2.1", "3.2", "3.4")
FEATURES = 24


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """What the stored margins are of: the generator of training/make_fixtures.py."""
    sys.path.insert(0, str(ROOT))
    try:
        from training.make_fixtures import ROWS, ROWS_SEED, rows

        return rows(ROWS_SEED, ROWS)
    finally:
        sys.path.remove(str(ROOT))


def trained(objective: str = "reg:squarederror", *, depth: int = 4, names: list[str] | None = None) -> Any:
    random = np.random.default_rng(3)
    x = random.normal(size=(800, 5)).astype(np.float32)
    x[random.random(x.shape) < 0.05] = np.nan
    y = 9 + np.nan_to_num(x) @ np.array([1, -0.5, 0.25, 0, 0.1]) + (np.nan_to_num(x[:, 0]) > 0.3)
    data = xgboost.DMatrix(x, y, feature_names=names)
    # The pseudo-Huber error is flat far from the labels, and its steps are wild there.
    parameters = {"objective": objective, "max_depth": depth, "nthread": 1, "base_score": 9.5, "min_child_weight": 0}
    if objective == "reg:quantileerror":
        parameters["quantile_alpha"] = 0.9
    return xgboost.train(parameters, data, 12), x


def test_the_fixtures_are_there() -> None:
    assert len(NAMES) == 9
    assert all((MODELS / version / f"{name}.ubj").is_file() for version in VERSIONS for name in NAMES)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_saved_models_give_xgboosts_bits(version: str, name: str, rows: np.ndarray) -> None:
    stored = json.loads((MODELS / version / f"{name}.margins.json").read_text())
    asked = rows[:: stored["sample_every"]]
    model = predictor.load(MODELS / version / f"{name}.ubj")
    assert model.margins(asked).view(np.uint32).tolist() == stored["sample"]


@pytest.mark.parametrize("objective", ["squarederror", "absoluteerror", "pseudohubererror", "quantileerror"])
def test_a_booster_becomes_a_model_with_its_bits(objective: str, rows: np.ndarray) -> None:
    booster, x = trained(f"reg:{objective}")
    model = predictor.Model.from_xgboost(booster)
    for asked in (x, rows[:5000, :5]):
        expected = booster.inplace_predict(asked, predict_type="margin")
        for isa in model.isas:
            walked = predictor.Model(bytes(booster.save_raw("ubj")), isa=isa)
            assert walked.isa == isa
            assert walked.margins(asked).tobytes() == expected.tobytes()
        np.testing.assert_allclose(model.predict(asked), np.exp(expected.astype(np.float64)), rtol=1e-15)
    assert model.predict(x).dtype == np.float64
    assert (model.trees, model.depth, model.feature_names) == (12, 4, ("f0", "f1", "f2", "f3", "f4"))


def test_of_a_regressor_that_was_stopped_early_its_best_trees_are_taken() -> None:
    """Guards against predictions of trees that the regressor itself leaves out."""
    pytest.importorskip("sklearn")
    generator = np.random.default_rng(3)
    x = generator.normal(size=(200, 3)).astype(np.float32)
    y = x[:, 0] + generator.normal(size=200)
    regressor = xgboost.XGBRegressor(n_estimators=80, early_stopping_rounds=20, n_jobs=1, max_depth=6)
    regressor.fit(x[:100], y[:100], eval_set=[(x[100:], y[100:])], verbose=False)
    assert regressor.best_iteration + 1 < regressor.get_booster().num_boosted_rounds()
    model = predictor.Model.from_xgboost(regressor, replay=x[:5])
    assert model.trees == regressor.best_iteration + 1
    assert model.margins(x).tobytes() == regressor.predict(x, output_margin=True).tobytes()
    whole = predictor.Model.from_xgboost(regressor.get_booster())
    assert whole.margins(x).tobytes() == regressor.get_booster().inplace_predict(x, predict_type="margin").tobytes()


def test_a_wrapped_booster_is_unwrapped() -> None:
    booster, x = trained()

    class Regressor:
        def get_booster(self) -> Any:
            return booster

    expected = booster.inplace_predict(x, predict_type="margin")
    assert predictor.Model.from_xgboost(Regressor()).margins(x).tobytes() == expected.tobytes()
    with pytest.raises(TypeError, match=r"xgboost\.Booster"):
        predictor.Model.from_xgboost(object())


def test_a_regressor_with_a_missing_value_of_its_own_is_refused() -> None:
    """Guards against other predictions than the regressor's: its trees do not have that value."""
    pytest.importorskip("sklearn")
    random = np.random.default_rng(8)
    x, y = random.normal(size=(100, 2)), random.normal(9, size=100)
    with pytest.raises(ModelError, match=r"-1\.0 for a missing value"):
        predictor.Model.from_xgboost(xgboost.XGBRegressor(n_estimators=2, missing=-1.0, n_jobs=1).fit(x, y))


def test_what_xgboost_saves_in_memory_is_taken() -> None:
    """Guards against a TypeError with the whole file in its text."""
    booster, x = trained()
    assert (
        predictor.Model(booster.save_raw("ubj")).margins(x).tobytes()
        == predictor.Model.from_xgboost(booster).margins(x).tobytes()
    )


def test_columns_of_a_table_of_rows_are_the_features() -> None:
    """Guards against predictions of a table whose columns are in another order."""
    pandas = pytest.importorskip("pandas")
    booster, x = trained(names=["waves", "blocks", "words", "a", "b"])
    model = predictor.Model.from_xgboost(booster)
    table = pandas.DataFrame(x, columns=list(model.feature_names))
    assert model.margins(table).tobytes() == model.margins(x).tobytes()
    for wrong, words in (
        (table[["b", "a", "words", "blocks", "waves"]], "another order"),
        (table.rename(columns={"a": "kind"}), "it lacks a and it has kind; a recording is given as a path"),
    ):
        with pytest.raises(ModelError, match=words):
            model.predict(wrong)
        with pytest.raises(ModelError, match=words):
            predictor.Model.from_xgboost(booster, replay=wrong)
    with pytest.raises(ModelError, match=r"rows of features are numbers.*'x'"):
        model.predict(table.astype(object).replace(table.iloc[0, 0], "x"))


def test_a_model_can_carry_rows_that_prove_it(tmp_path: Path) -> None:
    booster, x = trained(names=["waves", "blocks", "words", "a", "b"])
    model = predictor.Model.from_xgboost(booster, replay=x[:20])
    model.save(tmp_path / "model.ubj")
    loaded = predictor.load(tmp_path / "model.ubj")
    assert loaded.feature_names == ("waves", "blocks", "words", "a", "b")
    assert loaded.margins(x).tobytes() == model.margins(x).tobytes()
    saved = bytearray((tmp_path / "model.ubj").read_bytes())
    assert len(saved) > len(booster.save_raw("ubj")) + 20 * 5 * 8
    saved[-2] ^= 1  # the last bit of the last margin
    with pytest.raises(ModelError, match="stored row 19"):
        predictor.Model(bytes(saved))
    for wrong in (x[:20, :3], x[0]):
        with pytest.raises(ModelError, match=r"rows to replay .*; \(n, 5\) is needed"):
            predictor.Model.from_xgboost(booster, replay=wrong)


@pytest.mark.parametrize("way", ["save", "to_onnx"])
def test_a_model_that_cannot_be_written_leaves_the_one_that_was_there(way: str, tmp_path: Path) -> None:
    if way == "to_onnx":
        pytest.importorskip("onnx")
    model, path = predictor.load(architecture="sm_90"), tmp_path / "there" / "model"
    path.parent.mkdir()
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk
    try:
        with pytest.raises(Error, match="it cannot be written: File too large"):
            getattr(model, way)(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one.read_text() for one in path.parent.iterdir()] == ["before"]


@pytest.mark.parametrize("kind", ["dart", "categorical", "logistic", "targets"])
def test_what_is_not_supported_is_refused_by_name(kind: str) -> None:
    path = MODELS / "3.4" / "refused" / f"{kind}.ubj"
    with pytest.raises(ModelError, match="not supported") as refusal:
        predictor.load(path)
    assert str(path) in str(refusal.value)
    assert isinstance(refusal.value, ValueError)


def test_errors_say_what_and_where(tmp_path: Path) -> None:
    booster, x = trained()
    model = predictor.Model.from_xgboost(booster)
    for wrong in (x[:, :3], x[0], x[None]):
        with pytest.raises(ModelError, match=r"the model takes \(n, 5\)"):
            model.predict(wrong)
    with pytest.raises(ModelError, match="nowhere"):
        predictor.load(tmp_path / "nowhere.ubj")
    for other in (b"", b" \n", b"\x08\x08 an ONNX file", b"binf, as XGBoost once wrote"):
        (tmp_path / "other.ubj").write_bytes(other)
        with pytest.raises(ModelError, match=r"other\.ubj: no model of XGBoost, .*from_onnx reads ONNX"):
            predictor.load(tmp_path / "other.ubj")
    with pytest.raises(ModelError, match="there are nodes, portable"):
        predictor.Model(bytes(booster.save_raw("ubj")), isa="mmx")
    deep = bytes(trained(depth=12)[0].save_raw("ubj"))
    assert predictor.Model(deep).isas == ("nodes",)
    with pytest.raises(ModelError, match="deep"):
        predictor.Model(deep, isa="portable")


def test_names_that_are_no_utf8_are_shown_all_the_same() -> None:
    learned = json.loads((MODELS / "3.2" / "huber.json").read_bytes())
    learned["learner"]["feature_names"] = [f"f{i}" for i in range(FEATURES)]
    learned["learner"]["attributes"] = {"cudasched_architecture": "sm_90@", "cudasched_gpu": "H200@"}
    model = predictor.Model(json.dumps(learned).encode().replace(b'"f1"', b'"f@"').replace(b"@", b"\xff"))
    assert model.feature_names[:3] == ("f0", "f\ufffd", "f2")
    assert (model.architecture, model.gpu) == ("sm_90\ufffd", "H200\ufffd")


def test_contributions_are_xgboosts_and_add_up() -> None:
    booster, x = trained()
    model = predictor.Model.from_xgboost(booster)
    found = model.explain(x)
    expected = booster.predict(xgboost.DMatrix(x), pred_contribs=True)
    np.testing.assert_allclose(found.values, expected[:, :-1], atol=1e-4)
    assert found.bias == pytest.approx(expected[0, -1], abs=1e-4)
    np.testing.assert_allclose(found.values.sum(axis=1) + found.bias, model.margins(x), atol=1e-5)
    np.testing.assert_allclose(np.exp(found.bias) * found.factors.prod(axis=1), model.predict(x), rtol=1e-5)


def test_the_strongest_reasons_come_first() -> None:
    booster, x = trained(names=["waves", "blocks", "words", "a", "b"])
    found = predictor.Model.from_xgboost(booster).explain(x[:10])
    for row in range(10):
        top = found.top(row, 3)
        strongest = np.sort(abs(found.values[row]))[::-1][: len(top)]
        np.testing.assert_allclose([abs(np.log(factor)) for _, factor in top], strongest, rtol=1e-9)
        for name, factor in top:
            assert np.log(factor) == pytest.approx(found.values[row][found.feature_names.index(name)])
    silent = predictor.Contributions(("a", "b"), np.array([[0.0, 0.5]]), 1.0)
    assert [name for name, _ in silent.top(0)] == ["b"]


def test_threads_ask_one_model() -> None:
    booster, x = trained()
    model = predictor.Model.from_xgboost(booster)
    expected = model.margins(x).tobytes(), model.explain(x).values.tobytes()
    fresh = predictor.Model.from_xgboost(booster)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(lambda: (fresh.margins(x).tobytes(), fresh.explain(x).values.tobytes())) for _ in range(16)
        ]
        assert all(one.result() == expected for one in asked)


def test_no_rows_are_no_predictions() -> None:
    model = predictor.Model.from_xgboost(trained()[0])
    assert model.predict(np.empty((0, 5))).shape == (0,)
    assert model.explain(np.empty((0, 5))).values.shape == (0, 5)


def test_a_shipped_model_is_found_by_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shipped, "MODELS", tmp_path)
    monkeypatch.setattr(_shipped, "_architecture_here", lambda: None)
    with pytest.raises(ModelError, match="python -m training"):
        predictor.load()
    booster, x = trained()
    model = predictor.Model.from_xgboost(booster)
    for architecture in ("sm_90", "sm_100"):
        model.save(tmp_path / f"{architecture}.ubj")
        (tmp_path / f"{architecture}.md").write_text("# The card\n")
    _shipped._load_shipped.cache_clear()
    assert "sm_90.ubj" in repr(predictor.load(architecture="sm_90"))
    assert "sm_100.ubj" in repr(predictor.load())
    with pytest.raises(ModelError, match=r"sm_80; there is sm_100, sm_90"):
        predictor.load(architecture="sm_80")
    monkeypatch.setattr(_shipped, "_architecture_here", lambda: "sm_90")
    assert "sm_90.ubj" in repr(predictor.load())
    np.testing.assert_array_equal(predictor.predict(x), model.predict(x))
    np.testing.assert_array_equal(predictor.explain(x).values, model.explain(x).values)


def test_importing_it_is_light() -> None:
    program = (
        "import sys, cudasched, cudasched.predictor\n"
        "assert not {'numpy', 'pyarrow', 'xgboost'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_numpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(Error, match=r"cudasched\[predictor\]"):
        predictor.Model(MODELS / "3.4" / "squared.ubj")


def recording(rows: int = 40, graphs: int = 3) -> Any:
    """A table of the schema that `cudasched collect` writes, as far as features are made of it."""
    pa = pytest.importorskip("pyarrow")
    random = np.random.default_rng(5)
    axes = [f"{what}_{axis}" for what in ("grid", "block", "cluster") for axis in "xyz"]
    columns: dict[str, Any] = {name: np.ones(rows, np.uint32) for name in axes}
    columns["grid_x"] = random.integers(1, 4000, rows).astype(np.uint32)
    columns["block_x"] = (32 * random.integers(1, 33, rows)).astype(np.uint32)
    for name in ("dynamic_shared_bytes", "static_shared_bytes", "local_bytes", "parameter_bytes"):
        columns[name] = random.integers(0, 4000, rows).astype(np.uint32)
    for name, value in (("registers", 64), ("max_threads", 1024), ("blocks_per_sm", 2)):
        columns[name] = np.full(rows, value, np.uint16)
    columns["identity"] = np.arange(1, rows + 1, dtype=np.uint64)
    kinds = ["graph"] * graphs + ["kernel"] * (rows - graphs)
    names = ["graph"] * graphs + [f"_Z4gemm{i % 3}Pf" for i in range(rows - graphs)]
    words = [[0, 0, *random.integers(1, 5000, 3)] for _ in range(rows)]
    table = pa.table(
        {
            **columns,
            "kind": pa.array(kinds).dictionary_encode(),
            "function": pa.array(names).dictionary_encode(),
            "words": pa.array([None, *words[1:]], pa.list_(pa.uint32())),
            "pointers": pa.array([[0, 1]] * rows, pa.list_(pa.uint16())),
        }
    )
    gpu = {"cudasched.sm_count": "132", "cudasched.max_threads_per_sm": "2048", "cudasched.compute_capability": "9.0"}
    return table.replace_schema_metadata(gpu)


def launch_model() -> predictor.Model:
    """Trained on the features that cudasched makes of launches."""
    names = list(_core().feature_names())
    random = np.random.default_rng(6)
    x = (16 * random.random((600, len(names)))).astype(np.float32)
    data = xgboost.DMatrix(x, 8 + x[:, 0] / 4 + x[:, 4] / 8, feature_names=names)
    return predictor.Model.from_xgboost(xgboost.train({"max_depth": 3, "nthread": 1}, data, 10))


def _core() -> Any:
    hook.load_core()
    from cudasched import _core

    return _core


def test_a_recording_is_predicted_by_its_features() -> None:
    table, model = recording(), launch_model()
    durations = model.predict(table)
    assert durations.shape == (40,)
    assert np.isnan(durations[:3]).all(), "graphs have no features"
    rows, known = _recording.feature_rows(table)
    assert known.tolist() == [False] * 3 + [True] * 37
    np.testing.assert_array_equal(durations[3:], model.predict(rows[3:]))
    log_blocks = rows[3:, model.feature_names.index("log_blocks")]
    grid = np.asarray(table["grid_x"])[3:]
    assert (np.argsort(log_blocks, kind="stable") == np.argsort(grid, kind="stable")).all()
    reasons = model.explain(table)
    assert np.isnan(reasons.values[:3]).all()
    np.testing.assert_allclose(np.exp(reasons.values[3:].sum(axis=1) + reasons.bias), durations[3:], rtol=1e-5)


def test_every_launch_has_its_own_words() -> None:
    table = recording()
    whole, _ = _recording.feature_rows(table)
    for first in (3, 17, 39):
        part, _ = _recording.feature_rows(table.slice(first))
        np.testing.assert_array_equal(part, whole[first:])
    assert len({row.tobytes() for row in whole[3:]}) == 37


def test_a_model_of_other_features_does_not_take_a_recording() -> None:
    model = predictor.Model.from_xgboost(trained(names=["log_blocks", "registers", "b", "c", "d"])[0])
    with pytest.raises(ModelError, match=r"it lacks .* and it has b, c, d; train it anew"):
        model.predict(recording())


def test_what_is_no_recording_is_refused() -> None:
    model, table = launch_model(), recording()
    for wrong, words in (
        (table.drop_columns(["kind"]), "no column kind"),
        (table.drop_columns(["grid_x", "words"]), "no column grid_x, words"),
        (table.replace_schema_metadata(None), r"metadata has no cudasched\.sm_count"),
        (table.combine_chunks().to_batches()[0], "not a RecordBatch"),
        (told(table, sm_count="4294967296"), "no number for cudasched.sm_count"),
        (told(table, sm_count=b"\xff"), "no number for cudasched.sm_count"),
        (told(table, sm_count="0"), "no number for cudasched.sm_count"),
        (table.append_column("grid_x", table["grid_x"]), "columns grid_x come twice"),
        (told(table, compute_capability="../9.0"), "'../9.0' for cudasched.compute_capability"),
        # Guards against predictions of launches that are not there.
        (with_column(table, "kind", [None] * 40), "column kind lacks values"),
        (with_column(table, "function", [None] * 40), "column function lacks values"),
        (with_column(table, "grid_x", [None] * 40), "column grid_x lacks values"),
        (with_column(table, "grid_x", [-1] * 40), "column grid_x holds int64, which is no uint32"),
        (with_column(table, "grid_x", [1.5] * 40), "column grid_x holds double, which is no uint32"),
        (with_column(table, "words", ["ab"] * 40), "column words holds string"),
        (with_column(table, "words", [[1, None]] * 40), "column words lacks values"),
    ):
        with pytest.raises(Error, match=words):
            model.predict(wrong)
            _recording.capability_of(wrong)
    for each in (predictor.outlook, predictor.train):
        with pytest.raises(Error, match=r"a path or a pyarrow\.Table with its metadata, not a ndarray"):
            each(np.zeros((2, len(model.feature_names)), np.float32))


def told(table: Any, **metadata: str | bytes) -> Any:
    """The table with other metadata."""
    more = {f"cudasched.{name}".encode(): value for name, value in metadata.items()}
    return table.replace_schema_metadata({**table.schema.metadata, **more})


def with_column(table: Any, name: str, values: list[Any]) -> Any:
    """The table with another column."""
    pa = pytest.importorskip("pyarrow")
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def test_types_that_a_tool_has_changed_are_changed_back() -> None:
    """Guards against ArrowNotImplementedError of texts as polars exports them."""
    pa = pytest.importorskip("pyarrow")
    table, model = recording(), launch_model()
    if not hasattr(pa, "string_view"):
        pytest.skip("this pyarrow has no string_view")
    for name in ("kind", "function"):
        changed = table.set_column(
            table.column_names.index(name), name, table[name].cast(pa.string()).cast(pa.string_view())
        )
        np.testing.assert_array_equal(model.predict(changed), model.predict(table))


def test_the_recordings_gpu_chooses_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shipped, "MODELS", tmp_path)
    table, model = recording(), launch_model()
    model.save(tmp_path / "sm_90.ubj")
    np.testing.assert_array_equal(predictor.predict(table), model.predict(table))
    read: list[object] = []
    monkeypatch.setattr(collect, "read", lambda path: read.append(path) or table)
    predictor.predict("data.parquet")
    predictor.explain("data.parquet")
    assert len(read) == 2  # each once: a large recording takes long
    other = {**table.schema.metadata, b"cudasched.compute_capability": b"8.6"}
    with pytest.raises(ModelError, match="sm_86"):
        predictor.predict(table.replace_schema_metadata(other))


def test_a_file_of_the_data_sets_schema_is_predicted(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from cudasched import collect

    table, model = recording(), launch_model()
    # The collector leaves no value out, but for times and the like: a graph has no words, and a column that does not
    # matter here has zeros.
    words = pa.array([value or [] for value in table["words"].to_pylist()], table["words"].type)
    table = table.set_column(table.column_names.index("words"), "words", words)

    def column(field: Any) -> Any:
        if field.name in table.column_names:
            return table[field.name].cast(field.type)
        plain = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_boolean(field.type)
        return pa.array([0 if plain else "0"] * len(table)).cast(field.type)

    columns = [column(field) for field in collect.schema()]
    metadata = {**table.schema.metadata, b"cudasched.schema": collect.SCHEMA_VERSION.encode()}
    pq.write_table(pa.table(columns, schema=collect.schema().with_metadata(metadata)), tmp_path / "data.parquet")
    np.testing.assert_array_equal(model.predict(tmp_path / "data.parquet"), model.predict(table))
    np.testing.assert_array_equal(model.predict(str(tmp_path / "data.parquet")), model.predict(table))
    with pytest.raises(Error, match=r"nowhere\.parquet"):
        model.predict(tmp_path / "nowhere.parquet")


def test_the_four_predictions_of_launches_before_they_run() -> None:
    table = _recording._table(ROOT / "training/data/h200_programs.parquet").slice(0, 3000)
    found = predictor.outlook(table)
    np.testing.assert_array_equal(found.duration_ns, predictor.predict(table))
    assert ((found.block_efficiency > 0) & (found.block_efficiency <= 1)).all()
    known = ~np.isnan(found.occupancy)
    assert known.mean() > 0.9
    assert ((found.occupancy[known] > 0) & (found.occupancy[known] <= 1)).all()
    assert ((found.sm_utilisation[known] > 0) & (found.sm_utilisation[known] <= 1)).all()
    np.testing.assert_allclose(found.waves[known], table["waves"].to_numpy()[known], rtol=1e-5)
    # Products of matrices are known, and none is predicted to be faster than twice what the GPU can do.
    assert 0 < np.nanmax(found.flops_per_s) < 2e15
    assert np.isnan(found.flops_per_s).any()
    assert set(found.level) <= set(LEVELS) and (found.level == "not judged").any()
    with pytest.raises(Error, match="no recording"):
        predictor.outlook(table.drop_columns(["words"]), model=predictor.load(architecture="sm_90"))


def levels_of(table: Any, each_ns: float) -> list[str]:
    places = _recording.outlooks(table, np.full(len(table), each_ns))["level"]
    return ["graph" if np.isnan(place) else LEVELS[int(place)] for place in places]


def test_levels_are_those_of_the_rules_that_the_launch_alone_decides() -> None:
    pa = pytest.importorskip("pyarrow")
    table = recording(rows=400)
    random = np.random.default_rng(7)
    for name, values in (
        ("block_x", random.integers(1, 512, 400)),
        ("grid_x", np.where(random.random(400) < 0.5, random.integers(1, 132, 400), table["grid_x"])),
        ("local_bytes", np.where(random.random(400) < 0.2, random.integers(1, 400, 400), 0)),
    ):
        table = table.set_column(table.column_names.index(name), name, pa.array(values.astype(np.uint32)))
    kept = ("partial_warp", "small_grid", "tail", "local_memory")
    seen = set()
    for each_ns in (2_000.0, 5_000.0, 1e6):
        found = levels_of(table, each_ns)
        for row, level in zip(table.to_pylist(), found, strict=True):
            if row["kind"] == "graph":
                assert level == "graph"
                continue
            group = Group(
                kind="kernel",
                graph=0,
                grid=tuple(row[f"grid_{axis}"] for axis in "xyz"),
                block=tuple(row[f"block_{axis}"] for axis in "xyz"),
                cluster=(1, 1, 1),
                launches=1,
                timed=0,
                overlapped=0,
                duration_ns=0,
                predicted_ns=each_ns,
                idle_before_ns=None,
                **{name: row[name] for name in ("dynamic_shared_bytes", "static_shared_bytes", "local_bytes")},
                **{name: row[name] for name in ("function", "registers", "max_threads", "blocks_per_sm")},
            )
            subject = rules.Subject(group, origin_of(row["function"]), 132, 64, ARCHITECTURES["9.0"], None)
            findings = [finding for finding in rules.find(subject) if finding.rule in kept]
            assert level == rules.level(subject, findings), row
            seen.add(level)
    assert seen == {"critical", "warning", "good"}


#: Like libraries' and a program's own, and libraries' that are not in origins.toml's examples.
ALIKE = (
    *("persistent_matmul_kernel", "fusion_attention", "lstm_cell_forward", "gru_step", "rnn_step", "convolve2d"),
    *("torch_like_add", "regular_grid_sample", "eigenvalues", "wrapped", "wrapped_2d_add", "hopper_softmax", "wgrad"),
    *("mamba::selective_scan", "marlin::Marlin", "ggml::mul", "paddle::k", "phi::k", "krn_partials_per_segment"),
    *("preprocessC2R_kernel", "generate_seed_pseudo_mrg", "magma_sgemmEx_kernel", "elemWiseRNNcell", "fusion_1_2"),
    *("nhwcAddPaddingKernel", "loop_add_fusion_12", "wrapped_convert_2", "hopper_fp16_s1688gemm_128x64", "flip_filter"),
)


def test_library_kernels_are_not_judged() -> None:
    pa = pytest.importorskip("pyarrow")
    written = origin_rules()
    examples = [(name, each["shape"] == "user") for each in written["origin"] for name in each["examples"]]
    examples += [(name, True) for name in written["origin_own"]["examples"]]
    examples += [(name, origin_of(name).changeable) for name in ALIKE]
    table = recording(rows=len(examples), graphs=0)
    names = pa.array([name for name, _ in examples])
    table = table.set_column(table.column_names.index("function"), "function", names)
    for (name, is_users), level in zip(examples, levels_of(table, 1e6), strict=True):
        assert (level != "not judged") == is_users, name
    # And of what programs launch: in all but one of a hundred kernels the two say the same.
    programs = _recording._table(ROOT / "training/data/h200_programs.parquet")
    found = dict(zip(programs["function"].to_pylist(), levels_of(programs, 1e6), strict=True))
    kernels = {name: level for name, level in found.items() if level != "graph"}
    apart = [name for name, level in kernels.items() if (level != "not judged") != origin_of(name).changeable]
    assert len(apart) <= len(kernels) / 100, apart
