"""The shim as built, in real processes: every way to the driver leads through it, unharmed, whatever goes wrong.

The programs, the driver and the engine in here are small C files compiled by the tests; the shim and its stub are those
of CUDASCHED_LIB_DIR (the lib directory of a CMake build tree) or, without that, of the installed package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "csrc" / "hook"

# Prints what it is called with. Real names, made-up signatures: the shim must not depend on any.
DRIVER_C = r"""
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }

int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  printf("driver launch %p %u %u %u %u %u %u %u %p %p %p\n", f, gx, gy, gz, bx, by, bz, shared, stream,
         (void*)params, (void*)extra);
  return 700;
}

double cuEventElapsedTime_v2(double a, double b, double c, double d, double e, double f, double g, double h, double i,
                             double j, long k, long l, long m, long n, long o, long p, long q, long r, float s,
                             signed char t) {
  printf("driver mixed %g %g %g %g %g %g %g %g %g %g %ld %ld %ld %ld %ld %ld %ld %ld %g %d\n", a, b, c, d, e, f, g, h,
         i, j, k, l, m, n, o, p, q, r, s, t);
  return a + 0.5;
}

int cuProfilerInitialize(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = vprintf(format, arguments);
  va_end(arguments);
  return written;
}

struct wide { long first, second; };
struct wide cuCtxGetCurrent(long first) { return (struct wide){first, first + 1}; }

/* A result in memory: its address is a hidden argument. */
struct large { long words[8]; };
struct large cuCtxGetDevice(long first) {
  struct large result;
  for (int i = 0; i < 8; ++i) result.words[i] = first + i;
  return result;
}

/* Whole vector registers, which scalars alone do not fill. */
typedef float vector __attribute__((vector_size(16)));
int cuCtxSynchronize(vector a, vector b, vector c, vector d, vector e, vector f, vector g, vector h) {
  for (int i = 0; i < 4; ++i) {
    printf("driver %g %g %g %g %g %g %g %g\n", a[i], b[i], c[i], d[i], e[i], f[i], g[i], h[i]);
  }
  return 0;
}

int only_in_the_driver(void) { return 0; }

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, void* status) {
  *function = NULL;
  if (strcmp(symbol, "cuInit") == 0) *function = (void*)cuInit;
  if (strcmp(symbol, "cuLaunchKernel") == 0) *function = (void*)cuLaunchKernel;
  if (strcmp(symbol, "cuProfilerInitialize") == 0) *function = (void*)cuProfilerInitialize;
  if (strcmp(symbol, "cuEventElapsedTime") == 0) *function = (void*)cuEventElapsedTime_v2;
  if (strcmp(symbol, "cuCtxGetCurrent") == 0) *function = (void*)cuCtxGetCurrent;
  if (strcmp(symbol, "cuCtxGetDevice") == 0) *function = (void*)cuCtxGetDevice;
  return *function != NULL ? 0 : 500;
}
"""

# Takes over cuLaunchKernel, by cuGetProcAddress_v2 too. FAKE_ENGINE makes cudasched_attach misbehave.
ENGINE_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cudasched/engine.h"

typedef int launch_fn(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                      void**);
typedef int lookup_fn(const char*, void**, int, uint64_t, void*);
static launch_fn* real_launch;
static lookup_fn* real_lookup;

static int launch(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** params, void** extra) {
  puts("engine launch");
  return real_launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

static int lookup(const char* symbol, void** function, int version, uint64_t flags, void* status) {
  const int result = real_lookup(symbol, function, version, flags, status);
  if (strcmp(symbol, "cuLaunchKernel") == 0) *function = (void*)launch;
  return result;
}

void cudasched_finish(void) {
  if (getenv("SAYS_FINISH")) (void)!write(1, "finish\n", 7);
}

static const struct cudasched_override overrides[] = {
    {"cuLaunchKernel", (void*)launch},
    {"cuGetProcAddress_v2", (void*)lookup},
    {"cuNameThatNoDriverHas", (void*)launch},
    {NULL, NULL},
};

static int through_the_shim(void) {
  int version = -1;
  int (*get_version)(int*) = (int (*)(int*))dlsym(RTLD_DEFAULT, "cuDriverGetVersion");
  const int result = get_version(&version);
  return result == 0 ? version : -result;
}

const struct cudasched_override* cudasched_attach(void* driver, const char* path) {
  printf("attach %s\n", path);
  fflush(stdout);
  *(void**)&real_launch = dlsym(driver, "cuLaunchKernel");
  *(void**)&real_lookup = dlsym(driver, "cuGetProcAddress_v2");
  const char* mode = getenv("FAKE_ENGINE") ? getenv("FAKE_ENGINE") : "";
  if (strcmp(mode, "nothing") == 0) return NULL;
  if (strcmp(mode, "recurse") == 0) printf("recursive %d\n", through_the_shim());
  if (strcmp(mode, "slow") == 0) usleep(100000);
  if (strcmp(mode, "clobber") == 0) {
    __asm__ volatile(
        "pcmpeqd %%xmm0, %%xmm0; movaps %%xmm0, %%xmm1; movaps %%xmm0, %%xmm2; movaps %%xmm0, %%xmm3;"
        "movaps %%xmm0, %%xmm4; movaps %%xmm0, %%xmm5; movaps %%xmm0, %%xmm6; movaps %%xmm0, %%xmm7;"
        "xor %%edi, %%edi; xor %%esi, %%esi; xor %%edx, %%edx; xor %%ecx, %%ecx; xor %%r8d, %%r8d; xor %%r9d, %%r9d"
        ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "rdi", "rsi", "rdx", "rcx", "r8", "r9");
  }
  if (strcmp(mode, "backtrace") == 0) {
    void* frames[32];
    backtrace_symbols_fd(frames, backtrace(frames, 32), STDOUT_FILENO);
  }
  if (strcmp(mode, "fork") == 0) {
    unsetenv("FAKE_ENGINE");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      printf("child %d\n", through_the_shim());
      fflush(stdout);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("child ended %d\n", status);
  }
  if (strcmp(mode, "loader") == 0) {
    const volatile int* in_constructor = dlsym(RTLD_DEFAULT, "in_constructor");
    while (!*in_constructor) usleep(1000);
    printf("loaded %d\n", dlopen("libm.so.6", RTLD_NOW) != NULL);
  }
  return overrides;
}
"""

