#!/usr/bin/env bash
# Measures what benchmarks/results/host_bound.json holds, on as many GPUs as there are, each with a part of the servers and
# cores of its own:
#
#     LIMIT_S=590 benchmarks/host_bound.sh OUT [OPTION...]     # options of benchmarks.host_bound: --only bert_eager
#     DRY=1 benchmarks/host_bound.sh OUT                       # only says what it would run
#
# OUT/*.cells has what is done, and another run on as many GPUs goes on from there; it is put together in
# OUT/host_bound.json. COMMIT may be set where there is no clone to ask, and PYTHON. 66 minutes on one GPU, half of that
# on two.
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/gpus.sh

[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
python=${PYTHON:-python3}

begin_on_gpus "$out"
status=0
on_each_gpu "$out/host_bound" benchmarks.host_bound --no-plots --limit-s "${LIMIT_S:-590}" "$@" || status=$?
[ -z "${DRY:-}" ] || exit 0
"$python" -m benchmarks.host_bound merge --out "$out/host_bound.json" "$out"/host_bound-[0-9]*.cells || status=$?
exit "$status"
