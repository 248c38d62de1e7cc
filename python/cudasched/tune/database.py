"""Measurements by GPU, kernel and shape, in SQLite: those of interrupted runs and of other runs.

Several processes may use one file: each measurement is written by itself, and none replaces one with more samples.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched._scratch import cache_directory
from cudasched._text import one_line, shown
from cudasched.errors import ConfigError, Error
from cudasched.tune.measurement import STATUSES, Measurement
from cudasched.tune.space import Configuration, Problem, configuration_key

__all__ = ["Database", "Key", "Run", "default_path"]

_VERSION = 1
_PATIENCE_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS measurements (
  gpu TEXT NOT NULL, kernel TEXT NOT NULL, fingerprint TEXT NOT NULL, shape TEXT NOT NULL, configuration TEXT NOT NULL,
  status TEXT NOT NULL, samples_us TEXT NOT NULL, message TEXT NOT NULL, registers INTEGER NOT NULL,
  local_bytes INTEGER NOT NULL, static_shared_bytes INTEGER NOT NULL, occupancy REAL NOT NULL,
  workspace_bytes INTEGER NOT NULL, sm_clock_mhz INTEGER NOT NULL, compile_s REAL NOT NULL, run_s REAL NOT NULL,
  discarded INTEGER NOT NULL, profile TEXT NOT NULL, updated REAL NOT NULL,
  PRIMARY KEY (gpu, kernel, fingerprint, shape, configuration)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
  run INTEGER PRIMARY KEY, gpu TEXT NOT NULL, kernel TEXT NOT NULL, fingerprint TEXT NOT NULL, shape TEXT NOT NULL,
  strategy TEXT NOT NULL, seed INTEGER NOT NULL, began REAL NOT NULL, ended REAL, evaluations INTEGER NOT NULL,
  best TEXT, best_us REAL, trace TEXT NOT NULL
);
"""
_COLUMNS = (
    *("status", "samples_us", "message", "registers", "local_bytes", "static_shared_bytes", "occupancy"),
    *("workspace_bytes", "sm_clock_mhz", "compile_s", "run_s", "discarded", "profile"),
)


def default_path() -> Path:
    """``$XDG_CACHE_HOME/cudasched/tune.sqlite``, in ``~/.cache`` where that is not set.

    Raises:
        ConfigError: Neither variable says where.
    """
    cache = cache_directory()
    if cache is None:
        raise ConfigError("neither HOME nor XDG_CACHE_HOME says where to keep measurements: name a file (--database)")
    return cache / "tune.sqlite"


def _from_json(text: object) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is no JSON")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")
    return value


def _length(text: object) -> int:
    """As SQLite's own, but other values than lists have no element: they are replaced."""
    try:
        found = _from_json(text)
    except ValueError:
        return 0
    return len(found) if isinstance(found, list) else 0


@dataclass(frozen=True)
class Key:
    """The subject of measurements.

    Attributes:
        gpu: The GPU's name.
        kernel: The function.
        fingerprint: Of the kernel's source and its launch (`Space.fingerprint`, `Live.fingerprint`).
        shape: By `Problem.key`.
    """

    gpu: str
    kernel: str
    fingerprint: str
    shape: str

    @classmethod
    def of(cls, problem: Problem, fingerprint: str) -> Key:
        """A problem's."""
        return cls(problem.gpu.name, problem.space.kernel, fingerprint, problem.key())

    @property
    def values(self) -> tuple[str, str, str, str]:
        """In the columns' form."""
        return self.gpu, self.kernel, self.fingerprint, self.shape


@dataclass(frozen=True)
class Run:
    """One run of a tuner.

    Attributes:
        run: The number.
        key: The run's subject.
        strategy: How.
        seed: Of the strategy.
        began: Seconds since the epoch.
        ended: Alike; None: under way, or interrupted.
        evaluations: The number of tried configurations.
        best: The best one.
        best_us: The best time.
        trace: Best time after each evaluation, us, from the first with a time on.
    """

    run: int
    key: Key
    strategy: str
    seed: int
    began: float
    ended: float | None
    evaluations: int
    best: dict[str, Any] | None
    best_us: float | None
    trace: tuple[float, ...]


