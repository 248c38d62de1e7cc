"""How well regressions are found: `regressions_found` and `false_alarms` of observe.json.

    python -m benchmarks.regressions measure --out DIR          # on a GPU, with PyTorch; at most four minutes
    python -m benchmarks.regressions evaluate DIR [DIR...] --out benchmarks/results/observe.json

`measure` runs a program of 15 kernels in processes of its own, each recorded by CUPTI: some as it is, some with 5% more
rows in one kernel (program.py). It does so in three measurements, one after another, each with another kernel that gets
more work; in a measurement both kinds of process take turns. A process is a cell: DIR/measurement-N.json holds what is
there, and a further call measures what is missing. Measurements of several machines or days are better than of one:
call it with a DIR for each, and give `evaluate` all of them.

`evaluate` needs no GPU. Of each ordered pair of measurements it draws groups of processes, as a baseline and a check
would have recorded them: the baseline from the first, the check from the second. Each goes through the test of
`cudasched baseline`. `false_alarms` is the share of checks of the unchanged program in which something was found,
anything; `regressions_found` the share of checks of the changed one in which that kernel was found. `low` and `high`
are the least and the most of a pair of measurements, `n` the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudasched.demo.harness import HarnessError
from cudasched.observe import baseline
from cudasched.observe.baseline import Baseline, Run

from benchmarks import meta
from benchmarks.regressions.program import VICTIMS
from benchmarks.results.schema import FigureRow, Meta, merge_figures

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLAIN, CHANGED = "plain", "changed"
ARMS = (PLAIN, CHANGED)
MEASUREMENTS = 3
PROCESSES = 10
LIMIT_S = 230.0
GOALS = {"regressions_found": 0.95, "false_alarms": 0.01}
#: What a check has by default, and what else is tried.
SIZES = (6, 5, 8)
MOST_COMPARISONS = 200
SEED = 20_261_123


class BenchmarkError(Exception):
    """The benchmark cannot be run; the text says why."""


# ---- measuring -------------------------------------------------------------------------------------------------------


def cells(processes: int) -> Iterator[tuple[str, int]]:
    """Arms and numbers, in the order ABBA, so that whatever drifts is the same for both."""
    for number in range(processes):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            yield arm, number


@dataclass
class Measurement:
    """What one measurement has so far.

    Attributes:
        path: Its file.
        victim: The kernel that gets more work.
        meta: Of the machine.
        runs: A baseline of one run by arm and number, "plain 3".
    """

    path: Path
    victim: str
    meta: Meta
    runs: dict[str, Baseline]

    def write(self) -> None:
        """Replaces the file."""
        document = {
            "victim": self.victim,
            "meta": self.meta.model_dump(mode="json"),
            "runs": {name: one.model_dump(mode="json") for name, one in self.runs.items()},
        }
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(document) + "\n")
        os.replace(unfinished, self.path)

    def of(self, arm: str) -> list[Baseline]:
        """The processes of an arm, in order."""
        return [one for name, one in sorted(self.runs.items()) if name.split()[0] == arm]


def read_measurement(path: Path) -> Measurement:
    """A file of `measure`.

    Raises:
        BenchmarkError: It is none.
    """
    try:
        document = json.loads(path.read_text())
        runs = {name: Baseline.model_validate(one) for name, one in document["runs"].items()}
        return Measurement(path, document["victim"], Meta.model_validate(document["meta"]), runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} is no measurement: {error}") from None


def record(victim: str, *, simulate: bool, session: int, timeout_s: float) -> Baseline:
    """One process.

    Raises:
        BenchmarkError: It fails or hangs.
    """
    with tempfile.TemporaryDirectory() as place:
        recording = Path(place) / "process.parquet"
        command = [sys.executable, str(HERE / "program.py"), str(recording)]
        command += [victim] if victim else []
        command += ["--simulate", "--session", str(session)] if simulate else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"a process did not end within {timeout_s:.0f} s") from None
        if done.returncode != 0:
            raise BenchmarkError(f"a process ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return baseline.from_recordings([recording], session=f"measurement {session}")


def measure(options: argparse.Namespace) -> int:
    """Runs what is missing, while there is time."""
    begin = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    described = meta.describe(options.simulate, options.commit)
    wanted = [options.only] if options.only else list(range(1, MEASUREMENTS + 1))
    longest_s = 0.0
    for place, number in enumerate(wanted):
        path = options.out / f"measurement-{number}.json"
        victim = VICTIMS[(number - 1) % len(VICTIMS)]
        mine = read_measurement(path) if path.exists() else Measurement(path, victim, described, {})
        until = begin + options.limit_s * (place + 1) / len(wanted)
        for arm, process in cells(options.processes):
            name = f"{arm} {process:02d}"
            if name in mine.runs:
                continue
            left_s = until - time.monotonic()
            if left_s < 1.2 * longest_s:
                print(f"measurement {number}: no time for {name}; call it again", file=sys.stderr)
                break
            started = time.monotonic()
            mine.runs[name] = record(
                victim if arm == CHANGED else "", simulate=options.simulate, session=number, timeout_s=max(left_s, 60)
            )
            if missing := not_found(mine.runs[name]):
                names = sorted({one.name for each in mine.runs[name].runs for one in each.measured})
                print(
                    f"warning: no kernel is called as {', '.join(missing)} is (VICTIM_NAMES): {names}", file=sys.stderr
                )
            longest_s = max(longest_s, time.monotonic() - started)
            if mine.meta.sm_clock_mhz is None and not options.simulate:
                mine.meta = mine.meta.model_copy(update={"sm_clock_mhz": meta.sm_clock_mhz()})
            mine.write()
        have = {arm: len(mine.of(arm)) for arm in ARMS}
        print(f"measurement {number} ({victim}): {have}, {time.monotonic() - begin:.0f} s", flush=True)
    return 0


# ---- evaluating ------------------------------------------------------------------------------------------------------


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
        checks: How many.
        found: In how many something was found that was looked for.
        changes: What was measured of the kernel with more work, as shares.
        shares: Its share of the device time.
        each_us: And its time.
    """

    checks: int
    found: int
    changes: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    each_us: tuple[float, ...] = ()


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
    changes, shares, each_us = [], [], []
    for first, second in draws(before, after, size, most, random.Random(seed)):
        checks += 1
        judged = baseline.check(first, second)
        if not victim:
            found += judged.slower > 0
            continue
        mine = [one for one in judged.compared if one.kind == "kernel" and is_victim(one.name, victim)]
        if not mine:
            raise BenchmarkError(f"no kernel is {victim}: {[one.name for one in judged.compared]}")
        most_of_it = max(mine, key=lambda one: one.share or 0.0)
        found += most_of_it.verdict == "slower"
        changes.append(most_of_it.change)
        shares.append(most_of_it.share or 0.0)
        each_us.append(most_of_it.before_ns / 1e3)
    return Outcome(checks, found, tuple(changes), tuple(shares), tuple(each_us))


