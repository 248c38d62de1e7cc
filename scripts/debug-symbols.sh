#!/usr/bin/env bash
# A wheel in dist/ and the debug information of its libraries in dist/debug, with variables and types; the wheels of
# other builds have functions and lines. For gdb: set debug-file-directory dist/debug
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
rm -rf dist/debug
python -m pip wheel -q --no-deps --no-build-isolation -w dist \
  -C build-dir=build/debug-symbols -C cmake.define.CUDASCHED_DEBUG_INFO=2 .
python scripts/debug_symbols.py build/debug-symbols dist/debug
