"""The demo's workloads on the simulated driver: bursts and loops of kernels, launched through the driver API.

Kernels do nothing but take time, so a load is a list of durations. The driver is the `libcuda.so.1` that the loader
finds, as for any program: the simulated one itself, or the hook in front of it. The same few calls tell the name of a
real GPU. Loads answer to the `Workload` protocol of client.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_char_p, c_float, c_int, c_uint, c_void_p
from itertools import accumulate

IMAGE_HEADER = "cudasched-sim 1\n"
#: 132 SMs of four blocks each: a best-effort kernel fills the device once, a latency kernel a quarter of it.
FULL_GRID, QUARTER_GRID = 528, 132
HIGH_PRIORITY = -5
CU_STREAM_NON_BLOCKING = 1
CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
#: As often as this a load synchronises by itself; requests, which are shorter, are waited for one by one.
LAUNCHES_PER_SYNCHRONIZE = 50

#: Of a request to `gpt_decode`; fewer than on a GPU, because time passes slowly here.
DECODED_TOKENS = 4

#: Durations in us of the kernels of one request or one step. Lengths and their spread follow the loads of the same name
#: on an H200.
LATENCY_LOADS: dict[str, tuple[int, ...]] = {
    "bert_graph": (20,) * 24,
    "bert_eager": (20,) * 24,
    "resnet50_b4": (25,) * 30,
    "gpt_decode": (15,) * 24 + (40,),
    "mlp": (20,) * 3,
}
BEST_EFFORT_LOADS: dict[str, tuple[int, ...]] = {
    "transformer": (63, 40, 158, 63, 201, 20, 130, 63, 63, 158),
    "resnet50": (35, 12, 155, 20, 35, 60, 12, 459, 35, 90),
    "gemm": (1400,),
    "elementwise": (100,) * 10,
    "bert_training": (6,) * 40 + (20,) * 20,
}


class DriverCallError(RuntimeError):
    """A driver call failed; the message has the call and its status."""


class Driver:
    """The few driver calls that the loads need, checked. Any thread, after `make_current`.

    Raises:
        OSError: There is no libcuda.so.1.
        DriverCallError: A call failed.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device = c_int()
        self._call("cuDeviceGet", byref(self._device), 0)
        self._context = c_void_p()

    def device_name(self) -> str:
        """Name of the first device."""
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, self._device)
        return name.value.decode()

    def version(self) -> int:
        """The driver's CUDA version, 13000 for 13.0."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def make_current(self) -> None:
        """Makes the primary context current on this thread, and creates it first where needed."""
        if not self._context:
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)

    def functions(self, durations_us: Sequence[int], blocks: int) -> dict[int, c_void_p]:
        """One kernel for each duration, from one module of the simulated driver's own image format."""
        lines = [
            f"kernel take_{blocks}_{us} params=8 regs=32 shared=0 threads_max=1024 block_us={us} blocks_per_sm=4\n"
            for us in sorted(set(durations_us))
        ]
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), c_char_p((IMAGE_HEADER + "".join(lines)).encode()))
        functions = {}
        for us in set(durations_us):
            functions[us] = c_void_p()
            self._call("cuModuleGetFunction", byref(functions[us]), module, f"take_{blocks}_{us}".encode())
        return functions

    def stream(self, priority: int) -> c_void_p:
        """A new non-blocking stream."""
        stream = c_void_p()
        self._call("cuStreamCreateWithPriority", byref(stream), CU_STREAM_NON_BLOCKING, priority)
        return stream

    def launch(self, function: c_void_p, blocks: int, stream: c_void_p) -> None:
        """Launches `blocks` blocks of 256 threads."""
        argument = ctypes.c_uint64(0)
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        self._call("cuLaunchKernel", function, blocks, 1, 1, 256, 1, 1, 0, stream, arguments, None)

    def synchronize(self, stream: c_void_p) -> None:
        """Waits for the stream."""
        self._call("cuStreamSynchronize", stream)

    def event(self) -> c_void_p:
        """A new event that keeps the time."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), 0)
        return event

    def record(self, event: c_void_p, stream: c_void_p) -> None:
        """Records the event on the stream."""
        self._call("cuEventRecord", event, stream)

    def between_ms(self, start: c_void_p, end: c_void_p) -> float:
        """From one event to another, both done, ms of the device."""
        taken_ms = c_float()
        self._call("cuEventElapsedTime", byref(taken_ms), start, end)
        return taken_ms.value

    def begin_capture(self, stream: c_void_p) -> None:
        """Starts to record launches on the stream instead of running them."""
        self._call("cuStreamBeginCapture_v2", stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: c_void_p) -> c_void_p:
        """Ends the recording; returns a graph that is ready to launch."""
        graph, executable = c_void_p(), c_void_p()
        self._call("cuStreamEndCapture", stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0))
        return executable

    def launch_graph(self, graph: c_void_p, stream: c_void_p) -> None:
        """Launches an instantiated graph."""
        self._call("cuGraphLaunch", graph, stream)

    def _call(self, name: str, *arguments: object) -> None:
        converted = [c_uint(argument) if isinstance(argument, int) else argument for argument in arguments]
        status = getattr(self._library, name)(*converted)
        if status != 0:
            raise DriverCallError(f"{name} failed with status {status}")


class SimulatedWorkload:
    """Launches its kernels in order, again and again; a request of several steps waits for each before the next."""

    warm_up_steps = 3

    def __init__(self, durations_us: tuple[int, ...], blocks: int, priority: int, graph: bool, steps: int = 1) -> None:
        self._driver = Driver()
        self._driver.make_current()
        self._durations_us, self._blocks, self._steps = durations_us, blocks, steps
        self._functions = self._driver.functions(durations_us, blocks)
        self._stream = self._driver.stream(priority)
        self._since_synchronize = 0
        self._events = self._driver.event(), self._driver.event()
        self._graph: c_void_p | None = None
        if graph:
            self._driver.begin_capture(self._stream)
            self._launch_all()
            self._graph = self._driver.end_capture(self._stream)

    @property
    def stream(self) -> int:
        """The CUstream of the launches."""
        return self._stream.value or 0

    def context(self) -> AbstractContextManager[None]:
        """Makes the context current on the calling thread."""
        self._driver.make_current()
        return nullcontext()

    def step(self) -> None:
        """Launches one request or one step, whose last part may still be on its way."""
        for number in range(self._steps):
            if number:
                self.synchronize()
            if self._graph:
                self._driver.launch_graph(self._graph, self._stream)
            else:
                self._launch_all()

    def timed_step(self) -> Callable[[], float]:
        """One request between two events."""
        start, end = self._events
        self._driver.record(start, self._stream)
        self.step()
        self._driver.record(end, self._stream)
        return lambda: self._driver.between_ms(start, end)

    def synchronize(self) -> None:
        """Waits for everything launched."""
        self._driver.synchronize(self._stream)
        self._since_synchronize = 0

    def busy_spans(self) -> tuple[list[tuple[int, int]], int]:
        """The set times of one request's kernels, in ns, one after the other, and the steps: one."""
        lengths = [1000 * us for us in self._durations_us] * self._steps
        return list(zip(accumulate(lengths, initial=0), lengths, strict=False)), 1

    def _launch_all(self) -> None:
        for us in self._durations_us:
            self._driver.launch(self._functions[us], self._blocks, self._stream)
            self._since_synchronize += 1
            if self._since_synchronize >= LAUNCHES_PER_SYNCHRONIZE:
                self.synchronize()


def latency_workload(name: str, own_stream: bool = False) -> SimulatedWorkload:
    """Builds a latency load, a graph where the name says so; `own_stream`: with high priority.

    Raises:
        ValueError: No such load.
    """
    if name not in LATENCY_LOADS:
        raise ValueError(f"unknown latency load {name!r}: one of {', '.join(LATENCY_LOADS)}")
    graph = name in ("bert_graph", "gpt_decode", "mlp")
    steps = DECODED_TOKENS if name == "gpt_decode" else 1
    return SimulatedWorkload(LATENCY_LOADS[name], QUARTER_GRID, HIGH_PRIORITY if own_stream else 0, graph, steps)


def best_effort_workload(name: str) -> SimulatedWorkload:
    """Builds a best-effort load, always on a stream of its own and of default priority.

    Raises:
        ValueError: No such load.
    """
    if name not in BEST_EFFORT_LOADS:
        raise ValueError(f"unknown best-effort load {name!r}: one of {', '.join(BEST_EFFORT_LOADS)}")
    return SimulatedWorkload(BEST_EFFORT_LOADS[name], FULL_GRID, 0, graph=False)
