#!/usr/bin/env bash
# tl2cgen adds the first target's base score to every target of a model.
#
# XGBoost 3 fits a base score to each target, and predictions start there. treelite keeps all of them, and its own
# evaluator answers what XGBoost does. In the code that tl2cgen makes of the same treelite model, all targets start at
# the first one's score; nothing is raised. (It remarks that the model is of a newer treelite than its own, 4.1.2, but
# base scores given to the model builder of 4.1.2 are lost as well.) Classes keep their scores: it is targets alone.
# Train with `base_score=0`, or one model for each target.
#
# Needs gcc. Seen with tl2cgen 1.0.0, treelite 4.8.1 and 4.1.2, xgboost-cpu 3.2.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-29:
#     XGBoost 10.15 101.52 -10.15, treelite 10.15 101.52 -10.15, tl2cgen 10.15 12.65 9.60
#     with base_score=0: XGBoost 10.04 100.44 -10.04, treelite 10.04 100.44 -10.04, tl2cgen 10.04 100.44 -10.04
#     base scores 1 20 300, built with treelite 4.1.2: treelite 1 20 300, tl2cgen 1 1 1
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.8.1 4.1.2; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q --disable-pip-version-check \
    tl2cgen==1.0.0 "treelite==$version" numpy==2.4.6 scipy==1.17.1
done
"$folder/4.8.1/bin/pip" install -q --disable-pip-version-check xgboost-cpu==3.2.0
cat > "$folder/targets.py" <<'PYTHON'
import importlib.metadata
import os
import platform
import sys

import numpy as np
import tl2cgen
import treelite
from treelite.model_builder import Metadata, ModelBuilder, PostProcessorFunc, TreeAnnotation

folder = sys.argv[1]
names = ["tl2cgen", "treelite", "numpy"] + ["xgboost-cpu"] * (treelite.__version__ == "4.8.1")
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))


def both(name, model, inputs):
    """What treelite and the code of tl2cgen answer, a row for each of the inputs."""
    library = os.path.join(folder, f"{name}.so")
    tl2cgen.export_lib(model, toolchain="gcc", libpath=library, params={})
    compiled = tl2cgen.Predictor(library, nthread=1).predict(tl2cgen.DMatrix(inputs, dtype="float32"))
    return treelite.gtil.predict(model, inputs).reshape(-1, 3), compiled.reshape(-1, 3)


def text(row):
    return " ".join(f"{value:.2f}".removesuffix(".00") for value in row)


if treelite.__version__ == "4.8.1":
    import xgboost

    inputs = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    data = xgboost.DMatrix(inputs, (inputs[:, :1] + 10) * (1, 10, -1))
    wrong = []
    for name, parameters in {"": {}, "with base_score=0: ": {"base_score": 0}}.items():
        booster = xgboost.train({"nthread": 1, "max_depth": 3} | parameters, data, 15)
        wanted = booster.predict(data)
        evaluated, compiled = both(f"trained{len(wrong)}", treelite.frontend.from_xgboost(booster), inputs)
        print(f"{name}XGBoost {text(wanted[0])}, treelite {text(evaluated[0])}, tl2cgen {text(compiled[0])}")
        wrong.append([not np.allclose(one, wanted, atol=1e-3) for one in (evaluated, compiled)])
    sys.exit(0 if wrong == [[False, True], [False, False]] else 1)

builder = ModelBuilder(
    threshold_type="float32",
    leaf_output_type="float32",
    metadata=Metadata(
        num_feature=1,
        task_type="kRegressor",
        average_tree_output=False,
        num_target=3,
        num_class=[1, 1, 1],
        leaf_vector_shape=(1, 1),
    ),
    tree_annotation=TreeAnnotation(num_tree=3, target_id=[0, 1, 2], class_id=[0, 0, 0]),
    postprocessor=PostProcessorFunc("identity"),
    base_scores=[1.0, 20.0, 300.0],
)
for _ in range(3):  # each a single leaf of 0
    builder.start_tree()
    builder.start_node(0)
    builder.leaf(0.0)
    builder.end_node()
    builder.end_tree()
evaluated, compiled = both("built", builder.commit(), np.zeros((1, 1), np.float32))
name = f"base scores 1 20 300, built with treelite {treelite.__version__}"
print(f"{name}: treelite {text(evaluated[0])}, tl2cgen {text(compiled[0])}")
sys.exit(0 if evaluated.tolist() == [[1, 20, 300]] and compiled.tolist() == [[1, 1, 1]] else 1)
PYTHON
for version in 4.8.1 4.1.2; do
  "$folder/$version/bin/python" -W ignore "$folder/targets.py" "$folder" | grep -v '^\[.*Parallel compilation'
done
