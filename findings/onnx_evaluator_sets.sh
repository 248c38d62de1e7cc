#!/usr/bin/env bash
# ONNX's own evaluator ends the set of a TreeEnsemble's split at category 0, and gives the rest to the next split.
#
# The operator (ai.onnx.ml 5) can split by a set of values, as of categories. All sets stand in one list,
# `membership_values`, each with a NaN behind it. The evaluator (`onnx.reference`) takes values for a split until one is
# NaN or false in Python, so 0 ends a set: what follows it goes to the next split, and so on. XGBoost, LightGBM and pandas
# number categories from 0. Nothing is raised, and sets without 0 are right, so a test of such ones finds nothing. The
# evaluator is what a new exporter or runtime is measured by; ONNX Runtime is right here. Number categories from 1, or
# compare with the trainer's own answers.
#
# Seen with onnx 1.23.2, onnxruntime 1.32.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-30:
#     sets [1, 3], [2, 4]: ONNX Runtime [30, 10, 20, 10, 20], evaluator [30, 10, 20, 10, 20]
#     sets [0, 3], [2, 4]: ONNX Runtime [10, 30, 20, 10, 20], evaluator [30, 30, 30, 20, 30], wrong
#     sets [3, 0], [2, 4]: ONNX Runtime [10, 30, 20, 10, 20], evaluator [30, 30, 30, 10, 30], wrong
#     sets [1, 3], [0, 4]: ONNX Runtime [20, 10, 30, 10, 20], evaluator [30, 10, 30, 10, 30], wrong
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import platform
import sys

import numpy as np
import onnx
import onnx.reference
import onnxruntime
from onnx import helper, numpy_helper

names = "onnx", "onnxruntime", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))


def answers(first, second):
    """Of both for categories 0 to 4: leaf 10 is the first set's, 20 the second's, and 30 has the rest."""
    tensor = numpy_helper.from_array
    node = helper.make_node(
        "TreeEnsemble",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        tree_roots=[0],
        nodes_featureids=[0, 0],
        nodes_modes=tensor(np.array([6, 6], np.uint8)),  # a set's member
        nodes_splits=tensor(np.zeros(2, np.float32)),  # unused
        nodes_truenodeids=[0, 1],
        nodes_trueleafs=[1, 1],
        nodes_falsenodeids=[1, 2],
        nodes_falseleafs=[0, 1],
        leaf_targetids=[0, 0, 0],
        leaf_weights=tensor(np.array([10, 20, 30], np.float32)),
        membership_values=tensor(np.array([*first, np.nan, *second, np.nan], np.float32)),
    )
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 1])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 1])
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("ai.onnx.ml", 5)]
    model = helper.make_model(helper.make_graph([node], "tree", [x], [y]), opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {"x": np.arange(5, dtype=np.float32)[:, None]}
    return [
        [int(each) for each in one.run(None, inputs)[0].ravel()]
        for one in (onnx.reference.ReferenceEvaluator(model), session)
    ]


right = []
for sets in (([1, 3], [2, 4]), ([0, 3], [2, 4]), ([3, 0], [2, 4]), ([1, 3], [0, 4])):
    wanted = [10 if each in sets[0] else 20 if each in sets[1] else 30 for each in range(5)]
    evaluator, runtime = answers(*sets)
    right.append((evaluator == wanted, runtime == wanted))
    print(f"sets {sets[0]}, {sets[1]}: ONNX Runtime {runtime}, evaluator {evaluator}{'' if right[-1][0] else ', wrong'}")
sys.exit(0 if right == [(True, True), (False, True), (False, True), (False, True)] else 1)
PYTHON
