# The GPUs that a script measures on, for core.sh and scheduler.sh to source.

# list_gpus: puts into the array `gpus` what CUDA_VISIBLE_DEVICES may name: those that it names, else all.
list_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  else
    mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
  fi
  [ ${#gpus[@]} -gt 0 ] || { echo "$0: nvidia-smi lists no GPU" >&2; exit 2; }
}
