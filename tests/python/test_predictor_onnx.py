"""Models in ONNX: the same bits back, ONNX Runtime's answers, and what is said of files that cannot be used."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cudasched import predictor
from cudasched.errors import Error, ModelError
from support import ROOT

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed")

from onnx import TensorProto, helper  # noqa: E402


def rows_of(features: int, count: int = 500, seed: int = 5) -> np.ndarray:
    draw = np.random.default_rng(seed)
    rows = (draw.normal(size=(count, features)) * 8).astype(np.float32)
    rows[draw.random(rows.shape) < 0.05] = np.nan
    rows[draw.random(rows.shape) < 0.05] = 0.0
    return rows


def booster(features: int = 6, trees: int = 20, depth: int = 5) -> Any:
    x = rows_of(features, 900, 1)
    y = 9 + np.nan_to_num(x[:, 0]) / 8 + (np.nan_to_num(x[:, 1]) > 1)
    names = [f"log_{i}" for i in range(features)]
    data = xgboost.DMatrix(x, y, feature_names=names)
    return xgboost.train({"max_depth": depth, "nthread": 1, "min_child_weight": 0, "base_score": 9.1}, data, trees)


def ensemble(modes: list[str], **changes: Any) -> bytes:
    """A tree of three splits a feature, with these orders; NaN is tracked at the second."""
    attributes: dict[str, Any] = dict(
        aggregate_function="SUM",
        post_transform="NONE",
        n_targets=1,
        base_values=[1.5],
        nodes_treeids=[0] * 7,
        nodes_nodeids=list(range(7)),
        nodes_featureids=[0, 1, 2, 0, 0, 0, 0],
        nodes_modes=[*modes, *["LEAF"] * 4],
        nodes_values=[0.5, -1.0, 0.0, 0, 0, 0, 0],
        nodes_truenodeids=[1, 3, 5, 0, 0, 0, 0],
        nodes_falsenodeids=[2, 4, 6, 0, 0, 0, 0],
        nodes_missing_value_tracks_true=[0, 1, 0, 0, 0, 0, 0],
        target_treeids=[0] * 4,
        target_nodeids=[3, 4, 5, 6],
        target_ids=[0] * 4,
        target_weights=[0.1, 0.2, 0.4, 0.8],
    )
    attributes |= changes
    attributes = {key: value for key, value in attributes.items() if value is not None}
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    return graph([node])


def graph(nodes: list[Any], features: int = 3, properties: dict[str, str] | None = None) -> bytes:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, features])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1])],
    )
    opsets = [helper.make_opsetid(*one) for one in (("", 15), ("ai.onnx.ml", 3), ("com.example", 1))]
    model = helper.make_model(made, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, properties or {})
    return bytes(model.SerializeToString())


def runtime(content: bytes, rows: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (values,) = session.run(None, {session.get_inputs()[0].name: rows})
    return np.asarray(values).reshape(-1)


def test_the_shipped_model_goes_to_onnx_and_back_with_its_bits(tmp_path: Path) -> None:
    model = predictor.load(architecture="sm_90")
    content = model.to_onnx(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == content
    onnx.checker.check_model(onnx.load_model_from_string(content))
    again = predictor.Model.from_onnx(tmp_path / "model.onnx")
    assert (again.feature_names, again.architecture, again.gpu) == (model.feature_names, model.architecture, model.gpu)
    assert (again.trees, again.depth) == (model.trees, model.depth)
    rows = rows_of(len(model.feature_names), 2000)
    assert again.margins(rows).tobytes() == model.margins(rows).tobytes()
    # The leaves are the same; ONNX Runtime adds them in an order of its own.
    np.testing.assert_allclose(runtime(content, rows), model.margins(rows), rtol=2e-5)
    np.testing.assert_allclose(again.explain(rows[:5]).values, model.explain(rows[:5]).values, rtol=1e-9, atol=1e-12)


def test_a_booster_keeps_its_bits_and_what_is_saved_is_a_model_that_loads(tmp_path: Path) -> None:
    made = booster()
    model = predictor.Model.from_onnx(predictor.Model.from_xgboost(made).to_onnx())
    rows = rows_of(6)
    expected = made.inplace_predict(rows, predict_type="margin", validate_features=False)
    assert model.margins(rows).tobytes() == expected.tobytes()
    model.save(tmp_path / "model.json")
    assert predictor.load(tmp_path / "model.json").margins(rows).tobytes() == expected.tobytes()
    assert model.feature_names == tuple(f"log_{i}" for i in range(6))


def test_a_model_without_trees_has_no_form_in_onnx() -> None:
    """Guards against onnx's own ValueError of an empty attribute."""
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(np.ones((4, 2)), np.ones(4)), 0)
    with pytest.raises(ModelError, match="without trees"):
        predictor.Model.from_xgboost(booster).to_onnx()


@pytest.mark.parametrize("order", ["BRANCH_LT", "BRANCH_LEQ", "BRANCH_GT", "BRANCH_GTE"])
def test_all_four_orders_are_walked_as_onnx_runtime_does(order: str) -> None:
    content = ensemble([order] * 3)
    model = predictor.Model.from_onnx(content)
    assert model.isa != "onnxruntime"
    values = [-np.inf, -2, -1, -0.0, 0.0, 1e-45, 0.5, np.nextafter(np.float32(0.5), np.float32(1)), 3, np.inf, np.nan]
    rows = np.array([[a, b, c] for a in values for b in values for c in values], np.float32)
    assert model.margins(rows).tobytes() == runtime(content, rows).astype(np.float32).tobytes()


