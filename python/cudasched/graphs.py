"""CUDA graphs of a program's own: captured or built node by node, replayed, updated, with conditional nodes.

    with graphs.capture(stream) as captured:
        launch_my_kernels(stream)
    replay = captured.graph.instantiate()
    for _ in range(1000):
        replay.launch(stream)

A context is current to the calling thread, by PyTorch, CuPy or cuda-bindings. Streams are PyTorch's, CuPy's,
cuda-bindings', or addresses. Memory and modules that a graph uses must outlive the graph. Objects are used by one
thread at a time. docs/device.md has the whole; include/cudasched/graphs.hpp is the same for C++.

Best-effort graphs with conditional nodes or for launches from the device are never cut into slices.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched import hook
from cudasched.errors import ConfigError, DriverError

if TYPE_CHECKING:
    from cudasched import _core

__all__ = [
    "Builder",
    "Captured",
    "Collectives",
    "Conditional",
    "DriverError",
    "Executable",
    "Graph",
    "LinkedModule",
    "Pool",
    "UnsupportedError",
    "Update",
    "Use",
    "capture",
    "driver_version",
    "enable_peer_access",
    "plan_memory",
]


class UnsupportedError(DriverError):
    """This driver is too old, or a library is missing; the message says which version has it."""


def _module() -> Any:
    hook.load_core()
    from cudasched import _core

    return _core


def driver_version() -> int:
    """The driver's CUDA version, such as 13000.

    Raises:
        UnsupportedError: There is no driver, or one from before CUDA 11.4.
    """
    return int(_module().Graph.driver_version())


def _handle(thing: Any) -> int:
    """The address behind a stream, a kernel or a context of any library's."""
    if thing is None:
        return 0
    for name in ("cuda_stream", "ptr"):  # PyTorch's, CuPy's
        value = getattr(thing, name, None)
        if isinstance(value, int):
            return value
    return int(thing)


def _sizes(given: int | Sequence[int], what: str) -> tuple[int, int, int]:
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ConfigError(f"{what} = {given!r}: one to three sizes of at least 1")
    return (*sizes, *(1,) * (3 - len(sizes)))  # type: ignore[return-value]


def _parameter(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if type(value).__module__ == "numpy":  # float64 is a float, too, and bytes() takes an integer for a length
        return bytes(memoryview(value))
    if isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"argument {value!r}: give its type, as ctypes.c_uint32({value!r}), a numpy scalar, or its bytes"
        )
    return bytes(memoryview(value).cast("B")) if isinstance(value, ctypes._SimpleCData) else bytes(value)


@dataclass(frozen=True)
class Conditional:
    """A conditional node.

    Attributes:
        node: The node, for `after` of later ones.
        bodies: The graphs that the node may run and owns.
    """

    node: int
    bodies: tuple[Builder, ...]


class Builder:
    """A graph, or the body of a conditional node, that takes nodes. A node runs after those named `after`."""

    def __init__(self, native: _core.GraphBuilder, owner: Builder | None = None) -> None:
        self._native = native
        self._owner = owner  # of a body: the graph that it is a part of lives as long

    @property
    def handle(self) -> int:
        """The CUgraph."""
        return self._native.handle

    @property
    def node_count(self) -> int:
        """The number of nodes, less those of bodies and children."""
        return self._native.node_count

    def add_kernel(
        self,
        function: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any] = (),
        *,
        shared_bytes: int = 0,
        after: Sequence[int] = (),
    ) -> int:
        """Adds a launch of a CUfunction; arguments are ctypes objects, numpy scalars or bytes. Returns the node.

        Raises:
            ValueError: The kernel has more parameters, or of other sizes (where the driver says so: CUDA 12.4).
        """
        given = [_parameter(value) for value in arguments]
        return self._native.add_kernel(
            _handle(function), _sizes(grid, "grid"), _sizes(block, "block"), shared_bytes, given, list(after)
        )

    def add_copy(self, to: int, source: int, nbytes: int, *, after: Sequence[int] = ()) -> int:
        """Adds a copy; both are device or pinned memory, of any GPU that the other reaches. Returns the node."""
        return self._native.add_copy(int(to), int(source), nbytes, list(after))

    def add_fill(self, to: int, value: int, nbytes: int, *, after: Sequence[int] = ()) -> int:
        """Adds a fill with one byte. Returns the node."""
        return self._native.add_fill(int(to), value, nbytes, list(after))

    def add_graph(self, child: Builder, *, after: Sequence[int] = ()) -> int:
        """Adds a copy of a graph as one node. Returns the node."""
        return self._native.add_graph(child._native, list(after))

    def add_empty(self, *, after: Sequence[int] = ()) -> int:
        """Adds a node that only orders. Returns the node."""
        return self._native.add_empty(list(after))

    def add_if(self, condition: int, *, with_else: bool = False, after: Sequence[int] = ()) -> Conditional:
        """Adds a node that runs its first body where the condition is not 0, else its second, if any.

        Raises:
            UnsupportedError: The driver is from before CUDA 12.4, or before 12.8 with an else.
        """
        return self._conditional(self._native.add_if(condition, with_else, list(after)))

    def add_while(self, condition: int, *, after: Sequence[int] = ()) -> Conditional:
        """Adds a node that runs its body as long as the condition is not 0, checked before each run.

        Raises:
            UnsupportedError: The driver is from before CUDA 12.4.
        """
        return self._conditional(self._native.add_while(condition, list(after)))

    def add_switch(self, condition: int, bodies: int, *, after: Sequence[int] = ()) -> Conditional:
        """Adds a node that runs the body whose number the condition is, none where there are fewer.

        Raises:
            UnsupportedError: The driver is from before CUDA 12.8.
        """
        return self._conditional(self._native.add_switch(condition, bodies, list(after)))

    def _conditional(self, made: tuple[int, list[int]]) -> Conditional:
        node, bodies = made
        return Conditional(node, tuple(Builder(_module().GraphBuilder(body), self) for body in bodies))


