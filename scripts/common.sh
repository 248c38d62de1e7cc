# shellcheck shell=bash
# What the other scripts share; they source it. Sets up a machine: system packages, Pythons, virtual environments, the
# package itself. Every step looks first and does nothing when there is nothing to do.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
unset MAKEFLAGS MFLAGS MAKELEVEL PYTHONPATH PYTHONHOME VIRTUAL_ENV
unset PYTHONDONTWRITEBYTECODE # containers set it: each start of a Python would compile all that it imports
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
jobs="$(nproc)"
export CMAKE_BUILD_PARALLEL_LEVEL="$jobs"
pip_options=(--no-compile) # byte code is made at the first import, and most of what is installed is never imported
venv="$root/.venv"
oldest_gcc=12

say() { printf '==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# ---- system packages ------------------------------------------------------------------------------------------------

# Prints the C++ compiler to use: $CXX, the default g++, else a newer one beside it. GCC 12 or later, or any clang.
find_cxx() {
  local candidate version
  for candidate in ${CXX:-} g++ g++-12 g++-13 g++-14 g++-15 clang++; do
    command -v "$candidate" >/dev/null || continue
    version="$("$candidate" -dumpversion 2>/dev/null)" || continue
    if "$candidate" --version | grep -qi clang || [ "${version%%.*}" -ge "$oldest_gcc" ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Can this Python build and run cudasched: CPython 3.10 or later with venv, pip and headers?
python_serves() {
  "$1" -c '
import pathlib, sys, sysconfig
import ensurepip, venv
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.implementation.name == "cpython" and sys.version_info >= (3, 10) and header.is_file()))
' >/dev/null 2>&1
}

# The version that the sources say.
written_version() { sed -n 's/^__version__ = "\(.*\)"/\1/p' python/cudasched/_version.py; }

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Prints the system's Python: $PYTHON, else python3 of PATH, else what Debian installs.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if python_serves "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Installs packages as root, with sudo where it asks for no password, or says what to run and stops.
apt_install() {
  local as_root=() command="apt-get update && apt-get install -y --no-install-recommends $*"
  command -v apt-get >/dev/null || die "this machine lacks: $*. Install them (these are Debian's names) and run again."
  if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      die "system packages are missing. Install them with
  sudo sh -c '$command'
and run again."
    fi
    as_root=(sudo -n)
  fi
  say "installing system packages: $*"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

# ensure_system_packages build|tests: a compiler and Python; for `tests` also GoogleTest, google-benchmark, Spin, ccache,
# Prometheus, bubblewrap and, on Debian, Chromium (Ubuntu's package of that name is none: it brings a snap).
ensure_system_packages() {
  local missing=()
  if ! find_cxx >/dev/null; then
    # Ubuntu 22.04's g++ is version 11; it has g++-12 too.
    if grep -qs '^VERSION_CODENAME=jammy' /etc/os-release; then
      missing+=(g++-12)
    else
      missing+=(g++)
    fi
  fi
  find_python >/dev/null || missing+=(python3 python3-venv python3-dev)
  if [ "$1" = tests ]; then
    local header
    for header in gtest/gtest.h:libgtest-dev gmock/gmock.h:libgmock-dev benchmark/benchmark.h:libbenchmark-dev; do
      [ -e "/usr/include/${header%%:*}" ] || [ -e "/usr/local/include/${header%%:*}" ] || missing+=("${header##*:}")
    done
    local program
    for program in spin ccache prometheus bwrap; do
      command -v "$program" >/dev/null || missing+=("${program/#bwrap/bubblewrap}")
    done
    if ! command -v chromium chromium-browser >/dev/null && grep -qs '^ID=debian' /etc/os-release; then
      missing+=(chromium fonts-dejavu-core) # else it has no letters
    fi
  fi
  if [ "${#missing[@]}" -gt 0 ]; then
    apt_install "${missing[@]}"
  fi
  CXX="$(find_cxx)" || die "no C++ compiler that cudasched builds with: it needs GCC $oldest_gcc or later (set CXX to one)."
  find_python >/dev/null ||
    die "no CPython 3.10 or later with venv, pip and headers. Install python3.10 or later with its -venv and -dev packages," \
      "or set PYTHON to one."
  # The C compiler of the same name, g++-12 -> gcc-12.
  CC="${CC:-$(echo "$CXX" | sed -e 's/clang++/clang/' -e 's/g++/gcc/' -e 's/c++$/cc/')}"
  export CC CXX
}

# ---- Python ---------------------------------------------------------------------------------------------------------

# ensure_venv DIRECTORY PYTHON: a virtual environment of that version that works and has the build requirements.
ensure_venv() {
  if ! { python_serves "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1 &&
    [ "$(python_version "$1/bin/python")" = "$(python_version "$2")" ]; }; then
    say "creating ${1#"$root/"} with $("$2" --version)"
    rm -rf "$1"
    "$2" -m venv "$1"
  fi
  install_requirements "$1" build
}

# install_requirements DIRECTORY GROUP...: dependency groups of pyproject.toml (scripts/requirements.py). One pip at a time
# works in a directory: stages are prepared beside others.
install_requirements() {
  local directory="$1" wanted stamp
  shift
  stamp="$directory/.installed-$(IFS=-; echo "$*")"
  wanted="$("$directory/bin/python" scripts/requirements.py "$@")"
  if [ "$wanted" != "$(cat "$stamp" 2>/dev/null)" ]; then
    say "installing into ${directory#"$root/"}: $*"
    echo "$wanted" >"$stamp.new"
    flock "$directory" "$directory/bin/python" -m pip install -q "${pip_options[@]}" -r "$stamp.new"
    mv "$stamp.new" "$stamp"
  fi
}

# Prints the files that a wheel is made of, by find's further options. Byte code that tests leave beside them is none.
package_files() {
  find csrc include python cmake CMakeLists.txt pyproject.toml docs/package.md -name __pycache__ -prune -o -type f "$@" -print
}

# install_package DIRECTORY EXTRA: builds a wheel of the tree and installs it with an extra, unless nothing changed since.
install_package() {
  local directory="$1" extra="$2" stamp="$1/.installed-package-$2" files
  files="$(package_files | sort)"
  if [ "$files" = "$(cat "$stamp" 2>/dev/null)" ] && [ -z "$(package_files -newer "$stamp")" ]; then
    return
  fi
  say "building and installing .[$extra] into ${directory#"$root/"}"
  echo "$files" >"$stamp.new"
  PATH="$directory/bin:$PATH" flock "$directory" "$directory/bin/python" -m pip install -q "${pip_options[@]}" \
    --no-build-isolation ".[$extra]"
  mv "$stamp.new" "$stamp"
}

# Prints the other Pythons that serve, one a line, one a version, 3.10 to 3.14; $1 is the version to leave out.
other_pythons() {
  local version candidate
  for version in 3.10 3.11 3.12 3.13 3.14; do
    [ "$version" != "$1" ] || continue
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      if python_serves "$candidate" && [ "$(python_version "$candidate")" = "$version" ]; then
        echo "$candidate"
        break
      fi
    done
  done
}

# setup build|tests: everything up to a virtual environment that can build, or also run the C++ tests.
setup() {
  ensure_system_packages "$1"
  ensure_venv "$venv" "$(find_python)"
  export PATH="$venv/bin:$PATH"
}
