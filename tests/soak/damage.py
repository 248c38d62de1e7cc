"""Damaged files, and what reading them ends in: an answer or one of cudasched's errors; nothing else will do.

Each reader runs in a process of its own (``python -m tests.soak.damage KIND SEED COUNT``), so that a crash or
a hang costs that process, and is seen. Tests run a few hundred, ``python -m tests.soak.mutations`` thousands.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900.0
_MOST_SAID = 100

TOML = b"""class = "latency"
priority = 3
slo_ms = 2.5
offload = true
policy = "slack"
lead_us = "auto"
name = "a server"
"""


def mutate(chance: random.Random, content: bytes) -> bytes:
    """A few bytes changed, removed, repeated or put in; or the end cut off."""
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.randrange(len(damaged) or 1)
        length = chance.choice((1, 1, 4, 16, 64))
        what = chance.randrange(6)
        if what == 0 and damaged:
            damaged[place] ^= 1 << chance.randrange(8)
        elif what == 1:
            damaged[place : place + length] = bytes(chance.randrange(256) for _ in range(length))
        elif what == 2:
            del damaged[place : place + length]
        elif what == 3:
            damaged[place:place] = damaged[place : place + length] * chance.choice((1, 2, 50))
        elif what == 4:
            damaged[place:place] = chance.choice((b"[" * 500, b"9" * 5000, b"\xff" * 8, b"\0", b"\x1b[2J", b'"', b"="))
        else:
            del damaged[place:]
    return bytes(damaged)


def recording(path: Path) -> None:
    """A small data set of launches, as `cudasched collect` writes it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from cudasched.collect._dataset import _SEAL, _seal, schema

    rows, chance = 300, np.random.default_rng(1)
    columns = []
    for entry in schema():
        if pa.types.is_dictionary(entry.type):
            texts = ["kernel"] * rows if entry.name == "kind" else [f"{entry.name}_{row % 5}" for row in range(rows)]
            columns.append(pa.array(texts).dictionary_encode())
        elif pa.types.is_list(entry.type):
            lists = [[int(value) for value in chance.integers(0, 50, 4)] for _ in range(rows)]
            columns.append(pa.array(lists if entry.name == "words" else [[] for _ in lists], entry.type))
        elif entry.name == "submitted_ns":
            columns.append(pa.array(range(0, rows * 20_000, 20_000), entry.type))
        elif entry.name == "start_ns":
            columns.append(pa.array(range(5_000, 5_000 + rows * 20_000, 20_000), entry.type))
        elif pa.types.is_boolean(entry.type):
            columns.append(pa.array([False] * rows))
        else:
            columns.append(pa.array(chance.integers(1, 100, rows)).cast(entry.type))
    numbers = {"sm_count": "132", "max_threads_per_sm": "2048", "processes": "1", "lost": "0", "untimed": "0"}
    metadata = {"schema": "1", "compute_capability": "9.0", "timing": "cupti", "gpu": "a GPU", **numbers}
    told = {f"cudasched.{name}".encode(): value.encode() for name, value in metadata.items()}
    table = pa.Table.from_arrays(columns, schema=schema()).replace_schema_metadata({**told, _SEAL: _seal(told)})
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def _read_toml(path: Path) -> None:
    from cudasched import config

    config.resolve(environment={"CUDASCHED_CONFIG": str(path)}, directory=path.parent)
    config.resolve(environment={"CUDASCHED_CONFIG": str(path)}, directory=path.parent, tolerant=True)


def _read_parquet(path: Path) -> None:
    from cudasched import collect, simulate

    table = collect.read(path)
    if not table.equals(_read_parquet.whole):  # type: ignore[attr-defined]
        raise AssertionError("damage was taken for data")
    simulate.read_trace(path)


def _read_model(path: Path) -> None:
    from cudasched import predictor

    predictor.load(path)


def _tuned(kind: str, directory: Path) -> bytes:
    """A small space that was measured, by a model and on no GPU, or the database of a search over it."""
    from cudasched.tune import Settings, run
    from cudasched.tune.database import Database
    from cudasched.tune.measurement import Measurement
    from cudasched.tune.recording import Recording, Replay
    from cudasched.tune.space import Gpu, Space

    space = 'kernel = "k"\n[parameters]\nA = [32, 64, 128]\nB = [1, 2, 4]\n[launch]\nblock = "A"\ngrid = "B"\n'
    space += '[[arguments]]\nname = "y"\nrole = "output"\nsize = "64"\n'
    problem = Space(space, Path("k.toml")).problem(Gpu("a GPU", "9.0", 132))
    times = [Measurement("ok", (10.0 + i, 11.0 + i), occupancy=0.5) for i in range(len(problem.configurations))]
    whole = Recording(problem, tuple(times), {0: (10.0,)}, "made", {"origin": "synthetic"})
    if kind == "space_recordings":
        whole.save(directory / "whole.npz")
        return (directory / "whole.npz").read_bytes()
    with Database(directory / "whole.sqlite") as database:
        run(Replay(whole), Settings(strategy="random", warm=False), database=database)
        database._connection.execute("PRAGMA journal_mode = DELETE")  # all of it in one file
    return (directory / "whole.sqlite").read_bytes()


