"""Checks of `cudasched run` before the start: the program exists, can run, and can be reached by preloading."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from cudasched.errors import Error

__all__ = ["ProgramError", "Unreached", "executable", "find_program", "unreached"]

_NOT_FOUND = 127
_CANNOT_RUN = 126
_MOST_INTERPRETERS = 4  # the kernel's limit

_MACHINES = {3: "x86 (32 bits)", 40: "ARM (32 bits)", 62: "x86-64", 183: "arm64", 243: "RISC-V"}
_OWN_MACHINE = 183 if platform.machine() == "aarch64" else 62
_CLASS_64 = 2
_LITTLE_ENDIAN = 1
_PT_INTERP = 3


class ProgramError(Error):
    """A program cannot be run.

    Attributes:
        exit_code: As a shell's: 127 if there is no such program, 126 if it cannot be run.
    """

    def __init__(self, message: str, exit_code: int = _CANNOT_RUN) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def find_program(name: str, search_path: str) -> Path:
    """The file that a name stands for, as a shell would find it.

    Args:
        name: A path if it has a slash, else looked for in `search_path`.
        search_path: Directories, separated by colons.

    Raises:
        ProgramError: The program does not exist, is a directory, or is not executable.
    """
    found: str | None = name
    if "/" not in name:
        found = shutil.which(name, path=search_path) or shutil.which(name, mode=os.F_OK, path=search_path)
    if not found or not os.path.exists(found):
        here = "; a file of this name is here: put its interpreter or ./ before it" if os.path.isfile(name) else ""
        raise ProgramError(f"no such program: {name}{here}", _NOT_FOUND)
    path = Path(found)
    if path.is_dir():
        raise ProgramError(f"{path} is a directory, not a program")
    if not os.access(path, os.X_OK):
        raise ProgramError(f"{path} is not executable; chmod +x it, or name its interpreter")
    return path


def executable(path: Path) -> str:
    """A program's file for `subprocess`, which would look for a name without a slash on the PATH.

    Args:
        path: Where it is; `Path` has dropped the "./" of a relative one.
    """
    return os.path.join(os.curdir, path)


@dataclass(frozen=True)
class Unreached:
    """A program that the loader preloads nothing into.

    Attributes:
        why: The reason.
        passes_on: The program hands its environment on, so that preloading reaches the programs that it starts or
            becomes.
    """

    why: str
    passes_on: bool


def unreached(path: Path) -> Unreached | None:
    """Looks into a program.

    Returns:
        Why a preloaded library has no effect on the program; None if it has one.

    Raises:
        ProgramError: It is made for another machine, is damaged, or is a script whose interpreter is missing.
    """
    for _ in range(_MOST_INTERPRETERS):
        try:
            with path.open("rb") as file:
                head = file.read(4096)
        except OSError:
            return None  # executable but not readable: only running it tells
        if not head.startswith(b"#!"):
            break
        words = head[2:].split(b"\n", 1)[0].split()
        interpreter = Path(os.fsdecode(words[0])) if words else Path()
        if not words or not interpreter.is_file():
            raise ProgramError(f"{path} is a script whose interpreter {str(interpreter)!r} does not exist")
        path = interpreter
    if not head.startswith(b"\x7fELF"):
        return None
    return _inspect_elf(path, head)


def _inspect_elf(path: Path, head: bytes) -> Unreached | None:
    try:
        elf_class, byte_order = head[4], head[5]
        (machine,) = struct.unpack_from("<H" if byte_order == _LITTLE_ENDIAN else ">H", head, 18)
    except (IndexError, struct.error):
        raise ProgramError(f"{path} is a damaged ELF file") from None
    if elf_class != _CLASS_64 or byte_order != _LITTLE_ENDIAN or machine != _OWN_MACHINE:
        made_for = _MACHINES.get(machine, f"ELF machine {machine}")
        raise ProgramError(f"{path} is made for {made_for}, and this cudasched for {_MACHINES[_OWN_MACHINE]}")
    try:
        (table,) = struct.unpack_from("<Q", head, 32)
        entry_bytes, count = struct.unpack_from("<HH", head, 54)
        with path.open("rb") as file:
            file.seek(table)
            entries = file.read(entry_bytes * count)
        types = {struct.unpack_from("<I", entries, entry_bytes * index)[0] for index in range(count)}
    except (OSError, OverflowError, ValueError, struct.error):
        raise ProgramError(f"{path} is a damaged ELF file") from None
    if _PT_INTERP not in types:
        return Unreached("it is statically linked", passes_on=True)
    if more := _more_rights(path):
        return Unreached(f"it has {more}, and the loader then ignores and removes LD_PRELOAD", passes_on=False)
    return None


def _more_rights(path: Path) -> str:
    """The rights that a program has beyond its caller's; "" if none."""
    status = path.stat()
    if status.st_mode & stat.S_ISUID and status.st_uid != os.geteuid():
        return "another user's rights (setuid)"
    if status.st_mode & stat.S_ISGID and status.st_gid != os.getegid():
        return "another group's rights (setgid)"
    try:
        os.getxattr(path, "security.capability")
    except OSError:
        return ""
    return "capabilities of its own (setcap)" if os.geteuid() != 0 else ""
