"""Compiling the benchmarks' C programs (c_program.h is what they share)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cudasched.demo.harness import HarnessError

ROOT = Path(__file__).resolve().parents[1]


def compile_c(made: Path, *sources: Path, options: tuple[str, ...] = ()) -> Path:
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
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise HarnessError("no C compiler: install gcc, or name one in CC")
    command = [compiler, "-O2", "-std=c11", f"-I{ROOT}", *options, "-o", str(made), *map(str, sources), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"{sources[0].name} does not compile:\n{done.stderr[-2000:]}")
    return made
