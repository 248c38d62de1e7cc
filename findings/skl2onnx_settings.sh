#!/usr/bin/env bash
# skl2onnx converts scikit-learn models with settings that it does not heed, without a word, to ONNX that answers otherwise.
#
# It lists these classes as supported, and raises where it knows better (as for OneHotEncoder's rare categories). But it
# weighs neighbours by distances that it has negated and then cut off from below at 1e-6, so all alike. In a tree every
# missing value goes right, wherever the tree learned to send it. The rare categories of an encoder's first column stand
# for those of all columns, and the columns that an imputer adds are gone. The probability of two classes is that of twice
# the score. With an SVC against the rest the sign is wrong: the least likely class is the label. Compare the predictions
# of both before a converted model is used.
#
# Seen with skl2onnx 1.20.0, scikit-learn 1.9.1, onnxruntime 1.32.0, onnx 1.23.2, CPython 3.11.7, 2026-11-29:
#     neighbours, alike: 0% of rows off, farthest 0.00
#     neighbours, by distance: 99% of rows off, farthest 0.42
#     tree, nothing missing: 0% of rows off, farthest 0.00
#     tree, values missing: 22% of rows off, farthest 16.27
#     encoder, all categories: 0% of rows off, farthest 0.00
#     encoder, at most four: 100% of rows off, farthest 3.00
#     imputer: 0% of rows off, farthest 0.00
#     imputer, add_indicator: 4 columns of 8
#     discriminant, three classes: 0% of rows off, farthest 0.00
#     discriminant, two classes: 86% of rows off, farthest 0.15
#     one against the rest: 0% of rows off, farthest 0.00
#     one SVC against the rest: 100% of rows off, farthest 2.00
#     warnings: 0
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  skl2onnx==1.20.0 scikit-learn==1.9.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 scipy==1.17.1
cat > "$folder/convert.py" <<'PYTHON'
import importlib.metadata
import platform
import sys
import warnings

import numpy as np
import onnxruntime
from skl2onnx import to_onnx
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import OrdinalEncoder
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeRegressor

chance = np.random.default_rng(0)
inputs = chance.normal(size=(1000, 4)).astype(np.float32)
fresh = chance.normal(size=(1000, 4)).astype(np.float32)
value = 3 * inputs[:, 0] + 10
two, three = np.digitize(inputs[:, 0], [0]), np.digitize(inputs[:, 0], [-0.5, 0.5])
missing = np.where(inputs < -0.8, np.nan, inputs)
kinds = chance.choice(6, p=(0.3, 0.05, 0.3, 0.05, 0.25, 0.05), size=1000)
kinds = np.stack((kinds, 5 - kinds), axis=1).astype(np.float32)
tree, discriminant = DecisionTreeRegressor(max_depth=5), LinearDiscriminantAnalysis()
cases = {
    "neighbours, alike": (KNeighborsRegressor(), "predict", inputs, value, fresh),
    "neighbours, by distance": (KNeighborsRegressor(weights="distance"), "predict", inputs, value, fresh),
    "tree, nothing missing": (tree, "predict", inputs, value, inputs),
    "tree, values missing": (tree, "predict", missing, value, missing),
    "encoder, all categories": (OrdinalEncoder(), "transform", kinds, None, kinds),
    "encoder, at most four": (OrdinalEncoder(max_categories=4), "transform", kinds, None, kinds),
    "imputer": (SimpleImputer(), "transform", missing, None, missing),
    "imputer, add_indicator": (SimpleImputer(add_indicator=True), "transform", missing, None, missing),
    "discriminant, three classes": (discriminant, "predict_proba", inputs, three, inputs),
    "discriminant, two classes": (discriminant, "predict_proba", inputs, two, inputs),
    "one against the rest": (OneVsRestClassifier(LogisticRegression()), "predict", inputs, three, inputs),
    "one SVC against the rest": (OneVsRestClassifier(SVC()), "predict", inputs, three, inputs),
}
names = "skl2onnx", "scikit-learn", "onnxruntime", "onnx"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
right = []
with warnings.catch_warnings(record=True) as warned:
    for name, (model, method, data, labels, asked) in cases.items():
        model.fit(data, labels)
        options = {"zipmap": False} if hasattr(model, "classes_") else None
        session = onnxruntime.InferenceSession(to_onnx(model, data[:1], options=options).SerializeToString())
        theirs = session.run(None, {"X": asked})[1 if method == "predict_proba" else 0].reshape(len(asked), -1)
        ours = getattr(model, method)(asked).reshape(len(asked), -1)
        if theirs.shape != ours.shape:
            print(f"{name}: {theirs.shape[1]} columns of {ours.shape[1]}")
            right.append(False)
            continue
        off = np.abs(theirs - ours)
        print(f"{name}: {(off > 0.001).any(axis=1).mean():.0%} of rows off, farthest {off.max():.2f}")
        right.append(bool(off.max() <= 0.001))
warned = [str(one.message) for one in warned if not issubclass(one.category, (FutureWarning, DeprecationWarning))]
print(f"warnings: {len(warned)}")
sys.exit(0 if right == [True, False] * 6 and not warned else 1)
PYTHON
"$folder/venv/bin/python" "$folder/convert.py"
