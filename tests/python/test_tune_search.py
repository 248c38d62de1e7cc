"""The strategies, the tuner's loop over replayed spaces, the database. The spaces are synthetic."""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cudasched.errors import ConfigError, Error
from cudasched.tune import tune, warm
from cudasched.tune.database import Database, Key, default_path
from cudasched.tune.measurement import Measurement, robust
from cudasched.tune.recording import Recording, Replay
from cudasched.tune.search import STRATEGIES, Exhaustive, make
from cudasched.tune.space import configuration_key
from cudasched.tune.tuner import Objective, Progress, Settings, run
from cudasched.tune.workers import Limits, Request
from synthetic_spaces import of_kernel, recording, small

pytest.importorskip("sklearn")

SMALL = recording(small())


@pytest.fixture(scope="module")
def layernorm() -> Recording:
    return recording(of_kernel("layernorm"))


def gap(recorded: Recording, strategy: str, seed: int, evaluations: int = 60) -> float:
    settings = Settings(strategy=strategy, seed=seed, evaluations=evaluations, warm=False)
    return recorded.time_us(run(Replay(recorded, seed), settings).index) / recorded.best()[1] - 1


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "botorch"])
def test_a_strategy_proposes_each_configuration_once_until_none_is_left(name: str) -> None:
    if name == "optuna":
        pytest.importorskip("optuna")
    features = np.random.default_rng(0).standard_normal((23, 3))
    search = make(name, features, seed=1)
    search.refuse(22)
    seen: list[int] = []
    while places := search.ask(4):
        seen += places
        for place in places:
            search.tell(place, None if place % 5 == 0 else 1.0 + place)
    assert sorted(seen) == list(range(22))


