#!/usr/bin/env bash
# Every test that needs no GPU, and those that do where there is one. A failing stage does not stop the others; the end
# lists each stage with its outcome and closing line, and what failed in it; the exit code is 0 only if all passed.
# Logs: build/logs/.
#
# Tests wait for processes and threads at times: the cores that a stage leaves idle make what later ones build and
# install (prepare_STAGE). So the stages that wait most come before those for which most is compiled.
#
# test.sh [STAGE...] runs only the stages named: lint cpp headers python other-pythons packaging asan tsan; and, of a
# release, site. `test.sh changed` runs what the change since `main` (or BASE) needs, and no more (scripts/changed.py).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

known=(lint cpp headers python other-pythons packaging asan tsan)
stages=("$@")
[ "$#" -gt 0 ] || stages=("${known[@]}")
if [ "${stages[*]}" = changed ]; then
  git rev-parse --quiet --verify "${BASE:-main}^{commit}" >/dev/null ||
    die "there is no ${BASE:-main}: set BASE to the revision that the change is compared with"
  stages=(lint changed-cpp changed-tidy changed-python)
else
  for stage in "${stages[@]}"; do
    [[ " ${known[*]} site " = *" $stage "* ]] || die "no stage '$stage'; there are ${known[*]} and site; or changed"
  done
fi
logs="$root/build/logs"

# The C++ tests and each Python's wheel are made of the same sources, compiled with the same options: once.
export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
export CCACHE_DIR="$root/build/ccache" CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=2G
export CCACHE_SLOPPINESS=pch_defines,time_macros # precompiled headers need it
export CCACHE_DEPEND=1                           # the compiler lists the headers: no pass of the preprocessor for that

# XGBoost's threads spin while they wait for one another: on two cores, several test processes would do little else.
# oneDNN waits for ever for threads that it counted on and that the limit keeps from it, so it counts on one.
export OMP_THREAD_LIMIT=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# ---- what a stage does ----------------------------------------------------------------------------------------------

# configure DIRECTORY OPTION...: a build tree with the C++ tests and without the Python module.
configure() {
  local directory="$1"
  shift
  mkdir -p "$directory"
  cmake -S . -B "$directory" -G Ninja -DPython_EXECUTABLE="$venv/bin/python" -DCUDASCHED_PYTHON=OFF \
    -DCUDASCHED_TESTS=ON "$@" >"$directory/configure.log" 2>&1 || {
    cat "$directory/configure.log"
    return 1
  }
}

# ThreadSanitizer does not start where the kernel spreads addresses over more bits than it knows; so the tests run
# without that, or with it in a container that forbids the switch.
fixed_layout() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}

cpp_build() {
  configure "$@"
  fixed_layout ninja -C "$1" -j "$jobs" --quiet
}

# More of them than cores: many wait for processes and threads.
cpp_tests() { fixed_layout ctest --test-dir "$1" -j "$((2 * jobs))" --output-on-failure --no-tests=error "${@:2}"; }

# Nothing is installed meanwhile into the packages that mypy reads.
stage_lint() { flock "$venv" scripts/lint.sh; }

# Every header compiles when nothing is included before it; the C ones as C and as C++. Those that stand first in the
# source of their own name are shown to by the plain C++ build, which compiles each source by itself: the others here.
stage_headers() {
  configure build/cpp
  local flags includes header
  flags="$(sed -n 's/^CUDASCHED_[A-Z]*_INCLUDE:PATH=/-isystem /p' build/cpp/CMakeCache.txt)"
  read -r -d '' -a includes <<<"-Iinclude -Icsrc $flags $(python -m pybind11 --includes)" || true
  alone() { # alone LANGUAGE COMPILER STANDARD HEADER
    echo "#include \"$root/$4\"" | "$2" -x "$1" "-std=$3" -fsyntax-only -Wall -Wextra -Werror "${@:5}" -
  }
  is_first_in_its_source() {
    grep -m 1 '^#include' "${1%.hpp}.cpp" 2>/dev/null | grep -q "\"${1#csrc/}\""
  }
  export -f alone
  export root
  find csrc include -name '*.h' -print0 | xargs -0 -r -P "$jobs" -I{} bash -c 'alone "$@"' - c "$CC" c11 {} "${includes[@]}"
  find csrc include -name '*.h' -o -name '*.hpp' | sort | while read -r header; do
    is_first_in_its_source "$header" || printf '%s\0' "$header"
  done | xargs -0 -r -P "$jobs" -I{} bash -c 'alone "$@"' - c++ "$CXX" c++20 {} "${includes[@]}"
  echo "$(find csrc include -name '*.h' -o -name '*.hpp' | wc -l) headers passed: each compiles on its own"
}

