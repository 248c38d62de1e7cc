"""Regions over an engine that writes down what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import inspect
import itertools
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cudasched
import pytest
from cudasched import _region, hook
from hypothesis import given
from hypothesis import strategies as st
from program import Stage
from support import PATIENCE_S, Run


class Engine:
    """What `_core` is to regions: per thread, which are open, innermost last."""

    def __init__(self) -> None:
        self.open: dict[int, list[tuple[int, str]]] = {}
        self.entered: list[tuple[str, int, float]] = []
        self.deadlines: list[int] = []
        self.moving: set[int] = set()
        self.streams: dict[int, str] = {}
        self.process: tuple[str, int, float] | None = None
        self.expected: list[float] = []
        self.attached = True
        self._tokens = itertools.count(1)

    def current(self) -> str | None:
        regions = self.open.get(threading.get_ident(), [])
        return regions[-1][1] if regions else None

    def region_enter(self, name: str, priority: int, slo_ms: float, counted_as: str = "") -> int:
        token = next(self._tokens)
        self.open.setdefault(threading.get_ident(), []).append((token, name))
        self.entered.append((name, priority, slo_ms))
        return token

    def region_enter_until(self, name: str, priority: int, deadline_ns: int) -> int:
        self.deadlines.append(deadline_ns)
        return self.region_enter(name, priority, 0)

    def region_exit(self, token: int) -> None:
        regions = self.open[threading.get_ident()]
        regions.remove(next(entry for entry in regions if entry[0] == token))

    def region_may_move(self, token: int) -> None:
        self.moving.add(token)

    def region_end_elsewhere(self, token: int) -> None:
        self.moving.remove(token)
        for regions in self.open.values():
            regions[:] = [entry for entry in regions if entry[0] != token]

    def bind_stream(self, stream: int, name: str) -> None:
        self.streams[stream] = name

    def unbind_stream(self, stream: int) -> None:
        self.streams.pop(stream, None)

    def set_process_class(self, name: str, priority: int, slo_ms: float) -> None:
        self.process = (name, priority, slo_ms)

    def expect(self, within_ms: float) -> None:
        self.expected.append(within_ms)

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(attached=self.attached)

    def nothing_open(self) -> bool:
        return not any(self.open.values())


ORDERED = """
import cudasched
from cudasched import hook
from logged import Log
from program import Gpu

gpu = Gpu()
log, core = Log(gpu), hook.engine()
stream, first, second, blocking = gpu.stream(), gpu.stream(), gpu.stream(), gpu.stream(0)
nothing = 0  # the driver refuses to record it
gpu.synchronize()
assert all(core.is_idle(each) for each in (stream, first, 0, 1))
core.order(stream, (first, nothing, second, nothing, 0, nothing), False)
for yields in (False, True):
    log.note(1, stream=first, us=10_000)
    log.note(2, stream=blocking, us=10_000)
    assert not core.is_idle(first) and core.is_idle(second) and not core.is_idle(0)
    core.order(stream, (first, core.new_event(), second, nothing, 0, core.new_event()), yields)
    log.note(3, stream=stream)
    assert sorted(log.read()[-3:-1]) == [1, 2] and log.read()[-1] == 3, log.read()
log.note(4, stream=0, us=10_000)
try:
    core.order(stream, (first, nothing, 0, nothing), False)
except cudasched.DriverError as error:
    print(error)
