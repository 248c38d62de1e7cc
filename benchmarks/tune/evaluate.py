"""Our tuner against chance and Kernel Tuner over recorded spaces: four rows of kernels.json.

For each kernel, Kernel Tuner's strategy is the one that does best on the other kernels (with seeds of their own),
chosen anew for each figure. Seconds are those of compiling and running at the recording, one after another, and the CPU
time of the search. Other figures of the file stay. Spaces of which more than 1% of the configurations are
within 2% of the best are left out, and named. No GPU is needed: about --seeds x spaces x 10 s of CPU
time. A rehearsal takes synthetic recordings (`--recorded`).
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cudasched.tune import warm
from cudasched.tune.measurement import Measurement
from cudasched.tune.recording import Recording, Replay
from cudasched.tune.space import configuration_key
from cudasched.tune.tuner import Settings, run

from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Goals, Session
from benchmarks.results.schema import load
from benchmarks.tables import plot_beside
from benchmarks.tune import rivals
from benchmarks.tune.rivals import Course

RECORDED = Path(__file__).parent / "recorded"
EVALUATIONS = 100
LONGEST = 300
NEAR = 0.02
FLAT = 0.01
KNOWN_EVALUATIONS = 200
#: A median gap below this counts as this: two tuners that both find the best are equal.
LEAST_GAP = 1e-4
GOALS: Goals = {
    "tuner_gap_of_random": (0.5, "less"),
    "tuner_gap_of_kernel_tuner": (0.8, "less"),
    "tuner_seconds_of_kernel_tuner": (0.67, "less"),
    "warm_start_evaluations": (1 / 3, "less"),
}
TITLES = ("ours", "random")


@dataclass(frozen=True)
class Task:
    """One search to do.

    Attributes:
        path: The recording.
        tuner: `ours`, `random`, `warm`, or a strategy of Kernel Tuner.
        seed: Its seed.
        evaluations: Configurations that it may try.
        others: Recordings of other shapes, that were tuned before.
    """

    path: Path
    tuner: str
    seed: int
    evaluations: int
    others: tuple[Path, ...] = ()


loaded = functools.lru_cache(maxsize=16)(Recording.load)


def do(task: Task) -> Course:
    """One search."""
    recording = loaded(task.path)
    if task.tuner in TITLES:
        strategy = "bayesian" if task.tuner == "ours" else "random"
        return rivals.ours(recording, task.seed, task.evaluations, strategy=strategy, near=NEAR, at_least=EVALUATIONS)
    if task.tuner == "warm":
        return rivals.ours(recording, task.seed, task.evaluations, prior=_prior(recording, task), near=NEAR)
    return rivals.kernel_tuner(recording, task.seed, task.evaluations, task.tuner)


def _prior(recording: Recording, task: Task) -> object:
    """What a run of each other shape has left in the database."""
    return warm.from_runs(recording.problem, dict(_run_before(path, task.seed) for path in task.others))


@functools.lru_cache(maxsize=16)
def _run_before(path: Path, seed: int) -> tuple[str, Mapping[str, Measurement]]:
    """A shape, and what a run of it has measured, by configuration."""
    recording = loaded(path)
    tuned = run(Replay(recording, seed), Settings(seed=seed, evaluations=KNOWN_EVALUATIONS, warm=False))
    configurations = recording.problem.configurations
    known = {configuration_key(configurations[index]): made for index, made in tuned.measurements.items()}
    return recording.problem.key(), known


class Evaluation:
    """The searches that were done, by recording and tuner, and what follows from them."""

    def __init__(self, recordings: Mapping[Path, Recording], courses: Mapping[Task, Course]) -> None:
        self.recordings = recordings
        self.courses = courses
        self.kernels = sorted({one.problem.space.kernel for one in recordings.values()})

    def of(self, kernel: str, tuner: str, figure: Callable[[Recording, Course], float], seeds: range) -> list[float]:
        """A figure of each search."""
        return [
            figure(self.recordings[task.path], course)
            for task, course in self.courses.items()
            if task.tuner == tuner and task.seed in seeds and self.recordings[task.path].problem.space.kernel == kernel
        ]

    def chosen(self, kernel: str, figure: Callable[[Recording, Course], float], seeds: range) -> str:
        """Kernel Tuner's strategy that is best on the other kernels, by the mean of its ranks."""
        ranks = dict.fromkeys(rivals.STRATEGIES, 0.0)
        for other in self.kernels:
            if other == kernel:
                continue
            medians = {one: median(self.of(other, one, figure, seeds)) for one in ranks}
            for one, value in medians.items():
                ranks[one] += sum(other_value < value for other_value in medians.values())
        return min(ranks, key=ranks.__getitem__)


