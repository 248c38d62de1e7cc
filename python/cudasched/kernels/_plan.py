"""Ready launches: a kernel's launch for a shape, a type and a GPU, computed once.

`plan` chooses a configuration, compiles it or takes the image from the cache, and loads the module; later calls are a
lookup. A `Plan` launches the kernel: it writes the addresses into the arguments and calls the driver. PyTorch is not
needed here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudasched.errors import ConfigError, DriverError
from cudasched.kernels import _cache, _driver
from cudasched.kernels._catalog import KERNELS, Kernel, Wanted, variant
from cudasched.kernels._choose import Choice, choose, forget, known
from cudasched.kernels._errors import KernelError
from cudasched.tune import compile as compilation
from cudasched.tune.space import Gpu, Launch, Problem, Space, TensorMap, with_includes

__all__ = ["Plan", "plan", "reset"]

_MOST_PLANS = 4096
_GRID_MOST = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Resolved:
    """How a kernel is launched for a shape.

    Attributes:
        space: Of the kernel, for the type.
        choice: The configuration.
        launch: Grid, block, shared memory, macros.
        scalars: Values of scalar arguments by name, as the space has them.
        maps: How TMA sees arrays, by the name of the argument.
    """

    space: Space
    choice: Choice
    launch: Launch
    scalars: dict[str, int | float]
    maps: dict[str, TensorMap]


class Plan:
    """A kernel that is ready to be launched for one shape. Any thread may launch a plan.

    Attributes:
        launch: Grid, block, shared memory.
        choice: The configuration, and where it comes from.
        workspace_bytes: Device memory for the kernel's work, zeros.
    """

    def __init__(self, resolved: Resolved, function: _driver.Function, driver: _driver.Driver) -> None:
        self.launch = resolved.launch
        self.choice = resolved.choice
        self.workspace_bytes = resolved.launch.workspace_bytes
        self._function, self._driver = function, driver
        arguments = resolved.space.arguments
        self._kinds = [
            one.type if one.role == "scalar" else one.role if one.role == "tensor_map" else "pointer"
            for one in arguments
        ]
        self._names = [one.name for one in arguments]
        self._fixed = [
            (place, _given(one.type, resolved.scalars[one.name]))
            for place, one in enumerate(arguments)
            if one.role == "scalar"
        ]
        self._maps = [
            (self._names.index(name), self._names.index(seen.of), seen) for name, seen in resolved.maps.items()
        ]
        self._places: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._local = threading.local()

    def places(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Which arguments those are, for `run`; looked up once.

        Raises:
            KernelError: The kernel has none of that name.
        """
        found = self._places.get(names)
        if found is not None:
            return found
        for name in names:
            if name not in self._names:
                raise KernelError(f"the kernel has no argument {name}; it has {', '.join(self._names)}")
        found = self._places[names] = tuple(self._names.index(name) for name in names)
        return found

    def run(self, stream: int, places: Sequence[int], values: Sequence[int | float]) -> None:
        """Launches the kernel.

        Args:
            stream: The driver's handle.
            places: Of the arguments that are given (`places`): all arrays, and scalars that differ from the space's.
            values: Addresses and numbers.

        Raises:
            DriverError: The driver refuses it, or an earlier launch failed.
        """
        try:
            held, table = self._local.arguments
        except AttributeError:
            held, table = self._local.arguments = _driver.cells(self._kinds)
            for place, fixed in self._fixed:
                held[place].value = fixed
        for place, value in zip(places, values):  # noqa: B905 - of one length, and on the way of a launch
            held[place].value = value
        for place, array, seen in self._maps:
            if held[place].address != held[array].value:
                self._driver.encode(held[place], held[array].value, seen, self._function)
        self._driver.launch(self._function, self.launch, stream, table)


def _given(kind: str, value: int | float) -> int | float:
    return float(value) if "float" in kind else int(value)


def resolve(kernel: Kernel, kind: str, shape: tuple[tuple[str, int], ...], gpu: Gpu, alignment: int) -> Resolved:
    """How a kernel is launched for a shape; nothing is compiled.

    Raises:
        KernelError: The GPU or the shape is none for the kernel.
    """
    refusal = kernel.refusal(gpu)
    if refusal:
        raise KernelError(refusal)
    space = variant(kernel.name, kind)
    try:
        problem = space.problem(gpu, dict(shape))
        for size, value in shape:
            if value > kernel.most.get(size, value):
                raise KernelError(f"{kernel.name} takes {size} up to {kernel.most[size]}, not {value}")
        wanted = Wanted({name: int(value) for name, value in problem.shape.items()}, kind, gpu, alignment)
        choice = choose(kernel, problem, wanted, known(kernel.name, kind, gpu))
        launch = problem.launch(choice.configuration)
        scalars, maps = problem.scalars(), problem.tensor_maps(choice.configuration)
        _check(kernel, problem, launch)
    except ConfigError as error:
        raise KernelError(f"{kernel.name} of {kind}, {_shown(shape)}: {error}") from None
    return Resolved(space, choice, launch, scalars, maps)