# host PRELOADS ROUTE [MODULE]: opens each of PRELOADS (comma-separated, or -) with RTLD_GLOBAL, then exercises the
# driver by ROUTE. Everything twice: once through the unresolved slots, once through the table.
HOST_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct wide { long first, second; };
struct large { long words[8]; };
typedef int init_fn(unsigned);
typedef int launch_fn(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                      void**);
typedef double mixed_fn(double, double, double, double, double, double, double, double, double, double, long, long,
                        long, long, long, long, long, long, float, signed char);
typedef int variadic_fn(const char*, ...);
typedef struct wide wide_fn(long);
typedef struct large large_fn(long);

#ifdef LINKED
init_fn cuInit;
launch_fn cuLaunchKernel;
mixed_fn cuEventElapsedTime_v2;
variadic_fn cuProfilerInitialize;
wide_fn cuCtxGetCurrent;
large_fn cuCtxGetDevice;
#define FIND(type, variable, plain, exported) type* variable = exported
#else
static void* library;
static const char* route;

static void* find(const char* plain, const char* exported) {
  void* function = NULL;
  if (strcmp(route, "procaddress") == 0) {
    int (*lookup)(const char*, void**, int, uint64_t, void*) = dlsym(library, "cuGetProcAddress_v2");
    if (lookup(plain, &function, 13000, 0, NULL) != 0) exit(3);
  } else {
    function = dlsym(library, exported);
  }
  if (function == NULL) exit(4);
  return function;
}
#define FIND(type, variable, plain, exported) type* variable = find(#plain, #exported)
#endif

int run(void) {
  for (int round = 0; round < 2; ++round) {
    errno = 4321;
    FIND(init_fn, init, cuInit, cuInit);
    FIND(launch_fn, launch, cuLaunchKernel, cuLaunchKernel);
    FIND(mixed_fn, mixed, cuEventElapsedTime, cuEventElapsedTime_v2);
    FIND(variadic_fn, variadic, cuProfilerInitialize, cuProfilerInitialize);
    FIND(wide_fn, wide, cuCtxGetCurrent, cuCtxGetCurrent);
    FIND(large_fn, large, cuCtxGetDevice, cuCtxGetDevice);
    printf("init %d", init(0));
    printf(" %d\n", init(7));
    printf("launch %d\n", launch((void*)0x1234, 1, 2, 3, 4, 5, 6, 7, (void*)0x8, (void**)0x9, (void**)0xa));
    printf("mixed %g\n", mixed(.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10, 11, 12, 13, 14, 15, 16, 17, 18.5f,
                               -19));
    printf("variadic %d\n", variadic("driver variadic %d %g %s %g\n", 1, 2.5, "three", 4.5));
    const struct wide both = wide(41);
    printf("wide %ld %ld\n", both.first, both.second);
    const struct large all = large(70);
    printf("large %ld %ld\n", all.words[0], all.words[7]);
  }
  fflush(stdout);
  return 0;
}

