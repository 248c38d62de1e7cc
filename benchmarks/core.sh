#!/usr/bin/env bash
# Measures what benchmarks/results/breadth.json and core.json hold, step after step while there is time:
#
#     LIMIT_S=590 benchmarks/core.sh OUT [STEP...]
#     DRY=1 benchmarks/core.sh OUT                     # only says what it would run
#
# Steps, all by default and in this order: main (15 programs beside the BERT graph server), core (one process, backlogs,
# the launcher), ddp (two GPUs), servers (four programs beside each of the other servers). Several GPUs share the programs
# of main and servers between them. On one H200 main takes 14 minutes, core 5, servers 13; on two main takes 8, servers 7
# and ddp 10.
#
# OUT/*.cells has what is done, and another run goes on from there; FROM names a directory whose *.cells are taken over
# first. LIMIT_S (590) is for all steps together. More options for the benchmarks go into BREADTH_OPTIONS
# (--keep-servers) and CORE_OPTIONS (--ddp-seconds 120). COMMIT may be set where there is no clone to ask, and PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/gpus.sh

[ $# -ge 1 ] || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
[ $# -ge 1 ] || set -- main core ddp servers
python=${PYTHON:-python3}
limit=${LIMIT_S:-590}
began=$SECONDS
others=(--servers vit_graph,bert_eager,recommender
  --programs torchvision_resnet50,transformers_llama,torch_recommender,jax_transformer)

for step in "$@"; do
  case $step in main | core | ddp | servers) ;; *) echo "$0: no step $step" >&2; exit 2 ;; esac
done

# run NAME COMMAND...: with the time that is left; its lines carry the name.
run() {
  local name=$1 status=0
  shift
  local -a command=("$python" -m "$@" ${COMMIT:+--commit "$COMMIT"})
  local left=$((limit - (SECONDS - began)))
  case $name in breadth*) command+=(--limit-s "$left") ;; *) command+=(--minutes "$((left / 60)).$((left % 60 * 10 / 6))") ;; esac
  if [ -n "${DRY:-}" ]; then echo "${command[@]}"; return; fi
  "${command[@]}" 2>&1 | sed -u "s|^|$name: |" | tee -a "$out/log" || status=$?
  echo "$name: exit $status after $((SECONDS - began)) s of $limit" | tee -a "$out/log"
  return "$status"
}

# breadth OPTION...: its programs shared between the GPUs.
breadth() {
  local i status=0 running=()
  for i in "${!gpus[@]}"; do
    CUDA_VISIBLE_DEVICES=${gpus[i]} run "breadth $((i + 1))/${#gpus[@]}" benchmarks.breadth \
      --out "$out/breadth-$((i + 1)).json" --part "$((i + 1))/${#gpus[@]}" "$@" ${BREADTH_OPTIONS:-} &
    running+=($!)
  done
  for i in "${running[@]}"; do wait "$i" || status=$?; done
  return "$status"
}

# take_over DIRECTORY: what an earlier run has done, whatever number of GPUs it had: every part gets all of it.
take_over() {
  local i earlier=("$1"/breadth*.cells)
  if [ -f "$1/core.cells" ]; then cp "$1/core.cells" "$out"; fi
  [ -f "${earlier[0]}" ] || return 0
  "$python" -m benchmarks.breadth merge --out "$out/earlier.json" "${earlier[@]}" >/dev/null
  for i in "${!gpus[@]}"; do cp "$out/earlier.cells" "$out/breadth-$((i + 1)).cells"; done
  rm -f "$out"/earlier.*
}

if [ -n "${DRY:-}" ]; then
  gpus=(0)
else
  list_gpus
  mkdir -p "$out"
  [ -z "${FROM:-}" ] || take_over "$FROM"
fi
measure() {
  case $1 in
    main) breadth ;;
    servers) breadth "${others[@]}" ;;
    core) run core benchmarks run core --out "$out/core.json" --only readme_example,backlog,launcher ${CORE_OPTIONS:-} ;;
    ddp) run ddp benchmarks run core --out "$out/core.json" --only ddp ${CORE_OPTIONS:-} ;;
  esac
}

status=0
for step in "$@"; do measure "$step" || status=$?; done
[ -z "${DRY:-}" ] || exit 0
parts=("$out"/breadth-*.cells)
if [ -f "${parts[0]}" ]; then
  rm -f "$out"/breadth-[0-9]*.json
  "$python" -m benchmarks.breadth merge --out "$out/breadth.json" "${parts[@]}" || status=$?
fi
exit "$status"
