"""Triton kernels, tuned by the same search: a decorator above ``@triton.jit``.

::

    @cudasched.tune.triton(space={"BLOCK": [64, 128, 256], "num_warps": [2, 4, 8]}, key=["n"])
    @triton.jit
    def kernel(x, y, n, BLOCK: tl.constexpr): ...

It is `triton.autotune` with all configurations of the space, of which the search chooses a few to time before Triton
times those that are left. Each runs once on copies of the tensors before its timing, and is compared with the space's
first. One with other results is refused with a warning, and kept in the kernel's ``refused``. So Triton's own cache has
the result, on disk too (``cache_results``), and a later process does not tune again. The kernel runs in the program's
own process: a hang or a fault there ends the program.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cudasched.errors import ConfigError, Error
from cudasched.tune._need import need
from cudasched.tune.search import make

__all__ = ["triton"]

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_KEPT = 3
_MOST = 100_000


_TOLERANCES = {8: 1e-9, 4: 1e-3}
"""Of floating types by bytes, relative and as much absolute: the effect of another order of sums, and of tf32."""
_TOLERANCE = 2e-2
"""Of shorter ones."""


class Refused(NamedTuple):
    """A configuration that gave a wrong result.

    Attributes:
        configuration: The values.
        message: The fault.
    """

    configuration: Mapping[str, Any]
    message: str


class _Copies:
    """A call's arguments with copies in the place of its tensors: a wrong configuration must not touch the program's.

    Tensors that share memory go on to share it, and a slice keeps its strides.
    """

    def __init__(self, positional: Mapping[str, Any], named: Mapping[str, Any]) -> None:
        self._storages: dict[int, tuple[Any, Any]] = {}
        self.positional = {name: self._copied(one) for name, one in positional.items()}
        self.named = {name: self._copied(one) for name, one in named.items()}

    def _copied(self, one: Any) -> Any:
        if isinstance(one, (tuple, list)):
            copies = map(self._copied, one)
            return type(one)(*copies) if hasattr(one, "_fields") else type(one)(copies)
        if _has_tensor(one):
            made = copy.copy(one)
            made.base = self._copied(one.base)
            return made
        if not hasattr(one, "untyped_storage"):
            return one
        storage = one.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage, storage.clone()
        copied = self._storages[storage.data_ptr()][1]
        return one.new_empty(0).set_(copied, one.storage_offset(), one.size(), one.stride())

    def reset(self) -> None:
        """The tensors again have the values of the program's."""
        for storage, copied in self._storages.values():
            copied.copy_(storage)

    def tensors(self) -> dict[str, Any]:
        """The copies, by name."""
        return dict(_tensors({**self.positional, **self.named}))


def _has_tensor(one: Any) -> bool:
    """Whether it is a `TensorDescriptor` or its like."""
    return hasattr(getattr(one, "base", None), "untyped_storage")


def _tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in arguments.items():
        if isinstance(one, (tuple, list)):
            yield from _tensors({f"{name}[{place}]": each for place, each in enumerate(one)})
        elif _has_tensor(one):
            yield name, one.base
        elif hasattr(one, "untyped_storage"):
            yield name, one


