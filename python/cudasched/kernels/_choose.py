"""Which configuration a kernel is launched with: the best that is known on this GPU, or one that works.

In order: the tuner's result for the shape, cudasched's shipped one, either's result for the nearest shape, and the
kernel's default. A configuration of another shape is taken only where the space allows that one for this shape.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cudasched.errors import ConfigError, Error
from cudasched.kernels._catalog import KERNELS, Kernel, Wanted, sources, variant
from cudasched.tune.database import Database, Key, default_path
from cudasched.tune.space import Configuration, Gpu, Problem, Space
from cudasched.tune.warm import parse_key

__all__ = ["SHIPPED", "Choice", "Known", "Origin", "choose", "fastest", "forget", "shipped_entry"]

Origin = Literal["database", "shipped", "nearest", "default"]
SHIPPED = "best.json"
_LEAST_SAMPLES = 3
#: How far another shape may be, in doublings of all its sizes together.
_NEAR = 4.0


@dataclass(frozen=True)
class Choice:
    """A configuration and its origin.

    Attributes:
        configuration: Values of the parameters.
        origin: "database" or "shipped" for this shape, "nearest" for another one, or "default".
    """

    configuration: Configuration
    origin: Origin


@dataclass(frozen=True)
class Known:
    """The best configurations of a kernel on a GPU by shape, as `Problem.key` writes it."""

    database: Mapping[str, Configuration]
    shipped: Mapping[str, Configuration]


def _of_database(space: Space, gpu: Gpu, path: Path) -> dict[str, Configuration]:
    """The best configuration of each shape that the tuner has measured; none where the file cannot be read."""
    if space.source is None or not path.exists():
        return {}
    best: dict[str, Configuration] = {}
    try:
        with Database(path) as database:
            fingerprint = space.fingerprint(space.source)
            for key in database.keys(space.kernel):
                if (key.gpu, key.fingerprint) == (gpu.name, fingerprint):
                    found = fastest(database, key)
                    if found is not None:
                        best[key.shape] = found[0]
    except (Error, OSError, ValueError):
        return {}
    return best


def fastest(database: Database, key: Key) -> tuple[Configuration, float] | None:
    """The fastest configuration that was measured more than a few times, and its time, us."""
    timed = [
        (made.time_us, configuration)
        for configuration, made in database.get(key).items()
        if made.status == "ok" and made.time_us is not None and len(made.samples_us) >= _LEAST_SAMPLES
    ]
    if not timed:
        return None
    time_us, configuration = min(timed)
    return dict(json.loads(configuration)), time_us


def _of_shipment(space: Space, kernel: Kernel, kind: str, gpu: Gpu) -> dict[str, Configuration]:
    """The configurations that cudasched ships for the GPU, or for one of the same compute capability."""
    same: dict[str, Configuration] = {}
    alike: dict[str, Configuration] = {}
    for one in _shipped(sources() / SHIPPED):
        if (one.get("kernel"), one.get("type")) != (kernel.name, kind):
            continue
        configuration = one.get("configuration", {})
        if set(configuration) != set(space.parameters):
            continue  # of another version of the kernel
        shape = ",".join(f"{name}={value}" for name, value in sorted(one.get("shape", {}).items()))
        if one.get("gpu") == gpu.name:
            same[shape] = configuration
        elif one.get("capability") == gpu.capability:
            alike[shape] = configuration
    return {**alike, **same}


@functools.cache
def _shipped(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data["best"] if data["version"] == 1 else []
        return tuple(one for one in found if isinstance(one, dict))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


@functools.lru_cache(maxsize=256)
def known(kernel_name: str, kind: str, gpu: Gpu) -> Known:
    """The known configurations of a kernel; looked up once in a process (`forget`)."""
    space = variant(kernel_name, kind)
    try:
        database = default_path()
    except ConfigError:  # no home
        database = Path("/nonexistent")
    return Known(
        database=_of_database(space, gpu, database),
        shipped=_of_shipment(space, KERNELS[kernel_name], kind, gpu),
    )


def forget() -> None:
    """Forgets the known configurations, so that the next call reads them anew: after tuning."""
    known.cache_clear()
    _shipped.cache_clear()


def _distance(shape: Mapping[str, float], other: Mapping[str, float]) -> float:
    if set(shape) != set(other):
        return math.inf
    if any((shape[name] == 0) != (other[name] == 0) or not other[name] >= 0 for name in shape):
        return math.inf  # a value that is on or off, or was damaged
    return sum(abs(math.log2(shape[name] / other[name])) for name in shape if shape[name])


def _fits(kernel: Kernel, problem: Problem, configuration: Configuration, wanted: Wanted) -> bool:
    """Whether the space allows the configuration for this shape on this GPU, and the arrays' alignment does."""
    try:
        return not problem.refusal(configuration) and kernel.fits(wanted, configuration)
    except ConfigError:
        return False


def choose(kernel: Kernel, problem: Problem, wanted: Wanted, found: Known) -> Choice:
    """The configuration of a problem.

    Args:
        kernel: The kernel.
        problem: Its space with the shape and the GPU.
        wanted: The same, with type and alignment.
        found: The known configurations (`known`).
    """
    key = problem.key()
    exact: tuple[tuple[Origin, Mapping[str, Configuration]], ...] = (
        ("database", found.database),
        ("shipped", found.shipped),
    )
    for origin, best in exact:
        if key in best and _fits(kernel, problem, best[key], wanted):
            return Choice(best[key], origin)
    shape = {name: float(value) for name, value in problem.shape.items()}
    near = sorted(
        (_distance(shape, parse_key(other)), place, other)
        for place, (_, best) in enumerate(exact)
        for other in best
        if other != key
    )
    for distance, place, other in near:
        if distance > _NEAR:
            break
        configuration = exact[place][1][other]
        if _fits(kernel, problem, configuration, wanted):
            return Choice(configuration, "nearest")
    return Choice(kernel.default(wanted), "default")


def shipped_entry(kernel: str, kind: str, gpu: Gpu, shape: str, configuration: str, time_us: float) -> dict[str, Any]:
    """An entry of the file that is shipped: see `benchmarks.kernels ship`."""
    return {
        "gpu": gpu.name,
        "capability": gpu.capability,
        "kernel": kernel,
        "type": kind,
        "shape": {name: int(value) for name, value in parse_key(shape).items()},
        "configuration": json.loads(configuration),
        "time_us": round(time_us, 3),
    }
