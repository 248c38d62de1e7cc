"""What programs do on a simulated device for as long as they live, and how one of them is killed at a step of its way.

For programs of program.py: `from lives import *`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from logged import ROOM, Log
from program import Gpu, Worker

VALUES = [0, 1, 2, 3, 4, 5, 4, 5, 6]


def best_effort() -> None:
    """A little of everything that is deferred, and of what waits for it."""
    gpu = Gpu()
    log, stream = Log(gpu), gpu.stream()
    event = log.event()
    log.note(0)
    gpu.synchronize()
    log.note(1, 2, stream=stream)
    log.record(event, stream)
    log.wait(0, event)
    log.note(3)
    graph = log.graph([4, 5], stream)
    for _ in range(2):
        gpu.replay(graph, stream)
    gpu.synchronize()
    log.note(6)
    assert log.read() == VALUES


def latency() -> None:
    """Two requests in regions, the second one nested, and a launch outside them."""
    import cudasched

    gpu = Gpu()
    log = Log(gpu)
    stream = gpu.stream()
    gpu.synchronize()  # the log is cleared on the default stream, which this one does not wait for
    with cudasched.region("latency"):
        log.note(0, 1, 2, stream=stream)
        gpu.synchronize()
    with cudasched.region("latency"), cudasched.region("latency"):
        graph = log.graph([4, 5], stream)
        log.note(3, stream=stream)
        for _ in range(2):
            gpu.replay(graph, stream)
        gpu.synchronize()
    log.note(6)
    assert log.read() == VALUES


def lingering() -> None:
    """Latency work that nobody waits for: the engine's own thread asks the driver whether it is done."""
    gpu = Gpu()
    gpu.launch(us=10_000)
    time.sleep(0.06)


def killed_at(thread: str, step: int, life: Callable[[], None]) -> int:
    """Lives it in a child that is killed at that step of its threads of that name (double.hpp); `main`: of the first.

    Returns:
        The child's exit code: -9, or 0 if its way is shorter.
    """
    child = os.fork()
    if child == 0:
        name = Path("/proc/self/comm").read_text().strip() if thread == "main" else thread
        os.environ["CUDASCHED_SIM_KILL_AT"] = f"{name}:{step}"
        life()
        raise SystemExit
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Survivor(Worker):
    """Goes on and on, and looks whether all that it launched has run, once and in order.

    Attributes:
        count: Rounds that came to their end.
    """

    def __init__(self, gpu: Gpu, *, latency: bool) -> None:
        self.count = 0
        self._enough = threading.Event()
        self._inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if latency:
            import cudasched

            self._inside = lambda: cudasched.region("latency")
        super().__init__(gpu, lambda: self._live(gpu))

    def _live(self, gpu: Gpu) -> None:
        while not self._enough.is_set():
            log = Log(gpu)
            launched = 0
            while launched + 8 <= ROOM and not self._enough.is_set():
                with self._inside():
                    log.note(*range(launched, launched + 8))
                    gpu.synchronize()
                launched += 8
                self.count += 1
                time.sleep(0.002)
            assert log.read() == list(range(launched)), "lost or reordered"
            log.free()

    def stop(self) -> int:
        self._enough.set()
        self.join()
        return self.count
