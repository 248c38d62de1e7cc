"""The ``cudasched`` command. Errors are one line on standard error; a setting without meaning exits with 2."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from cudasched import _text
from cudasched.cli.run import plain, run_program
from cudasched.errors import ConfigError, Error

__all__ = ["main"]

_USAGE = 2
_INTERRUPTED = 130


class _ClosedOutput(io.TextIOBase):
    """Stands for a standard output that was closed before the program began."""

    used = False

    def write(self, text: str) -> int:
        self.used = True
        return len(text)


def _open_standard_files() -> None:
    """A descriptor that the caller has closed would be the next file that is opened; Python has None for it."""
    with contextlib.suppress(OSError):  # there may be no /dev
        while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
            pass
        os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process lives


def _fail(message: str, code: int) -> NoReturn:
    if message:  # a group without a command has printed its help
        print(f"cudasched: error: {_text.one_line(message)}", file=sys.stderr)
    if not isinstance(sys.stdout, _ClosedOutput):
        try:
            sys.stdout.flush()
        except OSError:  # else the rest of its buffer would be written at exit, which would be another error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """The message of an error, and the exit code: no error that a user can cause ends in a traceback."""
    if isinstance(error, ConfigError):
        return str(error), _USAGE
    if isinstance(error, Error):
        return str(error), getattr(error, "exit_code", 1)
    # Usage errors: their class is click's or typer's own copy, by typer's version.
    if hasattr(error, "format_message"):
        return error.format_message() or str(error), getattr(error, "exit_code", _USAGE)
    if isinstance(error, OSError):
        what = os.fsdecode(error.filename) if error.filename is not None else ""
        if error.errno == errno.EAGAIN:
            return "no process or thread can be started: raise the limit of processes (ulimit -u)", 1
        if not what and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT):
            what = "the output cannot be written"
        return ": ".join(filter(None, (what, error.strerror or str(error)))), 1
    if isinstance(error, MemoryError):
        return "there is not enough memory", 1
    if os.environ.get("CUDASCHED_LOG") == "debug":
        traceback.print_exception(error)
    kind = type(error).__name__
    return f"this is a mistake in cudasched ({kind}: {error}); CUDASCHED_LOG=debug shows where: please report it", 1


def _call(arguments: Sequence[str]) -> object:
    """Runs the arguments' command. Typer takes longer to load than the rest: a plain `run` starts without Typer."""
    if (found := plain(arguments)) is not None:
        return run_program(*found)
    import typer

    from cudasched.cli.app import application

    try:
        command = typer.main.get_command(application(arguments[0] if arguments else ""))
        return command.main(arguments, prog_name="cudasched", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None


def main() -> NoReturn:
    """The entry point. Exits with the command's code: of a program it ran, 127 and 126 as a shell's, 2 for usage."""
    _open_standard_files()
    try:
        code = _call(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left; nothing is to be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        _fail(*_explain(error))
    if isinstance(sys.stdout, _ClosedOutput) and sys.stdout.used:
        _fail("the output cannot be written: standard output is closed", 1)
    sys.exit(code if isinstance(code, int) else 0)