class Graph(Builder):
    """A graph: captured, or empty at first."""

    def __init__(self, native: _core.Graph | None = None) -> None:
        self._graph: _core.Graph = native if native is not None else _module().Graph()
        super().__init__(self._graph)

    def condition(self, start: int | None = None) -> int:
        """A value for one conditional node of this graph or of a body in it, which kernels set.

        Args:
            start: The value at each launch's start; None: the value persists.

        Returns:
            Its handle, an 8-byte argument of kernels (cudaGraphSetConditional).

        Raises:
            UnsupportedError: The driver is from before CUDA 12.4.
        """
        return self._graph.condition(start)

    def instantiate(self, *, device_launch: bool = False) -> Executable:
        """An executable graph.

        Args:
            device_launch: Kernels of other graphs may launch the graph, too. `upload` it before.
        """
        return Executable(_module().GraphExecutable(self._graph, device_launch), self)


@dataclass(frozen=True)
class Update:
    """The result of an update.

    Attributes:
        done: The graph fitted. Else nothing has changed.
        why: The driver's CUgraphExecUpdateResult.
        node: Of the new graph, that did not fit; 0: none in particular.
    """

    done: bool
    why: int
    node: int


class Executable:
    """A graph that can be launched, again and again."""

    def __init__(self, native: _core.GraphExecutable, graph: Graph) -> None:
        self._native = native
        self._made_of = graph  # its nodes name this one's nodes in `set_kernel` and `set_enabled`

    @property
    def handle(self) -> int:
        """The CUgraphExec, which a kernel also passes to cudaGraphLaunch."""
        return self._native.handle

    def launch(self, stream: Any = None) -> None:
        """Runs the graph on a stream."""
        self._native.launch(_handle(stream))

    def upload(self, stream: Any = None) -> None:
        """Moves the data of a launch to the device ahead of the launch."""
        self._native.upload(_handle(stream))

    def update(self, graph: Graph) -> Update:
        """Takes over the parameters of a graph with the same nodes and edges."""
        return Update(*self._native.update(graph._graph))

    def set_kernel(
        self,
        node: int,
        function: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any] = (),
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Changes one kernel node; the node is of this executable's source graph.

        Raises:
            ValueError: The kernel has more parameters, or of other sizes (where the driver says so: CUDA 12.4).
        """
        given = [_parameter(value) for value in arguments]
        self._native.set_kernel(
            node, _handle(function), _sizes(grid, "grid"), _sizes(block, "block"), shared_bytes, given
        )

    def set_enabled(self, node: int, enabled: bool) -> None:
        """Switches a kernel, copy or fill off or on."""
        self._native.set_enabled(node, enabled)


@dataclass
class Captured:
    """The result of a capture.

    Attributes:
        made: The graph, once the capture has ended; None before, and for captures into a graph.
    """

    made: Graph | None = field(default=None)

    @property
    def graph(self) -> Graph:
        """The graph.

        Raises:
            ConfigError: The capture has not ended, or went into a graph that is there already.
        """
        if self.made is None:
            raise ConfigError("this capture has not ended, or it went into a graph of yours")
        return self.made


@contextlib.contextmanager
def capture(stream: Any, into: Builder | None = None, after: Sequence[int] = ()) -> Iterator[Captured]:
    """Launches on a stream in this block become a graph and do not run.

    Args:
        stream: Not the default one.
        into: A graph, or a body of a conditional node, that it is added to (CUDA 12.3).
        after: Nodes of that graph which come before.

    Raises:
        DriverError: The driver refuses, or something was called that may not be captured.
        UnsupportedError: The driver is from before CUDA 12.3, for captures into a graph.
    """
    native = _module().GraphCapture(_handle(stream), into._native if into is not None else None, list(after))
    captured = Captured()
    try:
        yield captured
    except BaseException:
        with contextlib.suppress(DriverError):  # the capture is over either way, and the program's own error counts
            native.close()
        raise
    if into is not None:
        native.close()
    else:
        captured.made = Graph(native.finish())


@dataclass(frozen=True)
class Use:
    """Memory that captured work uses, from the step of the first use to that of the last.

    Attributes:
        nbytes: How much.
        first_step: Steps are the program's own count of work that runs one after another, over all graphs of a pool.
        last_step: Two uses whose steps do not overlap may have the same memory.
    """

    nbytes: int
    first_step: int
    last_step: int


def plan_memory(uses: Sequence[Use], alignment: int = 256) -> tuple[list[int], int]:
    """Where each use has its place in a pool, and how large that is: no two overlap in time and in memory.

    Raises:
        ValueError: A use ends before it begins, the alignment is no power of two, or the sum of all sizes overflows.
    """
    offsets, nbytes = _module().GraphPool.plan([(use.nbytes, use.first_step, use.last_step) for use in uses], alignment)
    return list(offsets), int(nbytes)


class Pool:
    """One allocation with a fixed place for each use, by `plan_memory`; must outlive the graphs that use it."""

    def __init__(self, uses: Sequence[Use], alignment: int = 256) -> None:
        given = [(use.nbytes, use.first_step, use.last_step) for use in uses]
        self._native: _core.GraphPool = _module().GraphPool(given, alignment)

    @property
    def nbytes(self) -> int:
        """The pool's size."""
        return self._native.nbytes

    def address(self, use: int) -> int:
        """The device address of a use, by its number."""
        return self._native.address(use)


