"""Quiet timing: when others pause, which samples are kept, and how tuners are served."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cudasched import hook, tune
from cudasched.errors import ConfigError, Error
from cudasched.tune.quiet import Pauses, Quiet

quiet_module: Any = sys.modules["cudasched.tune.quiet"]


class Engine:
    """Answers of the engine, in order; the last one stays."""

    def __init__(self, *found: tuple[int, int, int, bool]) -> None:
        self.found = list(found) or [(0, 0, 0, False)]
        self.asked: list[float] = []

    def measure(self, pause_ms: float) -> tuple[int, int, int, bool]:
        self.asked.append(pause_ms)
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 100.0, [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pauses(monkeypatch: pytest.MonkeyPatch, engine: Engine | None) -> Pauses:
    monkeypatch.setattr(hook, "engine", lambda: engine)
    return Pauses()


# ---- pauses


def test_a_pause_is_announced_waited_for_and_ended(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    free = (0, 0, 0, False)
    engine = Engine(free, (10_000_000, 0, 0, False), (0, 3_000_000, 0, False), (0, 200_000, 0, False), free)
    made = pauses(monkeypatch, engine)
    with made.pause():
        assert engine.asked == [0.0, 50.0, 50.0, -1.0, -1.0]
        # 50 ms for others to see it, 10 until a pause may begin, then until their work has ended.
        assert sum(clock.slept) == pytest.approx(0.05 + 0.01 + 0.0005 + 0.0002)
        assert made.left_s() == pytest.approx(0.05 - 0.0007)
    assert engine.asked[-1] == 0.0 and made.left_s() < 0
    clock.now += 0.4  # others still keep little in flight
    with made.pause():
        assert engine.asked[6:] == [50.0]
    clock.now += 0.6
    with made.pause():
        assert engine.asked[8:] == [0.0, 50.0]


def test_others_that_do_not_end_are_waited_for_in_five_pauses(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    engine = Engine((0, 10**9, 0, False))
    made = pauses(monkeypatch, engine)
    with made.pause():
        assert sum(clock.slept) == pytest.approx(0.3, abs=0.005) and engine.asked.count(50.0) == 5
        assert made.left_s() <= 0 and not made.is_quiet()


def test_it_is_quiet_while_the_pause_lasts_and_no_other_is_busy(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    engine = Engine()
    made = pauses(monkeypatch, engine)
    assert not made.is_quiet()
    with made.pause():
        assert made.is_quiet()
        engine.found = [(0, 1, 0, False)]
        assert not made.is_quiet()
        engine.found = [(0, 0, 0, False)]
        clock.now += 0.051
        assert not made.is_quiet()


def test_without_the_hook_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    made = pauses(monkeypatch, None)
    with made.pause():
        assert made.left_s() > 0 and made.latency() == (False, 0)
    assert sum(clock.slept) == 0


def test_a_program_that_cannot_be_a_client_is_timed_without_pauses(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    class Full:
        def measure(self, pause_ms: float) -> tuple[int, int, int, bool]:
            raise Error("64 clients live")

    made = pauses(monkeypatch, Full())  # type: ignore[arg-type]
    with made.pause():
        assert made.left_s() > 0 and made.latency() == (False, 0)


# ---- samples


class Latency:
    """Three groups of samples a pause; requests come, and other work goes on, as the test says."""

    def __init__(self) -> None:
        self.requests = self.pauses = self.left = 0
        self.quiet = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.pauses, self.left = self.pauses + 1, 3
        yield

    def latency(self) -> tuple[bool, int]:
        return False, self.requests

    def met_latency(self, before: tuple[bool, int]) -> bool:
        return before != (False, self.requests)

    def left_s(self) -> float:
        self.left -= 1
        return float(self.left > 0)

    def is_quiet(self) -> bool:
        return self.quiet


def made_of(meets: list[bool]) -> tuple[Quiet, Any]:
    quiet, latency = Quiet(), Latency()
    quiet._pauses = latency  # type: ignore[assignment]
    turns = itertools.count(1)

    def timed(samples: int) -> list[float]:
        turn = next(turns)
        met = meets[min(turn, len(meets)) - 1]
        latency.requests += met
        return [100.0 + turn if met else float(turn)] * samples

    return quiet, (latency, timed)


def test_samples_that_met_a_request_are_taken_again() -> None:
    quiet, (latency, timed) = made_of([False, True, False, True, True, False, False])
    assert quiet._kept(timed, wanted=7, group=2, each_s=0.001) == [1, 1, 3, 3, 6, 6, 7]
    assert quiet.discarded == 6 and latency.pauses == 3


@pytest.mark.parametrize("by", ["requests", "others"])
def test_where_all_meet_other_work_the_last_are_taken_with_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, by: str
) -> None:
    quiet, (latency, timed) = made_of([by == "requests"])
    latency.quiet = by == "requests"

    def left_s() -> float:
        clock.now += 0.1
        return 0.0

    latency.left_s = left_s
    with pytest.warns(RuntimeWarning, match="for 10 s each sample met work of another program"):
        assert len(quiet._kept(timed, wanted=5, group=1, each_s=0.001)) == 1
    assert quiet.discarded == latency.pauses == 101
    quiet._kept(timed, wanted=5, group=1, each_s=0.001)  # without another warning, which would fail here


def test_a_sample_longer_than_a_pause_is_taken_all_the_same() -> None:
    quiet, (latency, timed) = made_of([False])
    latency.quiet = False
    latency.left_s = lambda: -1.0
    assert quiet._kept(timed, wanted=3, group=1, each_s=10.0) == [1, 2, 3] and latency.pauses == 3


# ---- do_bench


class Gpu:
    """PyTorch's part: each call takes as long as the last launch said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_ms, self.fills, self.launched_ms = 0.0, 0, 0.0
        module: Any = ModuleType("torch")
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_ms = gpu.clock_ms

            def elapsed_time(self, other: Event) -> float:
                return other.at_ms - self.at_ms

        def fill() -> None:
            self.fills += 1
            self.clock_ms += 1.0

        module.int = "int"
        module.empty = lambda count, dtype, device: SimpleNamespace(zero_=fill)
        module.cuda = SimpleNamespace(
            Event=Event,
            synchronize=lambda: time.sleep(1e-4),
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=50 << 20),
        )
        monkeypatch.setitem(sys.modules, "torch", module)

    def launch(self, ms: float) -> None:
        self.clock_ms += ms


