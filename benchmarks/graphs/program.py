"""Loads of graphs on the simulated driver, and a server in its program's process, for benchmarks/breadth/program.py.

With `--beside SERVER` the server is on a thread and a stream of its own, in regions; then one more command is answered,
while the program's steps go on:

    -> {"command": "run", ...}         <- {"event": "result", ...}  as in cudasched/demo/client.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.breadth import program


def simulated_steps(load: str) -> tuple[Iterator[Any], Callable[[Any], object], Callable[[int], dict[str, Any]]]:
    """A load of the simulated driver, of graphs or not: its steps, how it is read, its kernels."""
    from benchmarks.graphs.simulated_loads import SHAPES, GraphLoad

    if load.removesuffix("_updated") not in SHAPES:
        return program.simulated_steps(load)

    def steps() -> Iterator[Any]:
        yield
        own = GraphLoad(load).steps()
        next(own)
        yield from own

    def kernels(_: int) -> dict[str, Any]:
        durations_us, count = SHAPES[load.removesuffix("_updated")]
        each = [float(us) for us in durations_us] + [float(durations_us[0])] * (count > 1)
        return program.counted(each * count, 1)

    return steps(), lambda made: made.synchronize(), kernels


class Beside:
    """The server in the program's own process: built when the program is, in regions of its class."""

    def __init__(self, name: str, simulate: bool, scale: float) -> None:
        import cudasched  # before the first CUDA call: the import installs the hook where nothing else has

        self._cudasched = cudasched
        self._name, self._simulate, self._scale = name, simulate, scale
        self._client: Any = None

    def build(self) -> None:
        """Builds and warms it up."""
        import client

        sys.setswitchinterval(1e-4)  # else any thread may hold the interpreter for 5 ms
        with self._cudasched.region("latency"):
            if self._simulate:
                import simulated

                workload: Any = simulated.latency_workload(self._name, own_stream=True)
            else:
                import workloads

                workload = workloads.latency_workload(self._name, own_stream=True)
        self._cudasched.bind_stream(workload.stream, "latency")
        regions = (
            lambda slo_ms: self._cudasched.region("latency", slo_ms=slo_ms or None),
            lambda: self._cudasched.region("best_effort"),
        )
        self._client = client.Client({self._name: workload}, {}, self._scale, regions)
        self._client.warm_up()

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """Serves requests as it is told."""
        served: dict[str, Any] = self._client.run(**command)
        return served
