#!/usr/bin/env bash
# lleaves compiles LightGBM's forests of several classes, and linear trees, to functions that answer otherwise.
#
# Of a forest (`boosting=rf`) of classes it divides the first class's sum alone, and by the number of all classes' trees.
# It takes the constant of a linear leaf for its answer. Nothing is raised or logged. treelite is right, or raises.
# Compare the predictions of both before a compiled model is used.
#
# Seen with lleaves 1.3.0, treelite 4.8.1, lightgbm 4.7.0, llvmlite 0.44.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-30 (the
# rows that are off, and the farthest):
#     regression: lleaves 0% by 0.00, treelite 0% by 0.00
#     binary: lleaves 0% by 0.00, treelite 0% by 0.00
#     multiclass: lleaves 0% by 0.00, treelite 0% by 0.00
#     rf: lleaves 0% by 0.00, treelite 0% by 0.00
#     rf, multiclass: lleaves 100% by 0.90, treelite 0% by 0.00
#     linear_tree: lleaves 100% by 3.68, treelite raises
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  lightgbm==4.7.0 treelite==4.8.1 lleaves==1.3.0 llvmlite==0.44.0 numpy==2.4.6 scipy==1.17.1
cat > "$folder/kinds.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import lightgbm
import lleaves
import numpy as np
import treelite

names = "lleaves", "treelite", "lightgbm", "llvmlite", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
chance = np.random.default_rng(0)
inputs = chance.normal(size=(1000, 4)).astype(np.float32)
times = (2 * inputs[:, 0] + inputs[:, 1] ** 2 + 5).clip(0.1)
high = (inputs[:, 0] + 0.3 * chance.normal(size=1000) > 0).astype(int)
classes = high + (inputs[:, 1] > 0)
forest = {"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}
kinds = {
    "regression": ({}, times),
    "binary": ({"objective": "binary"}, high),
    "multiclass": ({"objective": "multiclass", "num_class": 3}, classes),
    "rf": (forest, times),
    "rf, multiclass": (forest | {"objective": "multiclass", "num_class": 3}, classes),
    "linear_tree": ({"linear_tree": True}, times),
}


def by_lleaves(model):
    model.save_model("model.txt")
    compiled = lleaves.Model(model_file="model.txt")
    compiled.compile()
    return compiled.predict(inputs.astype(float))


def by_treelite(model):
    model.save_model("model.txt")
    return treelite.gtil.predict(treelite.frontend.load_lightgbm_model("model.txt"), inputs)


converters = {"lleaves": by_lleaves, "treelite": by_treelite}
wrong = set()
for kind, (parameters, wanted) in kinds.items():
    settings = {"verbose": -1, "num_threads": 1} | parameters
    model = lightgbm.train(settings, lightgbm.Dataset(inputs, wanted), 10)
    expected = model.predict(inputs)
    said = []
    for name, converter in converters.items():
        try:
            off = np.abs(np.reshape(converter(model), expected.shape) - expected).reshape(len(inputs), -1).max(axis=1)
        except treelite.TreeliteError:
            said.append(f"{name} raises")
            continue
        said.append(f"{name} {(off > 1e-4).mean():.0%} by {off.max():.2f}")
        if off.max() > 1e-4:
            wrong.add((kind, name))
    print(f"{kind}: {', '.join(said)}")
as_seen = {("rf, multiclass", "lleaves"), ("linear_tree", "lleaves")}
sys.exit(0 if wrong == as_seen else 1)
PYTHON
cd "$folder"
venv/bin/python -W ignore kinds.py | grep -v '^\[LightGBM\]'
