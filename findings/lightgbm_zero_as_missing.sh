#!/usr/bin/env bash
# treelite and onnxmltools read LightGBM's models of `zero_as_missing` as if zeros were plain numbers.
#
# With that option LightGBM takes zeros for missing values, and sends them to the side that a split has learned for these;
# the model file says so at each split (missing type "Zero"). Both read the file, and raise for some other things that
# they do not convert, but zeros go where a comparison with the threshold sends them; in treelite, NaN as well. No error,
# no warning, and rows without a zero are right. lleaves reads the file as LightGBM does (here with llvmlite 0.44). With
# NaN for missing values, LightGBM's default, all agree: make NaN of the zeros, and train without the option.
#
# Seen with lightgbm 4.7.0, treelite 4.8.1, onnxmltools 1.16.0, onnxruntime 1.32.0, lleaves 1.3.0, llvmlite 0.44.0,
# NumPy 2.4.6, CPython 3.11.7, 2026-11-29:
#     zero_as_missing, asked zeros: rows off, by at most: treelite 23% by 4.5, ONNX 23% by 4.5, lleaves 0% by 0.0
#     zero_as_missing, asked NaN: rows off, by at most: treelite 23% by 4.5, ONNX 0% by 0.0, lleaves 0% by 0.0
#     NaN as missing: rows off, by at most: treelite 0% by 0.0, ONNX 0% by 0.0, lleaves 0% by 0.0
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check lightgbm==4.7.0 treelite==4.8.1 onnxmltools==1.16.0 \
  skl2onnx==1.20.0 onnx==1.23.2 onnxruntime==1.32.0 lleaves==1.3.0 llvmlite==0.44.0 numpy==2.4.6 scipy==1.17.1
cat > "$folder/zeros.py" <<'PYTHON'
import importlib.metadata
import os
import platform
import sys

import lightgbm
import lleaves
import numpy as np
import onnxmltools
import onnxruntime
import treelite
from onnxmltools.convert.common.data_types import FloatTensorType

names = "lightgbm", "treelite", "onnxmltools", "onnxruntime", "lleaves", "llvmlite", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
chance = np.random.default_rng(0)
zeros = chance.normal(size=(2000, 3)).astype(np.float32)
zeros[chance.random(zeros.shape) < 0.2] = 0
values = np.where(zeros[:, 0] == 0, -5, 3 * zeros[:, 0]) + zeros[:, 1]
nans = np.where(zeros == 0, np.nan, zeros)
path = os.path.join(sys.argv[1], "model.txt")
wrong = {}
for name, option, trained, asked in (
    ("zero_as_missing, asked zeros", True, zeros, zeros),
    ("zero_as_missing, asked NaN", True, zeros, nans),
    ("NaN as missing", False, nans, nans),
):
    settings = {"zero_as_missing": option, "max_depth": 4, "num_threads": 1, "verbose": -1}
    booster = lightgbm.train(settings, lightgbm.Dataset(trained, values), 20)
    wanted = booster.predict(asked)
    booster.save_model(path)
    converted = onnxmltools.convert_lightgbm(booster, initial_types=[("inputs", FloatTensorType([None, 3]))])
    compiled = lleaves.Model(model_file=path)
    compiled.compile()
    answers = {
        "treelite": treelite.gtil.predict(treelite.frontend.load_lightgbm_model(path), asked.astype(float), nthread=1),
        "ONNX": onnxruntime.InferenceSession(converted.SerializeToString()).run(None, {"inputs": asked})[0],
        "lleaves": compiled.predict(asked.astype(float), n_jobs=1),
    }
    said = []
    for tool, answer in answers.items():
        off = np.abs(answer.ravel() - wanted)
        said.append(f"{tool} {(off > 0.001).mean():.0%} by {off.max():.1f}")
        wrong.setdefault(name, []).append(bool(off.max() > 0.001))
        if name.endswith("zeros"):
            assert off[(zeros != 0).all(axis=1)].max() < 0.001
    print(f"{name}: rows off, by at most: {', '.join(said)}")
sys.exit(0 if list(wrong.values()) == [[True, True, False], [True, False, False], [False] * 3] else 1)
PYTHON
XDG_CACHE_HOME=$folder "$folder/venv/bin/python" -W ignore "$folder/zeros.py" "$folder"
