#!/usr/bin/env bash
# clang-tidy (.clang-tidy) over the sources that are named, or all of csrc, with the flags of a build tree of its own.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
python -m pip install -q 'clang-tidy==18.*'
cmake -S . -B build/tidy -G Ninja -DPython_EXECUTABLE="$venv/bin/python" -DCUDASCHED_BENCHMARKS=OFF >/dev/null
ninja -C build/tidy -j "$jobs" --quiet cudasched_shim # for the headers it generates
if [ "$#" -gt 0 ]; then printf '%s\n' "$@"; else find csrc -name '*.cpp' -o -name '*.c' | sort; fi |
  xargs -P "$jobs" -n 1 clang-tidy -p build/tidy --quiet --warnings-as-errors='*'