def pairs(measurements: Sequence[Measurement], size: int, most: int) -> tuple[list[Outcome], list[Outcome]]:
    """False alarms and findings of each ordered pair of measurements, one with itself where it has the processes."""
    alarms, findings = [], []
    for first in measurements:
        for second in measurements:
            seed = hash((measurements.index(first), measurements.index(second), size, SEED))
            plain = first.of(PLAIN)
            alarms.append(compare(plain, plain if first is second else second.of(PLAIN), "", size, most, seed))
            findings.append(compare(plain, second.of(CHANGED), second.victim, size, most, seed))
    return [one for one in alarms if one.checks], [one for one in findings if one.checks]


def figure(name: str, outcomes: Sequence[Outcome], processes: int, size: int) -> FigureRow:
    """A share of checks beside its goal.

    Raises:
        BenchmarkError: There were none.
    """
    if not outcomes:
        raise BenchmarkError(f"too few processes for groups of {size}: measure more")
    shares = [one.found / one.checks for one in outcomes]
    value = sum(one.found for one in outcomes) / sum(one.checks for one in outcomes)
    better: str = "more" if name == "regressions_found" else "less"
    goal = GOALS[name]
    met = value >= goal if better == "more" else value <= goal
    return FigureRow.model_validate(
        {
            "figure": name,
            "value": value,
            "goal": goal,
            "better": better,
            "low": min(shares),
            "high": max(shares),
            "n": processes,
            "limited_by": "" if met else f"what differs between measurements and processes, with {size} runs a side",
        }
    )


