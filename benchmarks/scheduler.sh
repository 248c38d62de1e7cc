#!/usr/bin/env bash
# Measures all that benchmarks/results/scheduler.json holds, on as many GPUs as there are, and puts it together:
#
#     benchmarks/scheduler.sh OUT [PART...]        # OUT/scheduler.json, and plots; 8 minutes on 4 H200s, 30 on one
#     DRY=1 benchmarks/scheduler.sh OUT            # only says what it would run
#
# Parts, all by default: resnet50 transformer four decode gemm elementwise periodic offload. Each GPU takes one, and the next
# ones begin together when all are done: programs that start disturb what is measured beside them. OUT/PART.cells has what
# is done, and another run goes on from there. REPEATS (5) and SECONDS_EACH (4; 6 with several clients, and for decode) may
# be set, LIMIT_S after which no cell begins, COMMIT where there is no clone to ask, and PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/gpus.sh

[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
[ $# -ge 1 ] || set -- resnet50 transformer four decode gemm elementwise periodic offload
python=${PYTHON:-python3}
repeats=${REPEATS:-5}
began=$SECONDS

managed=cudasched_two_processes,cudasched_mps,cudasched_one_process
hinted=${managed//,/_hint,}_hint
slack=${managed//,/_slack,}_slack
arms=latency_alone,best_effort_alone,processes,$managed

# What measures a part.
options() {
  case $1 in
    transformer) echo --best-effort transformer --arms "$arms,latency_alone_hint,$hinted" ;;
    resnet50) echo --best-effort resnet50 --arms "$arms,latency_alone_hint,$hinted,best_effort_alone_hooked" ;;
    gemm | elementwise) echo --best-effort "$1" --arms "$arms,${hinted//,/:1,}:1" ;;  # once, for the bound
    periodic) echo --best-effort gemm --arrivals periodic --rate 30 --arms "latency_alone,best_effort_alone,$managed" ;;
    offload) echo --best-effort bert_training --arms best_effort_alone,best_effort_alone_hooked ;;
    decode) echo --latency gpt_decode --best-effort transformer --arrivals periodic --duty 0.5 --seconds 6 \
      --arms "latency_alone,best_effort_alone,$slack" ;;
    four) echo --latency bert_graph+mlp --rate 30+100 --best-effort transformer+resnet50 --seconds 6 --arms "$arms" ;;
    *) echo "$0: no part $1" >&2; return 2 ;;
  esac
}

measure() {
  local part=$1 chosen
  chosen=$(options "$part")
  local -a command=("$python" -m benchmarks.colocation --no-plots --resume --repeats "$repeats" --out "$out/$part.json")
  command+=(--seconds "${SECONDS_EACH:-4}" $chosen ${COMMIT:+--commit "$COMMIT"})
  if [ -n "${LIMIT_S:-}" ]; then command+=(--budget-s $((LIMIT_S - (SECONDS - began)))); fi
  if [ -n "${DRY:-}" ]; then echo "${command[@]}"; return; fi
  local status=0
  "${command[@]}" >>"$out/$part.log" 2>&1 || status=$?
  echo "[$((SECONDS - began)) s] $part on $CUDA_VISIBLE_DEVICES: exit $status, $out/$part.log"
  return "$status"
}

for part in "$@"; do options "$part" >/dev/null; done
if [ -n "${DRY:-}" ]; then
  for part in "$@"; do measure "$part"; done
  exit
fi
list_gpus
mkdir -p "$out"
status=0
for ((first = 1; first <= $#; first += ${#gpus[@]})); do
  together=("${@:first:${#gpus[@]}}")
  running=()
  for i in "${!together[@]}"; do
    CUDA_VISIBLE_DEVICES=${gpus[i]} measure "${together[i]}" &
    running+=($!)
  done
  for one in "${running[@]}"; do wait "$one" || status=$?; done
done
cells=()
for part in "$@"; do
  if [ -f "$out/$part.cells" ]; then cells+=("$out/$part.cells"); fi
done
"$python" -m benchmarks.colocation merge --out "$out/scheduler.json" "${cells[@]}"
exit "$status"
