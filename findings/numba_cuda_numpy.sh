#!/usr/bin/env bash
# numba-cuda compiles no kernel with NumPy 2.5, although both install together and import.
#
# Its copy of Numba's support of NumPy asks for `numpy.row_stack`, which NumPy 2.5 removed; Numba itself asks only where
# there is one. numba-cuda names no bound for NumPy, so pip chooses 2.5 and finds nothing to complain about. The module
# is read when the first kernel is compiled, so a program fails there, not at its imports. Pin `numpy<2.5`, or give NumPy
# a `row_stack` before the first kernel.
#
# Needs no GPU: it fails before it looks for one. Seen with numba-cuda 0.30.4, Numba 0.68.1, NumPy 2.5.5,
# CPython 3.12.1, 2026-11-29:
#     Numba's own vstack: [[1.0, 1.0], [1.0, 1.0]]
#     a CUDA kernel: AttributeError: module 'numpy' has no attribute 'row_stack'
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in python3.14 python3.13 python3.12 python3; do # NumPy 2.5 wants 3.12
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && break
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numba-cuda==0.30.4 numba==0.68.1 numpy==2.5.5
"$folder/venv/bin/pip" check -q
cat > "$folder/kernel.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import numba
import numpy as np
from numba import cuda, float32


def fill(values, value):
    values[cuda.grid(1)] = value


@numba.njit
def twice(values):
    return np.vstack((values, values))


versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numba-cuda", "numba", "numpy")]
print(", ".join([*versions, f"Python {platform.python_version()}"]))
print("Numba's own vstack:", twice(np.ones(2)).tolist())
try:
    cuda.compile_ptx(fill, (float32[::1], float32), cc=(9, 0))
except AttributeError as error:
    print(f"a CUDA kernel: AttributeError: {error}")
    sys.exit(0 if "row_stack" in str(error) else 1)
sys.exit(1)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/kernel.py"
