"""How well regressions are found: `regressions_found` and `false_alarms` of observe.json.

A program of 15 kernels runs in processes of its own, each recorded by CUPTI: some as it is, some with 5% more rows in
one kernel (program.py). It does so in three measurements, one after another, each with another kernel that gets more
work; in a measurement both kinds of process take turns. Measurements of several machines or days are better than of
one: `python -m benchmarks merge regressions` puts their cells together.

Of each ordered pair of measurements groups of processes are drawn, as a baseline and a check would have recorded them:
the baseline from the first, the check from the second. Each goes through the test of `cudasched baseline`.
`false_alarms` is the share of checks of the unchanged program in which something was found, anything;
`regressions_found` the share of checks of the changed one in which that kernel was found. `low` and `high` are the
least and the most of a pair of measurements, `n` the processes.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from cudasched.demo.harness import HarnessError
from cudasched.observe import baseline
from cudasched.observe.baseline import Baseline, Compared, Run

from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Session
from benchmarks.regressions.program import VICTIMS

PLAIN, CHANGED = "plain", "changed"
ARMS = (PLAIN, CHANGED)
MEASUREMENTS = 3
#: Runs a side, of a check.
SIZE = 6
MOST_COMPARISONS = 200
WHY = f"differences between measurements and processes, with {SIZE} runs a side"
SEED = 20_261_123


def cells(processes: int) -> Iterator[tuple[str, int]]:
    """Arms and numbers, in the order ABBA, so that whatever drifts is the same for both."""
    for number in range(processes):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            yield arm, number


def record(session: Session, victim: str, number: int, timeout_s: float) -> Baseline:
    """One process.

    Raises:
        HarnessError: It fails or hangs.
    """
    with tempfile.TemporaryDirectory() as place:
        recording = Path(place) / "process.parquet"
        command = [sys.executable, "-m", "benchmarks.regressions.program", str(recording)]
        command += [victim] if victim else []
        command += ["--simulate", "--session", str(number)] if session.rehearsal else []
        output_of(f"process {victim or PLAIN}", command, session.backend.environment(hooked=True), timeout_s)
        return baseline.from_recordings([recording], session=f"measurement {number}")


def measure(session: Session, number: int) -> None:
    """The processes of one measurement that are missing, while there is time."""
    victim = VICTIMS[(number - 1) % len(VICTIMS)]
    longest_s = 0.0
    for arm, process in cells(session.options.processes):
        key = f"{number}/{victim}/{arm} {process:02d}"
        if key in session.store.done:
            continue
        session.need(1.2 * longest_s)
        began = time.monotonic()
        timeout_s = min(300.0, max(session.left_s(), 60.0))
        changed = victim if arm == CHANGED else ""
        made = record(session, changed, number, timeout_s)
        if missing := not_found(made):
            names = sorted({one.name for each in made.runs for one in each.measured})
            session.say(f"warning: no kernel is called as {', '.join(missing)} is (VICTIM_NAMES): {names}")
        longest_s = max(longest_s, time.monotonic() - began)
        session.store.keep(key, made.model_dump(mode="json"))
    session.say(f"measurement {number} ({victim}) is complete")


@dataclass(frozen=True)
class Measurement:
    """The kernel that got more work, and the processes of each arm."""

    victim: str
    runs: Mapping[str, Sequence[Baseline]]


def measurements(done: Done) -> list[Measurement]:
    """What was recorded, by measurement; of several machines, of each."""
    found: dict[str, dict[str, list[Baseline]]] = {}
    for key, made in sorted(done.items()):
        of, _, process = key.rpartition("/")
        found.setdefault(of, {}).setdefault(process.split()[0], []).append(Baseline.model_validate(made))
    return [Measurement(of.rpartition("/")[2], runs) for of, runs in found.items()]


def side(runs: Sequence[Baseline]) -> Baseline:
    """Processes as one command would have recorded them."""
    every: list[Run] = [run for one in runs for run in one.runs]
    return runs[0].model_copy(update={"runs": tuple(every)})


def draws(
    before: Sequence[Baseline], after: Sequence[Baseline], size: int, most: int, generator: random.Random
) -> Iterator[tuple[Baseline, Baseline]]:
    """Groups of both, that share no process."""
    if before is after and len(before) < 2 * size:
        return
    if len(before) < size or len(after) < size:
        return
    for _ in range(most):
        first = generator.sample(range(len(before)), size)
        others = [number for number in range(len(after)) if before is not after or number not in first]
        second = generator.sample(others, size)
        yield side([before[number] for number in first]), side([after[number] for number in second])


@dataclass(frozen=True)
class Outcome:
    """Checks of one ordered pair of measurements.

    Attributes:
        victim: The kernel with more work, if any.
        checks: How many.
        found: In how many something was found that was looked for.
        of_victim: What each said of the kernel with more work.
    """

    victim: str
    checks: int
    found: int
    of_victim: Sequence[Compared]


#: What PyTorch calls the kernels of each, in one version or another: softmax_warp_forward or cunn_SoftMaxForward,
#: vectorized_layer_norm_kernel or LayerNormForwardCUDAKernel. Not asin_kernel; there is no backward pass.
VICTIM_NAMES = {"sin": r"(?<![a-z])sin_kernel", "softmax": r"(?i)soft_?max", "layer_norm": r"(?i)layer_?norm"}


def is_victim(name: str, victim: str) -> bool:
    """Whether a kernel is the one with more work, by PyTorch's names for it, or the simulated one."""
    return name == victim or re.search(VICTIM_NAMES[victim], name) is not None