"""


def test_the_engine_puts_a_stream_behind_those_that_are_busy(python: Run, simulated: Path) -> None:
    ended = python(ORDERED)
    assert (ended.returncode, ended.stderr) == (0, "") and "cuEventRecord" in ended.stdout, ended


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(hook, "_core", engine)
    monkeypatch.setattr(hook, "_installed", True)
    monkeypatch.setattr(_region, "_warned", False)
    return engine


def test_with_opens_and_closes(engine: Engine) -> None:
    with cudasched.region("latency", slo_ms=5, priority=3):
        assert engine.current() == "latency"
    assert engine.entered == [("latency", 3, 5.0)]
    assert engine.nothing_open()


def test_default_is_latency_without_target(engine: Engine) -> None:
    with cudasched.region():
        pass
    assert engine.entered == [("latency", 0, 0.0)]


def test_hyphen_is_accepted(engine: Engine) -> None:
    with cudasched.region("best-effort"):
        assert engine.current() == "best_effort"


def test_nests_and_reenters(engine: Engine) -> None:
    outer, inner = cudasched.region("latency"), cudasched.region("best_effort")
    with outer:
        with inner, outer, outer:
            assert engine.current() == "latency"
        assert engine.current() == "latency"
        with inner:
            assert engine.current() == "best_effort"
    assert engine.nothing_open()


def test_closes_when_the_body_raises(engine: Engine) -> None:
    with pytest.raises(KeyError), cudasched.region():
        raise KeyError
    assert engine.nothing_open()


def test_decorates_functions(engine: Engine) -> None:
    @cudasched.region("best_effort")
    def step(x: int) -> str:
        """Doc."""
        return f"{engine.current()} {x}"

    assert step(3) == "best_effort 3"
    assert (step.__name__, step.__doc__) == ("step", "Doc.")
    assert engine.nothing_open()


def test_decorated_recursion(engine: Engine) -> None:
    @cudasched.region("latency")
    def depth(n: int) -> int:
        return 1 + depth(n - 1) if n else len(engine.open[threading.get_ident()])

    assert depth(4) == 9
    assert engine.nothing_open()


def test_one_object_in_many_threads(engine: Engine) -> None:
    shared = cudasched.region("best_effort")
    inside, seen = threading.Barrier(4), []

    def work() -> None:
        with shared:
            inside.wait(timeout=60)
            seen.append(engine.current())
            inside.wait(timeout=60)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["best_effort"] * 4
    assert engine.nothing_open()


def test_leaving_on_another_thread_is_refused_and_harmless(engine: Engine) -> None:
    region = cudasched.region()
    raised: list[BaseException] = []

    def leave() -> None:
        try:
            region.__exit__(None, None, None)
        except cudasched.Error as error:
            raised.append(error)

    with region:
        thread = threading.Thread(target=leave, name="other")
        thread.start()
        thread.join()
        assert engine.current() == "latency"
    assert engine.nothing_open()
    assert "thread (other)" in str(raised[0])


def test_leaving_twice_is_refused(engine: Engine) -> None:
    region = cudasched.region()
    with region:
        pass
    with pytest.raises(cudasched.Error, match="was left already"):
        region.__exit__(None, None, None)


def test_tasks_of_one_loop_stay_out_of_each_others_regions(engine: Engine) -> None:
    seen: list[tuple[str, str | None]] = []

    async def work(name: str) -> str:
        for _ in range(3):
            seen.append((name, engine.current()))
            await asyncio.sleep(0)
        return name

    async def outside() -> None:
        for _ in range(6):
            seen.append(("outside", engine.current()))
            await asyncio.sleep(0)

    latency, best_effort = cudasched.region("latency", slo_ms=1e3)(work), cudasched.region("best_effort")(work)
    assert inspect.iscoroutinefunction(latency)

    async def main() -> list[str | None]:
        return await asyncio.gather(latency("latency"), best_effort("best_effort"), outside())

    assert asyncio.run(main()) == ["latency", "best_effort", None]
    assert len(seen) == 12
    assert all(current == (None if name == "outside" else name) for name, current in seen)
    assert engine.nothing_open()


# ---- `with` blocks that give way -------------------------------------------------------------------------------------


async def _held(seconds: float, error: BaseException | None = None) -> None:
    with cudasched.region("latency"):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error


def test_a_block_held_across_an_await_raises_where_nothing_else_does(engine: Engine) -> None:
    with pytest.raises(cudasched.Error, match="held across an await"):
        asyncio.run(_held(0.001))
    assert engine.nothing_open()


@pytest.mark.parametrize("ends", ["cancelled", "late", "raises"])
def test_an_exception_that_ends_a_held_block_goes_on(engine: Engine, ends: str) -> None:
    async def main() -> None:
        if ends == "late":
            await asyncio.wait_for(_held(10), 0.01)
        task = asyncio.create_task(_held(0 if ends == "raises" else 10, KeyError("own")))
        await asyncio.sleep(0.01)
        if ends == "cancelled":
            task.cancel()
        await task

    wanted = {"cancelled": asyncio.CancelledError, "late": asyncio.TimeoutError, "raises": KeyError}[ends]
    with pytest.warns(cudasched.HookWarning, match="held across an await"), pytest.raises(wanted):
        asyncio.run(main())
    assert engine.nothing_open()


def test_greenlets_of_one_thread_have_regions_of_their_own(engine: Engine) -> None:
    greenlet = pytest.importorskip("greenlet")
    with ThreadPoolExecutor(1) as thread:  # whose greenlets nobody traces yet
        thread.submit(greenlets_have_regions, engine, greenlet).result(PATIENCE_S)


def greenlets_have_regions(engine: Engine, greenlet: Any) -> None:
    seen: list[tuple[str, str | None]] = []
    main = greenlet.getcurrent()
    traced: list[str] = []
    before = greenlet.settrace(lambda event, arguments: traced.append(event))

    def work(name: str) -> None:
        with cudasched.region(name, slo_ms=5 if name == "latency" else None):
            for _ in range(3):
                seen.append((name, engine.current()))
                main.switch()

    try:
        workers = [greenlet.greenlet(work) for _ in range(2)]
        for worker, name in zip(workers, ("latency", "best_effort"), strict=True):
            worker.switch(name)
        while not all(worker.dead for worker in workers):
            seen.append(("main", engine.current()))
            for worker in workers:
                if not worker.dead:
                    worker.switch()
    finally:
        greenlet.settrace(before)
    assert all(current == (None if name == "main" else name) for name, current in seen) and len(seen) >= 9
    assert len(set(engine.deadlines) - {0}) == 1  # of all steps of the request
    assert len(traced) > 6  # a trace function that was there before is called
    assert engine.nothing_open()


def test_tasks_of_trio_have_regions_of_their_own(engine: Engine) -> None:
    trio = pytest.importorskip("trio")
    seen: list[tuple[str, str | None]] = []

    async def work(name: str) -> None:
        with cudasched.region(name):
            for _ in range(4):
                seen.append((name, engine.current()))
                await trio.lowlevel.checkpoint()

    async def outside() -> None:
        for _ in range(6):
            seen.append(("outside", engine.current()))
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, "latency")
            nursery.start_soon(work, "best_effort")
            nursery.start_soon(outside)

    for _ in range(2):
        trio.run(main)
    assert len(seen) == 28
    assert all(current == (None if name == "outside" else name) for name, current in seen)
    assert engine.nothing_open()


def test_a_generator_that_threads_advance_leaves_none_in_its_region(engine: Engine) -> None:
    def items() -> Iterator[int]:
        with cudasched.region("latency"):
            yield from range(2)

    first, second, generator = ThreadPoolExecutor(1), ThreadPoolExecutor(1), items()
    assert first.submit(next, generator).result() == 0
    assert first.submit(engine.current).result() == "latency"
    assert second.submit(next, generator).result() == 1
    with pytest.raises(cudasched.Error, match="several threads advance"):
        second.submit(next, generator).result()
    assert first.submit(engine.current).result() is None
    assert engine.nothing_open() and not _region._moving


def test_a_generator_on_one_thread_may_hold_its_region(engine: Engine) -> None:
    def items() -> Iterator[int]:
        with cudasched.region("latency"):
            yield 1

    assert list(items()) == [1]
    assert engine.nothing_open() and not _region._moving


def test_a_signal_handlers_exception_leaves_no_region_open(simulated: Path) -> None:
    """Wherever it comes: in the entry, in the body or in the end of a `with` block or of a decorated function."""
    program = Path(__file__).parents[1] / "soak" / "interrupted_regions.py"
    done = subprocess.run([sys.executable, program, "2000"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2000 0\n", "")


def test_the_limit_of_recursion_leaves_no_region_open(simulated: Path, python: Run) -> None:
    """Wherever it is reached: the end of a region needs frames of its own."""
    code = (
        "import sys, cudasched, launcher; from cudasched import _region\n"
        "gpu = launcher.Gpu(); reached = 0; sys.setrecursionlimit(150)\n"
        "def deep(n):\n"
        "  if n: return deep(n - 1)\n"
        "  with cudasched.region('latency'): pass\n"
        "for n in range(100, 150):\n"
        "  try: deep(n)\n"
        "  except RecursionError: reached += 1\n"
        "  gpu.launch(1)\n"
        "  if _region._thread.regions: print('open at', n)\n"
        "gpu.synchronize(); print(reached > 0, cudasched.state().latency_launches)"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 0\n", "")


def test_a_sub_interpreter_is_told_that_nothing_is_managed_there(python: Run, simulated: Path) -> None:
    """pybind11's modules hang in one."""
    if importlib.util.find_spec("_xxsubinterpreters") is None:
        pytest.skip("this Python has no _xxsubinterpreters")
    done = python(
        "import _xxsubinterpreters as interpreters\n"
        "try: interpreters.run_string(interpreters.create(), 'import cudasched\\nwith cudasched.region(): pass')\n"
        "except interpreters.RunFailedError as error: print(error)\n"
        "print('came back')"
    )
    assert (done.returncode, done.stdout) == (0, "came back\n")
    assert "this is a sub-interpreter; cudasched has no effect in this interpreter" in done.stderr