def test_do_bench_gives_what_tritons_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "engine", lambda: None)
    gpu, quiet = Gpu(monkeypatch), Quiet()
    parameter = SimpleNamespace(grad=1)
    assert quiet.do_bench(lambda: gpu.launch(2.0), grad_to_none=[parameter]) == pytest.approx(2.0)
    assert parameter.grad is None and gpu.fills > 10
    times = iter(range(10**9))

    def launch() -> None:
        gpu.launch(1.0 + next(times) % 2)

    for mode, value in (("min", 1.0), ("max", 2.0)):
        assert quiet.do_bench(launch, rep=50, return_mode=mode) == pytest.approx(value)
    every: Any = quiet.do_bench(launch, rep=50, return_mode="all")
    assert {round(each) for each in every} == {1, 2}
    assert quiet.do_bench(launch, rep=50, quantiles=[0.0]) == pytest.approx(1.0)
    assert quiet.do_bench(launch, rep=50, quantiles=(0.0, 1.0)) == pytest.approx([1.0, 2.0])
    with pytest.raises(ConfigError, match="return_mode = 'mode': one of min, max, mean, median, all"):
        quiet.do_bench(launch, return_mode="mode")


@pytest.mark.parametrize(("part", "value"), [(0.0, 1.0), (0.5, 2.5), (0.2, 1.6), (1.0, 4.0)])
def test_quantiles_are_between_neighbours(part: float, value: float) -> None:
    assert quiet_module._quantile([4.0, 1.0, 3.0, 2.0], part) == pytest.approx(value)


# ---- other people's tuners


def test_kernel_tuner_keeps_the_iterations_that_met_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernel_tuner")
    from kernel_tuner.observers import BenchmarkObserver

    # Announced, a pause, before, after and the end, for each of three iterations; the second meets a request.
    look = [(0, 0, since, False) for since in (0, 0, 5)]
    free = (0, 0, 0, False)
    engine = Engine(free, free, look[0], look[1], free, free, look[1], look[2], free, free, look[2], look[2], free)
    monkeypatch.setattr(hook, "engine", lambda: engine)
    quiet = Quiet()
    observer = quiet.observer()
    assert isinstance(observer, BenchmarkObserver)
    timer = SimpleNamespace(times=[])
    observer.register_device(SimpleNamespace(observers=[observer, timer]))
    for number in range(3):
        observer.before_start()
        observer.after_start()
        observer.during()
        observer.after_finish()
        timer.times.append(float(number))
    assert observer.get_results() == {"times_met_latency": 1} and timer.times == [0.0, 2.0] and quiet.discarded == 1
    assert observer.get_results() == {"times_met_latency": 0}


def test_torch_compile_times_in_pauses_of_the_outermost_block_and_without_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from torch._inductor.runtime.benchmarking import benchmarker

    given: list[tuple[Any, dict[str, Any]]] = []

    def timer(self: Any, fn: Any, **options: Any) -> float:
        given.append((fn, options))
        return float(len(given))

    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", timer)
    # Announced; twice a pause with a request in it, and one without; then a pause each.
    since = iter([0, 1, 1, 2, *[2] * 100])
    monkeypatch.setattr(Pauses, "latency", lambda self: (False, next(since)))
    with tune.quiet() as quiet:
        assert benchmarker.benchmark_gpu(1, is_vetted_benchmarking=True) == 3 and quiet.discarded == 2
        with tune.quiet():
            assert benchmarker.benchmark_gpu(2, rep=100, warmup=7, return_mode="all") == 4
        assert benchmarker.benchmark_gpu(3) == 5 and "benchmark_gpu" in vars(benchmarker)
    assert benchmarker.benchmark_gpu(4, rep=100) == 6 and "benchmark_gpu" not in vars(benchmarker)
    assert given[2:] == [
        (1, {"is_vetted_benchmarking": True}),
        (2, {"rep": 25, "warmup": 7, "return_mode": "all"}),
        (3, {}),
        (4, {"rep": 100}),
    ]


def test_the_decorator_for_triton_searches_by_the_timer_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    library: Any = ModuleType("triton")
    library.Config = lambda values, **_: SimpleNamespace(all_kwargs=lambda: values)
    library.CompilationError = type("CompilationError", (Exception,), {})
    library.runtime = SimpleNamespace(errors=SimpleNamespace(OutOfResources=type("Out", (Exception,), {})))
    library.autotune = lambda **given: lambda function: SimpleNamespace(**given)
    monkeypatch.setitem(sys.modules, "triton", library)
    timed = []

    def do_bench(call: Any, **_: Any) -> float:
        call()
        timed.append(call)
        return float(len(timed))

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: None

    made = tune.triton(space={"BLOCK": [1, 2, 4, 8, 16]}, key=["n"], do_bench=do_bench)(Kernel())
    assert made.do_bench is do_bench
    made.prune_configs_by["early_config_prune"](made.configs, {"n": 2}, grid="the grid")
    assert len(timed) == 5
