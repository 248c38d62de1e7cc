"""Beside libraries that stand in front of the driver too: one that limits what a program gets, one that schedules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cudasched import hook
from cudasched._preload import preloads
from support import Run

# As HAMi-core does it: its own dlsym answers for the driver's functions that it has, whoever asks and of whichever
# library, and its own functions call those of what `dlopen("libcuda.so.1")` gives.
LIMITER_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef void* dlsym_fn(void*, const char*);
typedef int launch_fn(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                      void**);
static int launches;
int limiter_launches(void) { return launches; }

static void* real(const char* name) {
  dlsym_fn* find = (dlsym_fn*)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return find(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NODELETE), name);
}

int cuInit(unsigned flags) { return ((int (*)(unsigned))real("cuInit"))(flags); }

int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  ++launches;
  return ((launch_fn*)real("cuLaunchKernel"))(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, void* status) {
  if (strcmp(symbol, "cuLaunchKernel") == 0) return *function = (void*)cuLaunchKernel, 0;
  return ((int (*)(const char*, void**, int, uint64_t, void*))real("cuGetProcAddress_v2"))(symbol, function, version,
                                                                                         flags, status);
}

void* dlsym(void* handle, const char* name) {
  dlsym_fn* find = (dlsym_fn*)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  if (strcmp(name, "cuInit") == 0 || strcmp(name, "cuLaunchKernel") == 0 || strcmp(name, "cuGetProcAddress_v2") == 0) {
    Dl_info self;
    dladdr(&launches, &self);
    handle = dlopen(self.dli_fname, RTLD_NOW);
  }
  return find(handle, name);
}
"""

# Linked with the driver, so that every call goes to who comes first among what is loaded.
LINKED_C = r"""
#include <stdio.h>
int cuInit(unsigned);
int cuDriverGetVersion(int*);
int limiter_launches(void) __attribute__((weak));
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int main(void) {
  const int init = cuInit(0);
  const int launch = cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);  /* no function: refused by the driver */
  printf("%d %d %d\n", init, launch != 0, limiter_launches());
}
"""

REPORT = """
import ctypes, cudasched, launcher
gpu = launcher.Gpu(); gpu.launch(5); gpu.synchronize()
state = cudasched.state()
print(ctypes.CDLL(None).limiter_launches(), state.launches, state.scheduling, state.process_class)
"""

Compile = Callable[..., Path]


@pytest.fixture
def compile_c(tmp_path: Path) -> Compile:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("these tests compile small C libraries and found no gcc; install one (apt-get install gcc)")

    def build(name: str, source: str, *flags: str | Path) -> Path:
        code = tmp_path / f"{name}.c"
        code.write_text(source)
        command = [compiler, "-O1", "-w", "-o", tmp_path / name, code, *flags, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return tmp_path / name

    return build


@pytest.fixture
def limiter(compile_c: Compile) -> Path:
    return compile_c("libvgpu.so", LIMITER_C, "-shared", "-fPIC")


# ---- one that limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["run", "import", "shim first"])
def test_a_limiter_sees_every_launch_and_so_do_we(
    simulated: Path, limiter: Path, python: Run, monkeypatch: pytest.MonkeyPatch, cudasched: Run, by: str
) -> None:
    """Guards base/loader.c: with the limiter's dlsym in it, a launch would go round until the stack is full."""
    files = hook.locate()
    monkeypatch.setenv("LD_PRELOAD", f"{files.shim}:{files.stub}:{limiter}" if by == "shim first" else str(limiter))
    if by == "run":
        done = cudasched("run", "--class", "latency", "--", sys.executable, "-c", REPORT)
    else:
        monkeypatch.setenv("CUDASCHED_CLASS", "latency")
        done = python(REPORT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 5 True latency\n", "")


def test_run_puts_a_limiter_first_so_that_linked_programs_do_not_get_round_it(
    simulated: Path, limiter: Path, compile_c: Compile, monkeypatch: pytest.MonkeyPatch, cudasched: Run
) -> None:
    program = compile_c("linked", LINKED_C, hook.locate().shim)
    monkeypatch.setenv("LD_PRELOAD", str(limiter))
    done = cudasched("run", "--", str(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 1\n", "")


def test_limiters_of_the_whole_system_go_first_too(tmp_path: Path) -> None:
    files = hook.locate()
    ours = f"{files.shim}:{files.stub}"
    system = tmp_path / "ld.so.preload"
    system.write_text("/opt/other.so # a comment\n/usr/local/vgpu/libvgpu.so:/opt/more.so\n")
    assert preloads(files, "users.so", system) == f"/usr/local/vgpu/libvgpu.so:users.so:{ours}"
    assert preloads(files, "b.so /usr/local/vgpu/libvgpu.so", system) == f"b.so:/usr/local/vgpu/libvgpu.so:{ours}"
    assert preloads(files, "b.so", tmp_path / "none") == f"b.so:{ours}"


def test_the_log_names_the_limiter(
    simulated: Path, limiter: Path, python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(limiter))
    monkeypatch.setenv("CUDASCHED_LOG", "info")
    assert f"works behind {limiter} (HAMi-core)" in python(REPORT).stderr


# ---- one that schedules --------------------------------------------------------------------------------------------


def test_beside_another_scheduler_every_call_passes_through(
    simulated: Path, compile_c: Compile, monkeypatch: pytest.MonkeyPatch, python: Run
) -> None:
    rival = compile_c("libnvshare.so", "int nvshare;", "-shared", "-fPIC")
    monkeypatch.setenv("LD_PRELOAD", str(rival))
    done = python(
        "import cudasched, launcher\n"
        "gpu = launcher.Gpu()\n"
        "with cudasched.region('latency'): gpu.launch(3)\n"
        "gpu.synchronize(); state = cudasched.state()\n"
        "print(state.attached, state.scheduling, state.launches); print(state.off_reason)"
    )
    assert done.returncode == 0
    counts, reason = done.stdout.splitlines()
    assert counts == "False False 0"
    assert reason.startswith(f"nvshare ({rival}) schedules this program's launches already")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"cudasched: warning: {reason}") and warning.endswith("run it without one of the two")


def test_another_scheduler_in_the_drivers_place_keeps_the_program(
    simulated: Path, compile_c: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cudasched: Run
) -> None:
    """As XSched installs itself: a libcuda.so.1 in LD_LIBRARY_PATH that needs its own libraries."""
    part = compile_c("libhalcuda.so", "int part;", "-shared", "-fPIC")
    program = compile_c("init", "int cuInit(unsigned); int main(void) { return cuInit(0); }", hook.locate().shim)
    compile_c(
        "libshimcuda.so",
        "int cuInit(unsigned flags) { return 40 + flags; }",
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        part,
        f"-Wl,-rpath,{tmp_path}",
    ).rename(tmp_path / "libcuda.so.1")
    monkeypatch.delenv("CUDASCHED_DRIVER")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = cudasched("run", "--", str(program))
    assert done.returncode == 40
    assert f"XSched ({tmp_path}/libhalcuda.so) schedules" in done.stderr and len(done.stderr.splitlines()) == 1