# ---- what is decorated -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [None, 3, int, "text"])
def test_what_is_no_function_is_not_decorated(engine: Engine, odd: Any) -> None:
    with pytest.raises(cudasched.ConfigError, match="cannot decorate"):
        cudasched.region("latency")(odd)


def test_static_and_class_methods_are_decorated_from_outside(engine: Engine) -> None:
    class Model:
        @cudasched.region("latency")
        @staticmethod
        def alone() -> str | None:
            return engine.current()

        @cudasched.region("latency")
        @classmethod
        def of_class(cls) -> tuple[type, str | None]:
            return cls, engine.current()

    for model in (Model, Model()):
        assert (model.alone(), model.of_class()) == ("latency", (Model, "latency"))
    assert engine.nothing_open()


def test_a_decorator_without_its_parentheses_is_named() -> None:
    with pytest.raises(cudasched.ConfigError, match=r'decorate it with @cudasched.region\("latency"\)'):
        cudasched.region(len)  # type: ignore[arg-type]


def test_what_a_plain_function_returns_goes_on_in_its_region(engine: Engine) -> None:
    async def work() -> str | None:
        await asyncio.sleep(0)
        return engine.current()

    def items() -> Iterator[str | None]:
        yield engine.current()

    decorate = cudasched.region("latency")
    assert asyncio.run(decorate(lambda: work())()) == "latency"
    assert list(decorate(lambda: items())()) == ["latency"]
    assert engine.nothing_open()


