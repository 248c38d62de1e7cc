"""Loads of the simulated driver that stand for those of loads.py in a rehearsal: graphs of kernels that take time.

A load is made where `simulated` of cudasched/demo is on the path.
"""

from __future__ import annotations

import itertools
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any

from benchmarks.graphs.driver import Graphs

if TYPE_CHECKING:
    from cudasched.demo.simulated import Driver

FULL_GRID = 528
#: Kernels of the graphs of one step, in us, and how many of the graphs there are; between two of them, one launch.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "whole_step": ((20, 60, 35, 12, 90) * 30, 1),
    "compiled_inference": ((15, 40, 25) * 12, 1),
    "compiled_training": ((20, 60, 35) * 15, 2),
    "jax": ((30, 45, 120, 20) * 12, 2),
    "decode": ((8, 12, 20) * 8, 1),
    "piecewise": ((20, 35, 15, 20), 8),
    "torch_varying": (tuple(12 + 7 * (i * 37 % 29) for i in range(30)), 2),
}


class GraphLoad:
    """Launches its graphs one after another; an updated load changes each before its launch.

    Raises:
        ValueError: No such load.
    """

    def __init__(self, name: str) -> None:
        base = name.removesuffix("_updated")
        if base not in SHAPES:
            raise ValueError(f"unknown load {name!r}: one of {', '.join(SHAPES)}")
        import simulated

        self.durations_us, count = SHAPES[base]
        self._driver: Driver = simulated.Driver()
        self._graphs = Graphs()
        self._driver.make_current()
        self._functions = self._driver.functions(self.durations_us, FULL_GRID)
        self._stream = self._driver.stream(0)
        self._updated = name.endswith("_updated")
        self._between = count > 1
        self._captures = [[self._captured() for _ in range(2)] for _ in range(count)]
        self._executables = [self._graphs.instantiate(captured[0]) for captured in self._captures]
        self._turns = itertools.cycle([1, 0])
        self._nodes = [self._graphs.kernel_nodes(captured[0])[:8] for captured in self._captures]
        self._by_node = base in ("decode", "jax")

    def _captured(self) -> int:
        graph = c_void_p()
        self._driver.begin_capture(self._stream)
        for us in self.durations_us:
            self._driver.launch(self._functions[us], FULL_GRID, self._stream)
        self._graphs.call("cuStreamEndCapture", self._stream, byref(graph))
        return graph.value or 0

    def make_current(self) -> None:
        """Makes the context the calling thread's."""
        self._driver.make_current()

    def step(self) -> None:
        """Launches one step."""
        turn = next(self._turns)
        for place, executable in enumerate(self._executables):
            if self._updated and self._by_node:
                for node, parameters in self._nodes[place]:
                    self._graphs.set_kernel(executable, node, parameters)
            elif self._updated:
                self._graphs.update(executable, self._captures[place][turn])
            self._graphs.launch(executable, self._stream.value or 0)
            if self._between:
                self._driver.launch(self._functions[self.durations_us[0]], FULL_GRID, self._stream)

    def synchronize(self) -> None:
        """Waits for everything launched."""
        self._driver.synchronize(self._stream)

    def steps(self) -> Any:
        """The steps as a program's generator."""
        yield
        self.make_current()
        while True:
            self.step()
            yield self