def test_a_search_without_its_package_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error after the first configurations were measured."""
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(Error, match="needs botorch"):
        make("botorch", np.zeros((4, 2)), seed=1)


@pytest.mark.parametrize("warmed", [True, False])
def test_what_is_refused_beforehand_does_not_count_as_tried(warmed: bool) -> None:
    """Guards against a search that learned from thousands of refused places, and asked no prior."""
    random = np.random.default_rng(0)
    features, prior = random.standard_normal((200, 3)), random.random(200) + 1 if warmed else None
    all_of_them = make("bayesian", features, 1, prior)
    others = make("bayesian", features[150:], 1, None if prior is None else prior[150:])
    for index in range(150):
        all_of_them.refuse(index)
    for turn in range(8):
        (place,), (other,) = all_of_them.ask(1), others.ask(1)
        assert place == 150 + other
        all_of_them.tell(place, 1.0 + turn)
        others.tell(other, 1.0 + turn)


def test_the_default_is_better_than_chance(layernorm: Recording) -> None:
    ours = [gap(layernorm, "bayesian", seed) for seed in range(3)]
    random = [gap(layernorm, "random", seed) for seed in range(9)]
    assert statistics.median(ours) <= 0.5 * statistics.median(random)


def test_an_exhaustive_search_finds_the_best() -> None:
    tuned = run(Replay(SMALL), Settings(strategy="exhaustive", evaluations=10_000, warm=False))
    assert len(tuned.measurements) == len(SMALL.measurements)
    assert SMALL.time_us(tuned.index) <= SMALL.best()[1] * 1.02
    assert tuned.failures() == {"does_not_fit": sum(one.status == "does_not_fit" for one in SMALL.measurements)}
    assert all(later <= earlier * 1.05 for earlier, later in zip(tuned.trace, tuned.trace[1:], strict=False))


def test_an_unknown_strategy_or_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        run(Replay(SMALL), Settings(strategy="randon"))
    for wrong in ({"evaluations": 0}, {"seed": -1}, {"few": 5, "many": 2}, {"seconds": math.nan}, {"batch": 0}):
        with pytest.raises(ConfigError):
            Settings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_occupancy"):
        Settings(objective=Objective(min_occupancy=2))


class Watched(Replay):
    """Notes what is asked for."""

    def __init__(self, recorded: Recording) -> None:
        super().__init__(recorded)
        self.requests: list[Request] = []

    def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        for request in requests:
            self.requests.append(request)
            yield from super().measure([request])


def test_few_samples_first_and_more_for_what_is_near_the_best() -> None:
    watched = Watched(SMALL)
    tuned = run(watched, Settings(strategy="random", evaluations=40, few=2, many=7, finalists=3, warm=False))
    first = [one for one in watched.requests if one.check]
    more = {one.index for one in watched.requests if not one.check}
    assert len(first) == 40 and all(one.samples == 2 for one in first)
    assert tuned.index in more and len(more) < 20
    samples = {index: len(one.samples_us) for index, one in tuned.measurements.items() if one.status == "ok"}
    assert all(samples[index] > 2 for index in more) and min(samples.values()) <= 2
    assert samples[tuned.index] >= 7 + 2 * 7


def test_a_batch_is_asked_for_at_once_and_has_no_place_twice() -> None:
    tuned = run(Replay(SMALL), Settings(evaluations=32, batch=8, warm=False))
    assert len(tuned.measurements) == 32


class Failing(Replay):
    """Every configuration ends in the same way."""

    def __init__(self, recorded: Recording, made: Measurement) -> None:
        super().__init__(recorded)
        self._made = made

    def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        for request in requests:
            yield request, self._made


@pytest.mark.parametrize("status", ["compile_error", "wrong", "hang", "fault", "out_of_bounds", "crashed"])
def test_where_nothing_runs_the_error_has_the_reason_and_a_configuration(status: str) -> None:
    made = Measurement(status, message="the log of it")  # type: ignore[arg-type]
    with pytest.raises(Error, match=f"none of 5 .*5 {status}.*THREADS.*the log of it"):
        run(Failing(SMALL, made), Settings(evaluations=5, warm=False))


def test_no_time_is_taken_while_a_latency_client_is_active_and_it_is_tried_again() -> None:
    class Disturbed(Watched):
        loops = 0

        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            self.loops += 1
            assert self.loops == 1, "a second loop over the same workers takes the first one's results"
            for request in requests:
                seen = sum(one.index == request.index for one in self.requests)
                for _, made in super().measure([request]):
                    yield request, made if seen or made.status != "ok" else Measurement("disturbed", discarded=2)
            self.loops -= 1

    tuned = run(Disturbed(SMALL), Settings(strategy="random", evaluations=10, batch=5, finalists=1, warm=False))
    assert "disturbed" not in tuned.failures() and len(tuned.measurements) == 10


def test_memory_counts_as_the_objective_says() -> None:
    hungry = SMALL.best()[0]
    size = 8 * 1048576
    measurements = list(SMALL.measurements)
    measurements[hungry] = replace(measurements[hungry], workspace_bytes=size)
    recorded = replace(SMALL, measurements=tuple(measurements))
    settings = Settings(strategy="exhaustive", evaluations=10_000, warm=False)
    assert recorded.time_us(run(Replay(recorded), settings).index) <= SMALL.best()[1] * 1.02
    frugal = run(Replay(recorded), replace(settings, objective=Objective(memory=0.5)))
    assert frugal.index != hungry


@pytest.mark.parametrize(
    "objective", [Objective(min_occupancy=0.6), Objective(memory=0.5)], ids=["occupancy", "memory"]
)
def test_the_best_are_those_that_the_objective_says(objective: Objective) -> None:
    """Guards against faster configurations that may not win, listed above the winner."""
    costly = {SMALL.best()[0], *range(0, len(SMALL.measurements), 3)}
    recorded = replace(
        SMALL,
        measurements=tuple(
            replace(one, workspace_bytes=10**8, occupancy=0.5) if i in costly else one
            for i, one in enumerate(SMALL.measurements)
        ),
    )
    tuned = run(Replay(recorded), Settings(strategy="exhaustive", evaluations=10_000, warm=False, objective=objective))
    best = tuned.best()
    assert len(best) == 10 and best[0][0] == tuned.index
    assert all(one.occupancy >= objective.min_occupancy for _, one in best)


def test_low_occupancy_is_passed_over_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[int] = set()
    monkeypatch.setattr(Exhaustive, "tell", lambda _, index, score: told.add(index))
    watched = Watched(SMALL)
    settings = Settings(strategy="exhaustive", evaluations=10_000, warm=False, objective=Objective(min_occupancy=0.6))
    run(watched, settings)
    asked = {int(SMALL.problem.configurations[one.index]["THREADS"]) for one in watched.requests}
    assert asked == {64, 128, 256, 512} and told == {one.index for one in watched.requests}
    with pytest.raises(ConfigError, match="the space is empty"):
        run(Replay(recording(small(n=32))), replace(settings, objective=Objective(min_occupancy=1.0), evaluations=3))


def test_a_warm_start_needs_a_part_of_the_evaluations() -> None:
    known = recording(of_kernel("gemm"))
    new = recording(of_kernel("gemm", {"m": 1024, "n": 4096, "k": 1024}))
    keys = [configuration_key(one) for one in known.problem.configurations]
    other = dict(zip(keys, known.measurements, strict=True))
    prior = warm.from_runs(new.problem, {known.problem.key(): other})
    assert prior is not None

    def over_best(given: object, evaluations: int, seed: int = 0) -> list[float]:
        settings = Settings(evaluations=evaluations, warm=False, seed=seed)
        tuned = run(Replay(new), settings, prior=given)  # type: ignore[arg-type]
        return [new.time_us(index) / new.best()[1] for index in tuned.measurements]

    def needed(given: object) -> int:
        return next((i for i, over in enumerate(over_best(given, 80), 1) if over <= 1.05), 81)

    cold = needed(None)
    assert needed(prior) <= cold / 3
    assert prior.shape == (1, len(keys))
    # A shape that is nearer, and for which the opposite is good, costs a few evaluations.
    assert needed(np.vstack([1 / prior, prior])) <= cold / 2

    # Where there is no other, the search is soon as far as without one; where a single search gets to is chance.
    def found(given: object) -> float:
        return statistics.median(min(over_best(given, 40, seed)) for seed in range(5))

    assert found(1 / prior) <= 1.25 * found(None)


def test_a_part_of_a_run_is_filled_in_by_trees_and_the_nearest_shape_comes_first() -> None:
    recorded = recording(small())
    keys = [configuration_key(one) for one in recorded.problem.configurations]
    part = {key: one for i, (key, one) in enumerate(zip(keys, recorded.measurements, strict=True)) if i % 2}
    prior = warm.from_runs(recorded.problem, {"n=1048576": part})
    assert prior is not None and np.isfinite(prior).all()
    true = np.array([recorded.time_us(i) for i in range(0, len(keys), 2)])
    ok = np.isfinite(true)
    assert np.corrcoef(prior[0, ::2][ok], true[ok])[0, 1] > 0.5
    assert warm.from_runs(recorded.problem, {"n=4": dict(list(part.items())[:3])}) is None
    swapped = {key: replace(one, samples_us=tuple(1e4 / t for t in one.samples_us)) for key, one in part.items()}
    both = warm.from_runs(recorded.problem, {"n=1": swapped, "n=1048576": part})
    assert both is not None and len(both) == 2 and np.array_equal(both[0], prior[0])
    many = warm.from_runs(recorded.problem, {f"n={n}": part for n in range(1, 12)})
    assert many is not None and len(many) == 8


def test_the_predictor_is_asked_what_to_expect() -> None:
    prior = warm.from_predictor(of_kernel("layernorm"))
    assert prior is not None and (prior > 0).all() and len(set(prior.round(6))) > 10


@pytest.mark.parametrize("status", ["hang", "fault", "crashed"])
def test_one_that_fails_when_it_is_timed_again_does_not_win(status: Any) -> None:
    best = SMALL.best()[0]

    class Late(Watched):
        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            for request, made in super().measure(requests):
                late = request.index == best and not request.check
                yield request, Measurement(status, message="late") if late else made

    late = Late(SMALL)
    tuned = run(late, Settings(strategy="exhaustive", evaluations=10_000, few=7, many=7, warm=False))
    assert tuned.index != best and tuned.failures()[status] == 1 and tuned.measurements[best].message == "late"
    assert sum(one.index == best for one in late.requests) == 2


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    class Interrupted(Watched):
        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            for one in super().measure(requests):
                if len(self.requests) > 12:
                    raise KeyboardInterrupt
                yield one

    settings = Settings(strategy="random", evaluations=30, many=3, finalists=1, warm=False)
    with Database(tmp_path / "tune.sqlite") as database:
        first = run(Interrupted(SMALL), settings, database=database)
        assert first.interrupted and len(first.measurements) == 12
    with Database(tmp_path / "tune.sqlite") as database:
        watched = Watched(SMALL)
        second = run(watched, settings, database=database)
        assert len(second.measurements) == 30 and second.evaluations == 18 and not second.interrupted
        assert not {one.index for one in watched.requests} & (set(first.measurements) - {second.index})
        ends = [(one.evaluations, one.ended is not None) for one in database.runs()]
        assert ends == [(30, True), (12, False)]


def test_configurations_that_failed_count_as_tried(tmp_path: Path) -> None:
    """Guards against a run's number of configurations that began with the first that had a time."""

    class Late(Replay):
        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            for request, made in super().measure(requests):
                yield request, made if request.index >= 3 else Measurement("wrong")

    with Database(tmp_path / "tune.sqlite") as database:
        run(Late(SMALL), Settings(strategy="exhaustive", evaluations=10, warm=False), database=database)
        (kept,) = database.runs()
    assert kept.evaluations == 10 and len(kept.trace) == 7


