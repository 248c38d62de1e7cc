"""Records programs of other libraries on a GPU, by CUPTI and by events at once: what evaluation is held to.

    python -m training.record --out DIR --seconds 28                    # on the GPU: at most 6 minutes, seven files
    python -m training.record --unpack DIR --out training/data/         # anywhere: libraries.parquet, sm_counts.parquet

The programs (`training.libraries`) use CuPy, Numba, Triton, JAX, torchvision and transformers, and share no code with
the sweeps. Each is a process of its own whose launches are timed by `--timing both` (docs/dataset.md); what is not
installed or fails is counted and left out. Recording needs neither pyarrow nor XGBoost: the journals of a program are
packed as they are into `NAME.tar.xz`, with `record.json`, which says what ran. A program that is there, whole, is not
recorded again; one that takes too long is stopped, and what it has recorded by then is kept. A program that has
launched enough ends early, so that its file stays below 16 MiB. `sm_counts` is the same work on parts of the GPU
(`training.sm_counts`).

`--unpack` makes one Parquet file of them, a program a process, every launch in order, and another of `sm_counts`. It
says what events around a kernel add to its time, and by how much that varies: what the scheduler takes off
(csrc/predict/sample.hpp).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import importlib.metadata
import io
import json
import lzma
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.command import InputError, carry_out, duration

#: In this order: what is quickest to fail on a machine that lacks something comes first.
PROGRAMS = (
    "cupy_arrays",
    "numba_kernels",
    "triton_tutorials",
    "torchvision_models",
    "transformers_models",
    "jax_models",
)
#: Recorded with them, and not one of them: it is kept in a file of its own.
SM_COUNTS = "sm_counts"
#: What a program's process may take longer than it was given, to start, to end and to write its journal.
GRACE_S = 20.0
MOST_BYTES = 16 << 20
#: Launches timed by both, for what is said of events.
LEAST_TIMED = 20
#: Of journals, after which a program ends: packed they take a tenth of that and less.
MOST_JOURNAL_BYTES = 120 << 20
PACKAGES = ("torch", "torchvision", "transformers", "triton", "jax", "jaxlib", "cupy-cuda13x", "numba", "numba-cuda")
#: XLA's graphs would hide its kernels, and its pool the memory of the others.
ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

#: What a program gives: the label of a part and what runs it, part after part.
Parts = Iterator[tuple[str, Callable[[], Any]]]


def parts_of(name: str, tiny: bool) -> Parts:
    """A program's parts: those of `training.libraries`, or of another module of that name."""
    home = "training.libraries." if name in PROGRAMS else "training." if name == SM_COUNTS else ""
    module = importlib.import_module(home + name)
    found: Parts = module.parts(tiny)
    return found


