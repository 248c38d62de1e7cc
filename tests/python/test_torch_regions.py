"""Regions over a PyTorch that writes down what it is told, as its C layer is: the adapter, and what fails."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cudasched
import pytest
from cudasched import _region, hook
from cudasched.torch import _adapter, _check, _regions
from test_region import Engine as PlainEngine

HANDLES = {"normal": 0x100, "latency": 0x200, "best_effort": 0x300}


class Engine(PlainEngine):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said
        self.process_class = "normal"
        self.markers: list[int] = []
        self.ordered: list[tuple[int, int]] = []
        self.fails: set[str] = set()
        self.is_default_idle = False

    def new_event(self) -> int:
        if "new_event" in self.fails:
            raise cudasched.DriverError("cuEventCreate: CUDA_ERROR_INVALID_CONTEXT (201)")
        self.markers.append(0xE00 + len(self.markers))
        return self.markers[-1]

    def order(self, stream: int, ahead: tuple[int, ...], yields: bool) -> None:
        if "order" in self.fails:
            raise cudasched.DriverError("cuEventRecord: CUDA_ERROR_INVALID_CONTEXT (201)")
        for other, event in zip(ahead[::2], ahead[1::2], strict=True):
            assert event in self.markers
            self.ordered.append((stream, event))
            name = f"{other:#x}" if other else "default"
            self._said.append(f"{stream:#x} after {name}{' (yields)' if yields else ''}")

    def is_idle(self, stream: int) -> bool:
        if "is_idle" in self.fails:
            raise cudasched.HookError("no CUDA call was made yet")
        assert stream == 0
        return self.is_default_idle

    def region_enter(self, name: str, priority: int, slo_ms: float, counted_as: str = "") -> int:
        self._said.append(f"enter {name}")
        return super().region_enter(name, priority, slo_ms, counted_as)

    def region_exit(self, token: int) -> None:
        self._said.append("exit")
        super().region_exit(token)

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(attached=True, process_class=self.process_class)


class EventBase:
    """`torch._C._CudaEventBase`."""

    def record(self, stream: Stream) -> None:
        stream.said.append(f"record {stream.name}")
        self.stream = stream

    def wait(self, stream: Stream) -> None:
        stream.said.append(f"{stream.name} waits for {self.stream.name}")


class Event(EventBase):
    pass


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, said: list[str], handle: int, device: int = 0) -> None:
        self.said = said
        self.stream_id, self.device_index, self.device_type, self.cuda_stream = handle, device, 1, handle
        self.name = f"{handle:#x}" if handle else "default"

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Tensor:
    is_cuda = True

    def __init__(self) -> None:
        self.kept: list[str] = []

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Stream) -> None:
        self.kept.append(stream.name)


class Torch:
    """`torch`, `torch.cuda` and `torch._C` in one."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.available, self.capturing, self.bad_fork, self.devices = True, False, False, 0
        self._thread = threading.local()
        self.cuda = self._C = self
        self.version, self.__version__ = SimpleNamespace(cuda="13.0"), "2.11.0"
        self.Tensor, self.Event, self._CudaEventBase = Tensor, Event, EventBase
        self.initialised = False
        self.lazy: list[Any] | None = None

    def _lazy_call(self, call: Any) -> None:
        if self.lazy is None:
            call()
        else:
            self.lazy.append(call)

    def is_available(self) -> bool:
        return self.available

    def _is_in_bad_fork(self) -> bool:
        return self.bad_fork

    def init(self) -> None:
        self.initialised = True

    def device(self, *arguments: object) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def default_stream(self, device: int) -> Stream:
        return Stream(self.said, 0, device)

    def ExternalStream(self, handle: int, device: object) -> Stream:  # noqa: N802  as PyTorch calls it
        return Stream(self.said, handle)

    def Stream(self, *, stream_id: int, device_index: int, device_type: int) -> Stream:  # noqa: N802
        return Stream(self.said, stream_id, device_index)

    def _cuda_getDevice(self) -> int:  # noqa: N802
        return getattr(self._thread, "device", 0)

    def _cuda_setDevice(self, device: int) -> None:  # noqa: N802
        self._thread.device = device

    def _cuda_isCurrentStreamCapturing(self) -> bool:  # noqa: N802
        return self.capturing

    def _cuda_getCurrentStream(self, device: int) -> tuple[int, int, int]:  # noqa: N802
        return getattr(self._thread, "streams", {}).get(device, (0, device, 1))

    def _cuda_getDefaultStream(self, device: int) -> tuple[int, int, int]:  # noqa: N802
        return (0, device, 1)

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:  # noqa: N802
        self._thread.streams = {**getattr(self._thread, "streams", {}), device_index: (stream_id, device_index, 1)}
        self._thread.device = device_index
        self.said.append(f"on {Stream(self.said, stream_id).name}")

    def current(self) -> int:
        return self._cuda_getCurrentStream(self._cuda_getDevice())[0]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    torch = Torch()
    handles = iter(range(1, 1000))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(_adapter, "_streams", None)
    monkeypatch.setattr(_adapter, "_backend", None)
    monkeypatch.setattr(_adapter, "_said", False)
    monkeypatch.setattr(_regions, "_warned", False)
    monkeypatch.setattr(_adapter, "_new_stream", lambda *, latency: next(handles) + (0xF00 if latency else 0x100))
    yield torch


