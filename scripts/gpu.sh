#!/usr/bin/env bash
# On a machine with a GPU, and with PyTorch in the Python that $PYTHON names (python3): builds the tree, installs it there, and
# runs the GPU tests or a command. Nothing is looked up on a network: what that Python lacks is installed from the wheels in
# the directory that $WHEELS names.
#
#     scripts/gpu.sh                                  # the GPU tests, 5 minutes on an H200
#     scripts/gpu.sh python -m benchmarks run core
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
install=("$python" -m pip install -q --no-index --disable-pip-version-check)
if [ -n "${WHEELS:-}" ]; then "${install[@]}" --no-deps "$WHEELS"/*.whl; fi
CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" "${install[@]}" --no-deps --no-build-isolation .
[ $# -eq 0 ] || exec "$@"

# The regions' file takes longest, and begins first; all else is handed out one by one. Then the ones that need the GPU for
# themselves: one fills it, and beside others that never leave it idle, best effort has other slices and hardly runs.
first=tests/gpu/test_gpu_torch_regions.py
alone=(
  tests/gpu/test_gpu_memory.py::test_a_latency_client_gets_memory_that_a_training_uses
  tests/gpu/test_gpu_time_slices.py::test_libcudas_own_is_replaced_and_stays_so
  tests/gpu/test_gpu_tune.py::test_a_training_pauses_while_a_quiet_tuner_samples_and_runs_in_between
)
others=()
for file in tests/gpu/test_*.py; do [ "$file" = "$first" ] || others+=("$file"); done
status=0
"$python" -m pytest -n 8 --maxschedchunk 1 "${alone[@]/#/--deselect=}" "$first" "${others[@]}" || status=$?
"$python" -m pytest "${alone[@]}" || status=$?
exit "$status"
