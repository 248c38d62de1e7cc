#!/usr/bin/env bash
# Builds a target of containers/Dockerfile (runtime by default) with buildah, as root and without a daemon, and prints its
# size. Runs `demo`, too: the demo in a container, and two containers as pods have them, which meet in a run directory.
#
#   scripts/image.sh [runtime|demo|dev]
#
# BASE names the base image; without one, or where it cannot be pulled, mmdebstrap makes one.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
target="${1:-runtime}"
case "$target" in runtime | demo | dev) ;; *) die "no target '$target'; there are runtime, demo and dev" ;; esac
for program in buildah mmdebstrap; do
  command -v "$program" >/dev/null || apt_install "$program"
done
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --storage-driver vfs "$@"; }
scratch="$(mktemp -d)"
containers=()
trap 'buildah rm "${containers[@]}" >/dev/null 2>&1 || true; rm -rf "$scratch"' EXIT
# container IMAGE: sets `made` to the name of a new container.
container() {
  made="$(buildah from "$1")"
  containers+=("$made")
}

image="localhost/cudasched:$target"
base="${BASE:-}"
if [ -z "$base" ] || ! buildah pull -q "$base" >/dev/null; then
  base=localhost/cudasched-base:latest
  if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    say "making $base, Debian 12, with mmdebstrap"
    mmdebstrap --quiet --variant=minbase bookworm "$scratch/base.tar"
    container scratch
    buildah add -q "$made" "$scratch/base.tar" / >/dev/null
    buildah commit -q "$made" "$base" >/dev/null
  fi
fi
options=(--build-arg "BASE=$base" --target "$target")
if [ -n "${PIP_CERT:-}" ]; then
  options+=(--volume "$PIP_CERT:/run/pip.crt:ro" --build-arg PIP_CERT=/run/pip.crt)
fi
say "building $image on $base"
buildah build "${options[@]}" -f containers/Dockerfile -t "$image" .
buildah images --format '{{.Name}}:{{.Tag}} {{.Size}}' | grep -E "^($image|$base) "
[ "$target" = demo ] || exit 0

say "the demo in a container"
container "$image"
buildah run "$made" -- cudasched demo --simulate
say "two containers of the base alone"
mkdir -m 700 "$scratch"/{files,run,gpu}
buildah run -v "$scratch/files:/copy" "$made" -- busybox cp -a /opt/cudasched/. /copy
shared=(-v "$scratch/files:/opt/cudasched:ro" -v "$scratch/run:/run/cudasched" -v "$scratch/gpu:/gpu" -v "$root/tests:/tests:ro"
  -e CUDASCHED_SIM_DIR=/gpu -e CUDASCHED_DRIVER=/opt/cudasched/lib/python3/dist-packages/cudasched/simulate/libcuda.so.1)
meeting=(/opt/cudasched/bin/busybox sh /opt/cudasched/bin/start /opt/cudasched/bin/python3 -I /tests/packaging/meeting.py)
container "$base"
buildah run "${shared[@]}" -e CUDASCHED_CLASS=latency "$made" -- "${meeting[@]}" &
container "$base"
buildah run "${shared[@]}" -e CUDASCHED_CLASS=best_effort "$made" -- "${meeting[@]}"
wait -n
