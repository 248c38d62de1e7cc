#!/usr/bin/env bash
# A wheel in dist/ for the Python of .venv (PYTHON=python3.12 makes that with another), tagged manylinux_2_34.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_requirements "$venv" release
rm -rf build/wheel
python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
python scripts/manylinux.py build/wheel/cudasched-*.whl dist
