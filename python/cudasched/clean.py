"""Removes the files that cudasched keeps between runs and makes again by itself: ``cudasched clean``.

A place that a living process uses stays: the process holds a lock there, or has a file open or mapped. Both are checked
again right before a place is removed, and its locks are held until the place is gone. Lock files stay, because
processes take turns by them; so do the token and the audit log of ``cudasched serve``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cudasched import config, hook
from cudasched._scratch import cache_directory
from cudasched.control import _LONGEST_TRACE_S

__all__ = ["Cleaned", "clean"]


@dataclass(frozen=True)
class Cleaned:
    """A file or directory, and the outcome.

    Attributes:
        path: The present or former path.
        kind: The kind of content, such as ``client table``.
        bytes: On disk, with the content.
        outcome: ``unused``: removed, or would be; ``used`` by a living process: stays; ``refused``: belongs to another
            user, or cannot be removed.
        why: Of ``refused``.
    """

    path: Path
    kind: str
    bytes: int
    outcome: Literal["unused", "used", "refused"]
    why: str = ""


def _by_record(descriptor: int) -> None:
    """As client tables and simulated devices are locked: any byte of the file."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _by_file(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True)
class _Place:
    """Paths that are removed together.

    Attributes:
        kind: As in `Cleaned`.
        paths: The first names it; each may be missing.
        locks: Files and directories; a process that holds one uses the place.
        lock: Takes one, or raises BlockingIOError.
        used: By another sign.
    """

    kind: str
    paths: tuple[Path, ...]
    locks: tuple[Path, ...] = ()
    lock: Callable[[int], None] = _by_file
    used: bool = False


