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
