"""Where files are kept between runs, and temporary directories that do not outlive their program for long.

A directory that is removed in good order is gone at once. That of a killed process has lost its lock, and the next
process that makes such a directory removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["Scratch", "cache_directory", "ours"]

_LONGEST_LEFT = 64  # directories that are looked at, of those that others left


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path | None:
    """``$XDG_CACHE_HOME/cudasched``, else ``~/.cache/cudasched``; None where neither variable has an absolute path."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if cache.startswith("/"):
        return Path(cache) / "cudasched"
    return Path(home) / ".cache" / "cudasched" if home.startswith("/") else None


def ours(seen: os.stat_result) -> bool:
    """Whether this user or the administrator alone decides the content of a file or directory."""
    return seen.st_uid in (os.geteuid(), 0) and not seen.st_mode & _OTHERS_WRITE


class Scratch:
    """A new directory of this process's own, locked while it lives; a context manager.

    Attributes:
        path: The directory, mode 0700.
    """

    def __init__(self, purpose: str, *, in_memory: bool = False) -> None:
        """Makes a directory, and removes those of the same purpose whose processes are gone.

        Args:
            purpose: Part of the name: ``cudasched.<purpose>-...``.
            in_memory: In ``/dev/shm`` where possible: mapped files there are never written to disk.

        Raises:
            OSError: The directory cannot be made.
        """
        parent = "/dev/shm" if in_memory and os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        prefix = f"cudasched.{purpose}-"
        _sweep(Path(parent), prefix)
        # Under another name until locked, so that no other process takes the directory for an abandoned one.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(made.name[1:])
        made.rename(self.path)

    def close(self) -> None:
        """Removes the directory. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sweep(parent: Path, prefix: str) -> None:
    """Removes directories of that name that belong to this user and that no process has locked."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return
    for name in names[:_LONGEST_LEFT]:
        try:
            lock = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(parent / name, ignore_errors=True)
        except OSError:
            pass  # the process lives
        finally:
            os.close(lock)
