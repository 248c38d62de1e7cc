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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cudasched.demo.harness import CUDASCHED, HarnessError

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
    options, out = session.options, session.out.parent
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
    with (out / "traced.log").open("w") as log:
        started = subprocess.Popen(command, env=session.backend.environment(True), stdout=log, stderr=log)
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
    thirds = [samples[len(samples) * part // 3 : len(samples) * (part + 1) // 3] for part in range(3)]
    middle, last = (statistics.median([mb for _, mb, _ in third] or [0.0]) for third in thirds[1:])

    def number(pattern: str) -> int:
        found = re.search(rf"([\d,]+) {pattern}", text)
        return int(found[1].replace(",", "")) if found else 0

    return {
        "steps": int(steps),
        "seconds": round(took_s, 2),
        "steps_per_s": round(steps / took_s, 3),
        "resident_growth_mb": round(last - middle, 2),
        "flat": last - middle <= FLAT_MB,
        "limit_mb": options.limit_mb,
        "most_parts_mb": max((mb for _, _, mb in samples), default=0.0),
        "trace_mb": round(trace.stat().st_size / 2**20, 2) if trace.exists() else 0.0,
        "converted_s": converted_s,
        "launches_kept": number("launches of"),
        "dropped": number("records were dropped"),
        "rotated_away": number("records, the oldest, were deleted"),
        "said": text.splitlines()[-5:],
        "samples": samples,
    }


def row_of(gpu: str, found: dict[str, Any]) -> TracingRow:
    """What is kept of a run."""
    resident = [mb for _, mb, _ in found["samples"]]
    tenths = [resident[len(resident) * part // 10 : len(resident) * (part + 1) // 10] for part in range(10)]
    return TracingRow(
        gpu=gpu,
        seconds=found["seconds"],
        steps=found["steps"],
        steps_per_s=found["steps_per_s"],
        resident_mb=[statistics.median(tenth) for tenth in tenths if tenth],
        growth_mb=found["resident_growth_mb"],
        limit_mb=found["limit_mb"],
        parts_mb=found["most_parts_mb"],
        dropped=found["dropped"],
        rotated_away=found["rotated_away"],
        launches_kept=found["launches_kept"],
        converted_s=found["converted_s"],
    )


def measure(session: Session) -> None:
    """The run, unless that is done.

    Raises:
        HarnessError: Memory was not flat, or records were dropped.
    """
    done = session.store.done
    if "traced" not in done:
        session.need(session.options.seconds)
        session.store.keep("traced", run(session))
    found = done["traced"]
    merge(session.out, session.meta, [row_of(session.meta.gpu, found)])
    session.say(
        f"{found['steps_per_s']} steps/s; memory {found['resident_growth_mb']:+.1f} MB in the last "
        f"third; {found['most_parts_mb']:.0f} MB of records at most, {found['dropped']:,} dropped"
    )
    if not found["flat"] or found["dropped"] > 0:
        raise HarnessError("memory grows, or records were dropped")


BENCHMARK = Benchmark(
    about="minutes of ResNet50 training traced: memory, files, speed",
    groups={"traced": measure},
    settings={"seconds": (300.0, 3.0), "limit_mb": 256},
)