def test_an_interrupt_before_the_first_time_is_an_interrupt(tmp_path: Path) -> None:
    """Guards against Ctrl-C that was reported as a space in which nothing can be used."""

    class Interrupted(Replay):
        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            raise KeyboardInterrupt

    with Database(tmp_path / "tune.sqlite") as database:
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(SMALL), Settings(strategy="random", warm=False), database=database)
        assert [(one.evaluations, one.ended) for one in database.runs()] == [(0, None)]


def test_an_interrupt_while_the_best_are_timed_again_keeps_the_run(tmp_path: Path) -> None:
    class Interrupted(Replay):
        def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
            for request, made in super().measure(requests):
                if not request.check:
                    raise KeyboardInterrupt
                yield request, made

    def verify(index: int) -> str:
        raise AssertionError("it was verified")

    settings = Settings(strategy="random", evaluations=12, many=3, warm=False)
    with Database(tmp_path / "tune.sqlite") as database:
        tuned = run(Interrupted(SMALL), settings, database=database, verify=verify)
        assert tuned.interrupted and len(tuned.measurements) == 12
        assert [(one.evaluations, one.ended) for one in database.runs()] == [(12, None)]


@pytest.mark.parametrize("status", ["compile_error", "crashed", "launch_error"])
def test_a_failure_that_may_be_the_machines_is_tried_again(tmp_path: Path, status: Any) -> None:
    settings = Settings(strategy="exhaustive", evaluations=5, warm=False)
    with Database(tmp_path / "tune.sqlite") as database:
        with pytest.raises(Error, match=f"5 {status}"):
            run(Failing(SMALL, Measurement(status)), settings, database=database)
        assert run(Replay(SMALL), settings, database=database).evaluations == 5
        assert status not in {one.status for one in database.get(Key.of(SMALL.problem, SMALL.fingerprint)).values()}


