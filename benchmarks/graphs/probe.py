"""One process of the figures: makes a graph of so many nodes, and measures what it costs there; run by path.

What it finds goes to stdout as one line of JSON. Under `cudasched run` it is an unmodified program, which asks
cudasched at the end what that has counted. Any mode can be compared with any other: the work is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from ctypes import byref, c_int, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python" / "cudasched" / "demo")]

from benchmarks.graphs.driver import Graphs  # noqa: E402

#: Executable graphs that memory is divided by: the driver gives it out in large pieces.
COPIES = 8
INSTANTIATIONS = 15
#: Launches between two waits, in which no queue fills up.
BATCH = 20
#: Nodes of the graph whose launch is timed.
SMALL = 40
#: Slices are awaited so long.
PATIENCE_S = 60.0


class Captures:
    """Makes graphs of small kernels on one stream, by torch or by launches on the simulated driver."""

    def __init__(self, simulate: bool) -> None:
        self._keep: list[Any] = []
        self.driver = Graphs()
        self._simulate = simulate
        if simulate:
            from simulated import Driver

            self._simulated = Driver()
            self._simulated.make_current()
            self._function = self._simulated.functions([3], 528)[3]
            self._stream = self._simulated.stream(0)
            self.stream = self._stream.value or 0
        else:
            import torch  # type: ignore[import-not-found,unused-ignore]

            self._torch = torch
            self._tensor = torch.zeros(1 << 16, device="cuda")
            self._side = torch.cuda.Stream()
            self.stream = self._side.cuda_stream

    def graph(self, nodes: int) -> int:
        """A graph of so many kernels, one after another."""
        if self._simulate:
            graph = c_void_p()
            self._simulated.begin_capture(self._stream)
            for _ in range(nodes):
                self._simulated.launch(self._function, 528, self._stream)
            self.driver.call("cuStreamEndCapture", self._stream, byref(graph))
            return graph.value or 0
        captured = self._torch.cuda.CUDAGraph(keep_graph=True)
        with self._torch.cuda.graph(captured, stream=self._side):
            for _ in range(nodes):
                self._tensor.add_(1.0)
        self._keep.append(captured)
        return int(captured.raw_cuda_graph())


def instantiate_ns(driver: Graphs, graph: int) -> float:
    """What an instantiation takes its caller, the median of some."""
    taken = []
    for _ in range(INSTANTIATIONS + 2):
        began = time.perf_counter_ns()
        executable = driver.instantiate(graph)
        taken.append(time.perf_counter_ns() - began)
        driver.destroy(executable)
    return statistics.median(taken[2:])


def launch_ns(driver: Graphs, executable: int, stream: int, launches: int) -> float:
    """CPU time of the launching thread for one launch, the median over batches."""
    each = []
    for _ in range(max(3, launches // BATCH)):
        began = time.thread_time_ns()
        for _ in range(BATCH):
            driver.launch(executable, stream)
        each.append((time.thread_time_ns() - began) / BATCH)
        driver.synchronize()
    return statistics.median(each)


def per_s(driver: Graphs, executable: int, stream: int, seconds: float) -> float:
    """Launches a second, one after another, waited for now and then as a training loop does."""
    driver.synchronize()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for _ in range(BATCH):
            driver.launch(executable, stream)
        driver.synchronize()
        count += BATCH
    return count / (time.monotonic() - began)


def state(managed: bool) -> dict[str, Any]:
    """What cudasched counts in this process; nothing where it is not in it."""
    if not managed:
        return {}
    import cudasched

    return asdict(cudasched.state())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    captures = Captures(options.simulate)
    driver, stream = captures.driver, captures.stream
    managed = os.environ.get("CUDASCHED_CLASS") is not None
    graph = captures.graph(options.nodes)
    found: dict[str, Any] = {"instantiate_ns": instantiate_ns(driver, graph)}
    driver.launch(driver.instantiate(captures.graph(1)), stream)  # what the first launch of all sets up
    driver.synchronize()
    before, free = state(managed), driver.free_bytes()
    executables = [driver.instantiate(graph) for _ in range(COPIES)]
    for executable in executables:
        driver.launch(executable, stream)
    driver.synchronize()
    if options.await_slices and "graphs_sliced" in before:
        until = time.monotonic() + PATIENCE_S
        while state(managed)["graphs_sliced"] - before["graphs_sliced"] < COPIES and time.monotonic() < until:
            if state(managed)["graph_builds"] - before["graph_builds"] >= COPIES:
                until = min(until, time.monotonic() + 1)  # what is built by then is in place, or stays whole
            for executable in executables:
                driver.launch(executable, stream)
            driver.synchronize()
            time.sleep(0.01)
    found["bytes"] = (free - driver.free_bytes()) / COPIES
    after = state(managed)
    found["state"] = {name: value for name, value in after.items() if "graph" in name or "slice" in name}
    for name in ("graph_builds", "graph_build_ns", "graphs_sliced"):
        if name in after:
            found[name] = after[name] - before[name]
    found["per_s"] = per_s(driver, executables[0], stream, options.seconds)
    small = driver.instantiate(captures.graph(SMALL))
    for _ in range(3):
        launch_ns(driver, small, stream, 10 * BATCH)
    found["launch_ns"] = launch_ns(driver, small, stream, options.launches)
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--launches", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--await-slices", action="store_true")
    options = parser.parse_args()
    protocol = os.dup(1)
    os.dup2(2, 1)
    driver = Graphs()
    driver.call("cuInit", 0)
    devices = c_int()
    driver.call("cuDeviceGetCount", byref(devices))
    os.write(protocol, (json.dumps(measure(options)) + "\n").encode())
    os._exit(0)  # the context goes with the process


if __name__ == "__main__":
    sys.exit(main())
