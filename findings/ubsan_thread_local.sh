#!/usr/bin/env bash
# GCC's undefined behaviour sanitizer says of a thread-local object that is there that its pointer is null.
#
# GCC adds the object's offset to the thread's address, and tests the flags that this addition sets. Where the object is
# of the program itself, the linker makes of the addition an instruction that sets no flags (`lea`), and the test sees
# older ones. Whether that goes wrong depends on the code around it: another level of optimisation may hide it. An
# `extern thread_local` object is enough. The program is right, but a run that must be free of errors is not.
# -fno-sanitize=null takes the check away. With `constinit` on both declarations, or with -fPIC, it is not wrong here.
#
# Seen with g++ 12.2.0-14+deb12u1, binutils 2.40-2 (ld and gold), Debian 12, x86-64, Linux 6.18, 2026-11-28:
#     -O2 -fsanitize=undefined: 2 errors, prints 9
#     -O2 -fsanitize=undefined -fno-sanitize=null: 0 errors, prints 9
#     -O2 -fsanitize=undefined -DCONSTINIT=constinit: 0 errors, prints 9
#     -O2 -fsanitize=undefined -fPIC: 0 errors, prints 9
# Exit code 1: it is so no more. 2: no g++ 12 for x86-64 here; others are not tried.
set -euo pipefail
if ! command -v g++-12 > /dev/null || [ "$(g++-12 -dumpmachine)" != x86_64-linux-gnu ]; then
  echo "this needs g++-12 for x86-64, as in Debian 12" >&2
  exit 2
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/counter.hpp" <<'CPP'
#ifndef CONSTINIT
#define CONSTINIT
#endif
struct Counter {
  long value;
  void add(long n);
};
extern CONSTINIT thread_local Counter first, second;
CPP
cat > "$folder/counter.cpp" <<'CPP'
#include "counter.hpp"
CONSTINIT thread_local Counter first, second;
void Counter::add(long n) { value += n; }
CPP
cat > "$folder/main.cpp" <<'CPP'
#include "counter.hpp"
#include <cstdio>
int main() {
  first.add(1);
  second.add(2);
  for (int i = 0; i < 3; ++i) {
    first.add(i);
    second.add(first.value);
  }
  std::printf("%ld\n", second.value);
}
CPP
errors() { # with these options; says what the program prints, too
  g++-12 -std=c++20 -O2 -fsanitize=undefined "$@" "$folder/main.cpp" "$folder/counter.cpp" -o "$folder/program"
  "$folder/program" > "$folder/printed" 2> "$folder/said"
  found=$(grep -c "null pointer" "$folder/said" || true)
  echo "-O2 -fsanitize=undefined${*:+ $*}: $found errors, prints $(cat "$folder/printed")"
}
echo "$(g++-12 --version | head -n 1); $(ld --version | head -n 1)"
errors
wrong=$found
errors -fno-sanitize=null
without=$found
errors -DCONSTINIT=constinit
constant=$found
errors -fPIC
shared=$found
[ "$wrong" -gt 0 ] && [ "$without$constant$shared" = 000 ]