def run(
    name: str, seconds: float, tiny: bool, label: Callable[[str], Any], enough: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Runs a program's parts until there are no more, the time is over, or `enough` is recorded.

    Returns:
        What ran, as `record.json` has it: parts that ran, why others did not, whether the program came to its end.
    """
    began = time.monotonic()
    done: dict[str, Any] = {"program": name, "parts": 0, "failed": {}, "complete": False}
    try:
        for what, part in parts_of(name, tiny):
            if time.monotonic() - began > seconds:
                break
            if enough():
                done["complete"] = True
                break
            label(f"program:{name}|{what}")
            try:
                part()
                done["parts"] += 1
            except Exception as error:  # whatever a library comes up with: the next part may do
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
                done["failed"][what] = why
                traceback.print_exc(limit=4)
                if "illegal" in why or "device-side" in why or "unspecified launch" in why:
                    break  # the context is gone
        else:
            done["complete"] = True
    except ImportError as error:
        done["failed"]["import"] = str(error)
    done["seconds"] = round(time.monotonic() - began, 1)
    return done


def child(options: argparse.Namespace) -> None:
    """What a program's process does."""

    def label(text: str) -> None:
        return None

    if "CUDASCHED_COLLECT_DIR" in os.environ:
        import cudasched.collect

        label = cudasched.collect.label

    def enough() -> bool:
        return sum(path.stat().st_size for path in options.out.parent.glob("*.journal")) > MOST_JOURNAL_BYTES

    done = run(options.child, options.seconds, options.tiny, label, enough)
    options.out.write_text(json.dumps(done) + "\n")


def environment(journals: Path) -> dict[str, str]:
    """Of a process whose launches are recorded into `journals`, as `cudasched collect --timing both` makes it."""
    from cudasched import _preload, hook
    from cudasched.cli.coverage import cupti_of
    from cudasched.cli.run import configure

    configure()
    hook.load_core().find_driver()
    return {
        **os.environ,
        **{name: value for name, value in ENVIRONMENT.items() if name not in os.environ},
        "CUDASCHED_COLLECT_DIR": str(journals.absolute()),
        "CUDASCHED_COLLECT_TIMING": "both",
        **_preload.added(hook.locate(), os.environ),
        **cupti_of(os.environ, Path(sys.executable)),
    }


def record(name: str, scratch: Path, options: argparse.Namespace) -> Path:
    """Runs one program; returns the directory that holds its journals and `record.json`."""
    journals = scratch / name
    journals.mkdir()
    summary = journals / "record.json"
    command = [sys.executable, "-X", "faulthandler", "-m", "training.record", "--child", name, "--out", str(summary)]
    command += ["--seconds", str(options.seconds), *(["--tiny"] if options.tiny else [])]
    began = time.monotonic()
    code = None
    with open(journals / "output.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=Path(__file__).parents[1], env=environment(journals)
        )
        for ends in (options.seconds + options.grace, options.grace / 4, None):
            try:
                code = process.wait(ends)
                break
            except subprocess.TimeoutExpired:
                # An interrupt first, which lets Python end and the journal be closed.
                process.send_signal(signal.SIGINT if ends != options.grace / 4 else signal.SIGKILL)
    done = json.loads(summary.read_text()) if summary.exists() else {"program": name, "failed": {}, "complete": False}
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    done |= {"exit_code": code, "wall_s": round(time.monotonic() - began, 1), "versions": versions}
    done |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    done["rows"] = rows_of(journals)
    summary.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
    failed = f", {len(done['failed'])} parts failed: {dict(list(done['failed'].items())[:3])}" if done["failed"] else ""
    if code != 0 or not done["rows"]:
        print((journals / "output.log").read_text(errors="replace")[-2000:], file=sys.stderr)
    print(f"{name}: {done['rows']} launches in {done['wall_s']} s, exit code {code}{failed}", flush=True)
    return journals


def rows_of(journals: Path) -> int:
    """Launches in the journals' whole blocks."""
    from cudasched.collect._journal import scan

    return sum(scan(path).rows for path in journals.glob("*.journal"))


def pack(journals: Path, out: Path) -> int:
    """Puts the directory's files into `out`, which is there when it is whole; returns its bytes."""
    temporary = out.with_name(out.name + ".new")
    with lzma.open(temporary, "wb", preset=5) as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        for path in sorted(journals.iterdir()):
            data = path.read_bytes()
            entry = tarfile.TarInfo(path.name)  # nothing of this machine's users and times
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    temporary.replace(out)
    shutil.rmtree(journals)
    size = out.stat().st_size
    if size > MOST_BYTES:
        print(
            f"{out.name}: {size >> 20} MiB, more than {MOST_BYTES >> 20}: run it with fewer --seconds", file=sys.stderr
        )
    return size


def is_whole(path: Path) -> bool:
    """Whether a program was recorded to its end."""
    try:
        with tarfile.open(path, "r:xz") as archive:
            file = archive.extractfile("record.json")
            return bool(file is not None and json.loads(file.read())["complete"])
    except (OSError, KeyError, TypeError, ValueError, EOFError, tarfile.TarError, lzma.LZMAError):
        return False


def extract(path: Path, directory: Path) -> dict[str, Any]:
    """Puts the files of a packed recording into the directory; returns `record.json`.

    Raises:
        InputError: It is damaged.
    """
    try:
        with tarfile.open(path, "r:xz") as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                if file is not None and "/" not in entry.name:
                    (directory / entry.name).write_bytes(file.read())
        done: dict[str, Any] = json.loads((directory / "record.json").read_text())
        if not isinstance(done, dict):
            raise ValueError("record.json is no object")
    except (EOFError, FileNotFoundError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it, or record it, again") from None
    return done


def unpack(source: Path, out: Path) -> dict[str, int]:
    """Writes `libraries.parquet` of what was recorded; returns rows a program.

    Raises:
        FileNotFoundError: `source` has no recordings.
        InputError: One is damaged, or they are of several GPUs.
    """
    import pyarrow as pa

    from training.compact import apart, of_one_gpu, plain, read, write

    tables: dict[str, list[Any]] = {"libraries": [], SM_COUNTS: []}
    rows: dict[str, int] = {}
    about: dict[str, str] = {}
    processes: set[int] = set()
    gpus: dict[str, str] = {}
    for path in sorted(source.glob("*.tar.xz")):
        with tempfile.TemporaryDirectory() as scratch:
            done = extract(path, Path(scratch))
            name = str(done.get("program", path.name.split(".")[0]))
            launched = any(Path(scratch).glob("*.journal"))
            table = apart(plain(read(Path(scratch))), processes) if launched else None
        rows[name] = len(table) if table else 0
        about |= {f"training.{package}": version for package, version in done.get("versions", {}).items()}
        about |= {"training.python": str(done.get("python", "")), "training.date": str(done.get("date", ""))}
        if not table:
            continue
        of_one_gpu(table, path.name, gpus)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        # Two events around nothing, as this program's process measured them.
        about[f"training.empty_pair_ns.{name}"] = metadata.get("cudasched.empty_pair_ns", "0")
        tables[name if name == SM_COUNTS else "libraries"].append(table)
        about |= {f"training.event_{what}_ns.{name}": str(ns) for what, ns in event_gap(table, name).items()}
    if not any(tables.values()):
        raise FileNotFoundError(f"{source} has no recorded launches (*.tar.xz): record with python -m training.record")
    out.mkdir(parents=True, exist_ok=True)
    for file, some in tables.items():
        if not some:
            continue
        whole = pa.concat_tables(some, promote_options="default")
        known = {key.decode(): value.decode() for key, value in (some[0].schema.metadata or {}).items()}
        known["cudasched.command"] = json.dumps(["python", "-m", "training.record"])
        size = write(whole.replace_schema_metadata({**about, **known}), out / f"{file}.parquet")
        print(f"{file}.parquet: {len(whole)} rows, {size / 2**20:.1f} MiB")
    print(rows)
    return rows


def event_gap(table: Any, name: str) -> dict[str, int]:
    """What two events add to the kernel between them: the median, and the spread about it, ns; printed, too.

    Of kernels that ran alone and were timed by both; nothing where there are too few. Where a busy GPU had the kernel
    in its queue, events add what they take themselves (`queued_gap`); where it had to wait for it the host's launch
    call is between them, too (`waited_gap`), and CUPTI makes that slower.
    """
    import numpy as np
    import pyarrow.compute as pc

    from training.production import is_queued

    alone = pc.and_(pc.is_valid(table["duration_ns"]), pc.invert(pc.fill_null(table["overlapped"], False)))
    ran = table.filter(pc.and_(alone, pc.is_valid(table["start_ns"])))
    elapsed = ran["elapsed_ns"].fill_null(0).to_numpy()
    added, timed, queued = elapsed - ran["duration_ns"].to_numpy(), elapsed > 0, is_queued(ran)
    found = {}
    for prefix, what, chosen in (
        ("", "a kernel", timed),
        ("queued_", "one in the queue", timed & queued),
        ("waited_", "one that the GPU waited for", timed & ~queued),
    ):
        if chosen.sum() < LEAST_TIMED:
            continue
        low, middle, high = (round(float(value)) for value in np.quantile(added[chosen], (0.16, 0.5, 0.84)))
        print(f"{name}: events add {middle} ns to {what}, 68% of the time {low} to {high} ({chosen.sum()} launches)")
        found |= {f"{prefix}gap": middle, f"{prefix}spread": (high - low) // 2}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m training.record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory that files are put in")
    parser.add_argument("--programs", default=",".join((*PROGRAMS, SM_COUNTS)), help="these, separated by commas")
    parser.add_argument("--seconds", type=duration, default=28, help="of each program; 20 more for its start and end")
    parser.add_argument("--grace", type=float, default=GRACE_S, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--tiny", action="store_true", help="the least shapes, for rehearsals")
    parser.add_argument("--unpack", type=Path, help="make libraries.parquet of the recordings in this directory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if options.child:
        child(options)
        return 0
    if options.unpack:
        return carry_out(lambda: unpack(options.unpack, options.out), "not unpacked")
    return carry_out(lambda: record_all(options), "not recorded")


def record_all(options: argparse.Namespace) -> None:
    """Records the programs that are not there yet.

    Raises:
        InputError: Some have no launches.
        Error: There is no driver.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.programs.split(",") if name]
    recorded = 0
    with (
        tempfile.TemporaryDirectory(prefix="cudasched-record-") as scratch,
        concurrent.futures.ThreadPoolExecutor() as packing,
    ):
        waiting = []
        for name in names:
            if not options.again and is_whole(options.out / f"{name}.tar.xz"):
                print(f"{name}: recorded already")
                recorded += 1
                continue
            journals = record(name, Path(scratch), options)
            recorded += rows_of(journals) > 0
            waiting.append((name, packing.submit(pack, journals, options.out / f"{name}.tar.xz")))
        for name, packed in waiting:
            print(f"{name}.tar.xz: {packed.result() / 2**20:.1f} MiB")
    if recorded < len(names):
        raise InputError(f"{len(names) - recorded} of {len(names)} programs have no launches")


if __name__ == "__main__":
    sys.exit(main())
