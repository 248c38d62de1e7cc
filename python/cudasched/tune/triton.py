"""Triton kernels, tuned by the same search: a decorator above ``@triton.jit``.

::

    @cudasched.tune.triton(space={"BLOCK": [64, 128, 256], "num_warps": [2, 4, 8]}, key=["n"])
    @triton.jit
    def kernel(x, y, n, BLOCK: tl.constexpr): ...

It is `triton.autotune` with all configurations of the space, of which the search chooses a few to time before Triton
times those that are left. So Triton's own cache has the result, on disk too (``cache_results``), and a later process
does not tune again. The kernel runs in the program's own process: one that hangs or faults takes that with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudasched.errors import ConfigError, Error
from cudasched.tune._need import need
from cudasched.tune.search import make

__all__ = ["triton"]

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_KEPT = 3
_MOST = 100_000


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
    **options: Any,
) -> Callable[[Any], Any]:
    """A decorator for a ``@triton.jit`` function.

    Args:
        space: Values by parameter: the kernel's ``constexpr`` parameters, and ``num_warps``, ``num_stages``,
            ``num_ctas``, ``maxnreg``.
        key: Arguments whose change tunes anew.
        evaluations: Configurations that are timed for each key.
        strategy: A name of `cudasched.tune.search.STRATEGIES`.
        seed: Of the strategy.
        constraint: Of a configuration's values: whether it may be tried.
        options: For `triton.autotune`: ``reset_to_zero``, ``restore_value``, ...

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

    def decorate(function: Any) -> Any:
        def prune(configs: Sequence[Any], named_arguments: Mapping[str, Any], **rest: Any) -> list[Any]:
            """Triton calls this before it times what it returns."""
            if len(configs) <= _KEPT:
                return list(configs)
            search = make(strategy, features, seed)
            grid = rest.pop("grid")
            rest.pop("warmup", None)
            scores: dict[int, float] = {}
            for _ in range(min(evaluations, len(configs))):
                places = search.ask(1)
                if not places:
                    break
                (place,) = places

                def call(place: int = place) -> None:
                    chosen = {**rest, **configs[place].all_kwargs()}
                    function[grid](*named_arguments.values(), **chosen)

                try:
                    time = float(library.testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
                except (library.CompilationError, library.runtime.errors.OutOfResources):
                    search.tell(place, None)  # too much shared memory, for one: Triton's own tuner passes over it, too
                    continue
                scores[place] = time
                search.tell(place, time)
            if not scores:
                raise Error(f"none of {min(evaluations, len(configs))} configurations of the kernel ran")
            return [configs[place] for place in sorted(scores, key=scores.__getitem__)[:_KEPT]]

        return library.autotune(
            configs=made,
            key=list(key),
            prune_configs_by={"early_config_prune": prune},
            cache_results=True,
            **options,
        )(function)

    return decorate