def test_two_tuners_on_one_database_share_what_they_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudasched.tune.tuner._SHARED_EVERY_S", 0.0)
    path = tmp_path / "tune.sqlite"
    other = Database(path)
    told: list[int] = []

    def beside(progress: Progress) -> None:
        """The other tuner, which measures a configuration whenever the first one has."""
        if len(told) < 10:
            index = len(SMALL.measurements) - 1 - len(told)
            told.append(index)
            key = Key.of(SMALL.problem, SMALL.fingerprint)
            other.put(key, SMALL.problem.configurations[index], SMALL.measurements[index])

    with Database(path) as database:
        tuned = run(
            Replay(SMALL),
            Settings(strategy="exhaustive", evaluations=40, warm=False),
            database=database,
            on_progress=beside,
        )
    other.close()
    assert set(told) <= set(tuned.measurements) and tuned.evaluations == 40 - 10


def test_a_measurement_with_more_samples_is_kept(tmp_path: Path) -> None:
    key = Key("gpu", "k", "f", "n=1")
    with Database(tmp_path / "d.sqlite") as database:
        database.put(key, {"A": 1}, Measurement("ok", samples_us=(1.0, 2.0, 3.0), registers=9, profile={"l2": 5.0}))
        database.put(key, {"A": 1}, Measurement("ok", samples_us=(9.0,)))
        database.put(key, {"A": 1}, Measurement("disturbed"))
        (found,) = database.get(key).values()
        assert found.samples_us == (1.0, 2.0, 3.0) and found.registers == 9 and found.profile == {"l2": 5.0}
        assert database.keys() == [key] and database.others(replace(key, shape="n=2")).keys() == {"n=1"}


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(Error, match="cannot be opened"):
        Database(tmp_path / "text")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(Error, match="version 99"):
        Database(tmp_path / "newer")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE measurements SET samples_us = 'none'",
        "UPDATE measurements SET samples_us = '3'",
        "UPDATE measurements SET samples_us = '[-1, \"a\"]'",
        "UPDATE measurements SET samples_us = '[0]'",
        f"UPDATE measurements SET samples_us = '{'[' * 5000}'",
        "UPDATE measurements SET samples_us = x'00ff'",
        "UPDATE measurements SET profile = '[]'",
        'UPDATE measurements SET profile = \'{"l2": "much"}\'',
        "UPDATE measurements SET occupancy = 'high'",
        "UPDATE measurements SET registers = -1",
        "UPDATE measurements SET run_s = 9e999",
        "UPDATE measurements SET message = x'ff'",
        "UPDATE measurements SET configuration = '{' || configuration WHERE status = 'ok'",
        "UPDATE measurements SET shape = x'ff' WHERE shape <> 'n=1048576'",
        "UPDATE measurements SET shape = 'n=many' WHERE shape <> 'n=1048576'",
        "UPDATE measurements SET kernel = x'ff'",
        "UPDATE runs SET trace = '{}', best = '[1]'",
        "UPDATE runs SET seed = 'x'",
        "UPDATE runs SET best = '\"text\"'",
        "UPDATE runs SET trace = 'null'",
        "DROP TABLE measurements",
        "DROP TABLE measurements; CREATE TABLE measurements (a)",
        "DROP TABLE runs; CREATE VIEW runs AS SELECT 1 AS run",
    ],
)
def test_a_database_that_says_anything_is_used_or_refused_by_name(tmp_path: Path, damage: str) -> None:
    """SQLite keeps anything in any column. Guards against damage that was called a mistake in cudasched."""
    path = tmp_path / "tune.sqlite"
    settings = Settings(strategy="random", evaluations=20)
    with Database(path) as database:
        run(Replay(SMALL), settings, database=database)
        other = recording(small(n=4096))
        run(Replay(other), settings, database=database)
    edited = sqlite3.connect(path)
    edited.executescript(damage)
    edited.close()
    try:
        with Database(path) as database:
            tuned = run(Replay(SMALL), replace(settings, evaluations=30), database=database)
            assert len(tuned.measurements) == 30
            database.runs()
            for key in database.keys():  # noqa: SIM118  of this class, not of a dictionary
                database.get(key)
    except Error as error:
        assert not isinstance(error, ConfigError) and "tune.sqlite" in str(error)


