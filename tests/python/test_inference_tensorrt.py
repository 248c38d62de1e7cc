"""TensorRT engines in a batcher: with a stand-in that computes on the host, and the real library as far as it goes."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cudasched.errors import ConfigError
from cudasched.inference import Batcher, RunError
from support import PATIENCE_S

torch = pytest.importorskip("torch")

from cudasched.inference import tensorrt  # noqa: E402
from cudasched.inference.tensorrt import Model  # noqa: E402

FAKE = ModuleType("fake_tensorrt")
FAKE.__dict__.update(
    __version__="11.4",
    DataType=SimpleNamespace(**{name: f"DataType.{name}" for name in (*tensorrt._DTYPES, "FP8")}),
    TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
    ILogger=type("ILogger", (), {"Severity": SimpleNamespace(ERROR=1)}),
)
VECTOR = ((1, 3), (4, 3), (8, 3))
"""Of a profile: the least, the best and the most."""


class Engine:
    """Negates its inputs; an output has the name of its input behind a minus."""

    def __init__(self, static: int = 0, **profiles: tuple[Any, ...]) -> None:
        self.profiles = profiles or {"x": VECTOR}
        self.static = static
        self.kind = FAKE.DataType.FLOAT
        self.outputs = [f"-{name}" for name in self.profiles]
        self.num_io_tensors = 2 * len(self.profiles)
        self.num_optimization_profiles = 1
        self.contexts: list[Context] = []

    def get_tensor_name(self, place: int) -> str:
        return [*self.profiles, *self.outputs][place]

    def get_tensor_mode(self, name: str) -> str:
        return "out" if name in self.outputs else "in"

    def get_tensor_dtype(self, name: str) -> Any:
        return self.kind

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.static or -1, *self.profiles[name][2][1:])

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return self.profiles[name]

    def create_execution_context(self) -> Context:
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.thread = engine, threading.get_ident()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.runs = True
        self.unknown = False

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return profile == 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = self.shapes[f"-{name}"] = shape
        return shape[0] <= self.engine.profiles[name][2][0] and shape[1:] == self.engine.profiles[name][2][1:]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1,) if self.unknown else self.shapes[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        for name in self.engine.profiles if self.runs else ():
            count = torch.Size(self.shapes[name]).numel()
            given, made = ((ctypes.c_float * count).from_address(self.addresses[each]) for each in (name, f"-{name}"))
            made[:] = [-value for value in given]
        return self.runs


Engine.__module__ = FAKE.__name__


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FAKE.__name__, FAKE)


def model(engine: Any = None, example: Any = None, **options: Any) -> Model:
    return Model(engine or Engine(), torch.zeros(3) if example is None else example, device="cpu", **options)


def test_each_request_has_the_row_of_its_input() -> None:
    engine = Engine()
    made = model(engine)
    assert made.sizes == (1, 2, 4, 8)
    inputs = [torch.tensor([place, 1.0, 2.0]) for place in range(50)]
    with Batcher(made, sizes=made.sizes, slo_ms=None) as batcher:
        for x, future in [(x, batcher.submit_future(x)) for x in inputs]:
            assert torch.equal(future.result(PATIENCE_S), -x)
    (context,) = engine.contexts
    assert context.thread != threading.get_ident()  # the batcher's, in its region


def test_several_inputs_and_outputs_have_names() -> None:
    made = model(Engine(a=VECTOR, b=((1,), (2,), (6,))), {"a": torch.zeros(3), "b": torch.zeros(())})
    assert made.sizes == (1, 2, 4, 6)
    rows = [{"a": torch.full((3,), float(place)), "b": torch.tensor(10.0 + place)} for place in range(5)]
    for row, output in zip(rows, made(rows), strict=True):
        assert set(output) == {"-a", "-b"} and all(torch.equal(output[f"-{name}"], -row[name]) for name in row)
    with pytest.raises(ValueError, match="the engine's inputs are a, b; given are a"):
        made([{"a": torch.zeros(3)}])


@pytest.mark.parametrize("engine", [Engine(static=8), Engine(x=((8, 3), (8, 3), (8, 3)))], ids=["static", "profile"])
def test_a_batch_that_is_too_small_is_filled_up(engine: Engine) -> None:
    made = model(engine)
    assert made.sizes == (8,)
    outputs = made([torch.ones(3), 2 * torch.ones(3)])
    assert [output.tolist() for output in outputs] == [[-1.0] * 3, [-2.0] * 3]
    assert engine.contexts[0].shapes["x"] == (8, 3)


@pytest.mark.parametrize(
    ("engine", "example", "options", "said"),
    [
        (Engine(), torch.zeros(4), {}, r"x is torch.float32 of shape \(4,\), not torch.float32 of shapes \(3,\) to"),
        (Engine(), torch.zeros(3, 1), {}, r"x is torch.float32 of shape \(3, 1\), not"),
        (Engine(), torch.zeros(3, dtype=torch.int64), {}, r"x is torch.int64 of shape \(3,\), not torch.float32"),
        (Engine(), [0.0, 0.0, 0.0], {}, "the example of x is of type list, not a tensor"),
        (Engine(), {"y": torch.zeros(3)}, {}, "the engine's inputs are x; given are y"),
        (Engine(), torch.zeros(3), {"profile": 1}, "profile = 1: the engine has 1, from 0 on"),
        (Engine(), torch.zeros(3), {"sizes": (1, 9)}, "the engine's profile has batches of 1 to 8"),
        (Engine(), torch.zeros(3), {"sizes": ()}, "the engine's profile has batches of 1 to 8"),
    ],
)
def test_what_is_not_the_engines_is_refused(engine: Engine, example: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model(engine, example, **options)


def test_a_type_that_pytorch_has_not_is_named() -> None:
    engine = Engine()
    engine.kind = FAKE.DataType.FP8
    with pytest.raises(ConfigError, match=r"x is of DataType\.FP8, which PyTorch has no type for"):
        model(engine)


def test_a_batch_that_tensorrt_refuses_fails_its_requests() -> None:
    engine = Engine()
    made = model(engine)
    with Batcher(made, sizes=made.sizes, slo_ms=None) as batcher:
        assert batcher.submit_future(torch.ones(3)).result(PATIENCE_S).tolist() == [-1.0] * 3
        (context,) = engine.contexts
        context.runs = False
        with pytest.raises(RunError, match="TensorRT does not run the engine"):
            batcher.submit_future(torch.ones(3)).result(PATIENCE_S)
        context.runs, context.unknown = True, True
        with pytest.raises(RunError, match=r"-x has shape \(-1,\): one that is known"):
            batcher.submit_future(torch.ones(3)).result(PATIENCE_S)
    with pytest.raises(ValueError, match=r"x has shape \(1, 4\), which the engine's profile does not hold"):
        made([torch.ones(4)])


def test_where_there_is_no_tensorrt_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "_MODULES", ("no_such_tensorrt",))
    with pytest.raises(ConfigError, match="TensorRT is not installed: pip install tensorrt"):
        Model(b"", torch.zeros(3))


def test_the_first_library_that_reads_a_plan_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            plans.append(data)
            self.log.log(2, "a warning")
            self.log.log(1, "the plan is of\nanother version")
            return Engine() if data == b"plan" else None

    monkeypatch.setattr(tensorrt, "_MODULES", ("no_such_tensorrt", FAKE.__name__))
    monkeypatch.setattr(tensorrt, "find_spec", sys.modules.get)
    monkeypatch.setattr(FAKE, "Runtime", Runtime, raising=False)
    path = tmp_path / "model.plan"
    with pytest.raises(ConfigError, match=r"model\.plan: the plan cannot be read: No such file"):
        model(path)
    path.write_bytes(b"plan")
    assert model(path)([torch.ones(3)])[0].tolist() == [-1.0] * 3
    with pytest.raises(ConfigError, match=r"bytes: it is none .*\(fake_tensorrt 11\.4: the plan is of another ver"):
        model(b"other")
    assert plans == [b"plan", b"other"]


def test_the_real_library_has_what_is_called_and_says_why_it_reads_no_plan() -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings")
    calls = {
        real.ICudaEngine: [
            name for name in (*vars(Engine), *vars(Engine())) if name.startswith(("get_", "num_", "create"))
        ],
        real.IExecutionContext: [name for name in vars(Context) if not name.startswith("_")],
        real.DataType: [*tensorrt._DTYPES],
        real.TensorIOMode: ["INPUT"],
    }
    assert {kind: [name for name in names if not hasattr(kind, name)] for kind, names in calls.items()} == {
        kind: [] for kind in calls
    }
    builder = real.Builder(real.Logger(real.Logger.ERROR))
    network = builder.create_network(0)
    x = network.add_input("x", real.float32, (-1, 3))
    network.mark_output(network.add_unary(x, real.UnaryOperation.NEG).get_output(0))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    profile.set_shape("x", *VECTOR)
    config.add_optimization_profile(profile)
    plan = bytes(builder.build_serialized_network(network, config))
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match=r"a plan given as bytes: it is none .*tensorrt_rtx_bindings .*: .*deserializeCudaEngine"
        ):
            Model(plan, torch.zeros(3))
