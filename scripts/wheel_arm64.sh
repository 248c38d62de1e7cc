#!/usr/bin/env bash
# The wheel for arm64 in dist/: that of `make wheel` with its libraries from a cross build (scripts/arm64.sh names the
# packages that this needs). The headers of this machine's Python serve: what differs in them is in Python itself.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

compgen -G "dist/cudasched-*manylinux_2_34_x86_64.whl" >/dev/null || scripts/wheel.sh
# shellcheck disable=SC1091
source "$venv/bin/activate"
build=build/wheel-arm64
suffix=$(python -c 'import sys; print(".cpython-%d%d-aarch64-linux-gnu.so" % sys.version_info[:2])')
rm -rf "$build/tree" "$build/unpacked"
cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE=cmake/arm64.cmake -DSKBUILD=ON -DPYTHON_MODULE_EXTENSION="$suffix" \
  -DPython_EXECUTABLE="$(command -v python)" \
  -DPython_INCLUDE_DIR="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')"
cmake --build "$build"
cmake --install "$build" --strip --prefix "$build/tree"
python -m wheel unpack -d "$build/unpacked" dist/cudasched-*manylinux_2_34_x86_64.whl
tree=$(echo "$build"/unpacked/*)
find "$tree" -name '*.so*' | while read -r library; do
  ours=${library#"$tree/"}
  rm "$library"
  cp "$build/tree/${ours/x86_64-linux-gnu/aarch64-linux-gnu}" "$(dirname "$library")/"
done
python -m wheel pack -d "$build" "$tree"
python -m wheel tags --remove --platform-tag linux_aarch64 "$build"/cudasched-*.whl
python scripts/manylinux.py "$build"/cudasched-*linux_aarch64.whl dist