def test_without_a_home_measurements_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match="neither HOME nor XDG_CACHE_HOME"):
        default_path()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(ConfigError, match="neither HOME nor XDG_CACHE_HOME"):
        default_path()


def damaged(path: Path, **changes: Any) -> None:
    """A recording with other arrays, or another header."""
    SMALL.save(path)
    with np.load(path) as data:
        arrays = dict(data)
    header = json.loads(bytes(arrays["header"])) | changes.pop("header", {})
    arrays |= {name: change(arrays[name]) if callable(change) else change for name, change in changes.items()}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path.open("wb"), **arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"header": {"version": [1]}},
        {"header": {"gpu": ["x", ["9.0"], 1, 1]}},
        {"header": {"gpu": 3}},
        {"header": {"shape": [1]}},
        {"header": {"shape": {"n": 10**400}}},
        {"header": {"space": 3}},
        {"header": {"about": 3}},
        {"values": lambda values: values[:-1]},
        {"values": lambda values: np.concatenate([values, values[:1]])},
        {"values": lambda values: values.astype(float)},
        {"values": lambda values: values - np.int64(7)},
        {"status": lambda status: status + 100},
        {"samples": lambda samples: samples * np.nan},
        {"samples": lambda samples: -samples},
        {"samples": lambda samples: samples * np.inf},
        {"samples": lambda samples: samples[:, :0]},
        {"occupancy": lambda occupancy: occupancy * np.nan},
        {"registers": lambda registers: registers.astype(str)},
        {"retimed": lambda retimed: retimed + 10**6},
        {"retimed_samples": lambda samples: samples * np.nan},
        {"compile_s": np.zeros(3)},
    ],
)
def test_a_recording_that_is_damaged_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    damaged(tmp_path / "small.npz", **changes)
    with pytest.raises(Error, match=r"small\.npz"):
        Recording.load(tmp_path / "small.npz")


