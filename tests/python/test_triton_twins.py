"""The Triton twins of layernorm and flash attention: what they compute, by Triton's interpreter where Triton and
PyTorch are installed, and what the tuner is given, over a stand-in for Triton."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cudasched.errors import ConfigError, Error
from cudasched.kernels import triton_twins
from support import PATIENCE_S

pytest.importorskip("sklearn")


def run(script: str, directory: Path, *needed: str) -> str:
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"Triton's kernels need {name} here: pip install {name}")
    command = [sys.executable, Path(__file__).parent / script]
    environment = os.environ | {"TRITON_CACHE_DIR": str(directory)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_twins_compute_what_they_should(tmp_path: Path) -> None:
    """The search with the tuner's own decorator, then configurations of both kernels over ragged shapes."""
    assert run("triton_interpreted.py", tmp_path, "torch", "triton") == "right\n"


def test_the_twins_compile(tmp_path: Path) -> None:
    """For GPUs that are not here."""
    assert run("triton_compiled.py", tmp_path, "triton") == "compiled\n"


class Config:
    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs, self.options = kwargs, options


class Kernel:
    """What `triton.autotune` makes; it notes how it is called."""

    def __init__(self, function: Any, given: dict[str, Any]) -> None:
        self.function, self.given = function, given
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            self.called()
            self.calls.append((grid, arguments, named))

        return call

    def called(self) -> None:
        pass


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    library: Any = ModuleType("triton")
    library.__path__ = []
    library.language = ModuleType("triton.language")
    library.language.constexpr = object
    library.jit = lambda function: function
    library.Config = Config
    library.autotune = lambda **given: lambda function: Kernel(function, given)
    monkeypatch.setitem(sys.modules, "triton", library)
    monkeypatch.setitem(sys.modules, "triton.language", library.language)
    monkeypatch.delitem(sys.modules, "cudasched.kernels._triton_kernels", raising=False)
    yield importlib.import_module("cudasched.kernels._triton_kernels")
    sys.modules.pop("cudasched.kernels._triton_kernels", None)


def test_the_tuner_is_given_configurations_of_both(kernels: Any) -> None:
    for kernel, key, least in (
        (kernels.layer_norm, ["COLS"], 60),
        (kernels.flash_attention, ["queries", "keys", "HEAD", "CAUSAL"], 40),
    ):
        configurations = kernel.given["configs"]
        assert kernel.given["key"] == key and least <= len(configurations) <= 200
        assert kernel.given["cache_results"] and "early_config_prune" in kernel.given["prune_configs_by"]
        parameters = kernel.function.__code__.co_varnames[: kernel.function.__code__.co_argcount]
        for one in configurations:
            assert set(one.kwargs) < set(parameters) and "num_warps" in one.options
        assert set(key) < set(parameters)


def tensor(*shape: int, dtype: str = "float16", strides: tuple[int, ...] | None = None, device: str = "gpu") -> Any:
    count = 1
    made: list[int] = []
    for one in reversed(shape):
        made.insert(0, count)
        count *= one
    used = strides or tuple(made)
    return SimpleNamespace(
        shape=shape,
        dtype=dtype,
        device=device,
        dim=lambda: len(shape),
        stride=lambda i: used[i],
        numel=lambda: count,
        is_contiguous=lambda: used == tuple(made),
    )


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    library: Any = ModuleType("torch")
    library.float16, library.bfloat16, library.float32 = "float16", "bfloat16", "float32"
    library.empty = lambda shape, dtype, device: tensor(*shape, dtype=dtype, device=device)
    library.empty_like = lambda x: tensor(*x.shape, dtype=x.dtype, device=x.device)
    library.current = []

    @contextlib.contextmanager
    def device_of(x: Any) -> Iterator[None]:
        library.current.append(x.device)
        yield
        library.current.pop()

    library.cuda = SimpleNamespace(device_of=device_of)
    monkeypatch.setitem(sys.modules, "torch", library)
    return library


def test_how_the_kernels_are_called(kernels: Any, torch: Any) -> None:
    triton_twins.layer_norm(tensor(3, 5, 100), tensor(100), tensor(100))
    ((grid, arguments, named),) = kernels.layer_norm.calls
    assert grid({"ROWS": 4}) == (4,) and arguments[4:] == (15, 1e-5) and named == {"COLS": 100}
    q, k = tensor(2, 6, 70, 64, strides=(99, 64, 384, 1)), tensor(2, 3, 50, 64)
    triton_twins.flash_attention(q, k, k, causal=True)
    ((grid, arguments, named),) = kernels.flash_attention.calls
    assert grid({"TILE_Q": 32}) == (3, 12) and named == {"HEAD": 64, "CAUSAL": True}
    assert arguments[5:10] == (70, 50, 6, 2, 0.125) and arguments[13:16] == (99, 64, 384)
    names = kernels.flash_attention.function.__code__.co_varnames
    assert len(arguments) == names.index("HEAD")


def test_they_are_launched_on_the_gpu_of_their_arrays(kernels: Any, torch: Any) -> None:
    """Triton launches on the current one."""
    current: list[Any] = []
    for kernel in (kernels.layer_norm, kernels.flash_attention):
        kernel.called = lambda: current.append(list(torch.current))
    x, row = tensor(3, 100, device="gpu 1"), tensor(100, device="gpu 1")
    triton_twins.layer_norm(x, row, row)
    q = tensor(2, 6, 70, 64, device="gpu 2")
    triton_twins.flash_attention(q, q, q)
    assert current == [["gpu 1"], ["gpu 2"]] and torch.current == []


def test_what_is_refused(kernels: Any, torch: Any) -> None:
    with pytest.raises(ConfigError, match="are not those of 100 columns"):
        triton_twins.layer_norm(tensor(3, 100), tensor(10), tensor(100))
    with pytest.raises(ConfigError, match="contiguous"):
        triton_twins.layer_norm(tensor(3, 100, strides=(1, 3)), tensor(100), tensor(100))
    good = tensor(1, 4, 10, 64)
    for q, k, match in (
        (tensor(10, 64), good, "four dimensions"),
        (good, tensor(1, 3, 10, 64), "does not fit"),
        (tensor(1, 4, 10, 80), tensor(1, 4, 10, 80), "head size 80"),
        (good, tensor(1, 4, 10, 64, dtype="bfloat16"), "all float16 or all bfloat16"),
        (tensor(1, 4, 10, 64, strides=(1, 1, 1, 2)), good, "contiguous"),
    ):
        with pytest.raises(ConfigError, match=match):
            triton_twins.flash_attention(q, k, k)
    assert not kernels.flash_attention.calls


def test_without_triton_it_says_what_to_install(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Error, match="pip install triton"):
        triton_twins.layer_norm(tensor(3, 100), tensor(100), tensor(100))
