"""Compiled images on disk: one file for each source, set of macros, architecture and version of the compiler.

A file takes its place in one step, so that processes that compile the same at once do not disturb each other. Each file
has a checksum of its content. Where files cannot be written or read, each process compiles its kernels anew.

The files are machine code that is run: those are passed over which another user owns or may write, or whose directory
another user does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cudasched._scratch import cache_directory, ours

__all__ = ["Images", "directory", "key_of"]

_SUM_BYTES = 32
_MOST_FILES = 1024


def directory() -> Path | None:
    """``$XDG_CACHE_HOME/cudasched/kernels``, in ``~/.cache`` where that is not set; None without a home."""
    cache = cache_directory()
    return cache / "kernels" if cache else None


def key_of(sources: Sequence[tuple[str, bytes]], macros: Sequence[tuple[str, str]], target: str, compiler: str) -> str:
    """The name under which an image is kept: another one for any input that could change the image."""
    digest = hashlib.sha256()
    for part in (*(piece for name, text in sources for piece in (name.encode(), text)), b"|"):
        digest.update(len(part).to_bytes(8, "little") + part)
    for one in (*(f"{name}={value}" for name, value in sorted(macros)), target, compiler):
        digest.update(len(one).to_bytes(8, "little") + one.encode())
    return digest.hexdigest()[:40]


class Images:
    """The files of one directory. Any thread and any process may use it."""

    def __init__(self, path: Path | None) -> None:
        """Of a directory that need not be there; None: nothing is kept."""
        self._path = path

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image, made anew where its file is missing or damaged.

        Raises:
            Error: From `make`. Files that cannot be read or written are no error.
        """
        found = self._read(key)
        if found is None:
            found = make()
            self._write(key, found)
        return found

    def _file(self, key: str) -> Path | None:
        return self._path / f"{key}.cubin" if self._path else None

    def _read(self, key: str) -> bytes | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            if not ours(file.parent.stat()):
                return None
            with file.open("rb") as opened:
                if not ours(os.fstat(opened.fileno())):
                    return None
                content = opened.read()
        except OSError:
            return None
        image = content[_SUM_BYTES:]
        return image if image and hashlib.sha256(image).digest() == content[:_SUM_BYTES] else None

    def _write(self, key: str, image: bytes) -> None:
        file = self._file(key)
        if file is None:
            return
        temporary = ""
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not ours(file.parent.stat()):
                return
            handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")
            with os.fdopen(handle, "wb") as opened:
                opened.write(hashlib.sha256(image).digest() + image)
            os.replace(temporary, file)
            self._tidy(file.parent)
        except OSError:
            with contextlib.suppress(OSError):
                if temporary:
                    os.unlink(temporary)

    @staticmethod
    def _tidy(path: Path) -> None:
        """The oldest go where there are too many."""
        files = [one for one in path.iterdir() if one.suffix == ".cubin"]
        if len(files) > _MOST_FILES:
            files.sort(key=lambda one: one.stat().st_mtime)
            for one in files[: len(files) - _MOST_FILES]:
                one.unlink(missing_ok=True)
