"""The places of an installed package's files for building C++ programs (docs/cpp.md)."""

from __future__ import annotations

from pathlib import Path

from cudasched import hook
from cudasched.errors import HookError

__all__ = ["get_cmake_dir", "get_include"]


def get_include() -> str:
    """The directory of the C and C++ headers, which are included as ``cudasched/scheduler.hpp``.

    Raises:
        HookError: The package was not installed, or without them.
    """
    return _directory("include")


def get_cmake_dir() -> str:
    """The directory of the CMake package, ``cudasched_DIR`` for ``find_package(cudasched)``.

    Raises:
        HookError: The package was not installed, or without it.
    """
    return _directory("cmake")


def _directory(name: str) -> str:
    directory: Path = hook.locate().core.parent / name
    if not directory.is_dir():
        raise HookError(f"{directory} is missing: this cudasched was not installed with pip; reinstall it")
    return str(directory)
