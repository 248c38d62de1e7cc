"""The decorator for Triton, over a stand-in for Triton: what is asked of it, and what it is given back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cudasched import tune
from cudasched.errors import ConfigError, Error

pytest.importorskip("sklearn")

SPACE = {"BLOCK": [32, 64, 128, 256, 512], "STAGES": [1, 2, 3], "num_warps": [1, 2, 4, 8]}


class Config:
    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs, self.options = kwargs, options

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, **self.options}


class CompilationError(Exception):
    pass


class OutOfResources(Exception):  # noqa: N818  as Triton calls it
    pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Times a configuration by what the kernel notes as the last one that it was called with."""
    module: Any = ModuleType("triton")
    module.called = []
    module.timed = 0
    module.given = {}

    def autotune(**given: Any) -> Any:
        module.given = given
        return lambda function: SimpleNamespace(function=function, **given)

    def do_bench(call: Any, **_: Any) -> float:
        call()
        module.timed += 1
        last = module.called[-1]
        return 1.0 + abs(last["BLOCK"] - 128) / 64 + abs(last["num_warps"] - 4) + 0.1 * last["STAGES"]

    module.Config, module.autotune, module.CompilationError = Config, autotune, CompilationError
    module.testing = SimpleNamespace(do_bench=do_bench)
    module.runtime = SimpleNamespace(errors=SimpleNamespace(OutOfResources=OutOfResources))
    monkeypatch.setitem(sys.modules, "triton", module)
    return module  # type: ignore[no-any-return]


