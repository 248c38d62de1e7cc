"""A benchmark on every GPU of the machine at once: each has a part of the groups, and cores of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import meta
from benchmarks.colocation.cells import cells_path

Merge = Callable[[Sequence[Path], Path], None]


def spread(name: str, options: argparse.Namespace, arguments: Sequence[str], merge: Merge) -> int:
    """Runs the parts, and puts their cells together; those of an earlier run, on any number of GPUs, are taken over.

    Args:
        name: Of the benchmark.
        options: Its options, checked.
        arguments: The same as they were given; a part's own `--out` and `--part` come after them.
        merge: Puts cells together.

    Returns:
        The exit status: the worst of the parts'.

    Raises:
        ValueError: There are no GPUs, or fewer cores than GPUs.
    """
    gpus = ["simulated"] * 2 if options.rehearse else meta.gpus()
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < len(gpus) <= len(cores):
        raise ValueError(f"{len(cores)} cores for {len(gpus)} GPUs")
    each = len(cores) // len(gpus)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = [out.with_name(f"{out.stem}-{number}.json") for number in range(1, len(gpus) + 1)]
    _together(out, merge)
    runs = []
    for number, (gpu, part) in enumerate(zip(gpus, parts, strict=True), 1):
        if cells_path(out).exists():
            shutil.copy(cells_path(out), cells_path(part))
        command = [sys.executable, "-m", "benchmarks", "run", name, *arguments]
        command += ["--out", str(part), "--part", f"{number}/{len(gpus)}"]
        runs.append((number, command, gpu, cores[(number - 1) * each : number * each]))
    with ThreadPoolExecutor(len(runs)) as threads:
        statuses = list(threads.map(lambda given: _run(*given), runs))
    _together(out, merge)
    return max(statuses)


def _together(out: Path, merge: Merge) -> None:
    """Puts all cells of a run into its file; the parts' files are gone then."""
    parts = sorted(out.parent.glob(f"{out.stem}-[0-9]*.cells"))
    if parts:
        merge([path for path in (cells_path(out), *parts) if path.exists()], out)
    for path in out.parent.glob(f"{out.stem}-[0-9]*"):
        path.unlink()


def _run(number: int, command: Sequence[str], gpu: str, cores: Sequence[int]) -> int:
    """One part; its lines carry its number."""
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{number}: {line}", end="", flush=True)
    return process.wait()
