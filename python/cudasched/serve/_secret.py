"""Files that only their user may read: the bearer token and the audit log."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import threading
import time
from pathlib import Path

from cudasched.errors import ConfigError, Error

__all__ = ["AuditLog", "state_directory", "token_from"]

_LEAST_TOKEN = 32
_MOST_TOKEN = 256
_AUDIT_BYTES = 10_000_000


def state_directory() -> Path:
    """Where both are by default: ``$XDG_STATE_HOME/cudasched``, else ``~/.local/state/cudasched``.

    Raises:
        ConfigError: Neither variable says where.
    """
    state, home = os.environ.get("XDG_STATE_HOME", ""), os.environ.get("HOME", "")
    if state.startswith("/"):
        return Path(state) / "cudasched"
    if home.startswith("/"):
        return Path(home) / ".local" / "state" / "cudasched"
    raise ConfigError("neither HOME nor XDG_STATE_HOME says where to keep the token: set --token-file and --audit-log")


def _open_private(path: Path, flags: int) -> int:
    """Opens a file of this user's that no other user may read or write.

    Raises:
        ConfigError: It is not such a file, or cannot be opened; says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ConfigError(f"{path} is a link, which is not followed: name the file itself") from None
        raise ConfigError(
            f"{path} cannot be opened: {error.strerror}; --token-file and --audit-log name other places"
        ) from None
    found = os.fstat(number)
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "is no regular file"
    elif found.st_uid != os.geteuid():
        why = "belongs to another user"
    elif found.st_mode & 0o077:
        why = f"can be read or written by others (its mode is {stat.S_IMODE(found.st_mode):04o}): chmod 600 it"
    if why:
        os.close(number)
        raise ConfigError(f"{path} {why}")
    return number


def _make_private(path: Path, content: str) -> bool:
    """Makes a file that is there whole or not at all; False: there is one already.

    Raises:
        ConfigError: The token cannot be made; the message has the reason.
    """
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(_open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return True


def token_from(path: Path) -> str:
    """The token in a file; a new one, of 256 random bits, where there is no such file.

    Raises:
        ConfigError: The file is not this user's alone, or has no token in it.
    """
    try:
        number = _open_private(path, os.O_RDONLY)
    except ConfigError:
        if os.path.lexists(path):
            raise
        token = secrets.token_urlsafe(32)
        if _make_private(path, token + "\n"):
            return token
        number = _open_private(path, os.O_RDONLY)  # another server has made the file meanwhile
    with os.fdopen(number, "rb") as file:
        token = file.read(4 * _MOST_TOKEN).decode("ascii", errors="replace").strip()
    if not _LEAST_TOKEN <= len(token) <= _MOST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path} has no token in it (32 to 256 printable characters without spaces): remove it, and one is made"
        )
    return token


class AuditLog:
    """The changes and their callers, a JSON object a line; for any number of threads.

    One that grows beyond 10 MB is renamed, with ``.1`` appended, and begun anew; so is one that was moved or removed.

    Args:
        path: The file, made with mode 0600 where it is missing.

    Raises:
        ConfigError: The file is not this user's alone, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = self._open()

    def _open(self) -> int:
        number = _open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(number).st_size
        if size and os.pread(number, 1, size - 1) != b"\n":  # of a server that was killed in the middle of a line
            self._append(number, b"\n")
        return number

    def _has_its_name(self) -> bool:
        """Whether the path still names the file: another server or a person may have moved or removed the file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _renew(self) -> None:
        """Renames the file, unless that has happened, and opens the new one."""
        full = self._file
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(full, fcntl.LOCK_EX)
        try:
            if self._has_its_name():
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._file = self._open()
        except BaseException:
            fcntl.flock(full, fcntl.LOCK_UN)
            raise
        os.close(full)

    @staticmethod
    def _append(number: int, line: bytes) -> None:
        """Writes a line whole, or leaves nothing of it."""
        written = os.write(number, line)
        if written != len(line):
            end = os.fstat(number).st_size
            if os.pread(number, written, end - written) == line[:written]:  # none has written behind this
                os.ftruncate(number, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, event: str, **fields: object) -> None:
        """Adds a line.

        Args:
            event: The event's name.
            fields: More of the event; any content stays on one line.

        Raises:
            Error: The disk is full, or no file can be made anew: an action that cannot be noted must not happen.
        """
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"time": moment, "event": event, **fields}, ensure_ascii=True) + "\n"
        try:
            with self._lock:
                if os.fstat(self._file).st_size > _AUDIT_BYTES or not self._has_its_name():
                    self._renew()
                self._append(self._file, line.encode("ascii"))
        except (OSError, ConfigError) as error:
            raise Error(f"the audit log {self.path} cannot be written: {error}") from None

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            os.close(self._file)