prepare_cpp() { cpp_build build/cpp; }

stage_cpp() {
  prepare_cpp
  cpp_tests build/cpp
}

# Compiled in two thirds of the time that full optimisation and full debug information take.
sanitized=(-DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG")

# verify_asan_link_order: tests preload the shim, which then comes before the sanitizer's own library.
# intercept_tls_get_addr: GCC 12's leak checker guesses where thread-local storage of loaded libraries begins, and for some
# lengths of their paths reads where nothing is. What such storage holds is found without the guess.
prepare_asan() {
  export ASAN_OPTIONS=verify_asan_link_order=0:detect_stack_use_after_return=1:strict_string_checks=1
  ASAN_OPTIONS+=:intercept_tls_get_addr=0
  export UBSAN_OPTIONS=print_stacktrace=1
  cpp_build build/asan "${sanitized[@]}" -DCUDASCHED_SANITIZE=address,undefined
}

stage_asan() {
  prepare_asan
  cpp_tests build/asan
}

# atexit_sleep_ms: each process that still has a thread would wait for a second at its end, to see what the two do there.
prepare_tsan() {
  export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:atexit_sleep_ms=50"
  TSAN_OPTIONS+=":suppressions=$root/scripts/tsan.suppressions"
  cpp_build build/tsan "${sanitized[@]}" -DCUDASCHED_SANITIZE=thread
}

stage_tsan() {
  prepare_tsan
  cpp_tests build/tsan
}

# PyTorch for the host alone, 200 MB, where an index or directory that pip knows has it (PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS); else the default build, which is several GB. What needs it is skipped where it cannot be had. With it
# comes what would bring the default build.
install_cpu_pytorch() {
  local wanted with="stable-baselines3==2.9.*"
  wanted="torch==$(sed -n 's/^torch==//p' constraints.txt)"
  python -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ("torch", "stable_baselines3"))))' && return
  flock "$venv" python -m pip install -q "${pip_options[@]}" "$wanted+cpu" "$with" 2>/dev/null ||
    flock "$venv" python -m pip install -q "${pip_options[@]}" "$wanted" "$with" ||
    echo "$wanted cannot be had: tests beside the real PyTorch are skipped"
}

# Tests that wait for processes outnumber those that compute. A test that hangs ends its worker alone, and is named. Tests of
# a module stay together in one process, which imports and builds once what they share, until another has no more to do.
in_parallel=(-n "$((jobs < 4 ? 4 : jobs < 8 ? jobs : 8))" --dist worksteal --timeout 600)

# import_once DIRECTORY OPTION...: makes the byte code of all that tests import, once for each package that is installed:
# pytest's processes begin together, and each would make it for itself.
import_once() {
  local directory="$1" stamp="$1/.imported-package"
  [ "$stamp" -nt "$directory/.installed-package-test" ] && return
  "$directory/bin/python" -m pytest --collect-only -q "${@:2}" >/dev/null 2>&1 || true # what is wrong is said by the stage
  touch "$stamp"
}

prepare_python() {
  install_package "$venv" test
  install_cpu_pytorch
  import_once "$venv" --ignore=tests/packaging
}

stage_python() {
  prepare_python
  python -m pytest "${in_parallel[@]}" --ignore=tests/packaging
}

