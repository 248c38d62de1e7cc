"""Compiling the benchmarks' C and C++ programs (c_program.h is what the former share)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cudasched.demo.harness import HarnessError

ROOT = Path(__file__).resolve().parents[1]


def compile_c(made: Path, *sources: Path, options: Sequence[str] = ()) -> Path:
    """Compiles sources with the system's C compiler.

    Args:
        made: The program or library.
        sources: What it is made of, the one that it is named by first.
        options: Of the compiler, before the sources.

    Returns:
        `made`.

    Raises:
        HarnessError: There is no compiler, or it failed.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "gcc"
    return _compile([compiler, "-O2", "-std=c11", f"-I{ROOT}", *options], made, sources)


def compile_cpp(made: Path, *sources: Path, options: Sequence[str] = (), quickly: bool = False) -> Path:
    """The same with the C++ compiler, for programs made of what csrc/ and include/ have.

    Args:
        made: The program or library.
        sources: See `compile_c`.
        options: See there.
        quickly: Not optimised, and all sources as one, for a rehearsal.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or "g++"
    command = [compiler, "-std=c++20", "-DNDEBUG", '-DCUDASCHED_VERSION="benchmark"', "-pthread"]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'include'}"]
    if quickly:
        together = made.with_name(f"{made.name}.cpp")
        together.write_text("".join(f'#include "{source}"\n' for source in sources))
        sources = (together,)
    optimised = "-O0" if quickly else "-O2"
    return _compile([*command, *cuda_headers(), *includes, optimised, *options], made, sources)


def cuda_headers() -> list[str]:
    """Options of the compiler for cuda.h, from a toolkit or from PyPI."""
    homes = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvidia = importlib.util.find_spec("nvidia")
    homes += [Path(home) / "cu13" / "include" for home in (nvidia.submodule_search_locations or [] if nvidia else [])]
    homes += [Path("/usr/local/cuda/include")]
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parents[1] / "include")
    return [option for home in homes if (home / "cuda.h").is_file() for option in ("-isystem", str(home))]


def _compile(command: list[str], made: Path, sources: Sequence[Path]) -> Path:
    if shutil.which(command[0]) is None:
        raise HarnessError(f"no compiler {command[0]}: install gcc and g++, or name others in CC and CXX")
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "").split()  # ccache, where the build has one
    objects = [made.with_name(f"{made.name}.{place}.o") for place in range(len(sources))]
    compiled = [[*launcher, *command, "-c", "-o", str(o), str(s)] for o, s in zip(objects, sources, strict=True)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as several:
        all(several.map(_run, compiled))
    _run([*command, "-o", str(made), *map(str, objects), "-ldl", "-lm"])
    for each in objects:
        each.unlink()
    return made


def _run(command: list[str]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"{Path(command[-1]).name} does not compile:\n{done.stderr[-2000:]}")
    return True
