"""A program under `cudasched run` meets the shim, whatever it or its user preloads; or it is said that it does not."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cudasched as package
import pytest
from cudasched import _preload, hook
from cudasched.cli import program
from support import PATIENCE_S, Run

Compile = Callable[..., Path]

SEEN = "import cudasched, launcher; gpu = launcher.Gpu({}); gpu.launch(5); gpu.synchronize(); s = cudasched.state()\n"


@pytest.fixture
def compile_c(tmp_path: Path) -> Compile:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def compile_source(name: str, source: str, *flags: object, compiler: str = compiler) -> Path:
        path = tmp_path / name
        (tmp_path / f"{name}.c").write_text(source)
        command = [compiler, tmp_path / f"{name}.c", "-o", path, *flags]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(map(str, flags))}: {done.stderr.strip()}")
        return path

    return compile_source


# ---- the environment -----------------------------------------------------------------------------------------------


def test_what_the_user_preloads_comes_first() -> None:
    files = hook.locate()
    ours = f"{files.shim}:{files.stub}"
    none = Path("/nonexistent")
    assert _preload.preloads(files, "", none) == ours
    assert _preload.preloads(files, "/a/users.so b.so:c.so", none) == f"/a/users.so:b.so:c.so:{ours}"
    # One run within another, and another installation's shim: one engine a process, the innermost.
    assert _preload.preloads(files, _preload.preloads(files, "a.so", none), none) == f"a.so:{ours}"
    assert _preload.preloads(files, "/other/hook/libcuda.so.1:/other/hook/libcuda.so", none) == ours


def test_what_is_added_can_be_removed() -> None:
    files = hook.locate()
    own = {"LD_PRELOAD": "a.so", "LD_LIBRARY_PATH": "/x::/y", "ASAN_OPTIONS": "detect_leaks=0", "HOME": "/h"}
    added = {**own, **_preload.added(files, own)}
    assert added["LD_LIBRARY_PATH"] == f"{files.shim.parent}:/x::/y"
    assert added["ASAN_OPTIONS"] == "detect_leaks=0:verify_asan_link_order=0"
    assert {**added, **_preload.added(files, added)} == added
    assert {**_preload.removed(added), "ASAN_OPTIONS": own["ASAN_OPTIONS"]} == own
    bare = _preload.removed(_preload.added(files, {}))
    assert not bare.keys() & {"LD_PRELOAD", "LD_LIBRARY_PATH"}


@pytest.mark.parametrize("directory", ["/with space", "/with:colon", "/with;semicolon"])
def test_a_path_that_would_be_split_is_refused(directory: str) -> None:
    home = Path(directory)
    files = hook.Files(home / "_core.so", home / "e.so", home / "hook/libcuda.so.1", home / "hook/libcuda.so", home)
    with pytest.raises(package.HookError, match="cannot stand in LD_PRELOAD"):
        _preload.added(files, {})


# ---- programs ------------------------------------------------------------------------------------------------------

OPENS_C = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  int (*init)(unsigned) = library ? (int (*)(unsigned))dlsym(library, "cuInit") : 0;
  printf("%d\n", init ? init(0) : -1);
  return 0;
}
"""


