"""Tuners over one recorded space: ours, chance, and Kernel Tuner in its simulation mode. All give a `Course`.

Kernel Tuner is given what a configuration's samples say without outliers, the times that compiling, checking and
running it took, and the same constraints as our enumeration. Its strategies see nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched.tune.recording import Recording, Replay
from cudasched.tune.tuner import Progress, Settings, run

#: Kernel Tuner's strategies that search over a discrete space without more settings.
STRATEGIES = (
    "basinhopping",
    "bayes_opt",
    "diff_evo",
    "dual_annealing",
    "firefly_algorithm",
    "genetic_algorithm",
    "greedy_ils",
    "greedy_mls",
    "mls",
    "pso",
    "simulated_annealing",
    "adaptive_tabu_greywolf",
    "hybrid_vndx",
)


class _FoundError(Exception):
    """Ends a search."""


@dataclass(frozen=True)
class Course:
    """How a search went, an entry for each configuration that it tried.

    Attributes:
        times_us: What the configuration that was best by then, as far as the tuner knew, really takes.
        seconds: Of compiling, checking, running and searching by then, one after another.
    """

    times_us: tuple[float, ...]
    seconds: tuple[float, ...]

    def gap(self, recording: Recording, evaluations: int) -> float:
        """How much slower than the best what was found after so many is; 1 is twice as slow."""
        if not self.times_us:
            return math.inf
        return self.times_us[min(evaluations, len(self.times_us)) - 1] / recording.best()[1] - 1

    def evaluations_to(self, recording: Recording, fraction: float) -> float:
        """After how many it was that near the best; infinite: never."""
        limit = recording.best()[1] * (1 + fraction)
        return next((float(i) for i, one in enumerate(self.times_us, 1) if one <= limit), math.inf)

    def seconds_to(self, recording: Recording, fraction: float) -> float:
        """After how many seconds; infinite: never."""
        evaluations = self.evaluations_to(recording, fraction)
        return math.inf if math.isinf(evaluations) else self.seconds[int(evaluations) - 1]


def ours(
    recording: Recording,
    seed: int,
    evaluations: int,
    *,
    strategy: str = "bayesian",
    prior: Any = None,
    near: float = -math.inf,
    at_least: int = 0,
) -> Course:
    """Our tuner, or with the strategy `random` chance.

    It is stopped once it has found what is that near the best, and has made so many evaluations: what it does after
    that is asked by no figure.
    """
    limit = recording.best()[1] * (1 + near)
    replay = Replay(recording, seed)
    times: list[float] = []
    seconds: list[float] = []
    begin = time.process_time()

    def note(progress: Progress) -> None:
        found = math.inf if progress.best is None else recording.time_us(progress.best)
        entry = replay.clock_s + time.process_time() - begin
        if progress.evaluations > len(times):
            times.append(found)
            seconds.append(entry)
        elif times:  # more samples of a configuration that was tried: what is known to be best may change
            times[-1], seconds[-1] = found, entry
        if len(times) > at_least and any(one <= limit for one in times):
            raise _FoundError

    settings = Settings(strategy=strategy, seed=seed, evaluations=evaluations, warm=False)
    with contextlib.suppress(_FoundError):
        run(replay, settings, on_progress=note, prior=prior)
    return Course(tuple(times), tuple(seconds))


def cache_of(recording: Recording) -> dict[str, Any]:
    """A recording as the file of Kernel Tuner's simulation mode; times in ms."""
    parameters = recording.problem.space.parameters
    entries = {}
    for configuration, made in zip(recording.problem.configurations, recording.measurements, strict=True):
        values = [configuration[name] for name in parameters]
        time_us = made.time_us
        entry: dict[str, Any] = dict(configuration)
        entry["time"] = "RuntimeFailedConfig" if time_us is None else time_us / 1e3
        if time_us is None:
            entry["__error__"] = "RuntimeFailedConfig"
        entry |= {
            "times": [one / 1e3 for one in made.samples_us],
            "compile_time": made.compile_s * 1e3,
            "verification_time": 0.0,
            "benchmark_time": made.run_s * 1e3,
            "strategy_time": 0.0,
            "framework_time": 0.0,
            "timestamp": "2026-01-01 00:00:00+00:00",
        }
        entries[",".join(map(str, values))] = entry
    return {
        "device_name": recording.problem.gpu.name,
        "kernel_name": recording.problem.space.kernel,
        "problem_size": [1, 1, 1],
        "tune_params_keys": list(parameters),
        "tune_params": {name: list(values) for name, values in parameters.items()},
        "objective": "time",
        "cache": entries,
    }


def kernel_tuner(recording: Recording, seed: int, evaluations: int, strategy: str) -> Course:
    """Kernel Tuner with one of its strategies."""
    import kernel_tuner as module
    import numpy as np

    parameters = recording.problem.space.parameters
    places = {
        tuple(configuration[name] for name in parameters): i
        for i, configuration in enumerate(recording.problem.configurations)
    }

    def allowed(p: dict[str, Any]) -> bool:  # no lambda, which it would take apart
        return tuple(p[name] for name in parameters) in places

    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = Path(directory) / "cache.json"
        cache.write_text(json.dumps(cache_of(recording)))
        with contextlib.redirect_stdout(io.StringIO()):
            results, _ = module.tune_kernel(
                recording.problem.space.kernel,
                'extern "C" __global__ void unused() {}',
                (1, 1, 1),
                [],
                {name: list(values) for name, values in parameters.items()},
                lang="CUDA",
                restrictions=allowed,
                strategy=strategy,
                strategy_options={"max_fevals": evaluations},
                cache=str(cache),
                simulation_mode=True,
                quiet=True,
                seed=seed,
            )
    spent_s = [(each.get("strategy_time", 0.0) + each.get("framework_time", 0.0)) / 1e3 for each in results]
    indices = [places[tuple(each[name] for name in parameters)] for each in results]
    return course(recording, zip(indices, spent_s, strict=True))


def course(recording: Recording, tried: Iterable[tuple[int, float]]) -> Course:
    """Of a tuner that is told the time of each configuration: those that it tried, and the seconds that it thought."""
    seen: set[int] = set()
    best, best_known = math.inf, math.inf
    clock = 0.0
    times: list[float] = []
    seconds: list[float] = []
    for index, spent_s in tried:
        clock += spent_s
        if index in seen:
            continue
        seen.add(index)
        made = recording.measurements[index]
        clock += made.compile_s + made.run_s
        known = made.time_us
        if known is not None and known < best_known:
            best_known, best = known, recording.time_us(index)
        times.append(best)
        seconds.append(clock)
    return Course(tuple(times), tuple(seconds))
