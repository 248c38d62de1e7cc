"""Kernels that write what they are into a log on the simulated device, and threads that do random things with them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable

from program import CAPTURE_THREAD_LOCAL, Gpu

IMAGE = b"cudasched-sim 1\nkernel note params=8,8,8,4 block_us=param:3 effect=append\n"
NOT_READY = 600
ROOM = 16384


class Log:
    """Device memory that kernels append their values to, in the order in which they ran. Of the device of `gpu`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._function, module = ctypes.c_void_p(), ctypes.c_void_p()
        gpu.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(IMAGE))
        gpu.call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"note"))
        self._cursor, self.values = self.allocate(8), self.allocate(8 * ROOM)

    def allocate(self, size_bytes: int) -> ctypes.c_uint64:
        """Memory that is all zeros."""
        address = ctypes.c_uint64()
        self.gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self.gpu.call("cuMemsetD32_v2", address, 0, ctypes.c_size_t(size_bytes // 4))
        return address

    def free(self) -> None:
        for address in (self._cursor, self.values):
            self.gpu.call("cuMemFree_v2", address)

    def note(self, *values: int, stream: int = 0, us: int = 1, grid: int = 1, keep_gil: bool = False) -> None:
        """A launch a value, each of `us` simulated microseconds."""
        for value in values:
            words = (self.values, self._cursor, ctypes.c_uint64(value), ctypes.c_uint32(us))
            parameters = (ctypes.c_void_p * 4)(*[ctypes.addressof(word) for word in words])
            where = (grid, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream))
            self.gpu.call("cuLaunchKernel", self._function, *where, parameters, None, keep_gil=keep_gil)

    def copied(self, address: ctypes.c_uint64, count: int) -> list[int]:
        """Words of 8 bytes, when all that was launched has run."""
        self.gpu.synchronize()
        words = (ctypes.c_uint64 * count)()
        self.gpu.call("cuMemcpyDtoH_v2", words, address, ctypes.c_size_t(ctypes.sizeof(words)))
        return list(words)

    def read(self) -> list[int]:
        (count,) = self.copied(self._cursor, 1)
        return self.copied(self.values, count) if count else []

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.gpu.call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def record(self, event: ctypes.c_void_p, stream: int) -> None:
        self.gpu.call("cuEventRecord", event, ctypes.c_void_p(stream))

    def wait(self, stream: int, event: ctypes.c_void_p) -> None:
        self.gpu.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)

    def ready(self, function: str, handle: ctypes.c_void_p) -> bool:
        """What cuStreamQuery or cuEventQuery says."""
        try:
            self.gpu.call(function, handle)
        except RuntimeError as error:
            if f"status {NOT_READY}" not in str(error):
                raise
            return False
        return True

    def across(self, values: Iterable[int], streams: list[int]) -> None:
        """A launch a value, each on the next stream and ordered behind the last one by an event."""
        event = self.event()
        self.record(event, 0)
        for turn, value in enumerate(values):
            stream = streams[turn % len(streams)]
            self.wait(stream, event)
            self.note(value, stream=stream)
            self.record(event, stream)

    def capture(self, values: Iterable[int], stream: int) -> ctypes.c_void_p:
        """A graph that notes the values."""
        graph = ctypes.c_void_p()
        self.gpu.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), CAPTURE_THREAD_LOCAL)
        self.note(*values, stream=stream)
        self.gpu.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return graph

    def graph(self, values: Iterable[int], stream: int) -> int:
        """An executable graph that notes the values."""
        graph, executable = self.capture(values, stream), ctypes.c_void_p()
        self.gpu.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.gpu.call("cuGraphDestroy", graph)
        assert executable.value
        return executable.value


