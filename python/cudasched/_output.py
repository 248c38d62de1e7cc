"""Where a command's or a call's output goes: checked before the work begins, and written whole or not at all.

A regular file is replaced in one step, with its mode and owner kept; symbolic links stay links. Character devices,
pipes, ``/dev/stdout`` and other names of open files are written to and never replaced. Anything else is refused by
name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cudasched.errors import ConfigError, Error

__all__ = ["Output", "claimed", "unwritten"]

_MOST_LINKS = 40
_OPEN_FILE = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd/(\d+)")


def _follow(path: Path) -> Path:
    """The target of the path; not beyond a name in /proc that stands for an open file."""
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if _OPEN_FILE.fullmatch(str(path)) or not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise OSError(40, "too many symbolic links")


class Output:
    """One file that is going to be written.

    Attributes:
        path: The given path.
        is_stream: It is written to in place: a device, a pipe, an open file.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, option: str = "", parents: bool = False, formats: Sequence[str] = ()
    ) -> None:
        """Checks that the output can be written. Nothing is changed, but that missing directories are made if wanted.

        Args:
            path: The file, there or not.
            option: The option before the path, such as ``-o``; for messages.
            parents: Make the directories that are missing.
            formats: A file ends in one of these suffixes; empty: in any.

        Raises:
            ConfigError: It is nothing that can be written to, or may not be replaced; says why.
        """
        self.path = Path(path)
        self._named = f"{option} {self.path}".strip()
        self.is_stream = False
        self._mode: int | None = None
        try:
            self._target = _follow(self.path)
            if parents:
                self._target.parent.mkdir(parents=True, exist_ok=True)
            self._look()
        except ConfigError:  # a ValueError, too
            raise
        except (OSError, ValueError) as error:
            raise self._refused(f"it cannot be written: {getattr(error, 'strerror', None) or error}") from None
        if formats and not self.is_stream and self.path.suffix.lower() not in formats:
            raise self._refused(f"name a file that ends in {' or '.join(formats)}")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._named}: {why}")

    def _look(self) -> None:
        if _OPEN_FILE.fullmatch(str(self._target)):
            self._target.stat()
            self.is_stream = True
            return
        parent = self._target.parent
        if not parent.is_dir():
            raise self._refused(f"there is no directory {parent}")
        try:
            status = self._target.stat()
        except FileNotFoundError:
            status = None
        if status is not None:
            mode = status.st_mode
            if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                if not os.access(self._target, os.W_OK):
                    raise self._refused("you may not write to it")
                self.is_stream = True
                return
            if not stat.S_ISREG(mode):
                kinds = {stat.S_IFDIR: "a directory", stat.S_IFBLK: "a disk", stat.S_IFSOCK: "a socket"}
                raise self._refused(f"it is {kinds.get(stat.S_IFMT(mode), 'no file')}; name a file")
            if not os.access(self._target, os.W_OK):
                raise self._refused("the file is there, and you may not write to it")
            self._mode = stat.S_IMODE(mode)
        about = parent.stat()
        if not os.access(parent, os.W_OK | os.X_OK):
            raise self._refused(f"no file can be made in {parent}: you may not write to it, or it is read-only")
        if status is not None and about.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid, about.st_uid):
            raise self._refused("the file belongs to another user, in a directory where only its owner may replace it")

    @property
    def holds_something(self) -> bool:
        """There is a file with content in its place, which writing would replace."""
        try:
            return not self.is_stream and self._target.stat().st_size > 0
        except OSError:
            return False

    def refuse(self, path: str | os.PathLike[str], why: str) -> None:
        """Refuses an output that is the file of the path, by whatever name.

        Raises:
            ConfigError: It is; says why.
        """
        with contextlib.suppress(OSError):
            if _follow(Path(path)) == self._target:
                raise self._refused(why)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[Path]:
        """A file to be written, with the suffix of the output; when the block ends, it takes the output's place.

        If the block raises, the output is as it was.

        Raises:
            OSError: The file cannot be written.
        """
        directory = None if self.is_stream else self._target.parent
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.stem}-", suffix=self.path.suffix, dir=directory)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            if self.is_stream:
                self._pass_on(temporary)
            else:
                self._dress(temporary)
                os.replace(temporary, self._target)
        finally:
            temporary.unlink(missing_ok=True)

    def write(self, content: str | bytes) -> None:
        """Writes the whole content.

        Raises:
            Error: The file cannot be written.
        """
        try:
            with self.replacing() as temporary:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise Error(f"{self._named}: it cannot be written: {error.strerror or error}") from None

    def _dress(self, temporary: Path) -> None:
        """Gives the new file the mode and the owner of the old one, or a new file's."""
        mode = self._mode
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        else:
            with contextlib.suppress(OSError):
                old = self._target.stat()
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.chown(temporary, old.st_uid, old.st_gid)
        os.chmod(temporary, mode)

    def _pass_on(self, temporary: Path) -> None:
        own = _OPEN_FILE.fullmatch(str(self._target))
        if own and int(own[1]) == os.getpid():
            descriptor = os.dup(int(own[2]))  # its place in the file is shared: later output goes behind this
        else:
            descriptor = os.open(self._target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY)
        with open(temporary, "rb") as source, open(descriptor, "wb") as sink:
            shutil.copyfileobj(source, sink)


def unwritten(output: Path, error: OSError, directory: Path, command: str, *, stays: bool = True) -> Error:
    """Says why a command's file is not written, and where its records are; those of a stream are not beside it."""
    then = "are lost"
    if directory.parent != output.parent:
        then = "are lost: name a file with -o, beside which they stay"
    elif stays:
        then = f"stay in {directory}, and `cudasched {command} -o {output}` finishes it"
    return Error(f"{output} cannot be written ({error}); the recorded launches {then}")


@contextlib.contextmanager
def claimed(directory: Path, output: Path, command: str, *, new: bool) -> Iterator[None]:
    """Makes the directory of a command's files, or takes one that was left; it is this process's within the block.

    Args:
        directory: Only the user may read it.
        output: The file that the command makes of these.
        command: Its name.
        new: The directory must not exist yet.

    Raises:
        Error: Another process writes into the directory, a command that did not end left it, or it cannot be made.
    """
    there = False
    if new:
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            there = True
        except OSError as error:
            raise Error(f"{directory} cannot be made: {error.strerror}; choose another output") from None
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Error(f"{directory} cannot be opened: {error.strerror}; remove it, or choose another output") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Error(
                f"another `cudasched {command}` writes into {output} now; wait for it, or choose another file"
            ) from None
        except OSError:
            pass  # a file system without locks
        if there:
            raise Error(
                f"{directory} holds the files of a `cudasched {command} -o {output}` that was never finished: the same "
                "command finishes it, or remove the directory"
            )
        yield
    finally:
        os.close(descriptor)
