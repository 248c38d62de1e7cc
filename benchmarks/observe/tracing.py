"""ResNet50 training traced for minutes: is memory flat, are files bounded, and what does tracing cost?

    python -m benchmarks.observe.tracing --out traced/ --seconds 300
    python -m benchmarks.observe.tracing --out traced/ --simulate --seconds 3600 --arms traced

Each arm is one run of `benchmarks.observe.training`: untraced, traced, and with device times by CUPTI. Each second the
resident memory of the program and the size of what was traced are read. `traced/tracing.json` is written after each
arm; arms that it has are not run again, so that what was cut off goes on where it was. The traces and the flame graphs
stay beside it. `--results benchmarks/results/tracing.json` puts what is to be kept of it there, beside what that has
of other GPUs. Takes `--seconds` and about a minute an arm; untraced takes 60 s at most.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import CUDASCHED, Backend

from benchmarks import meta
from benchmarks.results.schema import Meta, Results, TracingRow, load

ARMS = ("untraced", "traced", "device_times")
#: Memory is taken to be flat where its median over the last third is above that over the second by no more than this.
FLAT_MB = 16.0
_UNTRACED_S = 60.0
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


def run(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: what it did, and what was seen of it each second."""
    out: Path = options.out
    progress, trace = out / f"{arm}.steps", out / f"{arm}.pftrace"
    progress.unlink(missing_ok=True)
    shutil.rmtree(trace.with_name(trace.name + ".parts"), ignore_errors=True)
    seconds = min(options.seconds, _UNTRACED_S) if arm == "untraced" else options.seconds
    program = [sys.executable, "-m", "benchmarks.observe.training", "--seconds", str(seconds)]
    program += ["--progress", str(progress), "--class", options.client_class]
    program += ["--simulate"] if options.simulate else []
    backend = Backend.simulated(None) if options.simulate else Backend()
    command = program
    if arm != "untraced":
        command = [*CUDASCHED, "trace", "-o", str(trace), "--flame", str(out / f"{arm}.html")]
        command += ["--limit-mb", str(options.limit_mb)]
        command += ["--device-times"] if arm == "device_times" else []
        command += ["--", *program]
    samples: list[tuple[float, float, float]] = []
    begin = time.monotonic()
    with (out / f"{arm}.log").open("w") as log:
        started = subprocess.Popen(command, env=backend.environment(True), stdout=log, stderr=log)
        converted_s = 0.0
        while started.poll() is None:
            time.sleep(1)
            below = programs_below(started.pid)
            # The last of a chain: with `cudasched trace` before it.
            program_mb = max((resident_mb(pid) for pid in below[1:]), default=0.0)
            if arm == "untraced":
                program_mb = resident_mb(started.pid)
            elif len(below) == 1:
                converted_s += 1
                continue
            parts_mb = size_mb(trace.with_name(trace.name + ".parts"))
            samples.append((round(time.monotonic() - begin, 1), round(program_mb, 1), round(parts_mb, 2)))
    text = (out / f"{arm}.log").read_text()
    if started.returncode != 0:
        raise SystemExit(f"{arm} failed with status {started.returncode}:\n{text[-3000:]}")
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


def row_of(arm: str, gpu: str, found: dict[str, Any]) -> TracingRow:
    """What is kept of an arm."""
    resident = [mb for _, mb, _ in found["samples"]]
    tenths = [resident[len(resident) * part // 10 : len(resident) * (part + 1) // 10] for part in range(10)]
    return TracingRow(
        arm=arm,
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


def keep(path: Path, arms: dict[str, Any]) -> None:
    """Puts the arms into a results file, in the place of what it has of the same GPU; what it has of others stays."""
    metas = {arm: Meta.model_validate(found["meta"]) for arm, found in arms.items()}
    gpus = {meta.gpu: meta for meta in metas.values()}
    rows = [row_of(arm, metas[arm].gpu, found) for arm, found in arms.items()]
    others: dict[str, Meta] = {}
    if path.exists():
        before = load(path)
        others = {gpu: meta for gpu, meta in before.meta_by_kind.items() if gpu not in gpus}
        rows += [row for row in before.rows if isinstance(row, TracingRow) and row.gpu in others]
    measured = gpus | others
    first = next((meta for gpu, meta in measured.items() if gpu != "simulated"), next(iter(measured.values())))
    Results(meta=first, meta_by_kind=measured, rows=rows).write(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text. The exit status is 1 where memory was not flat or records were dropped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe.tracing", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory for the results")
    parser.add_argument("--results", type=Path, help="the results file")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each traced arm (300)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--limit-mb", type=int, default=256, help="as `cudasched trace` has it")
    parser.add_argument("--class", dest="client_class", default="best_effort", help="of the training")
    parser.add_argument("--simulate", action="store_true", help="on the simulated driver")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tracing.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"arms": {}}
    for arm in options.arms:
        if arm in results["arms"]:
            continue
        described = meta.describe(options.simulate, torch_needed=not options.simulate)
        results["arms"][arm] = {"meta": described.model_dump(), **run(arm, options)}
        written = path.with_suffix(".new")
        written.write_text(json.dumps(results, indent=1))
        written.replace(path)
    if options.results is not None and results["arms"]:
        keep(options.results, results["arms"])
    bad = False
    bare = results["arms"].get("untraced", {}).get("steps_per_s")
    for arm, found in results["arms"].items():
        speed = f", {100 * found['steps_per_s'] / bare:.1f}% of untraced" if bare else ""
        print(
            f"{arm}: {found['steps_per_s']} steps/s{speed}; memory {found['resident_growth_mb']:+.1f} MB in the last "
            f"third; {found['most_parts_mb']:.0f} MB of records at most, {found['dropped']:,} dropped"
        )
        bad = bad or not found["flat"] or found["dropped"] > 0
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