# Tests of the engine through whole programs, of forecasts, of CUDA sources, and of pages in a browser: the same for every
# Python, tested once.
engine_tests=(--ignore-glob={*/test_faults*,*/test_sharing,*/test_offload,*/test_hook_routes}.py
  --ignore-glob={*/test_graph_prediction,*/test_predictor_state,*/test_containers,*/test_top,*/test_policies,*/test_slices}.py
  --ignore-glob={*/test_collect,*/test_trace,*/test_memory,*/test_memory_turns,*/test_simulate,*/test_simulate_recording,*/test_examples}.py
  --ignore-glob={*/test_kernels,*/test_kernels_gemm,*/test_kernels_attention,*/test_device_headers,*/test_tune_live}.py
  --ignore-glob={*/test_advise_beside,*/test_advise_capacity}.py
  --ignore-glob={*/test_serve_page,*/test_trace_ui}.py
  --deselect tests/python/test_baseline.py::test_in_a_browser_the_report_fits_and_logs_nothing
  --deselect tests/python/test_baseline.py::test_save_and_check_find_five_percent_in_one_kernel
  --deselect tests/python/test_tune_dashboard.py::test_in_a_browser_a_space_is_tuned_and_looked_at)

# What nvcc makes of the kernels' sources: the same for every Python, tested on the first of the others.
nvcc_tests=(--deselect tests/python/test_kernels_plan.py::test_each_default_compiles)

# The oldest and the newest: what works on both works between them, and each has a wheel of its own.
some_other_pythons() {
  local others
  mapfile -t others < <(other_pythons "$system_version")
  [ "${#others[@]}" -le 2 ] || others=("${others[0]}" "${others[-1]}")
  [ "${#others[@]}" -eq 0 ] || printf '%s\n' "${others[@]}"
}

prepare_other_python() {
  ensure_venv "$root/.venv-$1" "$2"
  install_package "$root/.venv-$1" test
  import_once "$root/.venv-$1" "${engine_tests[@]}" tests/python
}

prepare_other-pythons() {
  local others candidate
  mapfile -t others < <(some_other_pythons)
  for candidate in "${others[@]}"; do prepare_other_python "$(python_version "$candidate")" "$candidate"; done
}

# stage_other_python VERSION PYTHON [OPTION...]: the tests of the Python package; options of pytest.
stage_other_python() {
  local directory="$root/.venv-$1"
  prepare_other_python "$1" "$2"
  PATH="$directory/bin:$PATH" "$directory/bin/python" -m pytest "${in_parallel[@]}" "${engine_tests[@]}" "${@:3}" tests/python
}

stage_packaging() {
  prepare_python # the documents' commands are asked of it
  python -m pytest tests/packaging
}

stage_site() { scripts/site.sh; }

# Of a change: all that it makes compile anew, once, and the tests of the rooms and modules that it touches.
prepare_changed-cpp() { [ -z "$(python scripts/changed.py rooms)" ] || prepare_cpp; }

stage_changed-cpp() {
  local rooms
  rooms="$(python scripts/changed.py rooms)"
  prepare_changed-cpp
  [ -n "$rooms" ] || { echo "no room has changed" && return; }
  cpp_tests build/cpp -L "^(${rooms//$'\n'/|})\$"
}

stage_changed-tidy() { scripts/tidy.sh --changed; }

stage_changed-python() {
  local tests packaging
  mapfile -t tests < <(python scripts/changed.py tests | grep -v '^tests/packaging/')
  mapfile -t packaging < <(python scripts/changed.py tests | grep '^tests/packaging/')
  [ -n "${tests[*]}${packaging[*]}" ] || { echo "no Python test is of this change" && return; }
  prepare_python
  [ -z "${tests[*]}" ] || python -m pytest "${in_parallel[@]}" "${tests[@]}"
  [ -z "${packaging[*]}" ] || python -m pytest "${packaging[@]}"
}

# ---- running them ---------------------------------------------------------------------------------------------------

report=()
failed=()
passed=()
running="" # a process that lives while a stage does
trap '[ -z "$running" ] || kill "$running"; [ -z "${AHEAD_PID:-}" ] || kill -- "-$AHEAD_PID"' EXIT

# prepare_ahead: prepares the stages in their order, at the lowest priority, and prints the CPU seconds of each. Where one
# fails, the stage does the same again, and says why.
prepare_ahead() {
  local name TIMEFORMAT='%U %S'
  set +e
  renice -n 19 -p "$BASHPID" >/dev/null
  for name in "${stages[@]}"; do
    declare -F "prepare_$name" >/dev/null || continue
    {
      time {
        (
          set -e
          "prepare_$name"
        ) >"$logs/ahead-$name.log" 2>&1
      }
    } 2>&1 | seconds
  done
}