def median(values: Sequence[float]) -> float:
    """The median; infinite values stay at their place in the order."""
    return statistics.median(values) if values else math.inf


def gap(recording: Recording, course: Course) -> float:
    """After `EVALUATIONS`."""
    return course.gap(recording, EVALUATIONS)


def seconds(recording: Recording, course: Course) -> float:
    """Until it is near the best; where it never is, all the time that it had, which is too little."""
    needed = course.seconds_to(recording, NEAR)
    return course.seconds[-1] if math.isinf(needed) else needed


def evaluations(recording: Recording, course: Course) -> float:
    """Until it is near the best; where it never is, all that it had."""
    needed = course.evaluations_to(recording, NEAR)
    return float(len(course.seconds)) if math.isinf(needed) else needed


def others_of(path: Path, recordings: Mapping[Path, Recording]) -> tuple[Path, ...]:
    """The kernel's other shapes."""
    kernel = recordings[path].problem.space.kernel
    return tuple(
        sorted(other for other, one in recordings.items() if one.problem.space.kernel == kernel and other != path)
    )


def tasks(recordings: Mapping[Path, Recording], seeds: int, choosing: int) -> list[Task]:
    """All searches. Seeds from 1000 on are those that strategies are chosen by."""
    made, warmed = [], []
    kernels = {one.problem.space.kernel for one in recordings.values()}
    for path in recordings:
        others = others_of(path, recordings)
        for seed in range(seeds):
            made.append(Task(path, "ours", seed, LONGEST))
            made.append(Task(path, "random", seed, EVALUATIONS))
            if others:
                warmed.append(Task(path, "warm", seed, LONGEST, others))
        if len(kernels) > 1:
            for strategy in rivals.STRATEGIES:
                made += [Task(path, strategy, 1000 + seed, LONGEST) for seed in range(choosing)]
    warmed.sort(key=lambda task: task.seed)  # the runs before are the same for all of a seed
    return made + warmed


def find(evaluation: Evaluation, scored: range, choosing: range) -> Found:
    """The figures of what was done."""
    found: Found = {}

    def add(name: str, pairs: Mapping[str, tuple[list[float], list[float]]], least: float) -> None:
        def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
            return max(median(ours), least) / max(median(theirs), least)

        if not pairs:
            return
        everything = ([x for one, _ in pairs.values() for x in one], [x for _, one in pairs.values() for x in one])
        value = ratio(*everything)
        each = [ratio(*one) for one in pairs.values()]
        found[name] = value, min([*each, value]), max([*each, value]), len(everything[0])

    kernels = evaluation.kernels
    of = evaluation.of
    add(
        "tuner_gap_of_random",
        {k: (of(k, "ours", gap, scored), of(k, "random", gap, scored)) for k in kernels},
        LEAST_GAP,
    )
    for name, figure in (("tuner_gap_of_kernel_tuner", gap), ("tuner_seconds_of_kernel_tuner", seconds)):
        pairs = {}
        for kernel in kernels if len(kernels) > 1 else []:
            strategy = evaluation.chosen(kernel, figure, choosing)
            print(f"{name}: {kernel} against {strategy}")
            pairs[kernel] = (of(kernel, "ours", figure, scored), of(kernel, strategy, figure, scored))
        add(name, pairs, LEAST_GAP)
    warmed = {k: (of(k, "warm", evaluations, scored), of(k, "ours", evaluations, scored)) for k in kernels}
    add("warm_start_evaluations", {k: one for k, one in warmed.items() if one[0]}, 1.0)
    return found


