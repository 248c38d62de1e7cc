#!/usr/bin/env bash
# A DART model that XGBoost 3.4 saves gives other predictions in XGBoost 3.2, without a word.
#
# Dropout gives each tree a weight. 3.2 names the file's booster "dart" and has the weights beside it; 3.4 names it
# "gbtree" and has them among that model's fields, which 3.2 does not look at. It loads the file, raises and warns
# nothing, and counts every tree in full. (It misreads 3.3's file, too, and 3.3 that of 3.4.) Only files of older
# versions are promised to load, but pip gives 3.2.0 to a machine with Python 3.11, and 3.4 to one with a newer Python.
# Update what predicts first, or put the booster of the JSON file back to the older form, as below: that is exact.
#
# Seen with xgboost-cpu 3.4.1 and 3.2.0, NumPy 2.4.6, CPython 3.12.1, Linux 6.18, 2026-11-28:
#     predictions of 3.4.1: 10.30, 9.17, 10.21
#     of 3.2.0 with the same file: 9.27, 6.35, 9.18; 0 warnings
#     farthest off: 8.86; with the booster put back: 0.00
# Exit code 1: it is so no more.
set -euo pipefail
python=
for each in python3 python3.{14,13,12} "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
  if "$each" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then python=$each && break; fi
done
if [ -z "$python" ]; then
  echo "XGBoost 3.4 needs Python 3.12" >&2
  exit 2
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 3.4.1 3.2.0; do
  "$python" -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q --disable-pip-version-check \
    "xgboost-cpu==$version" numpy==2.4.6 scipy==1.17.1
done
cat > "$folder/model.py" <<'PYTHON'
import json
import os
import platform
import sys
import warnings

import numpy
import xgboost

verb, folder = sys.argv[1:]
saved, restored, expected = (os.path.join(folder, name) for name in ("saved.json", "restored.json", "expected.npy"))
random = numpy.random.default_rng(0)
inputs = random.normal(size=(300, 4))
data = xgboost.DMatrix(inputs, label=10 + 2 * inputs[:, 0] + inputs[:, 1] ** 2)
if verb == "train":
    booster = xgboost.train({"booster": "dart", "rate_drop": 0.3, "seed": 1, "nthread": 1}, data, 20)
    booster.save_model(saved)
    numpy.save(expected, booster.predict(data))
    with open(saved) as file:
        model = json.load(file)
    inner = model["learner"]["gradient_booster"]
    weights = inner["model"].pop("weight_drop", None)
    model["learner"]["gradient_booster"] = {"name": "dart", "gbtree": inner, "weight_drop": weights}
    with open(restored, "w") as file:
        json.dump(model, file)
    sys.exit(0)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    seen = [xgboost.Booster(model_file=path).predict(data) for path in (saved, restored)]
wanted = numpy.load(expected)
off, off_restored = (float(numpy.abs(one - wanted).max()) for one in seen)
first, of_old = (", ".join(f"{value:.2f}" for value in values[:3]) for values in (wanted, seen[0]))
print(f"xgboost-cpu 3.4.1 and {xgboost.__version__}, NumPy {numpy.__version__}, Python {platform.python_version()}")
print(f"predictions of 3.4.1: {first}")
print(f"of {xgboost.__version__} with the same file: {of_old}; {len(warned)} warnings")
print(f"farthest off: {off:.2f}; with the booster put back: {off_restored:.2f}")
sys.exit(0 if off > 0.1 and off_restored < 0.001 and not warned else 1)
PYTHON
"$folder/3.4.1/bin/python" -W ignore "$folder/model.py" train "$folder"
"$folder/3.2.0/bin/python" "$folder/model.py" load "$folder"
