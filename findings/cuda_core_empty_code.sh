#!/usr/bin/env bash
# cuda.core's `Program.compile` returns object code of 0 bytes, as if it had compiled, where the options make another kind.
#
# The target "ltoir" alone gives no LTO IR: the program needs `link_time_optimization=True` as well, and with that option
# the target "cubin" is empty. A virtual architecture (compute_90) has an empty cubin, too. NVRTC documents that it says
# 0 for the size of a kind that it has not made; cuda.core reads the size, and raises, warns and logs nothing. A program
# cache keeps the empty code for later runs. The error comes from the linker or the driver, which name neither the
# program nor the option. Check `len(code.code)` after each compilation.
#
# Needs no GPU. Seen with cuda-core 1.2.2, cuda-bindings 13.5.0, nvidia-cuda-nvrtc 13.5.37, nvidia-nvjitlink 13.5.37,
# CPython 3.11.7, 2026-11-29:
#     ltoir, sm_90: 0 bytes; again, from the cache: 0
#     ltoir, sm_90, link_time_optimization: 2244 bytes; again, from the cache: 2244
#     cubin, sm_90: 3440 bytes; again, from the cache: 3440
#     cubin, sm_90, link_time_optimization: 0 bytes; again, from the cache: 0
#     cubin, compute_90: 0 bytes; again, from the cache: 0
#     0 warnings, log ''
#     the first, linked: nvJitLinkError: ERROR_INVALID_INPUT (3)
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  cuda-core==1.2.2 cuda-bindings==13.5.0 nvidia-cuda-nvrtc==13.5.37 nvidia-nvjitlink==13.5.37 numpy==2.4.6
cat > "$folder/compile.py" <<'PYTHON'
import importlib.metadata
import io
import platform
import sys
import warnings

from cuda.core import Linker, LinkerOptions, Program, ProgramOptions
from cuda.core.utils import InMemoryProgramCache

names = "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nvjitlink"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
source = 'extern "C" __global__ void twice(float* values) { values[threadIdx.x] *= 2; }'
lto = {"link_time_optimization": True}
cases = ("ltoir", "sm_90", {}), ("ltoir", "sm_90", lto), ("cubin", "sm_90", {}), ("cubin", "sm_90", lto)
log, cache, codes = io.StringIO(), InMemoryProgramCache(), []
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for target, arch, options in (*cases, ("cubin", "compute_90", {})):
        program = Program(source, "c++", ProgramOptions(arch=arch, **options))
        codes.append(program.compile(target, logs=log, cache=cache))
        again = len(program.compile(target, cache=cache).code)
        print(f"{', '.join([target, arch, *options])}: {len(codes[-1].code)} bytes; again, from the cache: {again}")
print(f"{len(warned)} warnings, log {log.getvalue()!r}")
try:
    Linker(codes[0], options=LinkerOptions(arch="sm_90", link_time_optimization=True)).link("cubin")
except Exception as error:
    print(f"the first, linked: {type(error).__name__}: {error}")
empty = [not code.code for code in codes]
sys.exit(0 if empty == [True, False, False, True, True] and not warned and not log.getvalue() else 1)
PYTHON
"$folder/venv/bin/python" "$folder/compile.py"