# Prints the sum of the times that are read.
seconds() { awk '{ printf "%.0f\n", $1 + $2 }'; }

# Prints which tests of a log failed, as ctest and pytest name them, what GoogleTest and the sanitizers said of it, and
# what a failed test's programs wrote.
failures() {
  grep -E '^\s+[0-9]+ - .* \([A-Za-z][A-Za-z ]*\)|^(FAILED|ERROR) ' "$1" || true
  grep -E -A 4 ': Failure$|ERROR: [A-Za-z]*Sanitizer|WARNING: ThreadSanitizer|==[A-Za-z]*Sanitizer|: runtime error: |^-+ Captured stderr (call|teardown)' "$1" | head -n 40 || true
}

# stage NAME FUNCTION ARGUMENT...: runs it, its output in a log and from there here, and notes how it ended. A process that
# a crashed test leaves behind holds the log open, not our output, so nothing waits for it.
stage() {
  local name="$1" run="stage_$2" log="$logs/${1// /-}.log" start=$SECONDS closing status outcome=passed follower cpu
  shift 2
  printf '\n'
  say "$name"
  : >"$log"
  sleep infinity &
  running=$!
  tail -n +1 -s 0.2 -f --pid="$running" "$log" &
  follower=$!
  set +e
  TIMEFORMAT='%U %S'
  {
    time {
      (
        set -e
        "$run" "$@"
      ) >>"$log" 2>&1
    }
  } 2>"$logs/cpu"
  status=$?
  set -e
  cpu="$((ahead_cpu + $(seconds <"$logs/cpu")))"
  ahead_cpu=0
  kill "$running"
  wait "$running" "$follower" 2>/dev/null || true
  running=""
  if [ "$status" -eq 0 ]; then
    passed+=("$name")
  else
    failed+=("$name")
    outcome=FAILED
    printf '%s\n' "==> FAILED: $name (exit code $status, log in ${log#"$root/"})"
  fi
  closing="$(grep -E '(passed|failed|error|skipped).* in [0-9.]+s|% tests passed|^lint |(headers|site) passed' "$log" | tail -n 1 || true)"
  report+=("$(printf '%-14s %-6s %4d s, CPU %4d s  %s' "$name" "$outcome" "$((SECONDS - start))" "$cpu" "$closing")")
  if [ "$status" -ne 0 ]; then
    report+=("$(failures "$log" | sed 's/^/    /')")
  fi
}

joined() {
  local text
  printf -v text '%s, ' "$@"
  printf '%s' "${text%, }"
}

mkdir -p "$logs"
say "set-up"
setup tests
system_version="$(python_version "$venv/bin/python")"
set -m                                     # a process group of its own
coproc AHEAD { prepare_ahead; read -r _; } # which lives as long as we do: bash forgets one that has ended
set +m
install_requirements "$venv" run test lint
say "$("$CXX" --version | head -n 1); system's Python: $("$venv/bin/python" -c 'import sys; print(sys.version.split()[0])')"

pythons=()
for name in "${stages[@]}"; do
  ahead_cpu=0
  ! declare -F "prepare_$name" >/dev/null || read -r ahead_cpu <&"${AHEAD[0]}" || ahead_cpu=0
  case "$name" in
    python)
      pythons+=("$system_version")
      stage "Python $system_version" python
      ;;
    other-pythons)
      mapfile -t others < <(some_other_pythons)
      [ "${#others[@]}" -gt 0 ] || report+=("no other Python from 3.10 to 3.14 with venv, pip and headers was found")
      options=()
      for candidate in "${others[@]}"; do
        version="$(python_version "$candidate")"
        pythons+=("$version")
        stage "Python $version" other_python "$version" "$candidate" "${options[@]}"
        options=("${nvcc_tests[@]}")
      done
      ;;
    *) stage "$name" "$name" ;;
  esac
done

printf '\n'
printf '%s\n' "${report[@]}"
[ "${#pythons[@]}" -eq 0 ] || echo "Python tests ran on $(joined "${pythons[@]}")"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "FAILED: $(joined "${failed[@]}") ($SECONDS s)"
  exit 1
fi
echo "passed: $(joined "${passed[@]}") ($SECONDS s)"
