#!/usr/bin/env bash
# clang-tidy (.clang-tidy) over every source file of csrc, with the flags of a build tree of its own; with --changed over
# the lines that differ from `main` (scripts/changed.py).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
options=()
if [ "${1:-}" = --changed ]; then
  mapfile -t sources < <(python scripts/changed.py sources)
  [ "${sources[*]}" != "" ] || exit 0
  options=("--line-filter=$(python scripts/changed.py lines)")
else
  mapfile -t sources < <(find csrc -name '*.cpp' -o -name '*.c' | sort)
fi
python -m pip install -q 'clang-tidy==18.*'
cmake -S . -B build/tidy -G Ninja -DPython_EXECUTABLE="$venv/bin/python" -DCUDASCHED_BENCHMARKS=OFF >/dev/null
ninja -C build/tidy -j "$jobs" --quiet cudasched_shim # for the headers it generates
printf '%s\n' "${sources[@]}" |
  xargs -P "$jobs" -n 1 clang-tidy -p build/tidy --quiet --warnings-as-errors='*' "${options[@]}"
