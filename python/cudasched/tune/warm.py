"""Expected costs of configurations before one has run: from earlier runs of other shapes, and from the predictor.

Both give a prior, an array of costs of which only the ratios count; the search finds out how far to trust it.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudasched.advise.occupancy import WARP_THREADS, occupancy
from cudasched.errors import Error
from cudasched.tune._need import need
from cudasched.tune.measurement import Measurement
from cudasched.tune.space import Problem, configuration_key

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

__all__ = ["distance", "from_predictor", "from_runs", "parse_key"]

_LEAST = 8  # results of a shape that say something of it
_MOST = 8  # shapes that are asked
_FAILED = 2.0  # the logarithm of how much worse than the best a configuration without a result counts
_ASSUMED_REGISTERS = 64
_TREES = 100


def parse_key(shape: str) -> dict[str, float]:
    """A shape from the text of `Problem.key`."""
    made = {}
    for name, _, value in (part.partition("=") for part in shape.split(",")):
        with contextlib.suppress(ValueError):  # a database may say anything
            made[name] = float(value)
    return made


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """How far two shapes are apart: the mean of the ratios' logarithms to base 2."""
    apart = [abs(math.log2(one[name] / other[name])) for name in one if other.get(name, 0) > 0 and one[name] > 0]
    return sum(apart) / len(apart) if apart else 0.0


def from_runs(problem: Problem, others: Mapping[str, Mapping[str, Measurement]]) -> NDArray[float64] | None:
    """Costs relative to each shape's best, a row a shape, the nearest first.

    A good configuration for one shape may be bad for another, so a mean over shapes would fit none. The search finds
    the shape that the new one is like. Configurations without a shape's result get an estimate by trees (scikit-learn's
    ExtraTrees) from the others.

    Args:
        problem: The problem to tune.
        others: Measurements of the same kernel by shape (`Database.others`).

    Returns:
        A cost for each configuration in each row, of up to eight shapes; None: too little is known.
    """
    np = need("numpy", "the tuner")
    place = {configuration_key(one): i for i, one in enumerate(problem.configurations)}
    here = {k: float(v) for k, v in problem.shape.items()}
    rows: list[NDArray[float64]] = []
    for _, measured in sorted(others.items(), key=lambda one: (distance(here, parse_key(one[0])), one[0])):
        if len(rows) == _MOST:
            break
        known = {place[key]: made.time_us for key, made in measured.items() if key in place}
        times = [time for time in known.values() if time is not None]
        if len(times) < _LEAST:
            continue
        best = min(times)
        places = np.array(sorted(known))
        costs = np.array([_FAILED if (time := known[i]) is None else math.log(time / best) for i in places])
        expected = np.zeros(len(place))
        if len(places) < len(place):
            ensemble = need("sklearn.ensemble", "a warm start from a part of a space")
            trees = ensemble.ExtraTreesRegressor(_TREES, random_state=0, min_samples_leaf=1)
            expected = trees.fit(problem.features[places], costs).predict(problem.features)
        expected[places] = costs
        rows.append(np.exp(expected))
    return np.array(rows) if rows else None


def from_predictor(problem: Problem, model: Any = None) -> NDArray[float64] | None:
    """Times that the trees of `cudasched.predictor` expect, us.

    A launch's shape is known before the compilation, but for the registers. Each configuration is taken to have 64 a
    thread, or fewer where the block would not fit otherwise.

    Args:
        problem: The problem to tune.
        model: A `cudasched.predictor.Model`; None: the one that ships for the GPU.

    Returns:
        A cost for each configuration; None where there is no model, or no predictor in this installation.
    """
    try:
        from cudasched import hook, predictor

        hook.load_core()
        from cudasched import _core

        chosen = model or predictor.load(architecture=f"sm_{problem.gpu.capability.replace('.', '')}")
        rows = _core.launch_features(
            _columns(problem), problem.gpu.sms, problem.gpu.architecture.max_warps_per_sm * WARP_THREADS
        )
        made: NDArray[float64] = chosen.predict(rows)
    except (Error, ImportError, ArithmeticError, TypeError, ValueError):
        return None
    return made / 1e3


def _columns(problem: Problem) -> dict[str, Any]:
    """The arguments of `_core.launch_features`, a row for each configuration."""
    np = need("numpy", "the tuner")
    architecture = problem.gpu.architecture
    launches = [problem.launch(one) for one in problem.configurations]
    count = len(launches)
    registers, resident = [], []
    for launch in launches:
        fits = min(_ASSUMED_REGISTERS, 65536 // max(launch.threads, 1) // 8 * 8)
        registers.append(fits)
        resident.append(occupancy(architecture, launch.threads, fits, launch.shared_bytes).blocks_per_sm)
    columns: dict[str, Any] = {
        "dynamic_shared_bytes": np.array([one.shared_bytes for one in launches]),
        "static_shared_bytes": np.zeros(count),
        "local_bytes": np.zeros(count),
        "registers": np.array(registers),
        "max_threads": np.array([one.threads for one in launches]),
        "blocks_per_sm": np.array(resident),
        "function": np.zeros(count, np.int32),
        "functions": [problem.space.kernel],
    }
    for place, axis in enumerate("xyz"):
        columns[f"grid_{axis}"] = np.array([one.grid[place] for one in launches])
        columns[f"block_{axis}"] = np.array([one.block[place] for one in launches])
        columns[f"cluster_{axis}"] = np.ones(count)
    words, pointers = _words(problem)
    columns["parameter_bytes"] = np.full(count, 4 * len(words))
    columns["words"] = np.tile(np.array(words, np.uint32), count)
    columns["word_offsets"] = np.arange(count + 1, dtype=np.int64) * len(words)
    columns["pointers"] = np.tile(np.array(pointers, np.uint16), count)
    columns["pointer_offsets"] = np.arange(count + 1, dtype=np.int64) * len(pointers)
    return columns


def _words(problem: Problem) -> tuple[list[int], list[int]]:
    """The parameter block in words of 4 bytes, and which of them are pointers."""
    scalars = problem.scalars()
    block = b""
    pointers: list[int] = []
    forms = {"float32": "f", "float64": "d", "int8": "b", "uint8": "B", "int32": "i", "uint32": "I", "int64": "q"}
    for one in problem.space.arguments:
        if one.role == "tensor_map":  # 128 bytes at a multiple of 64, of addresses and the space's own sizes
            block += b"\0" * (-len(block) % 64)
            pointers += range(len(block) // 4, len(block) // 4 + 32)
            block += b"\0" * 128
        elif one.role != "scalar":
            block += b"\0" * (-len(block) % 8)
            pointers += [len(block) // 4, len(block) // 4 + 1]
            block += b"\0" * 8
        elif one.type in forms:
            value = scalars[one.name]
            packed = struct.pack(forms[one.type], value if "float" in one.type else int(value))
            block += b"\0" * (-len(block) % len(packed)) + packed
    block += b"\0" * (-len(block) % 4)
    return list(struct.unpack(f"{len(block) // 4}I", block)), pointers
