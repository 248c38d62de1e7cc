"""`sm_fraction`: what regions do with PyTorch's streams, over an engine and a PyTorch that write down what they are
told; and what a program gets from the engine itself, over the simulated driver."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import cudasched
import pytest
from cudasched import _partition, hook
from program import Stage

PART = 0x5000


class Stream:
    """What PyTorch's streams are asked to do, in order, by name."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def record_event(self) -> str:
        self._said.append(f"record {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._said.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Torch:
    """`torch.cuda` with a current stream a thread."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.available, self.bad_fork = True, False
        self._current = threading.local()
        self.cuda = self

    def is_available(self) -> bool:
        return self.available

    def _is_in_bad_fork(self) -> bool:
        return self.bad_fork

    def current_stream(self) -> Stream:
        if self.bad_fork:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        stream: Stream | None = getattr(self._current, "stream", None)
        return stream or Stream("default", self.said)

    def ExternalStream(self, handle: int) -> Stream:  # noqa: N802  as PyTorch calls it
        return Stream(f"part {handle:#x}", self.said)

    def stream(self, stream: Stream) -> StreamScope:
        return StreamScope(self, stream)

    def make_current(self, stream: Stream | None) -> None:
        self._current.stream = stream


class StreamScope:
    """`torch.cuda.stream`."""

    def __init__(self, torch: Torch, stream: Stream) -> None:
        self._torch, self._stream = torch, stream

    def __enter__(self) -> None:
        self._before: Stream | None = getattr(self._torch._current, "stream", None)
        self._torch.make_current(self._stream)

    def __exit__(self, *exception: object) -> None:
        self._torch.make_current(self._before)


class Engine:
    """What `_core` is to regions with a part of the SMs."""

    def __init__(self) -> None:
        self.depth = 0
        self.fractions: list[float] = []
        self.error: cudasched.Error | None = None

    def region_enter(self, name: str, priority: int, slo_ms: float, counted_as: str = "") -> int:
        self.depth += 1
        return self.depth

    def region_enter_until(self, name: str, priority: int, deadline_ns: int) -> int:
        return self.region_enter(name, priority, 0)

    def region_exit(self, token: int) -> None:
        self.depth -= 1

    def partition_stream(self, fraction: float) -> int:
        if self.error is not None:
            raise self.error
        self.fractions.append(fraction)
        return PART

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(attached=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(hook, "_core", engine)
    monkeypatch.setattr(hook, "_installed", True)
    monkeypatch.setattr(_partition, "_warned", False)
    return engine


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    return torch


def test_work_goes_to_the_part_after_what_was_and_what_comes_goes_after_it(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort", sm_fraction=0.5):
        assert torch.current_stream().name == "part 0x5000"
        assert engine.depth == 1
        torch.said.append("work")
    assert torch.current_stream().name == "default"
    assert engine.fractions == [0.5]
    assert engine.depth == 0
    assert torch.said == [
        "record default",
        "part 0x5000 waits for event of default",
        "work",
        "record part 0x5000",
        "default waits for event of part 0x5000",
    ]


def test_an_exception_goes_back_to_the_stream_too(engine: Engine, torch: Torch) -> None:
    with pytest.raises(ZeroDivisionError), cudasched.region("best_effort", sm_fraction=0.5):
        raise ZeroDivisionError
    assert torch.current_stream().name == "default"
    assert torch.said[-1] == "default waits for event of part 0x5000"


def test_a_generator_is_on_the_part_in_its_own_steps_alone(engine: Engine, torch: Torch) -> None:
    @cudasched.region("best_effort", sm_fraction=0.25)
    def batches() -> Iterator[str]:
        for _ in range(2):
            yield torch.current_stream().name

    for name in batches():
        assert name == "part 0x5000"
        assert torch.current_stream().name == "default"


def test_threads_have_streams_of_their_own(engine: Engine, torch: Torch) -> None:
    seen: list[str] = []
    region = cudasched.region("best_effort", sm_fraction=0.5)

    def look() -> None:
        seen.append(torch.current_stream().name)
        with region:
            seen.append(torch.current_stream().name)

    with region:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.current_stream().name == "part 0x5000"
    assert seen == ["default", "part 0x5000"]


def test_without_pytorch_or_its_gpu_the_handle_is_there_to_launch_on(
    engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.available = False
    with cudasched.region("best_effort", sm_fraction=0.5) as region:
        assert torch.current_stream().name == "default"
        assert region.stream == PART
    monkeypatch.delitem(sys.modules, "torch")
    with cudasched.region("best_effort", sm_fraction=0.5) as region:
        assert region.stream == PART
    assert torch.said == []


def test_where_there_can_be_no_part_the_region_goes_on_and_says_so_once(engine: Engine, torch: Torch) -> None:
    engine.error = cudasched.HookError("an old driver")
    with pytest.warns(cudasched.HookWarning, match="all SMs: an old driver") as caught:
        for _ in range(2):
            with cudasched.region("best_effort", sm_fraction=0.5) as region:
                assert torch.current_stream().name == "default"
                assert engine.depth == 1
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(cudasched.HookError, match="an old driver"):
        _ = region.stream


def test_in_the_child_of_a_fork_the_region_goes_on(engine: Engine, torch: Torch) -> None:
    torch.bad_fork = True
    with cudasched.region("best_effort", sm_fraction=0.5):
        assert engine.depth == 1
    assert (torch.said, engine.depth) == ([], 0)


def test_without_the_hook_nothing_happens(engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_installed", False)
    with cudasched.region("best_effort", sm_fraction=0.5):
        assert torch.current_stream().name == "default"
    assert torch.said == []


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.5, float("nan"), "0.5", True])
def test_a_fraction_is_between_none_and_all(fraction: object) -> None:
    with pytest.raises(cudasched.ConfigError, match=r"sm_fraction = .*more than 0 and less than 1"):
        cudasched.region("best_effort", sm_fraction=fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("client_class", ["latency", "normal"])
def test_a_part_is_for_best_effort_work(client_class: str) -> None:
    with pytest.raises(cudasched.ConfigError, match=f"this region's is {client_class}"):
        cudasched.region(client_class, sm_fraction=0.5)


def test_a_region_without_a_part_has_no_stream() -> None:
    with pytest.raises(cudasched.ConfigError, match="give it sm_fraction"):
        _ = cudasched.region("best_effort").stream
    assert repr(cudasched.region("best_effort", sm_fraction=0.5)).endswith("sm_fraction=0.5)")


@pytest.fixture
def stage(command: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", "off")
    monkeypatch.setenv("CUDASCHED_MODEL", "off")
    stage = Stage(command, tmp_path)
    yield stage
    stage.close()


def test_a_program_launches_on_a_part_and_it_is_best_effort(stage: Stage) -> None:
    program = stage.importing()
    program.call("gpu = Gpu(); region = cudasched.region('best_effort', sm_fraction=0.5)")
    stream = program.number("region.stream")
    assert program.number("cudasched.region('best_effort', sm_fraction=0.51).stream") == stream
    program.call(f"gpu.launch(3, us=1, stream={stream}); gpu.synchronize()")
    assert program.count("best_effort_launches") == 3
    assert (program.end(), program.stderr) == (0, "")