def test_a_long_switch_interval_is_said_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def beside_training() -> None:
        monkeypatch.setattr(_region, "_best_effort_thread", 0)
        with cudasched.region("best_effort"), cudasched.region("latency"):
            pass  # one thread does not wait for itself
        assert not caplog.records
        for _ in range(2):
            thread = threading.Thread(target=cudasched.region("latency")(lambda: None))
            thread.start()
            thread.join()

    interval_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-4)
        beside_training()
        assert not caplog.records
        sys.setswitchinterval(5e-3)
        beside_training()
    finally:
        sys.setswitchinterval(interval_s)
    assert [record.getMessage().count("hold Python's interpreter for 5 ms") for record in caplog.records] == [1]


def test_the_target_of_a_coroutine_counts_from_its_first_step(engine: Engine) -> None:
    @cudasched.region("latency", slo_ms=1000)
    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0.001)

    @cudasched.region("latency", slo_ms=1000)
    async def items():  # type: ignore[no-untyped-def]
        for i in range(3):
            await asyncio.sleep(0.001)
            yield i

    async def collect() -> list[int]:
        return [i async for i in items()]

    for request in (work, collect):
        engine.deadlines.clear()
        before_ns = time.monotonic_ns()
        asyncio.run(request())
        assert len(engine.deadlines) >= 4
        assert set(engine.deadlines) == {engine.deadlines[0]}
        assert before_ns <= engine.deadlines[0] - 10**9 <= time.monotonic_ns()