class Kernel:
    def __init__(self, library: Any) -> None:
        self._library = library

    def __getitem__(self, grid: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            assert grid == "the grid" and arguments == (1, 2) and named["extra"] == 3
            self._library.called.append(named)
            if named["BLOCK"] == 512 and named["num_warps"] == 1:
                raise OutOfResources

        return call


def test_a_part_of_the_space_is_timed_and_triton_chooses_among_the_best(library: Any) -> None:
    made = tune.triton(space=SPACE, key=["n"], evaluations=30, reset_to_zero=["y"])(Kernel(library))
    assert len(made.configs) == 60 and made.key == ["n"] and made.cache_results and made.reset_to_zero == ["y"]
    prune = made.prune_configs_by["early_config_prune"]
    left = prune(made.configs, {"x": 1, "n": 2}, grid="the grid", warmup=False, extra=3)
    assert len(left) == 3 and len(library.called) == 1 + 30 + library.timed and 25 < library.timed <= 30
    best = left[0].all_kwargs()
    assert best["num_warps"] == 4 and best["BLOCK"] == 128
    assert left[0].options == {"num_warps": 4} and "num_warps" not in left[0].kwargs


class Sum:
    """Adds rows of `x` to those of `y`, but where its blocks are too wide; `y` is a slice with strides of its own."""

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def __getitem__(self, grid: Any) -> Any:
        def call(y: Any, x: Any, count: Any, **named: Any) -> None:
            assert y.stride() == (10, 1) and y.dtype == x.dtype
            y += x * (1 + 1e-4 / named["BLOCK"])  # another order of sums
            count += 1
            if named["BLOCK"] >= self._wrong:
                y[1:, 3:] = 0
                x[:] = 0

        return call


@pytest.mark.parametrize("space", [SPACE, {"BLOCK": [32, 256]}], ids=["searched", "few"])
def test_a_configuration_with_a_wrong_result_is_refused_and_touches_nothing(
    library: Any, monkeypatch: pytest.MonkeyPatch, space: dict[str, list[int]]
) -> None:
    torch = pytest.importorskip("torch")
    rows, x, count = torch.ones(4, 10), torch.ones(4, 6), torch.zeros(1, dtype=torch.int32)
    given = {"y": rows[:, 2:8], "x": x, "count": count}
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(library.testing, "do_bench", lambda call, **_: call() or float(next(times)))
    made = tune.triton(space=space, key=[])(Sum(128))
    with pytest.warns(RuntimeWarning, match=r"configurations of the kernel give wrong results .*BLOCK.* elements of y"):
        left = made.prune_configs_by["early_config_prune"](made.configs, given, grid="the grid")
    assert left and all(config.kwargs["BLOCK"] < 128 for config in left)
    assert made.refused and all(one.configuration["BLOCK"] >= 128 for one in made.refused)
    assert made.refused[0].message == "9 of 24 elements of y differ from the first configuration's"
    assert rows.eq(1).all() and x.eq(1).all() and count.eq(0).all()


@dataclass
class Descriptor:
    """As Triton's TensorDescriptor."""

    base: Any


class Pair(NamedTuple):
    count: int
    tensor: Any


class Fill:
    """Fills the tensor in an argument."""

    def __init__(self, given: Any, tensor: Callable[[Any], Any]) -> None:
        self._type, self._tensor = type(given), tensor

    def __getitem__(self, grid: Any) -> Any:
        def call(y: Any, **named: Any) -> None:
            assert type(y) is self._type
            self._tensor(y).fill_(named["BLOCK"])

        return call


@pytest.mark.parametrize(
    ("within", "tensor", "name"),
    [
        (lambda y: (1, y), lambda given: given[1], "y[1]"),
        (lambda y: [1, [y]], lambda given: given[1][0], "y[1][0]"),
        (lambda y: Pair(1, y), lambda given: given.tensor, "y[1]"),
        (Descriptor, lambda given: given.base, "y"),
        (lambda y: (Descriptor(y),), lambda given: given[0].base, "y[0]"),
    ],
)
def test_tensors_within_arguments_are_copied_and_compared_too(
    library: Any, within: Callable[[Any], Any], tensor: Callable[[Any], Any], name: str
) -> None:
    torch = pytest.importorskip("torch")
    y = torch.zeros(4)
    made = tune.triton(space={"BLOCK": [32, 256]}, key=[])(Fill(within(y), tensor))
    with pytest.warns(RuntimeWarning, match="give wrong results"):
        made.prune_configs_by["early_config_prune"](made.configs, {"y": within(y)}, grid="the grid")
    assert [one.message for one in made.refused] == [f"4 of 4 elements of {name} differ from the first configuration's"]
    assert y.eq(0).all()


def test_the_tolerance_is_what_is_said(library: Any) -> None:
    torch = pytest.importorskip("torch")

    def refused(**options: Any) -> int:
        made = tune.triton(space={"BLOCK": [32, 64]}, key=[], **options)(Sum(128))
        y, x = torch.ones(4, 10, dtype=torch.float64)[:, 2:8], torch.ones(4, 6, dtype=torch.float64)
        made.prune_configs_by["early_config_prune"](made.configs, {"y": y, "x": x, "count": 0}, grid="the grid")
        return len(made.refused)

    assert refused(tolerance=1e-5) == 0
    with pytest.warns(RuntimeWarning):
        assert refused() == 1


def test_a_constraint_leaves_configurations_out(library: Any) -> None:
    made = tune.triton(space=SPACE, key=[], constraint=lambda one: one["BLOCK"] > 64)(Kernel(library))
    assert {config.kwargs["BLOCK"] for config in made.configs} == {128, 256, 512}
    with pytest.raises(ConfigError, match="the space is empty"):
        tune.triton(space=SPACE, key=[], constraint=lambda one: False)
    with pytest.raises(ConfigError, match="list of values"):
        tune.triton(space={"BLOCK": []}, key=[])
    with pytest.raises(ConfigError, match="more than"):
        tune.triton(space={f"P{i}": list(range(20)) for i in range(5)}, key=[])


def test_where_no_configuration_runs_it_is_an_error(library: Any) -> None:
    space = {"BLOCK": [512], "STAGES": [1, 2, 3, 4], "num_warps": [1]}
    made = tune.triton(space=space, key=[])(Kernel(library))
    with pytest.raises(Error, match="none of 4 configurations of the kernel ran"):
        made.prune_configs_by["early_config_prune"](made.configs, {"x": 1, "n": 2}, grid="the grid", extra=3)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Error, match="pip install triton"):
        tune.triton(space=SPACE, key=[])
