#!/usr/bin/env bash
# Kernel Tuner does not call the restrictions it is given: it reads them again from the source, and loses parts of them.
#
# A lambda in a list ends for it with its first line where no bracket of its own is open, so of a condition that goes on
# with `and` below, one half counts. Of a function that has a lambda inside, it takes that lambda alone: here its
# product, which is never 0, so every configuration passes. Of this it says nothing; configurations that are not allowed
# are tuned, and may win. Put the body of a lambda in parentheses, and have no lambda within a function.
#
# Seen with kernel-tuner 1.5.0, python-constraint2 2.9.0, NumPy 2.4.6, CPython 3.11.7, Linux 6.18, 2026-11-28:
#     a lambda of two lines: 25 tuned, 10 allowed
#     the same in parentheses: 10 tuned, 10 allowed
#     a function with a lambda: 35 tuned, 25 allowed
#     the same without one: 25 tuned, 25 allowed
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  kernel-tuner==1.5.0 python-constraint2==2.9.0 numpy==2.4.6 scipy==1.17.1 pandas==3.1.1
cat > "$folder/tune.py" <<'PYTHON'
import contextlib
import importlib.metadata
import io
import itertools
import json
import platform
import sys

import kernel_tuner

two_lines = [
    lambda p: p["x"] * p["y"] <= 64
    and p["x"] >= 8,
]
in_parentheses = [
    lambda p: (p["x"] * p["y"] <= 64
    and p["x"] >= 8),
]


def with_lambda(p):
    threads = lambda q: q["x"] * q["y"]
    return threads(p) <= 64


def without_lambda(p):
    return p["x"] * p["y"] <= 64


cases = {"a lambda of two lines": two_lines, "the same in parentheses": in_parentheses}
cases |= {"a function with a lambda": with_lambda, "the same without one": without_lambda}
values = {"x": [1, 2, 4, 8, 16, 32, 64], "y": [1, 2, 4, 8, 16]}
every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
took = {"time": 1.0, "times": [1.0], "timestamp": "2026-01-01 00:00:00+00:00"}
took |= dict.fromkeys(("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"), 0.0)
cache = {"device_name": "none", "kernel_name": "k", "problem_size": [1], "objective": "time"}
cache |= {"tune_params_keys": list(values), "tune_params": values}
cache["cache"] = {f"{one['x']},{one['y']}": one | took for one in every}
counts = {}
for name, restrictions in cases.items():
    path = f"{sys.argv[1]}/{name}.json"
    with open(path, "w") as file:
        json.dump(cache, file)
    with contextlib.redirect_stdout(io.StringIO()):
        options = {"lang": "CUDA", "cache": path, "simulation_mode": True, "quiet": True}
        source = 'extern "C" __global__ void k() {}'
        tuned, _ = kernel_tuner.tune_kernel("k", source, [1], [], values, restrictions=restrictions, **options)
    allowed = restrictions if callable(restrictions) else restrictions[0]
    counts[name] = len(tuned), sum(map(allowed, every))
packages = "kernel-tuner", "python-constraint2", "numpy"
versions = [f"{one} {importlib.metadata.version(one)}" for one in packages]
print(", ".join([*versions, f"Python {platform.python_version()}"]))
for name, (number, wanted) in counts.items():
    print(f"{name}: {number} tuned, {wanted} allowed")
cut, whole, inner, plain = (number > wanted for number, wanted in counts.values())
sys.exit(0 if cut and inner and not whole and not plain else 1)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/tune.py" "$folder"
