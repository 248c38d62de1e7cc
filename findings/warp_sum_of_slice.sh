#!/usr/bin/env bash
# Warp's `array_sum` and `array_inner` take other elements than those of a slice: they ignore its strides.
#
# A slice with a step, or some columns of a matrix, is a view: an array that is not contiguous. Both functions say that
# they process the entire array. They take as many elements as the view has, from its first on, one behind the other in
# memory. Along an axis they keep to the strides, as `array_scan` does with one dimension, and a sort refuses such an
# array. These two raise nothing, and the answer is a plausible number. Pass `view.contiguous()`.
#
# Needs no GPU. Seen with warp-lang 1.19.0, NumPy 2.4.6, CPython 3.11.7, 2026-11-29:
#     every second of 1 to 10: array_sum 15, NumPy 25, of contiguous copies 25
#     its inner product with itself: array_inner 55, NumPy 165, of contiguous copies 165
#     two columns of a matrix: array_sum 27, NumPy 39, of contiguous copies 39
#     the same along an axis: array_sum 18 and 21, NumPy 18 and 21
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check warp-lang==1.19.0 numpy==2.4.6
cat > "$folder/sums.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import numpy as np
import warp
from warp.utils import array_inner, array_sum

warp.config.log_level = warp.LOG_ERROR  # else it says which devices it found
warp.config.kernel_cache_dir = sys.argv[1]
line = np.arange(1, 11, dtype=np.float32)
grid = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
half = warp.array(line, device="cpu")[::2]
columns = warp.array(grid, device="cpu")[:, 1:3]
along = array_sum(columns, axis=0).numpy().ravel()
print(f"warp-lang {importlib.metadata.version('warp-lang')}, NumPy {np.__version__}, Python {platform.python_version()}")
cases = {
    "every second of 1 to 10: array_sum": (array_sum, (half,), line[::2].sum()),
    "its inner product with itself: array_inner": (array_inner, (half, half), line[::2] @ line[::2]),
    "two columns of a matrix: array_sum": (array_sum, (columns,), grid[:, 1:3].sum()),
}
wrong = right = 0
for name, (function, views, wanted) in cases.items():
    got, copied = function(*views), function(*(view.contiguous() for view in views))
    print(f"{name} {got:.0f}, NumPy {wanted:.0f}, of contiguous copies {copied:.0f}")
    wrong += got != wanted
    right += copied == wanted
wanted = grid[:, 1:3].sum(axis=0)
print("the same along an axis: array_sum {:.0f} and {:.0f}, NumPy {:.0f} and {:.0f}".format(*along, *wanted))
sys.exit(0 if wrong == right == 3 and np.array_equal(along, wanted) else 1)
PYTHON
"$folder/venv/bin/python" "$folder/sums.py" "$folder/cache"