def _whole(kind: str, directory: Path) -> bytes:
    if kind == "toml":
        return TOML
    if kind == "models":
        return (ROOT / "python/cudasched/predictor/models/sm_90.ubj").read_bytes()
    if kind == "spaces":
        return (ROOT / "csrc/kernels/layernorm.toml").read_bytes()
    if kind in ("tokens", "layers"):
        return b"aZ09_-" * 7 + b"\n" if kind == "tokens" else _LAYER
    if kind in ("space_recordings", "databases"):
        return _tuned(kind, directory)
    recording(directory / "whole.parquet")
    from cudasched import collect

    _read_parquet.whole = collect.read(directory / "whole.parquet")  # type: ignore[attr-defined]
    return (directory / "whole.parquet").read_bytes()


def _read_space(path: Path) -> None:
    from cudasched.tune.space import Gpu, read

    problem = read(path).problem(Gpu("a GPU", "9.0", 132))
    if len(problem.configurations) < 500:  # what follows is a search's, and of thousands takes long
        _ = problem.features


def _read_space_recording(path: Path) -> None:
    from cudasched.tune import Settings, run
    from cudasched.tune.recording import Recording, Replay

    run(Replay(Recording.load(path)), Settings(strategy="random", evaluations=8, warm=False))


def _read_database(path: Path) -> None:
    from cudasched.tune.database import Database

    with Database(path) as database:
        for key in database.keys():  # noqa: SIM118  of this class, not of a dictionary
            database.get(key)
            database.others(key)
        database.runs()


def _read_token(path: Path) -> None:
    from cudasched.serve._secret import token_from

    path.chmod(0o600)
    token = token_from(path)
    if not (token.isascii() and token.isprintable() and 32 <= len(token) <= 256):
        raise AssertionError("a token that no header can have")


def _read_layer(path: Path) -> None:
    from cudasched.tune.dashboard._data import open_file

    open_file(path)


READERS: dict[str, Callable[[Path], None]] = {
    "toml": _read_toml,
    "parquet": _read_parquet,
    "models": _read_model,
    "spaces": _read_space,
    "space_recordings": _read_space_recording,
    "databases": _read_database,
    "tokens": _read_token,
    "layers": _read_layer,
}
SUFFIXES = {
    **{"toml": "toml", "parquet": "parquet", "models": "ubj", "spaces": "toml", "space_recordings": "npz"},
    **{"databases": "sqlite", "tokens": "token", "layers": "json"},
}

_LAYER = b'{"kernels": [{"kernel": "layernorm", "baseline_us": 20.5, "tuned_us": 10}]}'


def read_damaged(kind: str, seed: int, count: int) -> int:
    """Reads `count` damaged files; prints each that ends otherwise than it should, and returns how many do."""
    from cudasched.errors import Error

    failed = 0
    with tempfile.TemporaryDirectory(prefix="cudasched-damage-") as scratch:
        directory = Path(scratch)
        whole = _whole(kind, directory)
        path = directory / f"damaged.{SUFFIXES[kind]}"
        for number in range(seed, seed + count):
            print(f"at {number}", flush=True)
            path.write_bytes(mutate(random.Random(number), whole))
            try:
                READERS[kind](path)
            except Error:
                continue
            except BaseException as error:
                failed += 1
                print(f"failed {number}: {type(error).__name__}: {str(error)[:200]!r}", flush=True)
    return failed


def run(kind: str, count: int, seed: int = 0) -> tuple[int, list[str]]:
    """As `read_damaged`, in processes of their own: one that crashes or hangs has failed, the next goes on after it.

    Returns:
        How many failed, and what there is to say of them.
    """
    failed, said, at, end = 0, [], seed, seed + count
    while at < end:
        command = [sys.executable, "-m", "tests.soak.damage", kind, str(at), str(end - at)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False, errors="replace"
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as hung:
            output, code = (hung.stdout or b"").decode(errors="replace"), 1
        lines = output.splitlines()
        wrong = [line for line in lines if line.startswith("failed ")]
        failed, said = failed + len(wrong), said + wrong
        last = max((int(line.split()[1]) for line in lines if line.startswith("at ")), default=at)
        if code != 0:
            failed += 1
            said.append(f"{kind} {last}: the process ended with {code}, or hung")
        at = last + 1
        if len(said) > _MOST_SAID:  # what fails at once fails always
            return failed + end - at, said
    return failed, said


if __name__ == "__main__":
    read_damaged(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