def test_a_program_with_address_sanitizer_starts(
    cudasched: Run, simulated: Path, compile_c: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards ASAN_OPTIONS: its library refuses to start behind a preloaded one."""
    checked = compile_c("checked", OPENS_C, "-fsanitize=address", "-ldl")
    for command in ([str(checked)], ["sh", "-c", str(checked)]):
        done = cudasched("run", "--", *command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_users_library_in_front_of_the_driver_stays_in_front(
    cudasched: Run, simulated: Path, compile_c: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = compile_c(
        "libtracer.so",
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <unistd.h>\n"
        'int cuInit(unsigned f) { (void)!write(1, "traced\\n", 7);'
        ' return ((int (*)(unsigned))dlsym(RTLD_NEXT, "cuInit"))(f); }',
        "-shared",
        "-fPIC",
    )
    linked = compile_c("linked", "int cuInit(unsigned); int main(void) { return cuInit(0); }", hook.locate().shim)
    monkeypatch.setenv("LD_PRELOAD", str(tracer))
    done = cudasched("run", "--", str(linked))
    assert (done.returncode, done.stdout, done.stderr) == (0, "traced\n", "")


def test_a_start_script_that_preloads_anew_does_not_lose_the_hook(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(simulated.parent))  # where the loader would find the driver
    start = ["env", "LD_PRELOAD=libm.so.6", sys.executable, "-c", SEEN.format("") + "print(s.best_effort_launches)"]
    done = cudasched("run", "--class", "best_effort", "--", *start)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_a_program_of_another_c_library_starts(cudasched: Run, simulated: Path, compile_c: Compile) -> None:
    musl = shutil.which("musl-gcc")
    if musl is None:
        pytest.skip("no musl-gcc")
    other = compile_c("other", '#include <stdio.h>\nint main(void) { puts("started"); return 0; }\n', compiler=musl)
    for command in ([str(other)], ["sh", "-c", str(other)]):
        done = cudasched("run", "--", *command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_a_failed_start_of_a_child_leaves_the_engine_alone(cudasched: Run, simulated: Path) -> None:
    """Guards cudasched_finish: a child of vfork() that ends by _exit() is in its parent's memory."""
    code = SEEN.format("") + (
        "import subprocess\n"
        "try: subprocess.run(['/nonexistent'])\n"
        "except FileNotFoundError: print(cudasched.state().scheduling)\n"
        "gpu.launch(2); gpu.synchronize(); print(cudasched.state().launches)"
    )
    done = cudasched("run", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n7\n", "")


def test_an_end_in_a_signal_handler_comes_at_once(cudasched: Run, simulated: Path, compile_c: Compile) -> None:
    """Guards cudasched_finish: the thread that is interrupted may hold the allocator's lock, and any of ours."""
    ends = compile_c(
        "libends.so",
        "#include <signal.h>\n#include <stdlib.h>\n#include <sys/time.h>\n#include <unistd.h>\n"
        "static void end(int n) { _exit(n == SIGALRM ? 7 : 8); }\n"
        "void allocate(void) { struct itimerval soon = {{0, 0}, {0, 20000}}; signal(SIGALRM, end);\n"
        "  setitimer(ITIMER_REAL, &soon, 0); for (;;) free(malloc(1 << 20)); }\n",
        "-shared",
        "-fPIC",
    )
    code = SEEN.format("") + f"import ctypes; ctypes.CDLL({str(ends)!r}).allocate()"
    for _ in range(5):
        assert cudasched("run", "--class", "best_effort", "--", sys.executable, "-c", code).returncode == 7


def test_an_end_on_a_handlers_small_stack_needs_no_more_room(
    cudasched: Run, simulated: Path, compile_c: Compile
) -> None:
    """Guards the shim's `_exit`: crash reporters end programs in handlers on stacks of 8 KiB."""
    # A page that may not be touched lies below the stack; what the processor's registers take comes on top.
    ends = compile_c(
        "ends",
        "#include <signal.h>\n#include <sys/auxv.h>\n#include <sys/mman.h>\n#include <unistd.h>\n"
        "static void end(int n) { (void)n; _exit(7); }\n"
        "int main(void) { size_t bytes = (8192 + getauxval(51) + 4095) / 4096 * 4096;\n"
        "  char* all = mmap(0, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);\n"
        "  stack_t stack = {.ss_sp = all + 4096, .ss_size = bytes}; mprotect(all, 4096, PROT_NONE);\n"
        "  struct sigaction action = {.sa_handler = end, .sa_flags = SA_ONSTACK};\n"
        "  sigaltstack(&stack, 0); sigaction(SIGUSR1, &action, 0); raise(SIGUSR1); return 1; }\n",
        "-D_GNU_SOURCE",
    )
    assert cudasched("run", "--", str(ends)).returncode == 7


def test_the_least_stack_is_enough_for_the_first_call(cudasched: Run, simulated: Path, compile_c: Compile) -> None:
    """Guards the shim's look for the driver and for each function."""
    calls = compile_c(
        "calls",
        "#include <limits.h>\n#include <pthread.h>\nint cuInit(unsigned); int cuDeviceGetCount(int*);\n"
        "static void* call(void* n) { *(int*)n = -1; if (cuInit(0) == 0) cuDeviceGetCount(n); return n; }\n"
        "int main(void) { pthread_attr_t least; pthread_attr_init(&least); pthread_t thread; int count;\n"
        "  pthread_attr_setstacksize(&least, PTHREAD_STACK_MIN);\n"
        "  if (pthread_create(&thread, &least, call, &count) != 0) return 2;\n"
        "  pthread_join(thread, 0); return count == 1 ? 0 : 3; }\n",
        hook.locate().shim,
        "-pthread",
    )
    for name in ("normal", "latency", "best_effort"):
        done = cudasched("run", "--class", name, "--", str(calls))
        assert (done.returncode, done.stderr) == (0, "")


GPU_IN_C = r"""
#define IMAGE "cudasched-sim 1\nkernel work params=4 block_us=param:0\n"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
int cuInit(unsigned); int cuDeviceGet(int*, int); int cuDevicePrimaryCtxRetain(void**, int); int cuCtxSetCurrent(void*);
int cuModuleLoadData(void**, const void*); int cuModuleGetFunction(void**, void*, const char*); int cuCtxSynchronize();
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
static void *context, *module, *work;
static int begin(void) {
  int device;
  return cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) ||
         cuCtxSetCurrent(context) || cuModuleLoadData(&module, IMAGE) || cuModuleGetFunction(&work, module, "work");
}
static int launch(void) {
  unsigned us = 20;
  void* parameters[] = {&us};
  return cuLaunchKernel(work, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0);
}
"""


@pytest.mark.parametrize("name", ["latency", "best_effort"])
def test_a_cancelled_thread_ends_alone(cudasched: Run, simulated: Path, compile_c: Compile, name: str) -> None:
    """Guards the first launch, which opens files, and waits in the driver: each may unwind a thread's stack."""
    cancelled = compile_c(
        "cancelled",
        GPU_IN_C + "static atomic_int go, launched;\n"
        "static void* first(void* n) { cuCtxSetCurrent(context); while (!go) {}\n"
        "  launched = launch() == 0; pthread_testcancel(); return n; }\n"
        "static void* loop(void* n) { cuCtxSetCurrent(context); go = 1; for (;;) { launch(); cuCtxSynchronize(); } }\n"
        "static int ends(void* (*body)(void*), int early) { pthread_t thread; void* end; go = 0;\n"
        "  if (pthread_create(&thread, 0, body, 0)) return 0; if (!early) while (!go) {}\n"
        "  pthread_cancel(thread); go = 1; pthread_join(thread, &end); return end == PTHREAD_CANCELED; }\n"
        "int main(void) { if (begin() || !ends(first, 1) || !launched) return 1;\n"
        "  for (int i = 0; i < 20; ++i) if (!ends(loop, 0)) return 2;\n"
        "  return launch() || cuCtxSynchronize() ? 3 : 0; }\n",
        hook.locate().shim,
        "-pthread",
    )
    done = cudasched("run", "--class", name, "--", str(cancelled))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_limit_of_file_sizes_ends_no_program(cudasched: Run, simulated: Path, compile_c: Compile) -> None:
    """Guards SIGXFSZ, which Python ignores and other programs do not: the predictor's state is written at the end."""
    limited = compile_c(
        "limited",
        GPU_IN_C + "int main(void) { if (begin()) return 1; setrlimit(RLIMIT_FSIZE, &(struct rlimit){0, 0});\n"
        "  for (int i = 0; i < 5; ++i) if (launch()) return 2;\n"
        "  return cuCtxSynchronize() ? 3 : 0; }\n",
        hook.locate().shim,
    )
    for name in ("latency", "best_effort"):
        assert cudasched("run", "--class", name, "--", str(limited)).returncode == 0


@pytest.mark.parametrize("end", ["return 7", "_exit(7)"])
def test_an_end_without_memory_is_the_programs_own(
    cudasched: Run, simulated: Path, compile_c: Compile, end: str
) -> None:
    """Guards what is done at the end: it allocates nothing that the process has not used before."""
    full = compile_c(
        "full",
        GPU_IN_C + "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "int main(void) { if (begin() || launch() || cuCtxSynchronize()) return 1; long pages = 0;\n"
        '  FILE* file = fopen("/proc/self/statm", "r"); if (!file || fscanf(file, "%ld", &pages) != 1) return 2;\n'
        "  fclose(file); rlim_t bytes = (rlim_t)pages * 4096;\n"
        "  setrlimit(RLIMIT_AS, &(struct rlimit){bytes, bytes});\n"
        "  for (size_t size = 1 << 20; size >= 16; size /= 2) while (malloc(size)) {}\n"
        f"  {end}; }}\n",
        hook.locate().shim,
        "-O0",
    )
    for name in ("normal", "latency", "best_effort"):
        assert cudasched("run", "--class", name, "--", str(full)).returncode == 7


# ---- what goes past the shim ----------------------------------------------------------------------------------------

PAST = "has opened the driver by its path"


def test_a_driver_opened_by_its_path_is_said(cudasched: Run, python: Run, simulated: Path) -> None:
    code = SEEN.format(repr(str(simulated))) + "print(s.launches); print(s.off_reason)"
    done = cudasched("run", "--class", "best_effort", "--", sys.executable, "-c", code)
    assert done.stdout.splitlines()[0] == "0" and str(simulated) in done.stdout.splitlines()[1]
    assert done.stderr.count(PAST) == 1 and str(simulated) in done.stderr and str(hook.locate().shim) in done.stderr
    assert python(code).stderr.count(PAST) == 1
    assert PAST not in python(code, env={**os.environ, "CUDASCHED_OFF": "1"}).stderr


def test_a_driver_opened_by_a_worker_is_said_and_its_parents_is_said_once(cudasched: Run, simulated: Path) -> None:
    opens = f"import os, launcher\ndef use(): launcher.Gpu({str(simulated)!r}).launch(1)\n"
    in_worker = opens + "if os.fork() == 0: use(); os._exit(0)\nos.wait()"
    assert cudasched("run", "--", sys.executable, "-c", in_worker).stderr.count(PAST) == 1
    workers = opens + "use()\nfor _ in range(3):\n  if os.fork() == 0: os._exit(0)\n  os.wait()"
    assert cudasched("run", "--", sys.executable, "-c", workers).stderr.count(PAST) == 1


def test_a_reader_of_the_line_that_has_left_ends_no_program(command: str, simulated: Path, compile_c: Compile) -> None:
    """Guards the shim's own lines: SIGPIPE has its default in programs of C."""
    opens = compile_c(
        "opens",
        "#include <dlfcn.h>\nint main(int n, char** words) { return n == 2 && dlopen(words[1], RTLD_NOW) ? 6 : 1; }\n",
        "-ldl",
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([command, "run", "--", opens, simulated], stderr=writing, timeout=PATIENCE_S)
    finally:
        os.close(writing)
    assert done.returncode == 6


def test_a_failed_start_of_a_child_does_not_keep_the_parent_from_saying_it(cudasched: Run, simulated: Path) -> None:
    """Guards the look at the end: a child of vfork() that ends by _exit() is in its parent's memory."""
    code = (
        f"import launcher, subprocess; launcher.Gpu({str(simulated)!r}).launch(1)\n"
        "try: subprocess.run(['/nonexistent'])\n"
        "except FileNotFoundError: pass\n"
    )
    assert cudasched("run", "--", sys.executable, "-c", code).stderr.count(PAST) == 1


@pytest.mark.parametrize("end", ["pass", "os._exit(0)"])
def test_coverage_fails_for_a_program_that_went_past(cudasched: Run, simulated: Path, end: str) -> None:
    code = f"import os, launcher; launcher.Gpu({str(simulated)!r}).launch(1); {end}"
    done = cudasched("run", "--check-coverage", "--", sys.executable, "-c", code)
    assert done.returncode == 1
    assert "it opened the driver by its path" in done.stderr.replace("\n", " ")


# ---- programs that nothing is preloaded into -----------------------------------------------------------------------


def test_a_static_launcher_passes_the_hook_on(cudasched: Run, simulated: Path, compile_c: Compile) -> None:
    source = "#include <unistd.h>\nint main(int n, char** words) { execvp(words[1], words + 1); return 9; }\n"
    start = compile_c("start", source, "-static")
    done = cudasched("run", "--", str(start), sys.executable, "-c", SEEN.format("") + "print(s.launches)")
    assert (done.returncode, done.stdout) == (0, "5\n")
    assert done.stderr == (
        f"cudasched: warning: {start} is not managed, and programs that it starts or becomes are: it is statically "
        "linked\n"
    )


@pytest.mark.parametrize("right", ["setuid", "setgid", "setcap"])
def test_a_program_with_more_rights_is_told_apart(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str
) -> None:
    path = tmp_path / "true"
    shutil.copy("/bin/true", path)
    assert program.unreached(path) is None
    if right == "setcap":
        monkeypatch.setattr(os, "getxattr", lambda path, name: b"\x01\x00\x00\x02")
    else:
        path.chmod(0o755 | (stat.S_ISUID if right == "setuid" else stat.S_ISGID))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid)
    if path.stat().st_uid == 0:
        assert right == "setgid" or program.unreached(path) is None  # its caller's own rights
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 1234)
    found = program.unreached(path)
    assert found is not None and not found.passes_on and right in found.why
