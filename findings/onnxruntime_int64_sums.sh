#!/usr/bin/env bash
# ONNX Runtime sums 64-bit integers as doubles from version 1.27 on; 1.26 is exact.
#
# By ONNX, ReduceSum takes int64 and gives the sum in int64, and ONNX's own evaluator is exact. On the CPU the sum now has
# 53 bits, and one past 63 bits becomes the largest int64, where it wrapped around. So a time in nanoseconds or a hash
# that a mask picks out of zeros, as in `(times * mask).sum()`, comes back as another one. So does a product of
# ReduceProd. Nothing is raised or warned of. ReduceMax, CumSum, and MatMul with a column of ones are exact.
#
# Seen with onnxruntime 1.26.0, 1.27.0 and 1.32.0, onnx 1.23.2, NumPy 2.4.6, CPython 3.11.7, 2026-11-29, each with the
# time 1764451234567890123 as the answer:
#     onnxruntime 1.26.0 is off by: ReduceSum 0, ReduceProd 0, ReduceMax 0, CumSum 0, MatMul 0
#     onnxruntime 1.27.0 is off by: ReduceSum 53, ReduceProd 53, ReduceMax 0, CumSum 0, MatMul 0
#     onnxruntime 1.32.0 is off by: ReduceSum 53, ReduceProd 53, ReduceMax 0, CumSum 0, MatMul 0
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/sums.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

time = 1764451234567890123
axis, ones = np.array([1], np.int64), np.ones((3, 1), np.int64)
cases = {
    "ReduceSum": ([0, time, 0], axis),
    "ReduceProd": ([1, time, 1], axis),
    "ReduceMax": ([0, time, 0], axis),
    "CumSum": ([0, time, 0], axis[0]),
    "MatMul": ([0, time, 0], ones),
}
names = "onnxruntime", "onnx", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
off = {}
for operator, (values, second) in cases.items():
    row = np.array([values], np.int64)
    graph = helper.make_graph(
        [helper.make_node(operator, ["row", "second"], ["result"])],
        "graph",
        [helper.make_tensor_value_info("row", TensorProto.INT64, [1, 3])],
        [helper.make_tensor_value_info("result", TensorProto.INT64, ["rows", "columns"])],
        [numpy_helper.from_array(second, "second")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    programs = onnxruntime.InferenceSession(model.SerializeToString()), ReferenceEvaluator(model)
    seen, evaluated = (int(program.run(None, {"row": row})[0][0, -1]) for program in programs)
    assert evaluated == time, evaluated
    off[operator] = seen - time
print(f"onnxruntime {onnxruntime.__version__} is off by: {', '.join(f'{name} {by}' for name, by in off.items())}")
wrong = [name for name, by in off.items() if by]
sys.exit(0 if wrong == ([] if onnxruntime.__version__ == "1.26.0" else ["ReduceSum", "ReduceProd"]) else 1)
PYTHON
for version in 1.26.0 1.27.0 1.32.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q --disable-pip-version-check "onnxruntime==$version" onnx==1.23.2 numpy==2.4.6
  "$folder/$version/bin/python" "$folder/sums.py"
done
