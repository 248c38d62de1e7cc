#!/usr/bin/env bash
# onnxmltools converts XGBoost models of kinds that it does not know, without a word, to ONNX that answers something else.
#
# It takes every booster for one tree ensemble with one output, the plain sum of all leaves, and each objective that it has
# no case for (by its name) for regression or for classification. So DART's weights of trees, the sigmoid of reg:logistic
# and the targets' own sums are lost, and two quantiles or a ranking become the label of a classifier. Compare the
# predictions of both before a converted model is used.
#
# Seen with onnxmltools 1.16.0, xgboost-cpu 3.4.1, onnx 1.23.2, onnxruntime 1.32.0, CPython 3.12.1, 2026-11-29:
#     reg:squarederror: XGBoost 10.22, ONNX 10.22
#     reg:logistic: XGBoost 0.67, ONNX 1.19
#     dart: XGBoost 10.32, ONNX 10.71
#     two targets: XGBoost 10.22 -10.22, ONNX 10.04 0.00
#     two quantiles: XGBoost 8.39 12.14, ONNX 0
#     rank:pairwise: XGBoost -1.65, ONNX 0
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in python3.14 python3.13 python3.12 python3; do # NumPy 2.5 wants 3.12
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && break
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  onnxmltools==1.16.0 xgboost-cpu==3.4.1 onnx==1.23.2 onnxruntime==1.32.0 skl2onnx==1.20.0 numpy==2.5.5 scikit-learn==1.9.1
cat > "$folder/convert.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import numpy as np
import onnxmltools
import onnxruntime
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType

chance = np.random.default_rng(0)
inputs = chance.normal(size=(2000, 6)).astype(np.float32)
labels = (inputs[:, 0] * 3 + 10 + chance.normal(size=2000)).astype(np.float32)
high = (labels > 10).astype(np.float32)
kinds = {
    "reg:squarederror": ({}, labels),
    "reg:logistic": ({"objective": "reg:logistic"}, high),
    "dart": ({"booster": "dart", "rate_drop": 0.3}, labels),
    "two targets": ({}, np.stack((labels, -labels), axis=1)),
    "two quantiles": ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}, labels),
    "rank:pairwise": ({"objective": "rank:pairwise"}, high),
}


def text(row):
    return " ".join(f"{value:.2f}" if isinstance(value, np.floating) else f"{value}" for value in np.atleast_1d(row))


names = "onnxmltools", "xgboost-cpu", "onnx", "onnxruntime"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
onnxruntime.set_default_logger_severity(3)  # else it warns that two outputs are one more than the model says
equal = {}
for kind, (parameters, wanted) in kinds.items():
    data = xgboost.DMatrix(inputs, wanted)
    if kind.startswith("rank"):
        data.set_group([len(inputs)])
    model = xgboost.train({"max_depth": 4, "seed": 0} | parameters, data, 15)
    converted = onnxmltools.convert_xgboost(model, initial_types=[("inputs", FloatTensorType([None, 6]))])
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    theirs = session.run(None, {"inputs": inputs})[0]
    ours = model.predict(xgboost.DMatrix(inputs))
    equal[kind] = theirs.size == ours.size and np.allclose(theirs.reshape(ours.shape), ours, rtol=1e-4, atol=1e-4)
    print(f"{kind}: XGBoost {text(ours[0])}, ONNX {text(theirs[0])}")
sys.exit(0 if equal.pop("reg:squarederror") and not any(equal.values()) else 1)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/convert.py"