class Chance:
    """A thread's work, decided by a seed: what it leaves in memory depends on nothing else."""

    STREAMS = 3

    def __init__(self, gpu: Gpu, seed: int, steps: int) -> None:
        self._log, self._random, self._steps = Log(gpu), random.Random(seed), steps
        self._streams = [gpu.stream() for _ in range(self.STREAMS)]
        self._events = [self._log.event() for _ in range(self.STREAMS)]
        self._last, self._next_value = 0, 0
        self._mirror = self._log.allocate(8 * ROOM)
        # Memory is cleared on the default stream, which these streams do not wait for.
        gpu.call("cuStreamSynchronize", None)
        self._host = ctypes.c_void_p()
        gpu.call("cuMemAllocHost_v2", ctypes.byref(self._host), ctypes.c_size_t(8 * ROOM))
        self.result: list[int] = []

    def _somewhere(self) -> ctypes.c_void_p:
        """A stream, ordered behind all that this thread launched."""
        here = self._random.randrange(self.STREAMS)
        if here != self._last:
            self._log.record(self._events[self._last], self._streams[self._last])
            self._log.wait(self._streams[here], self._events[self._last])
            self._last = here
        return ctypes.c_void_p(self._streams[here])

    def _values(self, most: int) -> range:
        first = self._next_value
        self._next_value += self._random.randint(1, most)
        return range(first, self._next_value)

    def _launches(self) -> None:
        stream = self._somewhere()
        self._log.note(*self._values(20), stream=stream.value or 0)

    def _copies(self) -> None:
        self._log.gpu.call(
            "cuMemcpyDtoDAsync_v2", self._mirror, self._log.values, ctypes.c_size_t(800), self._somewhere()
        )

    def _copies_by_way_of_the_host(self) -> None:
        stream, size = self._somewhere(), ctypes.c_size_t(160)
        self._log.gpu.call("cuMemcpyDtoHAsync_v2", self._host, self._log.values, size, stream)
        self._log.gpu.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self._mirror.value + 1600), self._host, size, stream)

    def _copies_pageable_memory(self) -> None:
        """The source changes as soon as the call is back."""
        words = (ctypes.c_uint64 * 4)(*self._values(1), 5, 6, 7)
        to = ctypes.c_uint64(self._mirror.value + 4800)
        self._log.gpu.call("cuMemcpyHtoDAsync_v2", to, words, ctypes.c_size_t(32), self._somewhere())
        ctypes.memset(words, 0xFF, 32)

    def _fills(self) -> None:
        at = self._random.randrange(100)
        to = ctypes.c_uint64(self._mirror.value + 3200 + 4 * at)
        self._log.gpu.call("cuMemsetD32Async", to, self._values(1)[0], ctypes.c_size_t(8), self._somewhere())

    def _synchronises(self) -> None:
        stream = self._somewhere()
        event = self._events[self._last]
        if self._random.random() < 0.5:
            self._log.gpu.call("cuStreamSynchronize", stream)
        else:
            self._log.record(event, stream.value or 0)
            self._log.gpu.call("cuEventSynchronize", event)

    def _asks(self) -> None:
        stream = self._somewhere()
        event = self._events[self._last]
        self._log.record(event, stream.value or 0)
        if self._log.ready("cuEventQuery", event):
            assert self._log.ready("cuStreamQuery", stream)

    def _allocates_and_frees(self) -> None:
        for _ in range(3):
            address = ctypes.c_uint64()
            self._log.gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4096))
            self._log.gpu.call("cuMemsetD32Async", address, 1, ctypes.c_size_t(1024), self._somewhere())
            self._log.gpu.call("cuMemFree_v2", address)

    def _allocates_in_stream_order(self) -> None:
        """Freed on another stream than it was used on, at times, ordered behind that by an event."""
        address = ctypes.c_uint64()
        stream, size = self._somewhere(), ctypes.c_size_t(4096)
        self._log.gpu.call("cuMemAllocAsync", ctypes.byref(address), size, stream)
        self._log.gpu.call("cuMemsetD32Async", address, self._values(1)[0], ctypes.c_size_t(1024), stream)
        to = ctypes.c_uint64(self._mirror.value + 6400)
        self._log.gpu.call("cuMemcpyDtoDAsync_v2", to, address, ctypes.c_size_t(800), self._somewhere())
        self._log.gpu.call("cuMemFreeAsync", address, self._somewhere())

    def _changes_an_event(self) -> None:
        """A handle that comes back is another event."""
        stream = self._somewhere()
        event = self._log.event()
        self._log.record(event, stream.value or 0)
        self._log.wait(self._somewhere().value or 0, event)
        self._log.gpu.call("cuEventDestroy_v2", event)
        self._log.gpu.call("cuEventDestroy_v2", self._events[self._last])
        self._events[self._last] = self._log.event()

    def _captures(self) -> None:
        stream = self._somewhere()
        graph = self._log.graph(self._values(5), stream.value or 0)
        for _ in range(self._random.randint(1, 4)):
            self._log.gpu.replay(graph, self._somewhere().value or 0)
        self._log.gpu.call("cuGraphExecDestroy", ctypes.c_void_p(graph))

    def _changes_a_stream(self) -> None:
        """A handle that comes back is another stream."""
        stream = self._somewhere()
        self._log.gpu.call("cuStreamSynchronize", stream)
        self._log.gpu.call("cuStreamDestroy_v2", stream)
        self._streams[self._last] = self._log.gpu.stream()

    def run(self) -> None:
        often = [self._launches] * 10 + [self._copies, self._copies_by_way_of_the_host, self._fills, self._asks] * 3
        often += [self._allocates_in_stream_order, self._changes_an_event] * 2
        seldom = [
            self._synchronises,
            self._copies_pageable_memory,
            self._allocates_and_frees,
            self._captures,
            self._changes_a_stream,
        ]
        for _ in range(self._steps):
            self._random.choice(often + seldom)()
        self._log.gpu.call("cuStreamSynchronize", self._somewhere())

    def look(self) -> None:
        """When no thread captures any more: nobody may synchronise with a context meanwhile."""
        self.result = self._log.read() + self._log.copied(self._mirror, 1024)