def test_a_recording_that_is_another_file_is_refused(tmp_path: Path) -> None:
    damaged(tmp_path / "small.npz")
    assert len(Recording.load(tmp_path / "small.npz").measurements) == 120
    np.save((tmp_path / "one.npz").open("wb"), np.zeros(3))
    with zipfile.ZipFile(tmp_path / "deep.npz", "w") as packed:
        about = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9" + b"9" * 60
        packed.writestr("header.npy", b"\x93NUMPY\x01\x00v\x00" + about)
    (tmp_path / "text.npz").write_text("nothing")  # of which NumPy says how to run code in it
    for name in ("one.npz", "deep.npz", "text.npz"):
        with pytest.raises(Error, match=f"{name}: it is no recording of a space, or is damaged$"):
            Recording.load(tmp_path / name)


def test_a_recording_comes_back_from_its_file(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "small.npz")
    loaded = Recording.load(tmp_path / "small.npz")
    assert loaded.is_synthetic and loaded.problem.configurations == SMALL.problem.configurations
    assert loaded.best() == pytest.approx(SMALL.best(), rel=1e-5)
    times = [(one.time_us(i), other) for one in [loaded] for i, other in enumerate(map(SMALL.time_us, range(120)))]
    assert all(a == b or a == pytest.approx(b, rel=1e-5) for a, b in times)
    (tmp_path / "text.npz").write_text("nothing")
    with pytest.raises(Error, match="no recording"):
        Recording.load(tmp_path / "text.npz")
    with pytest.raises(Error, match="cannot be read"):
        Recording.load(tmp_path / "missing.npz")


@pytest.mark.parametrize(
    "given",
    [
        *({"shape": {"n": 1}}, {"launches": 10}, {"profile": True}, {"kernel": "a.cu"}, {"device": 1}),
        *({"compiler": "nvcc"}, {"options": ["-O1"]}, {"limits": Limits()}),
    ],
)
def test_a_replay_refuses_what_it_would_pass_over(tmp_path: Path, given: dict[str, Any]) -> None:
    SMALL.save(tmp_path / "small.npz")
    with pytest.raises(ConfigError, match="a replay takes no"):
        tune(replay=tmp_path / "small.npz", settings=Settings(evaluations=2, warm=False), **given)


def test_a_replay_counts_the_time_that_it_took(tmp_path: Path) -> None:
    replay = Replay(SMALL)
    index = SMALL.best()[0]
    recorded = SMALL.measurements[index]
    list(replay.measure([Request(index, 7)]))
    whole = replay.clock_s
    assert whole == pytest.approx(recorded.compile_s + recorded.run_s, rel=0.1)
    list(replay.measure([Request(index, 7, check=False)]))
    assert replay.clock_s - whole < 0.01 and replay.evaluations == 1


def test_outliers_do_not_move_a_time() -> None:
    assert robust([10.0, 10.1, 9.9, 10.0, 55.0, 80.0, 10.05]) == pytest.approx(10.0, abs=0.06)
    assert robust([3.0]) == 3.0 and robust([2.0, 2.0, 2.0, 9.0]) == 2.0