def _device_runtime() -> str:
    """The library that is found, or that of CUDA's wheels; empty: none."""
    found = str(_module().LinkedModule.find_device_runtime())
    wheels = (Path(one or ".") / "nvidia" / "cu13" / "lib" / "libcudadevrt.a" for one in sys.path)
    return found or next((str(path) for path in wheels if path.is_file()), "")


class LinkedModule:
    """Relocatable images, linked with CUDA's device runtime: kernels that launch kernels or graphs, or set conditions.

    Compile by NVRTC with `--relocatable-device-code=true`, which knows those functions without a header, or by
    `nvcc -rdc=true -cubin`.
    """

    def __init__(self, images: Sequence[bytes], device_runtime: str | Path | None = None) -> None:
        """Links and loads the images.

        Args:
            images: Machine code or PTX.
            device_runtime: libcudadevrt.a; None: that of CUDA_HOME, CUDA_PATH, /usr/local/cuda, the toolkit of the nvcc
                on the PATH, or of wheels.

        Raises:
            UnsupportedError: No libcudadevrt.a is found, or the driver does not link.
            DriverError: They do not link; the message is the linker's log.
        """
        runtime = str(device_runtime) if device_runtime is not None else _device_runtime()
        self._native: _core.LinkedModule = _module().LinkedModule(list(images), runtime)

    @property
    def handle(self) -> int:
        """The CUmodule."""
        return self._native.handle

    def function(self, name: str) -> int:
        """The CUfunction of a kernel."""
        return self._native.function(name)


def enable_peer_access(context: Any, peer: Any) -> None:
    """Lets work in one context use memory of another GPU's; both are CUcontexts.

    Raises:
        UnsupportedError: The GPUs cannot reach each other.
    """
    _module().Collectives.enable_peer_access(_handle(context), _handle(peer))


class Collectives:
    """A communicator of NCCL for each of several GPUs of this process; sums can be captured into a graph a GPU."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._native: _core.Collectives = _module().Collectives(list(devices))

    def sum(self, data: Sequence[int], count: int, streams: Sequence[Any]) -> None:
        """Each array of `count` floats, one a GPU, becomes the sum of all; one stream a GPU.

        Raises:
            DriverError: A context is gone, and no sum was begun; or NCCL refuses.
        """
        self._native.sum([int(one) for one in data], count, [_handle(stream) for stream in streams])
