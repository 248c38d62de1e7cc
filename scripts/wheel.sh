#!/usr/bin/env bash
# A wheel in dist/ for the Python of .venv (PYTHON=python3.12 makes that with another), tagged manylinux_2_34. With a word,
# that wheel with other compiled parts:
#
#   wheel.sh arm64      for arm64, by a cross build (scripts/arm64.sh names the packages that this needs)
#   wheel.sh HEADERS    for the Python of these headers, such as /usr/include/python3.12
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_requirements "$venv" release
ours="$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"

# remade BUILD MODULE_SUFFIX TAG_OPTIONS CMAKE_OPTION...: the wheel of this machine with the libraries of another build.
remade() {
  local build="$1" suffix="$2" tags wheel tree files
  names() { (cd "$tree" && find . -type f | sed 's/_core[.].*[.]so$/_core.so/' | sort); }
  read -ra tags <<<"$3"
  for wheel in dist/cudasched-*-"$ours-$ours"-manylinux_2_34_x86_64.whl; do
    [ -f "$wheel" ] || die "dist/ has no wheel of this machine: make wheel"
  done
  rm -rf "$build"/{tree,unpacked,*.whl}
  cmake --fresh -S . -B "$build" -G Ninja -DSKBUILD=ON -DPYTHON_MODULE_EXTENSION="$suffix" \
    -DPython_EXECUTABLE="$(command -v python)" "${@:4}" >"$build.log" 2>&1 || die "see $build.log"
  cmake --build "$build" -- --quiet
  cmake --install "$build" --strip --prefix "$build/tree" >>"$build.log"
  python -m wheel unpack -d "$build/unpacked" "$wheel" >>"$build.log"
  tree="$(echo "$build"/unpacked/*)"
  files="$(names)"
  rm "$tree"/cudasched/_core.*.so
  find "$tree" -name '*.so*' -delete
  (cd "$build/tree" && find . -name '*.so*' -print0 | tar -c --null -T -) | tar -x -C "$tree"
  [ "$(names)" = "$files" ] || die "the wheel in $tree has other files than $wheel"
  python -m wheel pack -d "$build" "$tree" >>"$build.log"
  python -m wheel tags --remove "${tags[@]}" "$build"/cudasched-*.whl >>"$build.log"
  python scripts/manylinux.py "$build"/cudasched-*.whl dist
}

case "${1:-}" in
"")
  rm -rf build/wheel
  python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
  python scripts/manylinux.py build/wheel/cudasched-*.whl dist
  ;;
arm64) # what differs in the headers of this machine's Python is in Python itself
  remade build/wheel-arm64 ".cpython-${ours#cp}-aarch64-linux-gnu.so" --platform-tag=linux_aarch64 \
    -DCMAKE_TOOLCHAIN_FILE=cmake/arm64.cmake \
    -DPython_INCLUDE_DIR="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  ;;
*)
  [ -f "$1/patchlevel.h" ] || die "$1 has no headers of a Python: it is a directory such as /usr/include/python3.12"
  version="$(sed -n 's/^#define PY_M[AI][JN]OR_VERSION[^0-9]*//p' "$1/patchlevel.h" | tr -d '\n')"
  remade "build/wheel-cp$version" ".cpython-$version-x86_64-linux-gnu.so" \
    "--python-tag=cp$version --abi-tag=cp$version --platform-tag=linux_x86_64" -DCUDASCHED_PYTHON_HEADERS="$(cd "$1" && pwd)"
  ;;
esac
