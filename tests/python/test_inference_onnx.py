"""ONNX models in a batcher, by ONNX Runtime on the CPU, and with a stand-in for its CUDA provider."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cudasched.errors import ConfigError
from cudasched.inference import Batcher, RunError
from cudasched.inference.onnx import Model
from support import PATIENCE_S

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ONE = np.zeros(3, np.float32)


def made(*nodes: Any, inputs: str = "x", outputs: str = "y", kind: str = "FLOAT") -> bytes:
    """A model of vectors, the batch first."""
    helper, element = onnx.helper, getattr(onnx.TensorProto, kind)

    def values(names: str) -> list[Any]:
        return [helper.make_tensor_value_info(name, element, ["batch", 3]) for name in names.split()]

    graph = helper.make_graph(list(nodes), "tiny", values(inputs), values(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def node(kind: str, inputs: str, *outputs: str) -> Any:
    return onnx.helper.make_node(kind, inputs.split(), list(outputs))


def test_each_request_has_the_row_of_its_input(tmp_path: Path) -> None:
    file = tmp_path / "negated.onnx"
    file.write_bytes(made(node("Neg", "x", "y")))
    model = Model(file, ONE, sizes=(4, 1))
    inputs = [np.float32([place, 1, 2]) for place in range(50)]
    may_run = threading.Event()
    may_run.set()  # The batcher tries each size first.

    def run(batch: list[Any]) -> list[Any]:
        assert may_run.wait(PATIENCE_S)
        return model(batch)

    with Batcher(run, sizes=model.sizes, slo_ms=None) as batcher:
        may_run.clear()
        futures = [batcher.submit_future(x) for x in inputs]
        may_run.set()
        for x, future in zip(inputs, futures, strict=True):
            assert np.array_equal(future.result(PATIENCE_S), -x)
        assert max(batcher.statistics().batches) == 4


def test_several_inputs_and_outputs_have_names() -> None:
    content = made(node("Add", "a b", "sum"), node("Sub", "a b", "difference"), inputs="a b", outputs="sum difference")
    model = Model(content, {"a": ONE, "b": ONE})
    answers = model([{"a": ONE + place, "b": ONE + 1} for place in range(3)])
    assert [answer["sum"].tolist() for answer in answers] == [[place + 1.0] * 3 for place in range(3)]
    assert [answer["difference"].tolist() for answer in answers] == [[place - 1.0] * 3 for place in range(3)]
    with pytest.raises(ValueError, match="the model's inputs are a, b; given are a"):
        model([{"a": ONE}])


@pytest.mark.parametrize("dtype", [object, "S"])
def test_strings_are_str_or_bytes_of_utf8(dtype: Any) -> None:
    """Guards against the error of a binding, the crash that its outputs end in, and "b'one'" of bytes."""
    words = ["one", "zw\u00f6lf", "three"]
    model = Model(made(node("Identity", "x", "y"), kind="STRING"), np.array(words, object))
    encoded = np.array([word.encode() for word in words], dtype)
    assert [answer.tolist() for answer in model([encoded, encoded[::-1]])] == [words, words[::-1]]
    assert model([np.array(words, object)])[0].tolist() == words
    with pytest.raises(UnicodeDecodeError):
        model([np.array([b"\xff"] * 3, dtype)])


def test_an_output_has_the_batch_as_its_first_dimension() -> None:
    with pytest.raises(RunError, match="its first dimension is not the batch, 2"):
        Batcher(Model(made(node("Transpose", "x", "y")), ONE), (2,))


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none\.onnx is no file"):
        Model(tmp_path / "none.onnx", ONE)
    with pytest.raises(ConfigError, match=r"has no provider 'None'; it has .*CPUExecutionProvider"):
        Model(b"", ONE, providers=["None"])
    with pytest.raises(ConfigError, match="at least one size"):
        Model(b"", ONE, sizes=())
    with pytest.raises(RunError, match="run raised"):
        Batcher(Model(b"no model", ONE))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match="onnxruntime is not installed: pip install onnxruntime"):
        Model(b"", ONE)


def test_the_cuda_provider_computes_on_the_stream_of_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    real = onnxruntime.InferenceSession

    def session(model: bytes, options: Any, **more: Any) -> Any:
        given.append(more)
        return real(model, options, providers=["CPUExecutionProvider"])

    there = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: there)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        current_stream=lambda: SimpleNamespace(cuda_stream=42),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    model = Model(made(node("Neg", "x", "y")), ONE)
    assert not given  # before the region is entered
    model([ONE])
    model([ONE])
    options = [{"device_id": "1", "user_compute_stream": "42"}, {}]
    assert given == [{"providers": there, "provider_options": options}]
