"""`cudasched run`: the program with the shim preloaded and the settings in its environment."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cudasched import hook
from cudasched.cli.program import ProgramError, find_program, why_not_preloadable
from cudasched.config import resolve
from cudasched.errors import HookError

__all__ = ["preload", "run_program"]

_OPTIONS = {"client_class": "--class"}


def _option(field: str) -> str:
    return _OPTIONS.get(field, "--" + field.replace("_", "-"))


def _warn(message: str) -> None:
    print(f"cudasched: warning: {' '.join(message.split())}", file=sys.stderr, flush=True)


def preload(files: hook.Files, already: str) -> str:
    """The value of LD_PRELOAD: our libraries first, then what the user had.

    Args:
        files: Where our libraries are.
        already: The user's LD_PRELOAD. Shims in it, as another `cudasched run` has put there, are left out: one engine
            a process.

    Raises:
        HookError: The installation's path cannot stand in LD_PRELOAD.
    """
    ours = [str(files.shim), str(files.stub)]
    for path in ours:
        if any(character in path for character in " :\t\n"):
            raise HookError(
                f"{path} cannot stand in LD_PRELOAD, which is split at spaces and colons: install cudasched in a "
                "directory without them, or `import cudasched` in the program"
            )
    kept = [
        path
        for path in already.replace(":", " ").split()
        if not path.endswith(("hook/libcuda.so.1", "hook/libcuda.so"))
    ]
    return ":".join([*ours, *kept])


def run_program(
    program: Sequence[str], settings: Mapping[str, object], *, config_file: Path | None, check_coverage: bool
) -> int:
    """Becomes the program, or runs it and checks its coverage.

    Args:
        program: Its name and arguments.
        settings: Fields of `cudasched.config.Config`, None where not given.
        config_file: TOML file to use in place of the one that would be found.
        check_coverage: Run it as a child, and report afterwards what part of its launches was seen.

    Returns:
        Only with `check_coverage`: the program's exit code, or 1 if it succeeded and coverage is below 100%.

    Raises:
        ConfigError: A setting has no meaning.
        HookError: The installation is broken, or cannot be preloaded from where it is.
        ProgramError: The program cannot be run.
    """
    if config_file is not None:
        os.environ["CUDASCHED_CONFIG"] = str(config_file.absolute())
    os.environ.update(resolve(settings, option=_option).environment())

    path = find_program(program[0], os.environ.get("PATH", os.defpath))
    unreachable = why_not_preloadable(path)
    core = hook.load_core()
    try:
        core.find_driver()
    except HookError as error:
        _warn(f"{program[0]} runs unmanaged: {error}")
        _become(path, program)
    if unreachable:
        _warn(f"{program[0]} runs unmanaged: {unreachable}, so preloading has no effect on it")
    os.environ["LD_PRELOAD"] = preload(hook.locate(), os.environ.get("LD_PRELOAD", ""))
    if not check_coverage:
        _become(path, program)

    from cudasched.cli.coverage import run_counted

    return run_counted(path, program)


def _become(path: Path, program: Sequence[str]) -> NoReturn:
    try:
        os.execve(path, list(program), os.environ)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            raise ProgramError(f"{path} is neither an ELF program nor a script that begins with #!") from None
        raise ProgramError(f"{path} cannot be run: {error.strerror}") from None