#ifdef EXECUTABLE
int main(int count, char** arguments) {
#ifndef LINKED
  if (count < 3) return 5;
  for (char* path = strtok(arguments[1], ","); path != NULL; path = strtok(NULL, ",")) {
    if (strcmp(path, "-") != 0 && dlopen(path, RTLD_NOW | RTLD_GLOBAL) == NULL) {
      fprintf(stderr, "%s\n", dlerror());
      return 6;
    }
  }
  route = arguments[2];
  if (strcmp(route, "module") == 0) {
    void* module = dlopen(arguments[3], RTLD_NOW | RTLD_LOCAL);
    if (module == NULL) {
      fprintf(stderr, "%s\n", dlerror());
      return 7;
    }
    int (*run_module)(void) = dlsym(module, "run");
    return run_module();
  }
  library = strcmp(route, "default") == 0 ? RTLD_DEFAULT
            : dlopen(strcmp(route, "short") == 0 ? "libcuda.so" : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL && strcmp(route, "default") != 0) {
    fprintf(stderr, "%s\n", dlerror());
    return 8;
  }
#endif
  return run();
}
#endif
"""

ROUND = """\
init 0 1
engine launch
driver launch 0x1234 1 2 3 4 5 6 7 0x8 0x9 0xa
launch 700
driver mixed 0.5 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5 9.5 10 11 12 13 14 15 16 17 18.5 -19
mixed 1
driver variadic 1 2.5 three 4.5
variadic 32
wide 41 42
large 70 77
"""


def library_directory() -> Path:
    """Where libcudasched.so, hook/ and simulate/ lie."""
    given = os.environ.get("CUDASCHED_LIB_DIR")
    if given:
        directory = Path(given).resolve()
    else:
        # In a process of its own: looking a submodule up imports its package, which installs the hook.
        code = "import importlib.util as u; print(u.find_spec('cudasched._core').origin)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            pytest.fail(
                "no shim to test: set CUDASCHED_LIB_DIR to the lib directory of a CMake build tree, or install the "
                f"package (pip install .). Looking for cudasched._core gave:\n{found.stderr}"
            )
        directory = Path(found.stdout.strip().splitlines()[-1]).parent
    if not (directory / "hook" / "libcuda.so.1").is_file():
        pytest.fail(f"no shim to test: {directory}/hook/libcuda.so.1 does not exist")
    return directory


@dataclass(frozen=True)
class Built:
    """The shim in a package directory of its own, beside a made-up engine, and a made-up driver."""

    directory: Path
    compile: Callable[..., Path]

    @property
    def shim(self) -> Path:
        return self.directory / "package" / "hook" / "libcuda.so.1"

    @property
    def stub(self) -> Path:
        return self.directory / "package" / "hook" / "libcuda.so"

    @property
    def engine(self) -> Path:
        return self.directory / "package" / "libcudasched.so"

    @property
    def driver(self) -> Path:
        return self.directory / "driver" / "libcuda.so.1"

    def run(self, command: Sequence[str | Path], **variables: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs to the end, with no CUDASCHED_ or loader variables but those given and the driver's path."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDASCHED_", "LD_"))}
        environment["CUDASCHED_DRIVER"] = str(self.driver)
        environment.update({name: str(value) for name, value in variables.items()})
        return subprocess.run(
            [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def program(self, name: str, body: str, *flags: str | Path) -> Path:
        """Compiles a program linked to the shim; `body` follows a few includes and the usual declarations."""
        prelude = """
            #define _GNU_SOURCE
            #include <dlfcn.h>
            #include <pthread.h>
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <sys/wait.h>
            #include <unistd.h>
            int cuInit(unsigned);
            int cuDriverGetVersion(int*);
            int cuDeviceGetCount(int*);
            int cuGetErrorName(int, const char**);
            int cuGetErrorString(int, const char**);
        """
        link = ["-rdynamic", "-pthread", self.shim, f"-Wl,-rpath,{self.shim.parent}"]
        return self.compile(name, textwrap.dedent(prelude) + body, *flags, *link)


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.fail("these tests compile small C programs and found no gcc; install one (apt-get install gcc)")
    return found


@pytest.fixture(scope="session")
def library(compiler: str) -> Path:
    return library_directory()


def build_tree(directory: Path, library: Path, compiler: str) -> Built:
    def compile_c(name: str, source: str, *flags: str | Path) -> Path:
        output = directory / name
        output.parent.mkdir(parents=True, exist_ok=True)
        source_file = output.with_name(output.name + ".c")
        source_file.write_text(source)
        command = [compiler, "-O1", "-g", "-w", f"-I{ROOT / 'include'}", "-o", output, source_file, *flags, "-ldl"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return output

    (directory / "package" / "hook").mkdir(parents=True)
    for name in ("libcuda.so.1", "libcuda.so"):
        shutil.copy(library / "hook" / name, directory / "package" / "hook" / name)
    built = Built(directory, compile_c)
    shared = ("-shared", "-fPIC", "-Wl,-Bsymbolic")
    compile_c("driver/libcuda.so.1", DRIVER_C, *shared, "-Wl,-soname,libcuda.so.1")
    compile_c("package/libcudasched.so", ENGINE_C, *shared)
    return built


@pytest.fixture(scope="session")
def built(library: Path, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Built:
    built = build_tree(tmp_path_factory.mktemp("routes"), library, compiler)
    built.compile("host", HOST_C, "-DEXECUTABLE", "-Wl,--no-as-needed")
    built.compile("linked", HOST_C, "-DEXECUTABLE", "-DLINKED", built.shim, f"-Wl,-rpath,{built.shim.parent}")
    # Linked to the driver's name alone: what it finds at run time is for the loader to say.
    built.compile("module.so", HOST_C, "-DLINKED", "-shared", "-fPIC", built.shim)
    return built


@pytest.fixture
def own(library: Path, compiler: str, tmp_path: Path) -> Built:
    """A tree that the test may damage."""
    return build_tree(tmp_path, library, compiler)


def readelf(path: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, str(path)], capture_output=True, text=True, check=True).stdout


def dynamic_entries(path: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.*)\]", readelf(path, "-d"))


def symbol_names() -> list[str]:
    command = [sys.executable, HOOK / "entry_points.py", "symbols"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


# ---- what the files are ----------------------------------------------------------------------------------------------


def test_exports_every_listed_function_and_nothing_else(library: Path) -> None:
    exported = {}
    for line in readelf(library / "hook" / "libcuda.so.1", "--dyn-syms").splitlines():
        parts = line.split()
        if len(parts) >= 8 and parts[0].rstrip(":").isdigit() and parts[6] != "UND":
            exported[parts[7]] = (parts[3], parts[4], parts[5])
    assert set(exported) == {*symbol_names(), "cudasched_shim_version", "_exit", "_Exit"}
    assert set(exported.values()) == {("FUNC", "GLOBAL", "DEFAULT")}


def test_needs_libc_alone(library: Path) -> None:
    shim = library / "hook" / "libcuda.so.1"
    allowed = {"libc.so.6", "ld-linux-x86-64.so.2"}
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", readelf(shim, "-V"))]
    if max(versions) < (2, 34):
        allowed.add("libdl.so.2")  # where glibc has dlopen in a file of its own
    assert set(dynamic_entries(shim, "NEEDED")) <= allowed


def test_names_and_flags_of_the_two_libraries(library: Path) -> None:
    shim, stub = library / "hook" / "libcuda.so.1", library / "hook" / "libcuda.so"
    assert dynamic_entries(shim, "SONAME") == ["libcuda.so.1"]
    assert "NODELETE" in readelf(shim, "-d")
    assert "IBT" in readelf(shim, "-n")
    assert dynamic_entries(stub, "SONAME") == ["libcuda.so"]
    assert dynamic_entries(stub, "NEEDED") == ["libcuda.so.1"]
    assert dynamic_entries(stub, "RPATH") == ["$ORIGIN"]
    for path in (shim, stub):
        assert path.is_file() and not path.is_symlink()
        assert "GNU_STACK" in readelf(path, "-l") and "RWE" not in readelf(path, "-l")
    assert sorted(entry.name for entry in shim.parent.iterdir()) == ["libcuda.so", "libcuda.so.1"]


def test_one_function_runs_at_load_and_one_at_the_end(library: Path) -> None:
    """What looks the next `_exit` up, and what says that the program went past the shim."""
    entries = re.findall(r"\((\w*(?:INIT|FINI)\w*)\) +(.*)", readelf(library / "hook" / "libcuda.so.1", "-d"))
    sizes = {name: value for name, value in entries if name.endswith("SZ")}
    assert sizes == {"INIT_ARRAYSZ": "8 (bytes)", "FINI_ARRAYSZ": "8 (bytes)"} and len(entries) == 4
    assert not re.search(r"INIT|FINI", readelf(library / "hook" / "libcuda.so", "-d"))


def test_needs_nothing_that_glibc_alone_has(library: Path) -> None:
    """musl's loader ends a program for one strong reference that it cannot resolve."""
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", library / "hook" / "libcuda.so.1"], capture_output=True, text=True, check=True
    )
    strong = {line.split()[1].partition("@")[0] for line in done.stdout.splitlines() if line.split()[0] == "U"}
    assert "dlopen" in strong
    assert not strong & {"dlvsym", "dlmopen", "dladdr1", "gnu_get_libc_version", "backtrace", "canonicalize_file_name"}
    assert not {name for name in strong if name.endswith("_chk") or name.startswith("__isoc")}


