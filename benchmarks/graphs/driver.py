"""The graph calls of the CUDA driver, by ctypes: for programs that update their graphs, and for what measures them.

Imports nothing but the standard library. `libcuda.so.1` is whatever the loader finds, as for any program.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

KERNEL_NODE = 0
UPDATE_FAILURE = 910


class DriverCallError(RuntimeError):
    """A driver call failed; says which, with what status."""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class UpdateResult(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = (("result", c_int), ("node", c_void_p), ("from_node", c_void_p))


class Graphs:
    """The calls, checked.

    Raises:
        OSError: There is no libcuda.so.1.
        DriverCallError: From every call that fails.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        """Any driver function that returns a CUresult."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise DriverCallError(f"{name} failed with status {status}")

    def instantiate(self, graph: int, flags: int = 0) -> int:
        """An executable graph."""
        executable = c_void_p()
        self.call("cuGraphInstantiateWithFlags", byref(executable), c_void_p(graph), c_ulonglong(flags))
        return executable.value or 0

    def destroy(self, executable: int) -> None:
        """Ends an executable graph; what is in flight of it runs to its end."""
        self.call("cuGraphExecDestroy", c_void_p(executable))

    def clone(self, graph: int) -> int:
        """A graph like it."""
        made = c_void_p()
        self.call("cuGraphClone", byref(made), c_void_p(graph))
        return made.value or 0

    def destroy_graph(self, graph: int) -> None:
        """Ends a graph; executables made of it stay."""
        self.call("cuGraphDestroy", c_void_p(graph))

    def launch(self, executable: int, stream: int) -> None:
        """Launches it into a CUstream."""
        self.call("cuGraphLaunch", c_void_p(executable), c_void_p(stream))

    def update(self, executable: int, graph: int) -> None:
        """Takes over the parameters of a graph of the same nodes and edges; says what the driver has against it."""
        info = UpdateResult()
        status = self._library.cuGraphExecUpdate_v2(c_void_p(executable), c_void_p(graph), byref(info))
        if status != 0:
            raise DriverCallError(f"cuGraphExecUpdate_v2 failed with status {status}, result {info.result}")

    def nodes(self, graph: int) -> list[int]:
        """In the order in which they were added."""
        count = c_size_t()
        self.call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
        nodes = (c_void_p * count.value)()
        if count.value:
            self.call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
        return [node or 0 for node in nodes]

    def kernel_nodes(self, graph: int) -> list[tuple[int, KernelParams]]:
        """The kernel nodes with what they launch; the parameters are the graph's own, as long as it lives."""
        found = []
        for node in self.nodes(graph):
            node_type = c_int()
            self.call("cuGraphNodeGetType", c_void_p(node), byref(node_type))
            if node_type.value == KERNEL_NODE:
                parameters = KernelParams()
                self.call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(parameters))
                found.append((node, parameters))
        return found

    def set_kernel(self, executable: int, node: int, parameters: KernelParams) -> None:
        """Sets what one kernel node of an executable graph launches from now on."""
        self.call("cuGraphExecKernelNodeSetParams_v2", c_void_p(executable), c_void_p(node), byref(parameters))

    def free_bytes(self) -> int:
        """Of the device's memory."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def synchronize(self) -> None:
        """Waits for the current context."""
        self.call("cuCtxSynchronize")

    def value(self, address: int) -> int:
        """Eight bytes of device memory."""
        word = c_uint64()
        self.call("cuMemcpyDtoH_v2", byref(word), c_uint64(address), c_size_t(8))
        return word.value
