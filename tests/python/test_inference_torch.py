"""PyTorch modules in a batcher: on the host, and with stand-ins for CUDA graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from cudasched.errors import ConfigError
from cudasched.inference import Batcher, DeadlineError, InputError, RunError
from support import PATIENCE_S

torch = pytest.importorskip("torch")

from cudasched.inference.torch import Model  # noqa: E402


def answer(future: Future[Any]) -> Any:
    return future.result(PATIENCE_S)


def test_each_request_has_the_row_of_its_input() -> None:
    module = torch.nn.Linear(3, 2).eval()
    inputs = [torch.randn(3) for _ in range(50)]
    model = Model(module, inputs[0], sizes=(1, 4, 8))
    with Batcher(model, sizes=model.sizes, slo_ms=None) as batcher:
        futures = [batcher.submit_future(x) for x in inputs]
        for x, future in zip(inputs, futures, strict=True):
            y = answer(future)
            assert not y.requires_grad
            torch.testing.assert_close(y, module(x), check_device=True)
        with pytest.raises(InputError, match=r"x has shape \(4,\); \(3,\) is needed"):
            batcher.submit_future(torch.zeros(4))
        with pytest.raises(InputError, match=r"x has dtype torch.float64; torch.float32 is needed"):
            batcher.submit_future(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("example", "module", "expected"),
    [
        ({"a": torch.ones(2), "b": torch.ones(1)}, lambda a, b: {"sum": a + b, "parts": (a, b)}, "mapping"),
        ((torch.ones(2), torch.ones(1)), lambda a, b: (a + b, a), "tuple"),
    ],
    ids=["mapping", "tuple"],
)
def test_inputs_and_outputs_have_structure(example: Any, module: Any, expected: str) -> None:
    outputs = Model(module, example)([example] * 3)
    assert len(outputs) == 3
    for output in outputs:
        total = output["sum"] if expected == "mapping" else output[0]
        assert total.tolist() == [2, 2]
    if expected == "mapping":
        assert outputs[0]["parts"][1].tolist() == [1]


@pytest.mark.parametrize("output", [torch.zeros(5, 2), torch.tensor(1.0)], ids=["rows", "scalar"])
def test_an_output_has_the_batch_as_its_first_dimension(output: Any) -> None:
    with pytest.raises(RunError, match="its first dimension is not the batch's, 16"):
        Batcher(Model(lambda x: output, torch.ones(1)))


def test_graphs_need_a_gpu_and_models_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch finds no GPU"):
        Model(torch.nn.Linear(1, 1), torch.ones(1), graphs=True)
    with pytest.raises(ConfigError, match="at least one size"):
        Model(torch.nn.Linear(1, 1), torch.ones(1), sizes=())


class Cuda:
    """Stand-ins for what captures a module: a graph doubles its memory when it is replayed.

    Attributes:
        captured: The sizes, in their order.
        replayed: The same of replays.
        calls: How often the module ran.
        seconds: How long a replay takes, by size.
    """

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.calls = 0
        self.seconds: dict[int, float] = {}
        self.capturing: Any = None

    def module(self, x: Any) -> Any:
        self.calls += 1
        y = torch.full_like(x, -1)  # nothing of a capture runs
        if self.capturing is not None:
            self.capturing.memory, self.capturing.outputs = x, y
        return y

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("the pool", "thread_local")
        self.capturing = graph
        yield
        self.capturing = None
        self.captured.append(len(graph.memory))

    def replay(self, graph: Any) -> None:
        self.replayed.append(len(graph.memory))
        time.sleep(self.seconds.get(len(graph.memory), 0))
        graph.outputs.copy_(2 * graph.memory)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()

    class Stream:
        def __init__(self, device: Any = None) -> None: ...
        def wait_stream(self, other: Any) -> None: ...

    class CUDAGraph:
        memory: Any = None
        outputs: Any = None

        def replay(self) -> None:
            made.replay(self)

        def raw_cuda_graph_exec(self) -> int:
            return len(self.memory)

    for name, value in {
        "is_available": lambda: True,
        "Stream": Stream,
        "stream": contextlib.nullcontext,
        "current_stream": Stream,
        "graph_pool_handle": lambda: "the pool",
        "CUDAGraph": CUDAGraph,
        "graph": made.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_a_batch_is_padded_to_the_graph_that_holds_it(cuda: Cuda) -> None:
    model = Model(cuda.module, torch.ones(2), sizes=(4, 1), graphs=True)
    rows = [torch.full((2,), float(value)) for value in range(1, 5)]
    for count in (1, 2, 3, 4, 1):
        outputs = model(rows[:count])
        assert [output.tolist() for output in outputs] == [[2 * value] * 2 for value in range(1, count + 1)]
    assert cuda.captured == [1, 4]
    assert cuda.replayed == [1, 4, 4, 4, 1]
    assert cuda.calls == 2 * 4  # three times to warm up, once for the capture
    with pytest.raises(ValueError, match="5 inputs; the largest graph holds 4"):
        model([*rows, rows[0]])


def test_an_answer_stays_what_it_is_when_the_graph_is_replayed(cuda: Cuda) -> None:
    model = Model(cuda.module, torch.ones(1), sizes=(1,), graphs=True)
    first = model([torch.ones(1)])[0]
    model([torch.zeros(1)])
    assert first.tolist() == [2]


def test_a_batcher_captures_each_size_before_the_first_request(cuda: Cuda) -> None:
    model = Model(cuda.module, torch.ones(1), sizes=(1, 2, 4), graphs=True)
    with Batcher(model, sizes=model.sizes, slo_ms=None) as batcher:
        assert cuda.captured == [4, 2, 1]
        calls = cuda.calls
        assert [answer(batcher.submit_future(torch.full((1,), 3.0))).item() for _ in range(5)] == [6] * 5
        assert cuda.calls == calls


def test_the_time_of_a_size_is_known_by_its_graph_before_it_ran(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(cuda.module, torch.ones(1), sizes=(1, 2, 4), graphs=True)
    times_ns = {1: 40_000_000, 2: 80_000_000, 4: 0}
    core = SimpleNamespace(graph_ns=times_ns.get)
    with monkeypatch.context() as patched:
        patched.setattr("cudasched.hook.load_core", lambda: core)
        assert model.predict(2) == 80 and cuda.captured == [4, 2, 1] and not cuda.replayed
        with pytest.raises(ConfigError, match=r"predict\(4\): the graph's time is not known"):
            model.predict(4)
        times_ns[4] = 160_000_000
        times_ms = {size: model.predict(size) for size in model.sizes}
    cuda.seconds = {4: 0.16}
    with Batcher(model, sizes=model.sizes, slo_ms=130, predict=times_ms.get, policy="eager") as batcher:
        assert set(cuda.replayed) == {4}  # the example, in the largest
        with pytest.raises(DeadlineError, match="it would end"):
            batcher.submit_future(torch.ones(1), deadline_ms=36)
        assert answer(batcher.submit_future(torch.ones(1))).item() == 2
    with pytest.raises(ConfigError, match=r"predict\(3\): a model with graphs"):
        model.predict(3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (3, 0, 5)], ids=str)
def test_inputs_of_any_kind_come_to_their_graph_as_they_are(cuda: Cuda, dtype: Any, shape: tuple[int, ...]) -> None:
    model = Model(cuda.module, torch.zeros(shape, dtype=dtype), sizes=(4,), graphs=True)
    places = tuple(reversed(range(len(shape))))
    rows = [torch.randint(0, 50, shape[::-1]).to(dtype).permute(places) for _ in range(3)]
    assert [output.tolist() for output in model(rows)] == [(2 * row).tolist() for row in rows]


@pytest.mark.parametrize(
    "x",
    [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")],
    ids=["shape", "dtype", "device"],
)
def test_an_input_that_is_not_the_graphs_is_refused(cuda: Cuda, x: Any) -> None:
    model = Model(cuda.module, torch.ones(1), sizes=(4,), graphs=True)
    with pytest.raises(
        ValueError, match=r"an input is .* of shape .* on .*: torch.float32 of shape \(1,\) on cpu is needed"
    ):
        model([torch.ones(1), x])
