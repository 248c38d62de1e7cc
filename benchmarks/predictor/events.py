"""What two events add to the kernel between them, without CUPTI: what the scheduler's samples are too long by.

    python -m benchmarks run events --launches training/data/h200_events.parquet   # on a GPU, with gcc and CUPTI

A kernel that waits for some time on the GPU's clock is launched between two events, in the queue of a busy GPU and so
that the GPU waits for it (events.c). It runs bare, which gives the time between its events and that of its launch call,
and once more recorded by CUPTI, which gives the kernel's. `training.evaluate` draws from what is written, and what
csrc/predict/sample.hpp takes off is in it. Recordings by both (`training.record`) cannot say it where the GPU waits:
CUPTI makes the launch call slower, which is between the events. Takes 20 seconds.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudasched.demo.harness import HarnessError

from benchmarks.c_program import compile_c
from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session

SOURCE = Path(__file__).with_name("events.c")
CASES = ("queued", "starved", "waited")
WAITS_NS = (1_000, 3_000, 10_000, 50_000)
PATIENCE_S = 120


@dataclass(frozen=True)
class Case:
    """Launches of one case; a value each."""

    elapsed_ns: list[int]
    call_ns: list[int]
    behind: list[bool]  # the first event was not complete when the second had been recorded


def run(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Case]:
    """What the program says of each case.

    Raises:
        HarnessError: The program failed.
    """
    said = output_of(" ".join(command), command, environment, PATIENCE_S)
    lines = {words[0]: [int(value) for value in words[1:]] for line in said.splitlines() if (words := line.split())}
    return {
        case: Case(lines[case], lines[f"{case}_call"], [bool(value) for value in lines[f"{case}_behind"]])
        for case in CASES
    }


def kernel_ns(program: Path, samples: int, wait_ns: int, scratch: Path) -> int:
    """The median of what CUPTI says that the kernel takes."""
    import cudasched.collect

    data = scratch / f"{wait_ns}.parquet"
    collect = [sys.executable, "-m", "cudasched", "collect", "-o", str(data), "--"]
    run([*collect, str(program), str(samples), str(wait_ns)], {**os.environ, "EVENTS_IMAGE": "ptx"})
    took = [ns for ns in cudasched.collect.read(str(data))["duration_ns"].to_pylist() if ns is not None]
    own = [ns for ns in took if ns < 2 * wait_ns + 20_000]  # without those that keep the GPU busy
    if not own:
        raise HarnessError("CUPTI timed none of the kernels")
    return round(statistics.median(own))


def same_in_the_queue(measured: Sequence[tuple[int, dict[str, Case]]]) -> list[tuple[int, dict[str, Case]]]:
    """The kernels' times corrected by what a wait on the GPU's clock differs by from one process to the next.

    CUPTI times the kernel in another process, where it lasts up to 0.2 us more or less. In the queue events add the
    same to kernels of any length, so what they seem to add beyond the median over the lengths is the kernel's.
    """
    added = [statistics.median(cases["queued"].elapsed_ns) - kernel for kernel, cases in measured]
    usual = statistics.median(added)
    return [(kernel + round(more - usual), cases) for more, (kernel, cases) in zip(added, measured, strict=True)]


def say(what: str, values: Sequence[int]) -> None:
    """A line: median, and from the 16th to the 84th percentile."""
    added = sorted(values)
    low, high = added[len(added) * 16 // 100], added[len(added) * 84 // 100]
    print(f"  {what}: {statistics.median(added):.0f} ns ({low} to {high}; {len(added)} launches)")


def show(case: str, found: Case, kernel: int) -> None:
    """What events added, and what is left of that without the launch call."""
    say(f"{case}: events add", [ns - kernel for ns in found.elapsed_ns])
    if case != "queued":
        say(
            f"{case}, less the launch call",
            [ns - kernel - call for ns, call in zip(found.elapsed_ns, found.call_ns, strict=True)],
        )
    share = sum(found.behind) / len(found.behind)
    print(f"    of {share:.1%} the first event was not complete after the second call")


def write(path: Path, measured: Sequence[tuple[int, dict[str, Case]]]) -> None:
    """The launches, with what their kernels take, as `training.production` reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        (case, kernel, *launch)
        for kernel, cases in measured
        for case, found in cases.items()
        for launch in zip(found.elapsed_ns, found.call_ns, found.behind, strict=True)
    ]
    names = ("case", "kernel_ns", "elapsed_ns", "call_ns", "behind")
    columns = {name: pa.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    columns["case"] = columns["case"].dictionary_encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, compression="zstd")


def measure(session: Session) -> None:
    """All lengths of the kernel."""
    measured: list[tuple[int, dict[str, Case]]] = []
    image = {"EVENTS_IMAGE": "simulated" if session.rehearsal else "ptx"}
    samples = session.options.samples
    program = compile_c(session.builds / "events", SOURCE, options=("-Wall", "-Werror"))
    for wait_ns in WAITS_NS:
        command = [str(program), str(samples), str(wait_ns)]
        bare = run(command, {**session.backend.environment(hooked=False), **image})
        simulated = round(20_000 * session.backend.scale)
        kernel = simulated if session.rehearsal else kernel_ns(program, samples, wait_ns, session.builds)
        measured.append((kernel, bare))
    measured = same_in_the_queue(measured)
    for kernel, cases in measured:
        print(f"a kernel of {kernel} ns")
        for case, found in cases.items():
            show(case, found, kernel)
    if session.options.launches:
        write(session.options.launches, measured)


BENCHMARK = Benchmark(
    about="the cost of two events for the kernel between them, with and without CUPTI",
    groups={"events": measure},
    settings={"samples": (1920, 40), "launches": Path},
    torch=False,
)