def test_a_leaf_without_a_weight_adds_nothing_and_an_unknown_base_is_zero() -> None:
    content = ensemble(
        ["BRANCH_LT"] * 3,
        base_values=None,
        target_treeids=[0],
        target_nodeids=[3],
        target_ids=[0],
        target_weights=[0.25],
        nodes_missing_value_tracks_true=None,
    )
    rows = rows_of(3)
    assert predictor.Model.from_onnx(content).margins(rows).tobytes() == runtime(content, rows).tobytes()


def test_other_graphs_run_in_onnx_runtime_and_say_that_they_are_not_explained() -> None:
    weights = helper.make_tensor("w", TensorProto.FLOAT, [3, 1], [1.0, -2.0, 0.5])
    nodes = [helper.make_node("Constant", [], ["w"], value=weights), helper.make_node("MatMul", ["x", "w"], ["y"])]
    content = graph(nodes, properties={"cudasched_feature_names": '["a", "b", "c"]', "cudasched_gpu": "some"})
    model = predictor.Model.from_onnx(content)
    rows = np.nan_to_num(rows_of(3))
    np.testing.assert_allclose(model.margins(rows), rows @ np.array([1, -2, 0.5], np.float32), rtol=1e-5, atol=1e-5)
    assert (model.isa, model.isas, model.trees, model.gpu) == ("onnxruntime", ("onnxruntime",), 0, "some")
    assert model.feature_names == ("a", "b", "c")
    assert model.to_onnx() == content
    assert len(model.margins(rows[:0])) == 0
    np.testing.assert_allclose(model.predict(rows[:3]), np.exp(model.margins(rows[:3]).astype(np.float64)))
    with pytest.raises(ModelError, match="only trees are explained"):
        model.explain(rows)
    with pytest.raises(ModelError, match=r"the model takes \(n, 3\)"):
        model.margins(rows[:, :2])


def test_without_onnx_runtime_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    content = graph([helper.make_node("ReduceSum", ["x"], ["y"])])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"its operators are ReduceSum, .*pip install onnxruntime"):
        predictor.Model.from_onnx(content)
    predictor.Model.from_onnx(ensemble(["BRANCH_LT"] * 3))  # trees need it not
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(Error, match=r"cudasched\[onnx\]"):
        predictor.Model.from_onnx(content)
    with pytest.raises(Error, match=r"cudasched\[onnx\]"):
        predictor.load(architecture="sm_90").to_onnx()


def test_operators_that_nobody_knows_are_named() -> None:
    node = helper.make_node("Divine", ["x"], ["y"], domain="com.example")
    with pytest.raises(ModelError, match=r"com\.example:Divine") as raised:
        predictor.Model.from_onnx(graph([node]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_values": [0.5]}, "nodes_values has 1 values for 7"),
        ({"target_weights": None}, "lacks target_weights"),
        ({"nodes_truenodeids": [1, 3, 99, 0, 0, 0, 0]}, "tree 0"),
        ({"nodes_truenodeids": [1, 2, 5, 0, 0, 0, 0]}, "tree 0"),
        ({"nodes_truenodeids": [0, 3, 5, 0, 0, 0, 0]}, "tree 0"),
        ({"nodes_nodeids": [0, 1, 2, 3, 4, 5, 5]}, "node 5 twice"),
        ({"target_nodeids": [3, 4, 5, 77]}, "node 77"),
        ({"nodes_featureids": [0, 1, 3, 0, 0, 0, 0]}, "split_indices"),
    ],
)
def test_trees_that_do_not_hold_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        predictor.Model.from_onnx(ensemble(["BRANCH_LT"] * 3, **changes))


def test_names_that_do_not_fit_are_refused_and_other_features_are_not_asked_of_launches(tmp_path: Path) -> None:
    node = helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=1)
    for names in ('["a"]', "{}", "[1, 2, 3]", "not json"):
        with pytest.raises(ModelError, match="cudasched_feature_names is no list of 3 names"):
            predictor.Model.from_onnx(graph([node], properties={"cudasched_feature_names": names}))
    model = predictor.Model.from_onnx(predictor.Model.from_xgboost(booster()).to_onnx())
    with pytest.raises(ModelError, match="it lacks log_blocks"):
        model.predict(ROOT / "training/data/h200_programs.parquet")


def test_damaged_files_are_refused_or_read_and_never_more() -> None:
    content = predictor.Model.from_xgboost(booster(3, 2, 3)).to_onnx()
    draw = random.Random(11)
    damaged = [content[:length] for length in range(0, len(content), 7)]
    for _ in range(400):
        one = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            one[draw.randrange(len(one))] = draw.randrange(256)
        damaged.append(bytes(one))
    refused = 0
    for one in damaged:
        try:
            model = predictor.Model.from_onnx(one)
            model.margins(np.zeros((2, len(model.feature_names)), np.float32))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(damaged) / 2
    with pytest.raises(ModelError, match="no ONNX model"):
        predictor.Model.from_onnx(b"")
    with pytest.raises(FileNotFoundError):
        predictor.Model.from_onnx("/nonexistent/model.onnx")
