#!/usr/bin/env bash
# Measures all that benchmarks/results/scheduler.json holds, on as many GPUs as there are, and puts it together:
#
#     benchmarks/scheduler.sh OUT [PART...]        # OUT/scheduler.json, and plots; 8 minutes on 4 H200s, 25 on one
#     DRY=1 benchmarks/scheduler.sh OUT            # only says what it would run
#
# Parts, all by default: resnet50 transformer four decode gemm elementwise periodic offload. A GPU takes the next part when
# it is done with one; OUT/PART.cells has what is done, and another run goes on from there. REPEATS (5) and SECONDS_EACH
# (4; 6 with several clients, and for decode) may be set, LIMIT_S after which no cell begins, COMMIT where there is no
# clone to ask, and PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
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
  chosen=$(options "$part") || return 2
  local -a command=("$python" -m benchmarks.colocation --no-plots --resume --repeats "$repeats" --out "$out/$part.json")
  command+=(--seconds "${SECONDS_EACH:-4}" $chosen ${COMMIT:+--commit "$COMMIT"})
  if [ -n "${LIMIT_S:-}" ]; then command+=(--budget-s $((LIMIT_S - (SECONDS - began)))); fi
  if [ -n "${DRY:-}" ]; then echo "${command[@]}"; return; fi
  local status=0
  "${command[@]}" >>"$out/$part.log" 2>&1 || status=$?
  echo "[$((SECONDS - began)) s] $part on $CUDA_VISIBLE_DEVICES: exit $status, $out/$part.log"
  return "$status"
}

# A GPU's worker: the parts that nobody has taken yet, one after the other.
take_parts() {
  local status=0 part
  export CUDA_VISIBLE_DEVICES=$1
  shift
  for part in "$@"; do
    mkdir "$taken/$part" 2>/dev/null || continue
    measure "$part" || status=$?
  done
  return "$status"
}

for part in "$@"; do options "$part" >/dev/null; done
if [ -n "${DRY:-}" ]; then
  for part in "$@"; do measure "$part"; done
  exit
fi
mkdir -p "$out"
taken=$(mktemp -d)
trap 'rm -rf "$taken"' EXIT
workers=()
for gpu in $(nvidia-smi --query-gpu=uuid --format=csv,noheader); do
  take_parts "$gpu" "$@" &
  workers+=($!)
done
status=0
for worker in "${workers[@]}"; do wait "$worker" || status=$?; done
cells=()
for part in "$@"; do [ -f "$out/$part.cells" ] && cells+=("$out/$part.cells"); done
"$python" -m benchmarks.colocation merge --out "$out/scheduler.json" "${cells[@]}"
exit "$status"
