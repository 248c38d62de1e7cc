#!/usr/bin/env bash
# Builds the C++ side for arm64, with Debian's cross compiler, and runs its tests under qemu-user:
#
#     apt-get install g++-aarch64-linux-gnu qemu-user libgtest-dev
#     scripts/arm64.sh [ROOM...]        # all rooms by default; BUILD=build/arm64, PYTHON=python3
#
# Nothing here has run on an arm64 processor: qemu on x86-64 hides missing barriers (docs/memory_order.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${BUILD:-build/arm64}
python=${PYTHON:-python3}
toolchain=$PWD/cmake/arm64.cmake
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" >/dev/null || { echo "$0: $tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
done

# GoogleTest's sources are Debian's, too.
if [ ! -f "$build/gtest/lib/libgmock.a" ]; then
  cmake -S /usr/src/googletest -B "$build/gtest-build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" \
    -DCMAKE_INSTALL_PREFIX="$PWD/$build/gtest" -DCMAKE_INSTALL_LIBDIR=lib >"$build.log" 2>&1
  cmake --build "$build/gtest-build" --target install >>"$build.log" 2>&1
fi
cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DCUDASCHED_PYTHON=OFF -DCUDASCHED_TESTS=ON \
  -DPython_EXECUTABLE="$(command -v "$python")" -DGTest_ROOT="$PWD/$build/gtest" -DCMAKE_FIND_ROOT_PATH="$PWD/$build/gtest"
rooms=("$@")
cmake --build "$build" ${rooms[@]/#/--target test_}
cd "$build"
labels=$(IFS='|'; echo "${rooms[*]}")
# qemu keeps signal 64 for itself, ends with a thread beside a fork, starts no arm64 program by exec, and has no robust
# mutexes; the machine's own cache of libraries and packages are another processor's.
not_under_qemu='AThreadOfOursGetsNoneOfThePrograms|Fork|DeathTest|TwoPidNamespaces|LostLauncher|ALauncherThatEnds|ReadsThisMachinesCache|AtExit|Gives.Where|package'
export GTEST_FILTER=-ProcessesTest.*:Opening.*:*Crash # the same, of rooms whose tests share a process
ctest --output-on-failure -j "$(nproc)" ${labels:+-L "^($labels)\$"} -E "$not_under_qemu"
