#!/usr/bin/env bash
# Perpetual's robust losses predict billions where all labels are below 20.
#
# HuberLoss and AdaptiveHuberLoss are there for data with outliers. Their second derivative is 0 beyond `delta`, and a
# leaf's value is the sum of the first derivatives by that of the second. So a leaf whose residuals all lie beyond
# `delta` divides by next to nothing. The first trees have such leaves, where the labels vary by more than `delta`; the
# training ends after some trees, and raises and warns nothing. LightGBM takes 1 for the second derivative. The manual
# says of no such limit. AbsoluteLoss is robust, too, and right. So is a `delta` that is greater than all residuals,
# which is SquaredLoss.
#
# Seen with perpetual 2.3.0, scikit-learn 1.9.1, lightgbm 4.7.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-30:
#     labels: -1 to 17
#     SquaredLoss: predictions -0.2 to 14.6
#     AbsoluteLoss: predictions -0.459 to 12.6
#     HuberLoss, delta 1: predictions -4.99 to 5.82e+09
#     HuberLoss, delta 3: predictions -0.0718 to 2.66e+09
#     HuberLoss, delta 100: predictions -0.2 to 14.6
#     AdaptiveHuberLoss, quantile 0.5: predictions -7.7e+08 to 11.8
#     AdaptiveHuberLoss, quantile 0.9: predictions -1.6e+08 to 10.2
#     LightGBM's huber, alpha 1: predictions 0.288 to 11.4
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  perpetual==2.3.0 scikit-learn==1.9.1 lightgbm==4.7.0 numpy==2.4.6 scipy==1.17.1
cat > "$folder/huber.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import lightgbm
import numpy as np
from perpetual import PerpetualBooster

names = "perpetual", "scikit-learn", "lightgbm", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
chance = np.random.default_rng(0)
inputs = chance.normal(size=(1000, 4))
labels = 5 + 2 * inputs[:, 0] + inputs[:, 1] ** 2 + 0.1 * chance.normal(size=1000)
print(f"labels: {labels.min():.0f} to {labels.max():.0f}")
objectives = {
    "SquaredLoss": {},
    "AbsoluteLoss": {},
    "HuberLoss, delta 1": {"delta": 1.0},
    "HuberLoss, delta 3": {"delta": 3.0},
    "HuberLoss, delta 100": {"delta": 100.0},
    "AdaptiveHuberLoss, quantile 0.5": {"quantile": 0.5},
    "AdaptiveHuberLoss, quantile 0.9": {"quantile": 0.9},
}


def sane(name, predicted):
    print(f"{name}: predictions {predicted.min():.3g} to {predicted.max():.3g}")
    return bool(np.abs(predicted).max() < 100)


right = []
for name, parameters in objectives.items():
    model = PerpetualBooster(objective=name.split(",")[0], num_threads=1, **parameters).fit(inputs, labels)
    right.append(sane(name, model.predict(inputs)))
settings = {"objective": "huber", "alpha": 1.0, "verbose": -1, "num_threads": 1}
model = lightgbm.train(settings, lightgbm.Dataset(inputs, labels), 100)
assert sane("LightGBM's huber, alpha 1", model.predict(inputs))
sys.exit(0 if right == [True, True, False, False, True, False, False] else 1)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/huber.py"
