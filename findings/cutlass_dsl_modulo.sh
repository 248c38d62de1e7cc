#!/usr/bin/env bash
# In CUTLASS's Python DSL, `%` of a negative number is C's at run time and Python's at compile time; `//` is Python's.
#
# So one line gives two answers: `(stage - 1) % stages`, the stage before in a ring of buffers, is -1 at stage 0 where
# `stage` is an Int32, and the last stage where it is a constant. Division (`//`) rounds down in both, so at run time
# `a // b * b + a % b` is not `a`. Floats differ, too. Nothing warns. Add the divisor before the remainder is taken:
# `(stage + stages - 1) % stages`.
#
# Needs no GPU: functions of the host run on the CPU. Seen with nvidia-cutlass-dsl 4.8.1, NumPy 2.4.6, CPython 3.11.7,
# 2026-11-29:
#     (0 - 1) % 4: run time -1, compile time 3
#     -7 // 2: run time -4, compile time -4
#     -7 // 2 * 2 + -7 % 2: run time -9, compile time -7
#     -7.5 % 2.0: run time -1.5, compile time 0.5
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check nvidia-cutlass-dsl==4.8.1 numpy==2.4.6
cat > "$folder/modulo.py" <<'PYTHON'
import importlib.metadata
import platform
import sys

import cutlass
import numpy as np
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack


def expressions(stage, stages, a, b, x, y):
    return (stage - 1) % stages, a // b, a // b * b + a % b, x % y


@cute.jit
def at_run_time(results: cute.Tensor, stage: Int32, stages: Int32, a: Int32, b: Int32, x: Float32, y: Float32):
    for place, value in enumerate(expressions(stage, stages, a, b, x, y)):
        results[place] = Float32(value)


@cute.jit
def at_compile_time(results: cute.Tensor, numbers: Constexpr):
    for place, value in enumerate(expressions(*numbers)):
        results[place] = Float32(value)


numbers = 0, 4, -7, 2, -7.5, 2.0
run, compiled = np.zeros((2, 4), np.float32)
at_run_time(from_dlpack(run), *numbers)
at_compile_time(from_dlpack(compiled), numbers)
names = "nvidia-cutlass-dsl", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
for text, first, second in zip(
    ("(0 - 1) % 4", "-7 // 2", "-7 // 2 * 2 + -7 % 2", "-7.5 % 2.0"), run.tolist(), compiled.tolist(), strict=True
):
    print(f"{text}: run time {first:g}, compile time {second:g}")
right = np.array_equal(compiled, expressions(*numbers))
sys.exit(0 if right and (run == compiled).tolist() == [False, True, False, False] else 1)
PYTHON
TMPDIR=$folder "$folder/venv/bin/python" "$folder/modulo.py"
