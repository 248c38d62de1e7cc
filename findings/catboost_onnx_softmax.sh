#!/usr/bin/env bash
# CatBoost's ONNX file answers a softmax for every model of several classes, also where CatBoost itself takes sigmoids.
#
# With MultiClassOneVsAll each class has a sigmoid of its own. With MultiLogloss and MultiCrossEntropy each label has one,
# and several labels may hold. In the file all outputs share a sum of 1, and one label is named. CatBoost's own
# probabilities cannot be computed from these. `save_model` raises for models that it cannot write, but not for these.
# The manual names no such limit, and the JSON file is right. In the ONNX file, set the operator's `post_transform` to
# LOGISTIC: then the probabilities are CatBoost's.
#
# Seen with catboost 1.2.10, onnx 1.23.2, onnxruntime 1.32.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-30 (the first row, and
# the farthest off of all rows):
#     MultiClass: CatBoost 0.09 0.65 0.26, ONNX 0.09 0.65 0.26, off by 0.00
#     MultiClassOneVsAll: CatBoost 0.08 0.63 0.25, ONNX 0.04 0.80 0.16, off by 0.20; with LOGISTIC 0.00; JSON 0.00
#     MultiLogloss: CatBoost 0.99 0.01 0.99, ONNX 0.42 0.00 0.58, off by 0.81; with LOGISTIC 0.00; JSON 0.00
#     MultiCrossEntropy: CatBoost 0.90 0.09 0.91, ONNX 0.48 0.01 0.52, off by 0.62; with LOGISTIC 0.00; JSON 0.00
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  catboost==1.2.10 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 scipy==1.17.1 pandas==3.0.1
cat > "$folder/export.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import catboost
import numpy as np
import onnx
import onnxruntime

names = "catboost", "onnx", "onnxruntime", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
chance = np.random.default_rng(0)
inputs = chance.normal(size=(1000, 4)).astype(np.float32)
classes = np.digitize(inputs[:, 0] + 0.5 * chance.normal(size=1000), (-0.5, 0.5))
labels = (inputs[:, :3] > (0, 1, -1)).astype(int)
objectives = {
    "MultiClass": classes,
    "MultiClassOneVsAll": classes,
    "MultiLogloss": labels,
    "MultiCrossEntropy": labels * 0.8 + 0.1,
}


def answers(file):
    """The probabilities of all rows, in the order of the classes."""
    _, rows = onnxruntime.InferenceSession(file.SerializeToString()).run(None, {"features": inputs})
    return np.array([[row[each] for each in sorted(row)] for row in rows])


def text(row):
    return " ".join(f"{value:.2f}" for value in row)


right = []
for objective, wanted in objectives.items():
    settings = {"loss_function": objective, "iterations": 20, "learning_rate": 0.3, "thread_count": 1, "verbose": 0}
    model = catboost.CatBoost(settings | {"allow_writing_files": False}).fit(inputs, wanted)
    expected = model.predict(inputs, prediction_type="Probability")
    model.save_model("model.onnx", format="onnx")
    file = onnx.load("model.onnx")
    onnx.checker.check_model(file)
    theirs = answers(file)
    off = [np.abs(theirs - expected).max()]
    said = f"{objective}: CatBoost {text(expected[0])}, ONNX {text(theirs[0])}, off by {off[0]:.2f}"
    if objective != "MultiClass":
        (attribute,) = (one for node in file.graph.node for one in node.attribute if one.name == "post_transform")
        attribute.s = b"LOGISTIC"
        off.append(np.abs(answers(file) - expected).max())
        model.save_model("model.json", format="json")
        again = catboost.CatBoost().load_model("model.json", format="json")
        off.append(np.abs(again.predict(inputs, prediction_type="Probability") - expected).max())
        said += f"; with LOGISTIC {off[1]:.2f}; JSON {off[2]:.2f}"
    print(said)
    right.append([bool(one < 1e-5) for one in off])
sys.exit(0 if right == [[True]] + [[False, True, True]] * 3 else 1)
PYTHON
cd "$folder"
venv/bin/python -W ignore export.py