class _Check:
    """Compares configurations' results with those of the first one that runs."""

    def __init__(self, run: Callable[[Any], None], copies: _Copies, tolerance: float | None) -> None:
        self._run, self._copies, self._tolerance = run, copies, tolerance
        self._right: dict[str, Any] | None = None

    def wrong(self, config: Any) -> str:
        """A configuration's fault; empty: none. The first is taken to be right."""
        self._copies.reset()
        self._run(config)
        if self._right is None:
            self._right = {name: one.clone() for name, one in self._copies.tensors().items()}
            return ""
        for name, found in self._copies.tensors().items():
            right = self._right[name]
            tolerance = self._allowed(right)
            if right.is_floating_point() and right.element_size() < 4:
                found, right = found.float(), right.float()
            differ = found.isclose(right, rtol=tolerance, atol=tolerance, equal_nan=True).logical_not()
            count = int(differ.sum())
            if count:
                return f"{count:,} of {differ.numel():,} elements of {name} differ from the first configuration's"
        return ""

    def _allowed(self, tensor: Any) -> float:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return 0.0
        if self._tolerance is not None:
            return self._tolerance
        return _TOLERANCES.get(tensor.element_size() // (2 if tensor.is_complex() else 1), _TOLERANCE)


def _configurations(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    if not space or any(not isinstance(values, (list, tuple)) or not values for values in space.values()):
        raise ConfigError("space has a list of values for each parameter; one without values is empty")
    count = math.prod(len(values) for values in space.values())
    if count > _MOST:
        raise ConfigError(f"space has {count:,} configurations, more than {_MOST:,}")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def _features(configurations: Sequence[Mapping[str, Any]], space: Mapping[str, Sequence[Any]]) -> Any:
    np = need("numpy", "the tuner")
    columns = []
    for name, values in space.items():
        numbers = all(isinstance(value, (int, float)) and value > 0 for value in values)
        columns.append([math.log2(one[name]) if numbers else values.index(one[name]) for one in configurations])
    rows = np.array(columns, dtype=np.float64).T
    return (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-9)


def triton(
    *,
    space: Mapping[str, Sequence[Any]],
    key: Sequence[str],
    evaluations: int = 30,
    strategy: str = "bayesian",
    seed: int = 0,
    constraint: Callable[[Mapping[str, Any]], bool] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Callable[[Any], Any]:
    """A decorator for a ``@triton.jit`` function.

    Args:
        space: Values by parameter: the kernel's ``constexpr`` parameters, and ``num_warps``, ``num_stages``,
            ``num_ctas``, ``maxnreg``. Others' results are compared with those of the first configuration that runs.
        key: Arguments whose change tunes anew.
        evaluations: Configurations that are timed for each key.
        strategy: A name of `cudasched.tune.search.STRATEGIES`.
        seed: Of the strategy.
        constraint: Of a configuration's values: whether it may be tried.
        tolerance: How far results may be from the first configuration's, relative and as much absolute; None: 1e-9 for
            float64, 1e-3 for float32, 2e-2 for shorter floating types. Integers are equal.
        options: For `triton.autotune`: ``reset_to_zero``, ``do_bench`` (of `quiet`), ...

    Raises:
        ConfigError: The space is empty or too large.
        Error: Triton is not installed.
    """
    library = need("triton", "the decorator", "triton")
    configurations = [one for one in _configurations(space) if constraint is None or constraint(one)]
    if not configurations:
        raise ConfigError("the constraint leaves no configuration: the space is empty")
    features = _features(configurations, space)
    made = [
        library.Config(
            {name: value for name, value in one.items() if name not in _OPTIONS},
            **{name: value for name, value in one.items() if name in _OPTIONS},
        )
        for one in configurations
    ]

    refused: list[Refused] = []

    def decorate(function: Any) -> Any:
        def prune(configs: Sequence[Any], named_arguments: Mapping[str, Any], **rest: Any) -> list[Any]:
            """Triton calls this, and then times the returned configurations."""
            grid = rest.pop("grid")
            rest.pop("warmup", None)
            copies = _Copies(named_arguments, rest)
            # Errors that Triton's own tuner passes over, too; too much shared memory, for one.
            passed_over = (library.CompilationError, library.runtime.errors.OutOfResources)

            def run(config: Any) -> None:
                function[grid](*copies.positional.values(), **{**copies.named, **config.all_kwargs()})

            check = _Check(run, copies, tolerance)
            do_bench = options.get("do_bench") or library.testing.do_bench
            wrong: list[Refused] = []

            def is_right(config: Any) -> bool:
                try:
                    message = check.wrong(config)
                except passed_over:
                    return False
                if message:
                    wrong.append(Refused(config.all_kwargs(), message))
                return not message

            if len(configs) <= _KEPT:
                tried, kept = len(configs), [one for one in configs if is_right(one)]
            else:
                tried = min(evaluations, len(configs))
                next((one for one in configs[:tried] if is_right(one)), None)  # the reference for the others
                search = make(strategy, features, seed)
                scores: dict[int, float] = {}
                for _ in range(tried):
                    places = search.ask(1)
                    if not places:
                        break
                    (place,) = places
                    time = None
                    if is_right(configs[place]):
                        call = functools.partial(run, configs[place])
                        with contextlib.suppress(*passed_over):
                            time = float(do_bench(call, warmup=5, rep=20, return_mode="median"))
                            scores[place] = time
                    search.tell(place, time)
                kept = [configs[place] for place in sorted(scores, key=scores.__getitem__)[:_KEPT]]
            refused.extend(wrong)
            if wrong:
                warnings.warn(
                    f"{len(wrong)} configurations of the kernel give wrong results and are refused; the first: "
                    f"{wrong[0].configuration}: {wrong[0].message}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if not kept:
                raise Error(f"none of {tried} configurations of the kernel ran")
            return kept

        tuned = library.autotune(
            configs=made,
            key=list(key),
            prune_configs_by={"early_config_prune": prune},
            cache_results=True,
            **options,
        )(function)
        tuned.refused = refused
        return tuned

    return decorate