def test_a_coroutine_without_a_target_has_no_deadline(engine: Engine) -> None:
    @cudasched.region("latency")
    async def work() -> None:
        await asyncio.sleep(0)

    asyncio.run(work())
    assert set(engine.deadlines) == {0}


def test_exceptions_pass_through_a_coroutine(engine: Engine) -> None:
    @cudasched.region()
    async def work() -> str | None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return engine.current()
        return "not cancelled"

    async def main() -> str | None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) == "latency"
    assert engine.nothing_open()


def test_a_generators_consumer_is_not_in_its_region(engine: Engine) -> None:
    @cudasched.region("best_effort")
    def batches(n: int):  # type: ignore[no-untyped-def]
        for i in range(n):
            assert engine.current() == "best_effort"
            got = yield i
            assert got is None or got == "sent"
        return "end"

    stream = batches(3)
    assert inspect.isgeneratorfunction(batches)
    assert next(stream) == 0 and engine.current() is None
    assert stream.send("sent") == 1 and engine.current() is None
    assert next(stream) == 2
    with pytest.raises(StopIteration) as stop:
        next(stream)
    assert stop.value.value == "end"
    assert engine.nothing_open()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_that_is_thrown_in_and_out_keeps_no_tensor(engine: Engine, is_async: bool) -> None:
    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def items() -> Iterator[int]:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        yield 1

    async def async_items() -> AsyncIterator[int]:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        yield 1

    async def consume() -> None:
        stream = cudasched.region("latency")(async_items)()
        await anext(stream)
        with contextlib.suppress(KeyError):
            await stream.athrow(KeyError())  # type: ignore[attr-defined]

    gc.disable()
    try:
        if is_async:
            asyncio.run(consume())
        else:
            stream = cudasched.region("latency")(items)()
            next(stream)
            with contextlib.suppress(KeyError):
                stream.throw(KeyError())  # type: ignore[attr-defined]
            del stream
        assert kept[0]() is None
    finally:
        gc.enable()


def test_generators_can_be_thrown_into_and_closed(engine: Engine) -> None:
    seen: list[str | None] = []

    @cudasched.region("best_effort")
    def batches():  # type: ignore[no-untyped-def]
        try:
            while True:
                try:
                    yield 1
                except KeyError:
                    seen.append(engine.current())
        finally:
            seen.append(engine.current())

    stream = batches()
    next(stream)
    assert stream.throw(KeyError()) == 1
    stream.close()
    assert seen == ["best_effort", "best_effort"]
    assert engine.nothing_open()