@contextlib.contextmanager
def _alone(place: _Place) -> Iterator[bool]:
    """Holds the locks of a place; False: a living process uses it."""
    with contextlib.ExitStack() as held:
        try:
            for path in place.locks:
                with contextlib.suppress(FileNotFoundError):
                    kind = os.O_DIRECTORY if path.is_dir() else os.O_RDWR
                    descriptor = os.open(path, kind | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                    held.callback(os.close, descriptor)
                    place.lock(descriptor)
                    if not os.path.samestat(os.fstat(descriptor), path.lstat()):
                        raise BlockingIOError  # replaced meanwhile, by a process that lives
        except BlockingIOError:
            yield False
        else:
            yield not place.used and _opened().isdisjoint(_files(place))


def _is_used(place: _Place) -> bool:
    try:
        with _alone(place) as alone:
            return not alone
    except OSError:
        return True


def _entries(place: _Place) -> Iterator[Path]:
    """Each existing path of a place, and all paths below."""
    for path in filter(os.path.lexists, place.paths):
        yield path
        if path.is_symlink():
            continue
        for directory, names, files in os.walk(path):
            yield from (Path(directory) / name for name in (*names, *files))


def _files(place: _Place) -> set[str]:
    return {os.path.realpath(entry) for entry in _entries(place)}


def _opened() -> set[str]:
    """The files that other processes have open or mapped, of all that this one may look at."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            found.update(os.readlink(one) for one in (process / "fd").iterdir())
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="surrogateescape").splitlines()
            found.update(line[line.index("/") :] for line in lines if "/" in line)
    return found


def _of_cache(cache: Path, everything: bool) -> Iterator[_Place]:
    yield _Place("compiled kernels", (cache / "kernels",))
    for path in sorted(cache.glob("torch-*")):
        yield _Place("PyTorch extension", (path,))
    if everything:
        yield _Place("tuner's measurements", tuple(cache / f"tune.sqlite{part}" for part in ("", "-wal", "-shm")))


def _of_predictor(state: Path, living: set[str], everything: bool) -> Iterator[_Place]:
    """The GPUs of `living` have clients, which write their history again."""
    for path in sorted(state.glob("predictor-*.state*")):
        gpu = path.name.removeprefix("predictor-").partition(".state")[0]
        yield _Place("predictor's history", (path,), used=gpu in living)
    if everything:
        for path in sorted(state.glob("models/sm_*")):
            yield _Place("trained model", (path,))


def _tables(run: Path) -> Iterator[_Place]:
    for path in sorted(run.glob("*.arbiter")):
        yield _Place("client table", (path, path.with_name(f"{path.name}.new")), locks=(path,), lock=_by_record)


def _of_runs(run: Path) -> Iterator[_Place]:
    """Of the run directory, but for client tables."""
    for path in sorted(path for path in run.glob("traces/*") if path.is_dir()):
        with contextlib.suppress(OSError):
            newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            lock = path.with_name(f"{path.name}.lock")
            yield _Place("trace's records", (path, lock), locks=(lock,), used=time.time() - newest < _LONGEST_TRACE_S)
    for path in sorted(run.glob("mps*")):
        locks = (path / "clients", path / "keeper")
        yield _Place("MPS daemon's files", (path / "log", path / "pipe"), locks=locks)


def _of_simulation(simulated: Path) -> Iterator[_Place]:
    for path in sorted(simulated.glob("device-*")):
        yield _Place("simulated GPU", (path,), locks=(path,), lock=_by_record)


def _scratch() -> Iterator[_Place]:
    """Of programs that were killed; without those of other users."""
    for parent in sorted({tempfile.gettempdir(), "/dev/shm"}):
        for path in sorted(Path(parent).glob("cudasched.*-*")):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.geteuid():
                    yield _Place("temporary directory", (path,), locks=(path,))


def _in(directory: Path, find: Callable[[Path], Iterable[_Place]]) -> Iterator[_Place]:
    """The places in a directory of this user; for another user's, the directory itself, which is refused."""
    if directory.is_dir():
        yield from find(directory) if directory.stat().st_uid == os.geteuid() else (_Place("directory", (directory,)),)


def _places(everything: bool) -> Iterator[_Place]:
    settings = config.resolve(tolerant=True).config
    run = Path(settings.run_dir or hook.load_core().run_directory())
    living = {table.paths[0].stem for table in _in(run, _tables) if _is_used(table)}
    if cache := cache_directory():
        yield from _in(cache, lambda directory: _of_cache(directory, everything))
    if models := config.models_directory(settings):
        yield from _in(models.parent, lambda directory: _of_predictor(directory, living, everything))
    yield from _in(run, lambda directory: (*_tables(directory), *_of_runs(directory)))
    simulated = Path(os.environ.get("CUDASCHED_SIM_DIR") or f"/dev/shm/cudasched-sim-{os.geteuid()}")
    yield from _in(simulated, _of_simulation)
    yield from _scratch()


def _foreign(place: _Place) -> str:
    """The owner, if not this user."""
    for path in filter(os.path.lexists, place.paths):
        if (owner := path.lstat().st_uid) != os.geteuid():
            return f"it belongs to user {owner}"
    return ""


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clean(place: _Place, dry_run: bool) -> Cleaned:
    """Raises OSError: It cannot be looked at or removed."""
    held = sum(entry.lstat().st_blocks * 512 for entry in _entries(place))
    if why := _foreign(place):
        return Cleaned(place.paths[0], place.kind, held, "refused", why)
    with _alone(place) as alone:
        if alone and not dry_run:
            for path in filter(os.path.lexists, place.paths):
                _remove(path)
    return Cleaned(place.paths[0], place.kind, held, "unused" if alone else "used")


def clean(*, dry_run: bool = False, everything: bool = False) -> Iterator[Cleaned]:
    """Removes caches, unused tables, and files of killed programs, one after another.

    Args:
        dry_run: Name the places to remove, and remove nothing.
        everything: Trained models and the tuner's measurements, too: they cost time on a GPU.

    Yields:
        Each place that there is.

    Raises:
        HookError: The package was not built.
    """
    for place in _places(everything):
        if any(map(os.path.lexists, place.paths)):
            try:
                yield _clean(place, dry_run)
            except OSError as error:
                yield Cleaned(place.paths[0], place.kind, 0, "refused", error.strerror or str(error))