def spread(evaluation: Evaluation, scored: range) -> list[str]:
    """Median, mean and worst of each tuner's searches by kernel: what the rows' medians do not say."""
    lines = []
    tuners = sorted({task.tuner for task in evaluation.courses})
    for kernel in evaluation.kernels:
        for tuner in tuners:
            for name, figure in (("gap", gap), ("seconds", seconds), ("evaluations", evaluations)):
                values = evaluation.of(kernel, tuner, figure, scored)
                if values and not (tuner == "warm" and name == "gap"):
                    middle, mean, worst = median(values), statistics.mean(values), max(values)
                    lines.append(f"{kernel}, {tuner}, {name}: median {middle:.4g}, mean {mean:.4g}, worst {worst:.4g}")
    return lines


def spaces(session: Session) -> dict[Path, Recording]:
    """The recorded spaces, but for flat ones.

    Raises:
        ValueError: There is none, or not such that a figure may come from it.
    """
    recordings = {path: Recording.load(path) for path in sorted(session.options.recorded.glob("*.npz"))}
    if not recordings:
        where = session.options.recorded
        raise ValueError(f"{where} has no recording: python -m benchmarks.tune record makes them on a GPU")
    if not session.rehearsal and any(one.is_synthetic for one in recordings.values()):
        raise ValueError("a recording is synthetic: no figure may come from it (--rehearse)")
    for path, one in list(recordings.items()):
        flat = one.share_within(NEAR)
        print(f"{path.stem}: {len(one.measurements)} configurations, {flat:.2%} within 2%")
        if flat > FLAT:
            print(f"{path.stem}: left out, because more than 1% are")
            del recordings[path]
    if not recordings:
        raise ValueError("no recording is left")
    return recordings


def told_by(session: Session, recording: Recording) -> None:
    """The results name the GPU of the recordings, not this machine's."""
    if not session.rehearsal:
        session.meta.gpu, session.meta.driver = recording.problem.gpu.name, recording.about.get("driver") or None


def evaluate(session: Session) -> Found:
    """All searches, and what follows from them. Raises ValueError."""
    options = session.options
    recordings = spaces(session)
    if session.out.exists():
        load(session.out)  # before hours of work: a file that cannot be read would not be merged into
    wanted = tasks(recordings, options.seeds, options.choosing_seeds)
    with ProcessPoolExecutor(options.processes) as pool:
        courses = dict(zip(wanted, pool.map(do, wanted), strict=True))
        evaluation = Evaluation(recordings, courses)
        scored, choosing = range(options.seeds), range(1000, 1000 + options.choosing_seeds)
        if len(evaluation.kernels) > 1:
            more = [
                Task(path, strategy, seed, LONGEST)
                for path, one in recordings.items()
                for strategy in {
                    evaluation.chosen(one.problem.space.kernel, figure, choosing) for figure in (gap, seconds)
                }
                for seed in scored
            ]
            courses |= dict(zip(more, pool.map(do, more), strict=True))
    evaluation = Evaluation(recordings, courses)
    for line in spread(evaluation, scored):
        print(line)
    told_by(session, next(iter(recordings.values())))
    return find(evaluation, scored, choosing)


BENCHMARK = Benchmark(
    about="our tuner against chance and Kernel Tuner over recorded spaces",
    groups={"evaluate": evaluate},
    goals=GOALS,
    finish=lambda session: plot_beside(session.out),
    results="kernels",
    settings={
        "recorded": RECORDED,
        "seeds": (30, 2),
        "choosing_seeds": (5, 1),
        "processes": (max(1, len(os.sched_getaffinity(0)) - 1), 1),
    },
    gpu=False,
)
