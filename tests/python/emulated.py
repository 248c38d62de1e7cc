"""Builds the checks of tests/csrc/kernels: a kernel of csrc/kernels for the host, compared with a reference."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support import ROOT

KERNELS = ROOT / "csrc" / "kernels"
EMULATED = ROOT / "tests" / "csrc" / "kernels"


class Builder:
    """Builds them with the standard library's headers precompiled, which are half of what a check takes.

    Args:
        directory: For the headers, or with those of another builder.
    """

    def __init__(self, directory: Path) -> None:
        self._compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-w"]
        self._headers = directory / "standard.hpp"
        precompiled = Path(f"{self._headers}.gch")
        if precompiled.exists():
            return
        sources = (path.read_text() for path in EMULATED.glob("*.[ch]pp"))
        included = {line for source in sources for line in re.findall(r"^#include <.*", source, re.MULTILINE)}
        self._headers.write_text("\n".join(sorted(included)))
        made = directory / "made.gch"  # what is left of one that was stopped is not taken for whole
        self._compile("-x", "c++-header", self._headers, "-o", made)
        made.rename(precompiled)

    def __call__(self, check: str, macros: Mapping[str, object], directory: Path) -> Path:
        """A program of one configuration.

        Args:
            check: A source of tests/csrc/kernels.
            macros: The configuration. They are defined behind the headers, whose own names they may have.
            directory: For the program.
        """
        defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
        source, program = directory / "configured.cpp", directory / "check"
        source.write_text(f'{defined}#include "{check}"\n')
        self._compile("-include", self._headers, f"-I{EMULATED}", f"-I{KERNELS}", source, "-o", program)
        return program

    def _compile(self, *arguments: str | Path) -> None:
        done = subprocess.run([*self._compiler, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