def cuda_include() -> Path | None:
    candidates = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates += [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    candidates.append(Path("/usr/local/cuda/include"))
    return next((candidate for candidate in candidates if (candidate / "cuda.h").is_file()), None)


@pytest.mark.parametrize(
    "define", ["CUDASCHED_PLAIN", "CUDA_API_PER_THREAD_DEFAULT_STREAM", "__CUDA_API_VERSION_INTERNAL"]
)
def test_every_function_of_the_headers_is_listed(compiler: str, define: str) -> None:
    include = cuda_include()
    if include is None:
        pytest.skip("no cuda.h here (CUDA_HOME, the nvidia-cuda-runtime wheel or /usr/local/cuda has it)")
    headers = [name for name in ("cuda.h", "cudaProfiler.h") if (include / name).is_file()]
    done = subprocess.run(
        [compiler, "-E", "-P", f"-D{define}", f"-I{include}", "-x", "c", "-"],
        input="".join(f"#include <{name}>\n" for name in headers),
        capture_output=True,
        text=True,
        check=True,
    )
    # cuGetProcAddress_v2_ptsz is defined in the header; no driver exports it.
    declared = set(re.findall(r"(?<!inline )\bCUresult\s+(cu[A-Z]\w*)\s*\(", done.stdout))
    assert len(declared) > 400
    assert declared <= set(symbol_names())


# ---- the ways to the driver ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["module", "soname", "short", "default", "procaddress"])
@pytest.mark.parametrize("loaded", ["preload", "dlopen", "both"])
def test_every_route_goes_through_the_shim(built: Built, loaded: str, route: str) -> None:
    preloads = f"{built.shim},{built.stub}" if loaded in ("dlopen", "both") else "-"
    variables = {"LD_PRELOAD": f"{built.shim}:{built.stub}"} if loaded in ("preload", "both") else {}
    done = built.run([built.directory / "host", preloads, route, built.directory / "module.so"], **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\n" + 2 * ROUND


@pytest.mark.parametrize("preloaded", [False, True])
def test_a_linked_program_goes_through_the_shim(built: Built, preloaded: bool) -> None:
    variables = {"LD_PRELOAD": str(built.shim)} if preloaded else {}
    done = built.run([built.directory / "linked"], **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\n" + 2 * ROUND


def test_the_preloaded_shim_stands_before_a_driver_on_the_library_path(built: Built) -> None:
    command: list[str | Path] = [built.directory / "host", "-", "soname"]
    done = built.run(command, LD_PRELOAD=built.shim, LD_LIBRARY_PATH=built.driver.parent, CUDASCHED_DRIVER="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\n" + 2 * ROUND
    assert "attach" not in built.run(command, LD_LIBRARY_PATH=built.driver.parent).stdout


def test_a_link_to_the_shim_finds_the_engine(built: Built, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(built.shim)
    done = built.run([built.directory / "host", "-", "soname"], LD_LIBRARY_PATH=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\n" + 2 * ROUND


def test_others_can_recognise_the_shim(built: Built) -> None:
    version = re.search(r'"(.*)"', (ROOT / "python" / "cudasched" / "_version.py").read_text().split("__version__")[1])
    assert version is not None
    program = built.program(
        "recognise", "const char* cudasched_shim_version(void); int main() { puts(cudasched_shim_version()); }"
    )
    done = built.run([program])
    assert (done.stdout, done.stderr) == (f"{version.group(1)}\n", "")


# ---- the first call --------------------------------------------------------------------------------------------------

THREADS_C = """
static pthread_barrier_t barrier;
static void* call(void* unused) {
  int version = 0;
  pthread_barrier_wait(&barrier);
  const int init = cuInit(0), got = cuDriverGetVersion(&version);
  return (void*)(long)(init == 0 && got == 0 && version == 13000);
}
int main(void) {
  pthread_t threads[16];
  long right = 0;
  pthread_barrier_init(&barrier, NULL, 16);
  for (int i = 0; i < 16; ++i) pthread_create(&threads[i], NULL, call, NULL);
  for (int i = 0; i < 16; ++i) {
    void* result;
    pthread_join(threads[i], &result);
    right += (long)result;
  }
  printf("right %ld\\n", right);
}
"""


@pytest.mark.parametrize("engine", ["", "slow"])
def test_threads_that_race_on_the_first_call_attach_once(built: Built, engine: str) -> None:
    program = built.program(f"threads{engine}", THREADS_C)
    for _ in range(5):
        done = built.run([program], FAKE_ENGINE=engine)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"attach {built.driver}\nright 16\n"


def test_fork_before_the_first_call_leaves_both_processes_whole(built: Built) -> None:
    program = built.program(
        "fork",
        """
        int main(void) {
          const pid_t child = fork();
          const int result = cuInit(0);
          if (child == 0) { fflush(stdout); _exit(result == 0 ? 42 : 1); }
          int status;
          waitpid(child, &status, 0);
          printf("parent %d child %d\\n", result, WEXITSTATUS(status));
        }
        """,
    )
    done = built.run([program])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * f"attach {built.driver}\n" + "parent 0 child 42\n"


def test_fork_during_the_first_call_leaves_both_processes_whole(built: Built) -> None:
    program = built.program("fork_inside", 'int main(void) { printf("init %d\\n", cuInit(0)); }')
    done = built.run([program], FAKE_ENGINE="fork")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * f"attach {built.driver}\n" + "child 13000\nchild ended 0\ninit 0\n"


def test_a_call_from_inside_the_first_call_reaches_the_driver(built: Built) -> None:
    program = built.program("recurse", 'int main(void) { printf("init %d\\n", cuInit(0)); }')
    done = built.run([program], FAKE_ENGINE="recurse")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\nrecursive 13000\ninit 0\n"


def test_a_constructor_that_calls_cuda_does_not_deadlock_with_the_first_call(built: Built) -> None:
    """Guards settle()'s patience: the constructor's thread holds the loader's lock, which the first call waits for."""
    module = built.compile(
        "constructor.so",
        """
        extern volatile int in_constructor, constructor_result;
        int cuInit(unsigned);
        __attribute__((constructor)) static void begin(void) {
          in_constructor = 1;
          constructor_result = cuInit(0);
        }
        """,
        "-shared",
        "-fPIC",
    )
    program = built.program(
        "loader_lock",
        f"""
        volatile int in_constructor, constructor_result = -1;
        static void* load(void* unused) {{
          usleep(100000);
          return dlopen("{module}", RTLD_NOW);
        }}
        int main(void) {{
          pthread_t loader;
          pthread_create(&loader, NULL, load, NULL);
          const int result = cuInit(0);
          pthread_join(loader, NULL);
          printf("init %d constructor %d\\n", result, constructor_result);
        }}
        """,
    )
    done = built.run([program], FAKE_ENGINE="loader")
    assert done.returncode == 0
    assert done.stdout == f"attach {built.driver}\nloaded 1\ninit 0 constructor 0\n"
    assert done.stderr.count("cudasched: warning: ") <= 1


def test_a_backtrace_goes_through_the_first_call(built: Built) -> None:
    program = built.program(
        "backtrace",
        """
        __attribute__((noinline)) int the_caller(void) { return cuInit(0) + 1; }
        int main(void) { return the_caller() - 1; }
        """,
    )
    done = built.run([program], FAKE_ENGINE="backtrace")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("the_caller") < done.stdout.index("(main+")


@pytest.mark.parametrize("first", ["mixed", "vectors"])
def test_arguments_of_the_first_call_survive_what_the_engine_does(built: Built, first: str) -> None:
    program = built.program(
        "first_" + first,
        """
        typedef float vector __attribute__((vector_size(16)));
        int cuCtxSynchronize(vector, vector, vector, vector, vector, vector, vector, vector);
        double cuEventElapsedTime_v2(double, double, double, double, double, double, double, double, double, double,
                                     long, long, long, long, long, long, long, long, float, signed char);
        int main(int count, char** arguments) {
          if (strcmp(arguments[1], "mixed") == 0) {
            printf("mixed %g\\n", cuEventElapsedTime_v2(.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10, 11, 12, 13,
                                                        14, 15, 16, 17, 18.5f, -19));
          } else {
            vector v[8];
            for (int i = 0; i < 32; ++i) v[i / 4][i % 4] = i;
            cuCtxSynchronize(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
          }
        }
        """,
    )
    done = built.run([program, first], FAKE_ENGINE="clobber")
    assert (done.returncode, done.stderr) == (0, "")
    expected = {
        "mixed": "driver mixed 0.5 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5 9.5 10 11 12 13 14 15 16 17 18.5 -19\nmixed 1\n",
        "vectors": "".join(f"driver {' '.join(str(4 * v + i) for v in range(8))}\n" for i in range(4)),
    }
    assert done.stdout == f"attach {built.driver}\n" + expected[first]


def test_neither_driver_nor_engine_becomes_visible_to_the_program(built: Built) -> None:
    program = built.program(
        "visible",
        """
        int main(void) {
          const int result = cuInit(0);
          printf("init %d %d %d\\n", result, dlsym(RTLD_DEFAULT, "only_in_the_driver") != NULL,
                 dlsym(RTLD_DEFAULT, "cudasched_attach") != NULL);
        }
        """,
    )
    assert built.run([program]).stdout.splitlines()[-1] == "init 0 0 0"


def test_errno_is_kept(built: Built) -> None:
    program = built.program(
        "errno", '#include <errno.h>\nint main(void) { errno = 77; cuInit(0); printf("errno %d\\n", errno); }'
    )
    assert built.run([program]).stdout.splitlines()[-1] == "errno 77"


# ---- what may go wrong -----------------------------------------------------------------------------------------------

CODES_C = """
int main(void) {
  int value = -5;
  const char* name = "unset";
  const char* text = "unset";
  printf("init %d", cuInit(0));
  printf(" version %d", cuDriverGetVersion(&value));
  printf(" count %d value %d\\n", cuDeviceGetCount(&value), value);
  const int codes[] = {0, 1, 3, 100, 801, 12345};
  for (int i = 0; i < 6; ++i) {
    printf("%d: %d", codes[i], cuGetErrorName(codes[i], &name));
    printf(" %d", cuGetErrorString(codes[i], &text));
    printf(" %s %s\\n", name ? name : "-", text ? text : "-");
  }
  printf("null: %d %d\\n", cuGetErrorName(0, NULL), cuGetErrorString(0, NULL));
}
"""


def one_warning(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the one warning on standard error."""
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("cudasched: warning: ")
    return lines[0]


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "other"])
def test_without_an_engine_every_call_passes_through(own: Built, damage: str) -> None:
    own.engine.unlink()
    if damage in ("empty", "text"):
        own.engine.write_text("" if damage == "empty" else "no library\n" * 100)
    elif damage == "other":
        own.compile("package/libcudasched.so", "int unrelated;", "-shared", "-fPIC")
    program = own.program("threads", THREADS_C)
    done = own.run([program])
    assert done.stdout == "right 16\n"
    assert str(own.engine) in one_warning(done)
    assert one_warning(done).endswith("every call passes through")
    assert own.run([program], CUDASCHED_LOG="error").stderr == ""


def test_an_engine_that_wants_nothing_leaves_every_call_to_the_driver(built: Built) -> None:
    done = built.run([built.directory / "linked"], FAKE_ENGINE="nothing")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"attach {built.driver}\n" + 2 * ROUND.replace("engine launch\n", "")


def test_off_leaves_every_call_to_the_driver(own: Built) -> None:
    own.compile("linked", HOST_C, "-DEXECUTABLE", "-DLINKED", own.shim, f"-Wl,-rpath,{own.shim.parent}")
    for word in ("1", "true", "Yes", "on"):
        done = own.run([own.directory / "linked"], CUDASCHED_OFF=word)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == 2 * ROUND.replace("engine launch\n", "")
    own.engine.unlink()
    done = own.run([own.directory / "linked"], CUDASCHED_OFF="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert own.run([own.directory / "linked"], CUDASCHED_OFF="0").stderr != ""


@pytest.mark.parametrize("problem", ["missing", "program", "shim", "stub", "unloadable"])
def test_without_a_driver_calls_fail_and_the_program_goes_on(built: Built, problem: str) -> None:
    driver = {
        "missing": Path("/nonexistent/libcuda.so.1"),
        "program": Path(sys.executable).resolve(),
        "shim": built.shim,
        "stub": built.stub,
        "unloadable": built.directory / "unloadable.so",
    }[problem]
    built.compile("unloadable.so", "int missing(void); int cuInit(void) { return missing(); }", "-shared", "-fPIC")
    program = built.program("codes", CODES_C)
    done = built.run([program], CUDASCHED_DRIVER=driver)
    assert str(driver) in one_warning(done)
    assert done.stdout.splitlines() == [
        "init 100 version 3 count 3 value -5",
        "0: 0 0 CUDA_SUCCESS no error",
        "1: 0 0 CUDA_ERROR_INVALID_VALUE invalid argument",
        "3: 0 0 CUDA_ERROR_NOT_INITIALIZED initialization error",
        "100: 0 0 CUDA_ERROR_NO_DEVICE no CUDA-capable device is detected",
        "801: 0 0 CUDA_ERROR_NOT_SUPPORTED operation not supported",
        "12345: 1 1 - -",
        "null: 1 1",
    ]


def test_a_function_that_the_driver_lacks_is_not_supported(built: Built) -> None:
    program = built.program(
        "lacks",
        'int main(void) { int n = -5; const int rc = cuDeviceGetCount(&n); printf("%d %d %d\\n", rc, n, cuInit(0)); }',
    )
    done = built.run([program])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "801 -5 0"


def test_a_driver_that_leads_back_to_the_shim_does_not_go_round_for_ever(built: Built) -> None:
    middle = built.compile("middle.so", "int middle;", "-shared", "-fPIC", "-Wl,--no-as-needed", built.shim)
    driver = built.compile(
        "round.so", "int unrelated;", "-shared", "-fPIC", "-Wl,--no-as-needed", middle, f"-Wl,-rpath,{built.directory}"
    )
    program = built.program("around", 'int main(void) { printf("init %d\\n", cuInit(0)); }')
    done = built.run([program], CUDASCHED_DRIVER=driver, CUDASCHED_OFF="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "init 801\n", "")


# ---- the end of a process --------------------------------------------------------------------------------------------

ENDS_C = """
int main(int count, char** words) {
  const char* const way = words[1];
  cuInit(0);
  fflush(stdout);
  if (strcmp(way, "_exit") == 0) _exit(4);
  if (strcmp(way, "_Exit") == 0) _Exit(4);
  return 4;
}
"""


@pytest.mark.parametrize(
    ("way", "code", "said"), [("_exit", 4, "finish\n"), ("_Exit", 4, "finish\n"), ("return", 4, "")]
)
def test_the_engine_is_told_of_an_end_without_exit_handlers(built: Built, way: str, code: int, said: str) -> None:
    program = built.program("ends", ENDS_C)
    done = built.run([program, way], SAYS_FINISH="1")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.partition("\n")[2].endswith(said) and ("finish" in done.stdout) == bool(said)


def test_an_exit_of_another_library_behind_the_shim_is_called(built: Built) -> None:
    behind = built.compile(
        "behind.so",
        "#include <sys/syscall.h>\n#include <unistd.h>\n"
        'void _exit(int code) { (void)!write(1, "behind\\n", 7); for (;;) syscall(SYS_exit_group, code + 1); }',
        "-shared",
        "-fPIC",
    )
    program = built.program("ends", ENDS_C)
    done = built.run([program, "_exit"], LD_PRELOAD=f"{built.shim}:{behind}", SAYS_FINISH="1")
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.endswith("finish\nbehind\n")


# ---- programs that never call CUDA -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["/bin/true"], [sys.executable, "-c", "pass"]])
def test_a_program_without_cuda_notices_nothing(own: Built, command: list[str]) -> None:
    own.engine.write_text("would fail to load")
    done = own.run(command, LD_PRELOAD=f"{own.shim}:{own.stub}", CUDASCHED_DRIVER="/nonexistent")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loading_opens_neither_driver_nor_engine(built: Built) -> None:
    done = built.run(["/bin/cat", "/proc/self/maps"], LD_PRELOAD=built.shim)
    assert str(built.shim) in done.stdout
    assert str(built.engine) not in done.stdout
    assert str(built.driver) not in done.stdout


# ---- the project's own engine and simulated driver -------------------------------------------------------------------


def test_the_real_engine_over_the_simulated_driver(library: Path, built: Built, tmp_path: Path) -> None:
    simulated = library / "simulate" / "libcuda.so.1"
    for path in (library / "libcudasched.so", simulated):
        if not path.is_file():
            pytest.skip(f"{path} is not built")
    program = built.program(
        "simulated",
        """
        int main(void) {
          int count = -1;
          const int init = cuInit(0), got = cuDeviceGetCount(&count);
          printf("%d %d %d\\n", init, got, count);
        }
        """,
    )
    hook = library / "hook"
    for way in ({"LD_LIBRARY_PATH": hook}, {"LD_PRELOAD": hook / "libcuda.so.1"}):
        done = built.run(
            [program], CUDASCHED_DRIVER=simulated, CUDASCHED_RUN_DIR=tmp_path / "run", CUDASCHED_SIM_DIR=tmp_path, **way
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "0 0 1\n"