@pytest.fixture
def engine(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(torch.said)
    monkeypatch.setattr(hook, "_core", engine)
    monkeypatch.setattr(hook, "_installed", True)
    monkeypatch.setattr(_region, "_warned", False)
    return engine


def test_a_region_runs_on_a_stream_of_its_own_and_outside_is_another(engine: Engine, torch: Torch) -> None:
    assert torch.current() == 0
    with cudasched.region("latency"):
        inside = torch.current()
        assert inside > 0xF00 and torch.initialised
    outside = torch.current()
    assert outside not in (0, inside)
    with cudasched.region("latency"):
        assert torch.current() == inside
    assert torch.current() == outside
    assert engine.nothing_open()


def test_the_engine_knows_first_and_lets_go_last(engine: Engine, torch: Torch) -> None:
    with cudasched.region("latency"):
        pass
    torch.said.clear()
    with cudasched.region("latency"):
        torch.said.append("body")
    assert torch.said == [
        "enter latency",
        "0xf01 after 0x102",
        "0xf01 after default",
        "on 0xf01",
        "body",
        "0x102 after 0xf01",
        "on 0x102",
        "exit",
    ]


@pytest.mark.parametrize("fails", ["new_event", "order", "watched"])
def test_pytorchs_events_order_where_the_engine_cannot(
    fails: str, engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has no context yet gets one by them, and what checks the order of streams sees no others."""
    if fails == "watched":
        monkeypatch.setenv("CUDASCHED_CHECK_STREAMS", "1")
        monkeypatch.setattr(_regions, "_checking", False)
    engine.fails = {fails}
    with cudasched.region("latency"):
        pass
    torch.said.clear()
    with cudasched.region("latency"):
        torch.said.append("body")
    assert torch.said[1:5] == ["record 0x102", "0xf01 waits for 0x102", "record default", "0xf01 waits for default"]
    assert torch.said[-4:-2] == ["record 0xf01", "0x102 waits for 0xf01"]


def test_a_best_effort_thread_gives_the_lock_up_where_it_may_wait(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        pass
    assert torch.said[-3] == "0x102 after 0x101 (yields)"


def test_the_default_stream_of_another_device_is_pytorchs_to_find(engine: Engine, torch: Torch) -> None:
    with cudasched.region("latency", stream="inherit"):
        pass
    backend = _adapter._backend
    assert backend is not None
    torch._cuda_setDevice(1)
    ordering = backend.ordering(0, (0x77, 0, 1), ((0, 0, 1),), {})
    ordering.make(best_effort=False, here=False)
    assert torch.said[-2:] == ["record default", "0x77 waits for default"]
    torch._cuda_setDevice(0)
    ordering.make(best_effort=False, here=True)
    assert torch.said[-1] == "0x77 after default"


def test_events_of_a_thread_that_has_ended_go_on_with_its_streams(engine: Engine, torch: Torch) -> None:
    """Of one that is queued for other streams, a record would have to wait."""
    turns = [threading.Event() for _ in range(2)]
    used: list[set[int]] = []

    def work(client_class: str, until: threading.Event | None = None) -> None:
        before = len(engine.ordered)
        for _ in range(3):
            with cudasched.region(client_class):
                pass
        used.append({event for _, event in engine.ordered[before:]})
        if until is not None:
            until.wait()

    def ended(*arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        return thread

    first = ended("latency", turns[0])
    while len(used) < 1:
        threading.Event().wait(0.001)
    second = ended("best_effort", turns[1])
    while len(used) < 2:
        threading.Event().wait(0.001)
    for turn, thread in zip(turns, (first, second), strict=True):
        turn.set()
        thread.join()
    ended("latency").join()  # on the streams of the thread that ended first
    assert used[2] == used[0] and not used[0] & used[1]
    assert len(used[0]) == 3  # of the default stream, the thread's own, and its region's


def test_a_best_effort_region_looks_at_the_default_stream_first(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        pass
    torch.said.clear()
    with cudasched.region("best_effort"):
        pass
    assert torch.said[:2] == ["record default", "enter best_effort"]
    assert torch.said[-1] == "exit"
    assert "default waits" not in " ".join(torch.said)


def test_a_best_effort_region_makes_no_event_for_an_idle_default_stream(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        pass
    for idle, fails in ((True, set[str]()), (True, {"is_idle"}), (False, set[str]())):
        torch.said.clear()
        engine.is_default_idle, engine.fails = idle, fails
        with cudasched.region("best_effort"):
            pass
        looked = ["record default", "0x101 waits for default"] if fails or not idle else []
        assert [line for line in torch.said if "default" in line] == looked


@pytest.mark.parametrize("client_class", ["latency", "best_effort"])
def test_a_region_that_went_before_is_a_few_calls(
    client_class: str, engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests enter and leave one each: what they need for that is prepared once."""
    called: list[str] = []

    def counted(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def call(*arguments: Any) -> Any:
            called.append(name)
            return function(*arguments)

        monkeypatch.setattr(kind, name, call)

    for name in [name for name in vars(Torch) if name.startswith("_cuda_")]:
        counted(Torch, name)
    for name in ("region_enter", "region_exit", "order", "is_idle", "new_event", "bind_stream", "unbind_stream"):
        counted(Engine, name)
    engine.is_default_idle = True
    for other in ("latency", "best_effort", "normal", client_class):
        with cudasched.region(other):
            pass
    called.clear()
    with cudasched.region(client_class):
        entered = sorted(called)
        called.clear()
    streams = ["_cuda_getCurrentStream", "_cuda_getDevice", "_cuda_isCurrentStreamCapturing", "_cuda_setStream"]
    assert entered == [*streams, *(["is_idle"] if client_class == "best_effort" else []), "order", "region_enter"]
    assert sorted(called) == [*streams, "order", "region_exit"]


def test_streams_have_classes_in_the_engine(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        inside = torch.current()
        assert engine.streams == {inside: "best_effort"}
    assert engine.streams == {inside: "best_effort", torch.current(): "best_effort"}
    with cudasched.region("latency"):
        pass
    assert engine.streams == {inside: "best_effort"}


def test_outside_work_of_a_latency_program_keeps_its_class(engine: Engine, torch: Torch) -> None:
    engine.process_class = "latency"
    with cudasched.region("best_effort"):
        pass
    assert torch.current() not in engine.streams


def test_tensors_of_the_default_stream_are_kept(engine: Engine, torch: Torch) -> None:
    tensor = Tensor()
    with cudasched.region("latency"):
        pass
    assert set(tensor.kept) == {"0xf01", "0x102"}


def test_inherit_stays(engine: Engine, torch: Torch) -> None:
    with cudasched.region("latency", stream="inherit"):
        assert torch.current() == 0 and engine.current() == "latency"
    assert torch.current() == 0
    assert torch.said == ["enter latency", "exit"]


@pytest.mark.parametrize("stream", ["own", "inherit"])
def test_a_thread_is_checked_in_regions_of_any_stream(
    engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    watched: list[object] = []
    monkeypatch.setattr(_regions, "_checking", True)
    monkeypatch.setattr(_check, "watch", watched.append)
    with cudasched.region("latency", stream=stream):
        assert watched == [torch]


def test_a_stream_may_be_given(engine: Engine, torch: Torch) -> None:
    mine = Stream(torch.said, 0x77)
    with cudasched.region("best_effort", stream=mine):
        assert torch.current() == 0x77
    assert torch.current() not in (0, 0x77)


def test_a_stream_of_another_device_is_refused_and_nothing_is_entered(engine: Engine, torch: Torch) -> None:
    with (
        pytest.raises(cudasched.ConfigError, match="of cuda:1, and the current device is cuda:0"),
        cudasched.region("latency", stream=Stream(torch.said, 0x77, device=1)),
    ):
        pass
    assert engine.nothing_open() and engine.entered == [] and torch.current() == 0


def test_the_default_stream_is_no_stream_of_a_region(engine: Engine, torch: Torch) -> None:
    with (
        pytest.raises(cudasched.ConfigError, match="the default stream, which all threads share"),
        cudasched.region("latency", stream=Stream(torch.said, 0)),
    ):
        pass
    assert engine.nothing_open()


@pytest.mark.parametrize("stream", ["mine", 7, None, object()])
def test_what_is_no_stream_is_refused(engine: Engine, stream: object) -> None:
    with pytest.raises(cudasched.ConfigError, match=r"must be 'own', 'inherit' or a torch\.cuda\.Stream"):
        cudasched.region("latency", stream=stream)


def test_a_part_of_the_sms_has_its_own_stream(engine: Engine) -> None:
    with pytest.raises(cudasched.ConfigError, match="runs on that part's stream"):
        cudasched.region("best_effort", sm_fraction=0.5, stream="inherit")


def test_the_current_device_stays_what_the_body_made_it(engine: Engine, torch: Torch) -> None:
    with cudasched.region("latency"):
        pass
    with cudasched.region("latency"):
        torch._cuda_setDevice(1)
        torch.said.clear()
    # The engine's events are of the current device.
    assert torch.said == ["record 0xf01", "0x102 waits for 0xf01", "on 0x102", "exit"]
    assert torch._cuda_getDevice() == 1
    assert torch._cuda_getCurrentStream(0)[0] != 0 and torch._cuda_getCurrentStream(1)[0] == 0


def test_exceptions_go_back_to_the_stream_too(engine: Engine, torch: Torch) -> None:
    with cudasched.region("normal"):
        pass
    outside = torch.current()
    with pytest.raises(ZeroDivisionError), cudasched.region("latency"):
        raise ZeroDivisionError
    assert torch.current() == outside and engine.nothing_open()


def test_generators_and_coroutines_are_on_their_streams_in_their_own_steps(engine: Engine, torch: Torch) -> None:
    @cudasched.region("best_effort")
    def batches() -> Iterator[int]:
        for _ in range(2):
            yield torch.current()

    @cudasched.region("latency")
    async def request() -> int:
        await asyncio.sleep(0)
        return torch.current()

    stream = batches()
    first = next(stream)
    assert torch.current() != first and next(stream) == first

    async def main() -> list[int]:
        return await asyncio.gather(request(), request())

    one, other = asyncio.run(main())
    assert one == other > 0xF00 and torch.current() not in (first, one)
    assert engine.nothing_open()


def test_a_with_block_across_an_await_is_an_error_and_others_are_not_in_it(engine: Engine, torch: Torch) -> None:
    seen: list[tuple[str | None, int]] = []

    async def holding() -> None:
        with cudasched.region("latency"):
            await asyncio.sleep(0.01)

    async def other() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append((engine.current(), torch.current()))

    async def main() -> list[Any]:
        return await asyncio.gather(holding(), other(), return_exceptions=True)

    held, _ = asyncio.run(main())
    assert isinstance(held, cudasched.Error) and "across an await" in str(held)
    assert seen[0][0] is None and seen[0][1] < 0xF00
    assert engine.nothing_open()


def test_a_with_block_without_an_await_in_a_coroutine_is_none(engine: Engine, torch: Torch) -> None:
    async def main() -> None:
        for _ in range(3):
            with cudasched.region("latency"):
                assert engine.current() == "latency"
            await asyncio.sleep(0)

    asyncio.run(main())
    assert engine.nothing_open()


def test_nothing_changes_during_a_capture(engine: Engine, torch: Torch) -> None:
    torch.capturing = True
    with cudasched.region("latency"):
        assert torch.current() == 0 and engine.current() == "latency"
    assert torch.said == ["enter latency", "exit"]


def test_leaving_on_another_thread_is_refused_and_changes_nothing(engine: Engine, torch: Torch) -> None:
    region, raised = cudasched.region("latency"), []

    def leave() -> None:
        with pytest.raises(cudasched.Error) as error:
            region.__exit__(None, None, None)
        raised.append(str(error.value))

    with region:
        inside = torch.current()
        thread = threading.Thread(target=leave, name="other")
        thread.start()
        thread.join()
        assert torch.current() == inside
    assert "thread (other)" in raised[0]


def test_first_regions_of_two_threads_have_the_same_streams(engine: Engine, torch: Torch) -> None:
    initialises, inside = threading.Event(), threading.Event()

    def init() -> None:
        if threading.current_thread() is other:
            initialises.set()
            assert inside.wait(60)
        else:
            assert initialises.wait(60)

    def enter() -> None:
        with cudasched.region("latency"):
            pass

    torch.init = init  # type: ignore[method-assign]
    other = threading.Thread(target=enter)
    other.start()
    with cudasched.region("best_effort"):
        stream = torch.current()
        inside.set()
        other.join()
    assert torch.current() != stream


@pytest.mark.parametrize("missing", ["device", "build", "hook"])
def test_without_cuda_a_region_says_so_once(
    engine: Engine, torch: Torch, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "device":
        torch.available = False
    elif missing == "build":
        monkeypatch.delattr(Torch, "_cuda_getCurrentStream")
    else:
        monkeypatch.setattr(hook, "_installed", False)
    with pytest.warns(cudasched.HookWarning, match="regions do nothing here"), cudasched.region("latency"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cudasched.region("latency"):
            pass
    assert engine.nothing_open() and not any(line.startswith("on ") for line in torch.said)


def test_switched_off_says_nothing(engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_installed", False)
    monkeypatch.setenv("CUDASCHED_OFF", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cudasched.region("latency"):
            pass


def test_in_a_child_that_cannot_use_cuda_nothing_is_done(engine: Engine, torch: Torch) -> None:
    torch.bad_fork = True
    with pytest.warns(cudasched.HookWarning), cudasched.region("latency"):
        assert torch.current() == 0


def test_the_child_of_a_fork_has_none_of_the_parents_streams(engine: Engine, torch: Torch) -> None:
    with cudasched.region("latency") as region:
        said, streams = len(torch.said), _adapter._streams
        assert streams is not None
        child = os.fork()
        if child == 0:
            try:
                torch.bad_fork = True
                region.__exit__(None, None, None)
                os._exit(torch.said[said:] != ["exit"] or bool(streams._thread.devices))
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_fails_costs_the_streams_and_not_the_program(
    engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> int:
        raise cudasched.DriverError("no streams left")

    monkeypatch.setattr(_adapter, "_new_stream", fails)
    with pytest.warns(cudasched.HookWarning, match="no streams left"), cudasched.region("latency"):
        assert engine.current() == "latency" and torch.current() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cudasched.region("best_effort"):
            assert engine.current() == "best_effort"
    assert engine.nothing_open()


def test_without_pytorch_nothing_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cudasched.region("latency"):
            pass
    assert "torch" not in sys.modules
