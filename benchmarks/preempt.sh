#!/usr/bin/env bash
# Measures what benchmarks/results/preempt.json holds, on as many GPUs as there are (python -m benchmarks spread preempt):
#
#     LIMIT_S=590 benchmarks/preempt.sh OUT [OPTION...]      # options of the benchmark: --scene eager --lengths 1,300
#     DRY=1 benchmarks/preempt.sh OUT [OPTION...]            # only says what it would run
#
# OUT/preempt.cells has what is done, and another run goes on from there, on any number of GPUs. OUT/log has what all say.
# NAME=preempt_ablation names another file, for --scene ablation. COMMIT may be set where there is no clone to ask, and
# PYTHON. The scene main takes 9 minutes on four GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
limit=${LIMIT_S:-590}
printf -v minutes '%d.%02d' $((limit / 60)) $((limit % 60 * 100 / 60))
command=("${PYTHON:-python3}" -m benchmarks spread preempt --out "$out/${NAME:-preempt}.json" --minutes "$minutes"
  ${COMMIT:+--commit "$COMMIT"} "$@")
if [ -n "${DRY:-}" ]; then
  echo "${command[@]}"
  exit
fi
mkdir -p "$out"
"${command[@]}" 2>&1 | tee -a "$out/log"
