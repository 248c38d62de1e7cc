"""`cudasched run`: the program with the shim preloaded and the settings in its environment."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cudasched import _preload, hook, mps
from cudasched._text import one_line
from cudasched.cli.program import ProgramError, find_program, unreached
from cudasched.config import Resolved, resolve, untold
from cudasched.errors import HookError

__all__ = ["configure", "plain", "run_program"]

_OPTIONS = {"client_class": "--class"}
_PLAIN = ("client_class", "slo_ms", "priority", "policy", "lead_us", "time_slice_us", "job", "memory_limit", "name")


def _option(field: str) -> str:
    return _OPTIONS.get(field, "--" + field.replace("_", "-"))


def plain(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """Reads ``run [SETTING VALUE]... [--] PROGRAM [ARGS]...`` as Typer would, without Typer.

    Returns:
        The program with its arguments, and fields of `cudasched.config.Config`; None for arguments of another form.
    """
    fields = {_option(field): field for field in _PLAIN}
    settings: dict[str, str] = {}
    left = list(arguments)
    if left[:1] != ["run"]:
        return None
    del left[0]
    while len(left) > 1 and left[0] in fields:
        settings[fields[left[0]]] = left[1]
        del left[:2]
    if left[:1] == ["--"]:
        del left[0]
    elif left and left[0].startswith("-"):
        return None
    return (left, settings) if left else None


def _warn(message: str) -> None:
    print(f"cudasched: warning: {one_line(message)}", file=sys.stderr, flush=True)


def configure(settings: Mapping[str, object] | None = None) -> Resolved:
    """Resolves the settings of a command, warns of those without effect, and puts them into the environment.

    Raises:
        ConfigError: A setting has no meaning.
    """
    resolved = resolve(settings, option=_option)
    for note in untold(resolved.notes, os.environ):
        _warn(note)
    _take_back_locale()
    os.environ.update(mps.priority(os.environ, resolved.chosen_class))
    os.environ.update(resolved.environment())
    return resolved


def _take_back_locale() -> None:
    """Python puts LC_CTYPE into the environment where the user's locale is C: not the program's."""
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return
    if not any(variable.startswith(b"LC_CTYPE=") for variable in given):
        os.environ.pop("LC_CTYPE", None)


def _join_mps(run_directory: Path) -> None:
    """Makes the program a client of the MPS daemon that it would find, else of this user's private one."""
    if mps.running_daemon(os.environ) is not None:
        return
    membership = mps.join(run_directory, os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ.update(membership.environment)
    membership.pass_on()


def run_program(
    program: Sequence[str],
    settings: Mapping[str, object],
    *,
    config_file: Path | None = None,
    check_coverage: bool = False,
    as_json: bool = False,
    with_mps: bool = False,
) -> int:
    """Becomes the program, or runs the program and checks its coverage.

    Args:
        program: The name and arguments.
        settings: Fields of `cudasched.config.Config`, None where not given.
        config_file: TOML file to use in place of the one that would be found.
        check_coverage: Run the program as a child, and report the seen part of its launches afterwards.
        as_json: Report as JSON (docs/json.md).
        with_mps: It is to be a client of CUDA's multi-process service, of a private daemon if there is none.

    Returns:
        Only with `check_coverage`: the program's exit code, or 1 if it succeeded and coverage is below 100% or
        cannot be told.

    Raises:
        ConfigError: A setting has no meaning.
        HookError: The installation is broken, or cannot be preloaded from where it is.
        MpsError: There is no MPS daemon, and none can be started.
        ProgramError: The program cannot be run.
    """
    if config_file is not None:
        os.environ["CUDASCHED_CONFIG"] = str(config_file.absolute())
    configure(settings)

    path = find_program(program[0], os.environ.get("PATH", os.defpath))
    apart = unreached(path)
    core = hook.load_core()
    try:
        core.find_driver()
    except HookError as error:
        untold([str(error)], os.environ)  # the program's own import of cudasched need not say it again
        _warn(f"{program[0]} runs unmanaged: {error}")
        _become(path, program)
    if apart and apart.passes_on:
        _warn(f"{program[0]} is not managed, and programs that it starts or becomes are: {apart.why}")
    elif apart:
        _warn(f"{program[0]} and its child processes run unmanaged: {apart.why}")
    if with_mps:
        _join_mps(Path(core.run_directory()))
    os.environ.update(_preload.added(hook.locate(), os.environ))
    if not check_coverage:
        _become(path, program)

    from cudasched.cli.coverage import run_counted

    return run_counted(path, program, as_json=as_json)


def _take_back_signals() -> None:
    """Python ignores these, and a program inherits that; as `subprocess` does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    # A service manager that starts us ignores SIGPIPE for the program.
    if os.environ.get("SYSTEMD_EXEC_PID") != str(os.getpid()):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _become(path: Path, program: Sequence[str]) -> NoReturn:
    _take_back_signals()
    try:
        os.execve(path, list(program), os.environ)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            raise ProgramError(f"{path} is neither an ELF program nor a script that begins with #!") from None
        raise ProgramError(f"{path} cannot be run: {error.strerror}") from None
