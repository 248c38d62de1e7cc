#!/usr/bin/env bash
# Style and types: ruff, mypy, clang-format, shell syntax, words of the documents. With --fix rewrites what can be rewritten.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup build
install_requirements "$venv" run test lint

cxx_sources() { find csrc include examples tests benchmarks python -regex '.*\.\(cpp\|hpp\|c\|h\|cu\|cuh\)'; }
python_sources=(.) # but what git ignores
shell_scripts=(scripts/*.sh findings/*.sh containers/{cudasched,start} .ci/run)

if [ "${1:-}" = --fix ]; then
  ruff check --fix --exit-zero "${python_sources[@]}"
  ruff format "${python_sources[@]}"
  cxx_sources | xargs clang-format -i
  exit
fi

# Every tool runs, whatever the one before it found.
failed=()
check() {
  local name="$1"
  shift
  "$@" || failed+=("$name")
}
check_clang_format() { cxx_sources | xargs clang-format --dry-run -Werror --ferror-limit=2; }
check_shell() {
  local script bad=0
  for script in "${shell_scripts[@]}"; do
    bash -n "$script" || bad=1
  done
  return "$bad"
}
check "ruff check" ruff check "${python_sources[@]}"
check "ruff format" ruff format --check "${python_sources[@]}"
check mypy mypy --strict
check "mypy of a program" mypy --strict tests/python/typed_program.py
check clang-format check_clang_format
check "bash -n" check_shell
check words python scripts/words.py
if [ "${#failed[@]}" -gt 0 ]; then
  printf -v names "%s, " "${failed[@]}"
  echo "lint failed: ${names%, }  (make format rewrites what can be rewritten)"
  exit 1
fi
echo "lint passed: ruff, mypy, clang-format, shell syntax, words of the documents"