class Database:
    """The file. A context manager, for one thread."""

    def __init__(self, path: str | Path) -> None:
        """Opens or creates the database.

        Raises:
            Error: It cannot be opened, or is no database of this version.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None)
            self._connection.create_function("json_array_length", 1, _length, deterministic=True)
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise Error(f"{self.path}: a database of version {version}; this cudasched reads version {_VERSION}")
            with contextlib.suppress(sqlite3.OperationalError):  # no shared memory there: slower, and right
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error as error:
            raise Error(f"{self.path}: the tuner's database cannot be opened: {error}") from None
        except (OSError, ValueError) as error:  # the latter for a name that no file can have
            why = getattr(error, "strerror", None) or error
            raise Error(f"{self.path}: the tuner's database cannot be opened: {why}") from None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection
        except sqlite3.Error as error:
            raise Error(f"{self.path}: the tuner's database cannot be used: {error}") from None

    @contextlib.contextmanager
    def _damaged(self) -> Iterator[None]:
        """SQLite keeps anything in any column: a foreign value raises an error with the file's name."""
        try:
            yield
        except (ValueError, TypeError, OverflowError) as error:
            why = one_line(str(error))
            raise Error(f"{self.path}: the tuner's database is damaged ({why}); remove it, or name another") from None

    def put(self, key: Key, configuration: Configuration, made: Measurement) -> None:
        """Keeps a measurement, unless there is one with more samples.

        Raises:
            Error: The database cannot be written.
        """
        names = ["gpu", "kernel", "fingerprint", "shape", "configuration", *_COLUMNS, "updated"]
        values: dict[str, Any] = {name: getattr(made, name) for name in _COLUMNS}
        values["samples_us"] = json.dumps([round(one, 3) for one in made.samples_us])
        values["profile"] = json.dumps(made.profile)
        updates = ", ".join(f"{name} = excluded.{name}" for name in [*_COLUMNS, "updated"])
        statement = (
            f"INSERT INTO measurements ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT DO UPDATE SET {updates} WHERE excluded.status <> 'disturbed' AND "
            "json_array_length(excluded.samples_us) >= json_array_length(measurements.samples_us)"
        )
        with self._guarded() as connection:
            connection.execute(
                statement, [*key.values, configuration_key(configuration), *values.values(), time.time()]
            )

    def get(self, key: Key) -> dict[str, Measurement]:
        """All measurements of a problem, by `configuration_key`.

        Raises:
            Error: It cannot be read, or is damaged.
        """
        with self._guarded() as connection:
            rows = connection.execute(
                f"SELECT configuration, {', '.join(_COLUMNS)} FROM measurements "
                "WHERE gpu = ? AND kernel = ? AND fingerprint = ? AND shape = ?",
                key.values,
            ).fetchall()
        found = {}
        for configuration, *values in rows:
            about = dict(zip(_COLUMNS, values, strict=True))
            with self._damaged():
                if not isinstance(_from_json(configuration), dict):
                    raise ValueError(f"{shown(configuration)} is no configuration")
                samples_us = tuple(_from_json(about.pop("samples_us")))
                profile = _from_json(about.pop("profile"))
                if about["status"] in STATUSES:  # of a later version
                    found[configuration] = Measurement.from_file(samples_us=samples_us, profile=profile, **about)
        return found

    def keys(self, kernel: str | None = None) -> list[Key]:
        """The subjects with measurements.

        Raises:
            Error: It cannot be read, or is damaged.
        """
        with self._guarded() as connection:
            rows = connection.execute(
                "SELECT DISTINCT gpu, kernel, fingerprint, shape FROM measurements WHERE ? IS NULL OR kernel = ? "
                "ORDER BY kernel, shape, gpu",
                (kernel, kernel),
            ).fetchall()
        with self._damaged():
            return [Key(*map(_as_text, row)) for row in rows]

    def others(self, key: Key) -> dict[str, dict[str, Measurement]]:
        """Measurements of the same kernel for other shapes on the same GPU, by shape."""
        keys = [one for one in self.keys(key.kernel) if one.gpu == key.gpu and one.fingerprint == key.fingerprint]
        return {one.shape: self.get(one) for one in keys if one.shape != key.shape}

    def begin_run(self, key: Key, strategy: str, seed: int) -> int:
        """Notes that a run begins. Returns the run's number."""
        with self._guarded() as connection:
            cursor = connection.execute(
                "INSERT INTO runs (gpu, kernel, fingerprint, shape, strategy, seed, began, evaluations, trace) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 0, '[]')",
                [*key.values, strategy, seed, time.time()],
            )
        return int(cursor.lastrowid or 0)

    def update_run(
        self, run: int, trace: Sequence[float], best: Configuration | None, best_us: float | None, ended: bool
    ) -> None:
        """Notes the run's progress."""
        with self._guarded() as connection:
            connection.execute(
                "UPDATE runs SET evaluations = ?, best = ?, best_us = ?, trace = ?, ended = ? WHERE run = ?",
                [
                    len(trace),
                    configuration_key(best) if best is not None else None,
                    best_us,
                    json.dumps([round(one, 3) for one in trace if math.isfinite(one)]),
                    time.time() if ended else None,
                    run,
                ],
            )

    def runs(self) -> list[Run]:
        """All runs, the latest first.

        Raises:
            Error: It cannot be read, or is damaged.
        """
        with self._guarded() as connection:
            rows = connection.execute(
                "SELECT run, gpu, kernel, fingerprint, shape, strategy, seed, began, ended, evaluations, best, "
                "best_us, trace FROM runs ORDER BY run DESC"
            ).fetchall()
        with self._damaged():
            return [
                Run(
                    run=int(row[0]),
                    key=Key(*map(_as_text, row[1:5])),
                    strategy=_as_text(row[5]),
                    seed=int(row[6]),
                    began=float(row[7]),
                    ended=None if row[8] is None else float(row[8]),
                    evaluations=int(row[9]),
                    best=dict(_from_json(row[10])) if row[10] else None,
                    best_us=None if row[11] is None else float(row[11]),
                    trace=tuple(float(one) for one in _from_json(row[12])),
                )
                for row in rows
            ]

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
