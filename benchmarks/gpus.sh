# The GPUs that a script measures on, and their cores, for the scripts beside this one to source.

# list_gpus: puts into the array `gpus` what CUDA_VISIBLE_DEVICES may name: those that it names, else all.
list_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  else
    mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
  fi
  [ ${#gpus[@]} -gt 0 ] || { echo "$0: nvidia-smi lists no GPU" >&2; exit 2; }
}

# share_cores: puts into the array `cores_of` the cores of each of `gpus`, as many for each, by commas.
share_cores() {
  local -a cores
  mapfile -t cores < <("${PYTHON:-python3}" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
  local i each=$((${#cores[@]} / ${#gpus[@]}))
  [ "$each" -ge 1 ] || { echo "$0: ${#cores[@]} cores for ${#gpus[@]} GPUs" >&2; exit 2; }
  cores_of=()
  for i in "${!gpus[@]}"; do cores_of+=("$(IFS=,; echo "${cores[*]:i * each:each}")"); done
}

# begin_on_gpus OUT: `gpus` and `cores_of` for what is measured into OUT, which is made; with DRY one GPU that need not be
# there.
begin_on_gpus() {
  if [ -n "${DRY:-}" ]; then
    gpus=(0)
  else
    list_gpus
    mkdir -p "$1"
  fi
  share_cores
}

# on_each_gpu STEM MODULE OPTION...: runs the module for STEM-I.json on each GPU at once, with a part and cores of its own.
# Lines carry its number, and go into the log beside STEM, too. With DRY it only says what it would run.
on_each_gpu() {
  local stem=$1 module=$2 i status=0
  shift 2
  local -a command running=()
  for i in "${!gpus[@]}"; do
    command=("${PYTHON:-python3}" -m "$module" --out "$stem-$((i + 1)).json" --part "$((i + 1))/${#gpus[@]}"
      ${COMMIT:+--commit "$COMMIT"} "$@")
    if [ -n "${DRY:-}" ]; then echo "${command[@]}"; continue; fi
    (CUDA_VISIBLE_DEVICES=${gpus[i]} taskset -c "${cores_of[i]}" "${command[@]}" 2>&1 |
      sed -u "s|^|$((i + 1))/${#gpus[@]}: |" | tee -a "${stem%/*}/log") &
    running+=($!)
  done
  for i in "${running[@]}"; do wait "$i" || status=$?; done
  return "$status"
}
