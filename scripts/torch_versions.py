"""Compiles the PyTorch extension (csrc/torch) against each PyTorch that it is for; not part of CI.

    .venv/bin/python scripts/torch_versions.py [VERSION...]

Downloads one wheel of each version, one at a time, and unpacks its headers; nothing is installed. Compiles as
`cudasched torch build` does, without linking. One line a version; the exit code is 1 if one fails. Pip's options come
from its environment: the wheels of PIP_INDEX_URL=https://download.pytorch.org/whl/cpu have 200 MB, the default ones
800.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

from cudasched.torch import _extension

VERSIONS = [f"2.{minor}" for minor in range(4, 14)]
"""Minor versions; the newest patch of each is taken."""


def download(version: str, directory: Path) -> Path:
    """A wheel of a version, for whichever Python has one.

    Raises:
        RuntimeError: There is none to be had.
    """
    said = ""
    platforms = ("manylinux_2_28_x86_64", "manylinux1_x86_64", "manylinux2014_x86_64", "linux_x86_64")
    for python in ("3.11", "3.12", "3.10"):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["-d", str(directory), "--python-version", python]
        command += [part for platform in platforms for part in ("--platform", platform)]
        done = subprocess.run([*command, f"torch=={version}.*"], capture_output=True, text=True)
        if done.returncode == 0:
            return next(directory.glob("torch-*.whl"))
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else said
    raise RuntimeError(f"no wheel: {said}")


def compiles(wheel: Path, directory: Path) -> str:
    """What the compiler says; empty if it compiles."""
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if name.startswith(("torch/include/", "torch/version.py"))]
        content.extractall(directory, names)
    version = wheel.name.split("-")[1]
    torch = SimpleNamespace(
        __version__=version,
        __file__=str(directory / "torch" / "__init__.py"),
        version=SimpleNamespace(cuda="any"),
        compiled_with_cxx11_abi=lambda: tuple(map(int, version.split("+")[0].split(".")[:2])) >= (2, 6),
    )
    _extension._check_version(torch)
    command = _extension.command(torch, directory / "observe.o", link=False)
    done = subprocess.run([*command, "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True)
    return done.stderr.strip()[:2000] if done.returncode != 0 else ""


def main() -> int:
    """Entry point; see the module's text."""
    failed = 0
    for version in sys.argv[1:] or VERSIONS:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            try:
                wheel = download(version, directory)
                said = compiles(wheel, directory)
                print(f"{wheel.name.split('-')[1]:<14}{said or 'compiles'}", flush=True)
            except (RuntimeError, _extension.ExtensionError) as error:
                said = str(error)
                print(f"{version:<14}{said}", flush=True)
        failed += bool(said)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
