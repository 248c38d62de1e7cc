"""The tuner: a strategy proposes, an evaluator measures, the database keeps; the best few are measured again.

Each configuration gets a few samples first, and more only where it is near the best (multi-fidelity). Measurements of
an interrupted run, or of another tuner on the same database, are not repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from cudasched.errors import ConfigError, Error
from cudasched.tune import warm
from cudasched.tune._fields import Value
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from cudasched.tune.search import Strategy, make
from cudasched.tune.space import TYPES, Problem, configuration_key
from cudasched.tune.workers import Request

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

__all__ = ["Evaluator", "Objective", "Progress", "Settings", "Tuned", "run"]

_SHARED_EVERY_S = 5.0
_OF_THE_MACHINE = ("disturbed", "compile_error", "crashed", "launch_error")
"""Failures that may have another reason than the configuration: another run tries it again."""


class Evaluator(Protocol):
    """Measures configurations: `workers.Live` on a GPU, `recording.Replay` without one."""

    @property
    def problem(self) -> Problem:
        """The problem to measure."""
        ...

    @property
    def fingerprint(self) -> str:
        """Which measurements belong together."""
        ...

    def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        """Measures configurations, in any order."""
        ...


@dataclass(frozen=True)
class Objective:
    """The cost to minimise.

    Attributes:
        memory: How much slower a configuration without device memory of its own may be than one that needs as much as
            all arguments together: 0.1 for a tenth. 0: memory does not count.
        min_occupancy: Configurations below it are not taken, 0 to 1.
    """

    memory: float = 0.0
    min_occupancy: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How is searched.

    Attributes:
        strategy: A name of `search.STRATEGIES`.
        evaluations: Configurations that are tried at most, with those that are known already.
        seconds: Time that the search takes at most, s.
        seed: Of the strategy.
        few: Samples that each configuration gets.
        many: Samples of one that is near the best.
        promising: How much slower than the best counts as near.
        finalists: How many are measured once more in turns at the end.
        batch: Configurations that are asked for at once.
        warm: Whether to take priors from other shapes and the predictor.
        objective: The cost to minimise.
    """

    strategy: str = "bayesian"
    evaluations: int = 200
    seconds: float = math.inf
    seed: int = 0
    few: int = 3
    many: int = 11
    promising: float = 0.1
    finalists: int = 5
    batch: int = 1
    warm: bool = True
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        for name, least in (("evaluations", 1), ("seed", 0), ("few", 1), ("finalists", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is at least {least}, not {getattr(self, name)}")
        if self.many < self.few:
            raise ConfigError(f"many ({self.many}) is at least few ({self.few})")
        if not self.seconds > 0:
            raise ConfigError(f"seconds is over 0, not {self.seconds}")
        if not self.promising >= 0 or not self.objective.memory >= 0:
            raise ConfigError("promising and memory are 0 or more")
        if not 0 <= self.objective.min_occupancy <= 1:
            raise ConfigError(f"min_occupancy is 0 to 1, not {self.objective.min_occupancy}")


@dataclass(frozen=True)
class Progress:
    """A run's report after each configuration.

    Attributes:
        evaluations: Configurations tried, those that were known with them.
        index: The last one.
        measurement: The configuration's result.
        best: The place of the best so far, None: none has run.
        best_us: The best one's time.
    """

    evaluations: int
    index: int
    measurement: Measurement
    best: int | None
    best_us: float | None


@dataclass(frozen=True)
class Tuned:
    """A run's result.

    Attributes:
        problem: The tuned problem.
        fingerprint: Of the source.
        index: The place of the best configuration.
        time_us: The best time, us.
        measurements: Those of all tried configurations, by place, with those of earlier runs.
        scores: What the search minimised, of the configurations that are eligible, by place.
        trace: The best time after each evaluation, us; infinite before the first that ran.
        evaluations: How many configurations were tried by this run.
        strategy: The search's strategy.
        interrupted: Whether the run was stopped before its end.
    """

    problem: Problem
    fingerprint: str
    index: int
    time_us: float
    measurements: Mapping[int, Measurement]
    scores: Mapping[int, float]
    trace: Sequence[float]
    evaluations: int
    strategy: str
    interrupted: bool = False

    @property
    def configuration(self) -> Mapping[str, Value]:
        """The best configuration."""
        return self.problem.configurations[self.index]

    @property
    def work_per_s(self) -> float:
        """The space's work in a second; 0: the space does not state a launch's work."""
        return self.problem.work / (self.time_us * 1e-6)

    def best(self, count: int = 10) -> list[tuple[int, Measurement]]:
        """The best configurations by the objective, the winner first."""
        return [(index, self.measurements[index]) for index in sorted(self.scores, key=self.scores.__getitem__)[:count]]

    def failures(self) -> dict[str, int]:
        """How many configurations gave no time, by why."""
        counts: dict[str, int] = {}
        for one in self.measurements.values():
            if one.status != "ok":
                counts[one.status] = counts.get(one.status, 0) + 1
        return dict(sorted(counts.items(), key=lambda one: -one[1]))


class _Run:
    """One search."""

    def __init__(
        self,
        evaluator: Evaluator,
        settings: Settings,
        database: Database | None,
        on_progress: Callable[[Progress], None] | None,
        prior: NDArray[float64] | None,
    ) -> None:
        self.evaluator, self.settings, self.database, self.on_progress = evaluator, settings, database, on_progress
        self.problem = evaluator.problem
        self.key = Key.of(self.problem, evaluator.fingerprint)
        self.measured: dict[int, Measurement] = {}
        self.scores: dict[int, float] = {}
        self.trace: list[float] = []
        self.own = 0
        self._bytes = sum(
            TYPES[one.type] * self.problem.sizes().get(one.name, 0) for one in self.problem.space.arguments
        )
        self._places = {configuration_key(one): i for i, one in enumerate(self.problem.configurations)}
        if prior is None and settings.warm:
            prior = self._prior()
        self.strategy: Strategy = make(settings.strategy, self.problem.features, settings.seed, prior)
        self._shared_at = 0.0

    def _prior(self) -> NDArray[float64] | None:
        found = warm.from_runs(self.problem, self.database.others(self.key)) if self.database else None
        return found if found is not None else warm.from_predictor(self.problem)

    def score(self, made: Measurement) -> float | None:
        """A measurement's cost; None: the configuration is not eligible."""
        time_us = made.time_us
        if time_us is None or made.occupancy < self.settings.objective.min_occupancy:
            return None
        return time_us * (1 + self.settings.objective.memory * made.workspace_bytes / max(self._bytes, 1))

    @property
    def best(self) -> int | None:
        """The place of the best configuration so far."""
        return min(self.scores, key=self.scores.__getitem__) if self.scores else None

    def keep(self, index: int, made: Measurement, *, own: bool) -> None:
        """Takes a measurement in."""
        first = index not in self.measured
        self.measured[index] = made
        score = self.score(made)
        if score is None:
            self.scores.pop(index, None)
        else:
            self.scores[index] = score
        self.strategy.tell(index, score)
        best = self.best
        best_us = self.measured[best].time_us if best is not None else None
        if first:
            self.trace.append(math.inf if best_us is None else best_us)
            self.own += own
        if own and self.database is not None:
            self.database.put(self.key, self.problem.configurations[index], made)
        if own and self.on_progress is not None:
            self.on_progress(Progress(len(self.measured), index, made, best, best_us))

    def take_known(self) -> None:
        """Takes the database's measurements of an earlier run, or of another tuner that runs now."""
        if self.database is None or time.monotonic() - self._shared_at < _SHARED_EVERY_S:
            return
        self._shared_at = time.monotonic()
        for key, made in self.database.get(self.key).items():
            index = self._places.get(key)
            if index is not None and index not in self.measured and made.status not in _OF_THE_MACHINE:
                self.keep(index, made, own=False)

    def search(self, end: float) -> None:
        """Until there are enough evaluations, no time, or no configuration that was not tried."""
        self._refuse_known()
        self.take_known()
        while len(self.measured) < self.settings.evaluations and time.monotonic() < end:
            places = self.strategy.ask(min(self.settings.batch, self.settings.evaluations - len(self.measured)))
            if not places:
                break
            self._measure(places)
            self.take_known()

    def _refuse_known(self) -> None:
        """Configurations whose occupancy is too low even with few registers."""
        least = self.settings.objective.min_occupancy
        if least <= 0:
            return
        fits = 0
        for index, one in enumerate(self.problem.configurations):
            if self.problem.occupancy(self.problem.launch(one)) < least:
                self.strategy.refuse(index)
            else:
                fits += 1
        if not fits:
            raise ConfigError(f"no configuration has an occupancy of {least:g} or more: the space is empty")

    def _requests(self, places: Sequence[int]) -> list[Request]:
        best = self.best
        best_us = self.measured[best].time_us if best is not None else None
        give_up = math.inf if best_us is None else best_us * 4
        return [Request(index, self.settings.few, give_up_us=give_up) for index in places]

    def _twice(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        """Measures; again, once and after the others, those that a latency client disturbed: workers serve one loop."""
        disturbed = []
        for request, made in self.evaluator.measure(requests):
            if made.status == "disturbed":
                disturbed.append(request)
            else:
                yield request, made
        yield from self.evaluator.measure(disturbed)

    def _measure(self, places: Sequence[int]) -> None:
        promising = []
        for request, made in self._twice(self._requests(places)):
            self.keep(request.index, made, own=True)
            score, best = self.score(made), self.best
            if score is not None and best is not None and score <= self.scores[best] * (1 + self.settings.promising):
                promising.append(request.index)
        if self.settings.many > self.settings.few:
            self.more(promising, self.settings.many - self.settings.few)

    def more(self, places: Sequence[int], samples: int) -> None:
        """More samples of configurations that were measured."""
        wanted = [Request(index, samples, check=False) for index in places if index in self.scores]
        for request, made in self.evaluator.measure(wanted):
            known = self.measured[request.index]
            if made.status == "ok":
                self.keep(request.index, known.with_samples(made.samples_us, made.run_s), own=True)
            elif made.status != "disturbed":
                self.keep(request.index, replace(known, status=made.status, message=made.message), own=True)

    def finish(self) -> None:
        """The best ones again, in turns."""
        finalists = sorted(self.scores, key=self.scores.__getitem__)[: self.settings.finalists]
        if len(finalists) > 1:
            for _ in range(2):
                self.more(finalists, self.settings.many)


def run(
    evaluator: Evaluator,
    settings: Settings | None = None,
    *,
    database: Database | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    prior: NDArray[float64] | None = None,
    verify: Callable[[int], str] | None = None,
) -> Tuned:
    """Tunes an evaluator's problem.

    Args:
        evaluator: Measures.
        settings: How is searched; None: the defaults.
        database: Keeps new measurements, and has earlier ones.
        on_progress: Called after each configuration.
        prior: Each configuration's expected cost; None: by other shapes and the predictor.
        verify: Checks a configuration that would win, and returns its fault; empty: none.

    Raises:
        ConfigError: A setting has no meaning.
        Error: No configuration ran; says why.
        KeyboardInterrupt: Before one ran. A later one ends the search, and the best so far is returned.
    """
    settings = settings or Settings()
    search = _Run(evaluator, settings, database, on_progress, prior)
    number = database.begin_run(search.key, settings.strategy, settings.seed) if database else 0
    interrupted = False
    try:
        search.search(time.monotonic() + settings.seconds)
        search.finish()
    except KeyboardInterrupt:
        interrupted = True
    while verify is not None and not interrupted and (best := search.best) is not None:
        wrong = verify(best)
        if not wrong:
            break
        search.keep(best, replace(search.measured[best], status="out_of_bounds", message=wrong), own=True)
    best = search.best
    if database:
        chosen = search.problem.configurations[best] if best is not None else None
        best_us = search.measured[best].time_us if best is not None else None
        database.update_run(number, search.trace, chosen, best_us, ended=not interrupted)
    if best is None and interrupted:
        raise KeyboardInterrupt
    if best is None:
        raise Error(_why_none(search))
    time_us = search.measured[best].time_us
    assert time_us is not None
    return Tuned(
        problem=search.problem,
        fingerprint=evaluator.fingerprint,
        index=best,
        time_us=time_us,
        measurements=search.measured,
        scores=search.scores,
        trace=search.trace,
        evaluations=search.own,
        strategy=settings.strategy,
        interrupted=interrupted,
    )


def _why_none(search: _Run) -> str:
    counts: dict[str, int] = {}
    example: dict[str, tuple[Any, str]] = {}
    for index, made in search.measured.items():
        status = made.status if made.status != "ok" else "below the least occupancy"
        counts[status] = counts.get(status, 0) + 1
        example.setdefault(status, (dict(search.problem.configurations[index]), made.message))
    if not counts:
        return "no configuration was tried"
    most = max(counts, key=counts.__getitem__)
    configuration, message = example[most]
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda one: -one[1]))
    return f"none of {len(search.measured)} configurations can be used ({told}); {configuration}: {message}".rstrip(
        ": "
    )
