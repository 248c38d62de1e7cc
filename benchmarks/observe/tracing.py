"""ResNet50 training traced for minutes: is memory flat, are files bounded, and what does tracing cost?

    python -m benchmarks run tracing --out traced/tracing.json --seconds 300

One run of `benchmarks.observe.training`. Each second the resident memory of the program and the size of what was traced
are read. The trace and the flame graph stay beside the results, in which those of other GPUs stay. Takes `--seconds`
and about a minute. Fails where memory was not flat, or records were dropped; what the run did is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cudasched.demo.harness import CUDASCHED, HarnessError

from benchmarks.lab.processes import running
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session
from benchmarks.results.schema import TracingRow, merge

#: Memory is taken to be flat where its median over the last third is above that over the second by no more than this.
FLAT_MB = 16.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mb(pid: int) -> float:
    """Of a process; 0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**20
    except (OSError, IndexError, ValueError):
        return 0.0


def programs_below(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    for each in found:
        try:
            found += [int(child) for child in Path(f"/proc/{each}/task/{each}/children").read_text().split()]
        except OSError:
            continue
    return found


def size_mb(directory: Path) -> float:
    """Of all files in a directory; 0: there is none."""
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total / 2**20


def run(session: Session) -> dict[str, Any]:
    """What the training did, and what was seen of it each second."""
    options, out = session.options, session.out.parent.absolute()
    out.mkdir(parents=True, exist_ok=True)
    progress, trace = out / "traced.steps", out / "traced.pftrace"
    progress.unlink(missing_ok=True)
    shutil.rmtree(trace.with_name(trace.name + ".parts"), ignore_errors=True)
    command = [*CUDASCHED, "trace", "-o", str(trace), "--flame", str(out / "traced.html")]
    command += ["--limit-mb", str(options.limit_mb), "--", sys.executable, "-m", "benchmarks.observe.training"]
    command += ["--seconds", str(options.seconds), "--progress", str(progress), "--class", "best_effort"]
    command += ["--simulate"] if session.rehearsal else []
    samples: list[tuple[float, float, float]] = []
    begin = time.monotonic()
    with (
        (out / "traced.log").open("w") as log,
        running(command, session.backend.environment(True), log, log) as started,
    ):
        converted_s = 0.0
        while started.poll() is None:
            time.sleep(1)
            below = programs_below(started.pid)
            if len(below) == 1:
                converted_s += 1
                continue
            # The last of a chain: with `cudasched trace` before it.
            program_mb = max(resident_mb(pid) for pid in below[1:])
            parts_mb = size_mb(trace.with_name(trace.name + ".parts"))
            samples.append((round(time.monotonic() - begin, 1), round(program_mb, 1), round(parts_mb, 2)))
    text = (out / "traced.log").read_text()
    if started.returncode != 0:
        raise HarnessError(f"the training failed with status {started.returncode}:\n{text[-3000:]}")
    steps, took_s = map(float, progress.read_text().split())
    resident = [mb for _, mb, _ in samples]
    middle, last = (statistics.median(part or [0.0]) for part in in_parts(resident, 3)[1:])

    def number(pattern: str) -> int:
        found = re.search(rf"([\d,]+) {pattern}", text)
        return int(found[1].replace(",", "")) if found else 0

    row = TracingRow(
        gpu=session.meta.gpu,
        seconds=round(took_s, 2),
        steps=int(steps),
        steps_per_s=round(steps / took_s, 3),
        resident_mb=[statistics.median(part) for part in in_parts(resident, 10) if part],
        growth_mb=round(last - middle, 2),
        limit_mb=options.limit_mb,
        parts_mb=max((mb for _, _, mb in samples), default=0.0),
        dropped=number("records were dropped"),
        rotated_away=number("records, the oldest, were deleted"),
        launches_kept=number("launches of"),
        converted_s=converted_s,
    )
    return {"row": row.model_dump(), "samples": samples, "said": text.splitlines()[-5:]}


def in_parts(values: list[float], parts: int) -> list[list[float]]:
    """So many parts of a list, in order."""
    return [values[len(values) * part // parts : len(values) * (part + 1) // parts] for part in range(parts)]


def measure(session: Session) -> None:
    """The run, unless that is done.

    Raises:
        HarnessError: Memory was not flat, or records were dropped.
    """
    done = session.store.done
    if "training" not in done:
        session.need(session.options.seconds)
        session.store.keep("training", run(session))
    row = TracingRow.model_validate(done["training"]["row"])
    merge(session.out, session.meta, [row])
    session.say(
        f"{row.steps_per_s} steps/s; memory {row.growth_mb:+.1f} MB in the last "
        f"third; {row.parts_mb:.0f} MB of records at most, {row.dropped:,} dropped"
    )
    if row.growth_mb > FLAT_MB or row.dropped > 0:
        raise HarnessError("memory grows, or records were dropped")


BENCHMARK = Benchmark(
    about="minutes of ResNet50 training traced: memory, files, speed",
    groups={"traced": measure},
    settings={"seconds": (300.0, 3.0), "limit_mb": 256},
)
