"""The log of cudasched's Python beside warnings and errors: the standard library's logger ``cudasched``.

Where the program configures logging, records go where the program's own go. Otherwise records go where the engine's
lines go, in the same form and at the same levels (``csrc/base/log.hpp``, ``docs/logs.md``). That is standard error, or
the file of the setting ``log_file``. The level is that of the setting ``log``, until the program sets the logger's own.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator

__all__ = ["Handler", "Limit", "configure", "logger"]

logger = logging.getLogger("cudasched")
"""The logger; the engine's lines, which any thread may write at any time, do not pass through it."""

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_LINE_BYTES = 1023
_AT_ONCE = 30
_INTERVAL_S = 1.0


class Limit:
    """Some lines at once, then one an interval."""

    def __init__(
        self, burst: int = _AT_ONCE, interval_s: float = _INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Of one level.

        Args:
            burst: How many at once.
            interval_s: Then one each so many seconds.
            clock: In seconds.
        """
        self._interval_s, self._ahead_s, self._clock = interval_s, (burst - 1) * interval_s, clock
        self._paid_until_s = float("-inf")
        self._left_out = 0

    def admit(self) -> bool:
        """Whether a line may be written now; counted if not."""
        now = self._clock()
        if self._paid_until_s - now > self._ahead_s:
            self._left_out += 1
            return False
        self._paid_until_s = max(self._paid_until_s, now) + self._interval_s
        return True

    def take_left_out(self) -> int:
        """How many were left out since this was last asked."""
        left_out, self._left_out = self._left_out, 0
        return left_out


def _name(level: int) -> str:
    """The level's name in the engine; a level in between counts as the lower one."""
    return next((name for name, number in _LEVELS.items() if level >= number), "debug")


def _harmless(character: str) -> str:
    if character in "\n\t":
        return " "
    code = ord(character)
    return "?" if code < 0x20 or code == 0x7F else "??" if 0x80 <= code < 0xA0 else character


def line_of(level: int, message: str, *, now: float | None = None, pid: int = 0) -> bytes:
    """A line with its newline, in the form of ``csrc/base/log.hpp``.

    Args:
        level: Of logging.
        message: Of one line; terminal control characters are replaced.
        now: Seconds since 1970, of a file's line; None: on standard error.
        pid: Of a file's line.
    """
    text = f"cudasched: {_name(level)}: {message}"
    if now is not None:
        # Cut, not rounded, to the millisecond.
        when = datetime.datetime.fromtimestamp(int(now * 1000) // 1000, datetime.timezone.utc)
        text = f"{when:%Y-%m-%dT%H:%M:%S}.{int(now * 1000) % 1000:03d}Z {pid} {text}"
    encoded = "".join(map(_harmless, text)).encode("utf-8", "replace")
    return encoded[: _LINE_BYTES - 1] + b"\n"


class Handler(logging.Handler):
    """Writes as the engine does; never raises, and writes nothing where the program has configured logging."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limits = {name: Limit(clock=clock) for name in _LEVELS}

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, unless the root logger has handlers, to which it goes anyway."""
        if _goes_elsewhere():
            return
        limit = self._limits[_name(record.levelno)]
        if not limit.admit():
            return
        try:
            message = record.getMessage()
        except Exception as error:  # arguments that do not fit: not worth the program's own work
            message = f"{record.msg!r} ({type(error).__name__}: {error})"
        if record.exc_info and record.exc_info[1] is not None:
            message += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        left_out = limit.take_left_out()
        if left_out:
            _put(record.levelno, f"{left_out} lines were left out here: too many at once")
        _put(record.levelno, message)


def _goes_elsewhere() -> bool:
    return bool(logging.getLogger().handlers) and logger.propagate


@contextlib.contextmanager
def _without_sigpipe() -> Iterator[None]:
    """A pipe whose reader has left ends no program, also one with the signal's default of C programs."""
    only = {signal.SIGPIPE}
    was_pending = signal.SIGPIPE in signal.sigpending()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, only)
    try:
        yield
    finally:
        if not was_pending and signal.SIGPIPE in signal.sigpending():
            signal.sigtimedwait(only, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _put(level: int, message: str) -> None:
    path = os.environ.get("CUDASCHED_LOG_FILE", "")
    if path:
        line = line_of(level, message, now=time.time(), pid=os.getpid())
        with contextlib.suppress(OSError, ValueError), _without_sigpipe():
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            try:
                if os.write(descriptor, line) == len(line):
                    return
            finally:
                os.close(descriptor)
    with contextlib.suppress(OSError), _without_sigpipe():  # closed, or full: the line is lost
        os.write(2, line_of(level, message))


def configure() -> None:
    """Gives the logger its handler and the level that is set in the environment; again has no other effect."""
    if not any(isinstance(handler, Handler) for handler in logger.handlers):
        logger.addHandler(Handler())
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(os.environ.get("CUDASCHED_LOG", ""), logging.WARNING))
