#!/usr/bin/env bash
# Measures what benchmarks/results/preempt.json holds, on as many GPUs as there are, each with a part of the pairs and cores of
# its own:
#
#     LIMIT_S=590 benchmarks/preempt.sh OUT [OPTION...]      # options of benchmarks.preempt: --scene eager --lengths 1,300
#     DRY=1 benchmarks/preempt.sh OUT [OPTION...]            # only says what it would run
#
# OUT/preempt.cells has what is done, and another run goes on from there, on any number of GPUs; a run that was killed leaves
# OUT/preempt-*.cells, which the next one takes over. OUT/log has what all say. NAME=preempt_ablation names another file, for
# --scene ablation. LIMIT_S counts from the start of this script. COMMIT may be set where there is no clone to ask, and
# PYTHON. The scene main takes 9 minutes on four GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/gpus.sh

[ $# -ge 1 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
name=${NAME:-preempt}
python=${PYTHON:-python3}
limit=${LIMIT_S:-590}

begin_on_gpus "$out"

# merge: puts all cells in OUT together in OUT/NAME.json and .cells; what the parts had is in there then.
merge() {
  local parts=()
  for part in "$out/$name.cells" "$out/$name"-[0-9]*.cells; do [ ! -f "$part" ] || parts+=("$part"); done
  [ ${#parts[@]} -gt 0 ] || return 0
  "$python" -m benchmarks.preempt merge --out "$out/$name.json" "${parts[@]}" || return
  rm -f "$out/$name"-[0-9]*
}

if [ -z "${DRY:-}" ]; then
  merge >>"$out/log"
  for i in "${!gpus[@]}"; do [ ! -f "$out/$name.cells" ] || cp "$out/$name.cells" "$out/$name-$((i + 1)).cells"; done
fi
status=0
on_each_gpu "$out/$name" benchmarks.preempt --limit-s "$((limit - SECONDS))" "$@" || status=$?
[ -z "${DRY:-}" ] || exit 0
merge || status=$?
exit "$status"