def _check(kernel: Kernel, problem: Problem, launch: Launch) -> None:
    """Raises ConfigError where the GPU would refuse the launch."""
    most = problem.gpu.architecture.max_shared_bytes_per_block
    if launch.shared_bytes > most:
        raise ConfigError(f"it needs {launch.shared_bytes} bytes of shared memory, and a block has at most {most}")
    if any(not 1 <= blocks <= limit for blocks, limit in zip(launch.grid, _GRID_MOST, strict=True)):
        raise ConfigError(f"a grid of {launch.grid} blocks")


def _shown(shape: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in shape)


@functools.lru_cache(maxsize=64)
def _texts(source: Path) -> tuple[tuple[str, bytes], ...]:
    """A source with includes."""
    return tuple((path.name, path.read_bytes()) for path in with_includes(source))


@functools.cache
def _compiler() -> tuple[compilation.Compiler, str]:
    chosen = compilation.choose()
    return chosen, compilation.version(chosen)


def image(space: Space, launch: Launch, gpu: Gpu, images: _cache.Images | None = None) -> bytes:
    """The machine code of a configuration, from the cache where it is there.

    Raises:
        KernelError: The space names no source.
        Error: There is no compiler, or the configuration does not compile.
    """
    source = space.source
    if source is None:
        raise KernelError(f"{space.path} names no source")
    compiler, version = _compiler()
    kept = images or _cache.Images(_cache.directory())
    return kept.get(
        _cache.key_of(_texts(source), launch.macros, gpu.target, version),
        lambda: compilation.compile_source(source, launch.macros, gpu.target, compiler).image,
    )


_lock = threading.Lock()
_plans: dict[tuple[object, ...], Plan] = {}
_functions: dict[tuple[object, ...], _driver.Function] = {}
_gpus: dict[int, Gpu] = {}


def plan(name: str, kind: str, shape: tuple[tuple[str, int], ...], ordinal: int, alignment: int = 16) -> Plan:
    """A kernel ready to be launched; made at the first call.

    Args:
        name: Of the kernel (`KERNELS`).
        kind: Of the elements: "float32".
        shape: Names and values.
        ordinal: Of the GPU.
        alignment: The common alignment of the arrays' addresses, at most 16.

    Raises:
        KernelError: The kernel does not take that, or this GPU cannot run it.
        Error: There is no compiler, or the driver refuses it.
    """
    key = (name, kind, shape, ordinal, alignment)
    found = _plans.get(key)
    if found is None:
        with _lock:
            found = _plans.get(key)
            if found is None:
                if len(_plans) >= _MOST_PLANS:
                    _plans.clear()
                found = _plans[key] = _made(name, kind, shape, ordinal, alignment)
    return found


def gpu_of(ordinal: int) -> Gpu:
    """A GPU's properties."""
    if ordinal not in _gpus:
        _gpus[ordinal] = _driver.load().gpu(ordinal)
    return _gpus[ordinal]


def _made(name: str, kind: str, shape: tuple[tuple[str, int], ...], ordinal: int, alignment: int) -> Plan:
    gpu = gpu_of(ordinal)
    resolved = resolve(KERNELS[name], kind, shape, gpu, alignment)
    launch = resolved.launch
    driver = _driver.load()
    key = (resolved.space.kernel, resolved.space.source, launch.macros, launch.shared_bytes, ordinal)
    function = _functions.get(key)
    if function is None:
        try:
            function = driver.load(
                ordinal, image(resolved.space, launch, gpu), resolved.space.kernel, launch.shared_bytes
            )
        except DriverError as error:
            raise DriverError(f"{name} of {kind}, {_shown(shape)}: {error}") from None
        _functions[key] = function
    return Plan(resolved, function, driver)


def reset() -> None:
    """Forgets the chosen configurations: after tuning. Loaded modules stay."""
    with _lock:
        _plans.clear()
        forget()