def not_found(run: Baseline) -> list[str]:
    """The victims that no kernel of a process is, by its name: nothing could be evaluated for them."""
    names = {one.name for each in run.runs for one in each.measured if one.kind == "kernel"}
    return [victim for victim in VICTIMS if not any(is_victim(name, victim) for name in names)]


def compare(
    before: Sequence[Baseline], after: Sequence[Baseline], victim: str, size: int, most: int, seed: int
) -> Outcome:
    """Checks groups of one measurement against groups of another; without a victim, whether anything is found."""
    checks = found = 0
    of_victim = []
    for first, second in draws(before, after, size, most, random.Random(seed)):
        checks += 1
        judged = baseline.check(first, second)
        if not victim:
            found += judged.slower > 0
            continue
        mine = [one for one in judged.compared if one.kind == "kernel" and is_victim(one.name, victim)]
        if not mine:
            raise HarnessError(f"no kernel is {victim}: {[one.name for one in judged.compared]}")
        most_of_it = max(mine, key=lambda one: one.share or 0.0)
        found += most_of_it.verdict == "slower"
        of_victim.append(most_of_it)
    return Outcome(victim, checks, found, of_victim)


def pairs(measured: Sequence[Measurement], size: int, most: int) -> tuple[list[Outcome], list[Outcome]]:
    """False alarms and findings of each ordered pair of measurements, one with itself where it has the processes."""
    alarms, findings = [], []
    for one, first in enumerate(measured):
        for other, second in enumerate(measured):
            seed = hash((one, other, size, SEED))
            plain = first.runs.get(PLAIN, [])
            again = plain if first is second else second.runs.get(PLAIN, [])
            alarms.append(compare(plain, again, "", size, most, seed))
            findings.append(compare(plain, second.runs.get(CHANGED, []), second.victim, size, most, seed))
    return [one for one in alarms if one.checks], [one for one in findings if one.checks]


def find(done: Done, size: int = SIZE, most: int = MOST_COMPARISONS) -> Found:
    """The figures, of checks with so many runs a side."""
    measured = measurements(done)
    if len(measured) < MEASUREMENTS:
        print(f"{len(measured)} measurements, and it takes {MEASUREMENTS}")
        return {}
    alarms, findings = pairs(measured, size, most)
    if not alarms or not findings:
        print(f"{size} runs a side: too few processes")
        return {}
    found: Found = {}
    for name, outcomes in (("regressions_found", findings), ("false_alarms", alarms)):
        shares, checks = [one.found / one.checks for one in outcomes], sum(one.checks for one in outcomes)
        value = sum(one.found for one in outcomes) / checks
        found[name] = value, min(shares), max(shares), len(done)
        print(
            f"{size} runs a side: {name} {value:.4f}, {min(shares):.4f} to {max(shares):.4f} over {len(outcomes)} "
            f"ordered pairs of measurements, {checks} checks, {len(done)} processes"
        )
    told(findings)
    return found


def told(findings: Sequence[Outcome]) -> None:
    """Prints how much longer the kernels with more work took."""
    for victim in dict.fromkeys(one.victim for one in findings):
        each = [kernel for one in findings if one.victim == victim for kernel in one.of_victim]
        changes = [kernel.change for kernel in each]
        us, share = fmean(kernel.before_ns / 1e3 for kernel in each), fmean(kernel.share or 0.0 for kernel in each)
        print(
            f"  {victim}: {100 * min(changes):+.2f}% to {100 * max(changes):+.2f}% of "
            f"{us:.1f} us, {100 * share:.1f}% of the device time"
        )


def together(runs: Sequence[Done]) -> Done:
    """The measurements of several machines or days."""
    return {f"{machine}:{key}": made for machine, run in enumerate(runs) for key, made in run.items()}


BENCHMARK = Benchmark(
    about="how often `cudasched baseline check` finds 5% more work in one kernel, and something where nothing changed",
    groups={str(number): partial(measure, number=number) for number in range(1, MEASUREMENTS + 1)},
    goals={"regressions_found": (0.95, "more"), "false_alarms": (0.01, "less")},
    limits=dict.fromkeys(("regressions_found", "false_alarms"), WHY),
    find=find,
    merge=together,
    results="observe",
    settings={"processes": (10, 2)},
)