def test_asynchronous_generators(engine: Engine) -> None:
    seen: list[str | None] = []

    @cudasched.region("best_effort")
    async def batches(n: int):  # type: ignore[no-untyped-def]
        try:
            for i in range(n):
                seen.append(engine.current())
                await asyncio.sleep(0)
                yield i
        finally:
            seen.append(engine.current())

    async def main() -> None:
        assert [i async for i in batches(3)] == [0, 1, 2]
        part = batches(3)
        async for _ in part:
            assert engine.current() is None
            break
        await part.aclose()

    asyncio.run(main())
    assert seen == ["best_effort"] * 6
    assert engine.nothing_open()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_class": "latancy"}, "normal, latency, best_effort; did you mean 'latency'"),
        ({"client_class": None}, "unknown class"),
        ({"slo_ms": 0}, "slo_ms = 0"),
        ({"slo_ms": -5}, "slo_ms = -5"),
        ({"slo_ms": float("nan")}, "slo_ms = nan"),
        ({"slo_ms": float("inf")}, "slo_ms = inf"),
        ({"slo_ms": "5"}, "slo_ms = '5'"),
        ({"slo_ms": True}, "slo_ms = True"),
        ({"priority": 1.5}, "priority = 1.5"),
        ({"priority": True}, "priority = True"),
        ({"priority": 9}, "priority = 9: must be an integer from -8 to 8"),
    ],
)
def test_arguments_without_meaning_are_refused(engine: Engine, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(cudasched.ConfigError, match=message):
        cudasched.region(**arguments)  # type: ignore[arg-type]
    assert engine.entered == []


@pytest.mark.parametrize("within_ms", [0.001, 0.5, 3, Fraction(1, 2), 1000])
def test_a_hint_reaches_the_engine(engine: Engine, within_ms: float) -> None:
    cudasched.expect(within_ms=within_ms)
    assert engine.expected == [float(within_ms)]


@pytest.mark.parametrize("within_ms", [0, -1, 1000.1, float("nan"), float("inf"), True, "1", None])
def test_a_hint_without_meaning_is_refused(engine: Engine, within_ms: float) -> None:
    with pytest.raises(cudasched.ConfigError, match=r"within_ms = .*over 0 and at most 1000"):
        cudasched.expect(within_ms=within_ms)
    assert engine.expected == []


def test_an_engines_failure_is_warned_of_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise cudasched.ArbiterError("the table is full")

    monkeypatch.setattr(engine, "region_enter", fail)
    with pytest.warns(cudasched.HookWarning, match="the table is full"), cudasched.region():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cudasched.region():
            pass


def test_without_the_hook_nothing_reaches_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_installed", False)
    with cudasched.region(), cudasched.region("best_effort"):
        pass
    cudasched.bind_stream(7, "latency")
    cudasched.unbind_stream(7)
    cudasched.set_class("latency")
    cudasched.expect(within_ms=1)
    assert engine.expected == [] and engine.entered == [] and engine.streams == {} and engine.process is None


def test_the_hook_may_come_while_a_region_is_open(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_installed", False)
    with cudasched.region():
        monkeypatch.setattr(hook, "_installed", True)
    assert engine.nothing_open()


@pytest.mark.parametrize(
    "stream", [1234, SimpleNamespace(cuda_stream=1234), SimpleNamespace(ptr=1234)], ids=["int", "torch", "cupy"]
)
def test_streams_of_all_kinds(engine: Engine, stream: object) -> None:
    cudasched.bind_stream(stream, "best-effort")
    assert engine.streams == {1234: "best_effort"}
    cudasched.unbind_stream(stream)
    assert engine.streams == {}


@pytest.mark.parametrize("stream", [0, -1, 2**64, True, "7", None, SimpleNamespace(cuda_stream=0)])
def test_what_is_no_stream_is_refused(engine: Engine, stream: object) -> None:
    with pytest.raises(cudasched.ConfigError, match="stream = "):
        cudasched.bind_stream(stream, "latency")
    assert engine.streams == {}


def test_set_class(engine: Engine) -> None:
    cudasched.set_class("best-effort", priority=2, slo_ms=7)
    assert engine.process == ("best_effort", 2, 7.0)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["latency", "normal", "best_effort"])), max_size=30))
def test_any_nesting_leaves_nothing_open(steps: list[tuple[bool, str]]) -> None:
    engine = Engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "_core", engine)
        patch.setattr(hook, "_installed", True)
        regions = {name: cudasched.region(name) for name in ("latency", "normal", "best_effort")}
        expected: list[str] = []
        for enter, name in steps:
            if enter:
                regions[name].__enter__()
                expected.append(name)
            elif expected:
                regions[expected.pop()].__exit__(None, None, None)
            assert engine.current() == (expected[-1] if expected else None)
        while expected:
            regions[expected.pop()].__exit__(None, None, None)
    assert engine.nothing_open()


PRIORITIES = """
import ctypes
gpu = Gpu()
def launch_on(priority):
    stream = ctypes.c_void_p()
    gpu.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, priority)
    gpu.launch(stream=stream.value)
    gpu.synchronize()
for priority in (0, -1, -5):
    launch_on(priority)
with cudasched.region("best_effort"):
    launch_on(-5)
"""


@pytest.mark.parametrize(("setting", "launches"), [("on", (4, 1, 2)), ("off", (4, 0, 1))], ids=["on", "off"])
def test_a_stream_has_the_class_of_its_priority_where_that_is_asked_for(
    stage: Stage, setting: str, launches: tuple[int, int, int]
) -> None:
    program = stage.importing(CUDASCHED_CLASS_BY_STREAM_PRIORITY=setting)
    program.call(PRIORITIES)
    assert tuple(map(program.count, ("launches", "latency_launches", "best_effort_launches"))) == launches