def evaluate(options: argparse.Namespace) -> int:
    """Figures of recorded processes."""
    paths = sorted(path for place in options.measured for path in place.glob("measurement-*.json"))
    if len(paths) < MEASUREMENTS:
        raise BenchmarkError(f"{len(paths)} measurements, and it takes {MEASUREMENTS}")
    measurements = [read_measurement(path) for path in paths]
    processes = sum(len(one.runs) for one in measurements)
    rows: list[FigureRow] = []
    for size in options.sizes:
        alarms, findings = pairs(measurements, size, options.comparisons)
        if not alarms or not findings:
            print(f"{size} runs a side: too few processes")
            continue
        made = [
            figure("regressions_found", findings, processes, size),
            figure("false_alarms", alarms, processes, size),
        ]
        rows = rows or made
        for row, outcomes in zip(made, (findings, alarms), strict=True):
            checks = sum(one.checks for one in outcomes)
            print(
                f"{size} runs a side: {row.figure} {row.value:.4f} (goal {row.goal:g}), {row.low:.4f} to "
                f"{row.high:.4f} over {len(outcomes)} ordered pairs of measurements, {checks} checks, {processes} "
                "processes"
            )
        for place, one in enumerate(measurements):
            of_victim = [found for found in findings[place :: len(measurements)] if found.changes]
            changes = [change for found in of_victim for change in found.changes]
            shares = [share for found in of_victim for share in found.shares]
            times = [us for found in of_victim for us in found.each_us]
            if changes and size == options.sizes[0]:
                print(
                    f"  {one.victim}: {100 * min(changes):+.2f}% to {100 * max(changes):+.2f}% of "
                    f"{sum(times) / len(times):.1f} us, {100 * sum(shares) / len(shares):.1f}% of the device time"
                )
    if not rows:
        raise BenchmarkError(f"too few processes for groups of {options.sizes[0]}: measure more")
    if options.out is not None:
        merge_figures(options.out, measurements[0].meta, rows)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regressions", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure", help="run and record processes")
    one.add_argument("--out", type=Path, required=True, help="a directory; what it holds is not measured again")
    one.add_argument("--limit-s", type=float, default=LIMIT_S)
    one.add_argument("--processes", type=int, default=PROCESSES, help="a measurement and arm")
    one.add_argument("--only", type=int, choices=range(1, MEASUREMENTS + 1), help="this measurement")
    one.add_argument("--commit")
    one.add_argument("--simulate", action="store_true", help="no GPU, no results")
    one.set_defaults(do=measure)
    two = commands.add_parser("evaluate", help="figures of what was recorded")
    two.add_argument("measured", type=Path, nargs="+", help="directories of `measure`")
    two.add_argument("--out", type=Path, help="the results file; its other figures stay")
    two.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="runs a side; figures are of the first")
    two.add_argument("--comparisons", type=int, default=MOST_COMPARISONS, help="of each ordered pair of measurements")
    two.set_defaults(do=evaluate)
    options = parser.parse_args(arguments)
    try:
        return int(options.do(options))
    except (BenchmarkError, HarnessError) as error:
        print(f"regressions: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
