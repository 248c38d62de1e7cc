"""`handover` and `install` over a PyTorch that writes down what it is told."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cudasched
import cudasched.torch
import pytest
from cudasched import hook
from cudasched.torch import _install
from test_torch_regions import Engine, Tensor, Torch, engine, torch

__all__ = ["engine", "torch"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_install, "_installed", None)


def on_another_thread(action: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


def test_the_taker_waits_and_the_memory_is_kept_for_all_its_streams(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        giver = torch.current()
        tensor = Tensor()
        parcel = cudasched.torch.handover(tensor)

    def take() -> tuple[int, int]:
        with cudasched.region("latency"):
            torch.said.clear()
            assert parcel.take() is tensor
            return torch.current(), len(torch.said)

    taker, _ = on_another_thread(take)
    assert torch.said[0] == f"{taker:#x} waits for {giver:#x}"
    assert f"{taker:#x}" in tensor.kept and f"{giver:#x}" not in tensor.kept


def test_a_thread_without_regions_takes_it_on_the_default_stream(engine: Engine, torch: Torch) -> None:
    with cudasched.region("best_effort"):
        tensor = Tensor()
        parcel = cudasched.torch.handover([tensor])
    assert on_another_thread(lambda: parcel.take()[0]) is tensor
    assert "default" in tensor.kept


def test_modules_and_nested_values_are_handed_over(engine: Engine, torch: Torch) -> None:
    weight, buffer, other = Tensor(), Tensor(), Tensor()
    module = SimpleNamespace(parameters=lambda: iter([weight]), buffers=lambda: iter([buffer]))
    parcel = cudasched.torch.handover({"module": module, "rest": ((other, 3), "text")})
    on_another_thread(parcel.take)
    assert all(tensor.kept for tensor in (weight, buffer, other))


def test_tensors_of_the_host_pass_through(engine: Engine, torch: Torch) -> None:
    tensor = SimpleNamespace(is_cuda=False, record_stream=None)
    assert cudasched.torch.handover(tensor).take() is tensor
    assert torch.said == []


@pytest.mark.parametrize("value", [None, 3, "text", [], {"a": 1}])
def test_what_has_no_tensor_is_refused(engine: Engine, torch: Torch, value: object) -> None:
    with pytest.raises(cudasched.ConfigError, match="there is no tensor in it"):
        cudasched.torch.handover(value)


def test_without_cuda_a_handover_is_the_value(engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.available = False
    tensor = Tensor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cudasched.torch.handover(tensor).take() is tensor


def test_install_gives_the_program_a_class_and_leaves_the_default_stream(engine: Engine, torch: Torch) -> None:
    torch.lazy = []
    cudasched.torch.install(default="best-effort")
    assert engine.process == ("best_effort", 0, 0.0)
    assert torch.current() == 0  # CUDA is not initialised yet, and install does not
    for call in torch.lazy:
        call()
    assert torch.current() != 0


def test_install_leaves_other_threads_where_they_are(engine: Engine, torch: Torch) -> None:
    torch.lazy = []
    cudasched.torch.install()
    on_another_thread(lambda: [call() for call in torch.lazy])
    assert torch.current() == 0


def test_install_twice(engine: Engine, torch: Torch) -> None:
    cudasched.torch.install(default="best_effort")
    cudasched.torch.install(default="best-effort")
    with pytest.raises(cudasched.ConfigError, match="'best_effort' is installed in this program"):
        cudasched.torch.install(default="latency")
    assert engine.process == ("best_effort", 0, 0.0)


def test_install_of_no_class_is_refused(engine: Engine, torch: Torch) -> None:
    with pytest.raises(cudasched.ConfigError, match="did you mean 'latency'"):
        cudasched.torch.install(default="latancy")
    assert engine.process is None


def test_install_without_the_hook_says_so_once(engine: Engine, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_installed", False)
    with pytest.warns(cudasched.HookWarning, match="not in front of CUDA"):
        cudasched.torch.install()
    cudasched.torch.install()


def test_install_without_cuda_says_so(engine: Engine, torch: Torch) -> None:
    torch.available = False
    with pytest.warns(cudasched.HookWarning, match="no CUDA device"):
        cudasched.torch.install()
